"""Stage 2 on CUDA: score the pooled keys on tensor cores, keep the best P of them exactly.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | query | [n, index_heads, index_dim] | float32 | rounded to BF16; at most 32 x 128 |
| reads | weight, seats, positions, table | as in score.py | | seat -1: a padding row |
| reads | keys | [local pages, pools a page, index_dim] | uint16 (BF16) | index_dim % 8 == 0 |
| between | found | [batch, pools] | float32 | scores by place among the group's pools |
| between | bins, near | [batch, 4096] | int32 | bins and fill are zero between calls |
| between | fill | [batch] | int32 | |
| writes | scores, pools, counts | [n, P], [n, P], [n] | as in score.py | P at most 512 |
| modifies | faults | [1] | int32 | grows by the number of NaN scores |

Order of one score, whoever else is scored: a dot is one float32 chain of eight mma.sync steps over
d ascending by 32 (inside 32, step 0 takes d % 8 = 0..3, step 1 the others); lane t adds weight *
max(dot * scale, 0) of heads 2t, 2t + 1, 8 + 2t, 8 + 2t + 1, ... in this order by fma; the four
lanes are added as (0 + 1) + (2 + 3). The total order is that of score.py.

Three kernels. The first writes scores and counts them by the 12 leading bits of their order key.
The second finds the bin in which the P-th lies and lists the places of all up to it. The third
selects by radix on the whole 64-bit keys, unique because the pool is in them, and sorts; where more
than 4,096 places are near (ties), it reads all scores again instead. Order of integer atomics
decides where a place is listed, never what is selected. Bytes: every scored key once a row; rows of
one seat side by side find them in L2.
"""

import numpy as np
from numba import types

from engine.device import (FULL, F32, I64, INLINE, KERNEL, U32, U64, add_rn, cuda, fma, ldg128,
                           lds128, mul_rn, mma_bf16, narrow2, order_key, order_score,
                           shared_address)

MOST = 512      # pools kept at most: one thread each sorts them
HEADS = 32      # at most; fewer are padded with zeros, as are narrower keys
WIDTH = 128
BINS = 4096     # sign, exponent and three bits of mantissa: 16 KiB of shared counters
NEAR = 4096     # listed places a row: 32 KiB of keys in shared memory
BLOCKS = 264    # two a multiprocessor of the largest device: one wave
_ASKED = HEADS * WIDTH // 2
_LISTED = 1024  # places that a block gathers before it asks for room


