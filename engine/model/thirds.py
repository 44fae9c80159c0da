"""Float32 on tensor cores: a float32 is the sum of three BF16, exactly.

| third of v | | |
|---|---|---|
| 0 | the BF16 nearest to v | what every other matrix product takes |
| 1 | the BF16 nearest to v - third 0 | that difference is exact in float32 |
| 2 | v - third 0 - third 1 | 8 bits at most, so exact |

So the projections whose operands must not be rounded, the coefficients of mHC and the logits of
the router, are products of BF16 too: each third of a row times the weights, sums in float32, the
sums of the thirds added smallest first. A float32 matrix [N, K] is held as its thirds one below the
other, [3 N, K]; a BF16 matrix is its own first third. Below 2^-110 a third may be lost; an infinity
becomes NaN.
"""

import numpy as np
from numba import int64

from engine.device import (INLINE, KERNEL, U32, add_rn, bits_float, cuda, narrow, narrow2, widen)
from engine.host import from_bf16, to_bf16

THIRDS = 3
THREADS = 256


def thirds(matrix):
    """[N, K] float32 -> [3 N, K] uint16 (BF16), whose three N x K parts add up to it."""
    first = to_bf16(matrix)
    rest = matrix - from_bf16(first)
    second = to_bf16(rest)
    return np.concatenate([first, second, to_bf16(rest - from_bf16(second))])


@cuda.jit(**INLINE)
def third_pairs(a, b):
    """Two float32 -> their thirds as three uint32 of two BF16, a in the low halves."""
    first = narrow2(a, b)
    a = add_rn(a, -bits_float(U32(first) << U32(16)))
    b = add_rn(b, -bits_float(U32(first) & U32(0xFFFF0000)))
    second = narrow2(a, b)
    a = add_rn(a, -bits_float(U32(second) << U32(16)))
    b = add_rn(b, -bits_float(U32(second) & U32(0xFFFF0000)))
    return first, second, narrow2(a, b)


@cuda.jit(**KERNEL)
def _thirds_kernel(matrix, out):
    # grid ceil(size / THREADS), block THREADS; both flat
    i = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i < matrix.size:
        value = matrix[i]
        for third in range(THIRDS):
            bits = narrow(value)
            out[third * matrix.size + i] = bits
            value = add_rn(value, -widen(bits))


def thirds_cuda(matrix, out, stream):
    """out [3 N, K] uint16 = thirds(matrix [N, K] float32), both on the device."""
    assert out.shape == (THIRDS * matrix.shape[0], matrix.shape[1]), (out.shape, matrix.shape)
    if matrix.size:
        _thirds_kernel[-(-matrix.size // THREADS), THREADS, stream](
            matrix.reshape(matrix.size), out.reshape(out.size))
