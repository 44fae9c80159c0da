"""Holds the port for good while the engine behind it comes and goes:
`python -m engine.front OPTIONS -- COMMAND...`.

OPTIONS are the engine's own, checked by the same rules. The front listens where they say, and runs
`COMMAND... OPTIONS --host=127.0.0.1 --port=P` with a port P that it reserves for the engine.

| the engine | a request gets |
|---|---|
| answers | its answer, byte by byte |
| loads, or is started again | 503 with Retry-After, in the OpenAI error shape |
| breaks off before the answer | the same |
| breaks off in a stream of events | an error event, and the stream's end |

The front starts the engine again after any end but these: exit code 0, or a refusal of the command
line, the model or the plan before it has ever served. The pause is 1, 2, 4 .. 30 s, from 1 s again
once it has served for a minute. SIGTERM and SIGINT are passed on as SIGTERM, a second one kills. No
process of the engine outlives it here, stopped ones included (engine.keeper).
"""

import asyncio
import contextlib
import os
import signal
import sys
import time

from engine.config import HelpWanted, parse
from engine.errors import EngineError, ModelError, PlanError, UsageError
from engine.keeper import (become_reaper, cannot_start, descendants, exit_code, kill,
                           prepare_child, sweep)
from engine.relay import HEAD_END, Answer, closing, refusal

FIRST_PAUSE, LONGEST_PAUSE = 1, 30      # seconds
STEADY = 60.0               # seconds of service after which a fault counts as the first
HEAD_SECONDS = 60.0         # for a client to send a request's head
PROBE = 0.1                 # seconds between two tries whether the engine answers
STOP_SECONDS = 20.0         # beyond --drain, for the engine to end
FLUSH_SECONDS = 2.0         # for the last answers to leave
PIECE = 1 << 16             # bytes read at a time; the longest head
LOOPBACK = "127.0.0.1"
HOPELESS = (UsageError.exit_code, ModelError.exit_code, PlanError.exit_code)


def main(argv):
    """argv without the program's name -> exit code."""
    try:
        options, command = _split(argv)
        config = _checked(options)
        become_reaper()
        return asyncio.run(Front(config, command + options).run())
    except HelpWanted as wanted:
        print(wanted.text, end="")
        return 0
    except EngineError as e:
        print(e.report(), file=sys.stderr)
        return e.exit_code


def _split(argv):
    if "--" not in argv[:-1]:
        raise UsageError("there is no command after --", "python -m engine.front --port 8114 -- "
                         "mpirun -np 6 python -m engine")
    at = argv.index("--")
    return argv[:at], argv[at + 1:]


def _checked(options):
    config = parse(options)
    if config.command or config.one_reply:
        raise UsageError(f"{config.command or 'a prompt'} ends by itself: there is nothing to "
                         "supervise", "leave out --supervise")
    return config


def say(text):
    """A line for the user."""
    print(f"sparkgrid: {text}", file=sys.stderr, flush=True)


