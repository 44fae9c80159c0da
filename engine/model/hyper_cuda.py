"""mHC on the device: a site is two launches, `hyper_in_cuda` (mix_cuda) before the sublayer and
`hyper_out_cuda` after it, which is also the first half of the next site.

| name | shape | dtype | |
|---|---|---|---|
| streams | [n, 4, D] | float32 | D % 16 == 0; modified by hyper_out_cuda |
| fn | [24, 4 D], or thirds [72, 4 D] | uint16 (BF16) | row-major, as in the checkpoint |
| partial | [n, ceil(D / 64), 34] | float32 | sums over 64 elements of every stream |
| post, comb | [n, 4], [n, 4, 4] | float32 | as in `hyper` |
| y | [W, n, D] | float32 | every rank's part of a sublayer's result, added in rank order |
| x | [1 or 3, n, D] | uint16 (BF16) | the sublayer's normalised input, or that and its thirds |

Formulas are those of `hyper`. What crosses from a site's first half to its second is `partial`:
24 sums of z, and the 10 products <X_j, X_k>, j <= k, of the streams. From those follow both root
mean squares, that of the streams (applied to z and not to flat) and that of the mix x = sum_j pre_j
X_j, whose square is sum_jk pre_j pre_k <X_j, X_k>: so any number of blocks can mix and normalise a
row, and none waits for a sum over it. (Rounding: where the streams cancel in x, the sum of squares
is off by 1e-6 of what it would be without.)

Order. A warp has 16 elements of each stream of 8 rows. z: a sum is a chain of four mma.sync,
streams ascending, for each third of X; then (third 2 + third 1) + third 0. <X_j, X_k>: lane t of 4
takes elements 4 t .. 4 t + 3 by fused multiply-add, then lanes at distance 1 and 2. The 4 warps of
a part ascend; the parts are added by `mix_cuda`.
Rows with a negative seat are padding, not touched. No rows: no launch.
"""

from functools import lru_cache

import numpy as np
from numba import float32, int32, int64, uint32

from engine.device import (FULL, INLINE, KERNEL, U32, add_rn, bits_float, cuda, float_bits, fma,
                           ld128, ldg64, mma_bf16, st128)
from engine.model.thirds import THIRDS, third_pairs

STREAMS = 4
OUTPUTS = (2 + STREAMS) * STREAMS       # pre, post, comb
GRAM = STREAMS * (STREAMS + 1) // 2
SUMS = OUTPUTS + GRAM
UNIT, WARPS, ROWS = 16, 4, 8            # elements a warp, warps a block, rows of an mma
PART = UNIT * WARPS
GROUPS = 8                              # eights of rows a block where there are many
MANY = 64                               # rows from which on there are
TILE = 256                              # elements a block of the last hyper_out


