"""KDA on the device: one recurrence kernel for a decode row and a prefill chunk (formulas in kda).

| name | shape | dtype | |
|---|---|---|---|
| **reads** rows | [n, 3 hl D + 2 D + hl] | float32 | product of w.inp: q, k, v, f_a, g_a, b |
| forget, gate | [n, hl D] | float32 | products of w.f_b and w.g_b, before their sigmoids |
| taps | [3 hl D, T] | float32 | depthwise taps, oldest row first |
| decay, dt_bias, o_norm | [hl], [hl D], [D] | float32 | |
| seats | [n] | int32 | rows of a seat together and in order; negative: padding, untouched |
| **modifies** state | [seats, hl, D, D] | float32 | S[key channel, value channel] |
| history | [seats, T - 1, 3 hl D] | float32 | last rows of q, k, v before the convolution |
| **writes** out | [n, hl D] | uint16 (BF16) | what enters o_proj |
| scratch | qkv [n, 3 hl D], keep [n, hl D], beta [n, hl], o [n, hl D], float32 | | |

prepare: convolution, unit q and k, decay factors; recur: the states; finish: norm and gate of o.
Between `rows` and `prepare` stand the caller's products of BF16 f_a and g_a (`narrow_cuda`).

Order. Convolution: taps ascending. Sums of squares over D: `block_sum`, a thread a channel. A warp
owns 8 value channels of a head's state and keeps them in registers for all rows of its seat; lane
2 p + s holds the keys p, p + 16, p + 32, ... of channels 4 s .. 4 s + 3, sums over its keys ascend
and the 16 p are added as a butterfly (distance 8, 4, 2, 1). Every product is a fused multiply-add.
The state is read and written once a call and a float32 in a register is the one in memory, so a
prompt may be cut into calls anywhere. Empty case: no heads, no rows launch nothing.
Bytes: decode is bound by 2 * 4 hl D^2 for each seat.
"""

import math
from functools import lru_cache

import numpy as np
from numba import float32, int32, int64

from engine.device import (FULL, INLINE, KERNEL, add_rn, bits_float, block_sum, cuda, float_bits,
                           fma, ld128, mul_rn, narrow, rsqrt, sigmoid, st128)

UNIT_EPS = 1e-6         # as in kda
GROUPS = 16             # of keys: pairs of lanes
WIDE = 8                # value channels a warp: 32 B, what a row of the state is read in
WARPS = 4               # a block's rows of the state are whole 128 B lines


# ---- prepare -----------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def _convolved(rows, taps, history, seat, row, behind, channel):
    """silu of the causal convolution at a row with `behind` rows of its seat before it in rows."""
    depth = int32(taps.shape[1])
    total = float32(0)
    for t in range(depth):
        back = depth - 1 - t
        if back <= behind:
            value = rows[row - back, channel]
        else:
            value = history[seat, depth - 1 - back + behind, channel]
        total = fma(value, taps[channel, t], total)
    return total * sigmoid(total)


@cuda.jit(**KERNEL)
def _prepare_kernel(rows, forget, taps, decay, dt_bias, bound, history, seats, qkv, keep, beta):
    # grid (n, hl), block D: a thread a channel
    scratch = cuda.shared.array(32, float32)
    row = int64(cuda.blockIdx.x)
    head, thread, width = cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
    heads = cuda.gridDim.y
    seat = int64(seats[row])
    if seat < 0:
        return
    behind = 0
    while behind < taps.shape[1] - 1 and row > behind and seats[row - behind - 1] == seat:
        behind += 1
    channel = head * width + thread
    all_heads = heads * width
    q = _convolved(rows, taps, history, seat, row, behind, channel)
    k = _convolved(rows, taps, history, seat, row, behind, all_heads + channel)
    v = _convolved(rows, taps, history, seat, row, behind, 2 * all_heads + channel)
    q_size = math.sqrt(block_sum(mul_rn(q, q), scratch) + float32(UNIT_EPS))
    k_size = math.sqrt(block_sum(mul_rn(k, k), scratch) + float32(UNIT_EPS))
    qkv[row, channel] = q * (rsqrt(float32(width)) / q_size)
    qkv[row, all_heads + channel] = k * (float32(1) / k_size)
    qkv[row, 2 * all_heads + channel] = v
    logit = decay[head] * add_rn(forget[row, channel], dt_bias[channel])
    keep[row, channel] = math.exp(bound * sigmoid(logit))
    if thread == 0:
        beta[row, head] = sigmoid(rows[row, rows.shape[1] - heads + head])


