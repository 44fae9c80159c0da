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

On CUDA `finish` folds a decode row's spans into groups, in the order of attend_cuda.py, and merges
the groups as `combine` does, in one launch.
"""

import math

import numpy as np
from numba import njit

from engine.attend_parts import load_every, power
from engine.device import F32, I64, INLINE, KERNEL, add_rn, cuda, fma, mul_rn
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
GROUPS = 8      # page groups at most
_LN2 = math.log(2.0)


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


@cuda.jit(**INLINE)
def _folded(group, top, mass, x, y):
    """A group's (top, mass, two sums) with a span's folded in: the order of attend_cuda.py."""
    best = max(group[0], top)
    old, new = power(group[0] - best), power(top - best)
    return (best, fma(mass, new, mul_rn(group[1], old)), fma(x, new, mul_rn(group[2], old)),
            fma(y, new, mul_rn(group[3], old)))


@cuda.jit(**KERNEL)
def _finish_kernel(out, span_top, span_mass, starts, seats, merged, lse):
    # grid (heads, n, ceil(width / 256)), THREADS threads of two columns
    group_x = cuda.shared.array((GROUPS, THREADS), F32)     # a thread reads what it wrote
    group_y = cuda.shared.array((GROUPS, THREADS), F32)
    logs = cuda.shared.array((GROUPS, THREADS), F32)
    h, i, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    d = 2 * (thread + THREADS * cuda.blockIdx.z)
    groups, heads, width = starts.shape[1] - 1, out.shape[2], merged.shape[2]
    count = starts[i, groups]
    if d >= width:
        return
    if seats[i] < 0 or count == 0:
        merged[i, h, d], merged[i, h, d + 1] = F32(0.0), F32(0.0)
        if d == 0:
            lse[i, h] = F32(-math.inf)
        return

    # --- a group's spans, eight on their way while eight are folded
    a_span = I64(out.shape[1]) * heads
    row = I64(i) * heads + h
    best = F32(-math.inf)
    for g in range(groups):
        first, stop = starts[i, g], starts[i, g + 1]
        logs[g, thread] = F32(-math.inf)
        if first == stop:
            continue
        at, end = row + first * a_span, row + (stop - 1) * a_span
        p = load_every(out, at * width + d, a_span * width, end * width + d, 2)
        t = load_every(span_top, at, a_span, end, 1)
        m = load_every(span_mass, at, a_span, end, 1)
        group = (F32(-math.inf), F32(0.0), F32(0.0), F32(0.0))
        while first < stop:
            at += 8 * a_span
            next_p = load_every(out, at * width + d, a_span * width, end * width + d, 2)
            next_t = load_every(span_top, at, a_span, end, 1)
            next_m = load_every(span_mass, at, a_span, end, 1)
            group = _folded(group, t[0], m[0], p[0], p[1])
            if first + 1 < stop:
                group = _folded(group, t[1], m[1], p[2], p[3])
            if first + 2 < stop:
                group = _folded(group, t[2], m[2], p[4], p[5])
            if first + 3 < stop:
                group = _folded(group, t[3], m[3], p[6], p[7])
            if first + 4 < stop:
                group = _folded(group, t[4], m[4], p[8], p[9])
            if first + 5 < stop:
                group = _folded(group, t[5], m[5], p[10], p[11])
            if first + 6 < stop:
                group = _folded(group, t[6], m[6], p[12], p[13])
            if first + 7 < stop:
                group = _folded(group, t[7], m[7], p[14], p[15])
            p, t, m = next_p, next_t, next_m
            first += 8
        group_x[g, thread], group_y[g, thread] = group[2] / group[1], group[3] / group[1]
        logs[g, thread] = fma(group[0], F32(_LN2), math.log(group[1]))
        best = max(best, logs[g, thread])

    # --- groups into the row, as `combine`
    total, x, y = F32(0.0), F32(0.0), F32(0.0)
    for g in range(groups):
        weight = math.exp(logs[g, thread] - best)
        total = add_rn(total, weight)
        if weight > F32(0.0):
            x, y = fma(weight, group_x[g, thread], x), fma(weight, group_y[g, thread], y)
    merged[i, h, d], merged[i, h, d + 1] = x / total, y / total
    if d == 0:
        lse[i, h] = add_rn(best, math.log(total))


def finish(out, top, mass, starts, seats, merged, lse, stream):
    """Spans' partials folded and merged: merged [n, heads, kv_lora], lse [n, heads].

    out [spans, n, heads, kv_lora], top, mass [spans, n, heads]: what attend wrote, spread; starts
    [n, G + 1]: the first span of each group (merge.py).
    """
    n, heads, width = merged.shape
    assert starts.shape[1] - 1 <= GROUPS and width % 2 == 0 and out.shape[1:] == merged.shape
    _finish_kernel[(heads, n, -(-width // (2 * THREADS))), THREADS, stream](
        out, top, mass, starts, seats, merged, lse)
