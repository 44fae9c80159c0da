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
"""

import numpy as np
from numba import njit

from engine.host import NJIT


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