class Front:
    """The port and the engine behind it. config: the engine's Config. command: list of words."""

    def __init__(self, config, command):
        self._config, self._command = config, command
        self._process = None            # the engine's, while it runs
        self._port = None               # the engine's
        self._up = None                 # time.monotonic since when the engine answers
        self._why, self._since = "the engine loads", time.time()
        self._stopping = None           # asyncio.Event: asked to end
        self._clients = set()

    async def run(self):
        """Serve until the engine has ended for good; its exit code."""
        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._stop)
        try:
            public = await asyncio.start_server(self._client, self._config.host,
                                                self._config.port, limit=PIECE, backlog=512)
        except OSError as e:
            raise PlanError(f"port {self._config.port} of {self._config.host} cannot be served: "
                            f"{os.strerror(e.errno) if e.errno and e.errno > 0 else e}",
                            "stop what listens there, or take another: --port 0 takes a free one"
                            ) from None
        # Bound and never listening: nobody else is given this port, and the engine, which sets
        # SO_REUSEADDR as asyncio does, can still listen on it.
        reserved = await asyncio.start_server(lambda r, w: None, LOOPBACK, 0, start_serving=False)
        self._port = reserved.sockets[0].getsockname()[1]
        host, port = public.sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        say(f"supervising on http://{host}:{port}, the engine at port {self._port} behind it")
        code = await self._keep()
        public.close()
        if self._clients:
            await asyncio.wait(self._clients, timeout=FLUSH_SECONDS)
        reserved.close()
        return code

    # --- the engine -----------------------------------------------------------------------------

    async def _keep(self):
        """Start the engine again and again; the exit code to leave with."""
        pause = FIRST_PAUSE
        while True:
            code, served = await self._once()
            await self._swept()
            if self._stopping.is_set() or code == 0 or (code in HOPELESS and served is None):
                return code
            if served is not None and served >= STEADY:
                pause = FIRST_PAUSE
            self._why = f"the engine ended with exit code {code}; it starts again"
            self._since = time.time()
            say(f"the engine ended with exit code {code}; starting again in {pause} s")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return 0
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _once(self):
        """Run the engine once: (its exit code, seconds that it served or None)."""
        words = [*self._command, f"--host={LOOPBACK}", f"--port={self._port}"]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
                preexec_fn=prepare_child)
        except OSError as e:
            self._stopping.set()        # the same command is not found a second time either
            return cannot_start(words, e), None
        probe = asyncio.ensure_future(self._probe())
        code = exit_code(await self._process.wait())
        probe.cancel()
        served = None if self._up is None else time.monotonic() - self._up
        self._process = self._up = None
        return code, served

    async def _probe(self):
        """Wait for the engine's first answer; while it loads, it listens and says nothing."""
        while self._up is None:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(LOOPBACK, self._port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
                                 b"\r\n")
                    if await reader.read(1):
                        self._up = time.monotonic()
                finally:
                    writer.close()
            await asyncio.sleep(PROBE)

    async def _swept(self):
        """Kill what the engine left."""
        give_up = time.monotonic() + FLUSH_SECONDS
        while sweep() and time.monotonic() < give_up:
            await asyncio.sleep(0.01)

    def _stop(self):
        """SIGTERM or SIGINT has come."""
        if self._stopping.is_set():
            return kill(descendants(os.getpid()))
        self._stopping.set()
        self._why, self._since = "the engine is being stopped", time.time()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            asyncio.get_running_loop().call_later(
                self._config.drain + STOP_SECONDS, lambda: kill(descendants(os.getpid())))

    # --- the clients ----------------------------------------------------------------------------

    async def _client(self, reader, writer):
        """One connection: a request, its answer."""
        task = asyncio.current_task()
        self._clients.add(task)
        try:
            await self._exchange(reader, writer)
            await writer.drain()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            writer.transport.abort()        # a client that leaves, or speaks no HTTP
        finally:
            self._clients.discard(task)
            writer.close()

    async def _exchange(self, reader, writer):
        try:
            head = await asyncio.wait_for(reader.readuntil(HEAD_END), HEAD_SECONDS)
            method, head = closing(head)
        except (ValueError, asyncio.LimitOverrunError):
            writer.write(refusal("this is no HTTP/1.1 request, or its head is larger than "
                                 f"{PIECE:,} bytes", "400 Bad Request"))
            return
        try:
            if self._up is None:
                raise ConnectionRefusedError
            engine_reader, engine_writer = await asyncio.open_connection(LOOPBACK, self._port)
        except OSError:
            writer.write(refusal(f"the engine takes no requests: {self._why}", facts={
                "status": "down", "reason": self._why, "since": self._since}))
            return
        answer = Answer(method)
        down = asyncio.ensure_future(_download(engine_reader, writer, answer))
        up = asyncio.ensure_future(_upload(head, reader, engine_writer))
        try:
            await asyncio.wait((down, up), return_when=asyncio.FIRST_COMPLETED)
            if not down.done():             # the client has left: so the engine frees its pages
                return
            await down
            end = answer.mend("rank 0 of the engine ended in the middle of this reply; it is "
                              "being stopped" if self._stopping.is_set() else
                              "rank 0 of the engine ended in the middle of this reply; it starts "
                              "again: ask again in a moment")
            if end:
                writer.write(end)
            elif not answer.done:
                raise ConnectionAbortedError
        finally:
            for task in (down, up):
                task.cancel()
            engine_writer.close()


async def _download(engine_reader, writer, answer):
    """Pass the engine's answer on, to its end."""
    try:
        while data := await engine_reader.read(PIECE):
            writer.write(answer.feed(data))
            await writer.drain()
        answer.ended()
    except OSError:             # the engine was killed, or the client has left
        pass


async def _upload(head, reader, engine_writer):
    """Pass a request on, to the moment the client leaves."""
    data = head
    while data:
        with contextlib.suppress(OSError):      # the answer says what became of the engine
            engine_writer.write(data)
            await engine_writer.drain()
        try:
            data = await reader.read(PIECE)
        except OSError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
