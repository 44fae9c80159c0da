# python -m pytest tests/model/test_moe.py
"""Routing and experts against their formulas in float64, choices by hand, and the row law in bytes.

Tolerance: values are of size 1 to 3 and the longest float32 chain has 96 terms, whose roundings
add up to about sqrt(96) * 2^-24 * 3 = 2e-6 (seen: 1e-6); 1e-5 is asked. Choices are compared
exactly, on data whose k-th and next score differ by more than 1e-5 (asserted).
"""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.linear import Linear, pack, pack_group
from engine.model.dense import mlp
from engine.model.moe import moe, route

CLOSE = 1e-5


def shape(k, scaling=2.5, limit=1.0):
    return SimpleNamespace(experts_per_token=k, routed_scaling=scaling, swiglu_limit=limit)


def bits(matrix):
    """float32 -> BF16 bits by cutting the low half off."""
    return (np.ascontiguousarray(matrix, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def value(stored):
    """What a stored matrix (BF16 bits or float32) means, in float64."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def random_model(rng, hidden, columns, experts, gate_up="bf16", down="bf16"):
    """Stored matrices: router, bias, (gate, up, down) an expert, the shared expert's three."""
    def made(dtype, *size):
        matrix = (rng.standard_normal(size) * 0.2).astype(np.float32)
        return bits(matrix) if dtype == "bf16" else matrix

    def expert():
        gate, up = made(gate_up, columns, hidden), made(gate_up, columns, hidden)
        return gate, up, made(down, hidden, columns)
    return SimpleNamespace(
        router=made("bf16", experts, hidden),
        bias=(rng.standard_normal(experts) * 0.1).astype(np.float32),
        experts=[expert() for _ in range(experts)], shared=expert())


def packed(model, own=slice(None), own_shared=slice(None)):
    """The model as one rank holds it: own columns of every expert and of the shared expert."""
    gate, up, down = model.shared
    return SimpleNamespace(
        router=pack([model.router]), bias=model.bias,
        gate_up=pack_group([np.concatenate([g[own], u[own]]) for g, u, _ in model.experts]),
        down=pack_group([np.ascontiguousarray(d[:, own]) for _, _, d in model.experts]),
        shared=SimpleNamespace(gate_up=pack([gate[own_shared], up[own_shared]]),
                               down=pack([np.ascontiguousarray(down[:, own_shared])])))


def gated(x, gate, up, down, limit):
    g = np.minimum(value(gate) @ x, limit)
    u = np.clip(value(up) @ x, -limit, limit)
    with np.errstate(over="ignore"):
        return value(down) @ (g / (1 + np.exp(-g)) * u)


def reference(x, model, numbers):
    """One row in float64: (chosen ascending, their weights, y, k-th score minus the next)."""
    x = x.astype(np.float64)
    k = numbers.experts_per_token
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-(value(model.router) @ x)))
    key = s + model.bias
    order = np.argsort(-key, kind="stable")
    chosen = np.sort(order[:k])
    margin = key[order[k - 1]] - key[order[k]] if k < len(key) else np.inf
    weights = s[chosen] / (s[chosen].sum() + 1e-20) * numbers.routed_scaling
    limit = numbers.swiglu_limit
    y = sum(w * gated(x, *model.experts[e], limit) for e, w in zip(chosen, weights))
    return chosen, weights, y + gated(x, *model.shared, limit), margin


@pytest.mark.parametrize("gate_up", ["bf16", "f32"])
@pytest.mark.parametrize("down", ["bf16", "f32"])
@pytest.mark.parametrize("n, hidden, columns, experts, k",
                         [(1, 32, 16, 12, 4), (23, 96, 40, 10, 3), (9, 48, 8, 288, 8),
                          (4, 16, 4, 3, 3)])
def test_formulas(n, hidden, columns, experts, k, gate_up, down):
    rng = np.random.default_rng(1)
    model = random_model(rng, hidden, columns, experts, gate_up, down)
    x = rng.standard_normal((n, hidden)).astype(np.float32)
    w = packed(model)
    chosen, weights = route(x, w, shape(k))
    y = moe(x, w, shape(k))
    assert y.dtype == np.float32 and y.shape == (n, hidden)
    for i in range(n):
        want_chosen, want_weights, want, margin = reference(x[i], model, shape(k))
        assert margin > 1e-5
        np.testing.assert_array_equal(chosen[i], want_chosen)
        assert np.abs(weights[i] - want_weights).max() < 1e-5
        assert np.abs(y[i] - want).max() < CLOSE


def routed(logits, bias, k, scaling=2.5):
    """Choice and weights for given logits: hidden 1, x = 1, the logits as router rows."""
    w = SimpleNamespace(router=pack([np.array(logits, np.float32)[:, None]]),
                        bias=np.array(bias, np.float32))
    chosen, weights = route(np.ones((1, 1), np.float32), w, shape(k, scaling))
    return chosen[0].tolist(), weights[0]


def test_choice_by_hand():
    # s = 1/2, 3/4, 3/4, 1/4; with bias: 0.5, 0.75, 0.75, 0.65. Two best: 1 and 2, 2.5 * 1/2 each.
    # Three best: expert 3 for its bias, but weighted by its own 1/4: 2.5 * (3, 3, 1) / 7.
    ln3 = np.log(3.0)
    chosen, weights = routed([0, ln3, ln3, -ln3], [0, 0, 0, 0.4], 2)
    assert chosen == [1, 2]
    np.testing.assert_allclose(weights, [1.25, 1.25], rtol=1e-6)
    chosen, weights = routed([0, ln3, ln3, -ln3], [0, 0, 0, 0.4], 3)
    assert chosen == [1, 2, 3]
    np.testing.assert_allclose(weights, [7.5 / 7, 7.5 / 7, 2.5 / 7], rtol=1e-6)


