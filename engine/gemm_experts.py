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
More rows: gemm_experts_many. Empty case: no rows or no columns: y is not written, nothing runs.
"""

from numba import int32

from engine.device import F32, FULL, U32, add_rn, cuda, fma, narrow
from engine.gemm import FEW_ROWS, check, flat
from engine.gemm_experts_many import Space, many_experts, swiglu
from engine.gemm_few import TWO_A_SM, chain
from engine.gemm_parts import BLOCK, PARTS, THREADS, row_offsets, store_parts, zeros

# ---- few rows ----------------------------------------------------------------------------------

PAIR = 256                      # words of a warp's 32 x 8 tile of sums
PAIRS = PARTS * PAIR


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
    pick = -1                               # which choice of row `lane` this expert is
    if lane < n:
        for j in range(picks):
            if chosen[lane * picks + j] == expert:
                pick = j
    members = U32(cuda.ballot_sync(FULL, pick >= 0))
    if expert < 0 or members & U32((1 << (visit // picks)) - 1):
        return                              # no expert, or an earlier row leads
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
                          scale_rows, K, warp, left, zeros(8), 2)
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
                      scale_rows, K, 0, blocks, zeros(8), 2)
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


# ---- launch ------------------------------------------------------------------------------------

def experts(x, chosen, weights, gate_up, down, limit, y, act, stream, up_scales=None,
            down_scales=None, space: Space | None = None):
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
    many_experts(x, chosen, weights, gate_up, up_scale, down, down_scale, limit, y, act, space, n,
                 picks, count, D, c, (up_shift, up_blocks), (down_shift, down_blocks), stream)
