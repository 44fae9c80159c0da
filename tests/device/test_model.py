# python -m pytest tests/device/test_model.py
"""The kernels of engine/model on a CUDA device, against the host paths and float64.

Laws in bytes: a row alone equals the row in a batch with padding; a prompt cut into calls anywhere
leaves the same rows and states. Tolerances are relative to 1 + |value|: sums of up to 16,384
float32 terms of size 1 differ by up to 1e-5 between orders; BF16 outputs by half a unit, 2^-9.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.device import available, cuda
from engine.host import from_bf16, to_bf16
from engine.linear import pack
from engine.model import dense, dots, embed, hyper, kda, kda_cuda, moe, norm

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not available(), reason="no CUDA device answers")]

CLOSE, CLOSE_BF16, CLOSE_SUM = 2e-6, 2 ** -8, 5e-5
SHAPE = SimpleNamespace(eps=1e-5, hc_eps=1e-6, hc_iters=20)
STREAM = 0


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def up(array):
    return cuda.to_device(np.ascontiguousarray(array))


def filled(shape, value=0, dtype=np.float32):
    return cuda.to_device(np.full(shape, value, dtype))


def down(array):
    return array.copy_to_host()


def close(found, wanted, tolerance):
    wanted = np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    far = np.abs(found.astype(np.float64) - wanted) / (1 + np.abs(wanted))
    assert far.size == 0 or np.max(far) <= tolerance, np.max(far)


def padded(rng, n):
    """Seats of n rows, some of them padding: (seats, flags of the real ones)."""
    seats = np.arange(n, dtype=np.int32)
    if n > 2:
        seats[1::3] = -1
    return seats, seats >= 0


# ---- embed, norm, head -------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_embed(dtype):
    table = to_bf16(normal(np.random.default_rng(0), 9, 128))
    wide = from_bf16(table)
    streams = filled((4, 4, 128), 7)
    embed.embed_cuda(up(table if dtype == np.uint16 else wide), up(np.int32([3, 2, 8, -1])),
                     up(np.int32([0, -1, 1, 2])), streams, STREAM)
    found = down(streams)
    for row, wanted in enumerate((wide[3], 7, wide[8], 0)):
        assert (found[row] == wanted).all()


@pytest.mark.parametrize("width", [32, 128, 256, 4096])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_norms(width, dtype):
    rng = np.random.default_rng(width)
    n, first, at = 7, 20, 8
    x, weight, bias = normal(rng, n, width + 30), normal(rng, width), normal(rng, width)
    seats, real = padded(rng, n)
    part = np.ascontiguousarray(x[:, first:first + width])
    for which in ("rms", "layer"):
        def run(rows, some):
            out = filled((len(rows), width + 16), 0, dtype)
            if which == "rms":
                norm.rms_norm_cuda(up(rows), first, up(weight), 1e-5, up(some), out, at, STREAM)
            else:
                norm.layer_norm_cuda(up(rows), first, up(weight), up(bias), 1e-6, up(some), out, at,
                                     STREAM)
            return down(out)
        found = run(x, seats)
        wanted = norm.rms_norm(part, weight, 1e-5) if which == "rms" else \
            norm.layer_norm(part, weight, bias, 1e-6)
        value = found if dtype == np.float32 else from_bf16(found)
        close(value[real, at:at + width], wanted[real], CLOSE_SUM / 5 if dtype == np.float32
              else CLOSE_BF16)
        assert not value[~real].any() and not value[:, :at].any()
        assert not value[:, at + width:].any()
        for i in np.flatnonzero(real)[:3]:
            assert run(x[i:i + 1], seats[i:i + 1]).tobytes() == found[i].tobytes()


def test_narrow():
    x = normal(np.random.default_rng(1), 3, 80)
    x[0, 5:8] = [np.float32(1 + 2 ** -8), np.inf, np.nan]       # a tie goes to even
    out = filled((3, 64), 0, np.uint16)
    norm.narrow_cuda(up(x), 5, up(np.int32([0, -1, 4])), out, STREAM)
    found, wanted = from_bf16(down(out)), from_bf16(to_bf16(x[:, 5:69]))
    assert np.array_equal(found[[0, 2]], wanted[[0, 2]], equal_nan=True) and not found[1].any()


# ---- hyper -------------------------------------------------------------------------------------

@pytest.mark.parametrize("outputs, width, bf16, square", [
    (24, 512, True, 1), (10, 128, False, 0), (37, 700, True, 0), (24, 16384, True, 1),
    (288, 4096, True, 0), (288, 4096, False, 0)])
def test_dots(outputs, width, bf16, square):
    rng = np.random.default_rng(outputs)
    x, w, n = normal(rng, 6, width), normal(rng, outputs, width) * width ** -0.5, 6
    seats, real = padded(rng, n)
    w = to_bf16(w) if bf16 else w

    def run(rows, some):
        partial = filled((len(rows), dots.parts(width), outputs + square), -5)
        dots.dots_cuda(up(rows), up(w), up(some), partial, STREAM)
        return down(partial)
    found = run(x, seats)
    wanted = x.astype(np.float64) @ (from_bf16(w) if bf16 else w).T.astype(np.float64)
    if square:
        wanted = np.concatenate([wanted, (x.astype(np.float64) ** 2).sum(1)[:, None]], axis=1)
    close(found.sum(1)[real], wanted[real], CLOSE_SUM / 10)
    assert (found[~real] == -5).all()
    for i in np.flatnonzero(real):
        assert run(x[i:i + 1], seats[i:i + 1]).tobytes() == found[i].tobytes()


def site(rng, n, width):
    """Random streams and a site's weights: (streams, fn, base, scale, norm weight)."""
    return (normal(rng, n, 4, width) * 3, to_bf16(normal(rng, 24, 4 * width) * width ** -0.5),
            normal(rng, 24), np.abs(normal(rng, 3)) + 0.1, 1 + normal(rng, width) / 10)


