"""Rank 0's serving loop: between two rounds it takes what the HTTP thread asks, hands out what the
round gave, and looks whether every rank is alive and whether it is time to end.

An idle engine makes an empty round every second, so that a rank which does not follow is noticed
before a request needs it. On SIGTERM or Ctrl-C nothing new is taken, running replies may finish for
`drain` seconds, and what is left then is cut, with an error that says so.
"""

import queue
import select
import signal
import time

from engine.engine import Event
from engine.errors import Unavailable
from engine.hub import DRAINING, FAILED, SERVING, Ticket

HEARTBEAT = 1.0         # seconds between two rounds of an idle engine
TICK = 0.2              # the longest sleep: how late a signal or a lost rank is noticed
REPORT = 0.25           # seconds between two telemetry snapshots
LINGER = 3.0            # seconds that health and errors stay readable after a fault


class Loop:
    """The loop of one engine. board: engine.telemetry.Board. pulse: engine.pulse.Pulse.

    say(text): one line to the user.
    """

    def __init__(self, engine, hub, pulse, board, drain, say):
        self._engine, self._hub, self._pulse, self._board = engine, hub, pulse, board
        self._drain, self._say = drain, say
        self._ending = None         # time.monotonic when it was asked to end
        self.lines = None           # Lines, where standard input is answered too

    def end(self, *_):
        """Asked to end; a signal handler too, so it only sets."""
        if self._ending is None:
            self._ending = time.monotonic()

    def _interrupt(self, *_):
        """Ctrl-C: the end of the reply that a terminal reads, else of all."""
        if self.lines is None or not self.lines.stop_reply():
            self.end()

    def run(self):
        """Serve until asked to end. EngineError where the engine is lost: then call `fail`."""
        engine, hub = self._engine, self._hub
        signal.signal(signal.SIGTERM, self.end)         # to the end of the process
        signal.signal(signal.SIGINT, self._interrupt)
        hub.become(SERVING, "")
        last = reported = 0.0
        while not self._over():
            hub.take(engine)
            now = time.monotonic()
            self._board.moved = now
            if error := self._pulse.error():
                raise error
            if engine.busy or now - last >= HEARTBEAT:
                hub.deliver(engine.step())
                last = time.monotonic()
            else:
                hub.wait(min(TICK, HEARTBEAT - (now - last)))
            if now - reported >= REPORT:
                self._board.update(engine)
                reported = now
            if self.lines is not None and self.lines.ended:
                self.end()
        hub.take(engine)        # what came at the last moment is refused, not left without answer

    def _over(self):
        """Whether to leave now; begins to drain, and cuts what is left at its end."""
        if self._ending is None:
            return False
        if self._hub.state == SERVING:
            self._hub.become(DRAINING, "it is being stopped")
            if self._hub.busy:
                self._say(f"stopping: replies may finish for {self._drain:g} s")
        if not self._hub.busy:
            return True
        if time.monotonic() - self._ending < self._drain:
            return False
        count = self._hub.cut(self._engine, Unavailable(
            f"the engine was stopped; this reply was cut after {self._drain:g} s of grace",
            "ask again when it is back"))
        self._say(f"replies cut after {self._drain:g} s: {count}")
        return True

    def fail(self, error):
        """The engine is lost: every reply ends with the error, and /health says it for a while."""
        self._hub.fail(error)
        self._board.fail(error)
        until = time.monotonic() + LINGER
        while time.monotonic() < until and self._hub.state == FAILED:
            self._board.moved = time.monotonic()
            time.sleep(TICK)


# ---- the lines of standard input ---------------------------------------------------------------

class _LocalTicket(Ticket):
    """A Ticket that a thread without an event loop waits for."""

    def __init__(self):
        self.answer, self._inbox = queue.Queue(), queue.Queue()
        self.request, self.gone = None, False

    def settle(self, refusal=None):
        self.answer.put(refusal)

    def put(self, found):
        self._inbox.put(found)

    def next(self):
        """The next list of Output."""
        found = self._inbox.get()
        if isinstance(found, Exception):
            raise found
        return found


class Local:
    """The engine as another thread of rank 0 sees it, one request at a time: engine.serve's way."""

    busy = True

    def __init__(self, hub):
        self._hub, self._ticket = hub, None

    def submit(self, ids, sampling):
        """As Engine.submit."""
        self._ticket = _LocalTicket()
        self._hub.command(self._ticket, ids, sampling)
        refusal = self._ticket.answer.get()
        if refusal is not None:
            raise refusal
        return self._ticket.request

    def cancel(self, request):
        """As Engine.cancel."""
        self._hub.command(self._ticket)

    def step(self):
        """The next tokens of the request: [Event]."""
        return [Event(self._ticket.request, o.token, o.finish_reason) for o in self._ticket.next()]


class Input:
    """Standard input by lines, for a thread that must be able to stop waiting.

    lines: how many have been read. stopped: set it, and the next wait ends as at the input's end.
    """

    def __init__(self, stream):
        self._stream, self.lines, self.stopped = stream, 0, False
        self._data, self._done = b"", False

    def readline(self):
        """The next line with its newline, b"" at the end."""
        while b"\n" not in self._data and not self._done:
            if self.stopped:
                return b""
            if select.select([self._stream], [], [], TICK)[0]:
                data = self._stream.raw.read(1 << 16)
                self._done = not data
                self._data += data or b""
        line, newline, self._data = self._data.partition(b"\n")
        self.lines += bool(line or newline)
        return line + newline
