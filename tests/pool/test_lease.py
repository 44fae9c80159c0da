# python -m pytest tests/pool/test_lease.py
"""Pool: leases are all or nothing and return every page once, in every world and placement."""

import dataclasses

import numpy as np
import pytest

from engine.errors import FaultError, RequestError
from engine.pool.lease import REPLICATED, SPLIT, Counts, Pool

WORLDS = range(1, 9)


class PlainPool:
    """A pool that never heard of classes: what one class must equal, id by id."""

    def __init__(self, pages):
        self.free = list(range(pages - 1, -1, -1))

    def grant(self, n):
        return [self.free.pop() for _ in range(n)] if n <= len(self.free) else None

    def release(self, ids):
        self.free.extend(reversed(ids))


def make(world, placement, pages, shuffle=False, seed=0):
    below = 2 if placement == "replicating" else 0
    return Pool(pages, world, "owner" if placement == "owner" else "striped",
                replicated_pages=below, replicated_total=4 * below, shuffle=shuffle, seed=seed)


def ids_of(lease):
    return list(zip(lease.region.tolist(), lease.ids.tolist()))


def test_striped_by_hand():
    pool = Pool(9, 3, "striped", replicated_pages=2, replicated_total=3)
    first = pool.grant(7)
    assert first.owner is None and first.pages == 7
    # pages 0, 1 below R; pages 2.. come from class k % 3, lowest free id of that class first
    assert ids_of(first) == [(REPLICATED, 0), (REPLICATED, 1), (SPLIT, 2), (SPLIT, 0), (SPLIT, 1),
                             (SPLIT, 5), (SPLIT, 3)]
    assert first.ids.dtype == first.region.dtype == np.int32
    assert pool.available() == [1, 2, 1]
    assert pool.grant(2) is None  # one replicated page is left
    assert ids_of(pool.grant(1)) == [(REPLICATED, 2)]
    assert pool.counts() == ((Counts(1, 2, 0, 3), Counts(2, 1, 0, 3), Counts(1, 2, 0, 3)),
                             Counts(0, 3, 0, 3))
    pool.check()


def test_owner_by_hand():
    pool = Pool(8, 3, "owner")  # classes of 3, 3 and 2 pages
    a, b, c, d = (pool.grant(2) for _ in range(4))
    assert [x.owner for x in (a, b, c)] == [0, 1, 2]  # ties go to the lowest rank
    assert [x.ids.tolist() for x in (a, b, c)] == [[0, 3], [1, 4], [2, 5]]
    assert d is None  # one page each in classes 0 and 1: none has two
    assert pool.grant(1).owner == 0 and pool.grant(1).owner == 1 and pool.grant(1) is None
    pool.release(b)
    assert pool.available() == [0, 2, 0]
    assert pool.grant(2).ids.tolist() == [1, 4]  # the same ids in the same order
    pool.check()


@pytest.mark.parametrize("placement", ["striped", "owner"])
def test_one_class_is_the_plain_pool(placement):
    rng = np.random.default_rng(1)
    pool, plain, live = Pool(40, 1, placement), PlainPool(40), []
    for _ in range(2000):
        if live and rng.random() < 0.45:
            lease, ids = live.pop(int(rng.integers(len(live))))
            pool.release(lease)
            plain.release(ids)
        else:
            n = int(rng.integers(1, 12))
            lease, ids = pool.grant(n), plain.grant(n)
            assert (lease is None) == (ids is None)
            if lease is not None:
                assert lease.ids.tolist() == ids
                live.append((lease, ids))
    pool.check()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("placement", ["striped", "replicating", "owner"])
