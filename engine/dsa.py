"""A DSA layer's own work on one rank: projections, insertion, lists and attention over the pages
it holds.

step.py and prefill.py add what must cross the ranks. Page group k % W decides which partial a row
of KV belongs to, under every placement and also where nothing is split, so that the same bits
come out of each.
"""

from typing import NamedTuple

import numpy as np

from engine.errors import FaultError
from engine.linear import linear, linear_group
from engine.model.norm import layer_norm, rms_norm
from engine.stages.attend import attend_host, finish_host
from engine.stages.insert import insert_host
from engine.stages.merge import merge_host
from engine.stages.project import combine_host
from engine.stages.score import score_host

INDEX_NORM_EPS = 1e-6     # the indexer's k_norm: the one LayerNorm, not rms_norm_eps
ALL_GROUPS = -1


class Queries(NamedTuple):
    """What n rows ask of a layer's KV."""

    index: np.ndarray       # [n, index_heads, index_dim] float32
    weight: np.ndarray      # [n, index_heads] float32
    absorbed: np.ndarray    # [n, own heads, kv_lora] float32


class Candidates(NamedTuple):
    """The best pools of n rows, as far as one rank or group knows."""

    scores: np.ndarray      # [n, P] float32
    pools: np.ndarray       # [n, P] int32
    counts: np.ndarray      # [n] int32


def insert(model, binding, w, x, rows):
    """Project n rows x [n, hidden]; write latents, pooled keys and tail; return their Queries."""
    shape, n = model.shape, len(x)
    down = linear(x, w.down)
    q_low = rms_norm(np.ascontiguousarray(down[:, :shape.q_lora]), w.q_norm, shape.eps)
    latent = rms_norm(np.ascontiguousarray(down[:, shape.q_lora:]), w.kv_norm, shape.eps)
    d = shape.index_dim
    index_in = linear(x, w.index_in)
    key = layer_norm(np.ascontiguousarray(index_in[:, :d]), w.k_norm_w, w.k_norm_b, INDEX_NORM_EPS)
    gate = np.ascontiguousarray(index_in[:, d:2 * d])
    insert_host(latent, key, gate, w.ape, rows.seats, rows.positions, model.table.table,
                model.pages.latents[binding], model.pages.keys[binding],
                model.states.tail_k[binding], model.states.tail_g[binding])
    weight = index_in[:, 2 * d:] * np.float32(shape.index_heads ** -0.5)
    query = linear(q_low, w.q_up).reshape(n, model.own_heads, shape.qk_nope)
    return Queries(linear(q_low, w.index_q).reshape(n, shape.index_heads, d),
                   np.ascontiguousarray(weight), linear_group(query, w.key_up))


def best_pools(model, binding, queries, rows, group, keys=None, table=None):
    """Stage 2 over pages k with k % W == group, or ALL_GROUPS -> Candidates.

    keys, table: pooled keys and page table in place of this rank's own.
    """
    n, keep = len(rows.positions), model.shape.pools_kept
    found = Candidates(np.empty((n, keep), np.float32), np.empty((n, keep), np.int32),
                       np.empty(n, np.int32))
    faults = score_host(queries.index, queries.weight, rows.seats, rows.positions,
                        model.table.table if table is None else table,
                        model.pages.keys[binding] if keys is None else keys,
                        model.shape.index_kpool, group, model.world.size, *found)
    if faults:
        raise FaultError(f"{faults} scores of DSA layer {binding} are not numbers, rows at "
                         f"positions {rows.positions[0]} to {rows.positions[-1]}",
                         "The checkpoint may be damaged; if it is not, please report this.",
                         rank=model.world.rank)
    return found


def merged_lists(model, candidates, positions):
    """Stage 3. candidates [lists, n, ...] -> (lists [n, width], lengths [n]), both int32."""
    lists = np.empty((len(positions), model.shape.list_width), np.int32)
    lengths = np.empty(len(positions), np.int32)
    merge_host(*candidates, positions, model.shape.index_kpool, lists, lengths)
    return lists, lengths


def own_lists(model, binding, queries, rows, keys=None, table=None):
    """Stages 2 and 3 where this rank holds every page, or was given all `keys` and their table."""
    alone = best_pools(model, binding, queries, rows, ALL_GROUPS, keys, table)
    return merged_lists(model, Candidates(*(a[None] for a in alone)), rows.positions)


class Partials:
    """Running partials of n rows and some heads, one for each of `groups` page groups (stage 4)."""

    def __init__(self, model, query, first_group, groups):
        n, heads, width = query.shape
        self.model, self.query, self.first_group = model, query, first_group
        self.top = np.full((groups, n, heads), -np.inf, np.float32)
        self.mass = np.zeros((groups, n, heads), np.float32)
        self.out = np.zeros((groups, n, heads, width), np.float32)

    def add(self, lists, lengths, seats, table, latents, first_page, first_tile, last_tile):
        """Attend over the tiles first_tile .. last_tile - 1 of the lists."""
        scale = np.float32(self.model.shape.qk_nope ** -0.5)
        attend_host(self.query, lists, lengths, seats, table, latents, scale, self.model.world.size,
                    self.first_group, first_page, first_tile, last_tile, self.top,
                    self.mass, self.out)

    def finish(self):
        """(out [G, n, heads, kv_lora], lse [G, n, heads])."""
        finish_host(self.top, self.mass, self.out)
        return self.out, self.top


def attend_pages(model, binding, query, lists, lengths, rows, first_group, groups):
    """Stage 4 over pages of this rank -> (out [G, n, heads, kv_lora], lse [G, n, heads])."""
    partials = Partials(model, query, first_group, groups)
    partials.add(lists, lengths, rows.seats, model.table.table, model.pages.latents[binding],
                 0, 0, np.iinfo(np.int32).max)
    return partials.finish()


def combine(out, lse):
    """Stage 5's merge of G partials -> (merged [n, heads, kv_lora], lse [n, heads])."""
    merged, merged_lse = np.empty(out.shape[1:], np.float32), np.empty(lse.shape[1:], np.float32)
    combine_host(out, lse, merged, merged_lse)
    return merged, merged_lse


def attend_alone(model, binding, queries, rows):
    """Stages 2 to 4 and the merge where this rank holds every page: [n, own heads, kv_lora]."""
    lists, lengths = own_lists(model, binding, queries, rows)
    out, lse = attend_pages(model, binding, queries.absorbed, lists, lengths, rows,
                            0, model.world.size)
    return combine(out, lse)[0]
