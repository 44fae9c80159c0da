"""Matrix products of many rows: a block's tile of outputs x rows, through shared memory.

Arrays, dtypes and the order of every sum are gemm's; this file is the kernel for more than
FEW_ROWS rows and the `tile` that gemm_experts_many shares.

A block of 8 warps has a tile of 16 mt side outputs x 8 nt (8 / side) rows (`Form`), a warp 16 mt x
8 nt of them. Four chunks of k (gemm_staged) fit in shared memory; cp.async fills three (FP8: two)
ahead. Rows past the last one are copies of it, k past K are zeros.

Registers hold `total` and `part` of the sums and, for FP8, a block's products: one block an SM at
128 x 128. FP8 becomes BF16 in registers, a warp's weights once for each chunk.
"""

import functools
from typing import NamedTuple

try:
    from cuda.bindings import driver
except ImportError:             # no CUDA here: then nothing is ever launched
    driver = None

from engine.device import (F32, I32, I64, INLINE, KERNEL, U32, add_rn, copy_commit, copy_wait, cuda,
                           lds32, shared_address)
from engine.gemm_parts import BLOCK, PARTS, added, is_fp8, load_scales, row_offsets, scaled
from engine.gemm_staged import (PAD, ROW_BYTES, STEP, WIDE_BYTES, fill, filled, places, put_sums,
                                row_lane, staged_product, staged_rows, weight_lane)

THREADS = 256


