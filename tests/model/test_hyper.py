# python -m pytest tests/model/test_hyper.py
"""Stream mixing against its formulas in float64, a case worked by hand, and the row law in bytes.

Tolerance: values are of size 1 and the longest float32 chain has 256 terms, whose roundings add
up to about sqrt(256) * 2^-24 = 1e-6 (seen: 4e-7). Sigmoids and Sinkhorn steps do not enlarge
that: 5e-6 is asked, well under what an eps in another place changes.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.linear import pack
from engine.model.hyper import hyper_end, hyper_in, hyper_out, hyper_start

CLOSE = 5e-6


def shape(iters=20, hc_eps=1e-6, eps=1e-5):
    return SimpleNamespace(hc_iters=iters, hc_eps=hc_eps, eps=eps)


def site(rng, streams, width, bf16=False):
    """Random weights of a site: (fn, base, scale) as the float64 values they mean, and packed."""
    rows = (2 + streams) * streams
    fn = (rng.standard_normal((rows, streams * width)) * 0.1).astype(np.float32)
    if bf16:
        fn = (fn.view(np.uint32) & 0xFFFF0000).view(np.float32)
    base = rng.standard_normal(rows).astype(np.float32)
    scale = rng.uniform(0.5, 1.5, 3).astype(np.float32)
    stored = (fn.view(np.uint32) >> 16).astype(np.uint16) if bf16 else fn
    packed = SimpleNamespace(fn=pack([stored]), base=base, scale=scale)
    return (fn.astype(np.float64), base.astype(np.float64), scale.astype(np.float64)), packed


def reference_in(streams, weights, numbers):
    """(x, post, comb) of one row's streams [S, D], float64."""
    fn, base, scale = weights
    streams = streams.astype(np.float64)
    s = len(streams)
    flat = streams.reshape(-1)
    flat = flat / np.sqrt((flat * flat).mean() + numbers.eps)
    z = fn @ flat
    pre = 1 / (1 + np.exp(-(z[:s] * scale[0] + base[:s]))) + numbers.hc_eps
    post = 2 / (1 + np.exp(-(z[s:2 * s] * scale[1] + base[s:2 * s])))
    logits = (z[2 * s:] * scale[2] + base[2 * s:]).reshape(s, s)
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    comb = e / e.sum(axis=1, keepdims=True) + numbers.hc_eps
    comb = comb / (comb.sum(axis=0, keepdims=True) + numbers.hc_eps)
    for _ in range(numbers.hc_iters - 1):
        comb = comb / (comb.sum(axis=1, keepdims=True) + numbers.hc_eps)
        comb = comb / (comb.sum(axis=0, keepdims=True) + numbers.hc_eps)
    return pre @ streams, post, comb


def reference_out(streams, y, post, comb):
    return post[:, None] * y[None, :].astype(np.float64) + comb.T @ streams.astype(np.float64)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("streams, width, hc_eps",
                         [(4, 64, 1e-6), (4, 33, 0.1), (3, 7, 1e-6), (1, 8, 1e-6)])
def test_formulas(streams, width, hc_eps, bf16):
    rng = np.random.default_rng(1)
    weights, packed = site(rng, streams, width, bf16)
    numbers = shape(hc_eps=hc_eps)          # 0.1 shows where each hc_eps is added
    rows = rng.standard_normal((5, streams, width)).astype(np.float32)
    before = rows.copy()
    x, post, comb = hyper_in(rows, packed, numbers)
    assert rows.tobytes() == before.tobytes()
    assert (x.shape, post.shape, comb.shape) == ((5, width), (5, streams), (5, streams, streams))
    y = rng.standard_normal((5, width)).astype(np.float32)
    after = rows.copy()
    hyper_out(after, y, post, comb)
    for i in range(5):
        want = reference_in(before[i], weights, numbers)
        for got, expected in zip((x[i], post[i], comb[i]), want):
            assert np.abs(got - expected).max() < CLOSE
        assert np.abs(after[i] - reference_out(before[i], y[i], *want[1:])).max() < CLOSE