def run_hyper_in(streams, fn, base, scale, weight, seats):
    n, _, width = streams.shape
    partial = filled((n, dots.parts(4 * width), 25))
    made = (filled((n, width), 0, np.uint16), filled((n, width)), filled((n, 4)),
            filled((n, 4, 4)))
    hyper.hyper_in_cuda(up(streams), up(fn), up(base), up(scale), SHAPE, up(weight), up(seats),
                        partial, *made, STREAM)
    return [down(a) for a in made]


@pytest.mark.parametrize("width", [128, 256, 4096])
def test_hyper(width):
    rng = np.random.default_rng(width)
    n = 6
    streams, fn, base, scale, weight = site(rng, n, width)
    seats, real = padded(rng, n)
    bf16, wide, post, comb = found = run_hyper_in(streams, fn, base, scale, weight, seats)
    x, host_post, host_comb = hyper.hyper_in(
        streams, SimpleNamespace(fn=pack([fn]), base=base, scale=scale), SHAPE)
    close(wide[real], norm.rms_norm(x, weight, SHAPE.eps)[real], CLOSE_SUM)
    close(post[real], host_post[real], CLOSE_SUM)
    close(comb[real], host_comb[real], CLOSE_SUM)
    assert (bf16 == to_bf16(wide)).all() and not wide[~real].any() and not comb[~real].any()
    for i in np.flatnonzero(real)[:3]:
        alone = run_hyper_in(streams[i:i + 1], fn, base, scale, weight, seats[i:i + 1])
        assert all(a.tobytes() == b[i].tobytes() for a, b in zip(alone, found))
    # ---- the way out: three ranks' parts
    y = normal(rng, 3, n, width)
    out = up(streams)
    hyper.hyper_out_cuda(out, up(y), up(post), up(comb), up(seats), STREAM)
    after, wanted = down(out), streams.copy()
    hyper.hyper_out(wanted, (y[0] + y[1]) + y[2], post, comb)
    close(after[real], wanted[real], CLOSE * 5)
    assert (after[~real] == streams[~real]).all()
    ends = filled((3, width), 7)
    hyper.hyper_end_cuda(up(streams), up(np.int32([4, -1, 0])), ends, STREAM)
    ends = down(ends)
    assert (ends[[0, 2]] == hyper.hyper_end(streams)[[4, 0]]).all() and (ends[1] == 7).all()


