"""KDA on the device between its two big products: one arithmetic for a decode row and a prompt
chunk (formulas in kda, order of sums in kda_row_cuda).

| name | shape | dtype | |
|---|---|---|---|
| **reads** rows | [n, 3 hl D + 2 D + hl] | float32 | product of w.inp: q, k, v, f_a, g_a, b |
| w.f_b, w.g_b | [hl D, D] | uint16 (BF16) | decay and output gate |
| w.conv | [3 hl D, T] | float32 | depthwise taps, oldest row first |
| w.decay, dt_bias, o_norm | [hl], [hl D], [D] | float32 | |
| seats | [n] | int32 | rows of a seat together and in order; negative: padding, untouched |
| **modifies** state | [seats, hl, D, D] | float32 | S[key channel, value channel] |
| history | [seats, T - 1, 3 hl D] | float32 | last rows of q, k, v before the convolution |
| **writes** out | [n, hl D] | uint16 (BF16) | what enters o_proj |
| scratch | factors [n, hl, 4 D + 4], o [n, hl D] | float32 | q, k, e^g, v, beta, q.k of a head |

D is 32, 64 or 128. Up to FEW rows: one launch, a block for a head and seat from `rows` to `out`.
More: the three kernels of kda_chunk_cuda, through factors and o. The state is read and written once
a call and a float32 in a register is the one in memory, so a prompt may be cut into calls anywhere.
Empty case: no heads, no rows launch nothing.
Bytes: decode is bound by 2 * 4 hl D^2 for each seat and the 4 hl D^2 of f_b and g_b.
"""

from functools import lru_cache

import numpy as np
from numba import float32, int32, int64, uint16, uint32

from engine.device import (INLINE, KERNEL, add_rn, cuda, fma, mul_rn, narrow, shared_address,
                           sigmoid)
from engine.model.kda_chunk_cuda import SLICE, TILE, finish_kernel, prepare_kernel, recur_kernel
from engine.model.kda_row_cuda import (COLUMNS, GROUPS, convolved, correct_state, decay_state,
                                       finish, kept, load_keys, load_state, load_window, load_words,
                                       over_keys, own_column, product, spread, store_state,
                                       unit_factors)

FEW = 32                # rows of the one launch: faster up to there, for rows of as many seats
ONE_BLOCK = {**KERNEL, "max_registers": 128} if KERNEL else {}      # of 512 threads fits an SM


@cuda.jit(**INLINE)
def _load_either(f_b, g_b, of_f, place, parts, words):
    if of_f:
        load_words(f_b, place, parts, words)
    else:
        load_words(g_b, place, parts, words)


