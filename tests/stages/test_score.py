# python -m pytest tests/stages/test_score.py
"""Stage 2: scores against float64, lists against a NumPy sort in the total order, laws in bytes.

The lists of a stage must be exact, so its scores are also replayed in float32 in the documented
order (d ascending, then heads ascending), which elementwise NumPy does to the bit: scores, order
and ties are compared as bytes. Tolerance against float64: sums of 128 and of 32 terms, whose
partial sums have a size up to 9, round by about sqrt(128 + 32) * 2^-24 * 5 = 4e-6: 1e-5 is asked
(seen: 2e-6).
"""

from typing import NamedTuple

import numpy as np
import pytest

from engine.stages.score import ROWS, order_key, order_score, score_host

KPOOL = 4
CLOSE = 1e-5
NAN = {np.uint16: 0x7FC0, np.float32: np.nan}
DTYPES = pytest.mark.parametrize("dtype", [np.uint16, np.float32])


class Case(NamedTuple):
    query: np.ndarray
    weight: np.ndarray
    seats: np.ndarray
    positions: np.ndarray
    table: np.ndarray
    keys: np.ndarray

    def rows(self, chosen):
        return self._replace(**{name: np.ascontiguousarray(getattr(self, name)[chosen])
                                for name in ("query", "weight", "seats", "positions")})


class Found(NamedTuple):
    faults: int
    scores: np.ndarray
    pools: np.ndarray
    counts: np.ndarray

    def everything(self):
        return [a.tobytes() for a in self[1:]]