@cuda.jit(**INLINE)
def _held(seen, a_page, start, step):
    """How many of the pools 0 .. seen - 1 lie on pages start, start + step, ..."""
    pages = ((seen + a_page - 1) // a_page - start + step - 1) // step
    if pages <= 0:
        return I64(0)
    over = (start + (pages - 1) * step + 1) * a_page - seen
    return I64(pages * a_page - max(over, 0))


@cuda.jit(**INLINE)
def _place_pool(place, a_page, start, step):
    """The pool at a place among the group's pools; it ascends with the place."""
    return (start + place // a_page * step) * a_page + place % a_page


@cuda.jit(**INLINE)
def _relu(x):
    """max(x, 0) that keeps NaN."""
    return F32(0.0) if x < F32(0.0) else x


@cuda.jit(**INLINE)
def _bin(score):
    return I64(order_key(score, 0) >> U64(52))


@cuda.jit(**INLINE)
def _key_row(table, seat, place, held, a_page, start, step):
    """Row of `keys` at a place, 0 past the end."""
    if place >= held:
        return I64(0)
    return I64(table[seat, start + place // a_page * step]) * a_page + place % a_page


@cuda.jit(**INLINE)
def _load_keys(keys, row, words):
    """16 keys as mma operands: words[16 s + ...] of the rows `row` of lanes g and g + 8."""
    lane = cuda.threadIdx.x & 31
    width = keys.shape[2]
    for side in range(2):
        first = cuda.shfl_sync(FULL, row, (lane >> 2) + 8 * side) * width
        for part in range(4):
            d = 8 * (lane & 3) + 32 * part
            a, b, c, e = U32(0), U32(0), U32(0), U32(0)
            if d < width:
                a, b, c, e = ldg128(keys, first + d)
            words[8 * part + side], words[8 * part + 2 + side] = a, b
            words[8 * part + 4 + side], words[8 * part + 6 + side] = c, e


@cuda.jit(**KERNEL)
def _score_kernel(query, weight, seats, positions, table, keys, scale, kpool, keep, group, groups,
                  first, found, bins, faults):
    # grid (batch, parts), 256 threads; a warp takes every (8 parts)-th sixteen of the pools
    asked = cuda.shared.array(_ASKED, U32, alignment=16)
    weights = cuda.shared.array(HEADS, F32)
    counted = cuda.shared.array(BINS, types.int32)
    batch = cuda.blockIdx.x
    i, thread = first + batch, cuda.threadIdx.x
    lane, warp = thread & 31, thread >> 5
    a_page = keys.shape[1]
    start, step = (group, groups) if group >= 0 else (0, 1)
    seen = (positions[i] + 1) // kpool
    if seats[i] < 0 or seen <= keep:
        return
    held = _held(seen, a_page, start, step)
    if cuda.blockIdx.y * 128 >= held:
        return

    # --- the row's query as mma operands: lane 4 g + t of (8 heads, 32 d) has d 8 t .. 8 t + 7
    heads, width = query.shape[1], query.shape[2]
    for at in range(thread, _ASKED, 256):
        word, owner, part = at & 3, (at >> 2) & 31, (at >> 7) & 3
        h = (at >> 9) * 8 + (owner >> 2)
        d = 32 * part + 8 * (owner & 3) + 2 * word
        asked[at] = U32(0)
        if h < heads and d < width:
            asked[at] = narrow2(query[i, h, d], query[i, h, d + 1])
    if thread < HEADS:
        weights[thread] = weight[i, thread] if thread < heads else F32(0.0)
    for at in range(thread, BINS, 256):
        counted[at] = 0
    cuda.syncthreads()

    # --- keys one sixteen ahead, their rows two ahead
    seat = seats[i]
    stride = cuda.gridDim.y * 128
    place = cuda.blockIdx.y * 128 + warp * 16
    base = shared_address(asked) + 16 * lane
    words, ahead = cuda.local.array(32, U32), cuda.local.array(32, U32)
    row = _key_row(table, seat, place + (lane & 15), held, a_page, start, step)
    _load_keys(keys, row, words)
    row = _key_row(table, seat, place + stride + (lane & 15), held, a_page, start, step)
    while place < held:
        for j in range(32):
            ahead[j] = U32(0)
        if place + stride < held:
            _load_keys(keys, row, ahead)
            row = _key_row(table, seat, place + 2 * stride + (lane & 15), held, a_page, start, step)
        score0, score1 = F32(0.0), F32(0.0)
        for eight in range(4):
            c0, c1, c2, c3 = F32(0.0), F32(0.0), F32(0.0), F32(0.0)
            for part in range(4):
                b0, b1, b2, b3 = lds128(U32(base + 512 * (4 * eight + part)))
                k = 8 * part
                c0, c1, c2, c3 = mma_bf16(words[k], words[k + 1], words[k + 2], words[k + 3],
                                          b0, b1, c0, c1, c2, c3)
                c0, c1, c2, c3 = mma_bf16(words[k + 4], words[k + 5], words[k + 6], words[k + 7],
                                          b2, b3, c0, c1, c2, c3)
            w0 = weights[8 * eight + 2 * (lane & 3)]
            w1 = weights[8 * eight + 2 * (lane & 3) + 1]
            score0 = fma(w1, _relu(mul_rn(c1, scale)), fma(w0, _relu(mul_rn(c0, scale)), score0))
            score1 = fma(w1, _relu(mul_rn(c3, scale)), fma(w0, _relu(mul_rn(c2, scale)), score1))
        for distance in (1, 2):
            score0 = add_rn(score0, cuda.shfl_xor_sync(FULL, score0, distance))
            score1 = add_rn(score1, cuda.shfl_xor_sync(FULL, score1, distance))
        mine = place + (lane >> 2) + 8 * (lane & 1)
        if lane & 3 < 2 and mine < held:
            score = score1 if lane & 1 else score0
            found[batch, mine] = score
            cuda.atomic.add(counted, _bin(score), 1)
            if score != score:
                cuda.atomic.add(faults, 0, 1)
        for j in range(32):
            words[j] = ahead[j]
        place += stride

    # --- counts to all blocks
    cuda.syncthreads()
    for at in range(thread, BINS, 256):
        if counted[at]:
            cuda.atomic.add(bins, (batch, at), counted[at])


@cuda.jit(**KERNEL)
def _collect_kernel(seats, positions, a_page, kpool, keep, group, groups, first, found, bins, near,
                    fill):
    # grid (batch, parts), 256 threads, 16 bins each
    sums = cuda.shared.array(8, types.int32)
    listed = cuda.shared.array(_LISTED, types.int32)
    shared = cuda.shared.array(4, types.int32)          # last bin, listed places, their room
    batch = cuda.blockIdx.x
    i, thread = first + batch, cuda.threadIdx.x
    lane, warp = thread & 31, thread >> 5
    start, step = (group, groups) if group >= 0 else (0, 1)
    seen = (positions[i] + 1) // kpool
    if seats[i] < 0 or seen <= keep:
        return
    held = _held(seen, a_page, start, step)

    # --- the bin of the P-th
    total = types.int32(0)
    for at in range(16 * thread, 16 * thread + 16):
        total += bins[batch, at]
    upto = total
    for distance in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, upto, distance)
        if lane >= distance:
            upto += other
    if lane == 31:
        sums[warp] = upto
    if thread == 0:
        shared[0], shared[1] = BINS - 1, 0
    cuda.syncthreads()
    for before in range(warp):
        upto += sums[before]
    if upto >= keep and upto - total < keep:
        at, upto = 16 * thread, upto - total + bins[batch, 16 * thread]
        while upto < keep:
            at += 1
            upto += bins[batch, at]
        shared[0] = at
    cuda.syncthreads()

    # --- places up to it
    last = shared[0]
    for place in range(cuda.blockIdx.y * 256 + thread, held, cuda.gridDim.y * 256):
        if _bin(found[batch, place]) <= last:
            at = cuda.atomic.add(shared, 1, 1)
            if at < _LISTED:
                listed[at] = place
            else:
                at = cuda.atomic.add(fill, batch, 1)
                if at < NEAR:
                    near[batch, at] = place
    cuda.syncthreads()
    count = min(shared[1], _LISTED)
    if thread == 0:
        shared[2] = cuda.atomic.add(fill, batch, count)
    cuda.syncthreads()
    for at in range(thread, count, 256):
        if shared[2] + at < NEAR:
            near[batch, shared[2] + at] = listed[at]


@cuda.jit(**INLINE)
def _entry(keys, fast, found, batch, at, a_page, start, step):
    """The order key of entry `at`: from shared memory, or from the scores where too many tie."""
    if fast:
        return keys[at]
    return order_key(found[batch, at], _place_pool(at, a_page, start, step))


@cuda.jit(**KERNEL)
def _pick_kernel(seats, positions, a_page, kpool, group, groups, first, found, bins, near, fill,
                 scores, pools, counts):
    # grid (batch), 512 threads
    keys = cuda.shared.array(NEAR, U64)
    best = cuda.shared.array(MOST, U64)
    digits = cuda.shared.array(256, types.int32)
    shared = cuda.shared.array(4, types.int32)          # digit, wanted of it, its count, picked
    batch = cuda.blockIdx.x
    i, thread = first + batch, cuda.threadIdx.x
    lane, keep = thread & 31, scores.shape[1]
    start, step = (group, groups) if group >= 0 else (0, 1)
    seen = (positions[i] + 1) // kpool
    if seats[i] < 0 or seen <= keep:
        if thread == 0:
            counts[i] = 0
        return
    held = _held(seen, a_page, start, step)
    fast = fill[batch] <= NEAR
    count = I64(fill[batch]) if fast else held
    want = min(keep, held)
    if fast:
        for at in range(thread, count, 512):
            place = near[batch, at]
            keys[at] = order_key(found[batch, place], _place_pool(place, a_page, start, step))
    best[thread] = U64(0xFFFFFFFFFFFFFFFF)
    if thread == 0:
        shared[3] = 0

    # --- the P-th key, eight bits a pass, until a whole digit is wanted
    prefix, mask, left = U64(0), U64(0), want
    shift = 56
    while held > keep and shift >= 0:
        if thread < 256:
            digits[thread] = 0
        cuda.syncthreads()
        for at in range(thread, count, 512):
            key = _entry(keys, fast, found, batch, at, a_page, start, step)
            if key & mask == prefix:
                cuda.atomic.add(digits, I64((key >> U64(shift)) & U64(255)), 1)
        cuda.syncthreads()
        if thread < 32:
            total = types.int32(0)
            for digit in range(8 * lane, 8 * lane + 8):
                total += digits[digit]
            upto = total
            for distance in (1, 2, 4, 8, 16):
                other = cuda.shfl_up_sync(FULL, upto, distance)
                if lane >= distance:
                    upto += other
            if upto >= left and upto - total < left:
                digit, upto = 8 * lane, upto - total + digits[8 * lane]
                while upto < left:
                    digit += 1
                    upto += digits[digit]
                shared[0], shared[1] = digit, left - (upto - digits[digit])
                shared[2] = digits[digit]
        cuda.syncthreads()
        prefix |= U64(shared[0]) << U64(shift)
        mask |= U64(255) << U64(shift)
        left = I64(shared[1])
        if shared[1] == shared[2]:
            break
        shift -= 8
    cuda.syncthreads()

    # --- all up to it, sorted
    for at in range(thread, count, 512):
        key = _entry(keys, fast, found, batch, at, a_page, start, step)
        if key & mask <= prefix:
            best[cuda.atomic.add(shared, 3, 1)] = key
    cuda.syncthreads()
    size = 2
    while size <= MOST:
        distance = size >> 1
        while distance:
            other = thread ^ distance
            if other > thread:
                a, b = best[thread], best[other]
                if (a > b) == (thread & size == 0):
                    best[thread], best[other] = b, a
            cuda.syncthreads()
            distance >>= 1
        size <<= 1
    if thread < want:
        scores[i, thread] = order_score(best[thread])
        pools[i, thread] = types.int32(U32(best[thread] & U64(0xFFFFFFFF)))
    if thread == 0:
        counts[i] = want
        fill[batch] = 0
    for at in range(thread, BINS, 512):
        bins[batch, at] = 0


def score(query, weight, seats, positions, table, keys, kpool, group, groups, found, bins, near,
          fill, faults, scores, pools, counts, stream):
    """The best P of the pools on pages k with k % groups == group (-1: all), as in the table.

    found has room for the pools of `batch` rows: all of a decode step's, and any number of a
    prefill chunk's, which then takes several rounds.
    """
    n, heads, width = query.shape
    keep, (batch, room) = scores.shape[1], found.shape
    assert keys.dtype == "uint16" and heads <= HEADS and width <= WIDTH and width % 8 == 0
    assert keep <= MOST and bins.shape == (batch, BINS) and near.shape == (batch, NEAR)
    a_page, scale = keys.shape[1], np.float32(width ** -0.5)
    for first in range(0, n, batch):
        rows = min(batch, n - first)
        parts = max(1, min(-(-room // 128), BLOCKS // rows))
        _score_kernel[(rows, parts), 256, stream](query, weight, seats, positions, table, keys,
                                                  scale, kpool, keep, group, groups, first, found,
                                                  bins, faults)
        parts = max(1, min(-(-room // 2048), BLOCKS // rows))
        _collect_kernel[(rows, parts), 256, stream](seats, positions, a_page, kpool, keep, group,
                                                    groups, first, found, bins, near, fill)
        _pick_kernel[rows, MOST, stream](seats, positions, a_page, kpool, group, groups, first,
                                         found, bins, near, fill, scores, pools, counts)