def test_ties_go_to_the_lower_expert():
    # s = 1/2 exactly for all; scores 0.5, 0.75, 0.75, 0.5, 0.75.
    bias = [0, 0.25, 0.25, 0, 0.25]
    assert [routed([0] * 5, bias, k)[0] for k in (1, 2, 4)] == [[1], [1, 2], [0, 1, 2, 4]]
    assert routed([0] * 5, [-3.0] * 5, 2)[0] == [0, 1]          # scores below zero are scores too
    assert routed([0] * 5, [-np.inf] * 5, 2)[0] == [0, 1]


def test_scores_that_vanish():
    # sigmoid(-200) is 0 in float32: weights 0 / 1e-20 = 0, not NaN. sigmoid(-60) = 8.7565108e-27 is
    # far under the 1e-20 beside the sum: 8.7565108e-27 / 1e-20 * 2.5 = 2.18912e-6.
    assert routed([-200] * 3, [0] * 3, 2)[1].tolist() == [0, 0]
    np.testing.assert_allclose(routed([-60] * 3, [0] * 3, 2)[1], [2.18912e-6] * 2, rtol=1e-5)
    np.testing.assert_allclose(routed([200] * 3, [0] * 3, 2)[1], [1.25, 1.25], rtol=1e-6)


def test_nan_is_chosen_and_reaches_the_output():
    assert routed([5, np.nan, 4, 3], [0] * 4, 2)[0] == [0, 1]
    assert routed([3, 5, 4, np.nan], [0] * 4, 2)[0] == [1, 3]
    assert routed([np.nan] * 4, [0] * 4, 2)[0] == [0, 1]
    rng = np.random.default_rng(2)
    w = packed(random_model(rng, 16, 8, 6))
    x = rng.standard_normal((3, 16)).astype(np.float32)
    clean = moe(x, w, shape(2))
    x[1, 3] = np.nan
    y = moe(x, w, shape(2))
    assert np.isnan(y[1]).all()
    assert y[0].tobytes() == clean[0].tobytes() and y[2].tobytes() == clean[2].tobytes()


@pytest.mark.parametrize("gate_up, down", [("bf16", "bf16"), ("f32", "f32")])
def test_row_law(gate_up, down):
    rng = np.random.default_rng(3)
    w = packed(random_model(rng, 64, 24, 12, gate_up, down))
    x = rng.standard_normal((64, 64)).astype(np.float32)
    whole = moe(x, w, shape(4))
    for cut in [slice(i, i + 1) for i in range(64)] + [slice(30, 37), slice(0, 33)]:
        assert moe(x[cut], w, shape(4)).tobytes() == whole[cut].tobytes()
    turned = np.ascontiguousarray(x[::-1])
    assert moe(turned, w, shape(4))[::-1].tobytes() == whole.tobytes()


def test_order_of_the_sum():
    """Experts are added ascending from zero in float32, the shared expert last."""
    rng = np.random.default_rng(4)
    w = packed(random_model(rng, 32, 16, 8))
    x = rng.standard_normal((10, 32)).astype(np.float32)
    chosen, weights = route(x, w, shape(4))
    assert (np.diff(chosen, axis=1) > 0).all()
    y = moe(x, w, shape(4))
    for i in range(10):
        row = x[i:i + 1]
        total = np.zeros((1, 32), np.float32)
        for e, weight in zip(chosen[i], weights[i]):
            expert = SimpleNamespace(gate_up=Linear(w.gate_up.w[e], 32),
                                     down=Linear(w.down.w[e], 32))
            total = total + weight * mlp(row, expert, 1.0)
        assert (total + mlp(row, w.shared, 1.0)).tobytes() == y[i].tobytes()


def test_clamps_of_large_inputs():
    """Gates beyond the limit, rows of 1e4 and a row of zeros, against the formulas."""
    rng = np.random.default_rng(5)
    model = random_model(rng, 32, 16, 6)
    x = (rng.standard_normal((3, 32)) * np.array([[1e4], [30], [0]])).astype(np.float32)
    y = moe(x, packed(model), shape(2, limit=10.0))
    for i in range(2):
        _, _, want, margin = reference(x[i], model, shape(2, limit=10.0))
        assert margin > 1e-5                            # at 1e4 sigmoids are 0 or 1: bias decides
        assert np.abs(y[i] - want).max() < 100 * CLOSE  # activations reach 10 * 10
    assert not y[2].any()


def test_columns_over_ranks_add_up():
    rng = np.random.default_rng(6)
    model = random_model(rng, 32, 24, 6)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    cuts = [(slice(0, 16), slice(0, 0)), (slice(16, 16), slice(0, 20)),
            (slice(16, 24), slice(20, 24)), (slice(24, 24), slice(24, 24))]
    parts = [moe(x, packed(model, *cut), shape(2)) for cut in cuts]
    assert not parts[3].any() and parts[3].shape == (5, 32)     # a rank without columns
    for i in range(5):
        want = reference(x[i], model, shape(2))[2]
        assert np.abs(sum(p[i] for p in parts) - want).max() < CLOSE


def test_no_rows():
    w = packed(random_model(np.random.default_rng(7), 16, 8, 6))
    empty = np.zeros((0, 16), np.float32)
    assert moe(empty, w, shape(2)).shape == (0, 16)
    assert route(empty, w, shape(2))[0].shape == (0, 2)
