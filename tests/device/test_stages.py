# python -m pytest tests/device/test_stages.py
"""The kernels of engine/stages on a CUDA device, against host paths and float64.

Integers (latent bits, tails, lists, selections) are compared in bytes, and so are the laws: a row
alone or in a batch, any subset of heads, one call or tile by tile, one block a span or a chain.
Tolerances: attention weights are rounded to BF16 (2^-9 each, independent), so outputs of size up
to 4 may be off by 2^-7; scores are float32 sums of products that are exact, pooled keys BF16.
"""

import numpy as np
import pytest

from engine.device import available, cuda
from engine.host import from_bf16, to_bf16
from engine.stages import attend, attend_cuda, insert, merge, project, score, score_cuda

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not available(), reason="no CUDA device answers")]

END = np.iinfo(np.int32).max
STREAM = 0


def up(array):
    return cuda.to_device(np.ascontiguousarray(array))


def filled(shape, value=0, dtype=np.float32):
    return cuda.to_device(np.full(shape, value, dtype))


def down(*arrays):
    return [a.copy_to_host() for a in arrays]


def same(found, wanted):
    return [a.tobytes() for a in found] == [np.ascontiguousarray(a).tobytes() for a in wanted]


# ---- insert ------------------------------------------------------------------------------------

@pytest.mark.parametrize("kpool, width, rank", [(4, 128, 512), (2, 24, 40)])
def test_insert(kpool, width, rank):
    rng = np.random.default_rng(kpool)
    page_rows, seats_all, pages = 16, 6, 8
    for _ in range(6):
        seats, positions = [], []
        for seat in rng.permutation(seats_all)[:4]:
            count, start = int(rng.integers(1, 3 * kpool)), int(rng.integers(0, 60))
            seats += [seat] * count
            positions += range(start, start + count)
        seats, positions = np.int32(seats + [-1, -1]), np.int32(positions + [-1, 5])
        rows = [rng.standard_normal((len(seats), w)).astype(np.float32)
                for w in (rank, width, width)]
        ape = rng.standard_normal((kpool, width)).astype(np.float32)
        table = rng.permutation(seats_all * pages).reshape(seats_all, pages).astype(np.int32)
        table[rng.random(table.shape) < 0.3] = -1
        held = [np.full((seats_all * pages, page_rows, rank), 7, np.uint16),
                np.full((seats_all * pages, page_rows // kpool, width), 7, np.uint16),
                *rng.standard_normal((2, seats_all, kpool - 1, width)).astype(np.float32)]
        on_device = [up(a) for a in held]
        insert.insert(*map(up, rows), up(ape), up(seats), up(positions), up(table), *on_device,
                      STREAM)
        real = seats >= 0
        insert.insert_host(*(np.ascontiguousarray(a[real]) for a in rows), ape, seats[real],
                           positions[real], table, *held)
        latents, keys, *tails = down(*on_device)
        assert same([latents, *tails], [held[0], *held[2:]])
        assert ((keys == 7) == (held[1] == 7)).all()
        far = np.abs(from_bf16(keys) - from_bf16(held[1])) / (1 + np.abs(from_bf16(held[1])))
        assert far.max() <= 2 ** -7


# ---- score -------------------------------------------------------------------------------------

class Scoring:
    """Buffers and launch of stage 2 for a batch of `batch` rows."""

    def __init__(self, room, keep, batch):
        self.keep, self.batch = keep, batch
        self.found = filled((batch, room), np.nan)
        self.bins = filled((batch, score_cuda.BINS), 0, np.int32)
        self.near = filled((batch, score_cuda.NEAR), -1, np.int32)
        self.fill, self.faults = filled(batch, 0, np.int32), filled(1, 0, np.int32)

    def run(self, query, weight, seats, positions, table, keys, kpool, group, groups):
        n = len(seats)
        out = (filled((n, self.keep)), filled((n, self.keep), -1, np.int32),
               filled(n, -1, np.int32))
        score_cuda.score(up(query), up(weight), up(seats), up(positions), up(table), up(keys),
                         kpool, group, groups, self.found, self.bins, self.near, self.fill,
                         self.faults, *out, STREAM)
        found = down(*out)
        assert not self.bins.copy_to_host().any() and not self.fill.copy_to_host().any()
        return found


@pytest.mark.parametrize("group, groups, a_page, keep", [(-1, 1, 16, 64), (1, 3, 16, 64),
                                                         (0, 2, 128, 512), (2, 6, 16, 5)])
def test_score_of_integers_is_the_host_path(group, groups, a_page, keep):
    # width 64: the scale is 1/8 and every sum exact, so scores and their many ties agree in bytes
    rng = np.random.default_rng(keep + groups)
    kpool, heads, width, n = 4, 32, 64, 5
    seats = np.int32([0, 0, 1, 2, -1])
    positions = np.int32([9001, 9002, 4 * keep * groups * 3 + 7, 4 * keep + 2, 77])
    pages = -(-(positions.max() + 1) // (a_page * kpool))
    table = np.full((3, pages), -1, np.int32)
    mine = np.array([k for k in range(pages) if group < 0 or k % groups == group])
    table[:, mine] = rng.permutation(3 * len(mine)).reshape(3, -1)
    keys = to_bf16(rng.integers(-2, 3, (3 * len(mine), a_page, width)).astype(np.float32))
    query = rng.integers(-2, 3, (n, heads, width)).astype(np.float32)
    weight = rng.integers(-2, 3, (n, heads)).astype(np.float32)
    room = len(mine) * a_page
    found = Scoring(room, keep, 2).run(query, weight, seats, positions, table, keys, kpool, group,
                                       groups)
    wanted = (np.zeros((n, keep), np.float32), np.zeros((n, keep), np.int32), np.zeros(n, np.int32))
    score.score_host(query[:4], weight[:4], seats[:4], positions[:4], table, keys, kpool, group,
                     groups, *(a[:4] for a in wanted))
    assert (found[2] == wanted[2]).all()
    for i, count in enumerate(wanted[2]):
        assert (found[1][i, :count] == wanted[1][i, :count]).all()
        assert (found[0][i, :count] == wanted[0][i, :count]).all()


@pytest.mark.parametrize("kind, pools", [("random", 262_144), ("few values", 262_144),
                                         ("all zero", 20_000), ("random", 1_000)])
def test_score_selects_exactly(kind, pools):
    rng = np.random.default_rng(pools)
    kpool, a_page, keep, heads, width = 4, 16, 512, 32, 128
    pages = -(-pools // a_page)
    table = rng.permutation(pages).astype(np.int32)[None]
    keys = rng.standard_normal((pages, a_page, width)).astype(np.float32)
    if kind == "few values":
        keys = keys[rng.integers(0, 3, pages)] + np.zeros((pages, 1, 1), np.float32)
    keys = to_bf16(keys * (kind != "all zero"))
    query = rng.standard_normal((2, heads, width)).astype(np.float32)
    weight = rng.standard_normal((2, heads)).astype(np.float32)
    seats, positions = np.int32([0, 0]), np.int32([4 * pools - 1, 4 * pools - 9])
    scoring = Scoring(pages * a_page, keep, 2)
    values, chosen, counts = scoring.run(query, weight, seats, positions, table, keys, kpool, -1, 1)
    every = scoring.found.copy_to_host()
    assert list(counts) == [keep, keep] and not scoring.faults.copy_to_host()[0]
    for i in range(2):
        seen = (positions[i] + 1) // kpool
        order = np.lexsort((np.arange(seen), -every[i, :seen]))[:keep]
        assert (chosen[i] == order).all() and (values[i] == every[i, order]).all()
        some = rng.integers(0, seen, 2000)
        rows = from_bf16(keys[table[0, some // a_page], some % a_page]).astype(float)
        dots = np.maximum(from_bf16(to_bf16(query[i])).astype(float) @ rows.T * width ** -0.5, 0)
        exact = weight[i].astype(float) @ dots
        assert np.abs(every[i, some] - exact).max() <= 1e-4
    # a row alone, in other room and other parts: the same bits
    alone = Scoring(pages * a_page + 999, keep, 1).run(query[1:], weight[1:], seats[1:],
                                                       positions[1:], table, keys, kpool, -1, 1)
    assert same(alone, [values[1:], chosen[1:], counts[1:]])


def test_scores_that_are_not_numbers_are_counted():
    keys = np.zeros((4, 16, 32), np.uint16)
    keys[3, 5, 7] = 0x7FC0
    scoring = Scoring(64, 8, 1)
    scoring.run(np.ones((1, 4, 32), np.float32), np.ones((1, 4), np.float32), np.int32([0]),
                np.int32([255]), np.arange(4, dtype=np.int32)[None], keys, 4, -1, 1)
    assert scoring.faults.copy_to_host()[0] == 1


# ---- merge and arrange -------------------------------------------------------------------------

@pytest.mark.parametrize("world, keep, kpool", [(1, 512, 4), (3, 512, 4), (8, 512, 4), (6, 16, 4),
                                                (5, 7, 2)])
def test_merge(world, keep, kpool):
    rng = np.random.default_rng(world)
    n, every = 6, keep * 5
    positions = np.int32([kpool * every + 1, kpool * every - 1, keep * kpool - 1, 0,
                          kpool * (keep + 1) - 1, -1])
    seats = np.int32([0, 1, 2, 3, 4, -1])
    scores, pools = np.zeros((world, n, keep), np.float32), np.zeros((world, n, keep), np.int32)
    counts = np.zeros((world, n), np.int32)
    for i in range(n):
        visible = (positions[i] + 1) // kpool
        if visible > keep:
            drawn = rng.integers(-4, 5, visible).astype(np.float32)
            for w in range(world):
                mine = np.flatnonzero(np.arange(visible) // 3 % world == w)
                mine = mine[np.lexsort((mine, -drawn[mine]))][:keep]
                counts[w, i] = len(mine)
                scores[w, i, :len(mine)], pools[w, i, :len(mine)] = drawn[mine], mine
    lists, lengths = filled((n, keep * kpool + kpool - 1), 9, np.int32), filled(n, 9, np.int32)
    merge.merge(up(scores), up(pools), up(counts), up(seats), up(positions), kpool, lists, lengths,
                STREAM)
    wanted = np.full(lists.shape, -1, np.int32), np.zeros(n, np.int32)
    merge.merge_host(*(np.ascontiguousarray(a[:, :5]) for a in (scores, pools, counts)),
                     positions[:5], kpool, wanted[0][:5], wanted[1][:5])
    assert same(down(lists, lengths), wanted)


@pytest.mark.parametrize("groups, first, count", [(1, 0, 1), (3, 0, 3), (6, 4, 1), (8, 0, 8)])
def test_arrange(groups, first, count):
    rng = np.random.default_rng(groups)
    lengths, seats = np.int32([2051, 0, 700, 1]), np.int32([3, 1, 0, -1])
    lists = np.full((4, 2051), -1, np.int32)
    for i, length in enumerate(lengths):
        lists[i, :length] = np.sort(rng.choice(40_000, length, replace=False))
    order, starts = filled(lists.shape, -9, np.int32), filled((4, count + 1), -9, np.int32)
    merge.arrange(up(lists), up(lengths), up(seats), 64, groups, first, order, starts, STREAM)
    order, starts = down(order, starts)
    for i in range(4):
        row = lists[i, :lengths[i]] if seats[i] >= 0 else lists[i, :0]
        parts = [row[row // 64 % groups == first + g] for g in range(count)]
        assert list(starts[i]) == [0, *np.cumsum([len(p) for p in parts])]
        assert (order[i, :starts[i, -1]] == np.concatenate(parts)).all()


# ---- attend, finish, combine -------------------------------------------------------------------

class Case:
    """Rows with given position lists over few touched pages, NaN wherever nothing is listed."""

    def __init__(self, rng, chosen, heads, width=512, page_rows=64):
        n = len(chosen)
        self.lists = np.full((n, max(map(len, chosen))), -1, np.int32)
        self.lengths = np.int32([len(c) for c in chosen])
        for i, positions in enumerate(chosen):
            self.lists[i, :len(positions)] = positions
        self.seats = rng.permutation(n).astype(np.int32)
        touched = sorted({(s, p // page_rows) for s, c in zip(self.seats, chosen) for p in c})
        self.table = np.full((n, max(p for _, p in touched) + 1), -1, np.int32)
        for local, at in zip(rng.permutation(len(touched)), touched):
            self.table[at] = local
        self.latents = np.full((len(touched), page_rows, width), 0x7FC0, np.uint16)
        for seat, positions in zip(self.seats, chosen):
            p = np.array(positions)
            drawn = rng.standard_normal((len(p), width)).astype(np.float32)
            self.latents[self.table[seat, p // page_rows], p % page_rows] = to_bf16(drawn)
        self.query = 2 * rng.standard_normal((n, heads, width)).astype(np.float32)

    def attend(self, groups, first=0, count=None, rows=slice(None), heads=slice(None), chain=False,
               tiles=None, scratch=False):
        """(out, lse); tiles: bounds of the calls; scratch: pages brought tile by tile."""
        count = groups if count is None else count
        query, lists, lengths, seats = (np.ascontiguousarray(a) for a in (
            self.query[rows, heads], self.lists[rows], self.lengths[rows], self.seats[rows]))
        n, h, width = query.shape
        order, starts = filled(lists.shape, -5, np.int32), filled((n, count + 1), -5, np.int32)
        page_rows = self.latents.shape[1]
        merge.arrange(up(lists), up(lengths), up(seats), page_rows, groups, first, order, starts,
                      STREAM)
        slots = 2 * count if chain else attend_cuda.slots(lists.shape[1], count)
        parts = (filled((slots, n, h, width), np.nan), filled((slots, n, h), np.nan),
                 filled((slots, n, h), np.nan))
        for begin, end in tiles or [(0, END)]:
            table, latents, first_page = self.table, self.latents, 0
            if scratch:
                first_page = begin * attend.TILE // page_rows
                last = end * attend.TILE // page_rows
                table = np.ascontiguousarray(self.table[:, first_page:last])
            attend_cuda.attend(up(query), order, starts, up(seats), up(table), up(latents),
                               self.scale, first_page, begin, end, chain, *parts, STREAM)
        out, lse = filled((count, n, h, width), np.nan), filled((count, n, h), np.nan)
        attend_cuda.finish(*parts, starts, up(seats), chain, out, lse, STREAM)
        return down(out, lse)

    @property
    def scale(self):
        return self.query.shape[2] ** -0.5

    def reference(self, groups):
        n, heads, width = self.query.shape
        page_rows = self.latents.shape[1]
        out, lse = np.zeros((groups, n, heads, width)), np.full((groups, n, heads), -np.inf)
        for i in range(n):
            positions = self.lists[i, :self.lengths[i]]
            for g in range(groups):
                mine = positions[positions // page_rows % groups == g]
                if len(mine):
                    at = self.table[self.seats[i], mine // page_rows], mine % page_rows
                    rows = from_bf16(self.latents[at]).astype(float)
                    s = from_bf16(to_bf16(self.query[i])).astype(float) @ rows.T * self.scale
                    top = s.max(axis=1, keepdims=True)
                    p = np.exp(s - top)
                    out[g, i] = p @ rows / p.sum(axis=1, keepdims=True)
                    lse[g, i] = top[:, 0] + np.log(p.sum(axis=1))
        return out, lse


def draw(rng, *counts, until=20_000):
    return [np.sort(rng.choice(until, c, replace=False)) for c in counts]


@pytest.mark.parametrize("groups", [1, 2, 6, 8])
@pytest.mark.parametrize("heads, width", [(64, 512), (11, 512), (7, 64), (16, 72)])
def test_attend(groups, heads, width):
    rng = np.random.default_rng(heads + groups)
    case = Case(rng, draw(rng, 2051, 1, 300, 128, 129), heads, width)
    out, lse = case.attend(groups)
    exact = case.reference(groups)
    empty = np.isinf(exact[1])
    assert (np.isneginf(lse) == empty).all() and not out[empty].any()
    assert np.abs(out - exact[0]).max() <= 2 ** -7
    assert np.abs(lse[~empty] - exact[1][~empty]).max() <= 2e-5
    # --- the laws
    tiles = [(t, t + 1) for t in range(5)]
    assert same(case.attend(groups, chain=True), (out, lse))
    assert same(case.attend(groups, chain=True, tiles=tiles), (out, lse))
    assert same(case.attend(groups, chain=True, tiles=tiles, scratch=True), (out, lse))
    assert same(case.attend(groups, first=groups - 1, count=1), (out[-1:], lse[-1:]))
    some = slice(heads // 3, heads // 3 + 5)
    assert same(case.attend(groups, heads=some), (out[:, :, some], lse[:, :, some]))
    for i in range(5):
        assert same(case.attend(groups, rows=[i]), (out[:, i:i + 1], lse[:, i:i + 1]))


def test_attend_far_apart_and_padded():
    rng = np.random.default_rng(3)
    case = Case(rng, draw(rng, 500, 40, until=1_000_000), 64)
    out, lse = case.attend(2)
    exact = case.reference(2)
    assert np.abs(out - exact[0]).max() <= 2 ** -7 and np.abs(lse - exact[1]).max() <= 2e-5
    case.seats[1] = -1
    padded = case.attend(2)
    assert same([a[:, :1] for a in padded], [out[:, :1], lse[:, :1]])
    assert not padded[0][:, 1].any() and np.isneginf(padded[1][:, 1]).all()


@pytest.mark.parametrize("groups, heads", [(1, 64), (3, 22), (8, 1)])
def test_combine(groups, heads):
    rng = np.random.default_rng(groups)
    out = rng.standard_normal((groups, 4, heads, 512)).astype(np.float32)
    lse = 3 * rng.standard_normal((groups, 4, heads)).astype(np.float32)
    lse[0, 1], lse[:, 2] = -np.inf, -np.inf
    out[lse == -np.inf] = 0
    merged, mass = filled((4, heads, 512), np.nan), filled((4, heads), np.nan)
    project.combine(up(out), up(lse), merged, mass, STREAM)
    found = down(merged, mass)
    wanted = np.empty((4, heads, 512), np.float32), np.empty((4, heads), np.float32)
    project.combine_host(out, lse, *wanted)
    for a, b in zip(found, wanted):
        assert (np.isneginf(a) == np.isneginf(b)).all()
        assert np.abs(np.where(np.isinf(b), 0, a - b)).max() <= 5e-6
    if groups == 1:
        assert same(found, (out[0], lse[0]))


def test_both_files_have_the_same_tiles():
    assert attend_cuda.TILE == attend.TILE
