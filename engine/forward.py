"""The walk through the layers for n rows at once: what prefill and decode have in common.

`Model` is everything one rank holds. `forward` runs embedding, mHC, KDA, MoE and the final norm,
and calls `attend` in each DSA layer: step.py passes the exchange of queries and partials,
prefill.py the fetch of history. Every rank runs it with the same rows and, after each sum over
ranks, has the same streams.
"""

from dataclasses import dataclass

import numpy as np

from engine.model.dense import mlp
from engine.model.embed import embed
from engine.model.head import head
from engine.model.hyper import hyper_end, hyper_in, hyper_out, hyper_start
from engine.model.kda import kda
from engine.model.moe import moe
from engine.model.norm import rms_norm
from engine.pool.page import Pages
from engine.pool.state import States
from engine.pool.table import PageTable
from engine.shape import Part, Shape
from engine.weights import Weights
from engine.world import World


@dataclass(frozen=True)
class Rows:
    """n rows of one pass. Rows of one seat are consecutive and ascend by one position.

    tokens, seats, positions: int32 [n], contiguous.
    """

    tokens: np.ndarray
    seats: np.ndarray
    positions: np.ndarray

    @property
    def count(self):
        return len(self.tokens)

    @classmethod
    def of(cls, tokens, seats, positions):
        """Rows from any integer sequences."""
        return cls(*(np.ascontiguousarray(a, np.int32) for a in (tokens, seats, positions)))


@dataclass(frozen=True)
class Model:
    """What one rank holds: its weights, its KV pages and states, and the world it works in."""

    world: World
    shape: Shape
    part: Part
    weights: Weights
    pages: Pages
    states: States
    table: PageTable
    heads: tuple            # (start, stop) of every rank's attention heads
    vocab: tuple            # (start, stop) of every rank's vocabulary rows
    split: bool             # the KV is split over the ranks
    replicated_rows: int    # R: positions below it lie on every rank

    @property
    def own_heads(self):
        return self.part.heads[1] - self.part.heads[0]


def forward(model, rows, attend):
    """rows -> [n, hidden] float32 after the final norm, the same on every rank.

    attend(model, binding, weights, x, rows): this rank's part of a DSA layer's output.
    """
    shape, world = model.shape, model.world
    streams = hyper_start(embed(model.weights.embed, rows.tokens), shape.hc_mult)
    bindings = seen_kda = 0
    for layer in model.weights.layers:
        x, post, comb = hyper_in(streams, layer.attn_hyper, shape)
        x = rms_norm(x, layer.attn_norm, shape.eps)
        if layer.kind == "kda":
            states = model.states
            y = kda(x, layer.attn, shape, states.kda[seen_kda], states.conv[seen_kda], rows.seats)
            seen_kda += 1
        else:
            y = attend(model, bindings, layer.attn, x, rows)
            bindings += 1
        hyper_out(streams, world.sum(y), post, comb)
        x, post, comb = hyper_in(streams, layer.ffn_hyper, shape)
        x = rms_norm(x, layer.ffn_norm, shape.eps)
        hyper_out(streams, world.sum(feed_forward(x, layer.mlp, shape)), post, comb)
    return rms_norm(hyper_end(streams), model.weights.norm, shape.eps)


def feed_forward(x, weights, shape):
    """A layer's dense MLP or mixture of experts: this rank's part."""
    if hasattr(weights, "router"):
        return moe(x, weights, shape)
    return mlp(x, weights, shape.swiglu_limit)


def logits(model, hidden):
    """hidden [n, hidden] -> [n, vocab] float32 on rank 0, None elsewhere."""
    world = model.world
    mine = head(hidden, model.weights.head)
    parts = [np.empty((len(hidden), stop - start), np.float32) for start, stop in model.vocab]
    if world.rank:
        world.exchange(([mine] + [None] * (world.size - 1), [None] * world.size),
                       stage="logits")
        return None
    world.exchange(([mine] + [None] * (world.size - 1), parts), stage="logits")
    return np.concatenate(parts, axis=1)
