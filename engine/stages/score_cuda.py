"""Stage 2 on CUDA: score the pooled keys on tensor cores, keep the best P of them exactly.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | query | [n, index_heads, index_dim] | float32 | rounded to BF16; at most 32 x 128 |
| reads | weight, seats, positions, table | as in score.py | | seat -1: a padding row |
| reads | keys | [local pages, pools a page, index_dim] | uint16 (BF16) | index_dim % 8 == 0 |
| between | found | [batch, pools] | float32 | scores by place among the group's pools |
| between | bins, near | [batch, 4096] | int32 | bins and fill are zero between calls |
| between | fill | [batch, 2] | int32 | places listed, blocks done |
| writes | scores, pools, counts | [n, P], [n, P], [n] | as in score.py | P at most 512 |
| modifies | faults | [1] | int32 | grows by the number of NaN scores |

Order of one score, whoever else is scored: a dot is one float32 chain of eight mma.sync steps over
d ascending by 32 (inside 32, step 0 takes d % 8 = 0..3, step 1 the others); lane t adds weight *
max(dot * scale, 0) of heads 2t, 2t + 1, 8 + 2t, 8 + 2t + 1, ... in this order by fma; the four
lanes are added as (0 + 1) + (2 + 3). The total order is that of score.py.

Two kernels. The first writes scores and, where a row has more than NEAR, counts them by the 12
leading bits of their order key. The second finds the bin in which the P-th lies and lists the
places of all up to it; the last block of a row to be done, or the only one where there are few,
selects by radix on the whole 64-bit keys, unique because the pool is in them, and sorts; where more
than NEAR are near (ties), it reads all scores again instead. Order of integer atomics decides where
a place is listed, never what is selected. Bytes: every scored key once a row; rows of one seat side
by side find them in L2.
"""

import numpy as np
from numba import types

from engine.device import (FULL, F32, I64, INLINE, KERNEL, U32, U64, add_rn, bits_float, cuda, fma,
                           ld128, ldg128, lds128, mul_rn, mma_bf16, narrow2, order_key,
                           order_score, shared_address)

MOST = 512      # pools kept at most: one thread each sorts them
HEADS = 32      # at most; fewer are padded with zeros, as are narrower keys
WIDTH = 128
BINS = 4096     # sign, exponent and three bits of mantissa: 16 KiB of shared counters
NEAR = 4096     # listed places a row: 32 KiB of keys in shared memory
BLOCKS = 264    # two a multiprocessor of the largest device: one wave
_ASKED = HEADS * WIDTH // 2
_LISTED = 1024  # places that a block gathers before it asks for room
DIGIT = 10      # bits of a pass of the selection
DIGITS = 1 << DIGIT
PICKERS = 512   # threads that select: one a pool kept
_TIGHT = dict(KERNEL, max_registers=64) if KERNEL else {}       # two blocks share an SM


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
def _eight(query, index):
    """Eight neighbouring float32 as four pairs of BF16."""
    a, b, c, d = ld128(query, index)
    e, f, g, h = ld128(query, index + 4)
    return (narrow2(bits_float(a), bits_float(b)), narrow2(bits_float(c), bits_float(d)),
            narrow2(bits_float(e), bits_float(f)), narrow2(bits_float(g), bits_float(h)))


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
    for at in range(thread, _ASKED // 4, 256):
        h, d = (at >> 7) * 8 + ((at & 31) >> 2), 32 * ((at >> 5) & 3) + 8 * (at & 3)
        p, q, r, s = U32(0), U32(0), U32(0), U32(0)
        if h < heads and d < width:
            p, q, r, s = _eight(query, (I64(i) * heads + h) * width + d)
        asked[4 * at], asked[4 * at + 1], asked[4 * at + 2], asked[4 * at + 3] = p, q, r, s
    if thread < HEADS:
        weights[thread] = weight[i, thread] if thread < heads else F32(0.0)
    few = held <= NEAR          # then the selection looks at them all, without bins
    if not few:
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
            if not few:
                cuda.atomic.add(counted, _bin(score), 1)
            if score != score:
                cuda.atomic.add(faults, 0, 1)
        for j in range(32):
            words[j] = ahead[j]
        place += stride

    # --- counts to all blocks
    if few:
        return
    cuda.syncthreads()
    for at in range(thread, BINS, 256):
        if counted[at]:
            cuda.atomic.add(bins, (batch, at), counted[at])


@cuda.jit(**INLINE)
def _digit_of(counts, want, sums, found):
    """Where the want-th of counted things lies: to `found` its bin, its place in the bin (from 1)
    and the bin's count. counts: a multiple of 512; 512 threads; sums: shared, 16."""
    thread = cuda.threadIdx.x
    lane, warp = thread & 31, thread >> 5
    each = counts.shape[0] // PICKERS
    total = types.int32(0)
    for at in range(each * thread, each * thread + each):
        total += counts[at]
    upto = total
    for distance in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, upto, distance)
        if lane >= distance:
            upto += other
    if lane == 31:
        sums[warp] = upto
    cuda.syncthreads()
    for before in range(warp):
        upto += sums[before]
    if upto >= want and upto - total < want:
        at, upto = each * thread, upto - total + counts[each * thread]
        while upto < want:
            at += 1
            upto += counts[at]
        found[0], found[1], found[2] = at, want - (upto - counts[at]), counts[at]
    cuda.syncthreads()


