"""Stage 3: merge the ranks' candidate lists into one exact list of positions a row, the same on
every rank.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | scores, pools | [W, n, P] | float32, int32 | a rank's candidates, in the total order |
| reads | counts | [W, n] | int32 | filled candidates |
| reads | positions | [n] | int32 | |
| writes | lists | [n, P * kpool + kpool - 1] | int32 | selected positions, ascending, then -1 |
| writes | lengths | [n] | int32 | |

Total order: score descending, then pool index ascending, scores compared as float32 with -0.0 =
0.0. A pool is on one rank only, so there are no equal candidates. The list is the best min(P,
visible) pools expanded to their kpool positions, then the raw tail of (t + 1) % kpool positions
that no pool covers yet. Rows that see at most P pools get the identity list 0..t and need no
candidates. Empty case: n = 0. Collective before it: allgather of the candidates; after it: the
queries. Source: design of the total order; tail rule from transformers glm5_next.

On CUDA the list is written as stage 4 takes it, a seat's pages already looked up:

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | seats, table | [n], [seats, pages] | int32 | local page by logical; seat -1: padding |
| writes | order | [n, P * kpool + kpool - 1] | int32 | local page * page_rows + row, by group |
| writes | spans | [n, spans + 1] | int32 | where in `order` each span begins; the end |
| writes | starts | [n, G + 1] | int32 | the first span of each group; how many there are |

Page k is in group k % groups; `order` has groups first_group .. first_group + G - 1 one after the
other, positions ascending in each. A span is up to SPAN of a group's positions; the first begins
with the group, another after SPAN of them or at the first in another tile of TILE positions: tiles
are what a prefill may fetch, and attend, one after the other. A table of 0, 1, 2, ... leaves
positions as they are. A padding row has no span.
"""

import numpy as np
from numba import njit, types

from engine.device import FULL, INLINE, KERNEL, U32, U64, cuda, order_key
from engine.host import NJIT

SPAN = 64       # rows of a span at most: those of a block of stage 4
TILE = 32768    # positions, a multiple of every page_rows: 32 MiB of latent rows to fetch at once
MOST = 512      # pools kept at most: the kernel sorts them in registers
MERGERS = 544   # threads of a row: one a pool kept and one for the raw tail, in whole warps
NO_POOL = types.int32(0x7FFFFFFF)
GATHERED = 4096     # candidates of all ranks at most: 32 KiB of keys in shared memory
GROUPS = 8      # page groups at most
_WARPS, _TWICE = MERGERS // 32, 2 * MOST


@njit("void(float32[:, :, ::1], int32[:, :, ::1], int32[:, ::1], int32[::1], int64, "
      "int32[:, ::1], int32[::1])", **NJIT)
def merge_host(scores, pools, counts, positions, kpool, lists, lengths):
    """Fill lists and lengths for n rows from W candidate lists a row."""
    world, n, keep = scores.shape
    at = np.empty(world, np.int64)
    chosen = np.empty(keep, np.int32)
    for i in range(n):
        visible = (positions[i] + 1) // kpool
        if visible <= keep:
            for p in range(positions[i] + 1):
                lists[i, p] = p
            length = positions[i] + 1
        else:
            at[:] = 0
            for j in range(keep):
                best, high, low = -1, np.float32(0.0), np.int32(0)
                for w in range(world):
                    if at[w] == counts[w, i]:
                        continue
                    score, pool = scores[w, i, at[w]], pools[w, i, at[w]]
                    if best < 0 or score > high or (score == high and pool < low):
                        best, high, low = w, score, pool
                chosen[j] = low
                at[best] += 1
            length = 0
            for pool in np.sort(chosen):
                for member in range(kpool):
                    lists[i, length] = pool * kpool + member
                    length += 1
            for p in range(visible * kpool, positions[i] + 1):
                lists[i, length] = p
                length += 1
        lengths[i] = length
        for j in range(length, lists.shape[1]):
            lists[i, j] = -1


@cuda.jit(**INLINE)
def _ascending(mine, shared):
    """The values of threads 0 .. 511 sorted over them; shared: int32, twice as many."""
    thread = cuda.threadIdx.x
    half = 0
    size = 2
    while size <= MOST:
        distance = size >> 1
        while distance:
            if distance >= 32:
                if thread < MOST:
                    shared[half + thread] = mine
                cuda.syncthreads()
                other = shared[half + ((thread ^ distance) & (MOST - 1))]
                half ^= MOST
            else:
                other = cuda.shfl_xor_sync(FULL, mine, distance)
            lower = thread & distance == 0
            rising = thread & size == 0
            if lower == rising:
                mine = min(mine, other)
            else:
                mine = max(mine, other)
            distance >>= 1
        size <<= 1
    return mine


