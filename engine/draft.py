"""The MTP block: what the token after next will be, from a hidden state and the next token.

Row q takes the trunk's hidden state of position q, after the final norm, and the embedding of
token q + 1, embedding half first: x = eh_proj([enorm(e); hnorm(h)]), then x += DSA(norm(x)) and x
+= MoE(norm(x)) on one stream, then shared_head.norm. The logits of the result (the trunk's own
head) predict token q + 2. The block's KV is the last binding. Source: vLLM, SGLang and MLX-VLM
read the block alike; they differ on the embedding at row 0.
"""

import numpy as np

from engine.forward import feed_forward
from engine.linear import linear
from engine.model.embed import embed
from engine.model.norm import rms_norm


def draft_hidden(model, hidden, rows, attend, zero_first):
    """hidden [n, hidden] of rows.positions, rows.tokens the tokens after -> [n, hidden], normed.

    attend: as for engine.forward.forward. zero_first: the embedding of row 0 counts as zeros
    (vLLM's rule, and the reference data's; the embedded model was trained without it).
    """
    w, shape, world = model.weights.mtp, model.shape, model.world
    rows_in = embed(model.weights.embed, rows.tokens)
    if zero_first:
        rows_in[rows.positions == 0] = 0.0
    both = [rms_norm(rows_in, w.enorm, shape.eps), rms_norm(hidden, w.hnorm, shape.eps)]
    x = linear(np.concatenate(both, axis=1), w.eh)
    y = attend(model, shape.bindings - 1, w.attn, rms_norm(x, w.attn_norm, shape.eps), rows)
    x += world.sum(y)
    x += world.sum(feed_forward(rms_norm(x, w.ffn_norm, shape.eps), w.mlp, shape))
    return rms_norm(x, w.norm, shape.eps)
