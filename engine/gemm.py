"""Matrix products on the device, y = x W^T, in one arithmetic for 1 row or 2,048.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | x | [n, K] or [n, G, K] | uint16 (BF16) | rows; G groups, each its own matrix |
| reads | w | [N, K] or [G, N, K] | uint16 (BF16), uint8 (e4m3) | row-major as on disk |
| reads | scales | [ceil(N / R), ceil(K / 128)] (grouped: G of them) | float32 | FP8; R = 128 |
| writes | y | [n, N] or [n, G, N] | float32 | y += where `add` |

Small models may give FP8 scales for R = 8, 16, 32 or 64 rows; R is read off their shape. All
arrays are C-contiguous, 16-byte aligned; K % 8 == 0 (BF16) or K % 16 == 0 (FP8).

Order of a sum, the same in every kernel here and in gemm_experts, whatever n, N or the grid:
1. k is cut into blocks of 128; part p of 8 has blocks p, p + 8, p + 16, ... in ascending order.
2. A block is a chain of 8 mma.sync m16n8k16 (weights are A, rows are B, float32 sums); which k meet
   in one mma is the table in gemm_parts. A block cut short by K is filled with zeros.
3. BF16: one chain through all blocks of a part, from 0. FP8: a chain from 0 for each block, then
   part = fma(scale, block, part), from 0; e4m3 times BF16 is exact in the products.
4. y = ((part 0 + part 1) + part 2) + ...; parts without blocks are left out. Then y = old + y
   where `add`.
What mma.sync does inside is the GPU's own fixed order: bits may differ between kinds of GPU.

A row's column in the mma, and what the other columns hold, do not enter its sums; rows past n are
copies of the last row and never stored. Padding rows are computed like any other. Empty case: no
rows or no outputs: nothing is launched. K = 0 is refused: a rank without columns skips the call.

Up to 32 rows: `_gemv_kernel`, which reads each weight once, 16 bytes a lane past L1, two blocks of
k (4 to 16 KiB) in flight a warp. Either 8 warps share a tile, one part each, or (short K) each warp
has its own. More rows: `_gemm_kernel`, 128 outputs x 64 rows a block through 48 KiB of shared
memory filled by cp.async three (BF16) or two (FP8) stages ahead.
"""

import functools

from engine.device import (F32, INLINE, KERNEL, U32, add_rn, copy16, copy_commit, copy_wait, cuda,
                           lds32, shared_address)
from engine.gemm_parts import (BLOCK, ROW_BYTES, TILE_STRIDE, added, is_fp8, load_rows,
                               load_rows_tail, load_scales, load_weights, load_weights_tail,
                               product, row_offsets, scaled, shared_rows, shared_weights,
                               store_parts, store_tile, zeros)

PARTS = 8                       # also the warps of a block
THREADS = 32 * PARTS
FEW_ROWS = 32                   # the GEMV takes up to four eights of rows
OUTPUTS, ROWS = 128, 64         # tile of a block of the many-row kernel: warps 4 x 2, 32 x 32 each
STAGE_WORDS = 12288             # 48 KiB: 4 stages of 12 KiB (BF16) or 3 of 16 KiB (FP8)
TWO_A_SM = {**KERNEL, "max_registers": 128} if KERNEL else {}   # so that two blocks share an SM
ROWS_AT = OUTPUTS * ROW_BYTES   # activations follow the weights of a stage


# ---- few rows ----------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def following(b, blocks):
    """The block after b where one warp walks all parts in turn."""
    return b + PARTS if b + PARTS < blocks else (b & (PARTS - 1)) + 1


@cuda.jit(**INLINE)
def accumulate(part, nothing, w, weights, rows, scales, scale_rows, b):
    """part + one block of products (order: 2 and 3 above)."""
    if is_fp8(w):
        by = load_scales(scales, scale_rows, b)
        return scaled(part, product(nothing, w, weights, rows), by)
    return product(part, w, weights, rows)