@cuda.jit(**KERNEL)
def _merge_kernel(scores, pools, counts, seats, positions, table, page_rows, kpool, groups,
                  first_group, order, spans, starts):
    # grid (n), MERGERS threads: thread j has the row's j-th entry, a pool, or the raw tail
    keys = cuda.shared.array(GATHERED, U64)
    chosen = cuda.shared.array(_TWICE, types.int32)
    placed = cuda.shared.array(MERGERS, types.int32)        # entries by group, ascending
    before = cuda.shared.array((_WARPS, GROUPS), types.int32)
    begun = cuda.shared.array(MERGERS, types.int32)
    totals = cuda.shared.array(32, types.int32)
    i, thread = cuda.blockIdx.x, cuda.threadIdx.x
    lane, warp = thread & 31, thread >> 5
    world, keep = scores.shape[0], scores.shape[2]
    several = starts.shape[1] - 1
    position, ranked = positions[i], NO_POOL
    if thread < counts[0, i]:
        ranked = pools[0, i, thread]
    if seats[i] < 0:
        if thread <= several:
            starts[i, thread] = 0
        return
    visible = (position + 1) // kpool
    tail = position + 1 - visible * kpool

    # --- the pools, ascending
    total = visible
    pool = types.int32(thread)
    if visible > keep:
        total = 0
        for w in range(world):
            total += counts[w, i]
        total = min(total, keep)
        if world == 1:
            pool = ranked
        else:
            none = U64(0xFFFFFFFFFFFFFFFF)
            for at in range(thread, world * keep, MERGERS):
                w, j = at // keep, at % keep
                keys[at] = order_key(scores[w, i, j], pools[w, i, j]) if j < counts[w, i] else none
            chosen[thread] = NO_POOL
            cuda.syncthreads()
            # a candidate's rank is its place in its own list and how many are before it in others
            for at in range(thread, world * keep, MERGERS):
                key = keys[at]
                if key != none:
                    own = at // keep
                    rank = at % keep
                    for w in range(world):
                        if w != own:
                            low, high = w * keep, (w + 1) * keep
                            while low < high:
                                middle = (low + high) >> 1
                                if keys[middle] < key:
                                    low = middle + 1
                                else:
                                    high = middle
                            rank += low - w * keep
                    if rank < keep:
                        chosen[rank] = types.int32(U32(key & U64(0xFFFFFFFF)))
            cuda.syncthreads()
            pool = chosen[thread]
            cuda.syncthreads()
        pool = _ascending(pool, chosen)
    rows = types.int32(0)
    if thread < total:
        rows = types.int32(kpool)
    if thread == total:
        pool, rows = types.int32(visible), types.int32(tail)

    # --- places by group: how many of the group are in lower threads, then in lower groups
    group = types.int32(-1)
    if rows > 0:
        group = types.int32(pool * kpool // page_rows % groups - first_group)
        if group >= several:
            group = types.int32(-1)
    place = types.int32(0)
    for g in range(several):
        mask = cuda.ballot_sync(FULL, group == g)
        if group == g:
            place = types.int32(cuda.popc(mask & ((1 << lane) - 1)))
        if lane == 0:
            before[warp, g] = cuda.popc(mask)
    cuda.syncthreads()
    if warp == 0:
        base = types.int32(0)
        for g in range(several):
            count = before[lane, g] if lane < _WARPS else types.int32(0)
            upto = count
            for step in (1, 2, 4, 8, 16):
                other = cuda.shfl_up_sync(FULL, upto, step)
                if lane >= step:
                    upto += other
            if lane < _WARPS:
                before[lane, g] = base + upto - count
            base += cuda.shfl_sync(FULL, upto, 31)
        if lane == 0:
            totals[31] = base
    cuda.syncthreads()
    entries = totals[31]
    if group >= 0:
        place += before[warp, group]
        placed[place] = pool
    cuda.syncthreads()

    # --- spans: a group begins one at every tile, and after SPAN rows of it
    here = types.int32(0)
    begins = False
    row = types.int32(0)
    if thread < entries:
        here = placed[thread]
        low = types.int32(0)                    # first entry of the group and of the tile
        for g in range(several):
            if before[0, g] <= thread:
                low = before[0, g]
        least = here * kpool // TILE * (TILE // kpool)
        high = types.int32(thread)
        while low < high:
            middle = (low + high) >> 1
            if placed[middle] < least:
                low = middle + 1
            else:
                high = middle
        begins = (thread - low) % (SPAN // kpool) == 0
    mask = cuda.ballot_sync(FULL, begins)
    if lane == 0:
        totals[warp] = cuda.popc(mask)
    cuda.syncthreads()
    number = cuda.popc(mask & ((1 << lane) - 1))
    for w in range(warp):
        number += totals[w]
    begun[thread] = number                      # spans begun before this entry
    # all entries are whole pools but the tail, which is the last of its group
    short = types.int32(0)
    if thread < entries:
        for g in range(several):
            end = before[0, g + 1] if g + 1 < several else entries
            if before[0, g] < end and end <= thread and placed[end - 1] == visible:
                short = types.int32(kpool - tail)
        row = types.int32(thread * kpool - short)
        size = tail if here == visible else kpool
        if begins:
            spans[i, number] = row
        first = types.int32(here * kpool)
        local = table[seats[i], first // page_rows] * page_rows + first % page_rows
        for j in range(size):
            order[i, row + j] = local + j
        if thread == entries - 1:
            spans[i, number + begins] = row + size
    cuda.syncthreads()
    if thread <= several:
        at = before[0, thread] if thread < several else entries
        if at < entries:
            starts[i, thread] = begun[at]
        else:
            last = begun[MERGERS - 1]
            starts[i, thread] = last


def spans_at_most(width, groups, window):
    """Spans of a list of `width` positions below `window` in `groups` page groups."""
    return min(-(-width // SPAN) + groups * -(-window // TILE) - 1, width)


def merge(scores, pools, counts, seats, positions, table, page_rows, kpool, groups, first_group,
          order, spans, starts, stream):
    """Fill order, spans and starts for n rows from W candidate lists a row."""
    world, n, keep = scores.shape
    assert keep <= MOST and world * keep <= GATHERED and order.shape[1] == keep * kpool + kpool - 1
    assert SPAN % kpool == 0 and TILE % page_rows == 0 and page_rows % kpool == 0
    assert starts.shape[1] - 1 <= min(groups, GROUPS)
    _merge_kernel[n, MERGERS, stream](scores, pools, counts, seats, positions, table, page_rows,
                                      kpool, groups, first_group, order, spans, starts)