# ---- dense, moe --------------------------------------------------------------------------------

@pytest.mark.parametrize("columns, picks", [(40, 2), (2048, 8), (300, 1)])
def test_swiglu(columns, picks):
    gate_up = normal(np.random.default_rng(columns), 3 * picks, 2 * columns) * 8
    out = filled((3 * picks, columns + 24), 9, np.uint16)
    dense.swiglu_cuda(up(gate_up), 10.0, picks, up(np.int32([0, -1, 1])), out, STREAM)
    found, wanted = down(out), np.empty((3 * picks, columns), np.float32)
    dense.swiglu_host(gate_up, np.float32(10), wanted)
    real = np.repeat([True, False, True], picks)
    close(from_bf16(found)[real, :columns], wanted[real], CLOSE_BF16)
    assert not found[real, columns:].any() and (found[~real] == 9).all()


@pytest.mark.parametrize("experts, picks, width, ties", [
    (10, 3, 128, False), (12, 4, 256, True), (288, 8, 4096, False), (288, 8, 128, True)])
def test_route(experts, picks, width, ties):
    rng = np.random.default_rng(experts + ties)
    x, gate, bias = normal(rng, 5, width), normal(rng, experts, width), normal(rng, experts) / 10
    gate *= np.float32(width ** -0.5)
    if ties:
        gate, bias = gate * 0, np.where(rng.random(experts) < 0.5, np.float32(0.5), np.float32(0))
    x[4, 3] = np.nan
    seats, gate = np.int32([0, 1, -1, 2, 3]), to_bf16(gate)

    def run(rows, some):
        n = len(rows)
        chosen, weights = filled((n, picks), -9, np.int32), filled((n, picks), -9)
        moe.route_cuda(up(rows), up(gate), up(bias), 2.5, up(some),
                       filled((n, dots.parts(width), experts)), chosen, weights, STREAM)
        return down(chosen), down(weights)
    chosen, weights = run(x, seats)
    wanted, wanted_weights = moe.route(x, SimpleNamespace(router=pack([gate]), bias=bias),
                                       SimpleNamespace(experts_per_token=picks, routed_scaling=2.5))
    for i in (0, 1, 3, 4):
        assert (chosen[i] == wanted[i]).all()
    close(weights[[0, 1, 3]], wanted_weights[[0, 1, 3]], CLOSE_SUM)
    assert np.isnan(weights[4]).all() and (chosen[2] == -1).all() and (weights[2] == 0).all()
    alone = run(x[3:4], seats[3:4])
    assert alone[0].tobytes() == chosen[3].tobytes() and alone[1].tobytes() == weights[3].tobytes()


# ---- kda ---------------------------------------------------------------------------------------

