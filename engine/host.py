"""What the host paths share: how a float32 kernel reads and writes BF16 bits, and how it is
compiled.

BF16 is held as uint16 bits. `widen` is exact; `narrow_into` rounds to nearest even. Kernels that
take either dtype are compiled once for each. Nothing here changes the order of a sum: `fastmath`
stays off, so the bits are those of the written order.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

NJIT = dict(cache=True, nogil=True, error_model="numpy", boundscheck=False)
LANES = 64      # independent sums side by side: 4 AVX-512 or 8 AVX2 registers


@intrinsic
def widen(typingctx, value):
    """One BF16 (uint16 bits) or float32 as float32, exactly."""
    def build(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
    return types.float32(value), build


@intrinsic
def float_bits(typingctx, value):
    """The bits of a float32 as uint32."""
    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))
    return types.uint32(types.float32), build


@intrinsic
def bits_float(typingctx, value):
    """The float32 whose bits a uint32 holds."""
    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())
    return types.float32(types.uint32), build


def narrow_into(row, i, value):
    """Store float32 `value` in row[i] of uint16 (BF16, nearest even) or float32; compiled only."""
    raise NotImplementedError("narrow_into runs only inside compiled code")


@overload(narrow_into, inline="always")
def _narrow_into(row, i, value):
    if row.dtype == types.float32:
        def store(row, i, value):
            row[i] = value
    else:
        def store(row, i, value):
            bits = float_bits(value)
            if value != value:
                row[i] = np.uint16(0x7FC0)
            else:
                odd = (bits >> np.uint32(16)) & np.uint32(1)
                row[i] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return store


def to_bf16(values):
    """float32 array -> uint16 BF16 bits of the same shape, nearest even; NaN becomes 0x7FC0."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    out = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), out)


def from_bf16(bits):
    """uint16 BF16 bits -> float32 array of the same shape, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


@njit(["void(float32[::1], uint16[:, ::1], float32[::1])",
       "void(float32[::1], float32[:, ::1], float32[::1])"], **NJIT)
def product(x, block, acc):
    """acc[j] = sum over k ascending of x[k] * block[k, j]; x [K], block [K, 64], acc [64].

    Eight terms a pass over acc, still added one after the other.
    """
    whole = x.shape[0] & ~7
    for j in range(LANES):
        acc[j] = np.float32(0.0)
    for k in range(0, whole, 8):
        x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
        x4, x5, x6, x7 = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        for j in range(LANES):
            s = acc[j] + x0 * widen(block[k, j])
            s += x1 * widen(block[k + 1, j])
            s += x2 * widen(block[k + 2, j])
            s += x3 * widen(block[k + 3, j])
            s += x4 * widen(block[k + 4, j])
            s += x5 * widen(block[k + 5, j])
            s += x6 * widen(block[k + 6, j])
            acc[j] = s + x7 * widen(block[k + 7, j])
    for k in range(whole, x.shape[0]):
        xk = x[k]
        for j in range(LANES):
            acc[j] += xk * widen(block[k, j])


@njit(["void(float32[:, ::1], int64, uint16[:, ::1], float32[:, ::1])",
       "void(float32[:, ::1], int64, float32[:, ::1], float32[:, ::1])"], **NJIT)
def product4(x, i, block, acc):
    """`product` of rows i .. i + 3 of x [n, K], acc [4, 64]: the same sums, weights read once.

    One expression a row: split in two, the loop was no longer vectorised and ran 5 times slower.
    """
    whole = x.shape[1] & ~3
    for r in range(4):
        for j in range(LANES):
            acc[r, j] = np.float32(0.0)
    for k in range(0, whole, 4):
        for j in range(LANES):
            w0 = widen(block[k, j])
            w1 = widen(block[k + 1, j])
            w2 = widen(block[k + 2, j])
            w3 = widen(block[k + 3, j])
            acc[0, j] = (((acc[0, j] + x[i, k] * w0) + x[i, k + 1] * w1)
                         + x[i, k + 2] * w2) + x[i, k + 3] * w3
            acc[1, j] = (((acc[1, j] + x[i + 1, k] * w0) + x[i + 1, k + 1] * w1)
                         + x[i + 1, k + 2] * w2) + x[i + 1, k + 3] * w3
            acc[2, j] = (((acc[2, j] + x[i + 2, k] * w0) + x[i + 2, k + 1] * w1)
                         + x[i + 2, k + 2] * w2) + x[i + 2, k + 3] * w3
            acc[3, j] = (((acc[3, j] + x[i + 3, k] * w0) + x[i + 3, k + 1] * w1)
                         + x[i + 3, k + 2] * w2) + x[i + 3, k + 3] * w3
    for k in range(whole, x.shape[1]):
        for r in range(4):
            for j in range(LANES):
                acc[r, j] += x[i + r, k] * widen(block[k, j])
