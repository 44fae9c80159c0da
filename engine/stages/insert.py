"""Stage 1: write a token's latent row into its page, and a pooled key when its pool of tokens
completes, where this rank holds the page.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | latent | [n, kv_lora] | float32 | normalised latent rows |
| reads | key, gate | [n, index_dim] | float32 | normalised indexer keys, compression gates |
| reads | ape | [kpool, index_dim] | float32 | index_kpool_compress_ape |
| reads | seats, positions | [n] | int32 | whose row, and its place in the conversation |
| reads | table | [seats, pages] | int32 | local page index by logical page, -1 = not here |
| writes | latents | [local pages, page_rows, kv_lora] | uint16 (BF16) or float32 | |
| writes | keys | [local pages, page_rows / kpool, index_dim] | the same | |
| modifies | tail_key, tail_gate | [seats, kpool - 1, index_dim] | float32 | incomplete pool |

Order: rows of one seat are consecutive and ascending; a pool's softmax and sum run over its
tokens ascending. A row that completes a pool reads the tail and brings its own key; every other
row leaves its key in the tail: so a chunk may end anywhere. Empty case: n = 0 does nothing; a
rank that holds no page keeps the tail all the same. Collective after it: none. Bytes a row:
kv_lora + index_dim / kpool values where the page is held.

Source: per channel c, w_j = softmax_j(gate_j[c] + ape[j][c]), pooled[c] = sum_j w_j key_j[c]
(transformers glm5_next, kpool_compress), in float32.
"""

import math

import numpy as np
from numba import njit

from engine.host import NJIT, narrow_into

_SIGNATURE = ("void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], "
              "int32[::1], int32[::1], int32[:, ::1], "
              "{kv}[:, :, ::1], {kv}[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1])")


@njit([_SIGNATURE.format(kv="uint16"), _SIGNATURE.format(kv="float32")], **NJIT)
def insert_host(latent, key, gate, ape, seats, positions, table, latents, keys, tail_key,
                tail_gate):
    """Insert n rows into one binding; see the module's table."""
    kpool, width = ape.shape
    page_rows = keys.shape[1] * kpool
    for i in range(latent.shape[0]):
        seat, position = seats[i], positions[i]
        local = table[seat, position // page_rows]
        row = position % page_rows
        if local >= 0:
            for d in range(latent.shape[1]):
                narrow_into(latents[local, row], d, latent[i, d])
        member = position % kpool
        if member < kpool - 1:
            for c in range(width):
                tail_key[seat, member, c] = key[i, c]
                tail_gate[seat, member, c] = gate[i, c]
        elif local >= 0:
            for c in range(width):
                last = gate[i, c] + ape[member, c]
                top = last
                for j in range(member):
                    top = max(top, tail_gate[seat, j, c] + ape[j, c])
                mass = np.float32(0.0)
                pooled = np.float32(0.0)
                for j in range(member):
                    w = math.exp(tail_gate[seat, j, c] + ape[j, c] - top)
                    mass += w
                    pooled += w * tail_key[seat, j, c]
                w = math.exp(last - top)
                mass += w
                pooled += w * key[i, c]
                narrow_into(keys[local, row // kpool], c, pooled / mass)
