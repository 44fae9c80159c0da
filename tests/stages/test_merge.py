# python -m pytest tests/stages/test_merge.py
"""Stage 3: lists against a NumPy sort of all candidates; all of it integers, compared as bytes.

The last tests run stages 2 and 3 together: pages split over W ranks give the unsplit lists.
"""

import numpy as np
import pytest

from engine.stages.merge import merge_host
from engine.stages.score import score_host

KPOOL = 4
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 6, 8])


def merge(scores, pools, counts, positions, kpool=KPOOL):
    n, keep = scores.shape[1:]
    lists, lengths = np.full((n, keep * kpool + kpool - 1), -9, np.int32), np.full(n, -9, np.int32)
    merge_host(scores, pools, counts, positions, kpool, lists, lengths)
    return lists, lengths


def deal(rng, row_scores, world, keep):
    """Each row's scores, by pool, dealt over ranks at random -> candidates, garbage past counts."""
    n = len(row_scores)
    scores = np.full((world, n, keep), np.inf, np.float32)
    pools = np.full((world, n, keep), 1 << 30, np.int32)
    counts = np.zeros((world, n), np.int32)
    for i, values in enumerate(row_scores):
        holder = rng.integers(0, world, len(values))
        for w in range(world):
            mine = np.flatnonzero(holder == w)
            best = mine[np.lexsort((mine, -values[mine]))][:keep]
            counts[w, i] = len(best)
            scores[w, i, :len(best)], pools[w, i, :len(best)] = values[best], best
    return scores, pools, counts


