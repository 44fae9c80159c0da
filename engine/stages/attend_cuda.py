"""Stage 4 on CUDA: one partial a span of 128 listed rows on tensor cores, folded to one a group.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | query | [n, heads, kv_lora] | float32 | rounded to BF16; kv_lora % 8 == 0, at most 512 |
| reads | lists, lengths, seats, table | as in attend.py | int32 | seat -1: a padding row |
| reads | latents | [pages, page_rows, kv_lora] | uint16 (BF16) | |
| between | order, starts | [n, width], [n, G + 1] | int32 | lists sorted by page group |
| between | part_out | [slots, n, heads, kv_lora] | float32 | |
| between | part_top, part_mass | [slots, n, heads] | float32 | |
| writes | out, lse | [G, n, heads(, kv_lora)] | float32 | (0, -inf) where a group is empty |

The order is a function of a row's list and of the grid of tiles of attend.py, of nothing else. A
group's positions, ascending, are cut into spans of 128; a span into pieces of at most 16, anew at
every tile. A span starts at (-inf, 0, 0) and takes its pieces one after the other:

    dot_j  = four sums over d, quarters of 128, each 8 mma.sync steps ascending; ((0 + 1) + 2) + 3
    best   = max(top, dot_j * scale);  p_j = exp(dot_j * scale - best);  shrink = exp(top - best)
    mass   = mass * shrink + sum of the p_j in a fixed tree
    out    = out * shrink, then p_j (as BF16) times rows added by one mma.sync step

The group's first span is copied, the others are folded in, ascending: best = larger top, then old *
exp(old top - best) + new * exp(new top - best) for mass and out. A head is a row of an mma tile, so
its bits depend on no other head. `attend` gives every span a block and a slot (spread, for decode:
slots(width, G)), or a group a block that folds as it goes and carries an unfinished span from one
call's last tile to the next call (chain, for prefill: 2 G slots, folded sums first). The bits are
the same. `finish` folds what is left and divides.
"""

import math

import numpy as np
from numba import types

from engine.device import (FULL, F32, I64, INLINE, KERNEL, U32, address, copy16, copy_commit,
                           copy_wait, cuda, fma, intrinsic, ir, mma_bf16, mul_rn, narrow2,
                           ptx, shared_address)

TILE = 4096     # that of attend.py
SPAN = 128      # rows a partial: 17 blocks a list, and as many bytes of partials as of rows
PIECE = 16      # rows a step: the k of one mma.sync; two of 16 KiB stay below 48 KiB shared memory
WIDEST = 512    # columns of a latent row; a narrower one is padded with zeros in shared memory
# 128 registers a thread: two blocks of 256 threads a multiprocessor, for a few spilled words.
_TIGHT = dict(KERNEL, max_registers=128) if KERNEL else {}
_RING = 2 * PIECE * WIDEST // 2     # uint32 of two pieces
_COLUMNS = WIDEST // 128            # columns a thread of `_finish_kernel`


def _ldmatrix(turn):
    def typing(typingctx, where):
        def build(context, builder, signature, args):
            text = f"ldmatrix.sync.aligned.m8n8.x4{turn}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
            words = ptx(builder, text, "=r,=r,=r,=r,r", [ir.IntType(32)] * 4, list(args), True)
            return context.make_tuple(builder, signature.return_type, words)
        return types.UniTuple(U32, 4)(U32), build
    return typing


@intrinsic
def _load_rows(typingctx, where):
    """Four 8 x 8 BF16 matrices; lane 8 m + r gives the address of row r of matrix m, and lane
    4 g + t gets elements 2t, 2t + 1 of row g of each."""
    return _ldmatrix("")(typingctx, where)


@intrinsic
def _load_columns(typingctx, where):
    """The same, but lane 4 g + t gets elements 2t, 2t + 1 of column g of each."""
    return _ldmatrix(".trans")(typingctx, where)


@intrinsic
def _store2(typingctx, array, index, a, b):
    """array.flat[index], array.flat[index + 1] = a, b; index is even."""
    def build(context, builder, signature, args):
        where = address(context, builder, signature.args[0], args[0], args[1])
        text = "st.global.v2.f32 [$0], {$1,$2};"
        ptx(builder, text, "l,f,f", [], [where, args[2], args[3]], True)
        return context.get_dummy_value()
    return types.void(array, I64, F32, F32), build


