"""A DSA layer in a decode step: ranks exchange candidates and queries, attend over the rows they
hold, and return partials.

Rows whose pages all lie here (nothing split, or a conversation still below R) are done alone. For
the others, in two exchanges: candidates and absorbed queries go out together; partial outputs
come back to the rank that owns the heads. Striped: every rank attends its page group for every
row. Owner: the owner alone attends, over all groups, and merges before it answers.
"""

import numpy as np

from engine.dsa import (Candidates, Queries, attend_alone, attend_pages, best_pools, combine,
                        insert, merged_lists, own_lists)
from engine.forward import Rows
from engine.pool.table import EVERY_RANK
from engine.stages.project import project_host


def decode_attention(model, binding, w, x, rows):
    """This rank's part of the layer's output for n decode rows x [n, hidden]: [n, hidden]."""
    queries = insert(model, binding, w, x, rows)
    holders = np.array([_attender(model, s, p) for s, p in zip(rows.seats, rows.positions)])
    merged = np.empty(queries.absorbed.shape, np.float32)
    for shared in (False, True):
        chosen = np.flatnonzero((holders != EVERY_RANK) == shared)
        if chosen.size:
            work = _attend_shared if shared else _attend_here
            part = Queries(*(a[chosen] for a in queries))
            merged[chosen] = work(model, binding, part, _take(rows, chosen), holders[chosen])
    return project_host(merged, w.value_up, w.out)


def _attender(model, seat, position):
    """Who attends a row: EVERY_RANK each for its own heads, one owner, or W for all together."""
    if not model.split or position < model.replicated_rows:
        return EVERY_RANK
    owner = model.table.owners[seat]
    return model.world.size if owner < 0 else owner


def _take(rows, chosen):
    return Rows(rows.tokens[chosen], rows.seats[chosen], rows.positions[chosen])


def _attend_here(model, binding, queries, rows, holders):
    return attend_alone(model, binding, queries, rows)


def _attend_shared(model, binding, queries, rows, holders):
    """Stages 2 to 4 across the ranks for rows whose pages are split -> [n, own heads, kv_lora]."""
    world = model.world
    everyone = world.size
    theirs = [np.flatnonzero((holders == r) | (holders == everyone)) for r in range(world.size)]
    mine = theirs[world.rank]
    striped = np.flatnonzero(holders == everyone)

    # --- candidates of the striped rows to all, queries to those who attend
    found = best_pools(model, binding, Queries(*(a[striped] for a in queries)),
                       _take(rows, striped), world.rank)
    everyones = Candidates(*(np.empty((world.size, *a.shape), a.dtype) for a in found))
    asked = [queries.absorbed[theirs[r]] for r in range(world.size)]
    width = queries.absorbed.shape[2]
    query = [np.empty((mine.size, stop - start, width), np.float32) for start, stop in model.heads]
    world.exchange(*(([a] * world.size, list(b)) for a, b in zip(found, everyones)), (asked, query),
                   stage="queries")
    query = np.concatenate(query, axis=1)

    # --- partials of all heads over the rows held here
    out = np.empty((mine.size, query.shape[1], width), np.float32)
    lse = np.empty((mine.size, query.shape[1]), np.float32)
    is_striped = holders[mine] == everyone
    if striped.size:
        lists = merged_lists(model, everyones, rows.positions[striped])
        part = attend_pages(model, binding, query[is_striped], *lists, _take(rows, striped),
                            world.rank, 1)
        out[is_striped], lse[is_striped] = part[0][0], part[1][0]
    owned = mine[~is_striped]
    if owned.size:
        own = _take(rows, owned)
        lists = own_lists(model, binding, Queries(*(a[owned] for a in queries)), own)
        part = attend_pages(model, binding, query[~is_striped], *lists, own, 0, world.size)
        out[~is_striped], lse[~is_striped] = combine(*part)

    # --- partials back to the owners of the heads; a rank that did not attend a row counts as empty
    heads = model.own_heads
    back = [(np.empty((t.size, heads, width), np.float32), np.empty((t.size, heads), np.float32))
            for t in theirs]
    world.exchange(
        ([np.ascontiguousarray(out[:, a:b]) for a, b in model.heads], [o for o, _ in back]),
        ([np.ascontiguousarray(lse[:, a:b]) for a, b in model.heads], [e for _, e in back]),
        stage="partials")
    outs = np.zeros((world.size, len(holders), heads, width), np.float32)
    lses = np.full((world.size, len(holders), heads), -np.inf, np.float32)
    for r, (o, e) in enumerate(back):
        outs[r, theirs[r]], lses[r, theirs[r]] = o, e
    return combine(outs, lses)[0]
