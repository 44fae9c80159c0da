# python -m pytest tests/device/test_stages.py
"""The kernels of engine/stages on a CUDA device, against host paths and float64.

Integers (latent bits, tails, lists, selections) are compared in bytes, and so are the laws: a row
alone or in a batch, any subset of heads, one call or tile by tile, spans spread or in a chain.
Tolerances: attention weights are rounded to BF16 (2^-9 each, independent), so outputs of size up
to 4 may be off by 2^-7; scores are float32 sums of products that are exact, pooled keys BF16.
"""

import numpy as np
import pytest

from engine.device import available, cuda
from engine.host import from_bf16, to_bf16
from engine.stages import attend_cuda, insert, merge, project, score, score_cuda

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not available(), reason="no CUDA device answers")]

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
        self.fill, self.faults = filled((batch, 2), 0, np.int32), filled(1, 0, np.int32)

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
                                         ("all zero", 20_000), ("all zero", 3_000),
                                         ("random", 1_000)])
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


# ---- merge -------------------------------------------------------------------------------------

def cut(positions, page_rows, groups, first, count):
    """(order, spans, starts) of ascending positions, as merge.py describes them."""
    order, spans, starts = [], [0], [0]
    for g in range(first, first + count):
        mine = positions[positions // page_rows % groups == g]
        for tile in np.unique(mine // merge.TILE):
            part = mine[mine // merge.TILE == tile]
            for begin in range(0, len(part), merge.SPAN):
                order += list(part[begin:begin + merge.SPAN])
                spans.append(len(order))
        starts.append(len(spans) - 1)
    return np.array(order, np.int64), spans, starts


class Lists:
    """Launches merge for rows of one table each and holds what it wrote, on the device."""

    def __init__(self, found, seats, positions, table, page_rows, kpool, groups, first=0, count=1):
        n, keep = found[0].shape[1:]
        self.width = keep * kpool + kpool - 1
        self.most = merge.spans_at_most(self.width, count, table.shape[1] * page_rows)
        self.all = (filled((n, self.width), -9, np.int32), filled((n, self.most + 1), -9, np.int32),
                    filled((n, count + 1), -9, np.int32))
        merge.merge(*map(up, found), up(seats), up(positions), up(table), page_rows, kpool, groups,
                    first, *self.all, STREAM)

    def check(self, i, positions, row_of, *grouped):
        """Assert that row i lists these positions; row_of: where position p lies."""
        order, spans, starts = (a[i] for a in down(*self.all))
        wanted = cut(np.asarray(positions), *grouped)
        assert list(starts) == wanted[2] and wanted[2][-1] <= self.most
        if len(wanted[0]):
            assert list(spans[:len(wanted[1])]) == wanted[1]
        assert (order[:len(wanted[0])] == row_of[wanted[0]]).all()


@pytest.mark.parametrize("groups, first, count", [(1, 0, 1), (3, 0, 3), (6, 4, 1), (8, 0, 8)])
@pytest.mark.parametrize("world, keep, kpool", [(1, 512, 4), (3, 512, 4), (8, 512, 4), (6, 16, 4),
                                                (5, 7, 2)])
def test_merge(world, keep, kpool, groups, first, count):
    rng = np.random.default_rng(world)
    page_rows, last = 64, 100_000
    positions = np.int32([last, kpool * (keep * 5) - 1, keep * kpool - 1, 0,
                          kpool * (keep + 1) - 1, kpool * (keep + 1), -1])
    n = len(positions)
    seats = np.int32([0, 1, 2, 3, 4, 5, -1])
    scores, pools = np.zeros((world, n, keep), np.float32), np.zeros((world, n, keep), np.int32)
    counts = np.zeros((world, n), np.int32)
    for i in range(n):
        visible = (positions[i] + 1) // kpool
        if visible > keep:
            drawn = rng.integers(-40, 50, visible).astype(np.float32)
            for w in range(world):
                mine = np.flatnonzero(np.arange(visible) // 3 % world == w)
                mine = mine[np.lexsort((mine, -drawn[mine]))][:keep]
                counts[w, i] = len(mine)
                scores[w, i, :len(mine)], pools[w, i, :len(mine)] = drawn[mine], mine
    lists, lengths = np.full((n, keep * kpool + kpool - 1), -1, np.int32), np.zeros(n, np.int32)
    merge.merge_host(*(np.ascontiguousarray(a[:, :-1]) for a in (scores, pools, counts)),
                     positions[:-1], kpool, lists[:-1], lengths[:-1])
    pages = last // page_rows + 1
    table = rng.permutation(n * pages).reshape(n, pages).astype(np.int32)
    found = Lists((scores, pools, counts), seats, positions, table, page_rows, kpool, groups, first,
                  count)
    for i in range(n):
        row_of = (table[i][:, None] * page_rows + np.arange(page_rows)).ravel()
        found.check(i, lists[i, :lengths[i]], row_of, page_rows, groups, first, count)


# ---- attend, finish, combine -------------------------------------------------------------------

KPOOL, KEEP, PAGE = 4, 512, 64


class Case:
    """Rows that list 512 drawn pools and their tail, NaN wherever nothing is listed."""

    def __init__(self, rng, positions, heads, width=512):
        self.positions, n = np.int32(positions), len(positions)
        self.heads, self.width = heads, width
        self.seats = rng.permutation(n).astype(np.int32)
        pages = max(positions) // PAGE + 1
        self.found = (np.zeros((1, n, KEEP), np.float32), np.zeros((1, n, KEEP), np.int32),
                      np.zeros((1, n), np.int32))
        self.listed = []
        for i, position in enumerate(positions):
            visible = (position + 1) // KPOOL
            pools = np.arange(visible)
            if visible > KEEP:
                pools = rng.choice(visible, KEEP, replace=False)
                self.found[1][0, i], self.found[2][0, i] = pools, KEEP
            rows = (np.sort(pools)[:, None] * KPOOL + np.arange(KPOOL)).ravel()
            self.listed.append(np.concatenate([rows, np.arange(visible * KPOOL, position + 1)]))
        touched = sorted({(s, p) for s, rows in zip(self.seats, self.listed) for p in rows // PAGE})
        self.table = np.full((n, pages), -1, np.int32)
        for local, at in zip(rng.permutation(len(touched)), touched):
            self.table[at] = local
        self.latents = np.full((len(touched), PAGE, width), 0x7FC0, np.uint16)
        for seat, p in zip(self.seats, self.listed):
            drawn = rng.standard_normal((len(p), width)).astype(np.float32)
            self.latents[self.table[seat, p // PAGE], p % PAGE] = to_bf16(drawn)
        self.query = 2 * rng.standard_normal((n, heads, width)).astype(np.float32)

    def lists(self, groups, rows, first=0, count=None, in_order=False):
        table = np.broadcast_to(np.arange(self.table.shape[1], dtype=np.int32), self.table.shape)
        found = [np.ascontiguousarray(a[:, rows]) for a in self.found]
        return Lists(found, self.seats[rows], self.positions[rows],
                     table if in_order else self.table, PAGE, KPOOL, groups, first,
                     groups if count is None else count)

    def attend(self, groups, first=0, count=None, rows=slice(None), heads=slice(None), chain=False,
               scratch=False):
        """(merged, lse); scratch: one row, whose pages come in order, tile by tile."""
        lists = self.lists(groups, rows, first, count, scratch)
        query, seats = np.ascontiguousarray(self.query[rows, heads]), up(self.seats[rows])
        n, h, width = query.shape
        count = groups if count is None else count
        many = count if chain else lists.most
        out, top, mass = (filled((many, n, h, width), np.nan), filled((many, n, h), np.nan),
                          filled((many, n, h), np.nan))
        bounds, latents = [(0, 0)], self.latents
        if scratch:
            latents = self.latents[self.table[self.seats[rows][0]]].reshape(-1, width)
            bounds = [(t, t + merge.TILE) for t in range(0, len(latents), merge.TILE)]
        for begin, end in bounds:
            held = latents[begin:end].reshape(-1, PAGE, width) if scratch else latents
            attend_cuda.attend(up(query), *lists.all, seats, up(held), self.scale, begin, end,
                               chain, out, top, mass, STREAM)
        merged, lse = filled((n, h, width), np.nan), filled((n, h), np.nan)
        if chain:
            project.combine(out, top, merged, lse, STREAM)
        else:
            project.finish(out, top, mass, lists.all[2], seats, merged, lse, STREAM)
        return down(merged, lse)

    @property
    def scale(self):
        return self.query.shape[2] ** -0.5

    def reference(self):
        n, heads, width = self.query.shape
        out, lse = np.zeros((n, heads, width)), np.full((n, heads), -np.inf)
        for i, p in enumerate(self.listed):
            rows = from_bf16(self.latents[self.table[self.seats[i], p // PAGE], p % PAGE])
            rows = rows.astype(float)
            s = from_bf16(to_bf16(self.query[i])).astype(float) @ rows.T * self.scale
            top = s.max(axis=1, keepdims=True)
            p = np.exp(s - top)
            out[i], lse[i] = p @ rows / p.sum(axis=1, keepdims=True), top[:, 0] + np.log(p.sum(1))
        return out, lse


@pytest.mark.parametrize("groups, heads, width", [(1, 64, 512), (2, 32, 512), (6, 11, 512),
                                                  (8, 64, 512), (3, 7, 64), (2, 16, 72)])
def test_attend(groups, heads, width):
    rng = np.random.default_rng(heads + groups)
    case = Case(rng, [8999, 5, 3000, 700], heads, width)
    found, exact = case.attend(groups), case.reference()
    assert np.abs(found[0] - exact[0]).max() <= 2 ** -7
    assert np.abs(found[1] - exact[1]).max() <= 2e-5
    # --- the laws
    assert same(case.attend(groups, chain=True), found)
    some = slice(heads // 3, heads // 3 + 5)
    assert same(case.attend(groups, heads=some), [a[:, some] for a in found])
    for i in range(4):
        for chain in (False, True):
            assert same(case.attend(groups, rows=[i], chain=chain), [a[i:i + 1] for a in found])
    many = [i % 4 for i in range(40)]       # more than one span a block
    assert same(case.attend(groups, rows=many), [a[many] for a in found])
    # --- a group alone, then merged with the others, as ranks do it
    parts = [case.attend(groups, g, 1) for g in range(groups)]
    out, lse = (up(np.stack(a)) for a in zip(*parts))
    merged = filled(found[0].shape, np.nan), filled(found[1].shape, np.nan)
    project.combine(out, lse, *merged, STREAM)
    assert same(down(*merged), found)


@pytest.mark.parametrize("heads", [11, 64])
def test_attend_over_tiles_and_padding(heads):
    rng = np.random.default_rng(3)
    case = Case(rng, [99_999, 40_000, 70_003], heads)
    found, exact = case.attend(2), case.reference()
    assert np.abs(found[0] - exact[0]).max() <= 2 ** -7
    assert np.abs(found[1] - exact[1]).max() <= 2e-5
    for i in range(3):
        assert same(case.attend(2, rows=[i], chain=True, scratch=True), [a[i:i + 1] for a in found])
    case.seats[1] = -1
    for chain in (False, True):
        padded = case.attend(2, chain=chain)
        assert same([a[::2] for a in padded], [a[::2] for a in found])
        assert not padded[0][1].any() and np.isneginf(padded[1][1]).all()


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


def test_both_files_have_the_same_spans():
    assert attend_cuda.SPAN == merge.SPAN
