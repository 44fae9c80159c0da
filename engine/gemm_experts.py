"""Experts on the device: gate and up products with SwiGLU, down products, and their weighted sum.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | x | [n, hidden] | uint16 (BF16) | normalised rows |
| reads | chosen | [n, picks] | int32 | a row's experts, ascending; -1: none (padding) |
| reads | weights | [n, picks] | float32 | |
| reads | gate_up | [E, 2c, hidden] | uint16 or uint8 | gate columns, then up columns |
| reads | down | [E, hidden, c] | uint16 or uint8 | c % 8 == 0 (BF16), c % 16 == 0 (FP8) |
| reads | up_scales, down_scales | as in gemm, grouped by E | float32 | FP8 only |
| writes | act | [n picks, c] | uint16 (BF16) | rows of picks -1 keep what they held |
| writes | y | [n, hidden] | float32 | overwritten; 0 for a row without experts |
| scratch | space | `Space` | | only for n > FEW_ROWS |

act = BF16(silu(min(gate, limit)) * clamp(up, -limit, limit)); products are summed in the order of
gemm.py. y = fma(weight_j, down_j, y) from 0 for picks j ascending: experts ascend. Nothing depends
on n or on which rows share an expert.

Up to FEW_ROWS rows, two launches. Up: block (16 columns, visit i picks + j); the first row that
chose an expert leads, gathers all rows that did, eights of them at a time, so an expert's weights
are read once an eight of rows; the others stop at once. Down: block (32 outputs, row), warp j sums
pick j over all of c, then picks in order.
More rows, four launches: `_order_kernel` lists the visits by expert, rows ascending, and cuts them
into tiles of 64, each at a place that needs no sum over experts (first visit // 64 + expert);
up and down run gemm's tile over gathered rows; down leaves each visit's product in space.out and
`_combine_kernel` sums the picks. Empty case: no rows or no columns: y is not written, nothing runs.
"""

from typing import NamedTuple

from numba import int32

from engine.device import (F32, FULL, INLINE, KERNEL, U32, add_rn, cuda, fma, lds32, mul_rn,
                           narrow, shared_address, sigmoid)
from engine.gemm import (BLOCK, FEW_ROWS, PARTS, ROWS, STAGE_WORDS, THREADS, TILE_STRIDE, TWO_A_SM,
                         chain, check, flat, row_place, tile)
from engine.gemm_parts import row_offsets, store_parts, zeros

PAIR = 256                      # words of a warp's 32 x 8 tile of sums
PAIRS = PARTS * PAIR
COLUMNS = 64                    # columns of a block of the many-row up product: gate and up of each
ORDER_THREADS = 512
ORDER_WARPS = ORDER_THREADS // 32


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


# ---- few rows ----------------------------------------------------------------------------------

