# python -m pytest tests/model/test_norm.py
"""Norms against their formulas in float64, the order of their sums, and the row law in bytes.

Tolerance: outputs are of size up to 7. A row's sum is K / 64 terms a lane and then 64 lanes, whose
roundings stay below 1e-6 of the sum; the root halves it, and three more products round. LayerNorm
subtracts a mean summed over up to 4,096 terms one after the other. 5e-6 is asked of both (seen:
1e-6); an eps that is left out or stands outside the root changes the small rows by over 1e-2.
"""

import numpy as np
import pytest

from engine.model.norm import layer_norm, rms_norm, sum_squares

CLOSE = 5e-6
WIDTHS = [1, 3, 63, 64, 65, 128, 512, 1000, 1536, 4096]


def rows(rng, n, width):
    """Rows of very different sizes: the last ones are so small that eps decides."""
    size = 10.0 ** np.linspace(2, -3, n)[:, None] if n else np.ones((0, 1))
    return (rng.standard_normal((n, width)) * size).astype(np.float32)


def vector(rng, width):
    return rng.uniform(0.5, 1.5, width).astype(np.float32)


def rms_reference(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * weight


def layer_reference(x, weight, bias, eps):
    x = x.astype(np.float64)
    x = x - x.mean(1, keepdims=True)
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * weight + bias


def test_rms_by_hand():
    # mean of squares (9 + 16) / 2 = 12.5, with eps 3.5 it is 16: divide by 4
    x = np.array([[3, 4], [0, 0]], np.float32)
    out = rms_norm(x, np.array([2, 1], np.float32), 3.5)
    assert out.tolist() == [[1.5, 1.0], [0, 0]]


def test_layer_by_hand():
    # mean 3, deviations -2 and 2, their mean square 4, with eps 12 it is 16: divide by 4
    x = np.array([[1, 5], [7, 7]], np.float32)
    out = layer_norm(x, np.array([2, 1], np.float32), np.array([10, 20], np.float32), 12.0)
    assert out.tolist() == [[9.0, 20.5], [10, 20]]      # a constant row leaves the bias


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_reference(width, eps):
    rng = np.random.default_rng(width)
    x, weight = rows(rng, 6, width), vector(rng, width)
    out = rms_norm(x, weight, eps)
    assert out.shape == x.shape and out.dtype == np.float32
    assert np.abs(out - rms_reference(x, weight, eps)).max() < CLOSE


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_layer_reference(width, eps):
    rng = np.random.default_rng(width)
    x, weight, bias = rows(rng, 6, width), vector(rng, width), vector(rng, width)
    out = layer_norm(x, weight, bias, eps)
    assert out.shape == x.shape and out.dtype == np.float32
    assert np.abs(out - layer_reference(x, weight, bias, eps)).max() < CLOSE


@pytest.mark.parametrize("width", [0, *WIDTHS])
def test_sum_squares_by_lanes(width):
    # lane j takes elements j, j + 64, ..., then the lanes ascending
    row = rows(np.random.default_rng(width), 1, width)[0]
    lane = np.zeros(64, np.float32)
    for start in range(0, width, 64):
        part = row[start:start + 64]
        lane[:len(part)] += part * part
    want = np.float32(0)
    for value in lane:
        want += value
    assert np.float32(sum_squares(row)).tobytes() == want.tobytes()


@pytest.mark.parametrize("width", [3, 100, 512, 4096])
def test_row_law(width):
    rng = np.random.default_rng(width)
    x, weight, bias = rows(rng, 40, width), vector(rng, width), vector(rng, width)
    rms, layer = rms_norm(x, weight, 1e-5), layer_norm(x, weight, bias, 1e-6)
    for size in (1, 7):
        for start in range(0, 40, size):
            part = np.ascontiguousarray(x[start:start + size])
            assert rms_norm(part, weight, 1e-5).tobytes() == rms[start:start + size].tobytes()
            part = layer_norm(part, weight, bias, 1e-6)
            assert part.tobytes() == layer[start:start + size].tobytes()


def test_a_nan_stays_in_its_row():
    x = np.ones((3, 70), np.float32)
    x[1, 66] = np.nan
    one, zero = np.ones(70, np.float32), np.zeros(70, np.float32)
    for out in (rms_norm(x, one, 1e-5), layer_norm(x, one, zero, 1e-6)):
        assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def test_no_rows():
    x, w = np.empty((0, 70), np.float32), np.ones(70, np.float32)
    assert rms_norm(x, w, 1e-5).shape == layer_norm(x, w, w, 1e-6).shape == (0, 70)