def prepare_cuda(rows, forget, taps, decay, dt_bias, bound, history, seats, qkv, keep, beta,
                 stream):
    """qkv, keep and beta of n rows; history is read, and moved on by recur_cuda."""
    n, heads = beta.shape
    if n and heads:
        width = keep.shape[1] // heads
        assert width % 32 == 0 and width <= 1024 and qkv.shape == (n, 3 * heads * width), qkv.shape
        assert rows.shape == (n, 3 * heads * width + 2 * width + heads), (rows.shape, heads, width)
        assert forget.shape == keep.shape == (n, heads * width) and seats.size == n, forget.shape
        assert history.shape[1:] == (taps.shape[1] - 1, taps.shape[0]), (history.shape, taps.shape)
        _prepare_kernel[(n, heads), width, stream](
            rows, forget, taps, decay, dt_bias, np.float32(bound), history, seats, qkv, keep, beta)


# ---- recur -------------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def _over_keys(sums, lane):
    """Sum of 4 values over the 16 key groups: channel 2 (lane >> 4) + (lane >> 3 & 1) of the 4."""
    for i in range(2):
        stays, goes = sums[i], sums[i + 2]
        if lane & 16:
            stays, goes = goes, stays
        sums[i] = add_rn(stays, cuda.shfl_xor_sync(FULL, goes, 16))
    stays, goes = sums[0], sums[1]
    if lane & 8:
        stays, goes = goes, stays
    total = add_rn(stays, cuda.shfl_xor_sync(FULL, goes, 8))
    total = add_rn(total, cuda.shfl_xor_sync(FULL, total, 4))
    return add_rn(total, cuda.shfl_xor_sync(FULL, total, 2))


