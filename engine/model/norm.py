"""RMS norm and LayerNorm in float32, with one fixed order of sums a row.

A sum of squares runs in 64 lanes (lane j takes elements j, j + 64, ...), then over the lanes
ascending; LayerNorm's mean is a plain ascending sum. Formulas: x * (mean(x^2) + eps)^-0.5 *
weight; (x - mean) * (mean((x - mean)^2) + eps)^-0.5 * weight + bias. Weights come as float32,
checkpoint names *layernorm.weight, *_norm.weight.
"""

import math

import numpy as np
from numba import njit

from engine.host import NJIT

LANES = 64


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
