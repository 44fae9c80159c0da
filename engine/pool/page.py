"""Pages: the KV bytes of one rank, in two regions a page: latent rows and pooled keys.

| array | binding b | dtype | bytes a page |
|---|---|---|---|
| latents[b] | [local_pages, page_rows, kv_lora] | KV | page_rows * kv_lora * item |
| keys[b] | [local_pages, pools, index_dim] | KV | pools * index_dim * item |

The KV dtype is uint16 (BF16 bits, item 2) or float32 (item 4); pools = page_rows / kpool. A
binding is one DSA layer's KV, the draft block's last. Row r of logical page k is position k *
page_rows + r; pooled key j of a page covers its rows j * kpool to j * kpool + kpool - 1. Local
page indices come from the page table; a page has the same one in every binding and both regions.
What a page holds before it is written is never read: after `poison` it is NaN, so that such a read
shows.
"""

import numpy as np

from engine.pool.owner import class_size

KV_DTYPES = {"bf16": np.dtype(np.uint16), "float32": np.dtype(np.float32)}
NAN_BITS = {"bf16": 0x7FC0, "float32": np.nan}


def rank_pages(pages, classes, rank, replicated_total=0):
    """Pages in a rank's arrays: the replicated region and its share of `pages` split ones."""
    return replicated_total + class_size(pages, classes, rank if classes > 1 else 0)


class Pages:
    """A rank's KV arrays for `local_pages` pages (0 is allowed); see the module's table.

    shape: engine.shape.Shape (bindings, kv_lora, index_dim, index_kpool).
    kv_dtype: "bf16" or "float32".
    """

    def __init__(self, shape, local_pages, page_rows, kv_dtype):
        assert page_rows % shape.index_kpool == 0, (page_rows, shape.index_kpool)
        self.kv_dtype = kv_dtype
        self.page_rows = page_rows
        dtype = KV_DTYPES[kv_dtype]
        pools = page_rows // shape.index_kpool
        self.latents = [np.zeros((local_pages, page_rows, shape.kv_lora), dtype)
                        for _ in range(shape.bindings)]
        self.keys = [np.zeros((local_pages, pools, shape.index_dim), dtype)
                     for _ in range(shape.bindings)]

    @property
    def bytes(self):
        """Resident bytes of both regions over all bindings."""
        return sum(array.nbytes for array in self.latents + self.keys)

    def poison(self, local_indices):
        """Fill the given local pages with NaN, in every binding and both regions."""
        for array in self.latents + self.keys:
            array[local_indices] = NAN_BITS[self.kv_dtype]