class Kda:
    """A rank's heads with random projections of n rows, and states of 4 seats on the device."""

    def __init__(self, heads, dim, seats, taps=4):
        rng = np.random.default_rng(heads + dim)
        n, wide = len(seats), heads * dim
        self.heads, self.dim, self.seats = heads, dim, np.int32(seats)
        self.rows = normal(rng, n, 3 * wide + 2 * dim + heads)
        self.forget, self.gate = normal(rng, n, wide), normal(rng, n, wide)
        self.taps, self.decay = normal(rng, 3 * wide, taps) * 0.5, np.exp(normal(rng, heads))
        self.dt_bias, self.o_norm = normal(rng, wide), 1 + normal(rng, dim) / 10
        self.state = normal(rng, 4, heads, dim, dim) * 0.3
        self.history = normal(rng, 4, taps - 1, 3 * wide)

    def device(self, cuts):
        """(out, state, history) after calls with the rows cut at `cuts`."""
        state, history = up(self.state), up(self.history)
        wide, fixed = self.heads * self.dim, [up(a) for a in (self.taps, self.decay, self.dt_bias)]
        outs = []
        for a, b in zip([0, *cuts], [*cuts, len(self.seats)]):
            n, rows, seats = b - a, up(self.rows[a:b]), up(self.seats[a:b])
            qkv, keep, beta = filled((n, 3 * wide)), filled((n, wide)), filled((n, self.heads))
            o, out = filled((n, wide)), filled((n, wide), 0, np.uint16)
            kda_cuda.prepare_cuda(rows, up(self.forget[a:b]), *fixed, -5.0, history, seats, qkv,
                                  keep, beta, STREAM)
            kda_cuda.recur_cuda(rows, qkv, keep, beta, seats, state, history, o, STREAM)
            kda_cuda.finish_cuda(o, up(self.gate[a:b]), up(self.o_norm), 1e-5, seats, out, STREAM)
            outs.append(down(out))
        return np.concatenate(outs), down(state), down(history)

    def host(self):
        """The same on the host, for the real rows."""
        real = np.flatnonzero(self.seats >= 0)
        rows, seats = np.ascontiguousarray(self.rows[real]), self.seats[real]
        state, history = self.state.copy(), self.history.copy()
        wide = self.heads * self.dim
        qkv = np.empty((len(real), 3 * wide), np.float32)
        out = np.empty((len(real), wide), np.float32)
        kda.conv_host(rows, self.taps, seats, history, qkv)
        kda.recur_host(rows, qkv, np.ascontiguousarray(self.forget[real]),
                       np.ascontiguousarray(self.gate[real]), self.decay, self.dt_bias,
                       np.float32(-5), self.o_norm, np.float32(1e-5), seats, state, out)
        return real, out, state, history


@pytest.mark.parametrize("heads, dim", [(7, 32), (1, 64), (3, 128)])
def test_kda(heads, dim):
    made = Kda(heads, dim, [2] * 9 + [0] * 2 + [3] + [-1] * 2)
    out, state, history = made.device([])
    real, host_out, host_state, host_history = made.host()
    close(from_bf16(out[real]), host_out, CLOSE_BF16)
    close(state, host_state, CLOSE_SUM / 10)
    assert history.tobytes() == host_history.tobytes()
    assert state[1].tobytes() == made.state[1].tobytes()
    assert not out[made.seats < 0].any()
    for cuts in ([1, 2, 3], [4], [9, 11], [5, 10, 12]):
        again = made.device(cuts)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(again, (out, state, history))), cuts


def test_kda_long():
    """Three hundred rows of all 64 heads in one call, against calls of 1 to 130 rows."""
    made = Kda(64, 128, [1] * 300)
    whole = made.device([])
    assert all(a.tobytes() == b.tobytes()
               for a, b in zip(made.device([1, 3, 130, 131, 171, 300 - 1]), whole))
    real, host_out, host_state, _ = made.host()
    close(from_bf16(whole[0]), host_out, CLOSE_BF16)
    close(whole[1], host_state, CLOSE_SUM)


def test_no_heads_and_no_rows_launch_nothing():
    nothing, seats = filled((2, 0)), up(np.int32([0, 1]))
    state, history = filled((4, 0, 32, 32)), filled((4, 3, 0))
    kda_cuda.prepare_cuda(filled((2, 64)), nothing, filled((0, 4)), filled(0), filled(0), -5.0,
                          history, seats, nothing, nothing, nothing, STREAM)
    kda_cuda.recur_cuda(filled((2, 64)), nothing, nothing, nothing, seats, state, history, nothing,
                        STREAM)
    kda_cuda.finish_cuda(nothing, nothing, filled(32), 1e-5, seats, nothing, STREAM)
    none, seats = filled((0, 128)), filled(0, 0, np.int32)
    norm.rms_norm_cuda(none, 0, filled(128), 1e-5, seats, none, 0, STREAM)
    hyper.hyper_out_cuda(filled((0, 4, 128)), filled((1, 0, 128)), filled((0, 4)),
                         filled((0, 4, 4)), seats, STREAM)
    cuda.synchronize()
