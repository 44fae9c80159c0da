"""`python -m engine`, alone or under mpirun: parse, join the world, load, serve, leave by one code.

A start is a row of phases. After each, every rank tells the others how it fared (`world.agree`):
when one failed, rank 0 prints the error and its remedy, and all leave with the error's exit code,
before anything more is done. The phases go from cheap to dear: a wrong option, folder or prompt is
refused before a kernel is compiled or a weight is read.

Exit codes: engine/errors.py.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback

from engine.config import (HelpWanted, fit, parse, prepare_environment, read_prompt,
                           under_mpirun)
from engine.errors import (BUG, INTERRUPTED, EngineError, FaultError, ModelError, PlanError,
                           RequestError, WorldError)
from engine.launch import run_worlds
from engine.progress import Progress, on_terminal
from engine.pulse import Pulse
from engine.release import IdsOnly, named_shape
from engine.shape import MAX_WORLD, Shape, ShapeProblem


JOIN_SECONDS = 120      # for every rank to come into MPI
BENCH_WORLDS = (1, 2, 6)    # what `python -m engine bench` without mpirun goes through


class _Refused(Exception):
    """A phase failed on some rank, and every rank knows: leave together."""

    def __init__(self, error):
        super().__init__(error)
        self.error = error


def main(argv):
    """argv without the program's name -> exit code of this rank."""
    prepare_environment()
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:      # started with it closed
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    config = error = help_text = None
    try:
        config = parse(argv)
    except HelpWanted as wanted:
        help_text = wanted.text
    except EngineError as e:
        error = e
    try:
        if config and config.command == "bench" and config.weights == "file" and not under_mpirun():
            return run_worlds(argv, BENCH_WORLDS)
        world = _join()
    except EngineError as e:
        print(e.report(), file=sys.stderr)
        return e.exit_code
    # mpirun hands signals to every rank; rank 0 alone decides what they mean
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if world.rank else signal.default_int_handler)
    pulse = None
    try:
        pulse = Pulse(world)
        # Hydra's word for a dead rank: it ends this one too until there is a pulse, which knows.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        code = _together(config, world, pulse, error, help_text)
        pulse.close()
        return code
    except KeyboardInterrupt:
        world.abort(INTERRUPTED)
    except EngineError as e:    # in the middle of a round, where the ranks do not agree on it
        e.rank = world.rank if e.rank is None and world.size > 1 else e.rank
        if pulse is not None:
            pulse.tell(e)
        print(e.report(), file=sys.stderr, flush=True)
        world.abort(e.exit_code)
    except Exception as e:
        traceback.print_exc()
        if pulse is not None:
            pulse.tell(FaultError(f"it met a bug: {e!r}", "its traceback is above"))
        world.abort(BUG)


def _join():
    # MPI waits for ever for a rank that has not come, and holds up Python meanwhile.
    faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True)
    try:
        from engine.world import World
    except (ImportError, RuntimeError) as e:    # mpi4py says RuntimeError where it finds no MPI
        raise WorldError(f"MPI cannot be loaded: {e}", "pip install mpi4py mpich") from None
    else:
        return World.join()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _together(config, world, pulse, error, help_text):
    """The exit code that every rank leaves with. error: what this rank's command line deserves."""
    try:
        _agree(world, error)
        if help_text is not None:
            if world.rank == 0:
                print(help_text, end="", flush=True)
            return 0
        return _start(config, world, pulse)
    except _Refused as refused:
        if world.rank == 0:
            print(refused.error.report(), file=sys.stderr, flush=True)
        return refused.error.exit_code


def _agree(world, error=None, everywhere=True):
    """Leaves on every rank where one rank failed. everywhere: the error may depend on the rank."""
    first = world.agree(error)
    if first is not None:
        failed = first[1]
        if not everywhere or world.size == 1:
            failed.rank = None
        raise _Refused(failed)


def _phase(world, work, everywhere=True):
    """work() on this rank, then the agreement; its value."""
    value = error = None
    try:
        value = work()
    except EngineError as e:
        error = e
    _agree(world, error, everywhere)
    return value


def _start(config, world, pulse):
    """From a checked command line to the exit code."""
    if world.size > MAX_WORLD:
        raise _Refused(PlanError(f"{world.size} ranks were started, the engine runs on 1 to "
                                 f"{MAX_WORLD}", f"mpirun -np {MAX_WORLD} python -m engine"))
    progress = Progress(world.rank == 0 and on_terminal(2))
    shape = _phase(world, lambda: _read_shape(config))
    config = _phase(world, lambda: fit(config, shape))
    if config.command == "plan":
        return _command(world, _import_in_turn(world, "engine.plan", progress), config)
    if config.command == "bench":
        name = "engine.bench_serve" if config.serve else "engine.bench"
        return _command(world, _import_in_turn(world, name, progress), config)
    seconds = {"load": 0.0, "compile": 0.0}
    chat, ids = _phase(world, lambda: _read_request(config, shape) if world.rank == 0
                       else (None, None), everywhere=False)
    serving = not config.one_reply
    listening = _phase(world, lambda: _listen(config) if serving and world.rank == 0 else None,
                       everywhere=False)
    engine = _load(config, world, progress, seconds)
    if serving:
        return _serve(engine, chat, listening, pulse, progress, seconds)
    return _reply(engine, chat, config, ids, world, progress, seconds)