def parts(width):
    """How many parts the sums over a row of `width` elements have."""
    return -(-width // PART)


@cuda.jit(**INLINE)
def four_of(array, index):
    """4 neighbours of a float32 array from array.flat[index] on."""
    words = ld128(array, index)
    return bits_float(words[0]), bits_float(words[1]), bits_float(words[2]), bits_float(words[3])


@cuda.jit(**INLINE)
def _store_four(array, index, four):
    st128(array, index, float_bits(four[0]), float_bits(four[1]), float_bits(four[2]),
          float_bits(four[3]))


@cuda.jit(**INLINE)
def _turned(share, whole, a, s0, b, s1, c, s2, e, s3):
    """share whole + a s0 + b s1 + c s2 + e s3 of 4 elements, in that order."""
    return (fma(e, s3[0], fma(c, s2[0], fma(b, s1[0], fma(a, s0[0], share * whole[0])))),
            fma(e, s3[1], fma(c, s2[1], fma(b, s1[1], fma(a, s0[1], share * whole[1])))),
            fma(e, s3[2], fma(c, s2[2], fma(b, s1[2], fma(a, s0[2], share * whole[2])))),
            fma(e, s3[3], fma(c, s2[3], fma(b, s1[3], fma(a, s0[3], share * whole[3])))))


@lru_cache(None)
def turn_kernel(turns, planes):
    """The kernel that writes y back first, or not; planes: 3 where fn is given as thirds."""
    words_held = planes * 24

    @cuda.jit(**KERNEL)
    def _turn_kernel(streams, y, post, comb, fn, seats, groups, partial):
        # grid (parts, tiles of ROWS * groups rows), block 32 * WARPS
        found = cuda.shared.array((WARPS, ROWS, SUMS), float32)
        w = cuda.local.array(words_held, uint32)
        new = cuda.local.array(16, float32)
        acc = cuda.local.array(24, float32)
        gram = cuda.local.array(GRAM, float32)
        thread = int32(cuda.threadIdx.x)
        warp, lane = thread >> 5, thread & 31
        g, t = lane >> 2, lane & 3
        n, width = int32(streams.shape[0]), int32(streams.shape[2])
        d = int32(cuda.blockIdx.x * PART) + warp * UNIT
        inside = d < width
        d = (d if inside else int32(0)) + 4 * t
        for p in range(planes):
            for k in range(STREAMS):
                for r in range(3):
                    at = (int64(p * OUTPUTS + 8 * r + g) * STREAMS + k) * width + d
                    words = ldg64(fn, at)
                    w[p * 24 + k * 6 + 2 * r] = words[0]
                    w[p * 24 + k * 6 + 2 * r + 1] = words[1]
        for group in range(groups):
            first = (int32(cuda.blockIdx.y) * int32(groups) + int32(group)) * ROWS
            if first >= n:
                break
            row = int64(min(first + g, n - 1))      # rows past n are copies, never stored
            # ---- the row's streams, and what becomes of them
            s0 = four_of(streams, row * STREAMS * width + d)
            s1 = four_of(streams, (row * STREAMS + 1) * width + d)
            s2 = four_of(streams, (row * STREAMS + 2) * width + d)
            s3 = four_of(streams, (row * STREAMS + 3) * width + d)
            if turns:
                share = four_of(post, row * STREAMS)
                c0 = four_of(comb, row * 16)
                c1 = four_of(comb, row * 16 + 4)
                c2 = four_of(comb, row * 16 + 8)
                c3 = four_of(comb, row * 16 + 12)
                whole = four_of(y, row * width + d)
                for rank in range(1, y.shape[0]):
                    part = four_of(y, (int64(rank) * n + row) * width + d)
                    whole = (add_rn(whole[0], part[0]), add_rn(whole[1], part[1]),
                             add_rn(whole[2], part[2]), add_rn(whole[3], part[3]))
                t0 = _turned(share[0], whole, c0[0], s0, c1[0], s1, c2[0], s2, c3[0], s3)
                t1 = _turned(share[1], whole, c0[1], s0, c1[1], s1, c2[1], s2, c3[1], s3)
                t2 = _turned(share[2], whole, c0[2], s0, c1[2], s1, c2[2], s2, c3[2], s3)
                t3 = _turned(share[3], whole, c0[3], s0, c1[3], s1, c2[3], s2, c3[3], s3)
                s0, s1, s2, s3 = t0, t1, t2, t3
                if inside and first + g < n and seats[row] >= 0:
                    _store_four(streams, row * STREAMS * width + d, s0)
                    _store_four(streams, (row * STREAMS + 1) * width + d, s1)
                    _store_four(streams, (row * STREAMS + 2) * width + d, s2)
                    _store_four(streams, (row * STREAMS + 3) * width + d, s3)
            for i in range(4):
                new[i], new[4 + i], new[8 + i], new[12 + i] = s0[i], s1[i], s2[i], s3[i]
            # ---- products with the weights, and of the streams
            for i in range(24):
                acc[i] = float32(0)
            for k in range(STREAMS):
                left = third_pairs(new[4 * k], new[4 * k + 1])
                right = third_pairs(new[4 * k + 2], new[4 * k + 3])
                for p in range(planes):
                    at = p * 24 + k * 6
                    for third in range(THIRDS - p):
                        s = (third + p) * 8
                        c = mma_bf16(w[at], w[at + 2], w[at + 1], w[at + 3], left[third],
                                     right[third], acc[s], acc[s + 1], acc[s + 2], acc[s + 3])
                        e = mma_bf16(w[at + 4], U32(0), w[at + 5], U32(0), left[third],
                                     right[third], acc[s + 4], acc[s + 5], acc[s + 6], acc[s + 7])
                        for i in range(4):
                            acc[s + i] = c[i]
                            acc[s + 4 + i] = e[i]
            for i in range(6):                      # output g + 8 (i >> 1) of row 2 t + (i & 1)
                total = add_rn(add_rn(acc[16 + i], acc[8 + i]), acc[i])
                found[warp, 2 * t + (i & 1), g + 8 * (i >> 1)] = total
            place = 0
            for j in range(STREAMS):
                for k in range(j, STREAMS):
                    total = new[4 * j] * new[4 * k]
                    for i in range(1, 4):
                        total = fma(new[4 * j + i], new[4 * k + i], total)
                    gram[place] = total
                    place += 1
            for i in range(GRAM):
                total = gram[i]
                total = add_rn(total, cuda.shfl_xor_sync(FULL, total, 1))
                total = add_rn(total, cuda.shfl_xor_sync(FULL, total, 2))
                if t == 0:
                    found[warp, g, OUTPUTS + i] = total
            cuda.syncthreads()
            # ---- over the warps
            warps = min((width - int32(cuda.blockIdx.x * PART)) // UNIT, WARPS)
            for i in range(thread, ROWS * SUMS, 32 * WARPS):
                r = i // SUMS
                v = i - r * SUMS
                if first + r < n and seats[first + r] >= 0:
                    total = found[0, r, v]
                    for other in range(1, warps):
                        total = add_rn(total, found[other, r, v])
                    partial[first + r, cuda.blockIdx.x, v] = total
            cuda.syncthreads()

    return _turn_kernel


@cuda.jit(**KERNEL)
def _out_kernel(streams, y, post, comb, seats):
    # grid (n, tiles of TILE elements), block TILE
    old = cuda.local.array(STREAMS, float32)
    row = int64(cuda.blockIdx.x)
    d = int32(cuda.blockIdx.y * TILE + cuda.threadIdx.x)
    if d >= streams.shape[2] or seats[row] < 0:
        return
    whole = y[0, row, d]
    for rank in range(1, y.shape[0]):
        whole = add_rn(whole, y[rank, row, d])
    for j in range(STREAMS):
        old[j] = streams[row, j, d]
    for k in range(STREAMS):
        value = post[row, k] * whole
        for j in range(STREAMS):
            value = fma(comb[row, j, k], old[j], value)
        streams[row, k, d] = value


# ---- launch ------------------------------------------------------------------------------------

def _check(streams, fn, seats, partial):
    n, count, width = streams.shape
    assert count == STREAMS and width % UNIT == 0, streams.shape
    assert fn.dtype == np.uint16 and fn.shape in ((OUTPUTS, count * width),
                                                  (THIRDS * OUTPUTS, count * width)), fn.shape
    assert partial.shape == (n, parts(width), SUMS) and seats.size == n, (partial.shape, n)
    groups = GROUPS if n >= MANY else 1
    return (parts(width), -(-n // (ROWS * groups))), fn.shape[0] // OUTPUTS, groups


def hyper_first_cuda(streams, post, comb, fn, seats, partial, stream):
    """partial of the first site, from streams as they are; post and comb: any, not read."""
    grid, planes, groups = _check(streams, fn, seats, partial)
    if len(streams):
        turn_kernel(False, planes)[grid, 32 * WARPS, stream](
            streams, streams, post, comb, fn, seats, groups, partial)


def hyper_out_cuda(streams, y, post, comb, fn, seats, partial, stream):
    """Write a sublayer's result y back into streams; partial of the next site, whose weights fn
    are. fn None: no site follows."""
    n, _, width = streams.shape
    assert y.shape[1:] == (n, width) and post.shape == (n, STREAMS), (y.shape, post.shape)
    assert comb.shape == (n, STREAMS, STREAMS) and seats.size == n, comb.shape
    if fn is None:
        if n:
            _out_kernel[(n, -(-width // TILE)), TILE, stream](streams, y, post, comb, seats)
        return
    grid, planes, groups = _check(streams, fn, seats, partial)
    if n:
        turn_kernel(True, planes)[grid, 32 * WARPS, stream](
            streams, y, post, comb, fn, seats, groups, partial)
