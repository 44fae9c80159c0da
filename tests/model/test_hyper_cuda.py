# python -m pytest tests/model/test_hyper_cuda.py
"""The CUDA kernels of a site and of the router's choice, run on the CPU by emulate_model.

Against the host paths, to 2e-6 of 1 + |value|: sums of a few hundred float32 terms. A row's bits
are its own: alone, beside others and beside padding.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.host import from_bf16, to_bf16
from engine.linear import pack
from engine.model import hyper, hyper_cuda, mix_cuda, moe, norm
from engine.model.thirds import THIRDS, thirds
from tests import emulate_model

SHAPE = SimpleNamespace(eps=1e-5, hc_eps=1e-6, hc_iters=4)
CLOSE = 2e-6


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def close(found, wanted):
    wanted = np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    assert np.max(np.abs(found - wanted) / (1 + np.abs(wanted))) <= CLOSE


def test_thirds_add_up():
    matrix = normal(np.random.default_rng(0), 3, 8) * np.float32(1e3)
    parts = from_bf16(thirds(matrix)).reshape(THIRDS, 3, 8).astype(np.float64)
    assert (parts.sum(0) == matrix).all() and (parts[1] != 0).any()


@pytest.mark.parametrize("n, width, exact", [(2, 80, False), (9, 16, False), (1, 48, True)])
def test_a_site(n, width, exact, monkeypatch):
    rng = np.random.default_rng(n + width)
    streams, y = normal(rng, n, 4, width) * 3, normal(rng, 2, n, width)
    fn = normal(rng, 24, 4 * width) * np.float32(width ** -0.5)
    held = thirds(fn) if exact else to_bf16(fn)
    fn = fn if exact else to_bf16(fn)
    base, scale = normal(rng, 24), np.abs(normal(rng, 3)) + np.float32(0.1)
    weight, seats = 1 + normal(rng, width) / 10, np.arange(n, dtype=np.int32)
    seats[1::3] = -1
    real = seats >= 0

    def run(rows):
        now, parts = streams[rows].copy(), y[:, rows].copy()
        m, some = len(now), seats[rows]
        sums = np.zeros((m, hyper_cuda.parts(width), hyper_cuda.SUMS), np.float32)
        x, post = np.zeros((THIRDS, m, width), np.uint16), np.zeros((m, 4), np.float32)
        comb = np.zeros((m, 4, 4), np.float32)
        hyper_cuda.hyper_first_cuda(now, post, comb, held, some, sums, 0)
        mix_cuda.hyper_in_cuda(now, sums, base, scale, SHAPE, weight, some, x, post, comb,
                               0, 0)
        last = now.copy()
        hyper_cuda.hyper_out_cuda(last, parts, post, comb, None, some, None, 0)
        hyper_cuda.hyper_out_cuda(now, parts, post, comb, held, some, sums, 0)
        assert now.tobytes() == last.tobytes()
        return x.swapaxes(0, 1).copy(), post, comb, now, sums

    host_x, host_post, host_comb = hyper.hyper_in(
        streams, SimpleNamespace(fn=pack([fn]), base=base, scale=scale), SHAPE)
    emulate_model.install(monkeypatch)
    x, post, comb, after, sums = found = run(slice(None))
    wide = from_bf16(x).astype(np.float64).sum(1)
    close(wide[real], norm.rms_norm(host_x, weight, SHAPE.eps)[real])
    close(post[real], host_post[real])
    close(comb[real], host_comb[real])
    wanted = streams.copy()
    hyper.hyper_out(wanted, y[0] + y[1], post, comb)
    close(after[real], wanted[real])
    matrix = (fn if exact else from_bf16(fn)).astype(np.float64)
    close(sums[real, :, :24].sum(1), after[real].reshape(sum(real), -1).astype(np.float64)
          @ matrix.T)
    assert (after[~real] == streams[~real]).all() and not x[~real].any()
    assert all(a.tobytes() == b[:1].tobytes() for a, b in zip(run(slice(0, 1)), found))


@pytest.mark.parametrize("experts, picks, ties, planes", [
    (10, 3, False, 1), (100, 8, True, 1), (40, 4, False, 3)])
def test_choose(experts, picks, ties, planes, monkeypatch):
    rng = np.random.default_rng(experts)
    logits = normal(rng, THIRDS, 5, planes * experts)
    logits *= np.float32(2.0 ** -9) ** np.arange(THIRDS, dtype=np.float32)[:, None, None]
    bias = normal(rng, experts) / 10
    if ties:
        logits *= 0
        bias = np.where(rng.random(experts) < 0.5, np.float32(0.5), np.float32(0))
    logits[0, 4] = np.nan
    seats = np.int32([0, 1, -1, 2, 3])
    whole = logits.reshape(THIRDS, 5, planes, experts)
    whole = sum(whole[i, :, j] for i in range(THIRDS) for j in range(planes) if i + j < THIRDS)
    wanted, wanted_weights = np.empty((5, picks), np.int32), np.empty((5, picks), np.float32)
    moe.choose_host(np.ascontiguousarray(whole), bias, np.float32(2.5), wanted, wanted_weights)
    emulate_model.install(monkeypatch)
    chosen, weights = np.zeros((5, picks), np.int32), np.zeros((5, picks), np.float32)
    moe.choose_cuda(logits, bias, 2.5, seats, chosen, weights, 0)
    real = [0, 1, 3, 4]
    assert (chosen[real] == wanted[real]).all() and (chosen[2] == -1).all()
    close(weights[[0, 1, 3]], wanted_weights[[0, 1, 3]])
    assert np.isnan(weights[4]).all() and not weights[2].any()
