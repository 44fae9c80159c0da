"""Token embeddings: rows of the checkpoint's own table, read in place.

The table [vocab, hidden] stays in the mapped file: a token costs one row of page cache on each
rank and no resident memory or message. The device gets either rows copied in (pick = 0 .. n - 1)
or a slice of the table (pick = token - first row of the slice).
"""

import numpy as np
from numba import float32, int32, int64

from engine.device import KERNEL, cuda, widen
from engine.host import from_bf16

THREADS = 256


def embed(table, tokens):
    """table [vocab, hidden] uint16 (BF16) or float32; tokens [n] int -> [n, hidden] float32."""
    rows = table[tokens]
    return from_bf16(rows) if rows.dtype == np.uint16 else np.ascontiguousarray(rows)


@cuda.jit(**KERNEL)
def _embed_kernel(rows, pick, seats, streams):
    # grid (n), block THREADS
    row = int64(cuda.blockIdx.x)
    if seats[row] < 0:
        return
    source = int64(pick[row])
    held = source >= 0 and source < rows.shape[0]
    for d in range(cuda.threadIdx.x, int32(rows.shape[1]), THREADS):
        value = float32(0)
        if held:
            value = widen(rows[source, d])
        for k in range(streams.shape[1]):
            streams[row, k, d] = value


def embed_cuda(rows, pick, seats, streams, stream):
    """streams [n, S, D] float32 = rows[pick[i]] S times; zeros where pick names no row.

    rows [R, D] uint16 (BF16) or float32; pick, seats [n] int32. S = 1 gives plain rows.
    """
    n, _, width = streams.shape
    assert rows.shape[1] == width, (rows.shape, streams.shape)
    assert pick.size == seats.size == n, (pick.size, seats.size, n)
    if n:
        _embed_kernel[n, THREADS, stream](rows, pick, seats, streams)
