"""python bench/kernels_stages.py: the kernels of engine/stages at the model's real dimensions.

A line a kernel, context and number of rows (each its own conversation; 2,048 rows are a prefill
chunk of one): microseconds a call inside a CUDA graph, and the bytes that it must move over that
time, as a share of what the device reaches copying 1 GiB. Pages are dealt at random from a store
larger than L2, other ones each call. `score` is its two kernels; `attend` the kernel alone,
`attend+` with merge and finish. A list is 512 pools drawn from the context, and the tail.
"""

import argparse

import numpy as np
from kernels_model import copy_speed, made, timed      # prepares the environment first

from engine.device import cuda
from engine.stages import attend_cuda, insert, merge, project, score_cuda

HEADS, RANK, INDEX_HEADS, INDEX_DIM, KPOOL, KEEP, PAGE = 64, 512, 32, 128, 4, 512, 64
WIDTH = KEEP * KPOOL + KPOOL - 1
CONTEXTS, ROWS, CHUNK = (8_192, 131_072, 1_048_576), (1, 2, 8), 2048
CALLS = 16


@cuda.jit
def _noise(array):
    """BF16 bits of both signs between 2^-4 and 2, from a hash of the index."""
    for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
        x = np.uint32(i) * np.uint32(2654435761)
        x = np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(2246822519)
        x = np.uint32(x ^ (x >> np.uint32(13)))
        array[i] = np.uint16((x & np.uint32(0x8000)) | (np.uint32(0x3D80) + x % np.uint32(0x280)))


def noise(shape):
    array = cuda.device_array(shape, np.uint16)
    _noise[2048, 256](array.reshape(array.size))
    return array


def up(array):
    return cuda.to_device(np.ascontiguousarray(array))


class Rows:
    """n rows at the end of a context, and a page table a call into a store of `pages` pages."""

    def __init__(self, n, context, pages):
        rng = np.random.default_rng(context + n)
        one = n == CHUNK
        self.n, self.rng, self.context = n, rng, context
        self.seats = up(np.zeros(n, np.int32) if one else np.arange(n, dtype=np.int32))
        last = context - 2
        self.positions = up(np.arange(last - n + 1, last + 1, dtype=np.int32) if one
                            else np.full(n, last, np.int32))
        shape = 1 if one else n, context // PAGE
        calls = 1 if one else CALLS
        self.tables = [up(rng.integers(0, pages, shape).astype(np.int32)) for _ in range(calls)]

    def chosen(self):
        """(scores, pools, counts) of one rank: 512 of the visible pools a row."""
        visible = (self.context - 1 - (self.n if self.n == CHUNK else 0)) // KPOOL
        pools = [self.rng.choice(visible, KEEP, replace=False) for _ in range(self.n)]
        return (made((1, self.n, KEEP)), up(np.int32(pools)[None]),
                up(np.full((1, self.n), KEEP, np.int32)))


class Lists:
    """What stage 3 writes and stage 4 reads for n rows below `context`."""

    def __init__(self, n, context):
        self.order = made((n, WIDTH), np.int32)
        self.spans = made((n, merge.spans_at_most(WIDTH, 1, context) + 1), np.int32)
        self.starts = made((n, 2), np.int32)
        self.all = self.order, self.spans, self.starts


