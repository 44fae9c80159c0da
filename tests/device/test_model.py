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
from engine.gemm import gemm
from engine.host import from_bf16, to_bf16
from engine.linear import linear, pack
from engine.model import dense, embed, hyper, hyper_cuda, kda, kda_cuda, mix_cuda, moe, norm
from engine.model.thirds import THIRDS, thirds, thirds_cuda

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

def test_thirds():
    matrix = normal(np.random.default_rng(2), 5, 24) * 10.0 ** np.arange(-12, 12)
    matrix = matrix.astype(np.float32)
    out = filled((15, 24), 0, np.uint16)
    thirds_cuda(up(matrix), out, STREAM)
    assert (down(out) == thirds(matrix)).all()
    parts = from_bf16(down(out)).reshape(THIRDS, 5, 24).astype(np.float64)
    assert (parts.sum(0) == matrix).all()


class Site:
    """Random streams, a site's weights and the parts of its result of three ranks."""

    def __init__(self, n, width, exact):
        rng = np.random.default_rng(width + exact)
        self.streams, self.y = normal(rng, n, 4, width) * 3, normal(rng, 3, n, width)
        fn = normal(rng, 24, 4 * width) * np.float32(width ** -0.5)
        self.fn = fn if exact else to_bf16(fn)
        self.held = up(thirds(fn) if exact else self.fn)
        self.base, self.scale = normal(rng, 24), np.abs(normal(rng, 3)) + np.float32(0.1)
        self.weight = 1 + normal(rng, width) / 10
        self.seats, self.real = padded(rng, n)

    def run(self, rows, kept=THIRDS, beside=STREAM):
        """(x, post, comb, streams and sums after the site) of some rows, a row first."""
        y, seats = up(self.y[:, rows]), up(self.seats[rows])
        streams = up(self.streams[rows])
        n, _, width = streams.shape
        sums = filled((n, hyper_cuda.parts(width), hyper_cuda.SUMS))
        x, post, comb = filled((kept, n, width), 0, np.uint16), filled((n, 4)), filled((n, 4, 4))
        hyper_cuda.hyper_first_cuda(streams, post, comb, self.held, seats, sums, STREAM)
        mix_cuda.hyper_in_cuda(streams, sums, up(self.base), up(self.scale), SHAPE,
                               up(self.weight), seats, x, post, comb, STREAM, beside)
        cuda.synchronize()
        last = up(self.streams[rows])
        hyper_cuda.hyper_out_cuda(last, y, post, comb, None, seats, None, STREAM)
        hyper_cuda.hyper_out_cuda(streams, y, post, comb, self.held, seats, sums, STREAM)
        assert down(streams).tobytes() == down(last).tobytes()
        return [down(x).swapaxes(0, 1)] + [down(a) for a in (post, comb, streams, sums)]


@pytest.mark.parametrize("width, exact", [(128, False), (256, True), (80, False), (4096, False)])
def test_hyper(width, exact):
    made = Site(6, width, exact)
    real = made.real
    x, post, comb, after, sums = found = made.run(slice(None))
    host_x, host_post, host_comb = hyper.hyper_in(
        made.streams, SimpleNamespace(fn=pack([made.fn]), base=made.base, scale=made.scale), SHAPE)
    wide = from_bf16(x).astype(np.float64).sum(1)
    close(wide[real], norm.rms_norm(host_x, made.weight, SHAPE.eps)[real], CLOSE_SUM / 5)
    close(post[real], host_post[real], CLOSE_SUM / 5)
    close(comb[real], host_comb[real], CLOSE_SUM / 5)
    assert (x[:, 0] == to_bf16(wide.astype(np.float32))).all()
    assert (made.run(slice(None), 1)[0][:, 0] == x[:, 0]).all()
    again = made.run(slice(None), beside=cuda.stream())
    assert all(a.tobytes() == b.tobytes() for a, b in zip(again, found))
    wanted = made.streams.copy()
    hyper.hyper_out(wanted, (made.y[0] + made.y[1]) + made.y[2], post, comb)
    close(after[real], wanted[real], CLOSE * 5)
    # ---- the sums that the next site starts from
    flat, fn = after.reshape(6, -1).astype(np.float64), made.fn if exact else from_bf16(made.fn)
    close(sums.sum(1)[real, :24], (flat @ fn.T.astype(np.float64))[real], CLOSE_SUM / 5)
    products = np.einsum("njd,nkd->njk", *[after.astype(np.float64)] * 2)
    upper = np.triu_indices(4)
    close(sums.sum(1)[real, 24:], products[:, upper[0], upper[1]][real], CLOSE_SUM / 5)
    assert (after[~real] == made.streams[~real]).all()
    assert not x[~real].any() and not comb[~real].any() and not sums[~real].any()


