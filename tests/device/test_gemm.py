# python -m pytest tests/device/test_gemm.py
"""Device matrix products: the documented order byte for byte on the CPU, float64 and laws on a GPU.

Without a GPU the kernels' source runs through emulate_cuda, whose mma has an order of its own: what
must agree in bytes is the order around it. On a GPU: float64 within the rounding of 2 sqrt(K)
float32 sums, and in bytes 1 row = 32 = 100 rows, groups = one matrix at a time, few = many rows.
"""

import numpy as np
import pytest

import emulate_tile
from emulate_cuda import e4m3, fma, mma
from engine import device, gemm, gemm_experts, gemm_experts_many, gemm_few, gemm_ring

gpu = [pytest.mark.gpu, pytest.mark.skipif(not device.available(), reason="no CUDA device answers")]
on_gpu = pytest.mark.parametrize("fp8", [pytest.param(f, marks=gpu) for f in (False, True)])


def bf16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def value(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def weights(rng, fp8, *shape, covered=128):
    """(stored, scales or None, float32 values, dense scales or None)."""
    if not fp8:
        w = bf16(rng.standard_normal(shape))
        return w, None, value(w), None
    w = rng.integers(0, 0x7F, shape).astype(np.uint8) | (rng.integers(0, 2, shape) << 7)
    w = w.astype(np.uint8)
    blocks = (*shape[:-2], -(-shape[-2] // covered), -(-shape[-1] // 128))
    scales = (rng.random(blocks) / 256 + 1e-4).astype(np.float32)
    dense = np.repeat(np.repeat(scales, covered, -2), 128, -1)[..., :shape[-2], :shape[-1]]
    return w, scales, e4m3(w), dense


def exact(x, w, dense):
    w = w.astype(np.float64) * (1 if dense is None else dense)
    return value(x).astype(np.float64) @ np.swapaxes(w, -1, -2)


def in_order(x, w, dense):
    """The order of engine/gemm.py written out, with emulate_cuda's mma: [n, N] float32."""
    wide = 1 if dense is None else 2
    K = w.shape[1]
    blocks = -(-K // 128)
    a = np.zeros((len(w), blocks * 128), np.float32)
    b = np.zeros((len(x), blocks * 128), np.float32)
    a[:, :K], b[:, :K] = w, value(x)
    slots = np.empty((2 * wide, 16), int)               # k of each slot of each mma of a chunk
    for s in range(2 * wide):
        for t in range(4):
            slots[s, [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]] = 8 * wide * t + 4 * s + np.arange(4)
    total = None
    for p in range(min(8, blocks)):
        part = np.zeros((len(w), len(x)), np.float32)
        for block in range(p, blocks, 8):
            new = part if dense is None else np.zeros_like(part)
            for first in range(128 * block, 128 * block + 128, 32 * wide):
                for k in slots:
                    new = mma(a[:, first + k], b[:, first + k].T, new)
            part = new if dense is None else fma(dense[:, 128 * block, None], new, part)
        total = part if total is None else total + part
    return total.T


def swiglu(wide, limit):
    gate, up = np.split(wide, 2, axis=-1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * (1 / (1 + np.exp(-gate))) * up


def routes(rng, n, picks, experts, padding=0):
    chosen = np.array([np.sort(rng.permutation(experts)[:picks]) for _ in range(n)], np.int32)
    chosen[n - padding:] = -1
    return chosen, rng.random((n, picks)).astype(np.float32)


# ---- the source of the kernels, on the CPU -----------------------------------------------------

@pytest.mark.parametrize("fp8, n, N, K", [
    (False, 3, 20, 168), (False, 9, 17, 1184), (True, 2, 20, 144), (True, 9, 17, 1200)])
def test_few_and_many_rows_sum_in_the_documented_order(monkeypatch, fp8, n, N, K):
    rng = np.random.default_rng(K)
    x = bf16(rng.standard_normal((n, K)))
    w, scales, values, dense = weights(rng, fp8, N, K, covered=16)
    want = in_order(x, values, dense)
    for few in (gemm.FEW_ROWS, 0):
        with monkeypatch.context() as patch:
            emulate_tile.install(patch, late=n > 3)
            patch.setattr(gemm, "FEW_ROWS", few)
            y = np.ones((n, N), np.float32)
            gemm.gemm(x, w, y, None, scales, add=n > 3)
        assert y.tobytes() == (want if n <= 3 else want + np.float32(1)).tobytes(), few


@pytest.mark.parametrize("fp8, few", [(False, 32), (False, 0), (True, 32), (True, 0)])
def test_groups_are_products_of_their_own(monkeypatch, fp8, few):
    rng = np.random.default_rng(1)
    n, G, N, K = 2, 2, 24, 144
    x = bf16(rng.standard_normal((n, G, K)))
    w, scales, values, dense = weights(rng, fp8, G, N, K)
    emulate_tile.install(monkeypatch)
    monkeypatch.setattr(gemm, "FEW_ROWS", few)
    y = np.ones((n, G, N), np.float32)
    gemm.gemm(x, w, y, None, scales)
    for g in range(G):
        want = in_order(np.ascontiguousarray(x[:, g]), values[g], dense[g] if fp8 else None)
        assert y[:, g].tobytes() == want.tobytes()


@pytest.mark.parametrize("fp8", [False, True])
def test_every_form_of_the_few_row_kernels(monkeypatch, fp8):
    rng = np.random.default_rng(2)
    emulate_tile.install(monkeypatch, late=fp8)
    few, ring = gemm_few.gemv_kernel, gemm_ring.ring_kernel
    for n, N, K, make, form in ((2, 20, 4368, few, (2, 4)), (2, 40, 1296, few, (4, 2)),
                                (2, 40, 400, ring, (1, 1, 2, True)),
                                (2, 17, 1296, ring, (1, 1, 2, False)),
                                (18, 40, 272, ring, (2, 4, 1, True)),
                                (10, 17, 1296, ring, (2, 2, 1, False))):
        alone = form[-1] is True
        x = bf16(rng.standard_normal((n, K)))
        w, scales, values, dense = weights(rng, fp8, N, K, covered=8 * form[0])
        want = in_order(x, values, dense)
        y = np.zeros((n, N), np.float32)
        scale, shift, blocks = gemm.check(x, w, scales, 1, N, K)
        grid = (-(-N // (8 * form[0] * (8 if alone else 1))), 1)
        make(*form)[grid, gemm_few.THREADS, None](
            x.ravel(), w.ravel(), y.ravel() if scale is None else scale, y.ravel(), n, N, K, 1,
            shift, blocks, False)
        assert y.tobytes() == want.tobytes(), (K, form)


@pytest.mark.parametrize("fp8, few", [(False, 32), (False, 0), (True, 32), (True, 0)])
def test_experts_in_the_documented_order(monkeypatch, fp8, few):
    rng = np.random.default_rng(3)
    n, picks, E, D, c = 11, 2, 3, 32, 16        # 9 rows share experts: two eights of one expert
    x = bf16(rng.standard_normal((n, D)))
    chosen, share = routes(rng, n, picks, E, padding=1)
    chosen[:9] = (0, 2)
    up, up_scales, up_values, up_dense = weights(rng, fp8, E, 2 * c, D, covered=16)
    down, down_scales, down_values, down_dense = weights(rng, fp8, E, D, c)
    act = np.zeros((n * picks, c), np.uint16)
    want = np.zeros((n, D), np.float32)
    for i in range(n):
        for j, e in enumerate(chosen[i]):
            if e >= 0:
                wide = in_order(x[i:i + 1], up_values[e], up_dense[e] if fp8 else None)
                act[i * picks + j] = rounded(swiglu(wide, np.float32(10)))[0]
                r = in_order(act[i * picks + j][None], down_values[e],
                             down_dense[e] if fp8 else None)
                want[i] = fma(share[i, j], r[0], want[i])
    emulate_tile.install(monkeypatch)
    monkeypatch.setattr(gemm_experts, "FEW_ROWS", few)
    got_act, y = np.zeros_like(act), np.ones((n, D), np.float32)
    space = gemm_experts.Space(np.zeros(n * picks, np.int32),
                               np.zeros((n * picks // 64 + E, 3), np.int32),
                               np.zeros((n * picks, D), np.float32))
    gemm_experts.experts(x, chosen, share, up, down, 10.0, y, got_act, None, up_scales, down_scales,
                         space)
    assert got_act.tobytes() == act.tobytes() and y.tobytes() == want.tobytes()
    assert not y[-1].any() and y[0].any()


def test_visits_are_listed_by_expert_and_cut_into_tiles(monkeypatch):
    rng = np.random.default_rng(4)
    n, picks, E = 300, 2, 4
    chosen, _ = routes(rng, n, picks, E, padding=3)
    chosen[chosen == 1] = 0                     # an expert without rows, one with many
    bound = n * picks // 64 + E
    visits, tiles = np.full(n * picks, -7, np.int32), np.full((bound, 3), -7, np.int32)
    emulate_tile.install(monkeypatch)
    gemm_experts_many._order_kernel[E, 512, None](
        chosen.ravel(), visits, tiles.ravel(), n * picks, bound)
    flat = chosen.ravel()
    want = np.concatenate([np.flatnonzero(flat == e) for e in range(E)])
    assert np.array_equal(visits[:len(want)], want)
    assert (tiles[:, 0] >= -1).all()
    seen = np.concatenate([np.arange(first, first + rows) for e, first, rows in tiles if e >= 0])
    assert np.array_equal(seen, np.arange(len(want)))
    assert all((flat[visits[first:first + rows]] == e).all() and 0 < rows <= 64
               for e, first, rows in tiles if e >= 0)


def test_rows_of_a_scale_are_read_off_its_shape():
    for N, rows, shift in ((256, 2, 7), (16, 1, 7), (96, 3, 5), (65, 2, 6), (33, 5, 3)):
        assert gemm.scale_shift(np.empty((rows, 2), np.float32), 1, N, 256) == shift
    with pytest.raises(AssertionError):
        gemm.scale_shift(np.empty((3, 2), np.float32), 1, 128, 256)


# ---- on a GPU ----------------------------------------------------------------------------------

def run(x, w, scales, out=None, add=False):
    d = device.cuda.to_device
    shape = (len(x), *w.shape[:-1])
    y = d(np.full(shape, np.nan, np.float32) if out is None else out)
    gemm.gemm(d(x), d(w), y, 0, None if scales is None else d(scales), add)
    return y.copy_to_host()


def close(y, x, values, dense):
    want = exact(x, values, dense)
    size = exact(x & 0x7FFF, np.abs(values), dense)     # every rounding is below its 2^-24
    return (np.abs(y - want) <= size * 2.0 ** -24 * 2 * np.sqrt(x.shape[-1])).all()


@on_gpu
@pytest.mark.parametrize("N, K", [
    (4096, 4096), (16, 32), (24, 16), (7, 224), (32, 4096), (1536, 384), (8192, 128), (300, 1200),
    (130, 16384)])
def test_float64_and_rows_alone_in_bytes(fp8, N, K):
    rng = np.random.default_rng(N + K)
    x = bf16(rng.standard_normal((100, K)))
    w, scales, values, dense = weights(rng, fp8, N, K)
    many = run(x, w, scales)
    assert close(many, x, values, dense)
    for n in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65):
        assert run(x[:n], w, scales).tobytes() == many[:n].tobytes(), n
    for i in (3, 31, 77):                       # alone, and in another column of the mma
        assert run(x[i:i + 1], w, scales).tobytes() == many[i:i + 1].tobytes(), i
        assert run(x[i - 3:i + 2], w, scales).tobytes() == many[i - 3:i + 2].tobytes(), i
    shuffled = rng.permutation(100)
    assert run(x[shuffled], w, scales).tobytes() == many[shuffled].tobytes()
    assert run(x[:5], w, scales, many[:5], add=True).tobytes() == (many[:5] + many[:5]).tobytes()


@on_gpu
def test_groups_on_the_device(fp8):
    rng = np.random.default_rng(5)
    for G, N, K in ((64, 512, 256), (7, 32, 64), (3, 256, 512)):
        x = bf16(rng.standard_normal((40, G, K)))
        w, scales, _, _ = weights(rng, fp8, G, N, K)
        many = run(x, w, scales)
        assert run(x[:3], w, scales).tobytes() == many[:3].tobytes()
        for g in (0, G - 1):
            alone = run(np.ascontiguousarray(x[:, g]), w[g], None if scales is None else scales[g])
            assert alone.tobytes() == np.ascontiguousarray(many[:, g]).tobytes()


@on_gpu
def test_not_finite_rows_stay_their_own(fp8):
    rng = np.random.default_rng(6)
    x = bf16(rng.standard_normal((40, 512)))
    w, scales, _, _ = weights(rng, fp8, 64, 512)
    clean = run(x, w, scales)
    x[5], x[33] = 0x7FC0, 0x7F80
    for n in (8, 40):
        y = run(x[:n], w, scales)
        others = [i for i in range(n) if i not in (5, 33)]
        assert y[others].tobytes() == clean[others].tobytes() and np.isnan(y[5]).all()


def run_experts(x, chosen, share, up, down, up_scales, down_scales):
    d = device.cuda.to_device
    n, picks = chosen.shape
    E, D, c = down.shape
    y, act = d(np.full((n, D), np.nan, np.float32)), d(np.zeros((n * picks, c), np.uint16))
    space = gemm_experts.Space(d(np.zeros(n * picks, np.int32)),
                               d(np.zeros((n * picks // 64 + E, 3), np.int32)),
                               d(np.full((n * picks, D), np.nan, np.float32)))
    scales = [None if s is None else d(s) for s in (up_scales, down_scales)]
    gemm_experts.experts(d(x), d(chosen), d(share), d(up), d(down), 10.0, y, act, 0, *scales, space)
    return y.copy_to_host()


@on_gpu
@pytest.mark.parametrize("E, picks, D, c, n", [
    (288, 8, 512, 128, 200), (12, 4, 256, 64, 150), (10, 3, 128, 16, 90), (3, 3, 128, 32, 40)])
def test_experts_on_the_device(fp8, E, picks, D, c, n):
    rng = np.random.default_rng(E)
    x = bf16(rng.standard_normal((n, D)))
    chosen, share = routes(rng, n, picks, E, padding=2)
    up, up_scales, up_values, up_dense = weights(rng, fp8, E, 2 * c, D, covered=min(128, c))
    down, down_scales, down_values, down_dense = weights(rng, fp8, E, D, c)
    many = run_experts(x, chosen, share, up, down, up_scales, down_scales)
    for i in range(0, n - 2, 7):
        want = np.zeros(D)
        size = 0.0
        for j, e in enumerate(chosen[i]):
            act = rounded(swiglu(exact(x[i:i + 1], up_values[e], up_dense[e] if fp8 else None), 10))
            r = share[i, j] * exact(act, down_values[e], down_dense[e] if fp8 else None)[0]
            want, size = want + r, size + np.abs(r).max()
        # an activation may round to the other BF16 neighbour: 2^-8 of one of c terms
        assert np.abs(many[i] - want).max() <= 0.01 * size, i
    assert not many[-2:].any()
    for rows in ([0], [1, 0], list(range(8)), list(range(30, min(62, n))),
                 [n - 1, 4]):
        alone = run_experts(x[rows], chosen[rows], share[rows], up, down, up_scales, down_scales)
        assert alone.tobytes() == many[rows].tobytes(), rows
