"""DSA layers on the device: projections, the five stages, and what crosses the ranks between
them.

The launches follow dsa.py and step.py: a row whose pages all lie here is attended here for the
own heads; for the others, absorbed queries go to all ranks while each scores its own pages, then
candidates go to all and partials come back, each between two graphs (transport). A prompt chunk
fetches its history (device_history). Rows that this rank does not attend have seat -1 in
`attended`, which every kernel passes over.
"""

import numpy as np

from engine.device import cuda
from engine.device_graph import Crossing
from engine.device_history import History, history_scratch_bytes
from engine.gemm import gemm
from engine.memory import FLOAT, window_pages
from engine.model.norm import layer_norm_cuda, narrow_cuda, rms_norm_cuda
from engine.pool.owner import STRIPED
from engine.stages.attend_cuda import attend
from engine.stages.insert import insert
from engine.stages.merge import merge, spans_at_most
from engine.stages.project import combine, finish
from engine.stages.score_cuda import BINS, NEAR, score
from engine.transport import gather_heads, head_spans, scatter_heads, zero

INDEX_NORM_EPS = 1e-6
ALL_GROUPS = -1
CHUNK_ROWS = 256        # rows of a prompt chunk that are attended at a time: bounds the partials
FEW_ROWS = 32           # more rows than a decode step has: stage 4 walks their lists in order
SCORE_ROWS, SCORED = 16, 1 << 22        # rows scored at a time, at least; scores held, but for them


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
        self.room, self.window = window * pools, window * page_rows
        self._sees = self.room          # pools that a row of this walk sees at most
        self.faults = _zeros(1, np.int32)
        self.history, self.spans = History(self, config), head_spans(has.heads)

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

    def attended(self, rows):
        """The rows' seats, -1 where this rank does not attend: striped all, owner its own."""
        owners = self.pages.owners[rows.seats]
        mine = (owners < 0) | (owners == self.model.world.rank)
        return np.where(mine, rows.seats, -1)

    def alone(self, rows):
        """Whether every row's pages all lie on this rank, as every rank knows."""
        return not self.split or bool((rows.positions < self.replicated_rows).all())

    # --- a layer --------------------------------------------------------------------------------

    def layer(self, w, binding, x, n, y, alone, cut, rows):
        """y [n, hidden] = this rank's part of a DSA layer of n rows x [n, hidden] BF16.

        alone: all pages of the rows lie here. rows: of a prompt chunk, None in a decode step.
        cut(host_work): where the host must act between kernels.
        """
        m, take, s = self.model, self.model.buffers.take, self.model.shape
        seats, positions = (take(name, n, dtype=np.int32) for name in ("seats", "positions"))
        shared = not alone and rows is None
        self._sees = self.room if rows is None else max(1, (int(rows.positions[-1]) + 1)
                                                        // s.index_kpool)
        key, index_in, keyed = self._own_keys(w, x, n, seats, m.side.fork())
        low, latent = self._down(w, x, n, seats)
        if shared:      # queries leave first, and travel while the ranks score
            queries = m.transport.buffer(m.buffers, "queries", n * self.heads[-1][1] * s.kv_lora)
            parts = [_part(queries, n, s.kv_lora, *span) for span in self.heads]
            absorbed = parts[m.world.rank].array
            self._absorb(w, low, n, seats, absorbed, m.stream)
            m.side.join(keyed)
            wires = [part.wire for part in parts]
            cut(m.world.repeated(([wires[m.world.rank]] * m.world.size, wires), stage="queries"),
                True)
        else:
            absorbed = take("absorbed", n, m.own_heads, s.kv_lora)
            self._absorb(w, low, n, seats, absorbed, m.side.fork())
            asked = m.side.mark()
            m.side.join(keyed)
        index, weight = self._insert(w, binding, low, latent, key, index_in, seats, positions)
        merged = take("merged", n, m.own_heads, s.kv_lora)
        if alone:
            self._in_pieces(n, lambda piece: self._attend_here(
                binding, index[piece], weight[piece], absorbed[piece], asked, seats[piece],
                positions[piece], merged[piece]))
        elif shared:
            self._attend_shared(binding, index, weight, queries.array, positions, merged, cut)
        else:
            self.history.attend(binding, index, weight, absorbed, rows, merged)
        self._project(w, merged, seats, y)

    @staticmethod
    def _in_pieces(n, work):
        for first in range(0, n, CHUNK_ROWS):
            work(slice(first, min(first + CHUNK_ROWS, n)))

    def _own_keys(self, w, x, n, seats, stream):
        """The rows' raw keys [n, d] after their norm, what they come from (key, gate, head weights:
        [n, 2 d + index heads]), and the mark of both on the side stream."""
        m, d, take = self.model, self.model.shape.index_dim, self.model.buffers.take
        index_in, key = take("index in", n, 2 * d + m.shape.index_heads), take("key", n, d)
        gemm(x, w.index_in.w, index_in, stream, w.index_in.scales)
        layer_norm_cuda(index_in, 0, w.k_norm_w, w.k_norm_b, INDEX_NORM_EPS, seats, key, 0, stream)
        return key, index_in, m.side.mark()

    def _down(self, w, x, n, seats):
        """What queries are made of, [n, q_lora] BF16, and the latent rows [n, kv_lora] float32."""
        s, take, stream = self.model.shape, self.model.buffers.take, self.model.stream
        down = take("down", n, s.q_lora + s.kv_lora)
        gemm(x, w.down.w, down, stream, w.down.scales)
        low, latent = take("q low", n, s.q_lora, dtype=np.uint16), take("latent", n, s.kv_lora)
        rms_norm_cuda(down, 0, w.q_norm, s.eps, seats, low, 0, stream)
        rms_norm_cuda(down, s.q_lora, w.kv_norm, s.eps, seats, latent, 0, stream)
        return low, latent

    def _absorb(self, w, low, n, seats, absorbed, stream):
        """absorbed [n, own heads, kv_lora] = the own heads' queries against latent rows."""
        s, take, h = self.model.shape, self.model.buffers.take, self.model.own_heads
        if not h:
            return
        query, bits = take("query", n, h * s.qk_nope), take("q bits", n, h * s.qk_nope,
                                                            dtype=np.uint16)
        gemm(low, w.q_up.w, query, stream, w.q_up.scales)
        narrow_cuda(query, 0, seats, bits, stream)
        gemm(bits.reshape(n, h, s.qk_nope), w.key_up.w, absorbed, stream, w.key_up.scales)

    def _insert(self, w, binding, low, latent, key, index_in, seats, positions):
        """Stage 1; returns indexer queries [n, index heads, d] and head weights."""
        m, s, n, d = self.model, self.model.shape, len(low), self.model.shape.index_dim
        index = m.buffers.take("index q", n, s.index_heads * d)
        gemm(low, w.index_q.w, index, m.stream, w.index_q.scales)
        insert(latent, key, index_in[:, d:2 * d], w.ape, seats, positions, self.table,
               self.latents[binding], self.keys[binding], self.tail_k[binding],
               self.tail_g[binding], m.stream)
        # without index_heads^-0.5: a positive factor of all scores orders nothing
        return index.reshape(n, s.index_heads, d), index_in[:, 2 * d:]

    def _attend_here(self, binding, index, weight, absorbed, asked, seats, positions, merged):
        """Stages 2 to 4 and the merge over pages of this rank, for its own heads; asked: the mark
        of the absorbed queries."""
        m, n, world = self.model, len(seats), self.model.world.size
        found = self.best_pools(binding, index, weight, seats, positions, ALL_GROUPS)
        lists = self.lists(*(a.reshape(1, *a.shape) for a in found), seats, positions, 0, world)
        m.side.join(asked)
        if m.own_heads:
            self._attend(binding, absorbed, lists, seats, merged,
                         m.buffers.take("merged lse", n, m.own_heads))

    def _attend_shared(self, binding, index, weight, queries, positions, merged, cut):
        """Stages 2 to 4 across the ranks for decode rows (see step.py).

        queries: flat, rank by rank; those of the other ranks arrive while this one scores.
        """
        m, world, stream, take = self.model, self.model.world, self.model.stream, \
            self.model.buffers.take
        rank, (n, own, width), heads = world.rank, merged.shape, self.heads[-1][1]
        attended = take("attended", n, dtype=np.int32)

        # --- candidates of the own pages, to all where pages are striped
        striped = self.placement == STRIPED
        if striped:
            keep = m.shape.pools_kept
            block = m.transport.buffer(m.buffers, "candidates", world.size * n * (2 * keep + 1),
                                       dtype=np.int32)
            self.best_pools(binding, index, weight, attended, positions, rank,
                            into=[a[rank] for a in _apart(block.array, world.size, n, keep)])
            wires = [[a[r] for r in range(world.size)]
                     for a in _apart(block.wire, world.size, n, keep)]
            cut(world.repeated(*(([a[rank]] * world.size, a) for a in wires), stage="candidates"))
        else:
            found = [a.reshape(1, *a.shape) for a in self.best_pools(
                binding, index, weight, attended, positions, ALL_GROUPS)]
            cut(_nothing)       # the queries have come

        # --- partials of all heads over the rows held here
        query = take("all queries", n, heads, width)
        gather_heads(queries, self.spans, query, m.side.fork())
        asked = m.side.mark()
        if striped:
            block = m.transport.here(m.buffers, "candidates here", block, stream)
            found = _apart(block, world.size, n, keep)
        lists = self.lists(*found, attended, positions,
                           *((rank, 1) if striped else (0, world.size)))
        m.side.join(asked)
        out, lse = take("own out", n, heads, width), take("own lse", n, heads)
        self._attend(binding, query, lists, attended, out, lse)

        # --- partials back to the owners of the heads
        pairs, back = [], m.transport.buffer(m.buffers, "partials back",
                                             world.size * n * own * (width + 1))
        came = zip(*(_back(flat, world.size, n, own, width) for flat in back))
        for name, whole, (array, wire) in zip(("partials", "lse"),
                                              (out, lse.reshape(n, heads, 1)), came):
            wide = whole.shape[2]
            sent = m.transport.buffer(m.buffers, f"{name} sent", n * heads * wide)
            scatter_heads(whole, self.spans, self.heads[rank][0], array[rank], sent.array, stream)
            outgoing = [_part(sent, n, wide, *span).wire for span in self.heads]
            incoming = [wire[r] for r in range(world.size)]
            outgoing[rank] = incoming[rank]     # it is there already
            pairs.append((outgoing, incoming))
        cut(world.repeated(*pairs, stage="partials"))
        if own:
            out, lse = _back(m.transport.here(m.buffers, "partials here", back, stream),
                             world.size, n, own, width)
            combine(out, lse.reshape(world.size, n, own), merged, take("merged lse", n, own),
                    stream)

    def best_pools(self, binding, index, weight, seats, positions, group, keys=None, table=None,
                   into=None):
        """Stage 2 over pages k with k % W == group, or all: (scores, pools, counts).

        keys, table: pooled keys and page table in place of this rank's own. into: the three
        arrays to write.
        """
        m, s, take = self.model, self.model.shape, self.model.buffers.take
        n, keep = len(seats), s.pools_kept
        batch = min(n, _scored_rows(self._sees))
        scores, pools, counts = into or (take("scores", n, keep), take("pools", n, keep,
                                         dtype=np.int32), take("counts", n, dtype=np.int32))
        score(index, weight, seats, positions, self.table if table is None else table,
              self.keys[binding] if keys is None else keys, s.index_kpool, group, m.world.size,
              take("found", batch, self._sees), take("bins", batch, BINS, dtype=np.int32),
              take("near", batch, NEAR, dtype=np.int32), take("fill", batch, 2, dtype=np.int32),
              self.faults, scores, pools, counts, m.stream)
        return scores, pools, counts

    def lists(self, scores, pools, counts, seats, positions, first_group, groups, table=None):
        """Stage 3 of candidates [lists, n, ...] -> what stage 4 reads of page groups first_group ..
        first_group + groups - 1: (order, spans, starts). table: in place of this rank's own."""
        m, s, take = self.model, self.model.shape, self.model.buffers.take
        n, many = len(seats), spans_at_most(s.list_width, groups, self.window)
        order = take("order", n, s.list_width, dtype=np.int32)
        spans = take("spans", n, many + 1, dtype=np.int32)
        starts = take("starts", n, groups + 1, dtype=np.int32)
        merge(scores, pools, counts, seats, positions, self.table if table is None else table,
              self.page_rows, s.index_kpool, m.world.size, first_group, order, spans, starts,
              m.stream)
        return order, spans, starts

    def _attend(self, binding, query, lists, seats, merged, lse):
        """Stage 4, groups merged: merged [n, heads, kv_lora], lse [n, heads]."""
        m, take, (order, spans, starts) = self.model, self.model.buffers.take, lists
        (n, heads, width), groups = query.shape, starts.shape[1] - 1
        chain = n > FEW_ROWS
        many = groups if chain else spans.shape[1] - 1
        mass = take("part mass", many, n, heads)
        if chain and groups == 1:       # one group is merged as it is
            out, top = merged.reshape(1, n, heads, width), lse.reshape(1, n, heads)
        else:
            out, top = take("part out", many, n, heads, width), take("part top", many, n, heads)
        attend(query, order, spans, starts, seats, self.latents[binding], m.shape.qk_nope ** -0.5,
               0, 0, chain, out, top, mass, m.stream)
        if not chain:
            finish(out, top, mass, starts, seats, merged, lse, m.stream)
        elif groups > 1:
            combine(out, top, merged, lse, m.stream)

    def _project(self, w, merged, seats, y):
        """Stage 5: values and output of the own heads."""
        m, s, stream = self.model, self.model.shape, self.model.stream
        take, (n, h, r) = m.buffers.take, merged.shape
        if not h:
            return zero(y, stream)
        bits = take("merged bits", n, h * r, dtype=np.uint16)
        narrow_cuda(merged.reshape(n, h * r), 0, seats, bits, stream)
        values = take("values", n, h, s.v_head)
        gemm(bits.reshape(n, h, r), w.value_up.w, values, stream, w.value_up.scales)
        out = take("value bits", n, h * s.v_head, dtype=np.uint16)
        narrow_cuda(values.reshape(n, h * s.v_head), 0, seats, out, stream)
        gemm(out, w.out.w, y, stream, w.out.scales)


def _part(crossing, n, width, start, stop):
    """The part [n, stop - start, width] of heads start .. stop - 1 in a flat Crossing of n rows,
    rank by rank."""
    a, b, shape = n * start * width, n * stop * width, (n, stop - start, width)
    return Crossing(crossing.array[a:b].reshape(shape), crossing.wire[a:b].reshape(shape))


def _apart(flat, world, n, keep):
    """(scores, pools, counts) of all ranks' candidates, [W, n, ...], in a flat int32 array."""
    size = world * n * keep
    return (flat[:size].view(np.float32).reshape(world, n, keep),
            flat[size:2 * size].reshape(world, n, keep), flat[2 * size:].reshape(world, n))


def _back(flat, world, n, own, width):
    """(partials [W, n, own heads, width], log-sum-exps [W, n, own heads, 1]) in a flat array."""
    size = world * n * own * width
    return (flat[:size].reshape(world, n, own, width), flat[size:].reshape(world, n, own, 1))


def _scored_rows(pools):
    """Rows of which all scores are held at a time, of `pools` each."""
    return max(SCORE_ROWS, min(CHUNK_ROWS, SCORED // pools))


def _nothing():
    """Host work of a cut that only waits."""


def device_scratch_bytes(config, shape, world):
    """(name, bytes) of a rank's largest buffers on the device."""
    s, rows = shape, min(config.chunk, config.context)
    heads, pieces = -(-s.heads // world), min(rows, CHUNK_ROWS)
    split = config.split and world > 1
    attended, few = rows if split else pieces, min(config.parallel, FEW_ROWS)
    window = window_pages(config.context, config.page_rows) * config.page_rows
    pools = window // s.index_kpool
    spans = max(spans_at_most(s.list_width, world, window) * heads,
                spans_at_most(s.list_width, 1, window) * s.heads * split)
    values = {
        "chunk: streams": rows * s.hidden * (s.hc_mult + 3),
        "chunk: KDA": rows * -(-s.kda_heads // world) * s.kda_dim * 10,
        "chunk: queries": rows * (s.index_heads * s.index_dim + 3 * heads * s.kv_lora),
        "chunk: lists": 2 * attended * s.list_width,
        "chunk: partials": world * attended * heads * (s.kv_lora + 2),
        "step: partials": few * spans * (s.kv_lora + 2),
        "chunk: scores": max(SCORED, SCORE_ROWS * pools) + CHUNK_ROWS * (BINS + NEAR),
        "chunk: experts": rows * s.experts_per_token * (s.hidden + s.moe_intermediate // world),
    }
    history = history_scratch_bytes(config, shape, world) if split else ()
    return (*((name, FLOAT * count) for name, count in values.items()), *history)


def _zeros(shape, dtype=np.float32):
    return cuda.to_device(np.zeros(shape, dtype))
