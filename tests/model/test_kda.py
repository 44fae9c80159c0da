# python -m pytest tests/model/test_kda.py
"""KDA against its recurrence in float64, two rows worked by hand, and chunk invariance in bytes.

Tolerance: values are of size 1 and the longest float32 chain has 128 terms, whose roundings add
up to about sqrt(128) * 2^-24 = 7e-7; seen are 8e-7 for what the conversation keeps, asked 5e-6.
The norm on o divides by a size down to 0.1 and so enlarges it ten times: seen 3e-6 for y, asked
2e-5.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.linear import pack
from engine.model.kda import kda

CLOSE_Y, CLOSE_STATE = 2e-5, 5e-6


def bits(matrix):
    """float32 -> BF16 bits by cutting the low half off."""
    return (np.ascontiguousarray(matrix, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def value(stored):
    """What a stored matrix (BF16 bits or float32) means, in float64."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def random_model(rng, hidden, heads, dim, taps=4, bf16=True):
    def made(rows, columns):
        matrix = (rng.standard_normal((rows, columns)) * columns ** -0.5).astype(np.float32)
        return bits(matrix) if bf16 else matrix
    wide = heads * dim
    return SimpleNamespace(
        heads=heads, dim=dim, q=made(wide, hidden), k=made(wide, hidden), v=made(wide, hidden),
        f_a=made(dim, hidden), g_a=made(dim, hidden), b=made(heads, hidden),
        conv=rng.standard_normal((3, wide, taps)).astype(np.float32) * 0.5,
        f_b=made(wide, dim), g_b=made(wide, dim), out=made(hidden, wide),
        decay=np.exp(rng.uniform(-1, 1, heads)).astype(np.float32),
        dt_bias=rng.standard_normal(wide).astype(np.float32),
        o_norm=(1 + 0.1 * rng.standard_normal(dim)).astype(np.float32))


def packed(m, first=0, last=None):
    """The model as a rank that owns heads first..last holds it."""
    last = m.heads if last is None else last
    own = slice(first * m.dim, last * m.dim)
    return SimpleNamespace(
        inp=pack([m.q[own], m.k[own], m.v[own], m.f_a, m.g_a, m.b[first:last]]),
        conv=np.ascontiguousarray(m.conv[:, own].reshape(-1, m.conv.shape[2])),
        f_b=pack([m.f_b[own]]), g_b=pack([m.g_b[own]]), decay=m.decay[first:last],
        dt_bias=m.dt_bias[own], o_norm=m.o_norm, out=pack([np.ascontiguousarray(m.out[:, own])]))


def shape(m, bound=-5.0, eps=1e-5):
    return SimpleNamespace(kda_dim=m.dim, gate_bound=bound, eps=eps)


def empty(m, seats, heads=None):
    """States of new conversations: (state, conv), zeros."""
    heads = m.heads if heads is None else heads
    return (np.zeros((seats, heads, m.dim, m.dim), np.float32),
            np.zeros((seats, m.conv.shape[2] - 1, 3 * heads * m.dim), np.float32))


def sigmoid(x):
    return np.where(x >= 0, 1, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x)))


def reference(x, m, bound=-5.0, eps=1e-5):
    """One conversation in float64: (y [n, hidden], S [heads, D, D], last rows of q | k | v)."""
    x = x.astype(np.float64)
    n, taps = len(x), m.conv.shape[2]
    start = np.zeros((taps - 1, m.heads * m.dim))
    before = [np.concatenate([start, x @ value(w).T]) for w in (m.q, m.k, m.v)]
    after = []
    for stream, weight in zip(before, m.conv.astype(np.float64)):
        mixed = sum(stream[t:t + n] * weight[:, t] for t in range(taps))
        after.append((mixed * sigmoid(mixed)).reshape(n, m.heads, m.dim))
    q, k, v = after
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * m.dim ** -0.5
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    f = (x @ value(m.f_a).T @ value(m.f_b).T + m.dt_bias).reshape(n, m.heads, m.dim)
    g = bound * sigmoid(m.decay[:, None].astype(np.float64) * f)
    beta = sigmoid(x @ value(m.b).T)
    gate = sigmoid(x @ value(m.g_a).T @ value(m.g_b).T)
    S = np.zeros((m.heads, m.dim, m.dim))
    out = np.empty((n, m.heads, m.dim))
    for i in range(n):
        for h in range(m.heads):
            S[h] = np.diag(np.exp(g[i, h])) @ S[h]
            S[h] += np.outer(k[i, h], beta[i, h] * (v[i, h] - S[h].T @ k[i, h]))
            o = S[h].T @ q[i, h]
            out[i, h] = o / np.sqrt((o * o).mean() + eps) * m.o_norm
    y = (out.reshape(n, -1) * gate) @ value(m.out).T
    return y, S, np.concatenate([b[n:] for b in before], axis=1)


