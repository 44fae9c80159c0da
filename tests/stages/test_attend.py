# python -m pytest tests/stages/test_attend.py
"""Stage 4: one partial a page group against float64 softmax, and every way to split it in bytes.

Tolerance: a score is a dot of up to 512 terms of size 2, scaled to size 8, with an error of about
sqrt(512) * 2^-24 * 2 = 3e-6; weights inherit it, and outputs of size up to 4 add the roundings of
their own sum. 2e-5 is asked of outputs and log-sum-exps (seen: 6e-6 and 3e-6).
"""

from typing import NamedTuple

import numpy as np
import pytest

from engine.stages.attend import TILE, attend_host, finish_host

CLOSE = 2e-5
END = np.iinfo(np.int32).max
NAN = {np.uint16: 0x7FC0, np.float32: np.nan}
DTYPES = pytest.mark.parametrize("dtype", [np.uint16, np.float32])
WORLDS = pytest.mark.parametrize("groups", [1, 2, 3, 6, 8])


class Case(NamedTuple):
    query: np.ndarray
    lists: np.ndarray
    lengths: np.ndarray
    seats: np.ndarray
    table: np.ndarray
    latents: np.ndarray

    @property
    def scale(self):
        return np.float32(self.query.shape[2] ** -0.5)

    def rows(self, chosen):
        return self._replace(**{name: np.ascontiguousarray(getattr(self, name)[chosen])
                                for name in ("query", "lists", "lengths", "seats")})


