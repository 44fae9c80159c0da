# python -m pytest tests/test_round.py
"""A round's bytes, and ranks that are not in the same state."""

import numpy as np
import pytest

from engine.errors import WorldError
from engine.pool.lease import Pool
from engine.pool.table import PageTable
from engine.round import Ledger, Round, pack, unpack

DIGESTS = (b"tables..", b"tokens..")


def ints(*values):
    return np.array(values, np.int32)


def full():
    pool = Pool(12, 3, "owner")
    striped = Pool(12, 3, "striped", 1, 4)
    return Round(7, (2, 0), ((1, pool.grant(3), 0), (4, striped.grant(4), 130)),
                 (3, 64, ints(5, 6, 7)), True, ints(9, 8), ints(0, 5), ints(300, 2 ** 20))


def same(a, b):
    """Two rounds, field by field."""
    assert (a.number, a.closes, a.chunk_ends, a.stop) == (b.number, b.closes, b.chunk_ends, b.stop)
    for x, y in zip(a.opens, b.opens, strict=True):
        assert (x[0], x[2], x[1].id, x[1].owner) == (y[0], y[2], y[1].id, y[1].owner)
        assert x[1].ids.tolist() == y[1].ids.tolist()
        assert x[1].region.tolist() == y[1].region.tolist()
    assert (a.chunk is None) == (b.chunk is None)
    if a.chunk is not None:
        assert a.chunk[:2] == b.chunk[:2] and a.chunk[2].tolist() == b.chunk[2].tolist()
    for name in ("tokens", "seats", "positions"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.tolist() == y.tolist() and y.dtype == np.int32 and y.flags.c_contiguous


@pytest.mark.parametrize("made", [full(), Round(1), Round(2 ** 40, stop=True),
                                  Round(3, chunk=(0, 0, ints(1)))])
def test_what_is_packed_is_unpacked(made):
    found, digests = unpack(pack(made, DIGESTS))
    same(made, found)
    assert digests == DIGESTS


def test_the_layout_is_the_documented_one():
    data = pack(Round(5, (7,), (), (3, 64, ints(10, 11)), True, ints(1), ints(2), ints(4)), DIGESTS)
    words = np.frombuffer(data[32:], "<i4").tolist()
    assert data[:8] == b"SGRD\x01\x00\x01\x00" and int.from_bytes(data[8:16], "little") == 5
    assert data[16:32] == b"tables..tokens.."
    assert words == [1, 0, 2, 1, 3, 64, 7, 10, 11, 1, 2, 4]


def test_every_cut_and_every_foreign_beginning_is_refused():
    data = pack(full(), DIGESTS)
    for size in range(len(data)):
        with pytest.raises(WorldError, match=f"a round of {size} bytes"):
            unpack(data[:size])
    with pytest.raises(WorldError, match="left over"):
        unpack(data + b"\0")
    with pytest.raises(WorldError, match="version 2"):
        unpack(data[:4] + b"\2" + data[5:])
    with pytest.raises(WorldError, match="GRID"):
        unpack(b"GRID" + data[4:])


def ledgers(ranks=3):
    tables = [PageTable(6, 8, ranks) for _ in range(ranks)]
    return tables, [Ledger(table, rank) for rank, table in enumerate(tables)]


def play(tables, books, made):
    """Every rank checks the round against rank 0's digests, and carries it out."""
    digests = books[0].digests
    for rank, (table, book) in enumerate(zip(tables, books)):
        book.check(made, digests)
        for seat in made.closes:
            table.unbind(seat)
        for seat, lease, kept in made.opens:
            if kept:
                table.unbind(seat)
            table.bind(seat, lease, rank)
        book.note(made)


def rounds():
    pool = Pool(12, 3, "striped")
    first, second = pool.grant(3), pool.grant(2)
    longer = pool.resize(first, 5)
    return [Round(1, (), ((0, first, 0),), (0, 0, ints(1, 2, 3))),
            Round(2, (), ((1, second, 0),), None, False, ints(9), ints(0), ints(3)),
            Round(3, (1,), ((0, longer, 4),), None, False, ints(4), ints(0), ints(4)),
            Round(4, (0,))]


def test_ranks_that_did_the_same_agree():
    tables, books = ledgers()
    seen = set()
    for made in rounds():
        play(tables, books, made)
        assert len({book.digests for book in books}) == 1
        seen.add(books[0].digests)
    assert len(seen) == 4


@pytest.mark.parametrize("change, named", [
    (lambda t: t.holders.__setitem__((0, 1), 0), "page tables"),
    (lambda t: t.owners.__setitem__(0, 2), "page tables")])
def test_a_table_that_differs_is_named_with_its_rank(change, named):
    tables, books = ledgers()
    first, second, *_ = rounds()
    tables[2].bind(5, first.opens[0][1], 2)         # some other seat, not accounted for
    play(tables, books, first)
    change(tables[2])
    books[2].note(Round(1, (), first.opens))        # as if it had bound it so
    books[2]._tokens = books[0]._tokens
    with pytest.raises(WorldError, match=named) as caught:
        books[2].check(second, books[0].digests)
    assert caught.value.rank == 2 and "round 2" in caught.value.message
    books[1].check(second, books[0].digests)


def test_a_token_that_differs_is_named():
    tables, books = ledgers()
    first, second, *_ = rounds()
    play(tables[:2], books[:2], first)
    tables[2].bind(0, first.opens[0][1], 2)
    books[2].note(Round(1, (), first.opens, (0, 0, ints(1, 2, 4))))
    with pytest.raises(WorldError, match="tokens fed differ") as caught:
        books[2].check(second, books[0].digests)
    assert books[0].digests[1].hex() in caught.value.message and caught.value.rank == 2


@pytest.mark.parametrize("number", [1, 3, 0])
def test_a_round_out_of_turn_is_refused(number):
    tables, books = ledgers()
    play(tables, books, rounds()[0])
    with pytest.raises(WorldError, match=f"round {number} arrived where round 2 was due"):
        books[1].check(Round(number), books[0].digests)
