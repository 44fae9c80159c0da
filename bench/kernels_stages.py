"""python bench/kernels_stages.py: the kernels of engine/stages at the model's real dimensions.

A line a kernel, context and number of rows (each its own conversation; 2,048 rows are a prefill
chunk of one): microseconds a call inside a CUDA graph, and the bytes that it must move over that
time, as a share of what the device reaches copying 1 GiB. Pages are dealt at random from a store
larger than L2, other ones each call. `score` is its three kernels; `attend` the kernel alone,
`attend+` with arrange and finish. A list is 512 pools drawn from the context, and the tail.
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
END = np.iinfo(np.int32).max


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

    def lists(self):
        """(lists, lengths): 512 of the visible pools, then the tail."""
        lists = np.full((self.n, WIDTH), -1, np.int32)
        visible = (self.context - 1 - (self.n if self.n == CHUNK else 0)) // KPOOL
        for row in lists:
            pools = np.sort(self.rng.choice(visible, KEEP, replace=False))
            row[:KEEP * KPOOL] = (pools[:, None] * KPOOL + np.arange(KPOOL)).ravel()
        return up(lists), up(np.full(self.n, KEEP * KPOOL, np.int32))


def score(n, context):
    keys = noise((81_920, PAGE // KPOOL, INDEX_DIM))
    rows, room = Rows(n, context, len(keys)), context // KPOOL
    batch = min(n, 32)
    rng = rows.rng
    query = up(rng.standard_normal((n, INDEX_HEADS, INDEX_DIM)).astype(np.float32))
    weight = up(rng.standard_normal((n, INDEX_HEADS)).astype(np.float32))
    found, fill, faults = made((batch, room)), up(np.zeros(batch, np.int32)), made(1, np.int32)
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
    slots = 2 if chain else attend_cuda.slots(WIDTH, 1)
    parts = made((slots, n, HEADS, RANK)), made((slots, n, HEADS)), made((slots, n, HEADS))
    out = (parts[0][:1], parts[1][:1]) if chain else (made((1, n, HEADS, RANK)),
                                                      made((1, n, HEADS)))

    def launch(table):
        lists, lengths = rows.lists()
        order, starts = made((n, WIDTH), np.int32), made((n, 2), np.int32)
        merge.arrange(lists, lengths, rows.seats, PAGE, 1, 0, order, starts, 0)

        def run(s):
            if whole:
                merge.arrange(lists, lengths, rows.seats, PAGE, 1, 0, order, starts, s)
            attend_cuda.attend(query, order, starts, rows.seats, table, latents, RANK ** -0.5, 0, 0,
                               END, chain, *parts, s)
            if whole:
                attend_cuda.finish(*parts, starts, rows.seats, chain, *out, s)
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
    lists, lengths = made((n, WIDTH), np.int32), made(n, np.int32)
    yield ("merge", [lambda s: merge.merge(scores, pools, counts, seats, positions, KPOOL, lists,
                                           lengths, s)] * CALLS,
           2 * scores.nbytes + lists.nbytes)
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
