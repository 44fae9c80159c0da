"""A loaded engine behind its port: every rank's pulse, rank 0's HTTP thread, its loop, and the
lines that come on standard input, from the start of serving to its end.

Standard input is answered line by line beside HTTP: on a terminal as a chat, on a pipe until it
ends. The engine ends with it where a terminal was closed or a pipe brought any line; a pipe that
brings nothing, or /dev/null, leaves it serving.
"""

import dataclasses
import importlib.metadata
import os
import threading
import time

from engine.api.app import Api, Server
from engine.errors import EngineError, FaultError
from engine.hub import Hub
from engine.loop import Input, Local, Loop
from engine.serve import line_chat, sampling_for
from engine.telemetry import Board

STOP_SECONDS = 3.0      # for connections to close at the end


def _beats(pulse, engine):
    """From now on every beat of this rank says how it is."""
    backend, host = engine.backend, engine.config.backend == "host"

    def facts():
        return {"round": engine.ledger.number, "backend": engine.config.backend,
                "memory": {"resident": _resident()} if host else
                {"resident": _resident(), "device": backend.used_bytes()},
                "collectives": dict(engine.world.seconds)}
    pulse.serves(facts)


def follow(engine, pulse):
    """Every rank but 0, until rank 0 stops."""
    _beats(pulse, engine)
    engine.follow()


def serve(engine, chat, listening, pulse, desk):
    """Rank 0, until it is asked to stop; the exit code. listening: engine.api.app.listen's."""
    config, world = engine.config, engine.world
    _beats(pulse, engine)
    names = served_names(config)
    hub, board = Hub(engine.meters), Board(_facts(config, world, names[0]), pulse)
    board.update(engine)
    defaults = dataclasses.replace(sampling_for(chat, config, 0),
                                   max_tokens=config.max_tokens or config.context)
    api = Api(hub, chat, board, defaults, names, config.context, int(time.time()), config.api_key)
    server = Server(api, listening)
    host = f"[{server.host}]" if ":" in server.host else server.host
    desk.say(f"sparkgrid: serving {names[0]} on http://{host}:{server.port}")
    loop = Loop(engine, hub, pulse, board, config.drain,
                lambda text: desk.say(f"sparkgrid: {text}"))
    loop.lines = Lines(hub, chat, config, desk)
    try:
        loop.run()
    except Exception as error:
        loop.lines.stop()
        loop.fail(error if isinstance(error, EngineError) else FaultError(
            f"rank 0 met a bug: {error!r}", "its traceback is among the engine's messages",
            rank=0))
        server.stop(STOP_SECONDS)
        raise
    loop.lines.stop()
    server.stop(STOP_SECONDS)
    engine.stop()
    return loop.lines.code


def served_names(config):
    """The model's names in requests: the one given, or the folder's."""
    return (config.served_name or os.path.basename(os.path.realpath(config.model)),)


def _facts(config, world, name):
    try:
        version = importlib.metadata.version("sparkgrid")
    except importlib.metadata.PackageNotFoundError:     # run from its folder, not installed
        version = "not installed"
    return {"version": version, "model": name,
            "world": world.size, "placement": config.placement,
            "split": config.split and world.size > 1, "replicate": config.replicate,
            "kv_dtype": config.kv_dtype, "context": config.context, "parallel": config.parallel,
            "backend": config.backend, "started": time.time()}


def _resident():
    """Resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Lines:
    """The thread that answers standard input. ended: the engine should end too; code: with this."""

    def __init__(self, hub, chat, config, desk):
        self.ended, self.code = False, 0
        self._input = Input(desk.stdin)
        self._desk = dataclasses.replace(desk, stdin=self._input)
        self._thread = threading.Thread(target=self._run, args=(hub, chat, config), name="lines",
                                        daemon=True)
        self._thread.start()

    def _run(self, hub, chat, config):
        code = line_chat(Local(hub), chat, config, self._desk)
        if self._input.lines or (self._desk.interactive and not self._input.stopped):
            self.code, self.ended = code, True

    def stop_reply(self):
        """Stop the reply that a terminal is reading; False where there is none."""
        if self._desk.interactive and self._desk.replying:
            self._desk.interrupt.pending = True
            return True
        return False

    def stop(self):
        """Stop waiting for lines."""
        self._input.stopped = True
        self._thread.join(1)
