"""A token's residual is S streams (4): a site reads one mix of them and writes its result into all.

| name | shape | dtype | |
|---|---|---|---|
| **reads** streams | [n, S, D] | float32 | contiguous; modified in place by `hyper_out` |
| hyper.fn | Linear [(2 + S) S, S D] | BF16/F32 | pre (S), post (S), comb (S x S, row-major) |
| hyper.base | [(2 + S) S] | float32 | added to those |
| hyper.scale | [3] | float32 | multiplied with pre, post and comb |
| **writes** x | [n, D] | float32 | input of the site's norm and sublayer |
| post | [n, S] | float32 | how much of the sublayer's result each stream takes, 0..2 |
| comb | [n, S, S] | float32 | comb[j, k]: how much of stream j goes to stream k |

With X the streams and y the sublayer's result, all float32 and nothing rounded to BF16 in between:
  flat = X (mean(X^2) + eps)^-0.5 over all S D elements, no weight;  z = fn flat
  pre = sigmoid(z s0 + b) + hc_eps;  post = 2 sigmoid(z s1 + b)
  comb = softmax over k (z s2 + b) + hc_eps, made doubly stochastic: columns, then hc_iters - 1
  times rows and columns, are divided by their sum + hc_eps
  x = sum_j pre_j X_j;  X'_k = post_k y + sum_j comb[j, k] X_j (the first index is summed).
A model starts from S copies of the embedding and ends with the plain mean of the streams; the final
norm is the caller's.

Order: sums over streams ascend; sums over a row as in `linear` and `norm`. Empty case: no rows
gives no rows. Every rank computes the whole site from the same bytes: no collective.

On the device z comes from `dots` (parts of 512 terms, ascending; the root mean square, found in
the same pass, is applied to z and not to flat), and the norm that follows every site is fused:
hyper_in_cuda writes its result as BF16 and as float32, never x. The site's two halves, mix and
comb, are two blocks that run side by side. Rows with a negative seat are padding, not touched.
Source: config.json hc_mult, hc_sinkhorn_iters, hc_eps, rms_norm_eps; checkpoint
hc_{attn,ffn}_{fn,base,scale}.
"""

import math
from functools import lru_cache

import numpy as np
from numba import float32, int32, int64, njit

from engine.device import (FULL, KERNEL, block_sum, cuda, fma, narrow, rsqrt,
                           sigmoid as sigmoid_device)
from engine.host import NJIT
from engine.linear import linear
from engine.model.dense import sigmoid
from engine.model.dots import dots_cuda
from engine.model.norm import sum_squares

THREADS = 512           # of a row in hyper_in: 8 elements of 4 streams each at hidden 4096
TILE = 256              # elements a block where a row may be cut anywhere


@njit("void(float32[:, ::1], float32, float32[:, ::1])", **NJIT)
def flat_norm_host(x, eps, out):
    """out [n, S D] = each row over its root mean square."""
    width = x.shape[1]
    for i in range(x.shape[0]):
        scale = np.float32(1.0) / math.sqrt(sum_squares(x[i]) / np.float32(width) + eps)
        for j in range(width):
            out[i, j] = x[i, j] * scale


@njit("void(float32[:, ::1], float32)", **NJIT)
def balance_rows(c, eps):
    """Divide each row of c [S, S] by its sum + eps."""
    for j in range(c.shape[0]):
        total = np.float32(0.0)
        for k in range(c.shape[1]):
            total += c[j, k]
        total += eps
        for k in range(c.shape[1]):
            c[j, k] /= total


@njit("void(float32[:, ::1], float32[::1], float32)", **NJIT)
def balance_columns(c, total, eps):
    """Divide each column of c [S, S] by its sum + eps; total [S] is scratch."""
    total[:] = np.float32(0.0)
    for j in range(c.shape[0]):
        for k in range(c.shape[1]):
            total[k] += c[j, k]
    for j in range(c.shape[0]):
        for k in range(c.shape[1]):
            c[j, k] /= total[k] + eps


@njit("void(float32[::1], float32[::1], float32, int64, float32, float32[:, ::1], float32[::1])",
      **NJIT)
def comb_host(z, base, scale, iters, eps, c, total):
    """c [S, S] = the doubly stochastic matrix of z [S S] * scale + base; total [S] is scratch."""
    streams = c.shape[0]
    for j in range(streams):
        top = np.float32(-np.inf)
        for k in range(streams):
            c[j, k] = z[j * streams + k] * scale + base[j * streams + k]
            top = max(top, c[j, k])
        whole = np.float32(0.0)
        for k in range(streams):
            c[j, k] = math.exp(c[j, k] - top)
            whole += c[j, k]
        for k in range(streams):
            c[j, k] = c[j, k] / whole + eps
    balance_columns(c, total, eps)
    for _ in range(iters - 1):
        balance_rows(c, eps)
        balance_columns(c, total, eps)


@njit("void(float32[:, :, ::1], float32[:, ::1], float32[::1], float32[::1], int64, float32,"
      " float32[:, ::1], float32[:, ::1], float32[:, :, ::1])", **NJIT)
