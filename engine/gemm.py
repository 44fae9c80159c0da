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

Up to 32 rows: gemm_few, which reads each weight once. Either 8 warps share a tile of outputs, one
part each, or (short K) each warp has its own. More rows: gemm_tile.
"""

from engine.gemm_few import FEW_ROWS, gemv
from engine.gemm_parts import BLOCK
from engine.gemm_tile import gemm_many


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
    (gemm_many if n > FEW_ROWS else gemv)(*args, stream)
