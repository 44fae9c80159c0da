"""A DSA layer for a chunk of one conversation's prompt: fetch what is held elsewhere, then attend
the own heads over all of it.

Lists: the ranks either exchange candidates, as in decode, or gather the pooled keys once and
score them all, whichever moves fewer bytes; the lists are the same to the bit. History: the
latent rows that this rank lacks arrive tile by tile in a scratch buffer of 4,096 rows, and each
tile is attended before the next is fetched. So no prompt length is special, and no rank ever
holds more than its pages.
"""

import numpy as np

from engine.dsa import (ALL_GROUPS, Candidates, Partials, attend_alone, best_pools, combine, insert,
                        merged_lists, own_lists)
from engine.memory import FLOAT, KV_ITEM
from engine.stages.attend import TILE
from engine.stages.project import project_host


def prefill_attention(model, binding, w, x, rows):
    """This rank's part of the layer's output for a chunk x [m, hidden] of one seat: [m, hidden]."""
    queries = insert(model, binding, w, x, rows)
    if not model.split or rows.positions[-1] < model.replicated_rows:
        merged = attend_alone(model, binding, queries, rows)
    else:
        lists = _lists(model, binding, queries, rows)
        merged = _attend_history(model, binding, queries.absorbed, rows, *lists)
    return project_host(merged, w.value_up, w.out)


def _lists(model, binding, queries, rows):
    """Stages 2 and 3 for a chunk: (lists, lengths), the same on every rank."""
    world, shape, keys = model.world, model.shape, model.pages.keys[binding]
    visible = (int(rows.positions[-1]) + 1) // shape.index_kpool
    if visible <= shape.pools_kept:
        return merged_lists(model, _no_candidates(model, rows.count), rows.positions)
    candidate_bytes = 8 * shape.pools_kept * rows.count * world.size
    owner = int(model.table.owners[rows.seats[0]])
    if visible * shape.index_dim * keys.itemsize <= candidate_bytes:
        pages = np.arange(-(-visible // keys.shape[1]))
        gathered = fetch_pages(model, keys, int(rows.seats[0]), pages)
        table = np.zeros((len(model.table.table), len(pages)), np.int32)
        table[rows.seats[0]] = pages
        return own_lists(model, binding, queries, rows, gathered, table)
    if owner < 0:
        found = best_pools(model, binding, queries, rows, world.rank)
    elif owner == world.rank:
        found = best_pools(model, binding, queries, rows, ALL_GROUPS)
    else:
        found = Candidates(*(a[0] for a in _no_candidates(model, rows.count)))
    everyones = Candidates(*(np.empty((world.size, *a.shape), a.dtype) for a in found))
    world.exchange(*(([a] * world.size, list(b)) for a, b in zip(found, everyones)),
                   stage="candidates")
    return merged_lists(model, everyones, rows.positions)


def _no_candidates(model, n):
    keep = model.shape.pools_kept
    return Candidates(np.zeros((1, n, keep), np.float32), np.zeros((1, n, keep), np.int32),
                      np.zeros((1, n), np.int32))


def fetch_pages(model, array, seat, pages):
    """One seat's logical `pages` of array [local pages, ...], here and elsewhere: [pages, ...]."""
    world = model.world
    holders, table = model.table.holders[seat, pages], model.table.table[seat, pages]
    whole = np.empty((len(pages), *array.shape[1:]), array.dtype)
    here = np.flatnonzero(table >= 0)
    whole[here] = array[table[here]]
    mine = whole[holders == world.rank]
    theirs = [np.flatnonzero(holders == r) for r in range(world.size)]
    parts = [np.empty((t.size, *array.shape[1:]), array.dtype) for t in theirs]
    world.exchange(([mine] * world.size, parts), stage="history")
    for r, part in enumerate(parts):
        if r != world.rank:
            whole[theirs[r]] = part
    return whole


def _attend_history(model, binding, query, rows, lists, lengths):
    """Stage 4 over fetched tiles for the own heads, all groups merged: [m, own heads, kv_lora]."""
    partials = Partials(model, query, 0, model.world.size)
    page_rows, last = model.pages.page_rows, int(rows.positions[-1])
    here = np.zeros(rows.count, np.int32)       # the scratch's table has one row
    for tile in range(last // TILE + 1):
        first_page = tile * TILE // page_rows
        pages = np.arange(first_page, min((tile + 1) * TILE - 1, last) // page_rows + 1)
        scratch = fetch_pages(model, model.pages.latents[binding], int(rows.seats[0]), pages)
        table = np.arange(len(pages), dtype=np.int32)[None]
        partials.add(lists, lengths, here, table, scratch, first_page, tile, tile + 1)
    return combine(*partials.finish())[0]


def scratch_bytes(config, shape, world):
    """(name, bytes) of the largest buffers that a prefill chunk takes on a rank and gives back."""
    item = KV_ITEM[config.kv_dtype]
    rows, heads = min(config.chunk, config.context), -(-shape.heads // world)
    split = config.split and world > 1
    return (("chunk: streams", 2 * rows * shape.hc_mult * shape.hidden * FLOAT),
            ("chunk: projections", rows * shape.index_heads * shape.index_dim * FLOAT
             + 2 * rows * heads * shape.kv_lora * FLOAT),
            ("chunk: lists", rows * shape.list_width * FLOAT),
            ("chunk: partials", world * rows * heads * (shape.kv_lora + 2) * FLOAT),
            ("history tile", split * TILE * shape.kv_lora * item),
            ("history keys", split * config.context // shape.index_kpool * shape.index_dim * item))