def test_by_hand():
    # S = 2, D = 2, fn = 0, so z = 0 and only base speaks (l = ln 3, sigmoid l = 3/4):
    #   pre = (3/4, 1/2), post = 2 (1/2, 3/4) = (1, 3/2)
    #   comb logits (l, 0 | 0, 0), softmax (3/4, 1/4 | 1/2, 1/2)
    #   one column pass, column sums 5/4 and 3/4: comb = (3/5, 1/3 | 2/5, 2/3)
    # X = (1, 2 | 3, 4): x = 3/4 (1, 2) + 1/2 (3, 4) = (9/4, 7/2). With y = (10, 20):
    #   X'_0 = y + 3/5 (1, 2) + 2/5 (3, 4) = (11.8, 22.8)
    #   X'_1 = 3/2 y + 1/3 (1, 2) + 2/3 (3, 4) = (52/3, 100/3)
    # A second pass: rows over 14/15 and 16/15: (9/14, 5/14 | 3/8, 5/8), then columns over 57/56
    #   and 55/56: (12/19, 4/11 | 7/19, 7/11)
    ln3 = np.log(3.0)
    base = np.array([ln3, 0, 0, ln3, ln3, 0, 0, 0], np.float32)
    w = SimpleNamespace(fn=pack([np.zeros((8, 4), np.float32)]), base=base,
                        scale=np.ones(3, np.float32))
    streams = np.array([[[1, 2], [3, 4]]], np.float32)
    x, post, comb = hyper_in(streams, w, shape(iters=1, hc_eps=1e-9))
    np.testing.assert_allclose(x[0], [9 / 4, 7 / 2], rtol=1e-6)
    np.testing.assert_allclose(post[0], [1, 3 / 2], rtol=1e-6)
    np.testing.assert_allclose(comb[0], [[3 / 5, 1 / 3], [2 / 5, 2 / 3]], rtol=1e-6)
    hyper_out(streams, np.array([[10, 20]], np.float32), post, comb)
    np.testing.assert_allclose(streams[0], [[11.8, 22.8], [52 / 3, 100 / 3]], rtol=1e-6)
    comb = hyper_in(np.ones((1, 2, 2), np.float32), w, shape(iters=2, hc_eps=1e-9))[2]
    np.testing.assert_allclose(comb[0], [[12 / 19, 4 / 11], [7 / 19, 7 / 11]], rtol=1e-6)


def test_norm_and_scale_by_hand():
    # S = 1, D = 2, X = (3, 4): mean square 12.5, flat = (3, 4) / 3.5355339.
    # fn rows (1, 1), (1, 0), (0, 0): z = (1.9798990, 0.8485281, 0); scale (2, 1/2, 1):
    # pre = sigmoid(3.9597980) = 0.9812898, post = 2 sigmoid(0.4242641) = 1.2090063, comb = 1.
    fn = np.array([[1, 1], [1, 0], [0, 0]], np.float32)
    w = SimpleNamespace(fn=pack([fn]), base=np.zeros(3, np.float32),
                        scale=np.array([2, 0.5, 1], np.float32))
    x, post, comb = hyper_in(np.array([[[3, 4]]], np.float32), w, shape(hc_eps=1e-9, eps=1e-9))
    np.testing.assert_allclose(x[0], [3 * 0.9812898, 4 * 0.9812898], rtol=1e-6)
    np.testing.assert_allclose([post[0, 0], comb[0, 0, 0]], [1.2090063, 1.0], rtol=1e-6)


def test_extremes():
    """Logits of +-200, huge, tiny and zero streams: finite, columns sum to 1, as the formulas."""
    rng = np.random.default_rng(2)
    (fn, base, scale), packed = site(rng, 4, 16)
    base = packed.base[:] = np.where(rng.random(24) < 0.5, -200, 200)
    sizes = np.array([1e15, 1e-15, 0], np.float32)[:, None, None]
    rows = rng.standard_normal((3, 4, 16)).astype(np.float32) * sizes
    x, post, comb = hyper_in(rows, packed, shape())
    assert np.isfinite(x).all() and np.isfinite(post).all()
    assert np.abs(comb.sum(axis=1) - 1).max() < 1e-5
    for i in range(3):
        want = reference_in(rows[i], (fn, base.astype(np.float64), scale), shape())
        size = max(np.abs(rows[i]).max(), 1e-30)
        assert np.abs(x[i] - want[0]).max() < CLOSE * size
        assert np.abs(post[i] - want[1]).max() < CLOSE and np.abs(comb[i] - want[2]).max() < CLOSE


def test_row_law():
    rng = np.random.default_rng(3)
    _, packed = site(rng, 4, 64, True)
    rows = rng.standard_normal((64, 4, 64)).astype(np.float32)
    y = rng.standard_normal((64, 64)).astype(np.float32)
    whole = hyper_in(rows, packed, shape())
    mixed = rows.copy()
    hyper_out(mixed, y, *whole[1:])
    mean = hyper_end(mixed)
    for cut in [slice(i, i + 1) for i in range(64)] + [slice(11, 18)]:
        part = hyper_in(rows[cut], packed, shape())
        own = rows[cut].copy()
        hyper_out(own, y[cut], *part[1:])
        assert all(a.tobytes() == b[cut].tobytes() for a, b in zip(part, whole))
        assert own.tobytes() == mixed[cut].tobytes()
        assert hyper_end(own).tobytes() == mean[cut].tobytes()


def test_start_and_end():
    rows = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    streams = hyper_start(rows, 4)
    assert streams.dtype == np.float32 and streams.flags.c_contiguous and streams.shape == (2, 4, 3)
    assert (streams == rows[:, None, :]).all()
    streams[0, 1] += 2                                  # (1 + 3 + 1 + 1) / 4 = 1.5
    np.testing.assert_array_equal(hyper_end(streams), [[1.5, 2.5, 3.5], [4, 5, 6]])


def test_no_rows():
    _, packed = site(np.random.default_rng(4), 4, 8)
    streams = hyper_start(np.zeros((0, 8), np.float32), 4)
    x, post, comb = hyper_in(streams, packed, shape())
    hyper_out(streams, x, post, comb)
    assert x.shape == hyper_end(streams).shape == (0, 8) and comb.shape == (0, 4, 4)
