"""PageTable: where each logical page of each seat lies in one rank's arrays.

A rank's arrays hold the replicated region first (local index = id), then its share of the split
pages (replicated_total + id // classes). The table is what the stages read: one int32 a page, -1
where this rank does not hold the page. `holders` says who does, so that a rank knows whom to ask.
"""

import numpy as np

from engine.errors import ResidueMismatch
from engine.pool.lease import REPLICATED
from engine.pool.owner import check_residue, local_index, page_class, stripe

ABSENT = -1  # in `table`: this rank does not hold the page
EVERY_RANK = -1  # in `holders`: every rank holds the page
NO_PAGE = -2  # in `holders`: the seat has no such page
NO_OWNER = -1  # in `owners`: the seat's pages are striped, or lie on every rank


class PageTable:
    """Page tables of one rank.

    seats: conversations. max_pages: logical pages of the longest window. classes: W where the KV is
    split, else 1. replicated_total: pages of the replicated region.
    table: int32 [seats, max_pages], local page index or ABSENT.
    holders: int32 [seats, max_pages], rank that holds the page, EVERY_RANK or NO_PAGE.
    owners: int32 [seats], the one rank that holds all of a seat's pages, or NO_OWNER.
    """

    def __init__(self, seats, max_pages, classes, replicated_total=0):
        self.classes = classes
        self.replicated_total = replicated_total
        self.table = np.full((seats, max_pages), ABSENT, np.int32)
        self.holders = np.full((seats, max_pages), NO_PAGE, np.int32)
        self.owners = np.full(seats, NO_OWNER, np.int32)

    @property
    def bytes(self):
        return self.table.nbytes + self.holders.nbytes + self.owners.nbytes

    def bind(self, seat, lease, rank):
        """Write a lease into a seat's row as `rank` sees it.

        Every id is checked first, against the class that its logical page must have, so a lease
        that is refused (ResidueMismatch) changes nothing. A seat is unbound before it is bound
        again.
        """
        assert self.holders[seat, 0] == NO_PAGE, f"seat {seat} is bound already"
        assert 1 <= lease.pages <= self.table.shape[1], (lease.pages, self.table.shape)
        for k, (region, page_id) in enumerate(zip(lease.region.tolist(), lease.ids.tolist())):
            if region != REPLICATED:
                expected = stripe(k, self.classes) if lease.owner is None else lease.owner
                check_residue(page_id, expected, self.classes, rank)
            elif not 0 <= page_id < self.replicated_total:
                raise ResidueMismatch(
                    f"rank {rank} received replicated page id {page_id}, outside the region's"
                    f" {self.replicated_total} pages",
                    hint="The ranks disagree about the pool: start them all with the same options.",
                    rank=rank,
                )
        replicated = lease.region == REPLICATED
        everywhere = replicated | (self.classes == 1)
        holder = np.where(everywhere, EVERY_RANK, page_class(lease.ids, self.classes))
        local = np.where(replicated, lease.ids,
                         self.replicated_total + local_index(lease.ids, self.classes))
        self.holders[seat, :lease.pages] = holder
        self.table[seat, :lease.pages] = np.where(everywhere | (holder == rank), local, ABSENT)
        self.owners[seat] = NO_OWNER if lease.owner is None or self.classes == 1 else lease.owner

    def unbind(self, seat):
        """Forget a seat's pages."""
        self.table[seat] = ABSENT
        self.holders[seat] = NO_PAGE
        self.owners[seat] = NO_OWNER

    def pages(self, seat):
        """Logical pages bound to a seat, held here or not."""
        return int(np.count_nonzero(self.holders[seat] != NO_PAGE))

    def held_pages(self, seat):
        """The logical pages of a seat that this rank holds: int32, ascending."""
        return np.flatnonzero(self.table[seat] != ABSENT).astype(np.int32)

    def local_pages(self, seat, first=0):
        """The local indices, in the same order, of those from logical page `first` on: int32."""
        row = self.table[seat, first:]
        return row[row != ABSENT]

    def holder(self, seat, k):
        """The rank that holds logical page k of a seat, EVERY_RANK, or NO_PAGE."""
        return int(self.holders[seat, k])