def make(rng, dtype, rows, heads, dim, page_rows, whole=False):
    """Rows [(seat, position)]; keys that no row sees are NaN. `whole`: small integers."""
    seats, positions = np.array(rows, np.int32).reshape(-1, 2).T
    a_page = page_rows // KPOOL
    seen = [max([(p + 1) // KPOOL for s, p in rows if s == seat], default=0)
            for seat in range(max(seats, default=0) + 1)]
    pages = [-(-s // a_page) for s in seen]
    table = np.full((len(seen), max(pages) + 2), -1, np.int32)
    local = rng.permutation(sum(pages)).astype(np.int32)
    keys = np.full((len(local), a_page, dim), NAN[dtype], dtype)

    def draw(*shape):
        if whole:
            return rng.integers(-1, 2, shape).astype(np.float32)
        return rng.standard_normal(shape).astype(np.float32)

    for seat, count in enumerate(pages):
        table[seat, :count], local = local[:count], local[count:]
        drawn = draw(seen[seat], dim)
        stored = (drawn.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else drawn
        for pool, row in enumerate(stored):
            keys[table[seat, pool // a_page], pool % a_page] = row
    n = len(rows)
    return Case(draw(n, heads, dim), draw(n, heads) / np.float32(2), np.ascontiguousarray(seats),
                np.ascontiguousarray(positions), table, keys)


def score(case, keep, group=-1, groups=1):
    n = len(case.positions)
    out = np.full((n, keep), np.nan, np.float32), np.full((n, keep), -7, np.int32)
    counts = np.full(n, -7, np.int32)
    faults = score_host(*case, KPOOL, group, groups, *out, counts)
    return Found(faults, *out, counts)


def seen_keys(case, i):
    """(pool indices, their keys as float32) that row i sees."""
    a_page = case.keys.shape[1]
    pools = np.arange((case.positions[i] + 1) // KPOOL)
    keys = case.keys[case.table[case.seats[i], pools // a_page], pools % a_page]
    if keys.dtype == np.uint16:
        keys = (keys.astype(np.uint32) << 16).view(np.float32)
    return pools, keys


def replayed(case, i, keys):
    """Scores of row i in float32, in the documented order."""
    query, weight = case.query[i], case.weight[i]
    dots = np.zeros((len(query), len(keys)), np.float32)
    for d in range(query.shape[1]):
        dots += query[:, d, None] * keys[:, d]
    scale = np.float32(1) / np.sqrt(np.float32(query.shape[1]))
    total = np.zeros(len(keys), np.float32)
    for h in range(len(query)):
        total += weight[h] * np.maximum(dots[h] * scale, np.float32(0))
    return total


def expected(case, keep, group=-1, groups=1):
    n, a_page = len(case.positions), case.keys.shape[1]
    want = Found(0, np.full((n, keep), np.nan, np.float32), np.full((n, keep), -7, np.int32),
                 np.zeros(n, np.int32))
    for i in range(n):
        pools, keys = seen_keys(case, i)
        if len(pools) <= keep:
            continue
        mine = np.flatnonzero((group < 0) | (pools // a_page % groups == group))
        scores = replayed(case, i, keys[mine])
        best = np.lexsort((mine, -scores))[:keep]
        want.counts[i] = len(best)
        want.scores[i, :len(best)], want.pools[i, :len(best)] = scores[best], mine[best]
    return want


def same(found, want):
    return found.faults == want.faults and found.everything() == want.everything()


def test_by_hand():
    # 2 heads of width 4, so dots are halved. q0 = (2, 0, 0, 0), q1 = (0, 2, 0, 0), weights 1, -3
    # pool: key       head 0   head 1 (ReLU)      score
    # 0  (1, 0, ..)      1         0                1
    # 1  (-1, 0, ..)     0         0                0
    # 2  (5, 1, ..)      5         1            5 - 3 = 2
    # 3  (0, 1, ..)      0         1               -3
    # 4  (1, -9, ..)     1         0                1       ties with pool 0
    # position 20 sees pools 0 .. 4 (21 // 4 = 5); position 15 sees 0 .. 3
    keys = np.full((1, 16, 4), np.nan, np.float32)
    keys[0, :5] = [[1, 0, 0, 0], [-1, 0, 0, 0], [5, 1, 0, 0], [0, 1, 0, 0], [1, -9, 0, 0]]
    query = np.zeros((2, 2, 4), np.float32)
    query[:, 0, 0] = query[:, 1, 1] = 2
    case = Case(query, np.array([[1, -3]] * 2, np.float32), np.zeros(2, np.int32),
                np.array([15, 20], np.int32), np.zeros((1, 1), np.int32), keys)
    found = score(case, 3)
    assert found.faults == 0 and found.counts.tolist() == [3, 3]
    assert found.scores.tolist() == [[2, 1, 0], [2, 1, 1]]
    assert found.pools.tolist() == [[2, 0, 1], [2, 0, 4]]


SIZES = pytest.mark.parametrize("rows, heads, dim, page_rows, keep", [
    ([(0, 2055), (0, 2500), (0, 3999)], 32, 128, 64, 512),
    ([(0, 4003), (1, 2600)], 32, 128, 512, 512),
    ([(0, 40), (0, 41), (1, 900), (2, 99), (2, 250)], 3, 7, 64, 9),
    ([(0, p) for p in range(100, 200)], 2, 5, 64, 13),
    ([(0, 19_999)], 1, 16, 512, 40)])


@SIZES
@DTYPES
def test_reference(rows, heads, dim, page_rows, keep, dtype):
    case = make(np.random.default_rng(0), dtype, rows, heads, dim, page_rows)
    found = score(case, keep)
    assert same(found, expected(case, keep))
    for i in range(0, len(rows), 7):
        pools, keys = seen_keys(case, i)
        dots = case.query[i].astype(np.float64) @ keys.T.astype(np.float64)
        exact = case.weight[i].astype(np.float64) @ np.maximum(dots / np.sqrt(dim), 0)
        count = found.counts[i]
        assert count == (keep if len(pools) > keep else 0)
        assert np.abs(found.scores[i, :count] - exact[found.pools[i, :count]]).max() < CLOSE
        assert np.abs(found.scores[i, :count] - np.sort(exact)[::-1][:count]).max() < CLOSE


@DTYPES
@pytest.mark.parametrize("groups", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("page_rows", [64, 512])
def test_a_group_keeps_the_best_of_its_own_pages(dtype, groups, page_rows):
    case = make(np.random.default_rng(1), dtype, [(0, 1800), (0, 1801), (1, 600), (1, 2047)], 3, 9,
                page_rows)
    a_page = page_rows // KPOOL
    for group in range(groups):
        held = case.table.copy()
        held[:, np.arange(held.shape[1]) % groups != group] = -1     # others' pages are not here
        found = score(case._replace(table=held), 50, group, groups)
        assert same(found, expected(case, 50, group, groups))
        for i, count in enumerate(found.counts):
            assert (found.pools[i, :count] // a_page % groups == group).all()


@DTYPES
def test_any_batch_gives_the_same_bytes(dtype):
    # more than ROWS rows of one seat, then others, one of them again the first seat's
    rng = np.random.default_rng(2)
    rows = [(0, p) for p in range(240, 250 + ROWS * 2)] + [(1, 700)] + [(0, 800)] + [(2, 90)]
    case = make(rng, dtype, rows, 4, 24, 64)
    whole = score(case, 40)
    assert same(whole, expected(case, 40))
    for size in (1, 2, 31, ROWS, ROWS + 1):
        for start in range(0, len(rows), size):
            part = score(case.rows(slice(start, start + size)), 40)
            for a, b in zip(part[1:], whole[1:]):
                assert a.tobytes() == b[start:start + size].tobytes()


@DTYPES
def test_page_order_and_unwritten_pages_do_not_matter(dtype):
    rng = np.random.default_rng(3)
    case = make(rng, dtype, [(0, 1000), (1, 1500)], 4, 24, 64)
    order = rng.permutation(len(case.keys) + 5).astype(np.int32)
    keys = np.full((len(order), *case.keys.shape[1:]), NAN[dtype], dtype)
    keys[order[:len(case.keys)]] = case.keys
    table = np.where(case.table < 0, -1, order[case.table]).astype(np.int32)
    moved = score(case._replace(table=table, keys=keys), 100)
    assert moved.everything() == score(case, 100).everything() and moved.faults == 0


@pytest.mark.parametrize("keep", [1, 3, 64, 400])
@pytest.mark.parametrize("seed", range(4))
def test_total_order_among_many_ties(keep, seed):
    rng = np.random.default_rng(seed)
    case = make(rng, np.float32, [(0, 1650), (0, 3999)], 2, 4, 64, whole=True)
    found = score(case, keep)
    assert same(found, expected(case, keep))
    if keep == 400:
        assert len(np.unique(found.scores[1])) < 40         # ties there were


@DTYPES
@pytest.mark.parametrize("weight", [0.0, -0.0, -1.0, 1.0])
def test_all_tied_at_zero_the_index_decides(dtype, weight):
    # every dot is negative, ReLU makes all zero; 0 times a negative weight is -0.0 and counts as 0
    case = make(np.random.default_rng(4), dtype, [(0, 1000)], 2, 8, 64)
    case.keys[:] = 0x3F80 if dtype == np.uint16 else 1
    case.query[:], case.weight[:] = -1, weight
    found = score(case, 33)
    assert found.pools[0].tolist() == list(range(33))
    assert found.scores.tobytes() == bytes(found.scores.nbytes)     # +0.0 each


@DTYPES
def test_exactly_as_many_pools_as_are_kept(dtype):
    # 128 pools fill position 511 and are all kept up to position 514; at 515 there are 129
    case = make(np.random.default_rng(5), dtype, [(0, 510), (0, 511), (0, 514), (0, 515)], 2, 8, 64)
    found = score(case, 128)
    assert found.counts.tolist() == [0, 0, 0, 128]
    assert same(found, expected(case, 128))


def test_infinite_scores_are_ordered():
    # one head of width 1; 1e30 * 1e30 overflows to inf, with weight -1 to -inf; neither is a fault
    keys = np.full((1, 16, 1), np.nan, np.float32)
    keys[0, :6, 0] = [1, 1e30, 0, 1e30, 2, -1]
    for weight, pools in ((1, [1, 3, 4]), (-1, [2, 5, 0])):
        case = Case(np.full((1, 1, 1), 1e30, np.float32), np.full((1, 1), weight, np.float32),
                    np.zeros(1, np.int32), np.array([23], np.int32), np.zeros((1, 1), np.int32),
                    keys)
        found = score(case, 3)
        assert found.faults == 0 and found.pools[0].tolist() == pools
    last = score(case, 5)
    assert last.pools[0].tolist() == [2, 5, 0, 4, 1] and last.scores[0, 4] == -np.inf


@DTYPES
def test_nan_scores_are_counted(dtype):
    rng = np.random.default_rng(6)
    case = make(rng, dtype, [(0, 399), (0, 403), (1, 300)], 2, 8, 64)
    assert score(case, 10).faults == 0
    keys = case.keys.copy()
    keys[case.table[0, 0], 3, 5] = NAN[dtype]            # pool 3, seen by both rows of seat 0
    keys[case.table[0, 100 // 16], 100 % 16, 0] = NAN[dtype]    # pool 100, seen from 403 on
    assert score(case._replace(keys=keys), 10).faults == 3
    assert score(case._replace(keys=keys), 100).faults == 2     # a row of 100 pools keeps all
    query = case.query.copy()
    query[2, 1, 7] = np.nan                              # every one of the 75 pools of that row
    assert score(case._replace(query=query), 10).faults == 75
    weight = case.weight.copy()
    weight[2, 0] = np.nan
    assert score(case._replace(weight=weight), 10).faults == 75


@DTYPES
def test_nothing_to_score(dtype):
    case = make(np.random.default_rng(7), dtype, [(0, 400)], 2, 8, 64)
    none = score(case.rows(slice(0, 0)), 10)
    assert none.faults == 0 and len(none.counts) == 0
    # a group with no page, and a rank with no page that only keeps what it sees
    assert score(case, 10, 7, 8).counts.tolist() == [0]
    bare = case._replace(table=np.full_like(case.table, -1), keys=case.keys[:0])
    assert score(bare, 100).counts.tolist() == [0] == score(bare, 10, 7, 8).counts.tolist()


@DTYPES
def test_the_last_pool_of_the_last_page(dtype):
    # the winner sits at the very end of the page table; one position earlier it is not yet seen
    case = make(np.random.default_rng(8), dtype, [(0, 1022), (0, 1023)], 1, 4, 512)
    case = case._replace(table=np.ascontiguousarray(case.table[:, :2]))
    case.query[:], case.weight[:] = 1, 1
    case.keys[case.table[0, 1], 127] = 0x4300 if dtype == np.uint16 else 128     # 128 in BF16
    found = score(case, 8)
    assert found.pools[1, 0] == 255 and found.scores[1, 0] == 256       # 4 * 128 / 2
    assert 255 not in found.pools[0] and found.faults == 0


def test_order_keys_of_special_numbers():
    tiny, huge = np.float32(1e-45), np.float32(3.4028235e38)
    descending = [np.inf, huge, 1.5, 1.0, tiny, 0.0, -tiny, -1.0, -1.5, -huge, -np.inf]
    last = -1
    for value in np.array(descending, np.float32):
        for pool in (0, 1, 2 ** 31 - 1):
            key = int(order_key(value, pool))
            assert key > last and key & 0xFFFFFFFF == pool
            last = key
            assert np.float32(order_score(np.uint64(key))).tobytes() == value.tobytes()
    assert order_key(np.float32(-0.0), 5) == order_key(np.float32(0.0), 5)


def test_order_keys_sort_as_lexsort():
    rng = np.random.default_rng(9)
    scores = rng.integers(0, 2 ** 32, 4000, np.uint32).view(np.float32)
    tied = rng.integers(-3, 4, 2000).astype(np.float32)
    scores = np.concatenate([scores[~np.isnan(scores)], tied])
    pools = rng.permutation(len(scores)).astype(np.int32)
    keys = np.array([order_key(s, p) for s, p in zip(scores, pools)], np.uint64)
    assert (np.argsort(keys) == np.lexsort((pools, -scores))).all()