def expected(row_scores, positions, keep, kpool=KPOOL):
    lists = np.full((len(positions), keep * kpool + kpool - 1), -1, np.int32)
    lengths = np.zeros(len(positions), np.int32)
    for i, (values, position) in enumerate(zip(row_scores, positions)):
        best = np.lexsort((np.arange(len(values)), -values))[:keep]
        pool = np.arange(position + 1) // kpool
        chosen = np.flatnonzero(np.isin(pool, best) | (pool == (position + 1) // kpool))
        lists[i, :len(chosen)], lengths[i] = chosen, len(chosen)
    return lists, lengths


def same(got, want):
    return [a.tobytes() for a in got] == [a.tobytes() for a in want]


def test_by_hand():
    # position 14 sees pools 0, 1, 2 (15 // 4) and has the raw tail 12, 13, 14; 2 pools are kept.
    # rank 0: pool 2 at 0.9, pool 0 at 0.5; rank 1: pool 1 at 0.5. 2 first, then 0 by its index
    scores = np.array([[[0.9, 0.5]], [[0.5, np.nan]]], np.float32)
    pools = np.array([[[2, 0]], [[1, -5]]], np.int32)
    lists, lengths = merge(scores, pools, np.array([[2], [1]], np.int32), np.array([14], np.int32))
    assert lengths.tolist() == [11]
    assert lists.tolist() == [[0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14]]
    # position 12 has a tail of one and two -1 at the end
    lists, lengths = merge(scores, pools, np.array([[2], [1]], np.int32), np.array([12], np.int32))
    assert lengths.tolist() == [9]
    assert lists.tolist() == [[0, 1, 2, 3, 8, 9, 10, 11, 12, -1, -1]]


@WORLDS
@pytest.mark.parametrize("keep, most", [(1, 60), (7, 200), (512, 6000)])
@pytest.mark.parametrize("ties", [False, True])
def test_reference(world, keep, most, ties):
    rng = np.random.default_rng(world * 1000 + keep)
    positions = np.sort(rng.integers((keep + 1) * KPOOL - 1, most, 5)).astype(np.int32)
    row_scores = [rng.standard_normal((p + 1) // KPOOL, np.float32) for p in positions]
    if ties:
        row_scores = [np.round(r) * np.float32(rng.choice([0, 1])) for r in row_scores]
    got = merge(*deal(rng, row_scores, world, keep), positions)
    assert same(got, expected(row_scores, positions, keep))


@WORLDS
def test_who_holds_a_pool_does_not_matter(world):
    rng = np.random.default_rng(world)
    positions = np.array([900, 901, 1203], np.int32)
    row_scores = [np.round(rng.standard_normal((p + 1) // KPOOL) * 2).astype(np.float32)
                  for p in positions]
    alone = merge(*deal(rng, row_scores, 1, 40), positions)
    for _ in range(5):
        assert same(merge(*deal(rng, row_scores, world, 40), positions), alone)


def test_ranks_in_any_order_and_rows_in_any_batch():
    rng = np.random.default_rng(1)
    positions = np.array([30, 900, 901, 1203], np.int32)
    row_scores = [np.round(rng.standard_normal((p + 1) // KPOOL)).astype(np.float32)
                  for p in positions]
    candidates = deal(rng, row_scores, 3, 20)
    whole = merge(*candidates, positions)
    turned = [np.ascontiguousarray(a[[2, 0, 1]]) for a in candidates]
    assert same(merge(*turned, positions), whole)
    for i in range(4):
        part = merge(*(np.ascontiguousarray(a[:, i:i + 1]) for a in candidates), positions[i:i + 1])
        assert same(part, [a[i:i + 1] for a in whole])


@pytest.mark.parametrize("keep", [1, 5, 512])
def test_up_to_as_many_pools_as_are_kept_the_list_is_the_identity(keep):
    # no candidate is needed: those given are garbage
    positions = np.array([0, 2, 3, keep * KPOOL - 1, keep * KPOOL + 2], np.int32)
    garbage = (np.full((2, 5, keep), np.nan, np.float32), np.full((2, 5, keep), -3, np.int32),
               np.zeros((2, 5), np.int32))
    lists, lengths = merge(*garbage, positions)
    assert lengths.tolist() == (positions + 1).tolist()
    for i, p in enumerate(positions):
        assert lists[i, :p + 1].tolist() == list(range(p + 1)) and (lists[i, p + 1:] == -1).all()
    assert lengths[4] == lists.shape[1]                 # the widest list there is


@pytest.mark.parametrize("keep", [1, 5, 512])
def test_one_pool_more_than_is_kept(keep):
    # the worst of keep + 1 pools is the first one, or the last one: exactly its 4 positions go
    position = np.array([(keep + 1) * KPOOL - 1], np.int32)
    for worst in (0, keep):
        values = np.ones(keep + 1, np.float32)
        values[worst] = 0
        lists, lengths = merge(*deal(np.random.default_rng(2), [values], 2, keep), position)
        left = [p for p in range(position[0] + 1) if p // KPOOL != worst]
        assert lists[0, :lengths[0]].tolist() == left and lengths[0] == keep * KPOOL


def test_all_tied_the_lowest_pools_are_kept():
    position, values = np.array([401], np.int32), np.zeros(100, np.float32)
    lists, lengths = merge(*deal(np.random.default_rng(3), [values], 3, 10), position)
    assert lists[0, :lengths[0]].tolist() == [*range(40), 400, 401]


def test_negative_zero_is_zero_and_infinities_have_a_place():
    # P = 3 of 5 pools. -0.0 of pool 4 ties with 0.0 of pool 3, whichever rank comes first
    for first, second in ((-0.0, 0.0), (0.0, -0.0)):
        scores = np.array([[[np.inf, second, -1]], [[first, -np.inf, 0]]], np.float32)
        pools = np.array([[[2, 4, 0]], [[3, 1, 0]]], np.int32)
        lists, _ = merge(scores, pools, np.array([[3], [2]], np.int32), np.array([19], np.int32))
        assert lists[0, ::KPOOL].tolist() == [8, 12, 16, -1]
        two = [np.ascontiguousarray(a[:, :, :2]) for a in (scores, pools)]
        lists, _ = merge(*two, np.array([[2], [2]], np.int32), np.array([19], np.int32))
        assert lists[0, ::KPOOL].tolist() == [8, 12, -1]


def test_ranks_without_candidates():
    rng = np.random.default_rng(4)
    position, values = np.array([405], np.int32), rng.standard_normal(101).astype(np.float32)
    one = deal(rng, [values], 1, 10)
    padded = [np.concatenate([np.zeros_like(a), a, np.zeros_like(a)]) for a in one]
    assert same(merge(*padded, position), merge(*one, position))


def test_the_last_position_of_a_million():
    position, values = np.array([1048575], np.int32), np.zeros(262144, np.float32)
    values[[0, 262143, 131072]] = 1
    lists, lengths = merge(*deal(np.random.default_rng(5), [values], 2, 3), position)
    assert lists[0, :lengths[0]].tolist() == [0, 1, 2, 3, *range(524288, 524292),
                                              *range(1048572, 1048576)]


@pytest.mark.parametrize("kpool", [1, 2, 8])
def test_other_pool_sizes(kpool):
    rng = np.random.default_rng(kpool)
    positions = np.arange(12 * kpool, 14 * kpool, dtype=np.int32)
    row_scores = [np.round(rng.standard_normal((p + 1) // kpool)).astype(np.float32)
                  for p in positions]
    got = merge(*deal(rng, row_scores, 3, 6), positions, kpool)
    assert same(got, expected(row_scores, positions, 6, kpool))


def test_no_rows():
    lists, lengths = merge(np.zeros((2, 0, 5), np.float32), np.zeros((2, 0, 5), np.int32),
                           np.zeros((2, 0), np.int32), np.zeros(0, np.int32))
    assert lists.shape == (0, 23) and lengths.shape == (0,)


@WORLDS
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("page_rows, keep, whole", [(64, 30, True), (64, 30, False),
                                                    (512, 512, False)])
def test_pages_split_over_ranks_give_the_unsplit_lists(world, dtype, page_rows, keep, whole):
    # each rank has only its own pages (k % world), others' table entries are -1. `whole` numbers
    # tie often, at zero most of all
    rng = np.random.default_rng(world)
    pages, heads, dim = 3000 // page_rows + 1, 3, 16
    positions = np.array([100, 2100, 2101, 2999], np.int32)

    def draw(*shape):
        drawn = rng.integers(-1, 2, shape) if whole else rng.standard_normal(shape)
        return drawn.astype(np.float32)

    keys = draw(pages, page_rows // KPOOL, dim)
    if dtype == np.uint16:
        keys = (keys.view(np.uint32) >> 16).astype(np.uint16)
    query, weight, seats = draw(4, heads, dim), draw(4, heads), np.zeros(4, np.int32)

    def candidates(table, held, group, groups):
        out = (np.zeros((4, keep), np.float32), np.zeros((4, keep), np.int32),
               np.zeros(4, np.int32))
        assert score_host(query, weight, seats, positions, np.array([table], np.int32), held, KPOOL,
                          group, groups, *out) == 0
        return out

    alone = candidates(range(pages), keys, -1, 1)
    unsplit = merge(*(a[None] for a in alone), positions)
    parts = []
    for rank in range(world):
        table = [k // world if k % world == rank else -1 for k in range(pages)]
        parts.append(candidates(table, np.ascontiguousarray(keys[rank::world]), rank, world))
    assert same(merge(*(np.stack(a) for a in zip(*parts)), positions), unsplit)
    assert (unsplit[1] == [101 if keep == 512 else min(101, keep * KPOOL + 1),
                           *(keep * KPOOL + (p + 1) % KPOOL for p in positions[1:])]).all()
