"""A row of a KDA head on the device, in pieces: the kernels for few rows (kda_cuda) and for many
(kda_chunk_cuda) are put together from them, so both give the same bits. Formulas: kda.

Order. f_b and g_b: BF16 f_a, g_a; a chain of mma.sync m16n8k16 from 0, 32 k a pair: lane 4 g + t
brings k = 8 t .. 8 t + 3 to the first and 8 t + 4 .. 8 t + 7 to the second. Convolution: taps
ascend. q.q, k.k, q.k and o.o over D: lane l sums channels l, l + 32, ... in ascending order, then
`warp_sum`. A row of a state: S = e S; then k.S and q.S over keys; then err = beta (v - k.S),
S += k err, o = q.S + (q.k) err. GROUPS lanes share a column's keys: lane p has keys 4 p .. 4 p + 3,
those 4 GROUPS further, ... (2 p, 2 p + 1 where D = 32), sums its own in ascending order, and lanes
are added in pairs at distance 8, 4, 2, 1. Sums are fused multiply-adds; all else is rounded alone.

A warp holds COLUMNS value columns of a head's state in registers: lane p + GROUPS s the keys of
group p and columns 4 s .. 4 s + 3, in s [keys][4] (float32, keys = D / GROUPS). `width` is D and,
like `depth`, `keys` and `parts` = D / 32, a constant of the kernel.
"""

import math

from numba import float32, int32

from engine.device import (FULL, INLINE, U32, add_rn, bits_float, cuda, float_bits, fma, ld128,
                           ldg128, lds32, lds128, mma_bf16, mul_rn, narrow, rsqrt, sigmoid,
                           st128, warp_sum)

UNIT_EPS = 1e-6         # as in kda
GROUPS = 16             # lanes that share a column's keys
HALF = GROUPS // 2      # the bit of a lane that ends with column 2 or 3 of its four, not 0 or 1
COLUMNS = 128 // GROUPS


# ---- factors -----------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def rows_behind(seats, row, seat, depth):
    """How many of the depth - 1 rows before `row` stand in rows and are its seat's."""
    behind = 0
    while behind < depth - 1 and row > behind and seats[row - behind - 1] == seat:
        behind += 1
    return behind


@cuda.jit(**INLINE)
def load_window(rows, history, seat, row, behind, channel, depth, values):
    """values [depth]: what the convolution at `row` sees, `behind` rows before it in rows."""
    for t in range(depth):
        if depth - 1 - t <= behind:
            values[t] = rows[row - (depth - 1 - t), channel]
        else:
            values[t] = history[seat, t + behind, channel]


@cuda.jit(**INLINE)
def convolved(values, taps, depth):
    """silu of the convolution of values [depth]."""
    total = float32(0)
    for t in range(depth):
        total = fma(values[t], taps[t], total)
    return total * sigmoid(total)


@cuda.jit(**INLINE)
def unit_factors(q, k, parts, width):
    """(factor of q, factor of k, q.k after both); q, k [parts]: the lane's channels of a row."""
    qq, kk, qk = float32(0), float32(0), float32(0)
    for c in range(parts):
        qq, kk, qk = fma(q[c], q[c], qq), fma(k[c], k[c], kk), fma(q[c], k[c], qk)
    qq, kk, qk = warp_sum(qq), warp_sum(kk), warp_sum(qk)
    by_q = rsqrt(float32(width)) / math.sqrt(add_rn(qq, float32(UNIT_EPS)))
    by_k = float32(1) / math.sqrt(add_rn(kk, float32(UNIT_EPS)))
    return by_q, by_k, mul_rn(mul_rn(qk, by_q), by_k)


@cuda.jit(**INLINE)
def kept(forget, decay, dt_bias, bound):
    """The factor e^g that a key channel keeps."""
    return math.exp(mul_rn(bound, sigmoid(mul_rn(decay, add_rn(forget, dt_bias)))))


# ---- products with f_b and g_b -----------------------------------------------------------------

@cuda.jit(**INLINE)
def load_words(w, place, parts, words):
    """words [8 parts] of a lane: of output g and of g + 8, 8 k from 8 t + 32 c on.

    place: the element of w at output g, k = 8 t of lane 4 g + t.
    """
    for c in range(parts):
        upper, lower = ldg128(w, place + 32 * c), ldg128(w, place + 256 * parts + 32 * c)
        for i in range(4):
            words[8 * c + i] = upper[i]
            words[8 * c + 4 + i] = lower[i]


@cuda.jit(**INLINE)
def product(words, low, parts):
    """Sums c0 .. c3 of mma_bf16: 16 outputs x 8 rows; low: shared address of the lane's 8 k."""
    sums = (float32(0), float32(0), float32(0), float32(0))
    for c in range(parts):
        x = lds128(U32(low + 64 * c))
        i = 8 * c
        sums = mma_bf16(words[i], words[i + 4], words[i + 1], words[i + 5], x[0], x[1],
                        sums[0], sums[1], sums[2], sums[3])
        sums = mma_bf16(words[i + 2], words[i + 6], words[i + 3], words[i + 7], x[2], x[3],
                        sums[0], sums[1], sums[2], sums[3])
    return sums


