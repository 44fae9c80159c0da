"""`python -m engine bench`: prefill and decode speed at several depths, and what memory it takes.

In llama-bench's words: `pp512 @ d1024` is the speed of reading 512 prompt tokens after 1,024 that
are in the KV already; `tg32 @ d1024` that of generating 32 tokens there. Mean and standard
deviation of three runs, in tokens a second of wall time, one conversation. Each rank's resident
memory at the end stands beside its plan (`engine plan`) and what Python held before any of it.
"""

import statistics
import time

import numpy as np

from engine.backend import choose, load
from engine.engine import Engine
from engine.errors import PlanError
from engine.plan import plan_of
from engine.random_weights import LAYERS, random_device_weights, release_shape
from engine.sample import Sampling
from engine.shape import part
from engine.weights import open_model

DEPTHS = (0, 1024, 4096)
PROMPT = 512        # tokens of pp, and of a prefill chunk
GENERATED = 32      # tokens of tg
RUNS = 3
HEADER = "| model | ranks | KV | test | t/s |\n|---|---|---|---|---|"


def main(config, world):
    """Measure config's model with the KV split and not, on all ranks; rank 0 prints.

    --layers N measures N layers of the release's dimensions with random weights instead.
    """
    config, checkpoint, python = choose(config), None, _resident()
    if config.layers:
        name, shape, weights = _random(config, world)
    else:
        name = config.model.rstrip("/").rsplit("/", 1)[-1]
        shape, checkpoint = open_model(config.model)
        weights = load(config, checkpoint, shape, world)
    _say(world, HEADER)
    for split in (True, False) if world.size > 1 else (False,):
        asked = config.replaced(split=split, parallel=1, chunk=PROMPT,
                                context=min(config.context, max(DEPTHS) + PROMPT + GENERATED + 2))
        engine = Engine(asked, world, shape, weights)
        if world.rank:
            engine.follow()
        else:
            for depth in DEPTHS:
                if depth + PROMPT + GENERATED + 2 <= asked.context:
                    for test, speeds in _measure(engine, depth).items():
                        print(f"| {name} | {world.size} | {_kv(asked, world)} | {test} | "
                              f"{statistics.mean(speeds):.1f} ± {statistics.stdev(speeds):.1f} |",
                              flush=True)
            engine.stop()
        if checkpoint and config.backend == "host":
            _memory(asked, world, plan_of(asked, shape, checkpoint, world.size), python)


def _random(config, world):
    """(name, Shape, Weights) of config.layers layers of real dimensions. PlanError off CUDA."""
    if config.backend != "cuda":
        raise PlanError(f"--layers {config.layers}: a model of real dimensions needs a CUDA device",
                        "leave --layers out to measure the embedded model")
    layers = min(config.layers, LAYERS)
    shape = release_shape(layers)
    own = part(shape, world.rank, world.size)
    return f"{layers} layers", shape, random_device_weights(shape, own, layers, 0)


def _kv(config, world):
    return f"split, {config.placement}" if config.split and world.size > 1 else "whole"


def _measure(engine, depth):
    """{test name: tokens a second of each run}. One run more than counted warms up."""
    speeds = {f"pp{PROMPT} @ d{depth}": [], f"tg{GENERATED} @ d{depth}": []}
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
        if run:
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