@cuda.jit(**INLINE)
def _entry(keys, near, found, at, a_page, start, step):
    """The order key of entry `at`: from shared memory, or from the scores where too many tie."""
    if near:
        return keys[at]
    return order_key(found[at], _place_pool(at, a_page, start, step))


@cuda.jit(**INLINE)
def _sorted(mine, shared):
    """The 512 keys of the threads, ascending over them; shared: twice as many."""
    thread = cuda.threadIdx.x
    half = 0
    size = 2
    while size <= MOST:
        distance = size >> 1
        while distance:
            if distance >= 32:
                shared[half + thread] = mine
                cuda.syncthreads()
                other = shared[half + (thread ^ distance)]
                half ^= MOST
            else:
                other = U64(cuda.shfl_xor_sync(FULL, I64(mine), distance))
            if (thread & distance == 0) == (thread & size == 0):
                mine = min(mine, other)
            else:
                mine = max(mine, other)
            distance >>= 1
        size <<= 1
    return mine


@cuda.jit(**_TIGHT)
def _select_kernel(seats, positions, a_page, kpool, group, groups, first, found, bins, near, fill,
                   scores, pools, counts):
    # grid (batch, parts), 512 threads; the last block of a row selects
    keys = cuda.shared.array(NEAR, U64)
    best = cuda.shared.array(MOST, U64)
    digits = cuda.shared.array(DIGITS, types.int32)
    listed = cuda.shared.array(_LISTED, types.int32)
    sums = cuda.shared.array(16, types.int32)
    shared = cuda.shared.array(8, types.int32)          # digit, place, count, listed, room, picked
    batch = cuda.blockIdx.x
    i, thread = first + batch, cuda.threadIdx.x
    keep = scores.shape[1]
    start, step = (group, groups) if group >= 0 else (0, 1)
    seen = (positions[i] + 1) // kpool
    if seats[i] < 0 or seen <= keep:
        if thread == 0 and cuda.blockIdx.y == 0:
            counts[i] = 0
        return
    held = _held(seen, a_page, start, step)
    want = min(keep, held)
    prefix, mask, shift = U64(0), U64(0), 64 - DIGIT
    count, fast = held, True
    if thread == 0:
        shared[3], shared[5] = 0, 0

    if held <= NEAR:
        # --- few: all of them
        if cuda.blockIdx.y:
            return
        for place in range(thread, held, PICKERS):
            keys[place] = order_key(found[batch, place], _place_pool(place, a_page, start, step))
    else:
        # --- the bin of the P-th, and the places up to it, gathered by all blocks
        _digit_of(bins[batch], keep, sums, shared)
        last = shared[0]
        left = shared[1]
        stride = cuda.gridDim.y * PICKERS
        for place in range(cuda.blockIdx.y * PICKERS + thread, held, stride):
            if _bin(found[batch, place]) <= last:
                at = cuda.atomic.add(shared, 3, 1)
                if at < _LISTED:
                    listed[at] = place
                else:
                    at = cuda.atomic.add(fill, (batch, 0), 1)
                    if at < NEAR:
                        near[batch, at] = place
        cuda.syncthreads()
        mine = min(shared[3], _LISTED)
        if thread == 0:
            shared[4] = cuda.atomic.add(fill, (batch, 0), mine)
        cuda.syncthreads()
        for at in range(thread, mine, PICKERS):
            if shared[4] + at < NEAR:
                near[batch, shared[4] + at] = listed[at]
        cuda.threadfence()
        cuda.syncthreads()
        if thread == 0:
            shared[6] = cuda.atomic.add(fill, (batch, 1), 1)
        cuda.syncthreads()
        if shared[6] < cuda.gridDim.y - 1:
            return
        cuda.threadfence()
        count = I64(cuda.atomic.add(fill, (batch, 0), 0))
        fast = count <= NEAR
        if fast:
            for at in range(thread, count, PICKERS):
                place = near[batch, at]
                keys[at] = order_key(found[batch, place], _place_pool(place, a_page, start, step))
        else:
            count = held
        prefix, mask, shift = U64(last) << U64(52), U64(BINS - 1) << U64(52), 52 - DIGIT
        want = left
    best[thread] = U64(0xFFFFFFFFFFFFFFFF)

    # --- the P-th key, DIGIT bits a pass, until a whole digit is wanted
    while held > keep and shift > -DIGIT:
        low = max(shift, 0)
        for at in range(thread, DIGITS, PICKERS):
            digits[at] = 0
        cuda.syncthreads()
        for at in range(thread, count, PICKERS):
            key = _entry(keys, fast, found[batch], at, a_page, start, step)
            if key & mask == prefix:
                cuda.atomic.add(digits, I64((key >> U64(low)) & U64(DIGITS - 1)), 1)
        cuda.syncthreads()
        _digit_of(digits, want, sums, shared)
        prefix |= U64(shared[0]) << U64(low)
        mask |= U64(DIGITS - 1) << U64(low)
        want = I64(shared[1])
        if shared[1] == shared[2]:
            break
        shift -= DIGIT
    cuda.syncthreads()

    # --- all up to it, sorted
    for at in range(thread, count, PICKERS):
        key = _entry(keys, fast, found[batch], at, a_page, start, step)
        if key & mask <= prefix:
            best[cuda.atomic.add(shared, 5, 1)] = key
    cuda.syncthreads()
    mine = best[thread]
    cuda.syncthreads()
    key = _sorted(mine, keys)
    if thread < min(keep, held):
        scores[i, thread] = order_score(key)
        pools[i, thread] = types.int32(U32(key & U64(0xFFFFFFFF)))
    if thread == 0:
        counts[i] = min(keep, held)
    if held > NEAR:
        if thread < 2:
            fill[batch, thread] = 0
        for at in range(thread, BINS, PICKERS):
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
    assert fill.shape == (batch, 2)
    a_page, scale = keys.shape[1], np.float32(width ** -0.5)
    for first in range(0, n, batch):
        rows = min(batch, n - first)
        parts = max(1, min(-(-room // 128), BLOCKS // rows))
        _score_kernel[(rows, parts), 256, stream](query, weight, seats, positions, table, keys,
                                                  scale, kpool, keep, group, groups, first, found,
                                                  bins, faults)
        parts = max(1, min(-(-room // 2048), BLOCKS // rows))
        _select_kernel[(rows, parts), PICKERS, stream](seats, positions, a_page, kpool, group,
                                                       groups, first, found, bins, near, fill,
                                                       scores, pools, counts)
