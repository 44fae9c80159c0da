"""Stage 2: score this rank's pooled keys for each row and keep the best P of them, exactly, in
the total order.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | query | [n, index_heads, index_dim] | float32 | indexer queries |
| reads | weight | [n, index_heads] | float32 | head weights, already times index_heads^-0.5 |
| reads | seats, positions | [n] | int32 | |
| reads | table | [seats, pages] | int32 | local page index by logical page |
| reads | keys | [local pages, pools a page, index_dim] | uint16 (BF16) or float32 | pooled keys |
| writes | scores, pools | [n, P] | float32, int32 | the best P of the scored pools |
| writes | counts | [n] | int32 | how many of them are filled |

A call scores the pools of pages k with k % groups == group, or of all pages where group is -1.
Rows of one seat are consecutive and ascending. Row at position t sees pools 0 .. (t + 1) // kpool
- 1. Total order: score descending, then pool index ascending; -0.0 counts as 0.0; ReLU scores tie
at zero, so the index decides there. Rows that see at most P pools keep them all (stage 3 makes
their list without scores), so they are skipped: count 0. Score: sum over heads ascending of
weight_h * relu(q_h . key * index_dim^-0.5), each dot over d ascending. The call returns the
number of NaN scores met: any is a fault. Collective after it: allgather of 8 P bytes a row.
Bytes: every scored key once for 32 rows. Source: transformers glm5_next indexer.
"""

import math

import numpy as np
from numba import njit

from engine.host import LANES, NJIT, float_bits, bits_float, product, widen

ROWS = 32      # rows of one seat that share a transposed block of keys
_SIGN = np.uint32(0x80000000)
_SIGNATURE = ("int64(float32[:, :, ::1], float32[:, ::1], int32[::1], int32[::1], int32[:, ::1], "
              "{kv}[:, :, ::1], int64, int64, int64, float32[:, ::1], int32[:, ::1], int32[::1])")


@njit("uint64(float32, int32)", **NJIT)
def order_key(score, pool):
    """One integer a pool that ascends in the total order: score descending, then pool ascending."""
    bits = float_bits(score + np.float32(0.0))
    rising = ~bits if bits & _SIGN else bits | _SIGN
    return (np.uint64(~rising) << np.uint64(32)) | np.uint64(pool)


@njit("float32(uint64)", **NJIT)
def order_score(key):
    """The score inside an order key."""
    rising = ~np.uint32(key >> np.uint64(32))
    return bits_float(rising & ~_SIGN if rising & _SIGN else ~rising)


@njit([_SIGNATURE.format(kv="uint16"), _SIGNATURE.format(kv="float32")], **NJIT)
def score_host(query, weight, seats, positions, table, keys, kpool, group, groups, scores, pools,
               counts):
    """Fill scores, pools and counts for n rows; returns how many scores were NaN."""
    n, heads, width = query.shape
    keep = scores.shape[1]
    a_page = keys.shape[1]
    scale = np.float32(1.0) / math.sqrt(np.float32(width))
    step = groups if group >= 0 else 1
    start = group if group >= 0 else 0
    block = np.empty((width, LANES), np.float32)
    acc = np.empty(LANES, np.float32)
    faults = 0
    first = 0
    while first < n:
        last = first + 1
        while last < n and last - first < ROWS and seats[last] == seats[first]:
            last += 1
        visible = (positions[last - 1] + 1) // kpool
        held = 0                    # pools on the pages of this group, complete or not
        for page in range(start, (visible + a_page - 1) // a_page, step):
            held += a_page
        if visible <= keep:
            held = 0
        found = np.empty((last - first, held), np.float32)
        for base in range(0, held, LANES):
            count = min(LANES, held - base)
            for lane in range(count):
                page = start + (base + lane) // a_page * step
                row = (base + lane) % a_page
                for d in range(width):
                    block[d, lane] = widen(keys[table[seats[first], page], row, d])
            for i in range(first, last):
                for lane in range(count):
                    found[i - first, base + lane] = np.float32(0.0)
                for h in range(heads):
                    product(query[i, h], block, acc)
                    w = weight[i, h]
                    for lane in range(count):
                        found[i - first, base + lane] += w * max(acc[lane] * scale, np.float32(0.0))
        for i in range(first, last):
            seen = (positions[i] + 1) // kpool
            counts[i] = 0
            if seen <= keep:
                continue
            order = np.empty(held, np.uint64)
            total = 0
            for j in range(held):
                pool = (start + j // a_page * step) * a_page + j % a_page
                if pool < seen:
                    score = found[i - first, j]
                    faults += score != score
                    order[total] = order_key(score, pool)
                    total += 1
            best = order[:total]
            if total > keep:
                best = np.partition(best, keep - 1)[:keep]
            best = np.sort(best)
            for j in range(best.shape[0]):
                scores[i, j] = order_score(best[j])
                pools[i, j] = np.int32(best[j] & np.uint64(0xFFFFFFFF))
            counts[i] = best.shape[0]
        first = last
    return faults
