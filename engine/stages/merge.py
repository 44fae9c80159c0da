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

On CUDA also `arrange`: each list sorted by page group, positions ascending, for stage 4. Padding
rows (seat -1) get an empty list.
"""

import numpy as np
from numba import njit, types

from engine.device import FULL, KERNEL, U32, U64, cuda, order_key
from engine.host import NJIT

MOST = 512      # pools kept at most: the kernel sorts them in shared memory
MERGERS = 512   # threads of a row: one a pool kept
NO_POOL = types.int32(0x7FFFFFFF)
GATHERED = 4096     # candidates of all ranks at most: 32 KiB of keys in shared memory
GROUPS = 8      # page groups at most: a warp scans the counts of one


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


@cuda.jit(**KERNEL)
def _merge_kernel(scores, pools, counts, seats, positions, kpool, lists, lengths):
    # grid (n), MERGERS threads
    keys = cuda.shared.array(GATHERED, U64)
    chosen = cuda.shared.array(MOST, types.int32)
    placed = cuda.shared.array(MOST, types.int32)
    i, thread = cuda.blockIdx.x, cuda.threadIdx.x
    world, keep, width = scores.shape[0], scores.shape[2], lists.shape[1]
    visible = (positions[i] + 1) // kpool
    length = positions[i] + 1
    if seats[i] < 0:
        length = 0
    if seats[i] < 0 or visible <= keep:
        for at in range(thread, width, MERGERS):
            lists[i, at] = at if at < length else -1
        if thread == 0:
            lengths[i] = length
        return

    # --- a candidate's rank is its place in its own list and how many are before it in the others
    none = U64(0xFFFFFFFFFFFFFFFF)
    for at in range(thread, world * keep, MERGERS):
        w, j = at // keep, at % keep
        keys[at] = order_key(scores[w, i, j], pools[w, i, j]) if j < counts[w, i] else none
    for at in range(thread, MOST, MERGERS):
        chosen[at] = NO_POOL
    cuda.syncthreads()
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

    # --- chosen pools ascending: a pool's place is how many of them are below it
    total = 0
    for w in range(world):
        total += counts[w, i]
    total = min(total, keep)
    for at in range(thread, total, MERGERS):
        pool, place = chosen[at], types.int32(0)
        for other in range(0, total, 4):        # past the last pool there is none below
            place += chosen[other] < pool
            place += chosen[other + 1] < pool
            place += chosen[other + 2] < pool
            place += chosen[other + 3] < pool
        placed[place] = pool
    cuda.syncthreads()

    # --- their positions, then the tail
    covered = total * kpool
    length = covered + positions[i] + 1 - visible * kpool
    for at in range(thread, width, MERGERS):
        position = -1
        if at < covered:
            position = placed[at // kpool] * kpool + at % kpool
        elif at < length:
            position = visible * kpool + at - covered
        lists[i, at] = position
    if thread == 0:
        lengths[i] = length


def merge(scores, pools, counts, seats, positions, kpool, lists, lengths, stream):
    """Fill lists and lengths for n rows from W candidate lists a row."""
    world, n, keep = scores.shape
    assert keep <= MOST and world * keep <= GATHERED and lists.shape[1] == keep * kpool + kpool - 1
    _merge_kernel[n, MERGERS, stream](scores, pools, counts, seats, positions, kpool, lists,
                                      lengths)


@cuda.jit(**KERNEL)
def _arrange_kernel(lists, lengths, seats, page_rows, groups, first_group, order, starts):
    # grid (n), 256 threads: a thread takes consecutive entries, a warp scans one group's counts
    counts = cuda.shared.array((GROUPS, 256), types.int32)
    totals = cuda.shared.array(GROUPS, types.int32)
    i, thread = cuda.blockIdx.x, cuda.threadIdx.x
    lane, warp = thread & 31, thread >> 5
    several = starts.shape[1] - 1
    length = lengths[i] if seats[i] >= 0 else 0
    share = (length + 255) >> 8
    begin = min(thread * share, length)
    end = min(begin + share, length)

    # --- a thread's entries of each group, then their places
    for g in range(GROUPS):
        counts[g, thread] = 0
    for j in range(begin, end):
        g = lists[i, j] // page_rows % groups - first_group
        if 0 <= g < several:
            counts[g, thread] += 1
    cuda.syncthreads()
    total = 0
    for j in range(8 * lane, 8 * lane + 8):
        total += counts[warp, j]
    upto = types.int32(total)
    for step in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(FULL, upto, step)
        if lane >= step:
            upto += other
    place = upto - total
    for j in range(8 * lane, 8 * lane + 8):
        count = counts[warp, j]
        counts[warp, j] = place
        place += count
    if lane == 31:
        totals[warp] = upto
    cuda.syncthreads()

    # --- entries in order
    for j in range(begin, end):
        g = lists[i, j] // page_rows % groups - first_group
        if 0 <= g < several:
            base = 0
            for before in range(g):
                base += totals[before]
            order[i, base + counts[g, thread]] = lists[i, j]
            counts[g, thread] += 1
    if thread == 0:
        base = 0
        starts[i, 0] = 0
        for g in range(several):
            base += totals[g]
            starts[i, g + 1] = base


def arrange(lists, lengths, seats, page_rows, groups, first_group, order, starts, stream):
    """Sort each list by page group, positions ascending: order int32 [n, width], starts int32
    [n, G + 1]; group first_group + g is order[i, starts[i, g]:starts[i, g + 1]]."""
    assert lists.shape == order.shape and starts.shape[1] - 1 <= min(groups, GROUPS)
    _arrange_kernel[lists.shape[0], 256, stream](lists, lengths, seats, page_rows, groups,
                                                 first_group, order, starts)
