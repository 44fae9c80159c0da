# python -m pytest tests/model/test_dense.py
"""The gated MLP against its formula in float64, a case worked by hand, and the row law in bytes.

Tolerance: values are of size 1 and the longest float32 chain has 96 terms, whose roundings add up
to about sqrt(96) * 2^-24 = 6e-7 (seen: 7e-7); 1e-5 is asked.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.linear import pack
from engine.model.dense import mlp


def bits(matrix):
    """float32 -> BF16 bits by cutting the low half off."""
    return (np.ascontiguousarray(matrix, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def value(stored):
    """What a stored matrix (BF16 bits or float32) means, in float64."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def matrices(rng, hidden, columns, dtype):
    """gate, up [c, hidden] and down [hidden, c] as stored."""
    shapes = ((columns, hidden), (columns, hidden), (hidden, columns))
    made = [(rng.standard_normal(s) * 0.2).astype(np.float32) for s in shapes]
    return [bits(m) if dtype == "bf16" else m for m in made]


def packed(gate, up, down):
    return SimpleNamespace(gate_up=pack([gate, up]), down=pack([down]))


def reference(x, gate, up, down, limit):
    g = np.minimum(x.astype(np.float64) @ value(gate).T, limit)
    u = np.clip(x.astype(np.float64) @ value(up).T, -limit, limit)
    return (g / (1 + np.exp(-g)) * u) @ value(down).T


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("n, hidden, columns", [(1, 32, 16), (5, 96, 80), (33, 64, 1)])
def test_formula(dtype, n, hidden, columns):
    rng = np.random.default_rng(1)
    weights = matrices(rng, hidden, columns, dtype)
    x = rng.standard_normal((n, hidden)).astype(np.float32)
    y = mlp(x, packed(*weights), 1.0)                   # limit 1: about a third of the values clamp
    assert y.dtype == np.float32 and y.shape == (n, hidden)
    assert np.abs(y - reference(x, *weights, 1.0)).max() < 1e-5


def test_by_hand():
    # gate = 2x, up = 3x, down = y / 2, limit 10.
    # x = 1:  silu(2) * 3 / 2 = 1.7615942 * 1.5 = 2.6423913
    # x = 8:  gate 16 -> 10, up 24 -> 10: silu(10) * 10 / 2 = 9.9995460 * 5 = 49.997730
    # x = -8: gate -16 stays, up -24 -> -10: -16 / (1 + e^16) * -10 / 2 = 1.8005625e-6 * 5 = 9.00e-6
    w = packed(*(np.array([[v]], np.float32) for v in (2.0, 3.0, 0.5)))
    y = mlp(np.array([[1.0], [8.0], [-8.0], [0.0]], np.float32), w, 10.0)
    np.testing.assert_allclose(y[:, 0], [2.6423913, 49.997730, 9.0028e-6, 0.0], rtol=1e-5)


def test_extremes_stay_finite_and_nan_stays_nan():
    w = packed(*(np.array([[v]], np.float32) for v in (1.0, 1.0, 1.0)))
    y = mlp(np.array([[1e30], [-1e30], [-100.0], [np.nan]], np.float32), w, 10.0)[:, 0]
    # 1e30: silu(10) * 10 = 99.99546. -1e30 and -100: the sigmoid is 0 to float32, so 0 * -10 = 0.
    np.testing.assert_allclose(y[:3], [99.99546, 0.0, 0.0], rtol=1e-6, atol=1e-30)
    assert np.isnan(y[3])


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_row_law(dtype):
    rng = np.random.default_rng(2)
    w = packed(*matrices(rng, 96, 72, dtype))
    x = rng.standard_normal((64, 96)).astype(np.float32)
    whole = mlp(x, w, 10.0)
    for i in range(64):
        assert mlp(x[i:i + 1], w, 10.0).tobytes() == whole[i].tobytes()
    assert mlp(x[20:27], w, 10.0).tobytes() == whole[20:27].tobytes()


def test_columns_over_ranks_add_up():
    rng = np.random.default_rng(3)
    gate, up, down = matrices(rng, 64, 40, "bf16")
    x = rng.standard_normal((3, 64)).astype(np.float32)
    parts = [mlp(x, packed(gate[a:b], up[a:b], np.ascontiguousarray(down[:, a:b])), 10.0)
             for a, b in ((0, 24), (24, 24), (24, 40))]
    assert not parts[1].any() and parts[1].shape == (3, 64)     # a rank without columns
    assert np.abs(sum(parts) - reference(x, gate, up, down, 10.0)).max() < 1e-5


def test_no_rows():
    w = packed(*matrices(np.random.default_rng(4), 32, 8, "bf16"))
    assert mlp(np.zeros((0, 32), np.float32), w, 10.0).shape == (0, 32)
