"""What splitting the KV costs: a decode step of W ranks that share one GPU, split against whole.

    mpirun -np 2 python bench/split.py                 # 4 layers, 1 row, 32k tokens of context
    mpirun -np 6 python bench/split.py --layers 8 --rows 4 --placement owner

Random weights of the release's dimensions, cut for W ranks; a KV of random BF16 that is the same
number for number in both layouts, so that the logits of both must agree to the bit. For each
layout, of one step:

- kernels: the captured graph segments between events, summed, apart from what the host does between
  them. The ranks measure by turns, the others wait: side by side they would measure each other.
- queued: the same segments in one queue, without the host's wait at the end of each.
- exchanges: the host's time in the exchanges alone, all ranks at once, the GPU idle.
- decode(): the call with all ranks at once, which contend for the one GPU.

Of several ranks the slowest counts, of several runs the median. Prints no line of a layout that
failed but the error.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from engine.config import Config, prepare_environment  # noqa: E402

prepare_environment()

import numpy as np  # noqa: E402
from cuda.bindings import driver  # noqa: E402

from engine.backend import DeviceBackend, make_pool  # noqa: E402
from engine.device import cuda  # noqa: E402
from engine.forward import Rows  # noqa: E402
from engine.random_weights import fill_bf16, random_device_weights  # noqa: E402
from engine.release import release_shape  # noqa: E402
from engine.shape import part  # noqa: E402
from engine.world import Exchange, World  # noqa: E402

PAGE, RUNS = 64, 20


def build(world, shape, weights, split, options):
    """A DeviceBackend whose seats are bound and filled: the same KV in every layout."""
    pages = -(-options.context // PAGE)
    config = Config(context=options.context, parallel=options.rows, page_rows=PAGE,
                    backend="cuda", split=split, placement=options.placement,
                    transport=options.transport)
    backend, pool = DeviceBackend(config, world, shape, weights), make_pool(config, world.size)
    attention = backend.device.attention
    for seat in range(options.rows):
        backend.open(seat, pool.grant(pages))
        for page, local in enumerate(backend.table.table[seat, :pages].tolist()):
            if local >= 0:
                for b, arrays in enumerate(zip(attention.latents, attention.keys)):
                    for kind, array in enumerate(arrays):
                        number = ((seat * pages + page) * 64 + b) * 2 + kind
                        fill_bf16(array[local], number, 0.5)
    cuda.synchronize()
    return backend


def rows_of(shape, options):
    n = options.rows
    tokens = np.random.default_rng(n).integers(0, shape.vocab, n)
    return Rows.of(tokens, np.arange(n), np.full(n, options.context - 2))


def median(work):
    return float(np.median([work() for _ in range(RUNS)]))


def kernels_us(walk, graphs):
    """Microseconds of the segments, each between events of its own."""
    events = [(cuda.event(), cuda.event()) for _ in graphs]
    for graph, (start, stop) in zip(graphs, events):
        start.record(walk.stream)
        launch(graph, walk)
        stop.record(walk.stream)
    walk.stream.synchronize()
    return sum(start.elapsed_time(stop) for start, stop in events) * 1e3


def queued_us(walk, graphs):
    start, stop = cuda.event(), cuda.event()
    start.record(walk.stream)
    for graph in graphs:
        launch(graph, walk)
    stop.record(walk.stream)
    walk.stream.synchronize()
    return start.elapsed_time(stop) * 1e3


def launch(graph, walk):
    code, = driver.cuGraphLaunch(graph, walk._handle)
    assert int(code) == 0, code


def host_us(work):
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e6


def measure(world, backend, rows):
    """(kernels, queued, exchanges, decode(), segments, exchanges made, logits on rank 0)."""
    device = backend.device
    logits = [device.decode(rows) for _ in range(3)][-1]    # compiles, captures, replays
    logits = None if logits is None else logits.copy()
    walk, = device._walks.values()
    graphs = [s for s in walk._steps if not callable(s)]
    exchanges = [s for s in walk._steps if isinstance(s, Exchange)]
    for rank in range(world.size):
        world.barrier()
        if rank == world.rank:
            kernels, queued = (median(lambda: us(walk, graphs)) for us in (kernels_us, queued_us))
    world.barrier()
    crossing = median(lambda: host_us(lambda: [exchange() for exchange in exchanges]))
    call = median(lambda: host_us(lambda: device.decode(rows)))
    slowest = world.gather(np.array([kernels, queued, crossing, call])).max(axis=0)
    return (*slowest, len(graphs), len(exchanges), logits)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--placement", choices=("striped", "owner"), default="striped")
    parser.add_argument("--transport", choices=("auto", "pinned", "device"), default="pinned")
    options = parser.parse_args()
    world, shape = World.join(), release_shape(options.layers)
    weights = random_device_weights(shape, part(shape, world.rank, world.size), options.layers, 1)
    found = {}
    for name, split in (("split", True), ("whole", False)):
        backend = build(world, shape, weights, split, options)
        found[name] = measure(world, backend, rows_of(shape, options))
        if world.rank == 0:
            kernels, queued, crossing, call, graphs, exchanges, _ = found[name]
            print(f"{world.size} ranks, {options.layers} layers, {options.rows} rows, context "
                  f"{options.context:,}, {options.placement}, {name}: kernels {kernels:.1f} us in "
                  f"{graphs}, queued {queued:.1f}, exchanges {crossing:.1f} us in {exchanges}, sum "
                  f"{kernels + crossing:.1f}; decode() on one GPU {call:.1f} us", flush=True)
        del backend
    if world.rank == 0:
        split, whole = found["split"], found["whole"]
        print(f"split / whole: kernels {split[0] / whole[0]:.3f}, queued {split[1] / whole[1]:.3f},"
              f" sum {(split[0] + split[2]) / (whole[0] + whole[2]):.3f}; logits "
              f"{'equal' if split[-1].tobytes() == whole[-1].tobytes() else 'DIFFER'}", flush=True)


if __name__ == "__main__":
    main()
