"""Stage 4 on CUDA: one partial a span of up to 64 listed rows on tensor cores, folded to one a page
group.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | query | [n, heads, kv_lora] | float32 | rounded to BF16; kv_lora % 8 == 0, at most 512 |
| reads | order, spans, starts | as in merge.py | int32 | the listed rows of `latents`, flat |
| reads | seats | [n] | int32 | seat -1: a padding row, which has no span |
| reads | latents | [pages, page_rows, kv_lora] | uint16 (BF16) | |
| writes | out | [spans or G, n, heads, kv_lora] | float32 | |
| writes | top, mass | [spans or G, n, heads] | float32 | |

A span is a function of the row's list alone. Of one span, in units of log2 e:

    dot_j = four sums over d, quarters of 128, each 8 mma.sync steps ascending; ((0 + 1) + 2) + 3
    top   = max of dot_j * scale;  p_j = 2^(dot_j * scale - top)
    mass  = sum of p_j: rows 2t and 2t + 1 of each eight, the eights ascending; (0 + 1) + (2 + 3)
    out   = p_j (as BF16) times rows, one chain of four mma.sync steps, rows ascending

A group begins as (-inf, 0, 0) and takes its spans ascending: best = larger top; old = 2^(top -
best), new = 2^(span's top - best); mass and out become fma(span's, new, group's * old). At the end
out is divided by mass and top becomes the natural log-sum-exp. A head is a row of an mma tile, so
its bits depend on no other head.

In decode the spans of a row are spread over blocks, which write them one by one; project.finish
folds them. In prefill a block walks a group's spans in a chain and folds as it goes, in one call
or, where rows come to a scratch array tile by tile, in one a tile; the call that meets the last
span divides. The bits are the same. In a chain 64 heads share a block's rows where shared memory
allows (64 KiB a span, 16 KiB the queries of 16 heads: 146 KiB in all), otherwise 16 do (85 KiB).
"""

import functools
import math

import numpy as np

from engine.attend_parts import (ROW, TILE_ROWS, divided, dots, folded, largest, load_heads,
                                 load_sums, power, same, scaled, store_heads, store_sums,
                                 store_unit, tops, weigh)
from engine.device import (F32, FULL, I64, INLINE, KERNEL, U32, bits_float, copy16, copy_commit,
                           copy_wait, cuda, fma, ld128, mul_rn, narrow2, shared_address,
                           with_shared)

SPAN = 64       # that of merge.py: 64 KiB of shared memory
WIDEST = 512    # columns of a latent row; a narrower one is padded with zeros in shared memory
THREADS = 256
_SPAN_BYTES = SPAN * ROW
_WIDE = 146 << 10       # shared bytes of a block of 64 heads
_BLOCKS = 8     # a multiprocessor, before a block of decode takes several spans
_LN2 = math.log(2.0)
_TIGHT = dict(KERNEL, max_registers=128) if KERNEL else {}     # so that two blocks share an SM


@cuda.jit(**INLINE)
def _first_span(order, spans, begin, end, least):
    """First span in [begin, end) whose first entry of `order` is at least `least`."""
    low, high = begin, end
    while low < high:
        middle = (low + high) >> 1
        if order[spans[middle]] < least:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit(**INLINE)
def _own_row(order, spans, span):
    """(rows of the span, the entry of `order` that lane l < 8 of this warp brings: row 8 w + l)."""
    begin = spans[span]
    count = spans[span + 1] - begin
    at = 8 * (cuda.threadIdx.x >> 5) + (cuda.threadIdx.x & 31)
    row = np.int32(0)
    if at < count and cuda.threadIdx.x & 31 < 8:
        row = order[begin + at]
    return count, row


@cuda.jit(**INLINE)
def _fetch_span(latents, row, first_row, count, stage):
    """Start the copy of a span's rows to shared address `stage`, zeros after them."""
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    width = latents.shape[2]
    for r in range(8):
        source = I64(cuda.shfl_sync(FULL, row, r) - first_row) * width
        at = 8 * warp + r
        for half in range(2):
            unit = lane + 32 * half
            size, index = U32(0), I64(0)
            if at < count and 8 * unit < width:
                size, index = U32(16), source + 8 * unit
            copy16(U32(stage + at * ROW + ((unit ^ r) << 4)), latents, index, size)
    copy_commit()


@cuda.jit(**INLINE)
def _eight(query, index):
    a, b, c, d = ld128(query, index)
    e, f, g, h = ld128(query, index + 4)
    return (narrow2(bits_float(a), bits_float(b)), narrow2(bits_float(c), bits_float(d)),
            narrow2(bits_float(e), bits_float(f)), narrow2(bits_float(g), bits_float(h)))


@cuda.jit(**INLINE)
def _query_unit(query, i, head, unit):
    """16 bytes of a query as BF16, zeros past its heads and columns."""
    heads, width = query.shape[1], query.shape[2]
    index = I64(0)
    inside = head < heads and 8 * unit < width
    if inside:
        index = (I64(i) * heads + head) * width + 8 * unit
    a, b, c, d = _eight(query, index)
    if not inside:
        a, b, c, d = U32(0), U32(0), U32(0), U32(0)
    return a, b, c, d


