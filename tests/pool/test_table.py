# python -m pytest tests/pool/test_table.py
"""PageTable: every page is at one place of one rank, or at the same place of all."""

import numpy as np
import pytest

from engine.errors import ResidueMismatch
from engine.pool.lease import REPLICATED, SPLIT, Lease, Pool
from engine.pool.page import rank_pages
from engine.pool.table import ABSENT, EVERY_RANK, NO_PAGE, PageTable


def lease_of(pages, owner=None):
    region, ids = np.array(pages, np.int32).T
    return Lease(0, owner, region, ids)


def test_striped_by_hand():
    lease = lease_of([(REPLICATED, 2), (SPLIT, 4), (SPLIT, 2), (SPLIT, 9)])
    rows = []
    for rank in range(3):
        table = PageTable(seats=2, max_pages=5, classes=3, replicated_total=4)
        table.bind(1, lease, rank)
        rows.append(table.table[1].tolist())
        assert table.holders[1].tolist() == [EVERY_RANK, 1, 2, 0, NO_PAGE]
        assert [table.holder(1, k) for k in (0, 1, 4)] == [EVERY_RANK, 1, NO_PAGE]
        assert table.pages(1) == 4 and table.pages(0) == 0
        assert (table.table[0] == ABSENT).all()
    # id 9 is local 3, id 4 local 1, id 2 local 0, each behind the 4 replicated pages
    assert rows == [[2, -1, -1, 7, -1], [2, 5, -1, -1, -1], [2, -1, 4, -1, -1]]


def test_owner_by_hand():
    lease = lease_of([(SPLIT, 7), (SPLIT, 1)], owner=1)
    for rank, row, held in ((0, [-1, -1], []), (1, [2, 0], [0, 1]), (2, [-1, -1], [])):
        table = PageTable(1, 2, 3)
        table.bind(0, lease, rank)
        assert table.table[0].tolist() == row
        assert table.held_pages(0).tolist() == held
        assert table.holders[0].tolist() == [1, 1]


def test_one_class_is_held_by_every_rank():
    lease = Pool(8, 1, "striped").grant(3)
    for rank in range(6):
        table = PageTable(1, 4, 1)
        table.bind(0, lease, rank)
        assert table.table[0].tolist() == [0, 1, 2, ABSENT]
        assert table.holders[0].tolist() == [EVERY_RANK] * 3 + [NO_PAGE]
        assert table.table.dtype == table.holders.dtype == table.held_pages(0).dtype == np.int32


@pytest.mark.parametrize("placement", ["striped", "replicating", "owner"])
@pytest.mark.parametrize("world", range(1, 9))
def test_no_two_pages_share_a_place_and_all_places_are_used(world, placement):
    below = 2 if placement == "replicating" else 0
    pool = Pool(6 * world, world, "owner" if placement == "owner" else "striped", below, 2 * below,
                shuffle=True, seed=world)
    leases = []
    while (lease := pool.grant({"owner": 3, "striped": 2 * world}.get(placement, 2 + world))):
        leases.append(lease)
    assert len(leases) >= 2
    for rank in range(world):
        table = PageTable(len(leases), 3 * world + 2, world, 2 * below)
        for seat, lease in enumerate(leases):
            table.bind(seat, lease, rank)
        places = [i for seat in range(len(leases)) for i in table.local_pages(seat).tolist()]
        assert len(set(places)) == len(places)
        size = rank_pages(pool.pages, world, rank, 2 * below)
        assert all(0 <= i < size for i in places)
        if placement != "replicating":
            assert sorted(places) == list(range(size))
        for seat, lease in enumerate(leases):
            held = [k for k in range(lease.pages) if lease.region[k] == REPLICATED
                    or world == 1 or lease.ids[k] % world == rank]
            assert table.held_pages(seat).tolist() == held


@pytest.mark.parametrize("lease", [
    lease_of([(SPLIT, 0), (SPLIT, 3)]),  # page 1 must be class 1 of 3
    lease_of([(SPLIT, 1), (SPLIT, 5)], owner=1),
    lease_of([(SPLIT, 0), (SPLIT, -2)]),
    lease_of([(SPLIT, 0), (REPLICATED, 4)]),
    lease_of([(SPLIT, 0), (REPLICATED, -1)]),
])
def test_a_foreign_id_is_refused_and_changes_nothing(lease):
    table = PageTable(1, 4, 3, replicated_total=4)
    with pytest.raises(ResidueMismatch) as caught:
        table.bind(0, lease, rank=2)
    assert str(int(lease.ids[1])) in str(caught.value) and caught.value.rank == 2
    assert (table.table == ABSENT).all() and (table.holders == NO_PAGE).all()


def test_bind_once_then_unbind_then_bind_again():
    pool, table = Pool(8, 2, "striped"), PageTable(2, 4, 2)
    long, short = pool.grant(4), pool.grant(1)
    table.bind(0, long, 0)
    with pytest.raises(AssertionError):
        table.bind(0, short, 0)
    table.unbind(0)
    assert table.pages(0) == 0 and table.held_pages(0).size == 0
    table.bind(0, short, 0)
    assert table.table[0].tolist() == [2, -1, -1, -1]  # nothing of the longer lease is left
    with pytest.raises(AssertionError):
        PageTable(1, 3, 2).bind(0, long, 0)