@pytest.mark.parametrize("width", [128, 4096])
def test_a_row_alone_and_among_many_goes_through_a_site_alike(width):
    made = Site(205, width, False)
    many = made.run(slice(None))
    for rows in (slice(0, 1), slice(200, 201), slice(40, 73)):
        assert all(a.tobytes() == b[rows].tobytes() for a, b in zip(made.run(rows), many))


def test_hyper_end():
    rng = np.random.default_rng(3)
    streams, weight = normal(rng, 5, 4, 4096), 1 + normal(rng, 4096) / 10
    x = filled((3, 4096), 7, np.uint16)
    mix_cuda.hyper_end_cuda(up(streams), up(np.int32([4, -1, 0])), up(weight), 1e-5, x, STREAM)
    found, wanted = down(x), norm.rms_norm(hyper.hyper_end(streams), weight, 1e-5)
    close(from_bf16(found[[0, 2]]), wanted[[4, 0]], CLOSE_BF16)
    assert (found[1] == 7).all()


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


@pytest.mark.parametrize("experts, picks, width, ties, exact", [
    (10, 3, 128, False, False), (12, 4, 256, True, False), (288, 8, 4096, False, False),
    (288, 8, 4096, False, True), (288, 8, 128, True, False)])
def test_route(experts, picks, width, ties, exact):
    rng, n = np.random.default_rng(experts + ties), 70
    x, gate, bias = normal(rng, n, width), normal(rng, experts, width), normal(rng, experts) / 10
    gate *= np.float32(width ** -0.5)
    if ties:
        gate, bias = gate * 0, np.where(rng.random(experts) < 0.5, np.float32(0.5), np.float32(0))
    x[4, 3] = np.nan
    seats = np.arange(n, dtype=np.int32)
    seats[2] = -1
    router = up(thirds(gate) if exact else to_bf16(gate))
    gate, rows = gate if exact else to_bf16(gate), thirds(x).reshape(THIRDS, n, width)

    def run(a, b):
        chosen, weights = filled((b - a, picks), -9, np.int32), filled((b - a, picks), -9)
        logits = filled((THIRDS, b - a, router.shape[0]))
        flat = up(rows[:, a:b].reshape(THIRDS * (b - a), width))
        gemm(flat, router, logits.reshape(THIRDS * (b - a), router.shape[0]), STREAM)
        moe.choose_cuda(logits, up(bias), 2.5, up(seats[a:b]), chosen, weights, STREAM)
        return down(chosen), down(weights)
    chosen, weights = run(0, n)
    wanted, wanted_weights = moe.route(x, SimpleNamespace(router=pack([gate]), bias=bias),
                                       SimpleNamespace(experts_per_token=picks, routed_scaling=2.5))
    real = np.delete(np.arange(n), [2, 4])
    assert (chosen[real] == wanted[real]).all() and (chosen[4] == wanted[4]).all()
    close(weights[real], wanted_weights[real], CLOSE_SUM)
    assert np.isnan(weights[4]).all() and (chosen[2] == -1).all() and (weights[2] == 0).all()
    for a, b in ((3, 4), (0, 8), (60, 70)):
        alone = run(a, b)
        assert alone[0].tobytes() == chosen[a:b].tobytes()
        assert alone[1].tobytes() == weights[a:b].tobytes()


# ---- kda ---------------------------------------------------------------------------------------

