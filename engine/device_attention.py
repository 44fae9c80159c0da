"""DSA layers on the device: projections, the five stages, and what crosses the ranks between
them.

The launches follow dsa.py and step.py: a row whose pages all lie here is attended here for the
own heads; for the others, candidates and absorbed queries go to all ranks and partials come back,
between two graphs (transport). A prompt chunk fetches history by tiles, as prefill.py does. Rows
that this rank does not attend have seat -1 in `attended`, which every kernel passes over.
"""

from types import SimpleNamespace

import numpy as np

from engine.device import cuda
from engine.gemm import gemm
from engine.memory import FLOAT, window_pages
from engine.model.norm import layer_norm_cuda, narrow_cuda, rms_norm_cuda
from engine.pool.owner import STRIPED
from engine.prefill import fetch_pages
from engine.stages.attend_cuda import TILE, attend, finish, slots
from engine.stages.insert import insert
from engine.stages.merge import arrange, merge
from engine.stages.project import combine
from engine.stages.score_cuda import BINS, NEAR, score
from engine.transport import copy_heads

INDEX_NORM_EPS = 1e-6
ALL_GROUPS = -1
EVERY_TILE = np.iinfo(np.int32).max // TILE
CHUNK_ROWS = 256        # rows of a prompt chunk that are attended at a time: bounds the partials
SCORE_ROWS = 16         # rows whose scores of all pools are held at a time