@cuda.jit(**INLINE)
def _first_index(order, begin, end, least):
    """First index in [begin, end) whose ascending position is at least `least`."""
    low, high = begin, end
    while low < high:
        middle = (low + high) >> 1
        if order[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


@cuda.jit(**INLINE)
def _piece(tiles, at, length, lane):
    """Rows of the piece at `at`: up to 16, inside the span and one tile; 0 at the span's end."""
    here = at + lane
    inside = lane < PIECE and here < length
    same = False
    if inside:
        same = tiles[here] == tiles[at]
    return cuda.popc(cuda.ballot_sync(FULL, same))


@cuda.jit(**INLINE)
def _fetch_piece(latents, rows, at, count, stage):
    """Start the copy of `count` latent rows, zeros after them, to shared address `stage`. Unit u
    (16 bytes) of row r lies at r * 1024 + 16 (u ^ r % 8): eight rows of a unit in eight banks."""
    lane = cuda.threadIdx.x & 31
    units = latents.shape[2] >> 3
    for r in range(cuda.threadIdx.x >> 5, PIECE, cuda.blockDim.x >> 5):
        row = I64(0)
        if r < count:
            row = I64(rows[at + r]) * latents.shape[2]
        for unit in range(lane, 64, 32):
            size = U32(0)
            source = I64(0)
            if r < count and unit < units:
                size = U32(16)
                source = row + 8 * unit
            copy16(U32(stage + r * 1024 + ((unit ^ (r & 7)) << 4)), latents, source, size)
    copy_commit()


@cuda.jit(**_TIGHT)
def _attend_kernel(query, order, starts, seats, table, latents, scale, first_page, first_tile,
                   last_tile, chain, out, top, mass):
    # grid (spans, or groups in a chain; tiles of heads; n); 128 threads for 16 heads: warps 4 m ..
    # 4 m + 3 take a quarter of the columns each, of 16 heads
    ring = cuda.shared.array(_RING, U32, alignment=128)
    sums = cuda.shared.array((8, 8, 32), F32)
    rows = cuda.shared.array(SPAN, types.int32)
    tiles = cuda.shared.array(SPAN, types.int32)
    i, thread = cuda.blockIdx.z, cuda.threadIdx.x
    if seats[i] < 0:
        return
    lane, warp = thread & 31, thread >> 5
    g, t = lane >> 2, lane & 3
    quarter = warp & 3
    heads, width = query.shape[1], query.shape[2]
    groups = starts.shape[1] - 1
    page_rows = latents.shape[1]
    head = (cuda.blockIdx.y * (cuda.blockDim.x >> 7) + (warp >> 2)) * 16 + g
    column = quarter * 128 + 2 * t

    # --- this block's part of the row's order
    unit = cuda.blockIdx.x
    group = unit
    if not chain:
        group = 0
        while group < groups:
            spans = (starts[i, group + 1] - starts[i, group] + SPAN - 1) // SPAN
            if unit < spans:
                break
            unit -= spans
            group += 1
        if group == groups:
            return
    begin, end = starts[i, group], starts[i, group + 1]
    if chain:
        at = _first_index(order[i], begin, end, first_tile * TILE)
        last = _first_index(order[i], begin, end, last_tile * TILE)
    else:
        at = begin + unit * SPAN
        last = min(at + SPAN, end)
    if at >= last:
        return

    # --- queries as mma operands
    asked = cuda.local.array(32, U32)
    for step in range(8):
        for part in range(4):
            h = head + 8 * (part & 1)
            d = column + 16 * step + 8 * (part >> 1)
            asked[4 * step + part] = U32(0)
            if h < heads and d < width:
                asked[4 * step + part] = narrow2(query[i, h, d], query[i, h, d + 1])

    # --- shared addresses of a lane's rows of eight; a unit's low three bits are swapped
    base = shared_address(ring)
    row_at = U32(base + ((lane & 7) + ((lane >> 4) << 3)) * 1024 + quarter * 256)
    column_at = U32(base + (lane & 15) * 1024 + quarter * 256)
    row_swap = U32(((lane & 7) ^ ((lane >> 3) & 1)) << 4)
    column_swap = U32(((lane & 7) ^ (lane >> 4)) << 4)

    acc = cuda.local.array(64, F32)
    while at < last:
        # --- a span, or what this call's tiles hold of it
        span_end = min(begin + ((at - begin) // SPAN + 1) * SPAN, end)
        stop = min(span_end, last)
        length = stop - at
        cuda.syncthreads()
        if thread < length:
            position = order[i, at + thread]
            tiles[thread] = position // TILE
            rows[thread] = (table[seats[i], position // page_rows - first_page] * page_rows
                            + position % page_rows)
        top0, top1 = F32(-math.inf), F32(-math.inf)
        mass0, mass1 = F32(0.0), F32(0.0)
        for j in range(64):
            acc[j] = F32(0.0)
        if (at - begin) % SPAN:
            carried = groups + group
            for side in range(2):
                h = head + 8 * side
                if h < heads:
                    if side:
                        top1, mass1 = top[carried, i, h], mass[carried, i, h]
                    else:
                        top0, mass0 = top[carried, i, h], mass[carried, i, h]
                    for j in range(16):
                        if column + 8 * j < width:
                            acc[4 * j + 2 * side] = out[carried, i, h, column + 8 * j]
                            acc[4 * j + 2 * side + 1] = out[carried, i, h, column + 8 * j + 1]
        cuda.syncthreads()
        now, stage = 0, 0
        count = _piece(tiles, 0, length, lane)
        _fetch_piece(latents, rows, 0, count, base)
        while count > 0:
            # --- the next piece on its way, this one's dots
            copy_wait(0)
            cuda.syncthreads()
            ahead = 0
            if now + count < length:
                ahead = _piece(tiles, now + count, length, lane)
                _fetch_piece(latents, rows, now + count, ahead, base + (stage ^ 1) * (PIECE * 1024))
            dots = cuda.local.array(8, F32)
            for j in range(8):
                dots[j] = F32(0.0)
            shift = U32(stage * (PIECE * 1024))
            for step in range(8):
                b0, b1, b2, b3 = _load_rows(
                    U32(row_at + shift + (row_swap ^ U32(32 * (step & 3))) + 128 * (step >> 2)))
                dots[0], dots[1], dots[2], dots[3] = mma_bf16(
                    asked[4 * step], asked[4 * step + 1], asked[4 * step + 2], asked[4 * step + 3],
                    b0, b1, dots[0], dots[1], dots[2], dots[3])
                dots[4], dots[5], dots[6], dots[7] = mma_bf16(
                    asked[4 * step], asked[4 * step + 1], asked[4 * step + 2], asked[4 * step + 3],
                    b2, b3, dots[4], dots[5], dots[6], dots[7])
            for j in range(8):
                sums[warp, j, lane] = dots[j]
            cuda.syncthreads()

            # --- exponentials; lane 4 g + t has rows 2t, 2t + 1, 2t + 8, 2t + 9 of heads g, g + 8
            four = warp & 4
            for j in range(8):
                s = sums[four, j, lane] + sums[four + 1, j, lane]
                s = (s + sums[four + 2, j, lane]) + sums[four + 3, j, lane]
                dots[j] = mul_rn(s, scale)
                if 2 * t + (j & 1) + ((j & 4) << 1) >= count:
                    dots[j] = F32(-math.inf)
            best0 = max(max(dots[0], dots[1]), max(dots[4], dots[5]))
            best1 = max(max(dots[2], dots[3]), max(dots[6], dots[7]))
            for step in (1, 2):
                best0 = max(best0, cuda.shfl_xor_sync(FULL, best0, step))
                best1 = max(best1, cuda.shfl_xor_sync(FULL, best1, step))
            best0, best1 = max(best0, top0), max(best1, top1)
            shrink0, shrink1 = math.exp(top0 - best0), math.exp(top1 - best1)
            top0, top1 = best0, best1
            for j in range(8):
                dots[j] = math.exp(dots[j] - (best1 if j & 2 else best0))
            total0 = (dots[0] + dots[1]) + (dots[4] + dots[5])
            total1 = (dots[2] + dots[3]) + (dots[6] + dots[7])
            for step in (1, 2):
                total0 += cuda.shfl_xor_sync(FULL, total0, step)
                total1 += cuda.shfl_xor_sync(FULL, total1, step)
            mass0, mass1 = fma(mass0, shrink0, total0), fma(mass1, shrink1, total1)

            # --- rows into the sums; a factor of 1 changes nothing, so it is not multiplied
            if cuda.any_sync(FULL, shrink0 != F32(1.0) or shrink1 != F32(1.0)):
                for j in range(16):
                    acc[4 * j] *= shrink0
                    acc[4 * j + 1] *= shrink0
                    acc[4 * j + 2] *= shrink1
                    acc[4 * j + 3] *= shrink1
            a0, a1 = narrow2(dots[0], dots[1]), narrow2(dots[2], dots[3])
            a2, a3 = narrow2(dots[4], dots[5]), narrow2(dots[6], dots[7])
            for j in range(8):
                b0, b1, b2, b3 = _load_columns(
                    U32(column_at + shift + (column_swap ^ U32(32 * (j & 3))) + 128 * (j >> 2)))
                k = 8 * j
                acc[k], acc[k + 1], acc[k + 2], acc[k + 3] = mma_bf16(
                    a0, a1, a2, a3, b0, b1, acc[k], acc[k + 1], acc[k + 2], acc[k + 3])
                acc[k + 4], acc[k + 5], acc[k + 6], acc[k + 7] = mma_bf16(
                    a0, a1, a2, a3, b2, b3, acc[k + 4], acc[k + 5], acc[k + 6], acc[k + 7])
            now += count
            count = ahead
            stage ^= 1

        # --- the span's partial: to its slot, into the group's sum, or carried
        slot = cuda.blockIdx.x
        if chain and stop < span_end:
            slot = groups + group
        fold = chain and stop == span_end and span_end - begin > SPAN
        for side in range(2):
            h = head + 8 * side
            if h < heads:
                new_top, new_mass = (top1, mass1) if side else (top0, mass0)
                old, new = F32(0.0), F32(1.0)
                if fold:
                    best = max(top[slot, i, h], new_top)
                    old, new = math.exp(top[slot, i, h] - best), math.exp(new_top - best)
                    new_mass = fma(new_mass, new, mul_rn(mass[slot, i, h], old))
                    new_top = best
                if side:
                    top1, mass1 = new_top, new_mass
                else:
                    top0, mass0 = new_top, new_mass
                where = ((I64(slot) * query.shape[0] + i) * heads + h) * width + column
                for j in range(16):
                    if column + 8 * j < width:
                        x, y = acc[4 * j + 2 * side], acc[4 * j + 2 * side + 1]
                        if fold:
                            x = fma(x, new, mul_rn(out[slot, i, h, column + 8 * j], old))
                            y = fma(y, new, mul_rn(out[slot, i, h, column + 8 * j + 1], old))
                        _store2(out, where + 8 * j, x, y)
        cuda.syncthreads()                  # all have read the old top and mass
        if quarter == 0 and t == 0:
            if head < heads:
                top[slot, i, head], mass[slot, i, head] = top0, mass0
            if head + 8 < heads:
                top[slot, i, head + 8], mass[slot, i, head + 8] = top1, mass1
        at = stop


def slots(width, groups):
    """Spans that a list of `width` positions in `groups` page groups has at most."""
    return -(-width // SPAN) + groups - 1


def attend(query, order, starts, seats, table, latents, scale, first_page, first_tile, last_tile,
           chain, part_out, part_top, part_mass, stream):
    """Partials of the listed rows in tiles first_tile .. last_tile - 1; see the module's table.

    Spread takes all tiles at once; a chain takes them ascending, over one call or several.
    """
    n, heads, width = query.shape
    groups = starts.shape[1] - 1
    assert latents.dtype == "uint16" and width % 8 == 0 and width <= WIDEST
    assert n and heads, "an empty launch: the caller has nothing to do"
    assert part_out.shape[0] >= (2 * groups if chain else slots(order.shape[1], groups))
    high = 2 if n >= 4 and heads > 16 else 1        # tiles of heads that share a block's rows
    grid = (groups if chain else part_out.shape[0], -(-heads // (16 * high)), n)
    _attend_kernel[grid, 128 * high, stream](
        query, order, starts, seats, table, latents, np.float32(scale), first_page, first_tile,
        last_tile, chain, part_out, part_top, part_mass)


@cuda.jit(**KERNEL)
def _finish_kernel(part_out, part_top, part_mass, starts, seats, chain, out, lse):
    # grid (heads, n, G), 128 threads of every 128th column
    h, i, group = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    thread, width = cuda.threadIdx.x, out.shape[3]
    first, count = 0, 0
    if seats[i] >= 0:
        for g in range(group + 1):
            first += count
            count = (starts[i, g + 1] - starts[i, g] + SPAN - 1) // SPAN
    if chain:
        first, count = group, min(count, 1)
    if count == 0:
        for d in range(thread, width, 128):
            out[group, i, h, d] = F32(0.0)
        if thread == 0:
            lse[group, i, h] = F32(-math.inf)
        return
    total = cuda.local.array(_COLUMNS, F32)
    for c in range(_COLUMNS):
        d = thread + 128 * c
        total[c] = part_out[first, i, h, d] if d < width else F32(0.0)
    top, mass = part_top[first, i, h], part_mass[first, i, h]
    for slot in range(first + 1, first + count):
        best = max(top, part_top[slot, i, h])
        old, new = math.exp(top - best), math.exp(part_top[slot, i, h] - best)
        for c in range(_COLUMNS):
            d = thread + 128 * c
            if d < width:
                total[c] = fma(part_out[slot, i, h, d], new, mul_rn(total[c], old))
        mass = fma(part_mass[slot, i, h], new, mul_rn(mass, old))
        top = best
    for c in range(_COLUMNS):
        d = thread + 128 * c
        if d < width:
            out[group, i, h, d] = total[c] / mass
    cuda.syncthreads()                      # out and lse may be the chain's own arrays
    if thread == 0:
        lse[group, i, h] = top + math.log(mass)


def finish(part_out, part_top, part_mass, starts, seats, chain, out, lse, stream):
    """Partials of each group: out [G, n, heads, kv_lora] and log-sum-exp [G, n, heads].

    In a chain out may be part_out[:G] and lse part_top[:G].
    """
    groups, n, heads, width = out.shape
    assert groups == starts.shape[1] - 1 and width <= WIDEST
    _finish_kernel[(heads, n, groups), 128, stream](part_out, part_top, part_mass, starts, seats,
                                                    chain, out, lse)