@pytest.mark.parametrize("world", WORLDS)
def test_random_grants_and_releases(world, placement, shuffle):
    """Against a set of free ids: nothing granted twice, the right classes, None only when short."""
    rng = np.random.default_rng(world)
    pool = make(world, placement, 37, shuffle, seed=world)
    free = {(SPLIT, i) for i in range(37)} | {(REPLICATED, i) for i in range(pool.replicated_total)}
    live, granted, refused = [], 0, 0
    for _ in range(300):
        if live and rng.random() < 0.4:
            lease = live.pop(int(rng.integers(len(live))))
            pool.release(lease)
            free |= set(ids_of(lease))
        else:
            n = int(rng.integers(1, 14))
            before = pool.counts()
            lease = pool.grant(n)
            left = [sum(1 for r, i in free if r == SPLIT and i % world == c) for c in range(world)]
            if placement == "owner":
                fits = max(left) >= n
            else:
                want = [sum(1 for k in range(pool.replicated_pages, n) if k % world == c)
                        for c in range(world)]
                fits = all(w <= a for w, a in zip(want, left)) and min(
                    n, pool.replicated_pages) <= sum(1 for r, _ in free if r == REPLICATED)
            assert (lease is not None) == fits
            if lease is None:
                refused += 1
                assert pool.counts() == before
            else:
                got = ids_of(lease)
                assert len(set(got)) == n and set(got) <= free
                for k, (region, page_id) in enumerate(got):
                    assert region == (REPLICATED if k < pool.replicated_pages else SPLIT)
                    if region == SPLIT:
                        owner = left.index(max(left)) if placement == "owner" else k % world
                        assert page_id % world == owner
                free -= set(got)
                live.append(lease)
                granted += 1
        pool.check()
    assert refused > 20 and granted > 20


@pytest.mark.parametrize("placement", ["striped", "replicating", "owner"])
@pytest.mark.parametrize("world", WORLDS)
def test_filled_and_refilled_three_times_to_the_last_page(world, placement):
    pages = 4 * world
    pool = make(world, placement, pages)
    rounds = []
    for _ in range(3):
        leases = []
        while (lease := pool.grant(world if placement == "striped" else 2 + (
                placement == "replicating"))) is not None:
            leases.append(lease)
        taken = [x for lease in leases for x in ids_of(lease)]
        assert len(set(taken)) == len(taken)
        if placement != "replicating":
            assert sorted(i for _, i in taken) == list(range(pages))  # the last page too
            assert pool.available() == [0] * world and pool.grant(1) is None
        else:
            assert sorted(i for r, i in taken if r == REPLICATED) == list(range(8))
        rounds.append(taken)
        pool.check()
        for lease in reversed(leases):
            pool.release(lease)
        pool.check()
    assert rounds[0] == rounds[1] == rounds[2]


def test_a_window_of_1_048_576_tokens_under_both_placements():
    """page_rows 512, two ranks, 2,056 pages: a 2,049-page window."""
    pool = Pool(2056, 2, "owner")
    assert not pool.could_ever_fit(2049) and pool.grant(2049) is None
    with pytest.raises(RequestError) as caught:
        pool.refusal(2049)
    text, hint = str(caught.value), caught.value.hint
    assert "needs 2049 pages, all of one class" in text and "a class has 1028 pages" in text
    assert "--placement striped would fit it (1025 pages a class)" in hint
    assert "at least 4097 pages" in hint  # (2049 - 1) * 2 + 1
    assert Pool(4097, 2, "owner").grant(2049).owner == 0
    assert pool.counts()[0] == (Counts(1028, 0, 0, 1028),) * 2  # refusing changed nothing
    assert pool.could_ever_fit(1028) and pool.refusal(1028) is None

    pool = Pool(2056, 2, "striped")
    assert pool.could_ever_fit(2049) and pool.refusal(2049) is None
    window = pool.grant(2049)
    assert pool.counts()[0] == (Counts(3, 1025, 0, 1028), Counts(4, 1024, 0, 1028))
    assert pool.grant(2049) is None  # one at a time
    pool.release(window)
    assert pool.grant(2049) is not None


