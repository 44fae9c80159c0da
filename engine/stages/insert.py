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
from numba import njit, types

from engine.device import F32, INLINE, KERNEL, add_rn, cuda, fma, narrow
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


THREADS = 128   # a channel each; index_dim of the model


@cuda.jit(**INLINE)
def _pool(key, gate, ape, tail_key, tail_gate, i, seat, batched, channel):
    """Pooled key of the pool that row i completes, one channel: members row i - j for j < batched
    come from the batch, older ones from the tail."""
    last = ape.shape[0] - 1
    top = F32(-math.inf)
    for j in range(last + 1):
        row = i - (last - j)
        g = gate[row, channel] if last - j < batched else tail_gate[seat, j, channel]
        top = max(top, add_rn(g, ape[j, channel]))
    mass, pooled = F32(0.0), F32(0.0)
    for j in range(last + 1):
        row = i - (last - j)
        if last - j < batched:
            g, k = gate[row, channel], key[row, channel]
        else:
            g, k = tail_gate[seat, j, channel], tail_key[seat, j, channel]
        w = math.exp(add_rn(g, ape[j, channel]) - top)
        mass = add_rn(mass, w)
        pooled = fma(w, k, pooled)
    return pooled / mass


@cuda.jit(**KERNEL)
def _insert_kernel(latent, key, gate, ape, seats, positions, table, latents, keys, tail_key,
                   tail_gate):
    # grid (n), 128 threads; the first row of a seat's run does all that touches the seat's tail
    end = cuda.shared.array(1, types.int32)
    i, thread, n = cuda.blockIdx.x, cuda.threadIdx.x, seats.shape[0]
    seat, position = seats[i], positions[i]
    if seat < 0:
        return
    kpool, width = ape.shape
    pools = keys.shape[1]
    page_rows = pools * kpool
    local = table[seat, position // page_rows]
    if local >= 0:
        for d in range(thread, latent.shape[1], THREADS):
            latents[local, position % page_rows, d] = narrow(latent[i, d])

    # --- a pool whose tokens are all in the batch
    before = i - (kpool - 1)
    if position % kpool == kpool - 1 and local >= 0 and before >= 0 and seats[before] == seat:
        for c in range(thread, width, THREADS):
            pooled = _pool(key, gate, ape, tail_key, tail_gate, i, seat, kpool, c)
            keys[local, position % page_rows // kpool, c] = narrow(pooled)
    if i > 0 and seats[i - 1] == seat:
        return

    # --- the first pool of the run, where it began in the tail; then the run's last rows as tail
    if thread == 0:
        end[0] = n
    cuda.syncthreads()
    for row in range(i + 1 + thread, n, THREADS):
        if seats[row] != seat:
            cuda.atomic.min(end, 0, row)
            break
    cuda.syncthreads()
    member = position % kpool
    complete = i + kpool - 1 - member
    local = -1
    if member > 0 and complete < end[0]:
        local = table[seat, positions[complete] // page_rows]
    for c in range(thread, width, THREADS):
        if local >= 0:
            pooled = _pool(key, gate, ape, tail_key, tail_gate, complete, seat,
                           complete - i + 1, c)
            keys[local, positions[complete] % page_rows // kpool, c] = narrow(pooled)
        for row in range(max(i, end[0] - kpool), end[0]):
            m = positions[row] % kpool
            if m < kpool - 1:
                tail_key[seat, m, c] = key[row, c]
                tail_gate[seat, m, c] = gate[row, c]


def insert(latent, key, gate, ape, seats, positions, table, latents, keys, tail_key, tail_gate,
           stream):
    """Insert n rows into one binding, BF16 pages; padding rows (seat -1) write nothing."""
    assert latents.dtype == "uint16" and keys.dtype == "uint16"
    assert latents.shape[1] == keys.shape[1] * ape.shape[0] and latents.shape[2] == latent.shape[1]
    _insert_kernel[latent.shape[0], THREADS, stream](latent, key, gate, ape, seats, positions,
                                                     table, latents, keys, tail_key, tail_gate)
