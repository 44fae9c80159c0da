"""Between the HTTP thread and the engine's loop: requests go in, tokens come out, nothing blocks
either side.

The HTTP thread (asyncio) submits and cancels; the loop thread takes these commands between two
rounds and delivers what a round gave. A submission is answered by the loop, so a refusal is known
before anything of a reply is sent.

| state | new requests |
|---|---|
| starting, draining, failed, closed | Unavailable, with the reason |
| serving | taken |
"""

import asyncio
import threading
from collections import deque
from typing import NamedTuple

from engine.errors import RequestError, Unavailable

STARTING, SERVING, DRAINING = "starting", "serving", "draining"
FAILED, CLOSED = "failed", "closed"     # nobody takes commands any more


class Output(NamedTuple):
    """One token of a reply. logprob and top ((id, logprob), ...) where asked for, else None, ().

    cached: prompt tokens taken from a kept conversation, on the first token; else 0.
    """

    token: int
    finish_reason: str | None
    logprob: float | None
    top: tuple
    cached: int


class Ticket:
    """A submitted request as the HTTP thread holds it: `async for outputs in ticket` gives lists of
    Output as they come, the last one with a finish reason. EngineError where the engine failed."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._inbox = asyncio.Queue()
        self.answer = self._loop.create_future()    # None, or the refusal raised
        self.request = None                         # the engine's id; the loop thread's to know
        self.gone = False                           # cancelled before the loop saw it
        self.ended = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.ended:
            raise StopAsyncIteration
        found = await self._inbox.get()
        while not self._inbox.empty() and not isinstance(found, Exception):
            more = self._inbox.get_nowait()
            if isinstance(more, Exception):
                self._inbox.put_nowait(more)
                break
            found += more
        if isinstance(found, Exception):
            self.ended = True
            raise found
        self.ended = found[-1].finish_reason is not None
        return found

    # --- from the loop thread -------------------------------------------------------------------

    def _later(self, work, *args):
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:        # the HTTP thread has ended
            pass

    def _settle(self, refusal):
        if not self.answer.done():
            if refusal is None:
                self.answer.set_result(None)
            else:
                self.answer.set_exception(refusal)

    def settle(self, refusal=None):
        self._later(self._settle, refusal)

    def put(self, found):
        """found: a list of Output, or the exception that ends the reply."""
        self._later(self._inbox.put_nowait, found)


class Hub:
    """The meeting point: the HTTP thread calls submit and cancel, the loop thread all the rest.

    meters: engine.telemetry.Meters, whose log gets refusals and faults.
    """

    def __init__(self, meters):
        self.state, self.reason = STARTING, "the model is loading"
        self._meters = meters
        self._commands = deque()
        self._came = threading.Event()
        self._tickets = {}

    # --- the HTTP thread ------------------------------------------------------------------------

    async def submit(self, ids, sampling):
        """A Ticket, once the engine has taken the request. RequestError, Unavailable else."""
        if self.state != SERVING:
            raise Unavailable(f"the engine takes no requests: {self.reason}")
        ticket = Ticket()
        self.command(ticket, ids, sampling)
        if self.state in (FAILED, CLOSED):      # `_empty` may have missed this command
            raise Unavailable(f"the engine takes no requests: {self.reason}")
        try:
            await ticket.answer
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise
        return ticket

    def cancel(self, ticket):
        """The client has left, or has enough; its pages are free within a round."""
        self.command(ticket)

    async def end(self, request):
        """End a request of somebody's by the engine's id; whether there was one."""
        ticket = Ticket()
        self.command(ticket, request)
        if self.state in (FAILED, CLOSED):
            return False
        try:
            await ticket.answer
        except (RequestError, Unavailable):
            return False
        return True

    def command(self, *command):
        """A ticket with what to submit, or alone to cancel it, or with a request's id to end that
        one; from any thread."""
        self._commands.append(command)
        self._came.set()

    # --- the loop thread ------------------------------------------------------------------------

    @property
    def busy(self):
        """Whether a reply is being made for somebody."""
        return bool(self._tickets)

    def wait(self, seconds):
        """Until a command comes, or that long."""
        self._came.wait(seconds)

    def take(self, engine):
        """Carry out the commands that have come."""
        self._came.clear()
        while self._commands:
            ticket, *what = self._commands[0]       # stays there until it is answered
            if not what:
                ticket.gone = True
                if self._tickets.pop(ticket.request, None) is not None:
                    engine.cancel(ticket.request)
            elif len(what) == 1:
                ticket.settle(self._end(engine, *what))
            elif self.state != SERVING:
                ticket.settle(Unavailable(f"the engine takes no requests: {self.reason}"))
            elif not ticket.gone:
                try:
                    ticket.request = engine.submit(*what)
                except RequestError as refusal:
                    self._meters.note("refusal", refusal.message)
                    ticket.settle(refusal)
                else:
                    self._tickets[ticket.request] = ticket
                    ticket.settle()
            self._commands.popleft()

    def _end(self, engine, request):
        """End one request; a RequestError where it is not there."""
        ticket = self._tickets.pop(request, None)
        if ticket is None:
            return RequestError(f"there is no request {request}")
        engine.cancel(request)
        ticket.put(Unavailable("this request was ended at the engine, by its operator"))
        return None

    def deliver(self, events):
        """Hand a round's tokens out."""
        for e in events:
            ticket = self._tickets.get(e.id)
            if ticket is not None:
                ticket.put([Output(e.token, e.finish_reason, e.logprob, e.top, e.cached)])
                if e.finish_reason:
                    del self._tickets[e.id]

    def cut(self, engine, error):
        """End every running reply with an error, and free its pages; how many there were."""
        count = len(self._tickets)
        for request, ticket in self._tickets.items():
            engine.cancel(request)
            ticket.put(error)
        self._tickets.clear()
        return count

    def become(self, state, reason):
        """Change how new requests are answered."""
        self.state, self.reason = state, reason

    def fail(self, error):
        """The engine is lost: end every reply with the error, and refuse what still comes."""
        self.become(FAILED, error.message)
        self._meters.note("fault", error.message)
        for ticket in self._tickets.values():
            ticket.put(error)
        self._tickets.clear()
        self._empty()

    def close(self):
        """The loop has ended: refuse what it has not taken, and what still comes."""
        if self.state != FAILED:
            self.become(CLOSED, "it was stopped")
        self._empty()

    def _empty(self):
        while self._commands:
            ticket, *_ = self._commands.popleft()
            ticket.settle(Unavailable(f"the engine takes no requests: {self.reason}"))