@cuda.jit(**INLINE)
def chain(x, w, scales, x_rows, w_rows, scale_rows, K, first, left, nothing):
    """Sum over `left` blocks from block `first` on: a part, or all parts where first = 0 and left
    = all blocks. Tuples are those of gemm_parts; `nothing` is a tuple of zeros."""
    t = cuda.threadIdx.x & 3
    lane = 16 * t if is_fp8(w) else 8 * t
    blocks = (K + BLOCK - 1) // BLOCK
    whole = K // BLOCK
    b = first
    total = nothing
    part = nothing
    while left > 0:
        c = following(b, blocks)
        if left > 1 and b < whole and c < whole:
            k = b * BLOCK + lane
            m = c * BLOCK + lane
            near = load_weights(w, w_rows, k)
            far = load_weights(w, w_rows, m)
            part = accumulate(part, nothing, w, near, load_rows(x, x_rows, k, w), scales,
                              scale_rows, b)
            if b + PARTS >= blocks:
                total = added(total, part) if b & (PARTS - 1) != first else part
                part = nothing
            part = accumulate(part, nothing, w, far, load_rows(x, x_rows, m, w), scales,
                              scale_rows, c)
            b = c
            c = following(b, blocks)
            left -= 2
        else:
            k = b * BLOCK + lane
            part = accumulate(part, nothing, w, load_weights_tail(w, w_rows, k, K),
                              load_rows_tail(x, x_rows, k, w, K), scales, scale_rows, b)
            left -= 1
        if b + PARTS >= blocks:
            total = added(total, part) if b & (PARTS - 1) != first else part
            part = nothing
        b = c
    return total


