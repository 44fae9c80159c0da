"""Token embeddings: rows of the checkpoint's own table, read in place.

The table [vocab, hidden] stays in the mapped file: a token costs one row of page cache on each
rank and no resident memory or message.
"""

import numpy as np

from engine.host import from_bf16


def embed(table, tokens):
    """table [vocab, hidden] uint16 (BF16) or float32; tokens [n] int -> [n, hidden] float32."""
    rows = table[tokens]
    return from_bf16(rows) if rows.dtype == np.uint16 else np.ascontiguousarray(rows)