def _command(world, module, config):
    """Run a subcommand's module; its exit code."""
    _phase(world, lambda: module.main(config, world))
    return 0


def _read_shape(config):
    """The Shape that the model folder's config.json gives, or the name of a released model.

    ModelError naming the file, UsageError naming the option.
    """
    if config.weights == "random":
        return named_shape(config.shape, config.layers)
    folder = config.model
    path = os.path.join(folder, "config.json")
    hint = "give the folder that holds config.json and the safetensors files"
    if not os.path.isdir(folder):
        raise ModelError(f"--model {folder}: no such folder", hint)
    try:
        with open(path, encoding="utf-8") as f:
            return Shape.from_config(json.load(f))
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}", hint) from None
    except ShapeProblem as e:
        raise ModelError(f"{path}: {e}", e.hint) from None
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}", "copy the model folder again") from None


def _read_request(config, shape):
    """Rank 0's (Chat, prompt ids or None for a line chat), all of it refused here if it can be."""
    from engine.chat import Chat, prompt_ids
    chat = Chat(config.model) if config.weights == "file" else IdsOnly(shape)
    if not config.one_reply:
        chat.require_text()
        return chat, None
    if config.prompt is not None:
        chat.require_text()     # before a prompt is waited for
    return chat, prompt_ids(chat, read_prompt(config, sys.stdin.buffer), shape.vocab)


def _import_in_turn(world, name, progress):
    """A module whose kernels compile at import: one rank a machine first, then the others."""
    if world.local_rank == 0:
        with progress.phase("compiling kernels, first start only"):
            importlib.import_module(name)
    world.barrier()
    return importlib.import_module(name)


def _load(config, world, progress, seconds):
    """The Engine with its weights; fills seconds "compile" and "load"."""
    started = time.perf_counter()
    engine_module = _import_in_turn(world, "engine.engine", progress)
    seconds["compile"] += time.perf_counter() - started
    backend, plan_module = (importlib.import_module(f"engine.{m}") for m in ("backend", "plan"))
    config = _phase(world, lambda: backend.choose(config))
    shape, checkpoint = _phase(world, lambda: backend.open_weights(config))
    if world.rank == 0:
        for note in checkpoint.notes:
            print(f"sparkgrid: {note}", file=sys.stderr, flush=True)
    _phase(world, lambda: plan_module.admit(config, shape, checkpoint, world))

    started = time.perf_counter()
    with progress.phase("loading weights", bytes_of=True) as line:
        weights = _phase(world, lambda: backend.load(config, checkpoint, shape, world,
                                                     line.update))
    engine = _phase(world, lambda: engine_module.Engine(config, world, shape, weights))
    seconds["load"] = time.perf_counter() - started
    if world.rank == 0:
        print(f"sparkgrid: {_started_as(engine)}", file=sys.stderr, flush=True)
    return engine


def _started_as(engine):
    """What runs, in one line: a fall-back to the CPU is never silent."""
    config, ranks = engine.config, engine.world.size
    if ranks == 1:
        kv = "not split"
    else:
        kv = f"split, {config.placement}" if config.split else "copied to each"
    where = "the CPU (backend host)" if config.backend == "host" else "CUDA (backend cuda)"
    if config.backend == "cuda" and ranks > 1:
        where += f", transport {engine.backend.device.transport.name}"
    return (f"{ranks} rank{'s' * (ranks > 1)} on {where}, KV {config.kv_dtype} {kv}, "
            f"context {config.context:,} tokens, {config.parallel} at a time")


def _listen(config):
    """The port, taken before a weight is read. Rank 0 only: the others need no HTTP."""
    from engine.api.app import listen
    return listen(config.host, config.port)


def _serve(engine, chat, listening, pulse, progress, seconds):
    """Serve until asked to stop; every rank leaves with rank 0's code."""
    from engine.serving import follow, serve
    if engine.world.rank:
        follow(engine, pulse)
        code = 0
    else:
        from engine.serve import Interrupt
        code = serve(engine, chat, listening, pulse, _desk(progress, Interrupt(), seconds))
    _agree(engine.world)
    return code


def _reply(engine, chat, config, ids, world, progress, seconds):
    """One reply to the command line's prompt; all leave with the same code."""
    code, error = 0, None
    if world.rank:
        engine.follow()
    else:
        from engine.serve import Interrupt, one_reply
        with Interrupt().installed() as interrupt:
            try:
                code = one_reply(engine, chat, config, ids, _desk(progress, interrupt, seconds))
            except RequestError as e:
                error = e
            engine.stop()
    _agree(world, error, everywhere=False)
    return code


def _desk(progress, interrupt, seconds):
    """Where rank 0 reads and writes."""
    from engine.serve import Desk
    interactive = on_terminal(0) and on_terminal(1)
    # mpirun forwards two streams in no certain order: on one terminal, use one
    err = sys.stdout if interactive and on_terminal(2) else sys.stderr
    return Desk(sys.stdin.buffer, sys.stdout.buffer, err, interactive, progress, interrupt, seconds)


def _leave(code):
    """Ends the process; what standard output does not take any more is dropped."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