class Form(NamedTuple):
    """Shape of a block's tile; compile-time constants."""

    mt: int                     # sixteens of outputs of a warp
    nt: int                     # eights of rows of a warp
    side: int                   # warps side by side over outputs; 8 / side over rows

    @property
    def outputs(self):
        return 16 * self.mt * self.side

    @property
    def rows(self):
        return 8 * self.nt * (8 // self.side)

    def shared(self, fp8):
        """Bytes of shared memory: four chunks, or the sums on their way out."""
        chunk = self.outputs * ROW_BYTES + self.rows * (WIDE_BYTES if fp8 else ROW_BYTES)
        return max(4 * chunk, self.rows * (self.outputs + PAD) * 4)


FORMS = {False: Form(4, 4, 2), True: Form(2, 8, 4)}     # 128 x 128; by whether weights are FP8


# ---- a block's tile ----------------------------------------------------------------------------

@cuda.jit(**INLINE)
def following(b, blocks):
    """The block after b where all parts are walked in turn; int32."""
    return I32(b + PARTS) if I32(b + PARTS) < blocks else I32((b & (PARTS - 1)) + 1)


@cuda.jit(**INLINE)
def tile(base, x, w, scales, w_rows, x_rows, scale_rows, K, mt, nt, side):
    """One block's tile, left in shared memory at base as [row][output], outputs + PAD words apart.

    w_rows, x_rows: addresses where this thread copies (weight_lane, row_lane) of the rows in places
    thread // 4, 64 more, ...; scale_rows: of the 2 mt eights of outputs of the warp.
    """
    thread = cuda.threadIdx.x
    warp = thread >> 5
    lane = thread & 31
    g = lane >> 2
    t = lane & 3
    blocks = I32((K + BLOCK - 1) // BLOCK)
    zero = U32(K) & U32(1)                  # K is even
    w_size = U32(16 * mt * side * ROW_BYTES)
    row_bytes = WIDE_BYTES if is_fp8(w) else ROW_BYTES
    size = U32(w_size + U32(8 * nt * (8 // side) * row_bytes))
    output = (warp & (side - 1)) * 16 * mt + g
    row = warp // side * 8 * nt
    at_weights = U32(base + output * ROW_BYTES + 16 * t)
    w_to = U32(base + thread * 16)
    if is_fp8(w):
        at_rows = U32(base + w_size + (row + g) * row_bytes + ((2 * t) ^ ((g & 1) * 5)) * 16)
        place = thread >> 2
        x_to = U32(base + w_size + place * row_bytes + ((thread & 3) ^ ((place & 1) * 5)) * 16)
    else:
        at_rows = U32(base + w_size + (row + g) * row_bytes + 16 * t)
        x_to = U32(base + w_size + thread * 16)
    total = filled(F32(-0.0), mt, nt)       # -0 + part is part, bit for bit
    part = filled(F32(0.0), mt, nt)
    b = I32(0)
    left = blocks
    if is_fp8(w):
        near = U32(0)                       # where the block's two chunks are; the next's: far
        for i in range(2):
            fill(w_to + U32(i) * size, x_to + U32(i) * size, x, w, w_rows, x_rows, I32(64 * i), K)
            copy_commit()
        while left > 0:
            left = I32(left - 1)
            c = following(b, blocks)
            far = U32(2) * size - near
            copy_wait(1)
            cuda.syncthreads()
            rows = staged_rows(U32(at_rows + near), w, mt, nt, side, 0)
            if left > 0:
                fill(w_to + far, x_to + far, x, w, w_rows, x_rows, I32(c * BLOCK), K)
            copy_commit()
            new = staged_product(filled(F32(0.0), mt, nt), w, rows, U32(at_weights + near),
                                 U32(at_rows + near), zero, mt, nt, side, 0)
            copy_wait(1)
            cuda.syncthreads()
            rows = staged_rows(U32(at_rows + near), w, mt, nt, side, 1)
            if left > 0:
                fill(w_to + far + size, x_to + far + size, x, w, w_rows, x_rows,
                     I32(c * BLOCK + 64), K)
            copy_commit()
            by = load_scales(scales, scale_rows, I64(b))
            new = staged_product(new, w, rows, U32(at_weights + near), U32(at_rows + near), zero,
                                 mt, nt, side, 1)
            part = scaled(part, new, by)
            if I32(b + PARTS) >= blocks:
                total = added(total, part)
                part = filled(F32(0.0), mt, nt)
            b = c
            near = far
    else:
        for i in range(3):
            fill(w_to + U32(i) * size, x_to + U32(i) * size, x, w, w_rows, x_rows, I32(32 * i), K)
            copy_commit()
        while left > 0:
            left = I32(left - 1)
            c = following(b, blocks)
            copy_wait(2)
            cuda.syncthreads()
            rows = staged_rows(at_rows, w, mt, nt, side, 0)
            fill(w_to + U32(3) * size, x_to + U32(3) * size, x, w, w_rows, x_rows,
                 I32(b * BLOCK + 96), K)
            copy_commit()
            part = staged_product(part, w, rows, at_weights, at_rows, zero, mt, nt, side, 0)
            copy_wait(2)
            cuda.syncthreads()
            rows = staged_rows(at_rows, w, mt, nt, side, 1)
            if left > 0:
                fill(w_to, x_to, x, w, w_rows, x_rows, I32(c * BLOCK), K)
            copy_commit()
            part = staged_product(part, w, rows, at_weights, at_rows, zero, mt, nt, side, 1)
            copy_wait(2)
            cuda.syncthreads()
            rows = staged_rows(at_rows, w, mt, nt, side, 2)
            if left > 0:
                fill(w_to + size, x_to + size, x, w, w_rows, x_rows, I32(c * BLOCK + 32), K)
            copy_commit()
            part = staged_product(part, w, rows, at_weights, at_rows, zero, mt, nt, side, 2)
            copy_wait(2)
            cuda.syncthreads()
            rows = staged_rows(at_rows, w, mt, nt, side, 3)
            if left > 0:
                fill(w_to + U32(2) * size, x_to + U32(2) * size, x, w, w_rows, x_rows,
                     I32(c * BLOCK + 64), K)
            copy_commit()
            part = staged_product(part, w, rows, at_weights, at_rows, zero, mt, nt, side, 3)
            if I32(b + PARTS) >= blocks:
                total = added(total, part)
                part = filled(F32(0.0), mt, nt)
            b = c
    copy_wait(0)
    cuda.syncthreads()
    stride = 16 * mt * side + PAD
    put_sums(U32(base + ((row + 2 * t) * stride + output) * 4), total, mt, nt, side)
    cuda.syncthreads()


@functools.cache
def gemm_kernel(form):
    """The kernel of one form of tile."""
    mt, nt, side = form
    outputs, rows, stride = form.outputs, form.rows, form.outputs + PAD
    w_count, x_count, eights = outputs // STEP, rows // STEP, 2 * mt

    @cuda.jit(**KERNEL)
    def _gemm_kernel(x, w, scales, y, n, N, K, groups, shift, scale_blocks, add):
        # grid: (ceil(n / rows), ceil(N / outputs), groups), 8 warps: neighbours share weights
        base = shared_address(cuda.shared.array(0, U32))
        thread = cuda.threadIdx.x
        group = cuda.blockIdx.z
        row = cuda.blockIdx.x * rows
        output = cuda.blockIdx.y * outputs
        w_rows = places(w, group * N * K + weight_lane(w), output + (thread >> 2), N - 1, STEP, K,
                        w_count)
        x_rows = places(x, group * K + row_lane(), row + (thread >> 2), n - 1, STEP, groups * K,
                        x_count)
        scale_rows = row_offsets(group * (((N - 1) >> shift) + 1) * scale_blocks,
                                 output + ((thread >> 5) & (side - 1)) * 16 * mt, N - 1, shift,
                                 scale_blocks, eights)
        tile(base, x, w, scales, w_rows, x_rows, scale_rows, K, mt, nt, side)
        at = thread & (outputs - 1)
        if output + at < N:
            for r in range(thread // outputs, min(rows, n - row), THREADS // outputs):
                value = lds32(U32(base + (r * stride + at) * 4))
                where = ((row + r) * groups + group) * N + output + at
                y[where] = add_rn(y[where], value) if add else value
    return _gemm_kernel


_allowed = set()                # (kernel, its arrays' dtypes) that may have more than 48 KiB


def launch(kernel, grid, shared, stream, args):
    """Launch a kernel of THREADS threads with `shared` bytes of shared memory a block."""
    key = kernel, *(a.dtype for a in args if hasattr(a, "dtype"))
    if key not in _allowed:
        compiled = kernel.compile(tuple(kernel.typeof_pyval(a) for a in args))
        function = compiled._codelibrary.get_cufunc()
        code, = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared,
            function.handle, function.device.id)
        assert code == driver.CUresult.CUDA_SUCCESS, code
        _allowed.add(key)
    kernel[grid, THREADS, stream, shared](*args)


def gemm_many(x, w, scales, y, n, N, K, groups, shift, blocks, add, stream):
    """gemm() for more than FEW_ROWS rows; flat arrays, scales as gemm.check returns them."""
    fp8 = w.dtype == "uint8"
    form = FORMS[fp8]
    launch(gemm_kernel(form), (-(-n // form.rows), -(-N // form.outputs), groups),
           form.shared(fp8), stream, (x, w, scales, y, n, N, K, groups, shift, blocks, add))
