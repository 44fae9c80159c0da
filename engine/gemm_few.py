"""Matrix products of up to 32 rows: each weight is read once.

Up to 8 rows: `_gemv_kernel`. 8 warps share a tile of outputs, one part of the sums each; a warp
loads 2 or 4 blocks of k at once, 16 bytes a lane past L1, into registers (4 to 16 KiB a warp) and
multiplies them in turn. More rows, or K so short that each warp has a tile of its own: gemm_ring,
which needs fewer registers and no more code for a short K.
"""

import functools

from engine.device import F32, INLINE, KERNEL, add_rn, cuda
from engine.gemm_parts import (BLOCK, PARTS, THREADS, added, is_fp8, load_rows, load_rows_tail,
                               load_scales, load_weights, load_weights_tail, product, row_offsets,
                               scaled, store_parts, zeros)
from engine.gemm_ring import ring_kernel

FEW_ROWS = 32                   # four eights of rows
TWO_A_SM = {**KERNEL, "max_registers": 128} if KERNEL else {}   # so that two blocks share an SM


@cuda.jit(**INLINE)
def following(b, blocks):
    """The block after b where one warp walks all parts in turn."""
    return b + PARTS if b + PARTS < blocks else (b & (PARTS - 1)) + 1


@cuda.jit(**INLINE)
def taken(total, part, nothing, w, scales, scale_rows, weights, rows, b, first, blocks):
    """(total, part) with the products of block b (gemm's order: 2 to 4)."""
    if is_fp8(w):
        by = load_scales(scales, scale_rows, b)
        part = scaled(part, product(nothing, w, weights, rows), by)
    else:
        part = product(part, w, weights, rows)
    if b + PARTS >= blocks:
        total = added(total, part) if b & (PARTS - 1) != first else part
        part = nothing
    return total, part


@cuda.jit(**INLINE)
def chain(x, w, scales, x_rows, w_rows, scale_rows, K, first, left, nothing, depth):
    """Sum over `left` blocks from block `first` on: a part, or all parts where first = 0 and
    left = all blocks, `depth` (a constant, 2 or 4) of them in flight. Tuples are those of
    gemm_parts; `nothing` is a tuple of zeros."""
    t = cuda.threadIdx.x & 3
    lane = 16 * t if is_fp8(w) else 8 * t
    blocks = (K + BLOCK - 1) // BLOCK
    whole = K // BLOCK
    b = first
    total = nothing
    part = nothing
    while left > 0:
        c = following(b, blocks)
        d = following(c, blocks)
        e = following(d, blocks)
        last = max(b, c) if depth == 2 else max(max(b, c), max(d, e))
        i = b * BLOCK + lane
        if left >= depth and last < whole:
            j = c * BLOCK + lane
            k = d * BLOCK + lane
            m = e * BLOCK + lane
            w0 = load_weights(w, w_rows, i)
            w1 = load_weights(w, w_rows, j)
            if depth == 4:
                w2 = load_weights(w, w_rows, k)
                w3 = load_weights(w, w_rows, m)
            total, part = taken(total, part, nothing, w, scales, scale_rows, w0,
                                load_rows(x, x_rows, i, w), b, first, blocks)
            total, part = taken(total, part, nothing, w, scales, scale_rows, w1,
                                load_rows(x, x_rows, j, w), c, first, blocks)
            b = d
            if depth == 4:
                total, part = taken(total, part, nothing, w, scales, scale_rows, w2,
                                    load_rows(x, x_rows, k, w), d, first, blocks)
                total, part = taken(total, part, nothing, w, scales, scale_rows, w3,
                                    load_rows(x, x_rows, m, w), e, first, blocks)
                b = following(e, blocks)
            left -= depth
        else:
            total, part = taken(total, part, nothing, w, scales, scale_rows,
                                load_weights_tail(w, w_rows, i, K),
                                load_rows_tail(x, x_rows, i, w, K), b, first, blocks)
            b = c
            left -= 1
    return total


@functools.cache
def gemv_kernel(eights, depth):
    """8 eights outputs (eights even) x up to 8 rows a block, `depth` blocks of k in flight."""
    sums = 2 * eights
    words = 32 * sums                       # of a warp
    found_words = PARTS * words

    @cuda.jit(**TWO_A_SM)
    def _gemv_kernel(x, w, scales, y, n, N, K, groups, shift, scale_blocks, add):
        # grid: (ceil(N / (8 eights)), groups), 8 warps, a part each
        found = cuda.shared.array(found_words, F32)
        thread = cuda.threadIdx.x
        warp = thread >> 5
        lane = thread & 31
        g = lane >> 2
        group = cuda.blockIdx.y
        blocks = (K + BLOCK - 1) // BLOCK
        output = cuda.blockIdx.x * 8 * eights
        if warp < blocks:
            x_rows = row_offsets(group * K, g, n - 1, 0, groups * K, 1)
            w_rows = row_offsets(group * N * K, output + g, N - 1, 0, K, eights)
            scale_rows = row_offsets(group * (((N - 1) >> shift) + 1) * scale_blocks, output, N - 1,
                                     shift, scale_blocks, eights)
            total = chain(x, w, scales, x_rows, w_rows, scale_rows, K, warp,
                          (blocks - warp + PARTS - 1) // PARTS, zeros(sums), depth)
            store_parts(found, warp * words + lane, 32, total)
        cuda.syncthreads()

        # ---- parts in order, then out ----
        for i in range(thread, words, THREADS):
            value = found[i]
            for p in range(1, min(PARTS, blocks)):
                value = add_rn(value, found[p * words + i])
            q = i // 32
            at = output + q // 4 * 16 + ((i & 31) >> 2) + 8 * ((q >> 1) & 1)
            row = 2 * (i & 3) + (q & 1)
            if at < N and row < n:
                where = (row * groups + group) * N + at
                y[where] = add_rn(y[where], value) if add else value
    return _gemv_kernel


def gemv(x, w, scales, y, n, N, K, groups, shift, scale_blocks, add, stream):
    """gemm of up to FEW_ROWS rows: flat arrays; scales is any array where w is not FP8."""
    fp8 = w.dtype == "uint8"
    nt = 1 if n <= 8 else 2 if n <= 16 else 4
    alone = K <= 4 * BLOCK and N * groups >= 4096
    if nt > 1 or alone:
        # a tile of the ring lies within the rows of one scale, a walk's scales within a warp
        eights = 1 if nt == 1 or fp8 and shift == 3 else 2
        assert not fp8 or K <= 32 * PARTS * BLOCK, K
        kernel = ring_kernel(eights, nt, 2 if nt == 1 else 1, alone)
    else:
        eights, depth = (4, 2) if N * groups >= (8192 if fp8 else 32768) else (2, 4 if fp8 else 2)
        kernel = gemv_kernel(eights, depth)
    grid = (-(-N // (8 * eights * (PARTS if alone else 1))), groups)
    kernel[grid, THREADS, stream](x, w, scales, y, n, N, K, groups, shift, scale_blocks, add)