@cuda.jit(**TWO_A_SM)
def _few_up_kernel(x, chosen, gate_up, scales, act, n, picks, c, K, shift, scale_blocks, limit):
    # grid: (ceil(c / 16), n picks), 8 warps, a part of the sums each
    found = cuda.shared.array(PAIRS, F32)
    places = cuda.shared.array(8, int32)
    thread = cuda.threadIdx.x
    warp = thread >> 5
    lane = thread & 31
    g = lane >> 2
    visit = cuda.blockIdx.y
    column = cuda.blockIdx.x * 16
    expert = chosen[visit]
    if expert < 0:
        return
    pick = -1                               # which choice of row `lane` this expert is
    if lane < n:
        for j in range(picks):
            if chosen[lane * picks + j] == expert:
                pick = j
    members = U32(cuda.ballot_sync(FULL, pick >= 0))
    if members & U32((1 << (visit // picks)) - 1):
        return                              # an earlier row leads
    blocks = (K + BLOCK - 1) // BLOCK
    left = (blocks - warp + PARTS - 1) // PARTS
    base = expert * 2 * c * K
    w_rows = row_offsets(base, column + g, c - 1, 0, K, 2) \
        + row_offsets(base + c * K, column + g, c - 1, 0, K, 2)
    base = expert * (((2 * c - 1) >> shift) + 1) * scale_blocks
    scale_rows = row_offsets(base, column, c - 1, shift, scale_blocks, 2) \
        + row_offsets(base, c + column, 2 * c - 1, shift, scale_blocks, 2)
    while members != 0:
        mine = members                      # the row of this lane's mma column: the g-th left
        for _ in range(g):
            if mine & U32(mine - U32(1)):
                mine = mine & U32(mine - U32(1))
        row = cuda.ffs(int32(mine)) - 1
        place = row * picks + cuda.shfl_sync(FULL, pick, row)
        if thread < 32 and lane & 3 == 0:
            places[g] = place
        if left > 0:
            total = chain(x, gate_up, scales, row_offsets(row * K, 0, 0, 0, 0, 1), w_rows,
                          scale_rows, K, warp, left, zeros(8))
            store_parts(found, warp * PAIR + lane, 32, total)
        cuda.syncthreads()
        mma_column = 2 * (lane & 3) + (warp & 1)
        at = column + g + 8 * (warp >> 1)   # warp: which of the four sums of a tile
        if warp < 4 and mma_column < cuda.popc(int32(members)) and at < c:
            gate = found[thread]
            up = found[thread + PAIR // 2]
            for p in range(1, min(PARTS, blocks)):
                gate = add_rn(gate, found[p * PAIR + thread])
                up = add_rn(up, found[p * PAIR + thread + PAIR // 2])
            act[places[mma_column] * c + at] = narrow(swiglu(gate, up, limit))
        cuda.syncthreads()
        for _ in range(8):
            members = members & U32(members - U32(1))


@cuda.jit(**TWO_A_SM)
def _few_down_kernel(act, chosen, weights, down, scales, y, picks, D, K, shift, scale_blocks):
    # grid: (ceil(D / 32), n), 8 warps, a pick each
    found = cuda.shared.array(PAIRS, F32)
    thread = cuda.threadIdx.x
    warp = thread >> 5
    lane = thread & 31
    first = cuda.blockIdx.y * picks
    output = cuda.blockIdx.x * 32
    blocks = (K + BLOCK - 1) // BLOCK
    expert = chosen[first + warp] if warp < picks else int32(-1)
    if expert >= 0:
        w_rows = row_offsets(expert * D * K, output + (lane >> 2), D - 1, 0, K, 4)
        scale_rows = row_offsets(expert * (((D - 1) >> shift) + 1) * scale_blocks, output, D - 1,
                                 shift, scale_blocks, 4)
        total = chain(act, down, scales, row_offsets((first + warp) * K, 0, 0, 0, 0, 1), w_rows,
                      scale_rows, K, 0, blocks, zeros(8))
        store_parts(found, warp * PAIR + lane, 32, total)
    cuda.syncthreads()
    if thread < 32 and output + thread < D:
        # mma column 0 of output `thread`: lane 4 g, sum 0 or 2 of its sixteen
        at = (thread >> 4) * (PAIR // 2) + ((thread >> 3) & 1) * 64 + (thread & 7) * 4
        value = F32(0.0)
        for j in range(picks):
            if chosen[first + j] >= 0:
                value = fma(weights[first + j], found[j * PAIR + at], value)
        y[cuda.blockIdx.y * D + output + thread] = value


# ---- many rows ---------------------------------------------------------------------------------

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


@cuda.jit(**KERNEL)
def _many_up_kernel(x, visits, tiles, gate_up, scales, act, picks, c, K, shift, scale_blocks,
                    limit):
    # grid: (ceil(c / 64), tiles), 8 warps; a warp's 32 outputs are gate and up of 16 columns
    base = shared_address(cuda.shared.array(STAGE_WORDS, U32))
    thread = cuda.threadIdx.x
    expert = tiles[3 * cuda.blockIdx.y]
    first = tiles[3 * cuda.blockIdx.y + 1]
    rows = tiles[3 * cuda.blockIdx.y + 2]
    if expert < 0:
        return
    column = cuda.blockIdx.x * COLUMNS
    place = thread >> 2                     # a weight row's place: 32 (16 columns) + 16 up + column
    at = column + (place >> 5) * 16 + (place & 15)
    half = expert * 2 * c + ((place >> 4) & 1) * c
    a0 = (half + min(at, c - 1)) * K
    a1 = (half + min(at + 32, c - 1)) * K
    b = row_place(gate_up)
    b0 = visits[first + min(b, rows - 1)] // picks * K
    b1 = visits[first + min(b + 32, rows - 1)] // picks * K
    at = column + 16 * ((thread >> 5) & 3)
    start = expert * (((2 * c - 1) >> shift) + 1) * scale_blocks
    scale_rows = row_offsets(start, at, c - 1, shift, scale_blocks, 2) \
        + row_offsets(start, c + at, 2 * c - 1, shift, scale_blocks, 2)
    tile(base, x, gate_up, scales, a0, a1, b0, b1, scale_rows, K)
    for i in range(thread, ROWS * COLUMNS, THREADS):
        r = i // COLUMNS
        j = i % COLUMNS
        if r < rows and column + j < c:
            where = base + (r * TILE_STRIDE + (j >> 4) * 32 + (j & 15)) * 4
            value = swiglu(lds32(U32(where)), lds32(U32(where + 64)), limit)
            act[visits[first + r] * c + column + j] = narrow(value)


@cuda.jit(**KERNEL)
def _many_down_kernel(act, visits, tiles, down, scales, out, D, K, shift, scale_blocks):
    # grid: (ceil(D / 128), tiles), 8 warps
    base = shared_address(cuda.shared.array(STAGE_WORDS, U32))
    thread = cuda.threadIdx.x
    expert = tiles[3 * cuda.blockIdx.y]
    first = tiles[3 * cuda.blockIdx.y + 1]
    rows = tiles[3 * cuda.blockIdx.y + 2]
    if expert < 0:
        return
    output = cuda.blockIdx.x * 128
    a = output + (thread >> 2)
    a0 = (expert * D + min(a, D - 1)) * K
    a1 = (expert * D + min(a + 64, D - 1)) * K
    b = row_place(down)
    b0 = visits[first + min(b, rows - 1)] * K
    b1 = visits[first + min(b + 32, rows - 1)] * K
    scale_rows = row_offsets(expert * (((D - 1) >> shift) + 1) * scale_blocks,
                             output + 32 * ((thread >> 5) & 3), D - 1, shift, scale_blocks, 4)
    tile(base, act, down, scales, a0, a1, b0, b1, scale_rows, K)
    for i in range(thread, ROWS * 128, THREADS):
        r = i >> 7
        o = i & 127
        if r < rows and output + o < D:
            out[visits[first + r] * D + output + o] = lds32(U32(base + (r * TILE_STRIDE + o) * 4))


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


# ---- launch ------------------------------------------------------------------------------------

def experts(x, chosen, weights, gate_up, down, limit, y, act, stream, up_scales=None,
            down_scales=None, space=None):
    """y [n, hidden] = weighted sum of the chosen experts; the module's arrays, order and launches.

    At most 8 picks a row. A long chunk may be done in stretches of rows to keep space.out small.
    """
    count, D, c = down.shape
    n, picks = chosen.shape
    assert x.shape == (n, D) and gate_up.shape == (count, 2 * c, D), (x.shape, gate_up.shape)
    assert weights.shape == (n, picks) and y.shape == (n, D), (weights.shape, y.shape)
    assert act.shape == (n * picks, c) and act.dtype == "uint16" and picks <= PARTS, act.shape
    if n == 0 or c == 0:
        return
    up_scale, up_shift, up_blocks = check(x, gate_up, up_scales, count, 2 * c, D)
    down_scale, down_shift, down_blocks = check(act, down, down_scales, count, D, c)
    covered = 1 << up_shift                 # rows of a scale: gate and up must not share one
    assert up_scale is None or c % covered == 0 or 2 * c <= covered, (c, covered)
    x, chosen, gate_up, down, y, act = (flat(a) for a in (x, chosen, gate_up, down, y, act))
    weights = flat(weights)
    up_scale = weights if up_scale is None else up_scale
    down_scale = weights if down_scale is None else down_scale
    limit = F32(limit)
    if n <= FEW_ROWS:
        _few_up_kernel[(-(-c // 16), n * picks), THREADS, stream](
            x, chosen, gate_up, up_scale, act, n, picks, c, D, up_shift, up_blocks, limit)
        _few_down_kernel[(-(-D // 32), n), THREADS, stream](
            act, chosen, weights, down, down_scale, y, picks, D, c, down_shift, down_blocks)
        return
    bound = n * picks // ROWS + count
    assert space.visits.size >= n * picks and space.out.size >= n * picks * D, (n, picks, D)
    assert space.tiles.size >= 3 * bound, (space.tiles.shape, bound)
    visits, tiles, out = (flat(a) for a in space)
    _order_kernel[count, ORDER_THREADS, stream](chosen, visits, tiles, n * picks, bound)
    _many_up_kernel[(-(-c // COLUMNS), bound), THREADS, stream](
        x, visits, tiles, gate_up, up_scale, act, picks, c, D, up_shift, up_blocks, limit)
    _many_down_kernel[(-(-D // 128), bound), THREADS, stream](
        act, visits, tiles, down, down_scale, out, D, c, down_shift, down_blocks)
    _combine_kernel[(-(-D // THREADS), n), THREADS, stream](out, chosen, weights, y, picks, D)
