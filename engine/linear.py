"""Matrix products whose bits do not depend on how many rows are multiplied at once.

Every output is one float32 sum over k ascending from 0.0, a multiply and then an add a term, for
1 row or 2,048: this is the row law (BLAS picks other orders for other sizes). To make that order
fast a weight is held in blocks of 64 outputs, column first, so the inner loop runs over 64
independent sums; BF16 weights stay BF16 and are widened in registers.

| name | shape | dtype | |
|---|---|---|---|
| Linear.w | [ceil(N/64), K, 64] | BF16 bits or float32 | w[b, k, j] = W[64 b + j, k], 0 past N |
| Group.w | [G, ceil(N/64), K, 64] | the same | G matrices of one shape (attention heads, experts) |
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.host import LANES as BLOCK, NJIT, from_bf16, product, product4


class Linear(NamedTuple):
    w: np.ndarray
    rows: int


class Group(NamedTuple):
    w: np.ndarray
    rows: int


def _blocked(matrix, out):
    n, k = matrix.shape
    for b in range(out.shape[0]):
        part = matrix[b * BLOCK:(b + 1) * BLOCK]
        out[b, :, :part.shape[0]] = part.T


def pack(matrices):
    """Stack [Ni, K] matrices (BF16 bits or float32) along outputs and block them.

    One float32 matrix among them widens all.
    """
    if len({m.dtype for m in matrices}) > 1:
        matrices = [m if m.dtype == np.float32 else from_bf16(m) for m in matrices]
    whole = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
    n, k = whole.shape
    w = np.zeros((-(-n // BLOCK), k, BLOCK), whole.dtype)
    _blocked(whole, w)
    return Linear(w, n)


def pack_group(matrices, shape=None, dtype=np.uint16):
    """Block each of G [N, K] matrices; with G = 0, shape (N, K) and dtype stand for them."""
    if matrices:
        shape = matrices[0].shape
        mixed = len({m.dtype for m in matrices}) > 1
        dtype = np.float32 if mixed else matrices[0].dtype
        matrices = [from_bf16(m) if mixed and m.dtype == np.uint16 else m for m in matrices]
    n, k = shape
    w = np.zeros((len(matrices), -(-n // BLOCK), k, BLOCK), dtype)
    for g, matrix in enumerate(matrices):
        _blocked(matrix, w[g])
    return Group(w, n)


@njit(["void(float32[:, ::1], uint16[:, :, ::1], float32[:, ::1])",
       "void(float32[:, ::1], float32[:, :, ::1], float32[:, ::1])"], **NJIT)
def matvec_rows(x, w, out):
    """out [n, N] = x [n, K] times the blocked w [ceil(N/64), K, 64], in the module's order."""
    acc = np.empty((4, BLOCK), np.float32)
    fours = x.shape[0] & ~3
    for b in range(w.shape[0]):
        first = b * BLOCK
        count = min(BLOCK, out.shape[1] - first)
        for i in range(0, fours, 4):
            product4(x, i, w[b], acc)
            for r in range(4):
                for j in range(count):
                    out[i + r, first + j] = acc[r, j]
        for i in range(fours, x.shape[0]):
            product(x[i], w[b], acc[0])
            for j in range(count):
                out[i, first + j] = acc[0, j]


@njit(["void(float32[:, :, ::1], uint16[:, :, :, ::1], float32[:, :, ::1])",
       "void(float32[:, :, ::1], float32[:, :, :, ::1], float32[:, :, ::1])"], **NJIT)
def matvec_groups(x, w, out):
    """out [n, G, N] = x [n, G, K] times w[g] for each g, in the same order of sums."""
    acc = np.empty(BLOCK, np.float32)
    for g in range(w.shape[0]):
        for b in range(w.shape[1]):
            first = b * BLOCK
            count = min(BLOCK, out.shape[2] - first)
            for i in range(x.shape[0]):
                product(x[i, g], w[g, b], acc)
                for j in range(count):
                    out[i, g, first + j] = acc[j]


def linear(x, weight):
    """x [n, K] float32, contiguous -> [n, N] float32."""
    out = np.empty((x.shape[0], weight.rows), np.float32)
    matvec_rows(x, weight.w, out)
    return out


def linear_group(x, group):
    """x [n, G, K] float32, contiguous -> [n, G, N] float32, matrix g applied to x[:, g]."""
    out = np.empty((x.shape[0], x.shape[1], group.rows), np.float32)
    matvec_groups(x, group.w, out)
    return out
