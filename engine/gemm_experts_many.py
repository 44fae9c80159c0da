"""Experts for more rows than FEW_ROWS: gemm_tile's tiles over the rows that chose an expert.

Arrays, formulas and order of sums are gemm_experts'. Four launches: `_order_kernel` lists the
visits (row, pick) by expert, rows ascending, and cuts them into tiles of 64, each at a place that
needs no sum over experts (first visit // 64 + expert); up and down gather the rows of a tile; down
leaves each visit's product in space.out and `_combine_kernel` sums the picks.
"""

import functools
from typing import NamedTuple

from llvmlite import ir
from numba import int32, types

from engine.device import (F32, FULL, I64, INLINE, KERNEL, U32, cuda, fma, intrinsic, lds32,
                           mul_rn, narrow, shared_address, sigmoid)
from engine.gemm_parts import _literal, row_offsets
from engine.gemm_staged import PAD, STEP, place, places, row_lane, weight_lane
from engine.gemm_tile import THREADS, Form, launch, tile

ROWS = 64                       # of a tile
FORM = Form(2, 4, 4)            # 128 outputs x ROWS rows
TWO_A_SM = {**KERNEL, "max_registers": 128} if KERNEL else {}   # so that two blocks share an SM
ORDER_THREADS = 512
ORDER_WARPS = ORDER_THREADS // 32
_I64 = ir.IntType(64)


class Space(NamedTuple):
    """Device scratch for n > FEW_ROWS rows; larger arrays may be cut to these shapes."""

    visits: object              # int32 [n picks]
    tiles: object               # int32 [n picks // 64 + E, 3]: expert or -1, first visit, visits
    out: object                 # float32 [n picks, hidden]


