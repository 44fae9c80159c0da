"""`python -m engine bench`: prefill and decode speed at several depths, and what memory it takes.

In llama-bench's words: `pp512 @ d1024` is the speed of reading 512 prompt tokens after 1,024 that
are in the KV already; `tg32 @ d1024` that of generating 32 tokens there. Mean and standard
deviation of three runs, in tokens a second of wall time, one conversation. Each rank's resident
memory at the end stands beside its plan (`engine plan`) and what Python held before any of it.
"""

import statistics
import sys
import time

import numpy as np

from engine.backend import choose, load, open_weights
from engine.engine import Engine
from engine.plan import admit, plan_of
from engine.sample import Sampling

DEPTHS = (0, 1024, 4096)
PROMPT = 512        # tokens of pp, and of a prefill chunk
GENERATED = 32      # tokens of tg
RUNS = 3
HEADER = "| model | ranks | KV | test | t/s |\n|---|---|---|---|---|"


def main(config, world):
    """Measure config's model with the KV split and not, on all ranks; rank 0 prints as it goes.

    Raises PlanError, before weights are read or made, where the memory cannot take it.
    """
    config, python = choose(config), _resident()
    shape, checkpoint = open_weights(config)
    config = config.replaced(parallel=1, chunk=PROMPT, context=min(
        config.context, max(DEPTHS) + PROMPT + GENERATED + 2))
    ways = [config.replaced(split=split) for split in (True, False)[world.size == 1:]]
    for asked in ways:
        admit(asked, shape, checkpoint, world)
    started = time.perf_counter()
    weights = load(config, checkpoint, shape, world)
    _note(world, f"weights in {time.perf_counter() - started:.1f} s, backend {config.backend}")
    _say(world, HEADER)
    for asked in ways:
        _table(asked, world, shape, weights)
        if config.backend == "host":
            _memory(asked, world, plan_of(asked, shape, checkpoint, world.size), python)


def _table(config, world, shape, weights):
    """Run an engine of its own; rank 0 prints a row a test as it ends."""
    engine = Engine(config, world, shape, weights)
    if world.rank:
        return engine.follow()
    for depth in DEPTHS:
        if depth + PROMPT + GENERATED + 2 <= config.context:
            for test, speeds in _measure(engine, depth).items():
                print(f"| {_name(config, shape)} | {world.size} | {_kv(config, world)} | {test} | "
                      f"{statistics.mean(speeds):.1f} ± {statistics.stdev(speeds):.1f} |",
                      flush=True)
    engine.stop()


def _name(config, shape):
    if config.weights == "random":
        return f"{config.shape}, {shape.layers} layers, random"
    return config.model.rstrip("/").rsplit("/", 1)[-1]


def _kv(config, world):
    return f"split, {config.placement}" if config.split and world.size > 1 else "whole"


def _measure(engine, depth):
    """{test name: tokens a second of each run}. One run more than counted warms up."""
    speeds = {f"pp{PROMPT} @ d{depth}": [], f"tg{GENERATED} @ d{depth}": []}
    started = time.perf_counter()
    for run in range(RUNS + 1):
        tokens = np.random.default_rng(run).integers(0, engine.shape.vocab, depth + PROMPT)
        engine.submit(tokens, Sampling(max_tokens=GENERATED + 1))
        for _ in range(depth // PROMPT):
            engine.step()
        times = [time.perf_counter()]
        for _ in range(GENERATED + 1):      # the prompt's last chunk gives the first token
            engine.step()
            times.append(time.perf_counter())
        while engine.busy:                  # let the conversation's pages go
            engine.step()
        if not run:
            _note(engine.world, f"d{depth} warm after {time.perf_counter() - started:.1f} s")
        else:
            both = PROMPT / (times[1] - times[0]), GENERATED / (times[-1] - times[1])
            for measured, speed in zip(speeds.values(), both):
                measured.append(speed)
    return speeds


def _memory(config, world, made, python):
    """Print each rank's resident bytes beside its plan."""
    everyone = world.gather(np.array([python, _resident()], np.int64))
    for rank, (before, now) in enumerate(everyone.tolist()):
        planned = made.total(rank)
        _say(world, f"rank {rank}: {now / 2**20:.0f} MiB resident = {before / 2**20:.0f} Python + "
                    f"{(now - before) / 2**20:.0f}; planned {planned / 2**20:.0f} "
                    f"({(now - before) / planned:.2f} of it), KV {_kv(config, world)}")


def _resident():
    """Resident bytes of this process that are its own: VmRSS without mapped files."""
    with open("/proc/self/status", encoding="ascii") as f:
        return 1024 * next(int(line.split()[1]) for line in f if line.startswith("RssAnon:"))


def _say(world, text):
    if world.rank == 0:
        print(text, flush=True)


def _note(world, text):
    if world.rank == 0:
        print(f"sparkgrid: {text}", file=sys.stderr, flush=True)