class Kda:
    """A rank's heads with random projections of n rows, and states of 4 seats on the device."""

    def __init__(self, heads, dim, seats, taps=4):
        rng = np.random.default_rng(heads + dim)
        n, wide = len(seats), heads * dim
        self.heads, self.dim, self.seats = heads, dim, np.int32(seats)
        self.rows = normal(rng, n, 3 * wide + 2 * dim + heads)
        self.f_b, self.g_b = (to_bf16(normal(rng, wide, dim) * dim ** -0.5) for _ in range(2))
        self.taps, self.decay = normal(rng, 3 * wide, taps) * 0.5, np.exp(normal(rng, heads))
        self.dt_bias, self.o_norm = normal(rng, wide), 1 + normal(rng, dim) / 10
        self.state = normal(rng, 4, heads, dim, dim) * 0.3
        self.history = normal(rng, 4, taps - 1, 3 * wide)
        self.w = SimpleNamespace(
            f_b=SimpleNamespace(w=up(self.f_b)), g_b=SimpleNamespace(w=up(self.g_b)),
            conv=up(self.taps), decay=up(self.decay), dt_bias=up(self.dt_bias),
            o_norm=up(self.o_norm))

    def device(self, cuts):
        """(out, state, history) after calls with the rows cut at `cuts`."""
        state, history = up(self.state), up(self.history)
        wide, outs = self.heads * self.dim, []
        for a, b in zip([0, *cuts], [*cuts, len(self.seats)]):
            factors, o = filled((b - a, self.heads, 4 * self.dim + 4)), filled((b - a, wide))
            out = filled((b - a, wide), 0, np.uint16)
            kda_cuda.kda_cuda(up(self.rows[a:b]), self.w, -5.0, 1e-5, up(self.seats[a:b]), state,
                              history, factors, o, out, STREAM)
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
        low = from_bf16(to_bf16(rows[:, 3 * wide:3 * wide + 2 * self.dim]))
        forget, gate = (linear(np.ascontiguousarray(low[:, at:at + self.dim]), pack([matrix]))
                        for at, matrix in ((0, self.f_b), (self.dim, self.g_b)))
        kda.recur_host(rows, qkv, forget, gate, self.decay, self.dt_bias,
                       np.float32(-5), self.o_norm, np.float32(1e-5), seats, state, out)
        return real, out, state, history


@pytest.mark.parametrize("heads, dim", [(7, 32), (1, 64), (3, 128)])
def test_kda(heads, dim, monkeypatch):
    made = Kda(heads, dim, [2] * 9 + [0] * 2 + [3] + [-1] * 2 + [1] * 20)
    out, state, history = made.device([])
    real, host_out, host_state, host_history = made.host()
    close(from_bf16(out[real]), host_out, CLOSE_BF16)
    close(state, host_state, CLOSE_SUM / 10)
    assert history.tobytes() == host_history.tobytes()
    assert not out[made.seats < 0].any()
    for few in (0, 3, 40):              # rows of the one launch, against those of the three
        monkeypatch.setattr(kda_cuda, "FEW", few)
        for cuts in ([], [1, 2, 3], [4], [9, 11], [5, 10, 12, 20, 33]):
            again = made.device(cuts)
            assert all(a.tobytes() == b.tobytes()
                       for a, b in zip(again, (out, state, history))), (few, cuts)


def test_kda_leaves_other_seats_alone():
    made = Kda(2, 32, [2] * 40)
    state, history = made.device([35])[1:]
    for seat in (0, 1, 3):
        assert state[seat].tobytes() == made.state[seat].tobytes()
        assert history[seat].tobytes() == made.history[seat].tobytes()


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
    empty = SimpleNamespace(w=filled((0, 32), 0, np.uint16))
    w = SimpleNamespace(f_b=empty, g_b=empty, conv=filled((0, 4)), decay=filled(0),
                        dt_bias=filled(0), o_norm=filled(32))
    kda_cuda.kda_cuda(filled((2, 64)), w, -5.0, 1e-5, seats, state, history, filled((2, 0, 132)),
                      nothing, filled((2, 0), 0, np.uint16), STREAM)
    none, seats = filled((0, 128)), filled(0, 0, np.int32)
    norm.rms_norm_cuda(none, 0, filled(128), 1e-5, seats, none, 0, STREAM)
    hyper_cuda.hyper_out_cuda(filled((0, 4, 128)), filled((1, 0, 128)), filled((0, 4)),
                              filled((0, 4, 4)), None, seats, None, STREAM)
    cuda.synchronize()
