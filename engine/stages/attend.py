"""Stage 4: attend over a list's rows, one partial a page group: output and log-sum-exp, so that
ranks can split the rows and lose no bit.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | query | [n, heads, kv_lora] | float32 | absorbed queries |
| reads | lists, lengths | [n, width], [n] | int32 | selected positions, ascending |
| reads | seats | [n] | int32 | row of `table` |
| reads | table | [seats, pages] | int32 | page of `latents` by logical page - first_page |
| reads | latents | [pages, page_rows, kv_lora] | uint16 (BF16) or float32 | |
| modifies | top, mass | [G, n, heads] | float32 | running maximum and sum; at first -inf, 0 |
| modifies | out | [G, n, heads, kv_lora] | float32 | running sum; 0 at the start |

Page k belongs to group k % groups; a call computes groups first_group .. first_group + G - 1.
Inside a group positions ascend and are taken by tiles of 4,096 positions on a fixed grid: the
maximum first, then exponentials and sums one after the other. So a prefill that fetches history
tile by tile, a decode step over pages, and any split of heads or groups give the same bits.
`finish_host` divides out by mass and turns top into the log-sum-exp. Empty case: a group without
rows is (0, -inf). Collective after it: partials to the rank that owns the heads. Bytes: each
listed row of the groups once for all heads. Scale: (qk_nope)^-0.5, no rotary part. Source:
softmax in parts, as in flash decoding; MLA absorption.
"""

import math

import numpy as np
from numba import njit

from engine.host import LANES, NJIT, product, widen

TILE = 4096     # positions a tile: part of the arithmetic, a multiple of every allowed page_rows
_SIGNATURE = ("void(float32[:, :, ::1], int32[:, ::1], int32[::1], int32[::1], int32[:, ::1], "
              "{kv}[:, :, ::1], float32, int64, int64, int64, int64, int64, "
              "float32[:, :, ::1], float32[:, :, ::1], float32[:, :, :, ::1])")


@njit("int64(int32[::1], int64, int64)", **NJIT)
def _first_at(positions, length, least):
    """Index of the first of `length` ascending positions that is at least `least`."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if positions[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


@njit("void(float32[::1], float32[:, ::1], int64, float32[::1])", **NJIT)
def _add_rows(p, rows, count, out):
    """out[d] += p[j] * rows[j, d] for j ascending; four rows a pass, added one after the other."""
    whole = count & ~3
    for j in range(0, whole, 4):
        p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
        for d in range(out.shape[0]):
            s = out[d] + p0 * rows[j, d]
            s += p1 * rows[j + 1, d]
            s += p2 * rows[j + 2, d]
            out[d] = s + p3 * rows[j + 3, d]
    for j in range(whole, count):
        pj = p[j]
        for d in range(out.shape[0]):
            out[d] += pj * rows[j, d]


@njit([_SIGNATURE.format(kv="uint16"), _SIGNATURE.format(kv="float32")], **NJIT)
def attend_host(query, lists, lengths, seats, table, latents, scale, groups, first_group,
                first_page, first_tile, last_tile, top, mass, out):
    """Add tiles first_tile .. last_tile - 1 of each row's list to its groups' running partials."""
    n, heads, width = query.shape
    page_rows = latents.shape[1]
    rows = np.empty((min(lists.shape[1], TILE), width), np.float32)
    blocks = np.zeros(((rows.shape[0] + LANES - 1) // LANES, width, LANES), np.float32)
    p = np.empty(rows.shape[0], np.float32)
    acc = np.empty(LANES, np.float32)
    for i in range(n):
        begin = _first_at(lists[i], lengths[i], first_tile * TILE)
        while begin < lengths[i] and lists[i, begin] // TILE < last_tile:
            end = _first_at(lists[i], lengths[i], (lists[i, begin] // TILE + 1) * TILE)
            for g in range(out.shape[0]):
                # --- this group's rows of the tile, as they are and 64 side by side
                count = 0
                for j in range(begin, end):
                    page = lists[i, j] // page_rows
                    if page % groups == first_group + g:
                        local, row = table[seats[i], page - first_page], lists[i, j] % page_rows
                        for d in range(width):
                            value = widen(latents[local, row, d])
                            rows[count, d] = value
                            blocks[count // LANES, d, count % LANES] = value
                        count += 1
                if count == 0:
                    continue
                for h in range(heads):
                    # --- scores and their maximum
                    best = top[g, i, h]
                    for b in range((count + LANES - 1) // LANES):
                        product(query[i, h], blocks[b], acc)
                        for lane in range(min(LANES, count - b * LANES)):
                            s = acc[lane] * scale
                            p[b * LANES + lane] = s
                            best = max(best, s)
                    # --- exponentials into the running sums
                    shrink = math.exp(top[g, i, h] - best)
                    total = mass[g, i, h] * shrink
                    for j in range(count):
                        p[j] = math.exp(p[j] - best)
                        total += p[j]
                    for d in range(width):
                        out[g, i, h, d] *= shrink
                    _add_rows(p, rows, count, out[g, i, h])
                    top[g, i, h] = best
                    mass[g, i, h] = total
            begin = end


@njit("void(float32[:, :, ::1], float32[:, :, ::1], float32[:, :, :, ::1])", **NJIT)
def finish_host(top, mass, out):
    """Running partials become partials: out / mass, top + log(mass); empty stays (0, -inf)."""
    for g in range(out.shape[0]):
        for i in range(out.shape[1]):
            for h in range(out.shape[2]):
                if mass[g, i, h] > np.float32(0.0):
                    for d in range(out.shape[3]):
                        out[g, i, h, d] /= mass[g, i, h]
                    top[g, i, h] += math.log(mass[g, i, h])
