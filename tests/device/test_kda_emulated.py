# python -m pytest tests/device/test_kda_emulated.py
"""The KDA kernels' source, thread by thread on the CPU: against the host path, and the one launch
for few rows against the three for many, in bytes."""

from types import SimpleNamespace

import emulate_kda
import numpy as np
import pytest

from engine.host import from_bf16, to_bf16
from engine.linear import linear, pack
from engine.model import kda, kda_cuda

WIDTH, TAPS, SEATS = 32, 4, [2] * 11 + [0] + [-1] * 2 + [1] * 5     # a tile of 16 rows and 3


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def made():
    rng, n = np.random.default_rng(5), len(SEATS)
    w = SimpleNamespace(
        f_b=SimpleNamespace(w=to_bf16(normal(rng, WIDTH, WIDTH) * WIDTH ** -0.5)),
        g_b=SimpleNamespace(w=to_bf16(normal(rng, WIDTH, WIDTH) * WIDTH ** -0.5)),
        conv=normal(rng, 3 * WIDTH, TAPS) * np.float32(0.5), decay=np.exp(normal(rng, 1)),
        dt_bias=normal(rng, WIDTH), o_norm=1 + normal(rng, WIDTH) / np.float32(10))
    return SimpleNamespace(
        w=w, rows=normal(rng, n, 5 * WIDTH + 1), state=normal(rng, 3, 1, WIDTH, WIDTH),
        history=normal(rng, 3, TAPS - 1, 3 * WIDTH), seats=np.int32(SEATS))


def run(made, monkeypatch, few, cuts=(), late=False):
    """(out, state, history) bytes of calls with the rows cut at `cuts`."""
    with monkeypatch.context() as patch:
        emulate_kda.install(patch, late)
        patch.setattr(kda_cuda, "FEW", few)
        state, history, outs = made.state.copy(), made.history.copy(), []
        for a, b in zip([0, *cuts], [*cuts, len(made.seats)]):
            out, o = np.zeros((b - a, WIDTH), np.uint16), np.empty((b - a, WIDTH), np.float32)
            factors = np.full((b - a, 1, 4 * WIDTH + 4), np.nan, np.float32)
            kda_cuda.kda_cuda(made.rows[a:b].copy(), made.w, -5.0, 1e-5, made.seats[a:b].copy(),
                              state, history, factors, o, out, None)
            outs.append(out)
    return np.concatenate(outs), state, history


def host(made):
    real = np.flatnonzero(made.seats >= 0)
    rows, seats = np.ascontiguousarray(made.rows[real]), made.seats[real]
    state, history, w = made.state.copy(), made.history.copy(), made.w
    qkv = np.empty((len(real), 3 * WIDTH), np.float32)
    out = np.empty((len(real), WIDTH), np.float32)
    kda.conv_host(rows, w.conv, seats, history, qkv)
    low = from_bf16(to_bf16(rows[:, 3 * WIDTH:5 * WIDTH]))
    forget, gate = (linear(np.ascontiguousarray(low[:, at:at + WIDTH]), pack([m.w]))
                    for at, m in ((0, w.f_b), (WIDTH, w.g_b)))
    kda.recur_host(rows, qkv, forget, gate, w.decay, w.dt_bias, np.float32(-5), w.o_norm,
                   np.float32(1e-5), seats, state, out)
    return real, out, state, history


def test_as_the_host_and_in_any_cut(made, monkeypatch):
    whole = run(made, monkeypatch, 0, late=True)
    real, out, state, history = host(made)
    found = from_bf16(whole[0][real])
    assert np.max(np.abs(found - out) / (1 + np.abs(out))) < 2 ** -8
    assert np.max(np.abs(whole[1] - state) / (1 + np.abs(state))) < 5e-6
    assert whole[2].tobytes() == history.tobytes() and not whole[0][made.seats < 0].any()
    for few, cuts in ((99, ()), (0, (9, 10)), (3, (2, 12, 16))):
        again = run(made, monkeypatch, few, cuts)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(again, whole)), (few, cuts)
