# python -m pytest tests/stages/test_project.py
"""Stage 5: merging partials against float64, its exactness in bytes, and the two projections.

Tolerance of a merge: weights sum to 1 and outputs are of size up to 5; an exponential, up to 8
products and sums and a division each round by 2^-24: 5e-6 is asked (seen: 9e-7). Log-sum-exps
are of size up to 10 and round by 2^-24 of that a few times: 3e-6 (seen: 5e-7).
"""

import numpy as np
import pytest

from engine.linear import pack, pack_group
from engine.stages.attend import attend_host, finish_host
from engine.stages.project import combine_host, project_host

CLOSE, CLOSE_LSE = 5e-6, 3e-6
GROUPS = pytest.mark.parametrize("groups", [1, 2, 3, 6, 8])


def combine(out, lse):
    merged = np.full(out.shape[1:], np.nan, np.float32)
    merged_lse = np.full(lse.shape[1:], np.nan, np.float32)
    combine_host(out, lse, merged, merged_lse)
    return merged, merged_lse


def partials(rng, groups, n, heads, width, empty=0.3):
    """Random partials, a share of them empty: (out, lse)."""
    out = rng.standard_normal((groups, n, heads, width)).astype(np.float32)
    lse = (3 * rng.standard_normal((groups, n, heads))).astype(np.float32)
    gone = rng.random(lse.shape) < empty
    out[gone], lse[gone] = 0, -np.inf
    return out, lse


def reference(out, lse):
    """float64, and from the formula's other form: weights are exp(lse_g - total lse)."""
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.log(np.exp(lse).sum(axis=0))
        weight = np.where(np.isneginf(lse), 0, np.exp(lse - total))
    return (weight[..., None] * out).sum(axis=0), total


def same(got, want):
    return [a.tobytes() for a in got] == [np.ascontiguousarray(a).tobytes() for a in want]


def test_combine_by_hand():
    # masses 1 and 3: (1 * 4 + 3 * 8) / 4 = 7, (0 - 3 * 4) / 4 = -3; together ln 4
    out = np.array([[[[4, 0]]], [[[8, -4]]]], np.float32)
    merged, lse = combine(out, np.log([[[1]], [[3]]]).astype(np.float32))
    assert np.allclose(merged.ravel(), [7, -3], rtol=0, atol=2e-6)
    assert np.allclose(lse, np.log(4), rtol=0, atol=3e-7)


@pytest.mark.parametrize("n, heads, width", [(3, 32, 512), (1, 64, 512), (7, 5, 3), (4, 1, 1)])
@GROUPS
def test_combine_reference(n, heads, width, groups):
    out, lse = partials(np.random.default_rng(groups), groups, n, heads, width)
    (merged, total), (want, want_total) = combine(out, lse), reference(out, lse)
    assert np.abs(merged - want).max() < CLOSE
    some = ~np.isneginf(want_total)
    assert (np.isneginf(total) == ~some).all()
    assert np.abs(total[some] - want_total[some]).max() < CLOSE_LSE


@pytest.mark.parametrize("shift", [-3000.0, 500.0])
def test_combine_of_extreme_log_sum_exps(shift):
    # exp(500) and exp(-3000) do not exist in float32, only differences count; a partial lower by
    # 200 adds nothing at all
    out, lse = partials(np.random.default_rng(1), 3, 4, 5, 6, empty=0)
    lse[:] = np.round(lse * 64) / 64                    # so that the shift is exact
    plain = combine(out, lse)
    assert same(combine(out, lse + np.float32(shift))[:1], plain[:1])
    lse[1] = lse[0] - 200
    assert same(combine(out[:2], lse[:2]), combine(out[:1], lse[:1]))


@GROUPS
def test_combine_rows_and_heads_apart(groups):
    out, lse = partials(np.random.default_rng(2), groups, 5, 7, 40)
    merged, total = combine(out, lse)
    for i in range(5):
        part = combine(out[:, i:i + 1].copy(), lse[:, i:i + 1].copy())
        assert same(part, (merged[i:i + 1], total[i:i + 1]))
    for a, b in ((0, 1), (1, 7), (3, 3)):
        part = combine(out[:, :, a:b].copy(), lse[:, :, a:b].copy())
        assert same(part, (merged[:, a:b], total[:, a:b]))


@GROUPS
def test_a_single_group_is_itself_wherever_it_stands(groups):
    # so a partial may be merged where it was made, or where it arrives among empty ones
    out, lse = partials(np.random.default_rng(3), 1, 4, 6, 33, empty=0)
    assert same(combine(out, lse), (out[0], lse[0]))
    for at in range(groups):
        many = np.zeros((groups, *out.shape[1:]), np.float32)
        lses = np.full((groups, *lse.shape[1:]), -np.inf, np.float32)
        many[at], lses[at] = out[0], lse[0]
        assert same(combine(many, lses), (out[0], lse[0]))


@GROUPS
def test_combine_of_a_combine(groups):
    once = combine(*partials(np.random.default_rng(4), groups, 5, 7, 40))
    again = combine(*(a[None] for a in once))
    assert same(again, once)
    padded = [np.stack([np.full_like(a, empty), a]) for a, empty in zip(again, (0, -np.inf))]
    assert same(combine(*padded), once)


def test_empty_groups_do_not_change_a_bit():
    rng = np.random.default_rng(5)
    out, lse = partials(rng, 3, 5, 7, 40, empty=0.2)
    for at in range(4):
        more = np.insert(out, at, 0, axis=0), np.insert(lse, at, -np.inf, axis=0)
        assert same(combine(*more), combine(out, lse))