def check(x, m, state, conv, y):
    """All three results of a conversation at seat 0 against the reference."""
    want_y, want_state, want_conv = reference(x, m)
    np.testing.assert_allclose(y, want_y, rtol=0, atol=CLOSE_Y)
    np.testing.assert_allclose(state[0], want_state, rtol=0, atol=CLOSE_STATE)
    np.testing.assert_allclose(conv[0], want_conv, rtol=0, atol=CLOSE_STATE)


@pytest.mark.parametrize("n, hidden, heads, dim, taps, bf16", [
    (1, 32, 3, 16, 4, True), (2, 32, 3, 16, 4, True), (50, 64, 2, 32, 4, True),
    (50, 64, 2, 32, 4, False), (20, 48, 1, 128, 4, True), (12, 16, 2, 6, 3, True),
    (6, 16, 1, 8, 1, False)])
def test_recurrence(n, hidden, heads, dim, taps, bf16):
    rng = np.random.default_rng(1)
    m = random_model(rng, hidden, heads, dim, taps, bf16)
    x = rng.standard_normal((n, hidden)).astype(np.float32)
    state, conv = empty(m, 1)
    y = kda(x, packed(m), shape(m), state, conv, np.zeros(n, np.int32))
    assert y.dtype == np.float32 and y.shape == (n, hidden)
    check(x, m, state, conv, y)


def test_by_hand():
    # One head of one channel, hidden 1, x = 1, 1: q = k = 1, v = 2, b = f = g = 0; taps (1/2, 1).
    # Row 1: no history. q, k at unit length = 1, v = silu(2) = 1.7615942, beta = 1/2, S = 0 before:
    #   S = 1/2 * 1.7615942 = 0.8807971
    # Row 2: q, k = 1.5 before silu, again 1 at unit length; v = silu(2/2 + 2) = 2.8577224;
    #   e^g = e^(-5/2) = 0.0820850: S = 0.0723002, then S += (2.8577224 - 0.0723002) / 2 = 1.4650113
    # o = S over its own size = 1, times o_norm 4, sigmoid(0) = 1/2, o_proj 3: y = 6 both times.
    one = np.ones((1, 1), np.float32)
    m = SimpleNamespace(
        heads=1, dim=1, q=one, k=one, v=2 * one, f_a=0 * one, g_a=0 * one, b=0 * one,
        conv=np.tile(np.array([0.5, 1], np.float32), (3, 1, 1)), f_b=one, g_b=one, out=3 * one,
        decay=one[0], dt_bias=0 * one[0], o_norm=4 * one[0])
    state, conv = empty(m, 1)
    w, seats = packed(m), np.zeros(1, np.int32)
    y = kda(one, w, shape(m), state, conv, seats)
    np.testing.assert_allclose(state.item(), 0.8807971, rtol=3e-6)
    np.testing.assert_array_equal(conv[0, 0], [1, 1, 2])        # before the convolution, q | k | v
    np.testing.assert_allclose(y, 6, rtol=1e-4)                 # eps 1e-5 beside o^2 = 0.78
    y = kda(one, w, shape(m), state, conv, seats)
    np.testing.assert_allclose(state.item(), 1.4650113, rtol=3e-6)
    np.testing.assert_allclose(y, 6, rtol=1e-4)


def test_state_axes_by_hand():
    # One row into an empty state: S[c, d] = beta k_c v_d. k = (3, 4) / 5 at unit length (k and v
    # are large enough for silu to be the identity), v = (30, 50), beta = 1/2: S = (9, 15 | 12, 20).
    column = np.array([[30], [40]], np.float32)
    zero = 0 * column
    square = np.eye(2, dtype=np.float32)
    m = SimpleNamespace(
        heads=1, dim=2, q=column, k=column, v=np.array([[30], [50]], np.float32), f_a=zero,
        g_a=zero, b=zero[:1], conv=np.ones((3, 2, 1), np.float32), f_b=square, g_b=square,
        out=square[:1], decay=np.ones(1, np.float32), dt_bias=zero[:, 0],
        o_norm=np.ones(2, np.float32))
    state, conv = empty(m, 1)
    kda(np.ones((1, 1), np.float32), packed(m), shape(m), state, conv, np.zeros(1, np.int32))
    np.testing.assert_allclose(state[0, 0], [[9, 15], [12, 20]], rtol=1e-6)


