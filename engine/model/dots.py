"""Projections whose sums stay in float32: the coefficients of mHC and the logits of the router.

| name | shape | dtype | |
|---|---|---|---|
| **reads** x | [n, K] | float32 | contiguous, K even |
| w | [N, K] | BF16/F32 | row-major, as in the checkpoint |
| seats | [n] | int32 | negative: a padding row, which nothing is written for |
| **writes** partial | [n, parts, N or N + 1] | float32 | part p: k from 512 p to 512 p + 511 |

Whoever reads `partial` adds the parts up in ascending order: a site of one row is spread over parts
x outputs, and no sum runs through one accumulator over 16,384 terms, which moved one coefficient of
mHC in two hundred. With N + 1 outputs the last one is the sum of squares of x.

Order of a part: lane l of 32 takes the terms 64 t + 2 l and 64 t + 2 l + 1, t ascending, by fused
multiply-add; the lanes are added as a butterfly (16, 8, 4, 2, 1). Rows share a block for the sake
of the weights they read and nothing else. Empty case: no rows launches nothing.
Bytes: the weights once for 4 rows. Device only: the host path is `linear`.
"""

from functools import lru_cache

import numpy as np
from numba import float32, int32, int64

from engine.device import FULL, INLINE, KERNEL, cuda, fma, high, low

SPAN = 512      # terms of a part: 32 blocks read mHC's weights for a single row
ROWS = 4        # rows a block: 4 x 4 sums a thread, and as many weights as rows a step
GROUP = 4       # outputs a warp
SUMS = ROWS * GROUP
AHEAD = 4       # steps whose weights are asked for before the first is used
HELD = 2 * AHEAD * GROUP
WARPS = 8


@cuda.jit(**INLINE)
def _halve(acc, kept, mask, lane):
    """Fold 2 kept sums across lanes that differ in `mask`: the upper lanes keep the upper half."""
    for i in range(kept):
        stays, goes = acc[i], acc[i + kept]
        if lane & mask:
            stays, goes = goes, stays
        acc[i] = stays + cuda.shfl_xor_sync(FULL, goes, mask)


@lru_cache(None)
def dots_kernel(bf16):
    """The kernel for BF16 weights, seen as [N, K / 2] uint32, or for [N, K] float32."""

    @cuda.jit(**KERNEL)
    def _dots_kernel(x, w, seats, square, partial):
        # grid (parts, tiles of WARPS * GROUP outputs, tiles of ROWS rows), block 32 * WARPS
        tile = cuda.shared.array((ROWS, SPAN), float32)
        acc = cuda.local.array(SUMS, float32)
        ahead = cuda.local.array(HELD, float32)
        first_k = int32(cuda.blockIdx.x * SPAN)
        first_row = int32(cuda.blockIdx.z * ROWS)
        thread = int32(cuda.threadIdx.x)
        lane = thread & 31
        outputs = int32(w.shape[0])
        terms = min(int32(x.shape[1]) - first_k, SPAN)
        group = int32(cuda.blockIdx.y * WARPS) + (thread >> 5)
        # ---- rows: even terms of 64 in the first 32 places, odd ones in the others
        for r in range(ROWS):
            row = first_row + r
            real = row < x.shape[0] and seats[min(row, int32(x.shape[0]) - 1)] >= 0
            for k in range(thread, SPAN, 32 * WARPS):
                value = float32(0)
                if real and k < terms:
                    value = x[row, first_k + k]
                tile[r, (k & ~63) | (k & 1) << 5 | (k & 63) >> 1] = value
        cuda.syncthreads()
        # ---- sums of a lane
        for i in range(SUMS):
            acc[i] = float32(0)
        squares = square != 0 and group == (outputs + GROUP - 1) // GROUP
        if group * GROUP >= outputs and not squares:
            return
        if squares:
            for t in range(SPAN // 64):
                for r in range(ROWS):
                    even, odd = tile[r, 64 * t + lane], tile[r, 64 * t + 32 + lane]
                    acc[r * GROUP] = fma(odd, odd, fma(even, even, acc[r * GROUP]))
        else:
            last = (first_k + terms - 1) >> 1       # past it the row is 0: any weight will do
            for start in range(0, SPAN, 64 * AHEAD):
                for t in range(AHEAD):
                    pair = min(((first_k + start + 64 * t) >> 1) + lane, last)
                    for j in range(GROUP):
                        output = min(group * GROUP + j, outputs - 1)
                        place = 2 * (t * GROUP + j)
                        if bf16:
                            word = w[output, pair]
                            ahead[place], ahead[place + 1] = low(word), high(word)
                        else:
                            ahead[place] = w[output, 2 * pair]
                            ahead[place + 1] = w[output, 2 * pair + 1]
                for t in range(AHEAD):
                    for r in range(ROWS):
                        even = tile[r, start + 64 * t + lane]
                        odd = tile[r, start + 64 * t + 32 + lane]
                        for j in range(GROUP):
                            place = 2 * (t * GROUP + j)
                            total = fma(even, ahead[place], acc[r * GROUP + j])
                            acc[r * GROUP + j] = fma(odd, ahead[place + 1], total)
        # ---- over the lanes: lanes 2 i and 2 i + 1 end up with sum i of the 16
        _halve(acc, 8, 16, lane)
        _halve(acc, 4, 8, lane)
        _halve(acc, 2, 4, lane)
        _halve(acc, 1, 2, lane)
        total = acc[0] + cuda.shfl_xor_sync(FULL, acc[0], 1)
        row = first_row + (lane >> 3)
        column = group * GROUP + (lane >> 1 & 3)
        if squares:
            column = outputs + (lane >> 1 & 3)
        wanted = column == outputs if squares else column < outputs
        if wanted and lane & 1 == 0 and row < x.shape[0] and seats[row] >= 0:
            partial[int64(row), cuda.blockIdx.x, column] = total

    return _dots_kernel


def parts(width):
    """How many parts a row of `width` terms has."""
    return -(-width // SPAN)


def dots_cuda(x, w, seats, partial, stream):
    """partial [n, parts(K), N, or N + 1 with the sum of squares] from x [n, K] and w [N, K]."""
    n, width = x.shape
    outputs, square = w.shape[0], partial.shape[2] - w.shape[0]
    assert width % 2 == 0 and w.shape[1] == width and square in (0, 1), (x.shape, w.shape)
    assert partial.shape[:2] == (n, parts(width)) and seats.shape == (n,), (partial.shape, n)
    if n:
        bf16 = w.dtype == np.uint16
        # Squares take a group of their own, so that no warp does both.
        groups = -(-outputs // GROUP) + square
        grid = (parts(width), -(-groups // WARPS), -(-n // ROWS))
        dots_kernel(bf16)[grid, 32 * WARPS, stream](
            x, w.view(np.uint32) if bf16 else w, seats, square, partial)
