"""RMS norm and LayerNorm in float32, with one fixed order of sums a row.

A sum of squares runs in 64 lanes (lane j takes elements j, j + 64, ...), then over the lanes
ascending; LayerNorm's mean is a plain ascending sum. Formulas: x * (mean(x^2) + eps)^-0.5 *
weight; (x - mean) * (mean((x - mean)^2) + eps)^-0.5 * weight + bias. Weights come as float32,
checkpoint names *layernorm.weight, *_norm.weight.

On the device a row is a block of 256 threads: thread t adds the elements t, t + 256, ... (squares
by fused multiply-add), then the lanes of a warp as a butterfly, then the warps ascending; a row is
read once and held in registers, 8,192 elements at most. Rows are
read from column `first` of a wider array and written from column `at`, so that parts of one
product need no copy; seats [n] int32 marks padding rows (negative), which nothing is written for.
An output is float32 or uint16 (BF16 bits, nearest even), by the dtype of the array.
"""

import math
from functools import lru_cache

import numpy as np
from numba import float32, int32, int64, njit

from engine.device import KERNEL, block_sum, cuda, fma, narrow, rsqrt
from engine.host import NJIT

LANES = 64
MOST = 32               # elements of a row a thread may hold
THREADS = 256           # a multiple of 32; the same for every width, as the order depends on it


@njit("float32(float32[::1])", **NJIT)
def sum_squares(row):
    """Sum of squares of a row, lanes first."""
    lane = np.zeros(LANES, np.float32)
    whole = row.shape[0] - row.shape[0] % LANES
    for start in range(0, whole, LANES):
        for j in range(LANES):
            lane[j] += row[start + j] * row[start + j]
    for j in range(row.shape[0] - whole):
        lane[j] += row[whole + j] * row[whole + j]
    total = np.float32(0.0)
    for j in range(LANES):
        total += lane[j]
    return total


@njit("void(float32[:, ::1], float32[::1], float32, float32[:, ::1])", **NJIT)
def _rms_norm(x, weight, eps, out):
    width = x.shape[1]
    for i in range(x.shape[0]):
        scale = np.float32(1.0) / math.sqrt(sum_squares(x[i]) / np.float32(width) + eps)
        for j in range(width):
            out[i, j] = x[i, j] * scale * weight[j]


@njit("void(float32[:, ::1], float32[::1], float32[::1], float32, float32[:, ::1])", **NJIT)
def _layer_norm(x, weight, bias, eps, out):
    width = x.shape[1]
    for i in range(x.shape[0]):
        total = np.float32(0.0)
        for j in range(width):
            total += x[i, j]
        mean = total / np.float32(width)
        for j in range(width):
            out[i, j] = x[i, j] - mean
        scale = np.float32(1.0) / math.sqrt(sum_squares(out[i]) / np.float32(width) + eps)
        for j in range(width):
            out[i, j] = out[i, j] * scale * weight[j] + bias[j]


def rms_norm(x, weight, eps):
    """x [n, D] float32, contiguous; weight [D] float32 -> [n, D] float32."""
    out = np.empty_like(x)
    _rms_norm(x, weight, np.float32(eps), out)
    return out


def layer_norm(x, weight, bias, eps):
    """x [n, D] float32, contiguous; weight, bias [D] float32 -> [n, D] float32."""
    out = np.empty_like(x)
    _layer_norm(x, weight, bias, np.float32(eps), out)
    return out


# ---- device ------------------------------------------------------------------------------------

@lru_cache(None)
def norm_kernel(centred, chunks, bf16):
    """The kernel of LayerNorm (centred) or RMS norm of up to `chunks` THREADS elements, that writes
    BF16 bits or float32."""

    @cuda.jit(**KERNEL)
    def _norm_kernel(x, first, weight, bias, eps, seats, out, at):
        # grid (n), block THREADS; a row stays in registers
        scratch = cuda.shared.array(32, float32)
        held = cuda.local.array(chunks, float32)
        gain = cuda.local.array(chunks, float32)
        shift = cuda.local.array(chunks, float32)
        row = int64(cuda.blockIdx.x)
        if seats[row] < 0:
            return
        width = int32(weight.shape[0])
        for c in range(chunks):
            d = c * THREADS + cuda.threadIdx.x
            inside = min(d, width - 1)
            held[c] = x[row, first + inside]
            gain[c] = weight[inside]
            if centred:
                shift[c] = bias[inside]
            if d >= width:
                held[c] = float32(0)
        if centred:
            total = float32(0)
            for c in range(chunks):
                total += held[c]
            mean = block_sum(total, scratch) / float32(width)
            for c in range(chunks):
                held[c] = held[c] - mean if c * THREADS + cuda.threadIdx.x < width else float32(0)
        total = float32(0)
        for c in range(chunks):
            total = fma(held[c], held[c], total)
        scale = rsqrt(block_sum(total, scratch) / float32(width) + eps)
        for c in range(chunks):
            d = c * THREADS + cuda.threadIdx.x
            value = held[c] * scale
            value = fma(value, gain[c], shift[c]) if centred else value * gain[c]
            if d < width:
                if bf16:
                    out[row, at + d] = narrow(value)
                else:
                    out[row, at + d] = value

    return _norm_kernel


@cuda.jit(**KERNEL)
def _narrow_kernel(x, first, seats, out):
    # grid (n), block THREADS
    row = int64(cuda.blockIdx.x)
    if seats[row] >= 0:
        for d in range(cuda.threadIdx.x, out.shape[1], THREADS):
            out[row, d] = narrow(x[row, first + d])


def _norm(centred, x, first, weight, bias, eps, seats, out, at, stream):
    n, width = x.shape[0], weight.size
    assert first + width <= x.shape[1] and at + width <= out.shape[1], (x.shape, out.shape, width)
    assert out.shape[0] == n == seats.size and bias.size == width, (x.shape, out.shape, seats.size)
    assert 0 < width <= MOST * THREADS, width
    if n:
        norm_kernel(centred, -(-width // THREADS), out.dtype == np.uint16)[n, THREADS, stream](
            x, first, weight, bias, np.float32(eps), seats, out, at)


def rms_norm_cuda(x, first, weight, eps, seats, out, at, stream):
    """out[:, at:at + D] = RMS norm of x[:, first:first + D], D = weight.size."""
    _norm(False, x, first, weight, weight, eps, seats, out, at, stream)


def layer_norm_cuda(x, first, weight, bias, eps, seats, out, at, stream):
    """out[:, at:at + D] = LayerNorm of x[:, first:first + D], D = weight.size."""
    _norm(True, x, first, weight, bias, eps, seats, out, at, stream)


def narrow_cuda(x, first, seats, out, stream):
    """out [n, w] uint16 = BF16 of x[:, first:first + w] float32: what enters a matrix product."""
    n = x.shape[0]
    assert first + out.shape[1] <= x.shape[1] and out.shape[0] == n == seats.size, out.shape
    if n:
        _narrow_kernel[n, THREADS, stream](x, first, seats, out)