@lru_cache(None)
def few_kernel(width, depth):
    """The kernel for heads of `width` channels and convolutions of `depth` rows."""
    parts, keys = width // 32, width // GROUPS
    held, words_held, record, twice = 4 * keys, 8 * parts, 4 * width + 4, 2 * width

    @cuda.jit(**ONE_BLOCK)
    def _few_kernel(rows, f_b, g_b, taps, decay, dt_bias, o_norm, bound, eps, seats, state, history,
                    out):
        # grid (hl, n), 4 D threads: the block of a seat's first row goes through all of them; a
        # thread has a channel of q, k or v, or a factor e^g
        low = cuda.shared.array(twice, uint16)
        gates = cuda.shared.array(twice, float32)
        factors = cuda.shared.array(record, float32)
        answers = cuda.shared.array(width, float32)
        gains = cuda.shared.array(width, float32)
        s = cuda.local.array(held, float32)
        sums = cuda.local.array(4, float32)
        q = cuda.local.array(keys, float32)
        k = cuda.local.array(keys, float32)
        e = cuda.local.array(keys, float32)
        words = cuda.local.array(words_held, uint32)
        o = cuda.local.array(parts, float32)
        q_parts = cuda.local.array(parts, float32)
        k_parts = cuda.local.array(parts, float32)
        tap = cuda.local.array(depth, float32)
        values = cuda.local.array(depth, float32)
        head, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        first, n = int32(cuda.blockIdx.y), int32(seats.shape[0])
        heads = int32(cuda.gridDim.x)
        own, last_column = heads * width, int32(rows.shape[1])
        lane, warp = thread & 31, thread >> 5
        kind, channel = thread // width, thread % width
        group, pair = lane >> 2, lane & 3
        mine = head * width + channel
        conv_channel = min(kind, 2) * own + mine
        # ---- everything that memory must bring is asked for before any of it is used
        seat = int64(seats[first])
        before = int32(-1)
        if first > 0:
            before = seats[first - 1]
        for t in range(depth):
            tap[t] = taps[conv_channel, t]
        bias, rate = dt_bias[mine], decay[head]
        gain = o_norm[channel]
        output = (int64(head) * width + (warp * 16 + group) % width) * width + 8 * pair
        of_f = warp < width // 16       # the other half of the warps has g_b
        _load_either(f_b, g_b, of_f, output, parts, words)
        if seat < 0 or before == seat:
            return
        load_window(rows, history, seat, first, 0, conv_channel, depth, values)
        low_value = rows[first, 3 * own + thread % twice]
        logit = rows[first, last_column - heads + head]
        place = (seat * heads + head) * width * width + warp * COLUMNS
        load_state(state, place, lane, keys, width, s)
        low_at, at = shared_address(low), shared_address(factors)
        column = warp * COLUMNS + own_column(lane)
        i = first
        more = True
        while more:
            if thread < twice:
                low[thread] = narrow(low_value)
            if kind < 3:
                factors[(kind + (kind >> 1)) * width + channel] = convolved(values, tap, depth)
            else:
                gains[channel] = gain
            cuda.syncthreads()
            sums_low = product(words, low_at + (0 if of_f else 2 * width) + 16 * pair, parts)
            if pair == 0:               # every column of the product is the same row
                gates[warp * 16 + group] = sums_low[0]
                gates[warp * 16 + group + 8] = sums_low[2]
            by_q, by_k, qk = float32(0), float32(0), float32(0)
            if kind < 2:
                for c in range(parts):
                    q_parts[c] = factors[lane + 32 * c]
                    k_parts[c] = factors[width + lane + 32 * c]
                by_q, by_k, qk = unit_factors(q_parts, k_parts, parts, width)
            cuda.syncthreads()
            if kind < 2:
                factors[thread] = mul_rn(factors[thread], by_q if kind == 0 else by_k)
            elif kind == 3:
                factors[2 * width + channel] = kept(gates[channel], rate, bias, bound)
            if thread == 0:
                factors[4 * width] = sigmoid(logit)
                factors[4 * width + 1] = qk
            cuda.syncthreads()
            load_keys(at, lane, keys, q)
            load_keys(at + 4 * width, lane, keys, k)
            load_keys(at + 8 * width, lane, keys, e)
            decay_state(s, e, keys)
            one, other = over_keys(s, k, keys, lane, sums)
            error = mul_rn(factors[4 * width], add_rn(factors[3 * width + column],
                                                      -add_rn(one, other)))
            one, other = over_keys(s, q, keys, lane, sums)
            answer = fma(factors[4 * width + 1], error, add_rn(one, other))
            spread(error, lane, sums)
            correct_state(s, k, keys, sums)
            if lane & GROUPS // 4 - 1 == 0:
                answers[column] = answer
            cuda.syncthreads()
            if warp == 0:
                for c in range(parts):
                    o[c] = answers[lane + 32 * c]
                    q_parts[c] = gains[lane + 32 * c]
                finish(o, gates, width, parts, q_parts, eps, out, i, head * width)
            i += 1
            more = i < n and seats[min(i, n - 1)] == seat
            if more:
                load_window(rows, history, seat, i, i - first, conv_channel, depth, values)
                low_value = rows[i, 3 * own + thread % twice]
                logit = rows[i, last_column - heads + head]
                _load_either(f_b, g_b, of_f, output, parts, words)
        store_state(state, place, lane, keys, width, s)
        if kind < 3:
            for t in range(depth - 1):
                history[seat, t, conv_channel] = values[t + 1]

    return _few_kernel


# ---- launch ------------------------------------------------------------------------------------

def kda_cuda(rows, w, bound, eps, seats, state, history, factors, o, out, stream):
    """out of n rows; w: the layer's device weights; state and history move on (modified)."""
    n, heads, width = seats.size, state.shape[1], state.shape[2]
    if not n or not heads:
        return
    own = heads * width
    f_b, g_b = w.f_b.w, w.g_b.w
    assert width in (32, 64, 128) and state.shape[3] == width, state.shape
    assert rows.shape == (n, 3 * own + 2 * width + heads) and out.shape == (n, own), rows.shape
    assert f_b.shape == g_b.shape == (own, width) and f_b.dtype == g_b.dtype == np.uint16, f_b.dtype
    assert history.shape == (len(state), w.conv.shape[1] - 1, 3 * own), history.shape
    assert w.conv.shape[0] == 3 * own and w.decay.size == heads, w.conv.shape
    assert w.dt_bias.size == own and w.o_norm.size == width, w.dt_bias.shape
    bound, eps = np.float32(bound), np.float32(eps)
    depth = w.conv.shape[1]
    if n <= FEW:
        few_kernel(width, depth)[(heads, n), 4 * width, stream](
            rows, f_b, g_b, w.conv, w.decay, w.dt_bias, w.o_norm, bound, eps, seats, state, history,
            out)
        return
    assert factors.shape == (n, heads, 4 * width + 4) and o.shape == (n, own), factors.shape
    tiles, columns = (heads, -(-n // TILE)), min(width, SLICE)
    factors = factors.reshape(factors.size)
    prepare_kernel(width, depth)[tiles, 2 * width, stream](
        rows, f_b, w.conv, w.decay, w.dt_bias, bound, history, seats, factors)
    recur_kernel(width)[heads * (width // columns), columns // COLUMNS * 32, stream](
        rows, factors, seats, state, history, o.reshape(o.size))
    finish_kernel(width)[tiles, 2 * width, stream](rows, g_b, o, w.o_norm, eps, seats, out)
