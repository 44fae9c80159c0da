"""Stage 5: merge the groups' partials of the own heads in group order, then project: values, and
this rank's part of the output.

| | name | shape | dtype | |
|---|---|---|---|---|
| reads | out | [G, n, heads, kv_lora] | float32 | partials of the own heads, groups ascending |
| reads | lse | [G, n, heads] | float32 | their log-sum-exps |
| reads | value_up | Group of heads [v_head, kv_lora] | BF16 or float32 | kv_b_proj's V rows |
| reads | output | Linear [hidden, heads * v_head] | BF16 or float32 | o_proj, own heads' columns |
| writes | merged, merged_lse | [n, heads, kv_lora], [n, heads] | float32 | |

merged = sum_g exp(lse_g - max) out_g / sum_g exp(lse_g - max), g ascending. An empty group (0,
-inf) adds nothing; a single group comes out bit for bit as it went in (-0.0 as 0.0), so a partial
may be merged where it was made or where it arrives. A row with no group at all is (0, -inf).
Collective before it: partials to the owner of the heads; after it: the sum over ranks of what
`project_host` returns. Bytes: G partials and the two weights once. Source: log-sum-exp merging of
softmax parts.
"""

import math

import numpy as np
from numba import njit

from engine.device import F32, KERNEL, add_rn, cuda, fma
from engine.host import NJIT
from engine.linear import linear, linear_group


@njit("void(float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, ::1])",
      **NJIT)
def combine_host(out, lse, merged, merged_lse):
    """Merge G partials a row and head, groups ascending."""
    groups = out.shape[0]
    weight = np.empty(groups, np.float32)
    for i in range(out.shape[1]):
        for h in range(out.shape[2]):
            best = np.float32(-np.inf)
            for g in range(groups):
                best = max(best, lse[g, i, h])
            merged_lse[i, h] = best
            merged[i, h, :] = np.float32(0.0)
            if best == np.float32(-np.inf):
                continue
            total = np.float32(0.0)
            for g in range(groups):
                weight[g] = math.exp(lse[g, i, h] - best)
                total += weight[g]
            for g in range(groups):
                if weight[g] > np.float32(0.0):
                    for d in range(out.shape[3]):
                        merged[i, h, d] += weight[g] * out[g, i, h, d]
            for d in range(out.shape[3]):
                merged[i, h, d] /= total
            merged_lse[i, h] += math.log(total)


def project_host(merged, value_up, output):
    """merged [n, heads, kv_lora] -> this rank's part of the layer's output, [n, hidden]."""
    values = linear_group(merged, value_up)
    return linear(values.reshape(len(values), values.shape[1] * values.shape[2]), output)


THREADS = 128


@cuda.jit(**KERNEL)
def _combine_kernel(out, lse, merged, merged_lse):
    # grid (heads, n), 128 threads of every 128th column
    h, i, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    groups = out.shape[0]
    best = F32(-math.inf)
    for g in range(groups):
        best = max(best, lse[g, i, h])
    total = F32(0.0)
    if best > F32(-math.inf):
        for g in range(groups):
            total = add_rn(total, math.exp(lse[g, i, h] - best))
    for d in range(thread, out.shape[3], THREADS):
        value = F32(0.0)
        if best > F32(-math.inf):
            for g in range(groups):
                weight = math.exp(lse[g, i, h] - best)
                if weight > F32(0.0):
                    value = fma(weight, out[g, i, h, d], value)
            value = value / total
        merged[i, h, d] = value
    if thread == 0:
        if best > F32(-math.inf):
            best = add_rn(best, math.log(total))
        merged_lse[i, h] = best


def combine(out, lse, merged, merged_lse, stream):
    """Merge G partials a row and head, groups ascending; merged must be no part of out."""
    groups, n, heads, width = out.shape
    assert lse.shape == (groups, n, heads) and merged.shape == (n, heads, width)
    if heads:
        _combine_kernel[(heads, n), THREADS, stream](out, lse, merged, merged_lse)
