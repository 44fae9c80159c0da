"""Pool: the free pages of each class, and the leases that conversations hold on them.

A lease is all or nothing: `grant` and `resize` either take every page that was asked for or change
nothing, and `release` gives every page back exactly once. `keep` marks the lease of a conversation
that has ended and may be taken up again. Ids c, c + W, ... are class c, each class with a
last-in-first-out free stack of its own; with one class this is the plain pool, same ids in the same
order. The pages below R of a striped conversation come from the replicated region, which every rank
has in full and which numbers its pages by itself. Bytes live in page.py; here are integers only.

Every rank may run its own Pool: the same calls give the same ids, shuffled or not.
"""

import bisect
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.errors import FaultError, TooLong
from engine.pool.owner import (
    OWNER, PLACEMENTS, STRIPED, choose_owner, class_size, needed, page_class, smallest_pool,
    stripe,
)

REPLICATED = 0  # region of a page that every rank holds
SPLIT = 1  # region of a page that the rank of its class holds


@dataclass(frozen=True, eq=False)
class Lease:
    """A conversation's right to its pages, from grant to release.

    id: serial number, unique in the pool's life. owner: the class of all pages under the owner
    placement, None under striped. region, ids: int32 [pages], read-only; logical page k is page
    ids[k] of region[k] (REPLICATED or SPLIT).
    """

    id: int
    owner: int | None
    region: np.ndarray
    ids: np.ndarray

    @property
    def pages(self):
        """Logical pages of the lease."""
        return len(self.ids)


class Counts(NamedTuple):
    """Pages of one class (or of the replicated region) by state: total = free + leased + kept."""

    free: int
    leased: int
    kept: int
    total: int


class FreeStack:
    """The free ids of one class: last in, first out, or any order that a seed decides."""

    def __init__(self, ids, rng):
        self.ids = list(ids)[::-1]
        self.rng = rng

    def __len__(self):
        return len(self.ids)

    def take(self):
        """Pop one id. The caller has counted: an empty stack is our bug."""
        if self.rng is not None:
            pick = int(self.rng.integers(len(self.ids)))
            self.ids[pick], self.ids[-1] = self.ids[-1], self.ids[pick]
        return self.ids.pop()

    def give(self, page_id):
        self.ids.append(page_id)