def hyper_in_host(streams, z, base, scale, iters, eps, x, post, comb):
    """x [n, D], post [n, S], comb [n, S, S] from streams [n, S, D] and z [n, (2 + S) S]."""
    count = streams.shape[1]
    total = np.empty(count, np.float32)
    for i in range(streams.shape[0]):
        for k in range(count):
            post[i, k] = np.float32(2.0) * sigmoid(z[i, count + k] * scale[1] + base[count + k])
        comb_host(z[i, 2 * count:], base[2 * count:], scale[2], iters, eps, comb[i], total)
        for j in range(count):
            pre = sigmoid(z[i, j] * scale[0] + base[j]) + eps
            if j == 0:
                for d in range(x.shape[1]):
                    x[i, d] = pre * streams[i, j, d]
            else:
                for d in range(x.shape[1]):
                    x[i, d] += pre * streams[i, j, d]


@njit("void(float32[:, :, ::1], float32[:, ::1], float32[:, ::1], float32[:, :, ::1])", **NJIT)
def hyper_out_host(streams, y, post, comb):
    """streams [n, S, D] (modified): stream k becomes post_k y + sum_j comb[j, k] stream j."""
    count, width = streams.shape[1:]
    mixed = np.empty((count, width), np.float32)
    for i in range(streams.shape[0]):
        for k in range(count):
            share = post[i, k]
            for d in range(width):
                mixed[k, d] = share * y[i, d]
            for j in range(count):
                part = comb[i, j, k]
                for d in range(width):
                    mixed[k, d] += part * streams[i, j, d]
        streams[i] = mixed


@njit("void(float32[:, :, ::1], float32[:, ::1])", **NJIT)
def hyper_end_host(streams, out):
    """out [n, D] = mean over the streams, added up in ascending order."""
    count, width = streams.shape[1:]
    for i in range(streams.shape[0]):
        for d in range(width):
            out[i, d] = streams[i, 0, d]
        for j in range(1, count):
            for d in range(width):
                out[i, d] += streams[i, j, d]
        for d in range(width):
            out[i, d] /= np.float32(count)


def hyper_in(streams, hyper, shape):
    """streams [n, S, D] float32 (only read) -> (x [n, D], post [n, S], comb [n, S, S]), float32."""
    n, count, width = streams.shape
    assert hyper.fn.rows == (2 + count) * count, (hyper.fn.rows, count)
    flat = np.empty((n, count * width), np.float32)
    flat_norm_host(streams.reshape(n, count * width), np.float32(shape.eps), flat)
    x = np.empty((n, width), np.float32)
    post = np.empty((n, count), np.float32)
    comb = np.empty((n, count, count), np.float32)
    hyper_in_host(streams, linear(flat, hyper.fn), hyper.base, hyper.scale,
                  shape.hc_iters, np.float32(shape.hc_eps), x, post, comb)
    return x, post, comb


def hyper_out(streams, y, post, comb):
    """Write the sublayer's whole result y [n, D] float32 back: streams [n, S, D] are modified."""
    hyper_out_host(streams, y, post, comb)


def hyper_start(rows, count):
    """Embedding rows [n, D] float32 -> streams [n, count, D] float32, each stream a copy."""
    return np.repeat(rows[:, None, :], count, axis=1)


def hyper_end(streams):
    """streams [n, S, D] float32 -> their unweighted mean [n, D] float32, before the final norm."""
    out = np.empty((streams.shape[0], streams.shape[2]), np.float32)
    hyper_end_host(streams, out)
    return out


# ---- device ------------------------------------------------------------------------------------

@lru_cache(None)
def hyper_in_kernel(count):
    """The kernel for `count` streams."""
    square = count * count
    last = (2 + count) * count                      # where partial holds the sum of squares
    sums = last + 1

    @cuda.jit(**KERNEL)
    def _hyper_in_kernel(streams, partial, base, scale, eps, hc_eps, iters, weight, seats,
                         bf16, wide, post, comb):
        # grid (n, 2): mix and norm, or post and comb; block THREADS, hidden floats of shared memory
        z = cuda.shared.array(sums, float32)
        scratch = cuda.shared.array(32, float32)
        mixed = cuda.shared.array(0, float32)
        row = int64(cuda.blockIdx.x)
        thread = int32(cuda.threadIdx.x)
        width = int32(streams.shape[2])
        if seats[row] < 0:
            return
        # ---- coefficients
        if thread < sums:
            total = float32(0)
            for p in range(partial.shape[1]):
                total += partial[row, p, thread]
            z[thread] = total
        cuda.syncthreads()
        root = rsqrt(z[last] / float32(count * width) + eps)
        if cuda.blockIdx.y == 1:
            # ---- post, and comb: lane j count + k of the first warp holds comb[j, k]
            if thread >= 32:
                return
            if thread < count:
                logit = fma(z[count + thread] * root, scale[1], base[count + thread])
                post[row, thread] = float32(2) * sigmoid_device(logit)
            place = thread % square
            j, k = place // count, place % count
            c = fma(z[2 * count + place] * root, scale[2], base[2 * count + place])
            top = c
            for m in range(count):
                top = max(top, cuda.shfl_sync(FULL, c, j * count + m))
            c = math.exp(c - top)
            total = float32(0)
            for m in range(count):
                total += cuda.shfl_sync(FULL, c, j * count + m)
            c = c / total + hc_eps
            for turn in range(2 * iters - 1):       # columns first, then rows and columns
                total = float32(0)
                for m in range(count):
                    source = m * count + k if turn & 1 == 0 else j * count + m
                    total += cuda.shfl_sync(FULL, c, source)
                c = c / (total + hc_eps)
            if thread < square:
                comb[row, j, k] = c
            return
        # ---- mix
        if thread < count:
            logit = fma(z[thread] * root, scale[0], base[thread])
            z[thread] = sigmoid_device(logit) + hc_eps
        cuda.syncthreads()
        total = float32(0)
        for d in range(thread, width, THREADS):
            value = z[0] * streams[row, 0, d]
            for m in range(1, count):
                value = fma(z[m], streams[row, m, d], value)
            mixed[d] = value
            total = fma(value, value, total)
        # ---- norm
        root = rsqrt(block_sum(total, scratch) / float32(width) + eps)
        for d in range(thread, width, THREADS):
            value = mixed[d] * root * weight[d]
            bf16[row, d] = narrow(value)
            wide[row, d] = value

    return _hyper_in_kernel