@cuda.jit(**INLINE)
def _put_unit(base, head, unit, words):
    a, b, c, d = words
    store_unit(U32(base + head * ROW + ((unit ^ (head & 7)) << 4)), a, b, c, d)


@functools.cache
def attend_kernel(tiles):
    """The kernel for blocks of 16 `tiles` heads: 1, or 4 of them."""
    heads_block = 16 * tiles
    high = eights = 2 if tiles == 4 else 1  # tiles of heads a warp; eights of rows
    beside = 8 // eights                    # warps that share a tile of heads
    weight_words = heads_block * SPAN // 2
    top_words, pair_words, factor_words = beside * heads_block, 32 * heads_block, 2 * heads_block
    top_step = 4 * heads_block
    across = WIDEST // beside               # columns a warp
    kept = high * across // 2               # sums a thread, of its warp's heads and columns
    folders = 4 * heads_block               # threads that fold: four a head

    @cuda.jit(**(KERNEL if tiles == 4 else _TIGHT))
    def _attend_kernel(query, order, spans, starts, seats, latents, scale, first_row, last_row,
                       chain, out, top, mass):
        # grid (spans, or groups in a chain; blocks of heads; n), 8 warps; dynamic shared memory:
        # a span of rows, then queries
        rows = cuda.shared.array(0, U32)
        weights = cuda.shared.array(weight_words, U32, alignment=128)
        highs = cuda.shared.array(top_words, F32)
        pairs = cuda.shared.array(pair_words, F32)
        factors = cuda.shared.array(factor_words, F32)
        i, thread = cuda.blockIdx.z, cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        g, t, odd = lane >> 2, lane & 3, np.int32(lane & 1)
        heads, width = query.shape[1], query.shape[2]
        groups = starts.shape[1] - 1
        head0 = cuda.blockIdx.y * heads_block
        slot = cuda.blockIdx.x
        side, beneath = warp // beside, warp % beside   # its tiles of heads; its rows and columns
        first_head = side * high * 16
        first_eight = beneath * eights
        column = across * beneath + 2 * t
        left = np.int32(heads - head0 - first_head - g)
        columns = np.int32(width - column)
        where = (I64(i) * heads + head0 + first_head + g) * width + column
        a_slot = I64(query.shape[0]) * heads * width
        folder = head0 + (thread >> 2)      # the head that a folding thread folds
        folds = thread < folders and folder < heads

        # --- this block's spans
        if chain:
            begin, end = starts[i, slot], starts[i, slot + 1]
            if seats[i] < 0 or begin == end:
                store_sums(out, where + slot * a_slot, width, left, columns, same(F32(0.0), kept),
                           high, odd)
                if folds and t == 0:
                    top[slot, i, folder] = F32(-math.inf)
                return
            span, last = begin, end
            if first_row > 0:
                span = _first_span(order[i], spans[i], begin, end, first_row)
            if last_row > 0:
                last = _first_span(order[i], spans[i], span, end, last_row)
        else:
            if seats[i] < 0:
                return
            begin, end = np.int32(0), starts[i, groups]
            span, last = np.int32(slot), end
        if span >= last:
            return
        step = np.int32(1) if chain else np.int32(cuda.gridDim.x)

        # --- its first rows on their way, then the queries
        base = shared_address(rows)
        asked = U32(base + _SPAN_BYTES)
        count, row = _own_row(order[i], spans[i], span)
        _fetch_span(latents, row, first_row, count, base)
        ahead = np.int32(0)
        if span + step < last:
            ahead, row = _own_row(order[i], spans[i], span + step)
        unit = thread & 63
        for part in range(tiles):
            head = 16 * part + (thread >> 6)
            w0 = _query_unit(query, i, head0 + head, unit)
            w1 = _query_unit(query, i, head0 + head + 4, unit)
            w2 = _query_unit(query, i, head0 + head + 8, unit)
            w3 = _query_unit(query, i, head0 + head + 12, unit)
            _put_unit(asked, head, unit, w0)
            _put_unit(asked, head + 4, unit, w1)
            _put_unit(asked, head + 8, unit, w2)
            _put_unit(asked, head + 12, unit, w3)

        # --- addresses of a lane's rows and heads
        swap = U32(((lane >> 4) ^ (lane & 7)) << 4)
        query_at = U32(asked + (first_head + (lane & 15)) * ROW)
        if eights == 2:
            dot_at = U32(base + (8 * first_eight + 8 * (lane >> 4) + (lane & 7)) * ROW)
            dot_swap = U32((((lane >> 3) & 1) ^ (lane & 7)) << 4)
        else:
            dot_at = U32(base + (8 * first_eight + (lane & 7)) * ROW)
            dot_swap = U32(((lane >> 3) ^ (lane & 7)) << 4)
        row_at = U32(base + (lane & 15) * ROW + 2 * across * beneath)
        weight_base = shared_address(weights)
        weight_at = U32(weight_base + 128 * (first_head + g) + 4 * t)
        weight_swap = U32((first_eight ^ g) << 4)
        weights_at = U32(weight_base + 128 * (first_head + (lane & 15)))
        high_base = shared_address(highs)
        high_at = U32(high_base + 4 * (first_head + g))
        pair_at = U32(shared_address(pairs) + 16 * (first_eight * heads_block + first_head + g)
                      + 4 * t)
        factor_at = U32(shared_address(factors) + 4 * (first_head + g))

        # --- what the group has so far
        total_top, total_mass = F32(-math.inf), F32(0.0)
        sums = same(F32(0.0) if chain else F32(-0.0), kept)
        if chain and span > begin:
            sums = load_sums(out, where + slot * a_slot, width, left, columns, sums, high)
            if folds:
                total_top, total_mass = top[slot, i, folder], mass[slot, i, folder]
        while True:
            copy_wait(0)
            cuda.syncthreads()

            # --- dots, their maxima, exponentials
            found = dots(query_at, swap, dot_at, dot_swap, high, eights)
            found = scaled(found, scale, np.int32(count - 8 * first_eight - 2 * t), high)
            best = tops(found, high)
            if t == 0:
                store_heads(U32(high_at + beneath * top_step), best)
            cuda.syncthreads()
            best = largest(high_at, top_step, beside, high)
            weigh(found, best, weight_at, weight_swap, pair_at, heads_block)
            cuda.syncthreads()
            if thread < folders:
                own = thread >> 2
                total = pairs[4 * own + t]
                for j in range(1, 8):
                    total += pairs[4 * (j * heads_block + own) + t]
                total += cuda.shfl_xor_sync(FULL, total, 1)
                total += cuda.shfl_xor_sync(FULL, total, 2)
                span_top = highs[own]
                for j in range(1, beside):
                    span_top = max(span_top, highs[j * heads_block + own])
                old, new = F32(1.0), F32(1.0)
                if chain:
                    larger = max(total_top, span_top)
                    old, new = power(total_top - larger), power(span_top - larger)
                    total_mass = fma(total, new, mul_rn(total_mass, old))
                    total_top = larger
                else:
                    total_top, total_mass = span_top, total
                if t == 0:
                    factors[own], factors[heads_block + own] = old, new
            cuda.syncthreads()

            # --- rows into the sums
            sums = folded(sums, weights_at, swap, row_at, swap,
                          load_heads(factor_at, high),
                          load_heads(U32(factor_at + 4 * heads_block), high))
            if not chain:
                store_sums(out, where + span * a_slot, width, left, columns, sums, high, odd)
                sums = same(F32(-0.0), kept)
                if folds and t == 0:
                    top[span, i, folder], mass[span, i, folder] = total_top, total_mass
            span += step
            if span >= last:
                break
            cuda.syncthreads()
            _fetch_span(latents, row, first_row, ahead, base)
            count = ahead
            if span + step < last:
                ahead, row = _own_row(order[i], spans[i], span + step)

        # --- the group's sums, divided at its end
        if not chain:
            return
        if span == end:
            cuda.syncthreads()
            if thread < folders and t == 0:
                factors[thread >> 2] = total_mass
            cuda.syncthreads()
            sums = divided(sums, load_heads(factor_at, high))
            total_top = fma(total_top, F32(_LN2), math.log(total_mass))
        store_sums(out, where + slot * a_slot, width, left, columns, sums, high, odd)
        if folds and t == 0:
            top[slot, i, folder], mass[slot, i, folder] = total_top, total_mass
    return _attend_kernel


