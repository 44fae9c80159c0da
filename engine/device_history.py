"""A prompt chunk on the device whose history lies on several ranks: its lists, then its history
fetched stretch by stretch, as prefill.py does on the host.

Lists: the ranks exchange candidates, each scored over its own pages, or gather the pooled keys and
score them all, whichever moves fewer bytes; neither, while no row sees more pools than are kept.
The lists are the same to the bit. History: a stretch is 32,768 rows, a tile of stage 4. One kernel
packs the pages that this rank sends, one exchange moves them to the ranks that lack them, one
kernel puts the stretch together in logical order from the own pages and the received ones, then
stage 4 attends it. While it does, the next stretch is on its way.

Buffers are made once, for the largest case: of latents, a stretch, and as much for packed pages
that leave and for those that come; of pooled keys the same three, for as many as are ever gathered;
candidates of all ranks, as they come and beside the kernel that merges them. What leaves and comes
lies where the transport reaches it.

A page that every rank has travels nowhere. Under owner the rank that has the pages sends them, or
its candidates; the others send nothing. A rank without heads takes part in the exchanges only.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import types

from engine.device import KERNEL, cuda
from engine.dsa import ALL_GROUPS
from engine.memory import window_pages
from engine.pool.owner import OWNER
from engine.stages.attend_cuda import attend
from engine.stages.merge import TILE
from engine.stages.project import combine

STRETCH = TILE          # rows: what stage 4 takes in one call
ITEM, CANDIDATE, UNIT = 2, 8, 8     # bytes of a BF16; of a score and a pool; that move at once
THREADS, EACH = 256, 4              # of a block that moves a part of a page; units a thread


class History:
    """Stages 2 to 4 of a prompt chunk over all ranks' pages.

    attention: the device_attention.Attention of this rank, whose pages and buffers these are.
    """

    def __init__(self, attention, config):
        self._attention, self._model = attention, attention.model
        self._fetch = Fetch(attention.model, attention.pages, attention.page_rows)
        self._gathered = gathered_pages(config, self._model.shape, self._model.world.size)

    def attend(self, binding, index, weight, absorbed, rows, merged):
        """Fill merged [n, own heads, kv_lora] for a chunk's n rows of one seat.

        index, weight, absorbed: what the rows ask, as Attention.layer has it.
        """
        m, s, world, stream = self._model, self._model.shape, self._model.world, self._model.stream
        take, (n, own, width) = m.buffers.take, absorbed.shape
        page_rows, latents = self._attention.page_rows, self._attention.latents[binding]
        self._fetch.aim(rows)
        here = take("here", n, dtype=np.int32)      # zeros: what is fetched has one row of table
        order, spans, starts = self._lists(binding, index, weight, rows, here)
        if not own:
            return self._fetch.stretches("latents", latents, lambda *stretch: None)
        out, lse = take("part out", world.size, n, own, width), take("part top", world.size, n, own)
        mass = take("part mass", world.size, n, own)

        def work(first_page, held):
            first = first_page * page_rows
            attend(absorbed, order, spans, starts, here, held, s.qk_nope ** -0.5, first,
                   first + STRETCH, True, out, lse, mass, stream)
        self._fetch.stretches("latents", latents, work)
        combine(out, lse, merged, take("merged lse", n, own), stream)

    def _lists(self, binding, index, weight, rows, here):
        """Stages 2 and 3: what stage 4 reads, in logical rows, the same on every rank."""
        a, m, s, world = self._attention, self._model, self._model.shape, self._model.world
        n, keys = rows.count, a.keys[binding]
        positions = m.buffers.take("positions", n, dtype=np.int32)

        def lists(found):
            return a.lists(*found, here, positions, 0, world.size, self._fetch.in_order)
        if (int(rows.positions[-1]) + 1) // s.index_kpool <= s.pools_kept:
            return lists(m.buffers.take(name, 1, n, *wide, dtype=dtype)         # used by no row
                         for name, wide, dtype in self._candidate())
        owner = int(a.pages.owners[rows.seats[0]])
        senders = [owner] if owner >= 0 else list(range(world.size))
        if self._fetch.bytes_of_all(keys) <= len(senders) * n * s.pools_kept * CANDIDATE:
            found = a.best_pools(binding, index, weight, here, positions, ALL_GROUPS,
                                 self._fetch.all("keys", keys, self._gathered),
                                 self._fetch.in_order)
            return lists(x.reshape(1, *x.shape) for x in found)
        every = [m.transport.buffer(m.buffers, f"history {name}", len(senders), n, *wide,
                                    dtype=dtype) for name, wide, dtype in self._candidate()]
        if world.rank in senders:
            seats = m.buffers.take("seats", n, dtype=np.int32)
            a.best_pools(binding, index, weight, seats, positions,
                         world.rank if owner < 0 else ALL_GROUPS,
                         into=[x.array[senders.index(world.rank)] for x in every])
        m.stream.synchronize()
        world.exchange(*(self._pair(x.wire, senders) for x in every), stage="candidates")
        return lists(m.transport.here(m.buffers, f"history candidates {i}", x, m.stream)
                     for i, x in enumerate(every))

    def _candidate(self):
        """What a row's candidates are: name, shape, dtype of each array."""
        wide = self._model.shape.pools_kept,
        return ("scores", wide, np.float32), ("pools", wide, np.int32), ("counts", (), np.int32)

    def _pair(self, wires, senders):
        """What World.exchange takes to fill wires[i] from rank senders[i], the own one but for."""
        rank, size = self._model.world.rank, self._model.world.size
        mine = wires[senders.index(rank)] if rank in senders else None
        return [mine] * size, [wires[senders.index(r)] if r in senders and r != rank else None
                               for r in range(size)]