@cuda.jit(**INLINE)
def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit); NaN stays NaN."""
    if gate > limit:
        gate = limit
    if up > limit:
        up = limit
    elif up < -limit:
        up = -limit
    return mul_rn(mul_rn(gate, sigmoid(gate)), up)


# ---- visits by expert ----

@cuda.jit(**KERNEL)
def _order_kernel(chosen, visits, tiles, count, bound):
    # grid: E blocks of 16 warps; a warp takes a stretch of the visits
    lower = cuda.shared.array(ORDER_WARPS, int32)
    equal = cuda.shared.array(ORDER_WARPS, int32)
    thread = cuda.threadIdx.x
    warp = thread >> 5
    lane = thread & 31
    expert = cuda.blockIdx.x
    stretch = (count + ORDER_THREADS - 1) // ORDER_THREADS * 32
    begin = warp * stretch
    end = min(begin + stretch, count)
    below = 0
    same = 0
    for i in range(begin, end, 32):
        e = chosen[i + lane] if i + lane < end else int32(-1)
        below += cuda.popc(cuda.ballot_sync(FULL, e >= 0 and e < expert))
        same += cuda.popc(cuda.ballot_sync(FULL, e == expert))
    if lane == 0:
        lower[warp] = below
        equal[warp] = same
    cuda.syncthreads()
    start = 0
    whole = 0
    at = 0
    for i in range(ORDER_WARPS):
        if i < warp:
            at += equal[i]
        start += lower[i]
        whole += equal[i]
    at += start
    for i in range(begin, end, 32):
        e = chosen[i + lane] if i + lane < end else int32(-1)
        here = cuda.ballot_sync(FULL, e == expert)
        if e == expert:
            visits[at + cuda.popc(int32(U32(here) & U32((1 << lane) - 1)))] = i + lane
        at += cuda.popc(here)

    # ---- tiles, and -1 up to the next expert's first place ----
    place = start // ROWS + expert
    after = (start + whole) // ROWS + expert + 1
    if expert == cuda.gridDim.x - 1:
        after = bound
    for z in range(place + thread, after, ORDER_THREADS):
        done = (z - place) * ROWS
        tiles[3 * z] = expert if done < whole else -1
        tiles[3 * z + 1] = start + done
        tiles[3 * z + 2] = min(whole - done, ROWS)


# ---- products ----

@intrinsic
def pair_offsets(typingctx, base, column, c, shift, stride, mt):
    """base + (row >> shift) * stride of each eight of a warp's outputs: sixteens of gate and of up
    columns in turn from `column` on, up rows c further; columns past the last count as it."""
    number = _literal(mt)
    if number is not None:
        def build(context, builder, signature, args):
            start, first, width, right, step, _ = args
            last = builder.sub(width, _I64(1))
            found = []
            for i in range(2 * number):
                at = builder.add(first, _I64(i // 4 * 16 + i % 2 * 8))
                at = builder.select(builder.icmp_signed("<", at, last), at, last)
                if i // 2 % 2:
                    at = builder.add(at, width)
                found.append(builder.add(start, builder.mul(builder.ashr(at, right), step)))
            return context.make_tuple(builder, signature.return_type, found)
        return types.UniTuple(I64, 2 * number)(I64, I64, I64, I64, I64, mt), build


@functools.cache
def up_kernel():
    """The up kernel; a tile is gate and up of outputs / 2 columns."""
    mt, nt, side = FORM
    outputs, columns, stride = FORM.outputs, FORM.outputs // 2, FORM.outputs + PAD
    w_count = outputs // STEP

    @cuda.jit(**TWO_A_SM)
    def _many_up_kernel(x, visits, tiles, gate_up, scales, act, picks, c, K, shift, scale_blocks,
                        limit):
        # grid: (ceil(c / columns), tiles), 8 warps
        base = shared_address(cuda.shared.array(0, U32))
        thread = cuda.threadIdx.x
        expert = tiles[3 * cuda.blockIdx.y]
        first = tiles[3 * cuda.blockIdx.y + 1]
        rows = tiles[3 * cuda.blockIdx.y + 2]
        if expert < 0:
            return
        column = cuda.blockIdx.x * columns
        at = thread >> 2                    # a weight row's place: 32 (16 columns) + 16 up + column
        w_rows = places(gate_up, (expert * 2 + ((at >> 4) & 1)) * c * K + weight_lane(gate_up),
                        column + (at >> 5) * 16 + (at & 15), c - 1, STEP // 2, K, w_count)
        row = visits[first + min(at, rows - 1)] // picks
        scale_rows = pair_offsets(expert * (((2 * c - 1) >> shift) + 1) * scale_blocks,
                                  column + ((thread >> 5) & (side - 1)) * 8 * mt, c, shift,
                                  scale_blocks, mt)
        tile(base, x, gate_up, scales, w_rows, (place(x, row * K + row_lane()),), scale_rows, K, mt,
             nt, side)
        j = thread & (columns - 1)
        if column + j < c:
            for r in range(thread // columns, rows, THREADS // columns):
                where = base + (r * stride + (j >> 4) * 32 + (j & 15)) * 4
                value = swiglu(lds32(U32(where)), lds32(U32(where + 64)), limit)
                act[visits[first + r] * c + column + j] = narrow(value)
    return _many_up_kernel


@functools.cache
def down_kernel():
    """The down kernel."""
    mt, nt, side = FORM
    outputs, stride = FORM.outputs, FORM.outputs + PAD
    w_count, eights = outputs // STEP, 2 * mt

    @cuda.jit(**TWO_A_SM)
    def _many_down_kernel(act, visits, tiles, down, scales, out, D, K, shift, scale_blocks):
        # grid: (ceil(D / outputs), tiles), 8 warps
        base = shared_address(cuda.shared.array(0, U32))
        thread = cuda.threadIdx.x
        expert = tiles[3 * cuda.blockIdx.y]
        first = tiles[3 * cuda.blockIdx.y + 1]
        rows = tiles[3 * cuda.blockIdx.y + 2]
        if expert < 0:
            return
        output = cuda.blockIdx.x * outputs
        at = thread >> 2
        w_rows = places(down, expert * D * K + weight_lane(down), output + at, D - 1, STEP, K,
                        w_count)
        visit = visits[first + min(at, rows - 1)]
        scale_rows = row_offsets(expert * (((D - 1) >> shift) + 1) * scale_blocks,
                                 output + ((thread >> 5) & (side - 1)) * 16 * mt, D - 1, shift,
                                 scale_blocks, eights)
        tile(base, act, down, scales, w_rows, (place(act, visit * K + row_lane()),), scale_rows, K,
             mt, nt, side)
        at = thread & (outputs - 1)
        if output + at < D:
            for r in range(thread // outputs, rows, THREADS // outputs):
                value = lds32(U32(base + (r * stride + at) * 4))
                out[visits[first + r] * D + output + at] = value
    return _many_down_kernel


@cuda.jit(**KERNEL)
def _combine_kernel(out, chosen, weights, y, picks, D):
    # grid: (ceil(D / 256), n)
    d = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    first = cuda.blockIdx.y * picks
    if d < D:
        value = F32(0.0)
        for j in range(picks):
            if chosen[first + j] >= 0:
                value = fma(weights[first + j], out[(first + j) * D + d], value)
        y[cuda.blockIdx.y * D + d] = value


# ---- launch ----

def many_experts(x, chosen, weights, gate_up, up_scale, down, down_scale, limit, y, act, space, n,
                 picks, count, D, c, up_table, down_table, stream):
    """experts() for more than FEW_ROWS rows; flat arrays, scales and tables (shift, blocks) as
    gemm.check returns them."""
    bound = n * picks // ROWS + count
    assert space.visits.size >= n * picks and space.out.size >= n * picks * D, (n, picks, D)
    assert space.tiles.size >= 3 * bound, (space.tiles.shape, bound)
    visits, tiles, out = (a.reshape(a.size) for a in space)
    shared = FORM.shared(gate_up.dtype == "uint8")
    _order_kernel[count, ORDER_THREADS, stream](chosen, visits, tiles, n * picks, bound)
    launch(up_kernel(), (-(-2 * c // FORM.outputs), bound), shared, stream,
           (x, visits, tiles, gate_up, up_scale, act, picks, c, D, *up_table, limit))
    launch(down_kernel(), (-(-D // FORM.outputs), bound), shared, stream,
           (act, visits, tiles, down, down_scale, out, D, c, *down_table))
    _combine_kernel[(-(-D // THREADS), n), THREADS, stream](out, chosen, weights, y, picks, D)