@functools.cache
def gemv_kernel(mt, nt, alone):
    """GEMV of 16 mt outputs x 8 nt rows a tile; alone: a warp a tile, else 8 warps a tile."""
    sums, halves = 4 * mt * nt, 2 * mt
    tile_words, tiles = 32 * sums, PARTS if alone else 1
    words = PARTS * tile_words

    @cuda.jit(**(TWO_A_SM if mt * nt <= 2 else KERNEL))
    def _gemv_kernel(x, w, scales, y, n, N, K, groups, shift, scale_blocks, add):
        # grid: (ceil(N / (16 mt tiles)), groups), 8 warps
        found = cuda.shared.array(words, F32)
        thread = cuda.threadIdx.x
        warp = thread >> 5
        lane = thread & 31
        g = lane >> 2
        group = cuda.blockIdx.y
        blocks = (K + BLOCK - 1) // BLOCK
        tile = cuda.blockIdx.x * tiles + (warp if alone else 0)
        output = tile * 16 * mt
        first = 0 if alone else warp
        left = blocks if alone else (blocks - warp + PARTS - 1) // PARTS
        x_rows = row_offsets(group * K, g, n - 1, 0, groups * K, nt)
        w_rows = row_offsets(group * N * K, output + g, N - 1, 0, K, halves)
        scale_rows = row_offsets(group * (((N - 1) >> shift) + 1) * scale_blocks, output, N - 1,
                                 shift, scale_blocks, halves)
        if left > 0:
            total = chain(x, w, scales, x_rows, w_rows, scale_rows, K, first, left, zeros(sums))
            store_parts(found, warp * tile_words + lane, 32, total)
        cuda.syncthreads()

        # ---- parts in order, then out ----
        parts = 1 if alone else min(PARTS, blocks)
        for i in range(thread, tiles * tile_words, THREADS):
            value = found[i]
            for p in range(1, parts):
                value = add_rn(value, found[p * tile_words + i])
            q = (i // 32) % sums
            at = (cuda.blockIdx.x * tiles + i // tile_words) * 16 * mt + q // (4 * nt) * 16
            at += ((i & 31) >> 2) + 8 * ((q >> 1) & 1)
            row = (q // 4) % nt * 8 + 2 * (i & 3) + (q & 1)
            if at < N and row < n:
                where = (row * groups + group) * N + at
                y[where] = add_rn(y[where], value) if add else value
    return _gemv_kernel


# ---- many rows ---------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def stage(where, x, w, a0, a1, b0, b1, k, K):
    """Start this thread's copies of one stage: weight rows at a0, a1, activations at b0, b1."""
    thread = cuda.threadIdx.x
    step = 16 if is_fp8(w) else 8
    at = k + (thread & 3) * step
    size = U32(16) if at < K else U32(0)
    at = at if at < K else 0
    copy16(U32(where + thread * 16), w, a0 + at, size)
    copy16(U32(where + thread * 16 + ROWS_AT // 2), w, a1 + at, size)
    if is_fp8(w):
        row = thread >> 3
        at = k + (thread & 7) * 8
        size = U32(16) if at < K else U32(0)
        at = at if at < K else 0
        to = where + ROWS_AT + row * 2 * ROW_BYTES + ((thread & 7) ^ (row & 1)) * 16
        copy16(U32(to), x, b0 + at, size)
        copy16(U32(to + ROWS // 2 * 2 * ROW_BYTES), x, b1 + at, size)
    else:
        copy16(U32(where + ROWS_AT + thread * 16), x, b0 + at, size)


@cuda.jit(**INLINE)
def tile(base, x, w, scales, a0, a1, b0, b1, scale_rows, K):
    """One block's 128 x 64 tile, left in shared memory at base as [row][output], TILE_STRIDE apart.

    a0, a1: offsets of the weight rows in places thread // 4 and 64 more; b0, b1: of the rows in
    places `row_place` and 32 more; scale_rows: tuple of 4, of the warp's eights of outputs.
    """
    thread = cuda.threadIdx.x
    warp = thread >> 5
    lane = thread & 31
    g = lane >> 2
    t = lane & 3
    step, stages = (64, 3) if is_fp8(w) else (32, 4)
    size = STAGE_WORDS * 4 // stages
    blocks = (K + BLOCK - 1) // BLOCK
    subs = BLOCK // step
    count = blocks * subs
    at_weights = (32 * (warp & 3) + g) * ROW_BYTES + 16 * t
    at_rows = ROWS_AT + (32 * (warp >> 2) + g) * ROW_BYTES + 16 * t
    if is_fp8(w):
        at_rows = ROWS_AT + (32 * (warp >> 2) + g) * 2 * ROW_BYTES + 32 * t + 16 * (g & 1)
    b = 0                                   # the block and quarter or half of it in the products
    sub = 0
    ahead = 0                               # the same of the copies
    ahead_sub = 0
    for i in range(stages - 1):
        if i < count:
            stage(base + i * size, x, w, a0, a1, b0, b1, ahead * BLOCK + ahead_sub * step, K)
            ahead_sub += 1
            if ahead_sub == subs:
                ahead_sub = 0
                ahead = following(ahead, blocks)
        copy_commit()
    total = zeros(32)
    part = zeros(32)
    new = zeros(32)
    to = stages - 1                         # stage to fill, stage to read
    at = 0
    for i in range(count):
        if is_fp8(w):
            copy_wait(1)
        else:
            copy_wait(2)
        cuda.syncthreads()
        if i + stages - 1 < count:
            stage(base + to * size, x, w, a0, a1, b0, b1, ahead * BLOCK + ahead_sub * step, K)
            ahead_sub += 1
            if ahead_sub == subs:
                ahead_sub = 0
                ahead = following(ahead, blocks)
        copy_commit()
        to = to + 1 if to + 1 < stages else 0
        weights = shared_weights(U32(base + at * size + at_weights), 2)
        rows = shared_rows(U32(base + at * size + at_rows), w, 4)
        at = at + 1 if at + 1 < stages else 0
        sub += 1
        if is_fp8(w):
            new = product(new, w, weights, rows)
            if sub == subs:
                part = scaled(part, new, load_scales(scales, scale_rows, b))
                new = zeros(32)
        else:
            part = product(part, w, weights, rows)
        if sub == subs:
            sub = 0
            if b + PARTS >= blocks:
                total = added(total, part) if b & (PARTS - 1) != 0 else part
                part = zeros(32)
            b = following(b, blocks)
    copy_wait(0)
    cuda.syncthreads()
    output = 32 * (warp & 3) + g
    row = 32 * (warp >> 2) + 2 * t
    store_tile(U32(base + (row * TILE_STRIDE + output) * 4), total, 2)
    cuda.syncthreads()


@cuda.jit(**INLINE)
def row_place(w):
    """Place of a thread's first activation row in `tile`; its second is 32 further (FP8 only)."""
    return cuda.threadIdx.x >> 3 if is_fp8(w) else cuda.threadIdx.x >> 2


@cuda.jit(**KERNEL)
def _gemm_kernel(x, w, scales, y, n, N, K, groups, shift, scale_blocks, add):
    # grid: (ceil(n / 64), ceil(N / 128), groups), 8 warps: neighbours share weights
    base = shared_address(cuda.shared.array(STAGE_WORDS, U32))
    thread = cuda.threadIdx.x
    group = cuda.blockIdx.z
    row = cuda.blockIdx.x * ROWS
    output = cuda.blockIdx.y * OUTPUTS
    a = output + (thread >> 2)
    a0 = (group * N + min(a, N - 1)) * K
    a1 = (group * N + min(a + 64, N - 1)) * K
    b = row + row_place(w)
    b0 = (min(b, n - 1) * groups + group) * K
    b1 = (min(b + 32, n - 1) * groups + group) * K
    scale_rows = row_offsets(group * (((N - 1) >> shift) + 1) * scale_blocks,
                             output + 32 * ((thread >> 5) & 3), N - 1, shift, scale_blocks, 4)
    tile(base, x, w, scales, a0, a1, b0, b1, scale_rows, K)
    for i in range(thread, ROWS * OUTPUTS, THREADS):
        r = row + i // OUTPUTS
        o = output + i % OUTPUTS
        if r < n and o < N:
            value = lds32(U32(base + (i // OUTPUTS * TILE_STRIDE + i % OUTPUTS) * 4))
            where = (r * groups + group) * N + o
            y[where] = add_rn(y[where], value) if add else value


# ---- launch ------------------------------------------------------------------------------------

def scale_shift(scales, groups, N, K):
    """log2 of the rows a scale covers, checked against N and K; scales [.., rows, blocks]."""
    rows, blocks = scales.shape[-2:]
    assert scales.size == groups * rows * blocks and blocks == -(-K // BLOCK), (scales.shape, K)
    for shift in (7, 6, 5, 4, 3):
        if rows == (N + (1 << shift) - 1) >> shift:
            return shift
    raise AssertionError((scales.shape, N))


def check(x, w, scales, groups, N, K):
    """Assert what the kernels need of operands; returns (scales or a stand-in, shift, blocks)."""
    fp8 = w.dtype == "uint8"
    assert x.dtype == "uint16" and (fp8 or w.dtype == "uint16"), (x.dtype, w.dtype)
    assert K > 0 and K % (16 if fp8 else 8) == 0, K
    assert (scales is not None) == fp8, w.dtype
    if fp8:
        return flat(scales), scale_shift(scales, groups, N, K), -(-K // BLOCK)
    return None, 0, 0


def flat(array):
    """The C-contiguous device array in one dimension."""
    return array.reshape(array.size)


def gemm(x, w, y, stream, scales=None, add=False):
    """y = x W^T, or y += x W^T: the module's arrays and order; launches one kernel on stream."""
    groups = 1 if w.ndim == 2 else w.shape[0]
    n = x.shape[0]
    N, K = w.shape[-2:]
    assert x.ndim == y.ndim == w.ndim, (x.shape, w.shape, y.shape)
    assert x.shape == (n, *w.shape[:-2], K), (x.shape, w.shape)
    assert y.shape == (n, *w.shape[:-2], N), (y.shape, w.shape)
    if n == 0 or N == 0 or groups == 0:
        return
    scale, shift, blocks = check(x, w, scales, groups, N, K)
    y = flat(y)
    args = (flat(x), flat(w), y if scale is None else scale, y, n, N, K, groups, shift, blocks,
            bool(add))
    if n > FEW_ROWS:
        _gemm_kernel[(-(-n // ROWS), -(-N // OUTPUTS), groups), THREADS, stream](*args)
        return
    nt = 1 if n <= 8 else 2 if n <= 16 else 4
    alone = K <= 4 * BLOCK and N * groups >= 4096
    mt = 2 if nt < 4 and N * groups >= (4096 if scales is not None else 16384) else 1
    grid = (-(-N // (16 * mt * (PARTS if alone else 1))), groups)
    gemv_kernel(mt, nt, alone)[grid, THREADS, stream](*args)