class Attention:
    """The KV of one rank on the device, and the launches of its DSA layers."""

    def __init__(self, model, has, config):
        s, pages, seats, page_rows = model.shape, has.pages, config.parallel, config.page_rows
        self.model, self.heads, self.split = model, has.heads, has.split
        self.page_rows, self.replicated_rows, window = page_rows, config.replicate, has.window
        self.placement, self.pages = config.placement, has.table
        pools, b = page_rows // s.index_kpool, s.bindings
        self.latents = [_zeros((pages, page_rows, s.kv_lora), np.uint16) for _ in range(b)]
        self.keys = [_zeros((pages, pools, s.index_dim), np.uint16) for _ in range(b)]
        tail = (seats, s.index_kpool - 1, s.index_dim)
        self.tail_k = [_zeros(tail) for _ in range(b)]
        self.tail_g = [_zeros(tail) for _ in range(b)]
        self.table = cuda.to_device(np.full((seats, window), -1, np.int32))
        self.room = window * pools
        self.faults = _zeros(1, np.int32)

    # --- seats and rows -------------------------------------------------------------------------

    def bind(self, seat, local_pages):
        """Copy a seat's row of the page table to the device."""
        self.table[seat].copy_to_device(np.ascontiguousarray(local_pages))

    def clear(self, seat):
        for array in self.tail_k + self.tail_g:
            array[seat].copy_to_device(np.zeros(array.shape[1:], np.float32))

    def poison(self, pages):
        """NaN in every binding of the given local pages."""
        for array in self.latents + self.keys:
            nan = np.full(array.shape[1:], 0x7FC0, np.uint16)
            for page in pages.tolist():
                array[page].copy_to_device(nan)

    def load(self, rows, n):
        """Say which of n decode rows this rank attends: striped all, owner its own."""
        attended = self.model.send("attended", (n,), np.int32)
        owners = self.pages.owners[rows.seats]
        mine = (owners < 0) | (owners == self.model.world.rank)
        attended[:rows.count], attended[rows.count:] = np.where(mine, rows.seats, -1), -1

    def alone(self, rows):
        """Whether every row's pages all lie on this rank, as every rank knows."""
        return not self.split or bool((rows.positions < self.replicated_rows).all())

    # --- a layer --------------------------------------------------------------------------------

    def layer(self, w, binding, x, n, y, alone, cut, rows):
        """y [n, hidden] = this rank's part of a DSA layer of n rows x [n, hidden] BF16.

        alone: all pages of the rows lie here. rows: of a prompt chunk, None in a decode step.
        cut(host_work): where the host must act between kernels.
        """
        m, take = self.model, self.model.buffers.take
        seats = take("seats", n, dtype=np.int32)
        index, weight, absorbed = self._insert(w, binding, x, n, seats)
        merged = take("merged", n, m.own_heads, m.shape.kv_lora)
        if alone:
            self._in_pieces(n, lambda piece: self._attend_here(
                binding, index[piece], weight[piece], absorbed[piece], seats[piece],
                take("positions", n, dtype=np.int32)[piece], merged[piece]))
        elif rows is None:
            self._attend_shared(binding, index, weight, absorbed, seats, merged, cut)
        else:
            self._attend_history(binding, index, weight, absorbed, rows, merged)
        self._project(w, merged, seats, y)

    @staticmethod
    def _in_pieces(n, work):
        for first in range(0, n, CHUNK_ROWS):
            work(slice(first, min(first + CHUNK_ROWS, n)))

    def _insert(self, w, binding, x, n, seats):
        """Stage 1; returns indexer queries, head weights and absorbed queries."""
        m, s, stream = self.model, self.model.shape, self.model.stream
        take, d = m.buffers.take, s.index_dim
        positions = take("positions", n, dtype=np.int32)
        down = take("down", n, s.q_lora + s.kv_lora)
        gemm(x, w.down.w, down, stream, w.down.scales)
        low, latent = take("q low", n, s.q_lora, dtype=np.uint16), take("latent", n, s.kv_lora)
        rms_norm_cuda(down, 0, w.q_norm, s.eps, seats, low, 0, stream)
        rms_norm_cuda(down, s.q_lora, w.kv_norm, s.eps, seats, latent, 0, stream)
        index_in = take("index in", n, 2 * d + s.index_heads)
        gemm(x, w.index_in.w, index_in, stream, w.index_in.scales)
        key = take("key", n, d)
        layer_norm_cuda(index_in, 0, w.k_norm_w, w.k_norm_b, INDEX_NORM_EPS, seats, key, 0, stream)
        insert(latent, key, index_in[:, d:2 * d], w.ape, seats, positions, self.table,
               self.latents[binding], self.keys[binding], self.tail_k[binding],
               self.tail_g[binding], stream)
        index = take("index q", n, s.index_heads * d)
        gemm(low, w.index_q.w, index, stream, w.index_q.scales)
        h = m.own_heads
        absorbed = take("absorbed", n, h, s.kv_lora)
        if h:
            query, bits = take("query", n, h * s.qk_nope), take("q bits", n, h * s.qk_nope,
                                                                dtype=np.uint16)
            gemm(low, w.q_up.w, query, stream, w.q_up.scales)
            narrow_cuda(query, 0, seats, bits, stream)
            gemm(bits.reshape(n, h, s.qk_nope), w.key_up.w, absorbed, stream, w.key_up.scales)
        # without index_heads^-0.5: a positive factor of all scores orders nothing
        return index.reshape(n, s.index_heads, d), index_in[:, 2 * d:], absorbed

    def _attend_here(self, binding, index, weight, absorbed, seats, positions, merged):
        """Stages 2 to 4 and the merge over pages of this rank, for its own heads."""
        m, n, world, stream = self.model, len(seats), self.model.world.size, self.model.stream
        take = m.buffers.take
        scores, pools, counts = self._score(binding, index, weight, seats, positions, ALL_GROUPS)
        lists, lengths = self._lists(scores.reshape(1, *scores.shape),
                                     pools.reshape(1, *pools.shape),
                                     counts.reshape(1, *counts.shape), seats, positions)
        if not m.own_heads:
            return
        out, lse = self._partials(binding, absorbed, lists, lengths, seats, 0, world)
        combine(out, lse, merged, take("merged lse", n, m.own_heads), stream)

    def _attend_shared(self, binding, index, weight, absorbed, seats, merged, cut):
        """Stages 2 to 4 across the ranks for decode rows, in two exchanges (see step.py)."""
        m, world, stream = self.model, self.model.world, self.model.stream
        take, (n, own, width) = m.buffers.take, absorbed.shape
        heads, striped = self.heads[-1][1], self.placement == STRIPED
        positions = take("positions", n, dtype=np.int32)
        attended = take("attended", n, dtype=np.int32)

        # --- candidates (striped) and queries to all
        found = self._score(binding, index, weight, attended, positions,
                            world.rank if striped else ALL_GROUPS)
        theirs = [take(f"queries of {r}", n, b - a, width) for r, (a, b) in enumerate(self.heads)]
        pairs = [([absorbed] * world.size, theirs)]
        lists = [a.reshape(1, *a.shape) for a in found]
        if striped:
            lists = [take(f"all candidates {i}", world.size, *a.shape, dtype=a.dtype)
                     for i, a in enumerate(found)]
            pairs += [([a] * world.size, [b[r] for r in range(world.size)])
                      for a, b in zip(found, lists)]
        m.transport.exchange(m.buffers, "queries", pairs, cut)
        query = take("all queries", n, heads, width)
        for part, (a, b) in zip(theirs, self.heads):
            copy_heads(part, 0, query, a, b - a, stream)

        # --- partials of all heads over the rows held here
        lists, lengths = self._lists(*lists, attended, positions)
        out, lse = self._partials(binding, query, lists, lengths, attended,
                                  *((world.rank, 1) if striped else (0, world.size)))
        if striped:
            out, lse = out.reshape(n, heads, width), lse.reshape(n, heads)
        else:
            groups = out, lse
            out, lse = take("own out", n, heads, width), take("own lse", n, heads)
            combine(*groups, out, lse, stream)

        # --- partials back to the owners of the heads
        lse = lse.reshape(n, heads, 1)
        sent = [[take(f"{name} for {r}", n, b - a, wide) for r, (a, b) in enumerate(self.heads)]
                for name, wide in (("partials", width), ("lse", 1))]
        for whole, parts in zip((out, lse), sent):
            for part, (a, b) in zip(parts, self.heads):
                copy_heads(whole, a, part, 0, b - a, stream)
        back = take("outs", world.size, n, own, width), take("lses", world.size, n, own, 1)
        m.transport.exchange(m.buffers, "partials", [
            (parts, [to[r] for r in range(world.size)]) for parts, to in zip(sent, back)], cut)
        if own:
            combine(back[0], back[1].reshape(world.size, n, own), merged,
                    take("merged lse", n, own), stream)

    def _attend_history(self, binding, index, weight, absorbed, rows, merged):
        """Stages 2 to 4 of a prompt chunk whose history lies on several ranks (see prefill.py)."""
        m, s, world, stream = self.model, self.model.shape, self.model.world, self.model.stream
        take, (n, own, width) = m.buffers.take, absorbed.shape
        seat, last = int(rows.seats[0]), int(rows.positions[-1])
        positions = take("positions", n, dtype=np.int32)
        here = take("here", n, dtype=np.int32)          # the scratch tables have one row
        here.copy_to_device(np.zeros(n, np.int32))

        # --- all pooled keys, once, and the lists
        pages = np.arange(last // self.page_rows + 1)
        keys, table = self._scratch(self.keys[binding], "keys", seat, pages)
        found = self._score(binding, index, weight, here, positions, ALL_GROUPS, keys, table)
        lists, lengths = self._lists(*(a.reshape(1, *a.shape) for a in found), here, positions)
        order = take("order", n, s.list_width, dtype=np.int32)
        starts = take("starts", n, world.size + 1, dtype=np.int32)
        arrange(lists, lengths, here, self.page_rows, world.size, 0, order, starts, stream)

        # --- tile by tile; a rank without heads fetches with the others all the same
        parts = (take("part out", 2 * world.size, n, own, width),
                 take("part top", 2 * world.size, n, own),
                 take("part mass", 2 * world.size, n, own))
        for tile in range(last // TILE + 1):
            first = tile * TILE // self.page_rows
            pages = np.arange(first, min((tile + 1) * TILE - 1, last) // self.page_rows + 1)
            latents, table = self._scratch(self.latents[binding], "tile", seat, pages)
            if own:
                attend(absorbed, order, starts, here, table, latents, s.qk_nope ** -0.5, first,
                       tile, tile + 1, True, *parts, stream)
        if own:
            out, lse = take("partial", world.size, n, own, width), take("lse", world.size, n, own)
            finish(*parts, starts, here, True, out, lse, stream)
            combine(out, lse, merged, take("merged lse", n, own), stream)

    def _scratch(self, array, name, seat, pages):
        """One seat's logical pages from all ranks, on this device, and their table [1, pages]."""
        m, take = self.model, self.model.buffers.take
        m.stream.synchronize()
        whole = fetch_pages(SimpleNamespace(world=m.world, table=self.pages), _OnDevice(array),
                            seat, pages)
        held = take(name, *whole.shape, dtype=whole.dtype)
        held.copy_to_device(whole)
        table = take(f"{name} table", 1, len(pages), dtype=np.int32)
        table.copy_to_device(np.arange(len(pages), dtype=np.int32)[None])
        return held, table

    def _score(self, binding, index, weight, seats, positions, group, keys=None, table=None):
        m, s, take = self.model, self.model.shape, self.model.buffers.take
        n, keep = len(seats), s.pools_kept
        batch = min(n, SCORE_ROWS)
        scores, pools = take("scores", n, keep), take("pools", n, keep, dtype=np.int32)
        counts = take("counts", n, dtype=np.int32)
        score(index, weight, seats, positions, self.table if table is None else table,
              self.keys[binding] if keys is None else keys, s.index_kpool, group, m.world.size,
              take("found", batch, self.room), take("bins", batch, BINS, dtype=np.int32),
              take("near", batch, NEAR, dtype=np.int32), take("fill", batch, dtype=np.int32),
              self.faults, scores, pools, counts, m.stream)
        return scores, pools, counts

    def _lists(self, scores, pools, counts, seats, positions):
        m, s, take = self.model, self.model.shape, self.model.buffers.take
        n = len(seats)
        lists = take("lists", n, s.list_width, dtype=np.int32)
        lengths = take("lengths", n, dtype=np.int32)
        merge(scores, pools, counts, seats, positions, s.index_kpool, lists, lengths, m.stream)
        return lists, lengths

    def _partials(self, binding, query, lists, lengths, seats, first_group, groups):
        """Stage 4: out [G, n, heads, kv_lora], lse [G, n, heads], groups from first_group on."""
        m, s, take = self.model, self.model.shape, self.model.buffers.take
        n, heads, width = query.shape
        order = take("order", n, s.list_width, dtype=np.int32)
        starts = take("starts", n, groups + 1, dtype=np.int32)
        arrange(lists, lengths, seats, self.page_rows, m.world.size, first_group, order, starts,
                m.stream)
        chain = n > 32
        many = 2 * groups if chain else slots(s.list_width, groups)
        parts = (take("part out", many, n, heads, width), take("part top", many, n, heads),
                 take("part mass", many, n, heads))
        attend(query, order, starts, seats, self.table, self.latents[binding], s.qk_nope ** -0.5, 0,
               0, EVERY_TILE, chain, *parts, m.stream)
        out, lse = take("partial", groups, n, heads, width), take("lse", groups, n, heads)
        finish(*parts, starts, seats, chain, out, lse, m.stream)
        return out, lse

    def _project(self, w, merged, seats, y):
        """Stage 5: values and output of the own heads."""
        m, s, stream = self.model, self.model.shape, self.model.stream
        take, (n, h, r) = m.buffers.take, merged.shape
        if not h:
            return cuda.driver.device_memset(y, 0, y.nbytes, stream)
        bits = take("merged bits", n, h * r, dtype=np.uint16)
        narrow_cuda(merged.reshape(n, h * r), 0, seats, bits, stream)
        values = take("values", n, h, s.v_head)
        gemm(bits.reshape(n, h, r), w.value_up.w, values, stream, w.value_up.scales)
        out = take("value bits", n, h * s.v_head, dtype=np.uint16)
        narrow_cuda(values.reshape(n, h * s.v_head), 0, seats, out, stream)
        gemm(out, w.out.w, y, stream, w.out.scales)


def device_scratch_bytes(config, shape, world):
    """(name, bytes) of a rank's largest buffers on the device, those of a prompt chunk."""
    s, rows = shape, min(config.chunk, config.context)
    heads, pieces = -(-s.heads // world), min(rows, CHUNK_ROWS)
    split = config.split and world > 1
    attended = rows if split else pieces
    partials = 2 * world * attended * heads * (s.kv_lora + 2)
    pools = window_pages(config.context, config.page_rows) * config.page_rows // s.index_kpool
    values = {
        "chunk: streams": rows * s.hidden * (s.hc_mult + 3),
        "chunk: KDA": rows * -(-s.kda_heads // world) * s.kda_dim * 10,
        "chunk: queries": rows * (s.index_heads * s.index_dim + 3 * heads * s.kv_lora),
        "chunk: lists": 2 * attended * s.list_width,
        "chunk: partials": partials + world * attended * heads * (s.kv_lora + 2),
        "chunk: scores": SCORE_ROWS * (pools + BINS + NEAR),
        "chunk: experts": rows * s.experts_per_token * (s.hidden + s.moe_intermediate // world),
        "history": split * (TILE * s.kv_lora + pools * s.index_dim) // 2,
    }
    return tuple((name, FLOAT * count) for name, count in values.items())


class _OnDevice:
    """Device pages as fetch_pages reads a host array."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, pages):
        found = np.empty((len(pages), *self.shape[1:]), self.dtype)
        for row, page in zip(found, pages.tolist()):
            self._array[page].copy_to_host(row)
        return found


def _zeros(shape, dtype=np.float32):
    return cuda.to_device(np.zeros(shape, dtype))