@lru_cache(None)
def hyper_out_kernel(count):
    """The kernel for `count` streams."""

    @cuda.jit(**KERNEL)
    def _hyper_out_kernel(streams, y, post, comb, seats):
        # grid (n, tiles of TILE elements), block TILE
        old = cuda.local.array(count, float32)
        row = int64(cuda.blockIdx.x)
        d = int32(cuda.blockIdx.y * TILE + cuda.threadIdx.x)
        if d >= streams.shape[2] or seats[row] < 0:
            return
        whole = y[0, row, d]
        for rank in range(1, y.shape[0]):
            whole += y[rank, row, d]
        for j in range(count):
            old[j] = streams[row, j, d]
        for k in range(count):
            value = post[row, k] * whole
            for j in range(count):
                value = fma(comb[row, j, k], old[j], value)
            streams[row, k, d] = value

    return _hyper_out_kernel


@cuda.jit(**KERNEL)
def _hyper_end_kernel(streams, pick, out):
    # grid (rows of out, tiles of TILE elements), block TILE
    row = int64(pick[cuda.blockIdx.x])
    d = int32(cuda.blockIdx.y * TILE + cuda.threadIdx.x)
    if row < 0 or d >= streams.shape[2]:
        return
    total = streams[row, 0, d]
    for j in range(1, streams.shape[1]):
        total += streams[row, j, d]
    out[cuda.blockIdx.x, d] = total / float32(streams.shape[1])


def hyper_in_cuda(streams, fn, base, scale, shape, weight, seats, partial, bf16, wide, post, comb,
                  stream):
    """bf16 [n, D] uint16 and wide [n, D] float32: RMS norm (weight [D]) of a site's input.

    streams [n, S, D], fn [(2 + S) S, S D] uint16 (BF16) or float32, row-major; post [n, S] and comb
    [n, S, S] for hyper_out_cuda; partial [n, parts(S D), (2 + S) S + 1] float32 is scratch.
    """
    n, count, width = streams.shape
    assert count in (2, 3, 4, 5), count             # comb lies in one warp
    assert fn.shape[0] == (2 + count) * count and weight.size == width, (fn.shape, streams.shape)
    assert bf16.shape == wide.shape == (n, width) and post.shape == (n, count), bf16.shape
    assert comb.shape == (n, count, count) and partial.shape[2] == fn.shape[0] + 1, comb.shape
    dots_cuda(streams.reshape(n, count * width), fn, seats, partial, stream)
    if n:
        hyper_in_kernel(count)[(n, 2), THREADS, stream, 4 * width](
            streams, partial, base, scale, np.float32(shape.eps), np.float32(shape.hc_eps),
            shape.hc_iters, weight, seats, bf16, wide, post, comb)


def hyper_out_cuda(streams, y, post, comb, seats, stream):
    """Write a sublayer's result back into streams [n, S, D] (modified).

    y [W, n, D] float32: every rank's part, added up in rank order here.
    """
    n, count, width = streams.shape
    assert y.shape[1:] == (n, width) and y.shape[0] >= 1 and seats.size == n, (y.shape, n)
    if n:
        hyper_out_kernel(count)[(n, -(-width // TILE)), TILE, stream](
            streams, y, post, comb, seats)


def hyper_end_cuda(streams, pick, out, stream):
    """out [m, D] float32 = mean over the streams of row pick[i]; pick [m] int32, -1 is padding."""
    width = streams.shape[2]
    assert out.shape == (pick.size, width), (out.shape, pick.size)
    if pick.size:
        _hyper_end_kernel[(pick.size, -(-width // TILE)), TILE, stream](streams, pick, out)