def score(n, context):
    keys = noise((81_920, PAGE // KPOOL, INDEX_DIM))
    rows, room = Rows(n, context, len(keys)), context // KPOOL
    batch = min(n, 32)
    rng = rows.rng
    query = up(rng.standard_normal((n, INDEX_HEADS, INDEX_DIM)).astype(np.float32))
    weight = up(rng.standard_normal((n, INDEX_HEADS)).astype(np.float32))
    found, fill, faults = made((batch, room)), up(np.zeros((batch, 2), np.int32)), made(1, np.int32)
    bins, near = up(np.zeros((batch, score_cuda.BINS), np.int32)), made((batch, 4096), np.int32)
    out = made((n, KEEP)), made((n, KEEP), np.int32), made(n, np.int32)

    def launch(table):
        return lambda s: score_cuda.score(query, weight, rows.seats, rows.positions, table, keys,
                                          KPOOL, -1, 1, found, bins, near, fill, faults, *out, s)
    return [launch(t) for t in rows.tables], n * room * INDEX_DIM * 2


def _attention(n, context, whole):
    latents = noise((20_480, PAGE, RANK))
    rows, chain = Rows(n, context, len(latents)), n == CHUNK
    query = up(rows.rng.standard_normal((n, HEADS, RANK)).astype(np.float32))
    merged, lse = made((1, n, HEADS, RANK)), made((1, n, HEADS))
    spans = 1 if chain else merge.spans_at_most(WIDTH, 1, context)
    mass = made((spans, n, HEADS))
    out, top = (merged, lse) if chain else (made((spans, n, HEADS, RANK)), made((spans, n, HEADS)))

    def launch(table):
        chosen, lists = rows.chosen(), Lists(n, context)

        def listed(s):
            merge.merge(*chosen, rows.seats, rows.positions, table, PAGE, KPOOL, 1, 0, *lists.all,
                        s)

        def run(s):
            if whole:
                listed(s)
            attend_cuda.attend(query, *lists.all, rows.seats, latents, RANK ** -0.5, 0, 0, chain,
                               out, top, mass, s)
            if whole and not chain:
                project.finish(out, top, mass, lists.starts, rows.seats, merged[0], lse[0], s)
        listed(0)
        return run
    return [launch(t) for t in rows.tables], n * KEEP * KPOOL * RANK * 2


def attend(n, context):
    return _attention(n, context, False)


def attend_whole(n, context):
    return _attention(n, context, True)


def others(n):
    """(name, launches, bytes) of the small kernels."""
    rows = Rows(n, 131_072, 8192)
    seats, positions, table = rows.seats, rows.positions, rows.tables[0]
    latent, key, gate = made((n, RANK)), made((n, INDEX_DIM)), made((n, INDEX_DIM))
    latents = made((8192, PAGE, RANK), np.uint16)
    keys = made((8192, PAGE // KPOOL, INDEX_DIM), np.uint16)
    tails = [made((8, KPOOL - 1, INDEX_DIM)) for _ in range(2)]
    ape = made((KPOOL, INDEX_DIM))
    yield ("insert", [lambda s: insert.insert(latent, key, gate, ape, seats, positions, table,
                                              latents, keys, *tails, s)] * CALLS,
           latent.nbytes * 3 // 2 + 2 * key.nbytes)
    world = 6
    scores = np.sort(rows.rng.standard_normal((world, n, KEEP)).astype(np.float32))[..., ::-1]
    scores, counts = up(np.sort(scores, axis=2)[..., ::-1]), up(np.full((world, n), KEEP, np.int32))
    pools = up(np.broadcast_to(np.arange(world * KEEP, dtype=np.int32).reshape(world, 1, KEEP),
                               scores.shape))
    lists = Lists(n, 131_072)
    for ranks, name in ((1, "merge"), (world, "merge 6")):
        found = [a[:ranks] for a in (scores, pools, counts)]
        yield (name, [lambda s, found=found: merge.merge(
            *found, seats, positions, table, PAGE, KPOOL, 1, 0, *lists.all, s)] * CALLS,
            2 * found[0].nbytes + lists.order.nbytes)
    out, lse = made((world, n, HEADS, RANK)), made((world, n, HEADS))
    merged, mass = made((n, HEADS, RANK)), made((n, HEADS))
    yield ("combine", [lambda s: project.combine(out, lse, merged, mass, s)] * CALLS,
           out.nbytes + merged.nbytes)


def bench(contexts=CONTEXTS, rows=ROWS, chunk=True):
    """Print a line for each kernel, context and number of rows."""
    copy = copy_speed()
    print(f"device copy {copy:.0f} GB/s")
    print("kernel    context  rows        us     GB/s  of copy")

    def line(name, context, n, launches, moved):
        us = timed(launches)
        speed = moved / us / 1e3
        print(f"{name:8} {context:8} {n:5} {us:9.1f} {speed:8.0f} {speed / copy:8.2f}", flush=True)

    for name, kernel in (("score", score), ("attend", attend), ("attend+", attend_whole)):
        for context in contexts:
            for n in rows:
                line(name, context, n, *kernel(n, context))
            if chunk and name != "attend":
                line(name, context, CHUNK, *kernel(CHUNK, context))
    for n in rows:
        for name, launches, moved in others(n):
            line(name, 131_072, n, launches, moved)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--no-chunk", action="store_true", help="leave out 2,048 rows")
    args = parser.parse_args()
    bench(args.context, args.rows, not args.no_chunk)