@functools.cache
def _device():
    """(multiprocessors, bytes of shared memory that a block may have) of the device."""
    device = cuda.get_current_device()
    return device.MULTIPROCESSOR_COUNT, device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


def attend(query, order, spans, starts, seats, latents, scale, first_row, last_row, chain, out, top,
           mass, stream):
    """Partials of the listed rows; see the module's table.

    Spread fills out, top and mass of every span, for project.finish. A chain fills out and lse
    (top) of every group, with the spans whose rows `order` has from first_row on and, where it is
    not 0, below last_row: multiples of merge.TILE, ascending from call to call; latents begin at
    first_row. mass [G, n, heads] goes from call to call.
    """
    n, heads, width = query.shape
    groups = starts.shape[1] - 1
    assert latents.dtype == "uint16" and width % 8 == 0 and width <= WIDEST
    assert n and heads, "an empty launch: the caller has nothing to do"
    assert out.shape[0] == groups if chain else spans.shape[1] == out.shape[0] + 1
    processors, room = _device()
    tiles = 4 if chain and heads > 32 and room >= _WIDE else 1
    tall = -(-heads // (16 * tiles))
    wide = groups if chain else min(out.shape[0], -(-_BLOCKS * processors // (tall * n)))
    launch = with_shared(attend_kernel(tiles), (wide, tall, n), THREADS, stream,
                         _SPAN_BYTES + tiles * TILE_ROWS)
    launch(query, order, spans, starts, seats, latents, np.float32(scale / _LN2), first_row,
           last_row, chain, out, top, mass)
