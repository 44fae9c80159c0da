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
The device's kernels, with an order of their own, are in `hyper_cuda`.
Source: config.json hc_mult, hc_sinkhorn_iters, hc_eps, rms_norm_eps; checkpoint
hc_{attn,ffn}_{fn,base,scale}.
"""

import math

import numpy as np
from numba import njit

from engine.host import NJIT
from engine.linear import linear
from engine.model.dense import sigmoid
from engine.model.norm import sum_squares


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