# ---- pages of all ranks -------------------------------------------------------------------------

class Stretch(NamedTuple):
    """Logical pages first .. stop - 1, how many of them each rank sends, and where the pages that
    this rank sends begin in Route.picks."""

    first: int
    stop: int
    counts: tuple
    pick: int


class Route(NamedTuple):
    """How a conversation's first pages come together on a rank; see `plan_route`."""

    picks: object           # on the device
    sources: object         # on the device
    room: int               # pages of a stretch at most
    stretches: tuple


class Fetch:
    """Brings the pages of a chunk's history together; all ranks call the same, in one order.

    model: its world, stream, transport and `buffers`. seen: pool.table.PageTable of this rank.
    in_order: the page table of what is fetched, device int32 [1, pages of a window]: 0, 1, 2, ...
    """

    def __init__(self, model, seen, page_rows):
        self._model, self._seen, self._page_rows = model, seen, page_rows
        self._rows = self._seat = self._pages = None
        self._routes, self._window = {}, seen.table.shape[1]
        self.in_order = cuda.to_device(np.arange(self._window, dtype=np.int32)[None])
        self._packed = cuda.event()

    def aim(self, rows):
        """Choose the chunk: all up to its last row is its history."""
        if rows is self._rows:          # the layers of one chunk fetch the same pages
            return
        self._rows, self._routes, self._seat = rows, {}, int(rows.seats[0])
        self._pages = int(rows.positions[-1]) // self._page_rows + 1

    def bytes_of_all(self, array):
        """Bytes that `all` would move, over all senders; every rank has the same answer."""
        split = np.count_nonzero(self._seen.holders[self._seat, :self._pages] >= 0)
        return split * array.shape[1] * array.shape[2] * ITEM

    def all(self, name, array, room):
        """The history [pages, ...] of array [local pages, ...], all at once.

        room: pages that it has at most, ever; its buffers are made for as many.
        """
        assert self._pages <= room, (self._pages, room)
        route, held = self._route(name, room), self._held(name, array, room)
        self._bring(name, array, route, route.stretches[0], held)
        return held

    def stretches(self, name, array, work):
        """work(first page, held [pages, ...]) launches on each stretch of the history."""
        room = min(STRETCH // self._page_rows, self._window)
        route, held = self._route(name, room), self._held(name, array, room)
        before = None
        for stretch in route.stretches:
            self._bring(name, array, route, stretch, held, before)
            before = partial(work, stretch.first, held)
        before()

    def _held(self, name, array, room):
        return self._model.buffers.take(f"history {name}", room, *array.shape[1:], dtype=np.uint16)

    def _route(self, name, room):
        """The Route of the chunk's history in stretches of `room` pages."""
        if name not in self._routes:
            m, holders, local = self._model, self._seen.holders, self._seen.table
            picks, sources, stretches = plan_route(
                holders[self._seat, :self._pages], local[self._seat, :self._pages], m.world.rank,
                m.world.size, room)
            self._routes[name] = Route(self._sent(f"{name} picks", picks),
                                       self._sent(f"{name} sources", sources), room, stretches)
        return self._routes[name]

    def _sent(self, name, array):
        """An int32 array of up to a window's pages on the device, with room for all."""
        target = self._model.buffers.take(f"history {name}", self._window, dtype=np.int32)
        if array.size:
            target[:array.size].copy_to_device(array, stream=self._model.stream)
        return target

    def _bring(self, name, array, route, stretch, held, meanwhile=None):
        """held[:pages of the stretch] = its pages; meanwhile() launches on what held has now."""
        m, own = self._model, _units(array)
        got, travels = own, any(stretch.counts)
        if travels:
            send, came = (m.transport.buffer(m.buffers, f"{way} {name}", route.room, own.shape[1],
                                             dtype=np.uint64) for way in ("sent", "got"))
            gather(own, own, route.picks, stretch.pick, stretch.counts[m.world.rank], send.array,
                   m.stream)
            self._packed.record(m.stream)
        if meanwhile:
            meanwhile()
        if travels:
            counts = [0 if r == m.world.rank else c for r, c in enumerate(stretch.counts)]
            ends = np.cumsum([0, *counts]).tolist()
            self._packed.synchronize()
            m.world.exchange(([send.wire[:stretch.counts[m.world.rank]]] * m.world.size,
                              [came.wire[a:b] if b > a else None for a, b in zip(ends, ends[1:])]),
                             stage="history")
            got = came.array
        gather(own, got, route.sources, stretch.first, stretch.stop - stretch.first, _units(held),
               m.stream)


def plan_route(holders, local, rank, world, a_stretch):
    """Who sends what: (picks, sources, stretches) of `rank`, for a conversation's first pages.

    holders [pages]: the rank that has a page, negative for every rank. local [pages]: where a page
    lies on `rank`, -1 for elsewhere. Of a stretch, each rank sends the pages that it alone has,
    ascending. picks: local pages that `rank` sends. sources [pages]: a page's local page, or ~p
    for place p among its stretch's received pages, ordered by sender, then page. int32.
    """
    picks, sources, stretches = local[holders == rank], local.copy(), []
    for first in range(0, len(holders), a_stretch):
        part = holders[first:first + a_stretch]
        counts = tuple(int(np.count_nonzero(part == r)) for r in range(world))
        away = np.flatnonzero((part >= 0) & (part != rank))
        away = away[np.argsort(part[away], kind="stable")]
        sources[first + away] = ~np.arange(len(away), dtype=np.int32)
        stretches.append(Stretch(first, first + len(part), counts,
                                 int(np.count_nonzero(holders[:first] == rank))))
    return picks, sources, tuple(stretches)


def gathered_pages(config, shape, world):
    """Pages whose pooled keys are gathered at most: with more, candidates are fewer bytes."""
    window = window_pages(config.context, config.page_rows)
    replicated = min(config.replicate // config.page_rows, window)
    a_page = config.page_rows // shape.index_kpool * shape.index_dim * ITEM
    return min(window, replicated + _candidate_bytes(config, shape, world) // a_page)


def _candidate_bytes(config, shape, world):
    senders = 1 if config.placement == OWNER else world
    return senders * min(config.chunk, config.context) * shape.pools_kept * CANDIDATE


def history_scratch_bytes(config, shape, world):
    """(name, bytes) of the module's buffers, where the KV is split."""
    window = window_pages(config.context, config.page_rows)
    latents = min(STRETCH // config.page_rows, window) * config.page_rows * shape.kv_lora * ITEM
    keys = (gathered_pages(config, shape, world) * config.page_rows // shape.index_kpool
            * shape.index_dim * ITEM)
    return (("history latents", 3 * latents), ("history keys", 3 * keys),
            ("history candidates", 2 * _candidate_bytes(config, shape, world)))


# ---- pages from two places ----------------------------------------------------------------------

@cuda.jit(**KERNEL)
def _gather_kernel(here, there, pages, first, target):
    # grid (pages, parts of a page), THREADS threads: all loads of a thread, then its stores
    words = cuda.local.array(EACH, types.uint64)
    at = cuda.blockIdx.y * (THREADS * EACH) + cuda.threadIdx.x
    j, page, width = cuda.blockIdx.x, pages[first + cuda.blockIdx.x], target.shape[1]
    for k in range(EACH):
        unit = at + THREADS * k
        if unit < width:
            words[k] = here[page, unit] if page >= 0 else there[~page, unit]
    for k in range(EACH):
        if at + THREADS * k < width:
            target[j, at + THREADS * k] = words[k]


def gather(here, there, pages, first, count, target, stream):
    """target[j] = here[p] where p = pages[first + j] >= 0, else there[~p], for j < count.

    here, there, target: uint64 [any, width], also mapped host memory. pages: int32.
    """
    width = target.shape[1]
    assert here.shape[1] == there.shape[1] == width and count <= target.shape[0]
    if count:
        grid = count, -(-width // (THREADS * EACH))
        _gather_kernel[grid, THREADS, stream](here, there, pages, first, target)


def _units(array):
    """uint16 [pages, rows, width] as uint64 [pages, units of a page]."""
    pages, rows, width = array.shape
    return array.view(np.uint64).reshape(pages, rows * width * ITEM // UNIT)