def test_four_windows_of_131_072_tokens():
    """page_rows 512, two ranks: 257 pages a window, 514 a class under owner."""
    pool = Pool(1028, 2, "owner")
    assert [pool.grant(257).owner for _ in range(4)] == [0, 1, 0, 1]
    assert pool.counts()[0] == (Counts(0, 514, 0, 514),) * 2 and pool.grant(1) is None
    # striped, page 0 of all four lies in class 0, which so takes one page a window more
    pool = Pool(1031, 2, "striped")
    assert all(pool.grant(257) for _ in range(4))
    assert pool.counts()[0] == (Counts(0, 516, 0, 516), Counts(3, 512, 0, 515))
    pool = Pool(1028, 2, "striped")
    assert [pool.grant(257) is not None for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("placement", ["striped", "replicating", "owner"])
@pytest.mark.parametrize("world", WORLDS)
def test_what_could_ever_fit_is_what_an_empty_pool_grants(world, placement):
    for total in (0, 1, world, 11):
        for pages in range(1, 2 * 11):
            pool = make(world, placement, total)
            fits = pool.could_ever_fit(pages)
            assert fits == (pool.grant(pages) is not None)
            if not fits:
                with pytest.raises(RequestError) as caught:
                    pool.refusal(pages)
                assert str(pages) in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("pool", [
    Pool(8, 1, "striped"), Pool(8, 3, "striped"), Pool(8, 2, "owner"), Pool(7, 3, "owner"),
    Pool(7, 3, "striped", replicated_pages=2, replicated_total=4),
    Pool(7, 3, "striped", replicated_pages=4, replicated_total=1), Pool(1, 2, "owner")])
def test_the_longest_conversation_is_the_last_that_is_not_refused(pool):
    longest = max((n for n in range(1, 20) if pool.could_ever_fit(n)), default=0)
    assert pool.longest() == longest
    with pytest.raises(RequestError):
        pool.refusal(longest + 1)


def test_refusal_of_a_stripe_and_of_the_replicated_region():
    with pytest.raises(RequestError) as caught:
        Pool(8, 3, "striped").refusal(9)  # classes of 3, 3, 2 against 3, 3, 3
    assert "3 of class 2; a class has 2 pages (8 in 3 classes, placement striped)" in str(
        caught.value)
    assert "at least 9 pages" in caught.value.hint
    with pytest.raises(RequestError) as caught:
        Pool(8, 2, "striped", replicated_pages=4, replicated_total=3).refusal(5)
    assert "needs 4 replicated pages of its 5; the replicated region has 3" in str(caught.value)
    with pytest.raises(RequestError) as caught:
        Pool(8, 1, "striped").refusal(9)
    assert "a class has 8 pages (8 in 1 class, placement striped)" in str(caught.value)


def test_a_lease_is_released_once_and_by_its_own_pool():
    pool, other = Pool(8, 2, "owner"), Pool(8, 2, "owner")
    lease, _ = pool.grant(2), other.grant(2)
    with pytest.raises(AssertionError):
        other.release(lease)
    other.check()
    pool.release(lease)
    with pytest.raises(AssertionError):
        pool.release(lease)
    pool.check()
    assert pool.available() == [4, 4]


def test_a_lease_cannot_be_changed():
    lease = Pool(8, 2, "owner").grant(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lease.owner = 1
    for array in (lease.ids, lease.region):
        with pytest.raises(ValueError):
            array[0] = 1


def test_shuffled_order_is_seeded_and_is_an_order():
    def order(seed, shuffle=True):
        pool = Pool(64, 2, "striped", replicated_pages=8, replicated_total=8, shuffle=shuffle,
                    seed=seed)
        pool.release(pool.grant(20))
        return ids_of(pool.grant(72))

    plain = order(0, shuffle=False)
    assert order(7) == order(7) != order(8) and order(7) != plain
    assert sorted(order(7)) == sorted(plain) == [(0, i) for i in range(8)] + [
        (1, i) for i in range(64)]
    assert all(i % 2 == k % 2 for k, (_, i) in enumerate(order(7)) if k >= 8)


@pytest.mark.parametrize("damage, where, what", [
    (lambda p, lease: p._free[1].ids.append(int(lease.ids[1])), "class 1 of 3", r"twice \[1\]"),
    (lambda p, lease: p._free[2].ids.pop(), "class 2 of 3", r"missing \[5\]"),
    (lambda p, lease: p._free[0].ids.append(1), "class 0 of 3", "2 free \\+ 2 leased, 3 in all"),
    (lambda p, lease: p._leases.clear(), "class 0 of 3", "1 free \\+ 0 leased, 3 in all"),
    (lambda p, lease: p._free_replicated.ids.append(0), "the replicated region", r"twice \[0\]"),
])
def test_check_finds_a_page_lost_or_doubled(damage, where, what):
    pool = Pool(8, 3, "striped", replicated_pages=0, replicated_total=2)
    lease = pool.grant(5)  # ids 0 1 2 3 4 -> classes 0 1 2 0 1; the replicated region stays free
    pool.check()
    damage(pool, lease)
    with pytest.raises(FaultError, match=what) as caught:
        pool.check()
    assert where in str(caught.value)