def make(rng, dtype, chosen, heads, width, page_rows, seats=None):
    """A row for each position list of `chosen`; only touched pages exist, NaN where unlisted."""
    n = len(chosen)
    seats = np.arange(n) if seats is None else np.array(seats)
    lists = np.full((n, max([len(c) for c in chosen], default=0) + 2), END, np.int32)
    for i, positions in enumerate(chosen):
        lists[i, :len(positions)] = positions           # what follows the length is not read
    last = max([p for c in chosen for p in c], default=0)
    table = np.full((max(seats, default=0) + 1, last // page_rows + 1), -1, np.int32)
    touched = sorted({(s, p // page_rows) for s, c in zip(seats, chosen) for p in c})
    for local, at in zip(rng.permutation(len(touched)), touched):
        table[at] = local
    latents = np.full((len(touched), page_rows, width), NAN[dtype], dtype)
    for seat, positions in zip(seats, chosen):
        drawn = rng.standard_normal((len(positions), width)).astype(np.float32)
        if dtype == np.uint16:
            drawn = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        at = np.array(positions, int)
        latents[table[seat, at // page_rows], at % page_rows] = drawn
    query = 2 * rng.standard_normal((n, heads, width)).astype(np.float32)
    return Case(query, lists, np.array([len(c) for c in chosen], np.int32),
                seats.astype(np.int32), table, latents)


class Partials:
    """Running partials of a case for page groups first .. first + count - 1 of `groups`."""

    def __init__(self, case, groups, first=0, count=None):
        n, heads, width = case.query.shape
        self.groups, self.first, count = groups, first, groups if count is None else count
        self.top = np.full((count, n, heads), -np.inf, np.float32)
        self.mass = np.zeros((count, n, heads), np.float32)
        self.out = np.zeros((count, n, heads, width), np.float32)

    def add(self, case, first_tile=0, last_tile=END, first_page=0):
        attend_host(*case, case.scale, self.groups, self.first, first_page, first_tile, last_tile,
                    self.top, self.mass, self.out)
        return self

    def finish(self):
        finish_host(self.top, self.mass, self.out)
        return self.out, self.top


def attend(case, groups, first=0, count=None):
    """(out [G, n, heads, width], lse [G, n, heads])."""
    return Partials(case, groups, first, count).add(case).finish()


def same(got, want):
    return [a.tobytes() for a in got] == [np.ascontiguousarray(a).tobytes() for a in want]


def reference(case, groups):
    """The same in float64, without tiles."""
    n, heads, width = case.query.shape
    page_rows = case.latents.shape[1]
    out, lse = np.zeros((groups, n, heads, width)), np.full((groups, n, heads), -np.inf)
    for i in range(n):
        positions = case.lists[i, :case.lengths[i]]
        for g in range(groups):
            mine = positions[positions // page_rows % groups == g]
            if mine.size == 0:
                continue
            rows = case.latents[case.table[case.seats[i], mine // page_rows], mine % page_rows]
            if rows.dtype == np.uint16:
                rows = (rows.astype(np.uint32) << 16).view(np.float32)
            rows = rows.astype(np.float64)
            s = case.query[i].astype(np.float64) @ rows.T * width ** -0.5
            top = s.max(axis=1, keepdims=True)
            p = np.exp(s - top)
            out[g, i] = p @ rows / p.sum(axis=1, keepdims=True)
            lse[g, i] = top[:, 0] + np.log(p.sum(axis=1))
    return out, lse


def pick(rng, count, pages, page_rows):
    """`count` ascending positions inside the given pages, the last page's last one among them."""
    inside = np.concatenate([np.arange(p * page_rows, (p + 1) * page_rows) for p in sorted(pages)])
    return np.sort(np.append(rng.choice(inside[:-1], count - 1, replace=False), inside[-1]))


def far(rng, page_rows, counts=(300, 257)):
    """Position lists over five tiles, up to beyond 20,000, in few pages."""
    last = 20_480 // page_rows - 1
    return [pick(rng, c, {0, last, *rng.choice(last, 9, replace=False)}, page_rows) for c in counts]


def test_by_hand():
    # width 1, so the scale is 1; query 1; rows at positions 3, 70, 71 hold 0, ln 3, 0.
    # One group: weights 1, 3, 1 of 5: out 3/5 ln 3, log-sum-exp ln 5.
    # Two groups (page 0 | page 1): {3}: out 0, lse 0; {70, 71}: out 3/4 ln 3, lse ln 4.
    # A third group has no row: 0 and -inf.
    latents = np.full((2, 64, 1), np.nan, np.float32)
    latents[1, 3], latents[0, 6], latents[0, 7] = 0, np.log(3), 0
    case = Case(np.ones((1, 1, 1), np.float32), np.array([[3, 70, 71, -1]], np.int32),
                np.array([3], np.int32), np.zeros(1, np.int32), np.array([[1, 0]], np.int32),
                latents)
    close = {"rtol": 0, "atol": 3e-7}                   # a few roundings of numbers below 2
    out, lse = attend(case, 1)
    assert np.allclose(out.ravel(), 0.6 * np.log(3), **close)
    assert np.allclose(lse.ravel(), np.log(5), **close)
    out, lse = attend(case, 3)
    assert np.allclose(out.ravel(), [0, 0.75 * np.log(3), 0], **close)
    assert np.allclose(lse.ravel(), [0, np.log(4), -np.inf], **close)
    assert out[2, 0, 0, 0] == 0


@pytest.mark.parametrize("heads, width, page_rows, counts", [
    (32, 512, 64, (2051, 65)), (5, 512, 512, (2051,)), (3, 20, 64, (1, 2, 63, 64, 130)),
    (1, 1, 512, (300,)), (64, 8, 64, (40, 2000, 7))])
@DTYPES
@pytest.mark.parametrize("groups", [1, 3])
def test_reference(heads, width, page_rows, counts, dtype, groups):
    rng = np.random.default_rng(heads + width)
    last = 20_480 // page_rows - 1
    count = 40 if page_rows == 64 else 6
    chosen = [pick(rng, c, {last, *rng.choice(last, count, replace=False)}, page_rows)
              for c in counts]
    case = make(rng, dtype, chosen, heads, width, page_rows)
    (out, lse), (want_out, want_lse) = attend(case, groups), reference(case, groups)
    assert np.abs(out - want_out).max() < CLOSE
    empty = np.isinf(want_lse)
    assert (np.isneginf(lse) == empty).all() and not out[empty].any()
    assert np.abs(lse[~empty] - want_lse[~empty]).max() < CLOSE


@DTYPES
@pytest.mark.parametrize("spread", [30, 200])
def test_large_scores_neither_overflow_nor_vanish(dtype, spread):
    # scores up to 4 * spread: a maximum that rises or falls from tile to tile must be carried. A
    # score's error is about 2^-23 of 4 * spread, and so are those of weights and log-sum-exp; three
    # times that is asked (seen: 0.6e-6 * spread)
    rng = np.random.default_rng(1)
    case = make(rng, dtype, far(rng, 64), 4, 24, 64)
    case.query[:] *= spread / 2
    (out, lse), (want_out, want_lse) = attend(case, 2), reference(case, 2)
    assert np.abs(out - want_out).max() < spread * 1.5e-6
    assert np.abs(lse - want_lse).max() < spread * 1.5e-6


@DTYPES
@pytest.mark.parametrize("page_rows", [64, 512])
@WORLDS
def test_tile_by_tile_from_scratch_pages(dtype, page_rows, groups):
    # as a prefill fetches history: pages of one tile at a time, in logical order, page 0 of the
    # scratch being `first_page`; what the list does not name is NaN there too
    rng = np.random.default_rng(2)
    case = make(rng, dtype, far(rng, page_rows)[:1] * 3, 3, 40, page_rows, seats=[0, 0, 0])
    case.lengths[:] = [300, 7, 150]                     # rows that end in earlier tiles
    whole = attend(case, groups)
    parts, pages = Partials(case, groups), TILE // page_rows
    for tile in range(5):
        local = case.table[0, tile * pages:(tile + 1) * pages]
        scratch = np.where((local >= 0)[:, None, None], case.latents[local], NAN[dtype])
        here = case._replace(table=np.arange(pages, dtype=np.int32)[None],
                             latents=scratch.astype(dtype))
        parts.add(here, tile, tile + 1, tile * pages)
    assert same(parts.finish(), whole)
    # and several tiles a call, over the pages themselves
    cut = Partials(case, groups).add(case, 0, 2).add(case, 2, 3).add(case, 3, 3).add(case, 3, END)
    assert same(cut.finish(), whole)


@DTYPES
@WORLDS
def test_groups_apart_are_groups_together(dtype, groups):
    # rank g has the pages of group g only and computes one partial: the bytes are the slice's
    rng = np.random.default_rng(3)
    case = make(rng, dtype, far(rng, 64), 3, 40, 64)
    whole = attend(case, groups)
    for g in range(groups):
        held = case.table.copy()
        held[:, np.arange(held.shape[1]) % groups != g] = -1
        locals_ = np.unique(held[held >= 0])
        held[held >= 0] = np.searchsorted(locals_, held[held >= 0])
        rank = case._replace(table=held, latents=case.latents[locals_])
        assert same(attend(rank, groups, g, 1), [a[g:g + 1] for a in whole])
    if groups > 2:
        assert same(attend(case, groups, 1, 2), [a[1:3] for a in whole])


@DTYPES
def test_any_heads_and_rows_apart(dtype):
    rng = np.random.default_rng(4)
    case = make(rng, dtype, far(rng, 64, (300, 257, 1, 64)), 7, 40, 64, seats=[2, 0, 1, 0])
    out, lse = attend(case, 3)
    for a, b in ((0, 1), (1, 7), (3, 5), (4, 4)):
        part = case._replace(query=np.ascontiguousarray(case.query[:, a:b]))
        assert same(attend(part, 3), (out[:, :, a:b], lse[:, :, a:b]))
    for chosen in ([0], [1], [2], [3], [3, 1], [2, 0, 1]):
        assert same(attend(case.rows(chosen), 3), (out[:, chosen], lse[:, chosen]))


@DTYPES
def test_page_order_and_other_rows_do_not_matter(dtype):
    rng = np.random.default_rng(5)
    case = make(rng, dtype, far(rng, 64), 3, 40, 64)
    order = rng.permutation(len(case.latents) + 4).astype(np.int32)
    latents = np.full((len(order), *case.latents.shape[1:]), NAN[dtype], dtype)
    latents[order[:len(case.latents)]] = case.latents
    table = np.where(case.table < 0, -1, order[case.table]).astype(np.int32)
    moved = case._replace(table=table, latents=latents)
    assert same(attend(moved, 2), attend(case, 2))
    # NaN in unlisted rows (make's) or finite numbers there: the same
    unlisted = np.isnan(latents) if dtype == np.float32 else latents == 0x7FC0
    latents[unlisted] = 1
    assert same(attend(moved, 2), attend(case, 2))


@DTYPES
def test_a_longer_list_width_changes_nothing(dtype):
    rng = np.random.default_rng(6)
    case = make(rng, dtype, far(rng, 64), 3, 40, 64)
    for wider, filler in ((1, -1), (5000, 0)):
        pad = np.full((2, wider), filler, np.int32)
        assert same(attend(case._replace(lists=np.hstack([case.lists, pad])), 2), attend(case, 2))


@DTYPES
def test_a_full_tile_and_one_row_more(dtype):
    # 4,097 rows in a list: a tile of all its 4,096 positions and a single row in the next
    rng = np.random.default_rng(7)
    for count in (TILE - 1, TILE, TILE + 1):
        case = make(rng, dtype, [range(count)], 2, 6, 512)
        (out, lse), (want_out, want_lse) = attend(case, 1), reference(case, 1)
        assert np.abs(out - want_out).max() < CLOSE and np.abs(lse - want_lse).max() < CLOSE
        parts = Partials(case, 1).add(case, 0, 1).add(case, 1, 2)
        assert same(parts.finish(), (out, lse))


@pytest.mark.parametrize("position", [0, 63, 64, TILE - 1, TILE, 1_048_575])
@DTYPES
def test_a_single_row_is_itself(position, dtype):
    # softmax of one score is 1: the row comes out as it is, the log-sum-exp is its score
    rng = np.random.default_rng(8)
    case = make(rng, dtype, [[position]], 2, 16, 64)
    group = position // 64 % 3
    out, lse = attend(case, 3)
    (want_out, want_lse) = reference(case, 3)
    assert (out == want_out).all() and np.abs(lse[group] - want_lse[group]).max() < CLOSE
    assert np.isneginf(np.delete(lse, group, axis=0)).all()


@DTYPES
def test_equal_rows_share_evenly(dtype):
    case = make(np.random.default_rng(9), dtype, [range(128)], 2, 4, 64)
    case.latents[:] = 0x3FC0 if dtype == np.uint16 else 1.5
    out, lse = attend(case, 1)
    assert (out == 1.5).all()                           # sums of 128 equal terms are exact here
    score = case.query[0].astype(np.float64).sum(axis=1) * 1.5 / 2
    assert np.abs(lse[0, 0] - score - np.log(128)).max() < CLOSE


@DTYPES
def test_nothing_to_attend(dtype):
    rng = np.random.default_rng(10)
    case = make(rng, dtype, [range(5), [], range(70)], 3, 8, 64)
    out, lse = attend(case, 2)
    assert np.isneginf(lse[:, 1]).all() and not out[:, 1].any()     # an empty list
    assert np.isneginf(lse[1, 0]).all() and np.isfinite(lse[1, 2]).all()
    none = case.rows(slice(0, 0))
    assert attend(none, 2)[0].shape == (2, 0, 3, 8)
    assert attend(case, 2, 0, 0)[0].shape == (0, 3, 3, 8)
    bare = case._replace(table=np.full_like(case.table, -1), latents=case.latents[:0],
                         lengths=np.zeros_like(case.lengths))
    assert np.isneginf(attend(bare, 2)[1]).all()        # a rank with no page


def test_finish_by_hand():
    # mass 2: out (6, 2) becomes (3, 1), top 1 becomes 1 + ln 2; an empty group stays as it is
    top = np.array([[[1.0]], [[-np.inf]]], np.float32)
    mass, out = np.array([[[2.0]], [[0]]], np.float32), np.zeros((2, 1, 1, 2), np.float32)
    out[0, 0, 0] = [6, 2]
    finish_host(top, mass, out)
    assert out[:, 0, 0].tolist() == [[3, 1], [0, 0]]
    assert np.isclose(top[0, 0, 0], 1 + np.log(2), rtol=0, atol=2e-7) and np.isneginf(top[1, 0, 0])