@pytest.mark.parametrize("bias, g", [(1e3, -5.0), (-1e3, 0.0)])
def test_decay_at_its_bounds(bias, g):
    """Every channel keeps e^-5 a row, or all, for 200 rows: finite and as the recurrence says."""
    rng = np.random.default_rng(2)
    m = random_model(rng, 32, 2, 16)
    m.dt_bias[:] = bias
    x = rng.standard_normal((200, 32)).astype(np.float32)
    state, conv = empty(m, 1)
    y = kda(x, packed(m), shape(m), state, conv, np.zeros(200, np.int32))
    check(x, m, state, conv, y)
    # A row of zeros adds nothing: the state only decays.
    before = state.copy()
    m.b[:] = 0
    zeros = np.zeros((4, 32), np.float32)
    kda(zeros, packed(m), shape(m), state, np.zeros_like(conv), np.zeros(4, np.int32))
    np.testing.assert_allclose(state, before * np.exp(4 * g), rtol=1e-5)


def test_large_small_and_zero_rows():
    rng = np.random.default_rng(3)
    m = random_model(rng, 32, 2, 16)
    for size in (1e4, 1e-3):                # at 1e-3 the 1e-6 under the root outweighs the sum
        x = (rng.standard_normal((12, 32)) * size).astype(np.float32)
        state, conv = empty(m, 1)
        y = kda(x, packed(m), shape(m, eps=1e-12), state, conv, np.zeros(12, np.int32))
        want, want_state, _ = reference(x, m, eps=1e-12)
        assert np.isfinite(y).all()
        assert np.abs(state[0] - want_state).max() < 1e-5 * np.abs(want_state).max()
        assert np.abs(y - want).max() < CLOSE_Y
    state, conv = empty(m, 1)
    zeros = np.zeros((3, 32), np.float32)
    y = kda(zeros, packed(m), shape(m), state, conv, np.zeros(3, np.int32))
    assert not y.any() and not state.any() and not conv.any()


def test_any_cut_into_calls_gives_the_same_bytes():
    """Three conversations, a call each, then cut at random and sharing calls: all results equal."""
    rng = np.random.default_rng(4)
    m = random_model(rng, 64, 3, 32)
    w = packed(m)
    rows = {seat: rng.standard_normal((n, 64)).astype(np.float32)
            for seat, n in ((2, 70), (0, 41), (3, 9))}
    alone, alone_conv = empty(m, 5)
    whole = {seat: kda(x, w, shape(m), alone, alone_conv, np.full(len(x), seat, np.int32))
             for seat, x in rows.items()}
    for most in (1, 7, 64):
        state, conv = empty(m, 5)
        state[1] = conv[1] = np.nan         # a seat nobody names: neither read nor written
        done = dict.fromkeys(rows, 0)
        got = {seat: [] for seat in rows}
        while any(done[s] < len(rows[s]) for s in rows):
            cut = {s: min(int(rng.integers(0, most + 1)), len(rows[s]) - done[s])
                   for s in rng.permutation(list(rows))}
            x = np.concatenate([rows[s][done[s]:done[s] + n] for s, n in cut.items()])
            seats = np.concatenate([np.full(n, s, np.int32) for s, n in cut.items()])
            y = kda(x, w, shape(m), state, conv, seats)
            for s, n in cut.items():
                got[s].append(y[seats == s])
                done[s] += n
        for s in rows:
            assert np.concatenate(got[s]).tobytes() == whole[s].tobytes()
            assert state[s].tobytes() == alone[s].tobytes()
            assert conv[s].tobytes() == alone_conv[s].tobytes()
        assert np.isnan(state[1]).all() and np.isnan(conv[1]).all()
        assert not state[4].any() and not conv[4].any()


def test_heads_over_ranks():
    """Ranks of 2, 0 and 1 heads: states are slices of the whole's bytes, parts add up to y."""
    rng = np.random.default_rng(5)
    m = random_model(rng, 32, 3, 16)
    x = rng.standard_normal((20, 32)).astype(np.float32)
    seats = np.zeros(20, np.int32)
    state, conv = empty(m, 1)
    kda(x, packed(m), shape(m), state, conv, seats)
    total = 0
    for first, last in ((0, 2), (2, 2), (2, 3)):
        own, own_conv = empty(m, 1, last - first)
        part = kda(x, packed(m, first, last), shape(m), own, own_conv, seats)
        assert own.tobytes() == np.ascontiguousarray(state[:, first:last]).tobytes()
        assert part.shape == (20, 32) and (last > first or not part.any())
        total = total + part
    assert np.abs(total - reference(x, m)[0]).max() < CLOSE_Y


def test_no_rows():
    m = random_model(np.random.default_rng(6), 32, 2, 16)
    state, conv = empty(m, 1)
    none = np.zeros((0, 32), np.float32)
    y = kda(none, packed(m), shape(m), state, conv, np.zeros(0, np.int32))
    assert y.shape == (0, 32) and not state.any()