def test_groups_are_merged_in_their_order():
    # 1 + 2^24 - 2^24 with equal weights: in this order the 1 is lost, from the other end it is not
    out = np.array([1, 2 ** 24, -2 ** 24], np.float32).reshape(3, 1, 1, 1)
    lse = np.zeros((3, 1, 1), np.float32)
    assert combine(out, lse)[0].item() == 0
    assert combine(out[::-1].copy(), lse)[0].item() == np.float32(1) / np.float32(3)


@pytest.mark.parametrize("n, heads, groups", [(0, 4, 2), (3, 0, 2), (3, 4, 0), (3, 4, 5)])
def test_nothing_to_combine(n, heads, groups):
    merged, lse = combine(*partials(np.random.default_rng(6), groups, n, heads, 8, empty=1))
    assert merged.shape == (n, heads, 8) and not merged.any()
    assert lse.shape == (n, heads) and np.isneginf(lse).all()


@GROUPS
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_attention_in_groups_is_attention(groups, dtype):
    # 700 rows of 64-row pages, in groups, merged: the softmax over all of them
    rng = np.random.default_rng(7)
    latents = rng.standard_normal((11, 64, 128)).astype(np.float32)
    if dtype == np.uint16:
        latents = (latents.view(np.uint32) >> 16).astype(np.uint16)
    query = rng.standard_normal((1, 4, 128)).astype(np.float32)
    top, mass = np.full((groups, 1, 4), -np.inf, np.float32), np.zeros((groups, 1, 4), np.float32)
    out = np.zeros((groups, 1, 4, 128), np.float32)
    zeros, last = np.zeros(1, np.int32), np.iinfo(np.int32).max
    attend_host(query, np.arange(700, dtype=np.int32)[None], np.array([700], np.int32), zeros,
                np.arange(11, dtype=np.int32)[None], latents, np.float32(128 ** -0.5), groups, 0, 0,
                0, last, top, mass, out)
    finish_host(top, mass, out)
    merged, lse = combine(out, top)
    rows = latents.reshape(-1, 128)[:700]
    if dtype == np.uint16:
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    p = np.exp(query[0].astype(np.float64) @ rows.T.astype(np.float64) * 128 ** -0.5)
    # here the roundings of stage 4 come first, so its tolerance
    assert np.abs(merged[0] - p @ rows / p.sum(axis=1, keepdims=True)).max() < 2e-5
    assert np.abs(lse[0] - np.log(p.sum(axis=1))).max() < 2e-5


def weights(rng, heads, width, v_head, hidden, dtype):
    """(value_up, output) as float32 values, and as the engine holds them."""
    value = rng.standard_normal((heads, v_head, width)).astype(np.float32)
    value /= np.float32(width ** 0.5)
    output = rng.standard_normal((hidden, heads * v_head)).astype(np.float32)
    output /= np.float32(max(heads * v_head, 1) ** 0.5)
    if dtype == np.float32:
        held = value, output
    else:
        held = [(a.view(np.uint32) >> 16).astype(np.uint16) for a in (value, output)]
        value, output = [(a.astype(np.uint32) << 16).view(np.float32) for a in held]
    group = pack_group(list(held[0]), shape=(v_head, width), dtype=dtype)
    return (value, output), (group, pack([held[1]]))


@pytest.mark.parametrize("n, heads, width, v_head, hidden", [
    (1, 11, 512, 256, 300), (5, 3, 40, 7, 65), (4, 1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_project(n, heads, width, v_head, hidden, dtype):
    # weights are scaled so that values are of size 1 to 3: a sum of 2,816 terms rounds by about
    # sqrt(2,816) * 2^-24 * 3 = 1e-5 at most (seen: 7e-6); 2e-5 is asked
    rng = np.random.default_rng(8)
    (value, output), held = weights(rng, heads, width, v_head, hidden, dtype)
    merged = rng.standard_normal((n, heads, width)).astype(np.float32)
    out = project_host(merged, *held)
    exact = np.einsum("nhd,hvd->nhv", merged.astype(np.float64), value.astype(np.float64))
    exact = exact.reshape(n, -1) @ output.T.astype(np.float64)
    assert out.shape == (n, hidden) and np.abs(out - exact).max() < 2e-5
    for i in range(n):
        assert project_host(merged[i:i + 1], *held).tobytes() == out[i:i + 1].tobytes()


def test_project_by_hand():
    # two heads of width 2, one value each: head 0 sums (3), head 1 takes the difference (-1);
    # hidden row 0 adds them, row 1 doubles the second
    group = pack_group([np.array([[1, 1]], np.float32), np.array([[1, -1]], np.float32)])
    merged = np.array([[[1, 2], [3, 4]]], np.float32)
    out = project_host(merged, group, pack([np.array([[1, 1], [0, 2]], np.float32)]))
    assert out.tolist() == [[2, -2]]


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_a_rank_without_heads_adds_zero(dtype):
    _, held = weights(np.random.default_rng(9), 0, 512, 256, 300, dtype)
    out = project_host(np.empty((3, 0, 512), np.float32), *held)
    assert out.shape == (3, 300) and not out.any()


def test_project_no_rows():
    _, held = weights(np.random.default_rng(10), 2, 8, 4, 6, np.float32)
    assert project_host(np.empty((0, 2, 8), np.float32), *held).shape == (0, 6)