# ---- a row of a state --------------------------------------------------------------------------

@cuda.jit(**INLINE)
def own_column(lane):
    """The column of the warp whose sum `over_keys` ends with in this lane."""
    return 4 * (lane // GROUPS) + (2 if lane & HALF else 0) + (1 if lane & HALF // 2 else 0)


@cuda.jit(**INLINE)
def _place(m, lane, keys, width):
    """Where key m and column 0 of a lane lie in a head's state, from the warp's column 0 on."""
    unit = 4 if keys % 4 == 0 else keys
    key = m // unit * unit * GROUPS + (lane & GROUPS - 1) * unit + m % unit
    return key * width + 4 * (lane // GROUPS)


@cuda.jit(**INLINE)
def load_state(state, place, lane, keys, width, s):
    """s from state; place: the element at the head's key 0 and the warp's column 0."""
    for m in range(keys):
        words = ld128(state, place + _place(m, lane, keys, width))
        for c in range(4):
            s[4 * m + c] = bits_float(words[c])


@cuda.jit(**INLINE)
def store_state(state, place, lane, keys, width, s):
    """The reverse of load_state."""
    for m in range(keys):
        st128(state, place + _place(m, lane, keys, width), float_bits(s[4 * m]),
              float_bits(s[4 * m + 1]), float_bits(s[4 * m + 2]), float_bits(s[4 * m + 3]))


@cuda.jit(**INLINE)
def load_keys(where, lane, keys, into):
    """into [keys]: the lane's of D float32 from the shared address `where` on."""
    where += (lane & GROUPS - 1) * (16 if keys % 4 == 0 else 4 * keys)
    if keys % 4 == 0:
        for u in range(keys // 4):
            words = lds128(U32(where + u * 16 * GROUPS))
            for c in range(4):
                into[4 * u + c] = bits_float(words[c])
    else:
        for m in range(keys):
            into[m] = lds32(U32(where + 4 * m))


@cuda.jit(**INLINE)
def decay_state(s, e, keys):
    """s = e s."""
    for m in range(keys):
        for c in range(4):
            s[4 * m + c] = mul_rn(e[m], s[4 * m + c])


@cuda.jit(**INLINE)
def over_keys(s, k, keys, lane, sums):
    """(a, b): k.s over all keys, of column own_column, is a + b; sums [4]: scratch.

    The last addition is the caller's, who may have other work while b crosses the warp.
    """
    for c in range(4):
        sums[c] = float32(0)
    for m in range(keys):
        for c in range(4):
            sums[c] = fma(k[m], s[4 * m + c], sums[c])
    for c in range(2):
        stays, goes = sums[c], sums[c + 2]
        if lane & int32(HALF):
            stays, goes = goes, stays
        sums[c] = add_rn(stays, cuda.shfl_xor_sync(FULL, goes, HALF))
    stays, goes = sums[0], sums[1]
    if lane & int32(HALF // 2):
        stays, goes = goes, stays
    total = add_rn(stays, cuda.shfl_xor_sync(FULL, goes, HALF // 2))
    total = add_rn(total, cuda.shfl_xor_sync(FULL, total, HALF // 4))
    return total, cuda.shfl_xor_sync(FULL, total, HALF // 8)


@cuda.jit(**INLINE)
def spread(error, lane, errors):
    """errors [4]: those of the lane's columns, each lane bringing that of own_column."""
    source = lane & ~(2 * HALF - 1)
    for c in range(4):
        errors[c] = cuda.shfl_sync(FULL, error, source | (c >> 1) * HALF | (c & 1) * (HALF // 2))


@cuda.jit(**INLINE)
def correct_state(s, k, keys, errors):
    """s += k error."""
    for m in range(keys):
        for c in range(4):
            s[4 * m + c] = fma(k[m], errors[c], s[4 * m + c])


# ---- the way out -------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def finish(o, gate, at, parts, norm, eps, out, row, channel):
    """A warp's row of out: RMS norm of o [parts] with weights norm [parts], both the lane's, times
    sigmoid of gate (shared, from `at`), to the head's D channels from `channel` on."""
    total = float32(0)
    for c in range(parts):
        total = fma(o[c], o[c], total)
    root = rsqrt(add_rn(warp_sum(total) / float32(32 * parts), eps))
    lane = cuda.threadIdx.x & 31
    for c in range(parts):
        i = lane + 32 * c
        out[row, channel + i] = narrow(o[c] * root * norm[c] * sigmoid(gate[at + i]))
