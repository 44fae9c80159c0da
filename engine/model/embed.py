"""Token embeddings: rows of the checkpoint's own table, read in place.

The table [vocab, hidden] stays in the mapped file: a token costs one row of page cache on each
rank and no resident memory or message. The device gets either rows copied in (pick = 0 .. n - 1)
or a slice of the table (pick = token - first row of the slice).
"""

from functools import lru_cache

import numpy as np
from numba import int32, int64

from engine.device import KERNEL, U32, cuda, ldg64, ldg128, st128
from engine.host import from_bf16

THREADS = 256


def embed(table, tokens):
    """table [vocab, hidden] uint16 (BF16) or float32; tokens [n] int -> [n, hidden] float32."""
    rows = table[tokens]
    return from_bf16(rows) if rows.dtype == np.uint16 else np.ascontiguousarray(rows)


@lru_cache(None)
def embed_kernel(bf16):
    """The kernel for BF16 or float32 tables."""

    @cuda.jit(**KERNEL)
    def _embed_kernel(rows, pick, seats, streams):
        # grid (n, tiles of 4 * THREADS elements), block THREADS, 4 elements a thread
        row = int64(cuda.blockIdx.x)
        width = int32(rows.shape[1])
        d = int32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * 4
        if d >= width or seats[row] < 0:
            return
        source = int64(pick[row])
        a = b = c = e = U32(0)
        if source >= 0 and source < rows.shape[0]:
            if bf16:
                pairs = ldg64(rows, source * width + d)
                a, b = pairs[0] << U32(16), pairs[0] & U32(0xFFFF0000)
                c, e = pairs[1] << U32(16), pairs[1] & U32(0xFFFF0000)
            else:
                a, b, c, e = ldg128(rows, source * width + d)
        for k in range(streams.shape[1]):
            st128(streams, (row * streams.shape[1] + k) * width + d, a, b, c, e)

    return _embed_kernel


def embed_cuda(rows, pick, seats, streams, stream):
    """streams [n, S, D] float32 = rows[pick[i]] S times; zeros where pick names no row.

    rows [R, D] uint16 (BF16) or float32, D % 4 == 0; pick, seats [n] int32. S = 1 gives plain rows.
    """
    n, _, width = streams.shape
    assert rows.shape[1] == width and width % 4 == 0, (rows.shape, streams.shape)
    assert pick.size == seats.size == n, (pick.size, seats.size, n)
    if n:
        embed_kernel(rows.dtype == np.uint16)[(n, -(-width // (4 * THREADS))), THREADS, stream](
            rows, pick, seats, streams)