@lru_cache(None)
def recur_kernel(width):
    """The kernel for heads of `width` channels, a multiple of 16."""
    keys = width // GROUPS              # a lane
    held = 4 * keys

    @cuda.jit(**KERNEL)
    def _recur_kernel(rows, qkv, keep, beta, seats, state, history, o):
        # grid (seats, hl, slices of the value channels), block up to WARPS warps of WIDE channels
        s = cuda.local.array(held, float32)
        q = cuda.local.array(keys, float32)
        k = cuda.local.array(keys, float32)
        e = cuda.local.array(keys, float32)
        next_q = cuda.local.array(keys, float32)
        next_k = cuda.local.array(keys, float32)
        next_e = cuda.local.array(keys, float32)
        sums = cuda.local.array(4, float32)
        run = cuda.shared.array(2, int32)
        seat, head, thread = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), cuda.threadIdx.x
        # ---- rows of this seat: run[0] .. run[1] - 1
        n = int32(qkv.shape[0])
        if thread == 0:
            run[0] = 0
            run[1] = 0
        cuda.syncthreads()
        for i in range(thread, n, cuda.blockDim.x):
            if seats[i] == seat:
                if i == 0 or seats[i - 1] != seat:
                    run[0] = i
                if i == n - 1 or seats[i + 1] != seat:
                    run[1] = i + 1
        cuda.syncthreads()
        first, last = run[0], run[1]
        if first == last:
            return
        # ---- what the next call's convolution needs of these rows
        all_heads = int32(qkv.shape[1] // 3)
        if cuda.blockIdx.z == 0:
            depth = int32(history.shape[1])
            for i in range(thread, 3 * width, cuda.blockDim.x):
                channel = i // width * all_heads + head * width + i % width
                for t in range(depth):
                    source = last - depth + t
                    if source >= first:
                        history[seat, t, channel] = rows[source, channel]
                    else:
                        history[seat, t, channel] = history[seat, t + last - first, channel]
        # ---- state into registers
        lane = thread & 31
        group = lane >> 1
        column = int32(cuda.blockIdx.z * (cuda.blockDim.x >> 5) + (thread >> 5)) * WIDE
        column += (lane & 1) * 4
        place = ((int64(seat) * state.shape[1] + head) * width + group) * width + column
        for m in range(keys):
            words = ld128(state, place + m * (GROUPS * width))
            for c in range(4):
                s[4 * m + c] = bits_float(words[c])
        # ---- rows, the next one's factors asked for before this one's are used
        key = head * width + group
        own = head * width + column + (lane >> 4) * 2 + (lane >> 3 & 1)     # after _over_keys
        for m in range(keys):
            next_q[m] = qkv[first, key + m * GROUPS]
            next_k[m] = qkv[first, all_heads + key + m * GROUPS]
            next_e[m] = keep[first, key + m * GROUPS]
        next_v = qkv[first, 2 * all_heads + own]
        next_beta = beta[first, head]
        for i in range(first, last):
            for m in range(keys):
                q[m], k[m], e[m] = next_q[m], next_k[m], next_e[m]
            v, b = next_v, next_beta
            following = int64(min(i + 1, last - 1))
            for m in range(keys):
                next_q[m] = qkv[following, key + m * GROUPS]
                next_k[m] = qkv[following, all_heads + key + m * GROUPS]
                next_e[m] = keep[following, key + m * GROUPS]
            next_v = qkv[following, 2 * all_heads + own]
            next_beta = beta[following, head]
            # ---- decay, and what the state answers to k
            for c in range(4):
                sums[c] = float32(0)
            for m in range(keys):
                for c in range(4):
                    s[4 * m + c] = mul_rn(e[m], s[4 * m + c])
                    sums[c] = fma(k[m], s[4 * m + c], sums[c])
            error = mul_rn(b, add_rn(v, -_over_keys(sums, lane)))
            # ---- correct, and read with q
            for c in range(4):
                change = cuda.shfl_sync(FULL, error, (lane & 7) | c << 3)
                sums[c] = float32(0)
                for m in range(keys):
                    s[4 * m + c] = fma(k[m], change, s[4 * m + c])
                    sums[c] = fma(q[m], s[4 * m + c], sums[c])
            answer = _over_keys(sums, lane)
            if lane & 6 == 0:
                o[i, own] = answer
        # ---- and back
        for m in range(keys):
            st128(state, place + m * (GROUPS * width),
                  float_bits(s[4 * m]), float_bits(s[4 * m + 1]),
                  float_bits(s[4 * m + 2]), float_bits(s[4 * m + 3]))

    return _recur_kernel


def recur_cuda(rows, qkv, keep, beta, seats, state, history, o, stream):
    """o [n, hl D] from the states, which move on (state, history are modified)."""
    n, heads = beta.shape
    if n and heads:
        width = state.shape[2]
        assert state.shape[1:] == (heads, width, width) and width % 16 == 0, state.shape
        assert o.shape == keep.shape == (n, heads * width) and qkv.shape == (n, 3 * heads * width)
        assert history.shape[0] == state.shape[0] and history.shape[2] == 3 * heads * width
        warps = math.gcd(WARPS, width // WIDE)
        recur_kernel(width)[(state.shape[0], heads, width // (warps * WIDE)), 32 * warps, stream](
            rows, qkv, keep, beta, seats, state, history, o)


# ---- finish ------------------------------------------------------------------------------------

@cuda.jit(**KERNEL)
def _finish_kernel(o, gate, o_norm, eps, seats, out):
    # grid (n, hl), block D
    scratch = cuda.shared.array(32, float32)
    row = int64(cuda.blockIdx.x)
    thread = cuda.threadIdx.x
    if seats[row] < 0:
        return
    channel = cuda.blockIdx.y * cuda.blockDim.x + thread
    value = o[row, channel]
    root = rsqrt(block_sum(mul_rn(value, value), scratch) / float32(cuda.blockDim.x) + eps)
    out[row, channel] = narrow(value * root * o_norm[thread] * sigmoid(gate[row, channel]))


def finish_cuda(o, gate, o_norm, eps, seats, out, stream):
    """out [n, hl D] uint16 (BF16) = RMS norm of each head's o times sigmoid of the gate."""
    n, width = o.shape[0], o_norm.size
    heads = o.shape[1] // width
    if n and heads:
        assert width % 32 == 0 and gate.shape == o.shape == out.shape, (o.shape, gate.shape)
        _finish_kernel[(n, heads), width, stream](
            o, gate, o_norm, np.float32(eps), seats, out)