class Pool:
    """All pages of the world.

    pages: split pages, over all classes. classes: W where the KV is split, else 1.
    placement: "striped" or "owner". replicated_pages: pages of one conversation that lie below R
    (striped only). replicated_total: pages of the replicated region. shuffle: hand pages out in an
    order drawn from `seed` in place of last in, first out.
    """

    def __init__(self, pages, classes, placement, replicated_pages=0, replicated_total=0,
                 shuffle=False, seed=0):
        assert pages >= 0 and classes >= 1 and replicated_pages >= 0 and replicated_total >= 0
        assert placement in PLACEMENTS, placement
        assert placement == STRIPED or (replicated_pages == 0 and replicated_total == 0), \
            "only the striped placement has a replicated region"
        self.pages = pages
        self.classes = classes
        self.placement = placement
        self.replicated_pages = replicated_pages
        self.replicated_total = replicated_total
        rng = np.random.default_rng(seed) if shuffle else None
        self._free = [FreeStack(range(c, pages, classes), rng) for c in range(classes)]
        self._free_replicated = FreeStack(range(replicated_total), rng)
        self._leases = {}
        self._kept = set()          # ids of the leases that are kept
        self._granted = 0

    # ---- asking ----------------------------------------------------------------------------

    def class_total(self, c):
        """Split pages of class c, free or not."""
        return class_size(self.pages, self.classes, c)

    def available(self):
        """Free split pages of each class."""
        return [len(stack) for stack in self._free]

    def could_ever_fit(self, pages):
        """Whether an empty pool could lease `pages` logical pages. Changes nothing."""
        # Class 0 is never the smallest, so it is the one that an owner placement is judged by.
        counts = needed(self.placement, pages, self.replicated_pages, self.classes)
        return (min(pages, self.replicated_pages) <= self.replicated_total
                and all(n <= self.class_total(c) for c, n in enumerate(counts)))

    def longest(self):
        """The most logical pages that an empty pool could lease to one conversation."""
        return bisect.bisect_left(range(1, self.pages + self.replicated_pages + 1), True,
                                  key=lambda n: not self.could_ever_fit(n))

    def refusal(self, pages):
        """Raise TooLong where `pages` logical pages could never be leased. Changes nothing."""
        if self.could_ever_fit(pages):
            return
        below = min(pages, self.replicated_pages)
        if below > self.replicated_total:
            raise TooLong(
                f"the request needs {below} replicated pages of its {pages}; the replicated region"
                f" has {self.replicated_total}",
                hint="Replicate fewer tokens (--replicate) or plan for more conversations"
                     " (--parallel).",
            )
        counts = needed(self.placement, pages, self.replicated_pages, self.classes)
        c = max(range(self.classes), key=lambda c: counts[c] - self.class_total(c))
        whose = "all of one class" if self.placement == OWNER else f"{counts[c]} of class {c}"
        helps = f"Give the pool at least {smallest_pool(counts)} pages (--pages), or shorten the" \
                " request."
        striped = needed(STRIPED, pages, 0, self.classes)
        if self.placement == OWNER and smallest_pool(striped) <= self.pages:
            helps = f"--placement striped would fit it ({max(striped)} pages a class). " + helps
        raise TooLong(
            f"the request needs {pages} pages, {whose}; a class has {self.class_total(c)} pages"
            f" ({self.pages} in {self.classes} class{'es' if self.classes > 1 else ''},"
            f" placement {self.placement})",
            hint=helps,
        )

    def counts(self):
        """(Counts of each class, Counts of the replicated region), for display."""
        kept = self._pages_of(self._leases[i] for i in self._kept)
        totals = [*map(self.class_total, range(self.classes)), self.replicated_total]
        free = [*self.available(), len(self._free_replicated)]
        found = tuple(Counts(f, t - f - k, k, t) for f, k, t in zip(free, kept, totals))
        return found[:-1], found[-1]

    def states(self):
        """uint8 [pages]: 0 free, 1 leased, 2 kept, of each split page id. For display."""
        found = np.zeros(self.pages, np.uint8)
        for lease in self._leases.values():
            found[lease.ids[lease.region == SPLIT]] = 2 if lease.id in self._kept else 1
        return found

    def _pages_of(self, leases):
        """Split pages of each class that the leases hold, and then their replicated pages."""
        found = [0] * (self.classes + 1)
        for lease in leases:
            split = lease.ids[lease.region == SPLIT]
            for c, n in enumerate(np.bincount(page_class(split, self.classes),
                                              minlength=self.classes)):
                found[c] += int(n)
            found[-1] += lease.pages - len(split)
        return found

    def would_fit(self, pages, without):
        """Whether `grant` would succeed once the given leases were released. Changes nothing."""
        more = self._pages_of(without)
        available = [a + n for a, n in zip(self.available(), more)]
        owner = choose_owner(available) if self.placement == OWNER else 0
        counts = needed(self.placement, pages, self.replicated_pages, self.classes, owner)
        below = min(pages, self.replicated_pages)
        return (below <= len(self._free_replicated) + more[-1]
                and all(n <= a for n, a in zip(counts, available)))

    # ---- leasing ---------------------------------------------------------------------------

    def grant(self, pages):
        """Lease `pages` logical pages, or None where they do not fit now (then nothing changed)."""
        assert pages >= 1, "a lease has at least one page"
        available = self.available()
        owner = choose_owner(available) if self.placement == OWNER else None
        counts = needed(self.placement, pages, self.replicated_pages, self.classes, owner or 0)
        below = min(pages, self.replicated_pages)
        if below > len(self._free_replicated) or any(n > a for n, a in zip(counts, available)):
            return None
        region = np.full(pages, SPLIT, np.int32)
        region[:below] = REPLICATED
        ids = np.empty(pages, np.int32)
        for k in range(pages):
            ids[k] = self._stack(region[k], k, owner).take()
        return self._made(owner, region, ids)

    def release(self, lease):
        """Give back every page of the lease; the lease is dead afterwards."""
        self._forget(lease)
        self._give(lease, 0)

    def keep(self, lease):
        """Count a lease as kept until it is resized or released."""
        assert self._leases.get(lease.id) is lease, f"lease {lease.id} was not granted or is dead"
        self._kept.add(lease.id)

    def resize(self, lease, pages):
        """The lease with `pages` logical pages in place of its own, or None where they do not fit.

        What both have stays: the ids below the smaller count, and the owner. The old lease is dead
        afterwards, the new one is not kept; None leaves all as it was.
        """
        assert pages >= 1 and self._leases.get(lease.id) is lease, lease.id
        have = lease.pages
        counts = [needed(self.placement, n, self.replicated_pages, self.classes, lease.owner or 0)
                  for n in (have, pages)]
        more = [max(0, b - a) for a, b in zip(*counts)]
        below = min(pages, self.replicated_pages) - min(have, self.replicated_pages)
        if below > len(self._free_replicated) or any(map(int.__gt__, more, self.available())):
            return None
        self._forget(lease)
        region, ids = np.full(pages, SPLIT, np.int32), np.empty(pages, np.int32)
        region[:self.replicated_pages] = REPLICATED
        ids[:have] = lease.ids[:pages]
        for k in range(have, pages):
            ids[k] = self._stack(region[k], k, lease.owner).take()
        self._give(lease, pages)
        return self._made(lease.owner, region, ids)

    def _made(self, owner, region, ids):
        region.flags.writeable = ids.flags.writeable = False
        lease = Lease(self._granted, owner, region, ids)
        self._granted += 1
        self._leases[lease.id] = lease
        return lease

    def _forget(self, lease):
        assert self._leases.get(lease.id) is lease, f"lease {lease.id} was not granted or is dead"
        del self._leases[lease.id]
        self._kept.discard(lease.id)

    def _give(self, lease, first):
        """Free the lease's pages from `first` on."""
        # Backwards, so that the next lease of the same size gets the same ids in the same order.
        for k in range(lease.pages - 1, first - 1, -1):
            self._stack(lease.region[k], k, lease.owner).give(int(lease.ids[k]))

    def _stack(self, region, k, owner):
        if region == REPLICATED:
            return self._free_replicated
        return self._free[stripe(k, self.classes) if owner is None else owner]

    # ---- integrity -------------------------------------------------------------------------

    def check(self):
        """Raise FaultError unless free + leased = total in every class, each id exactly once."""
        leases = list(self._leases.values())
        regions = [(f"class {c} of {self.classes}", self._free[c].ids, SPLIT, c)
                   for c in range(self.classes)]
        regions.append(("the replicated region", self._free_replicated.ids, REPLICATED, 0))
        leased = {region: np.concatenate([a.ids[a.region == region] for a in leases]
                                         or [np.empty(0, np.int32)])
                  for region in (REPLICATED, SPLIT)}
        for name, free, region, c in regions:
            held = leased[region]
            if region == SPLIT:
                held = held[page_class(held, self.classes) == c]
                expected = np.arange(c, self.pages, self.classes)
            else:
                expected = np.arange(self.replicated_total)
            found = np.sort(np.concatenate([np.asarray(free, np.int64), held]))
            if not np.array_equal(found, expected):
                twice = found[:-1][found[1:] == found[:-1]]
                raise FaultError(
                    f"the pool is inconsistent in {name}: {len(free)} free + {len(held)} leased,"
                    f" {len(expected)} in all; ids found twice {twice[:4].tolist()},"
                    f" missing {np.setdiff1d(expected, found)[:4].tolist()}",
                    hint="This is a bug; please report it with the command line.",
                )
