"""Mixture of experts: a row goes to the k experts its router likes best and to the shared expert.

| name | shape | dtype | |
|---|---|---|---|
| **reads** x | [n, hidden] | float32 | normalised rows, contiguous |
| w.router | Linear [E, hidden] | BF16/F32 | one row an expert, the same on every rank |
| w.bias | [E] | float32 | correction that only the choice sees |
| w.gate_up | Group of E [2c, hidden] | BF16/F32 | own gate, then own up columns of each expert |
| w.down | Group of E [hidden, c] | BF16/F32 | own columns of the down projections |
| w.shared | Mlp | | own columns of the shared expert |
| **writes** y | [n, hidden] | float32 | this rank's part: the caller adds parts in rank order |

s = sigmoid(router x) in float32. Chosen: the k largest s + bias, the lower expert on ties. A NaN
counts as largest, so that a fault reaches the output instead of being passed over; whatever the
scores, k different experts are chosen. All ranks compute the same choice from the same rows.
Weight of a chosen expert: s, without bias, / (sum of the chosen s + 1e-20) * routed_scaling.
y = sum of weight * expert(x) + shared(x), each expert the gated MLP of `dense` with its clamps.

Order: the sum of s and the sum of experts ascend in expert index, then the shared expert is added.
Rows are gathered by expert, so that a call walks an expert's weights once, but a row's sums are
those of the row alone. Empty cases: no columns gives zeros; no rows gives no rows.
On the device the router's logits are sums of parts (`dots`); padding rows (seat < 0) choose -1 with
weight 0.
Source: config.json n_routed_experts, num_experts_per_tok, routed_scaling_factor, norm_topk_prob,
swiglu_limit; checkpoint mlp.gate.weight, mlp.gate.e_score_correction_bias, mlp.experts.*,
mlp.shared_experts.*.
"""

import numpy as np
from numba import float32, int32, int64, njit

from engine.device import (FULL, INLINE, KERNEL, add_rn, cuda, float_bits,
                           sigmoid as sigmoid_device)
from engine.host import NJIT
from engine.linear import linear, matvec_rows
from engine.model.dense import mlp, sigmoid, swiglu_host
from engine.model.dots import dots_cuda

SUM_EPS = 1e-20       # keeps the weights finite where every chosen score is 0
MAX_EXPERTS = 512     # a warp chooses for a row, with all scores in shared memory
TAKEN = -2 ** 31      # below the key of every score


@njit("void(float32[:, ::1], float32[::1], float32, int32[:, ::1], float32[:, ::1])", **NJIT)
def choose_host(logits, bias, scaling, chosen, weights):
    """chosen [n, k] (expert indices ascending) and weights [n, k] from logits [n, E]."""
    experts = logits.shape[1]
    score = np.empty(experts, np.float32)
    taken = np.empty(experts, np.bool_)
    for i in range(logits.shape[0]):
        for e in range(experts):
            score[e] = sigmoid(logits[i, e])
            taken[e] = False
        for _ in range(chosen.shape[1]):
            best = -1
            top = np.float32(0.0)
            for e in range(experts):
                key = score[e] + bias[e]
                if not taken[e] and (best < 0 or key > top or (key != key and top == top)):
                    best = e
                    top = key
            taken[best] = True
        total = np.float32(0.0)
        j = 0
        for e in range(experts):
            if taken[e]:
                chosen[i, j] = e
                weights[i, j] = score[e]
                total += score[e]
                j += 1
        for j in range(chosen.shape[1]):
            weights[i, j] = weights[i, j] / (total + np.float32(SUM_EPS)) * scaling


@njit([f"void(float32[:, ::1], int32[:, ::1], float32[:, ::1], {up}[:, :, :, ::1],"
       f" {down}[:, :, :, ::1], float32, int64, float32[:, ::1])"
       for up in ("uint16", "float32") for down in ("uint16", "float32")], **NJIT)
def experts_host(x, chosen, weights, gate_up, down, limit, columns, y):
    """y [n, hidden] (modified) += weight * expert(x) over the chosen experts; columns = c."""
    rows, picks = chosen.shape
    start = np.zeros(gate_up.shape[0] + 1, np.int64)    # expert e: visits start[e]..start[e + 1]
    for i in range(rows):
        for j in range(picks):
            start[chosen[i, j] + 1] += 1
    most = 0
    for e in range(gate_up.shape[0]):
        most = max(most, start[e + 1])
        start[e + 1] += start[e]
    visit = np.empty(rows * picks, np.int64)            # i * picks + j, rows ascending an expert
    following = start.copy()
    for i in range(rows):
        for j in range(picks):
            e = chosen[i, j]
            visit[following[e]] = i * picks + j
            following[e] += 1
    gathered = np.empty((most, x.shape[1]), np.float32)
    wide = np.empty((most, 2 * columns), np.float32)
    active = np.empty((most, columns), np.float32)
    result = np.empty((most, y.shape[1]), np.float32)
    for e in range(gate_up.shape[0]):
        count = start[e + 1] - start[e]
        if count == 0:
            continue
        for r in range(count):
            gathered[r] = x[visit[start[e] + r] // picks]
        matvec_rows(gathered[:count], gate_up[e], wide[:count])
        swiglu_host(wide[:count], limit, active[:count])
        matvec_rows(active[:count], down[e], result[:count])
        for r in range(count):
            i, j = divmod(visit[start[e] + r], picks)
            weight = weights[i, j]
            for d in range(y.shape[1]):
                y[i, d] += weight * result[r, d]


def route(x, w, shape):
    """x [n, hidden] float32 -> chosen [n, k] int32, ascending in a row; weights [n, k] float32."""
    assert w.router.rows >= shape.experts_per_token, (w.router.rows, shape.experts_per_token)
    chosen = np.empty((x.shape[0], shape.experts_per_token), np.int32)
    weights = np.empty(chosen.shape, np.float32)
    choose_host(linear(x, w.router), w.bias, np.float32(shape.routed_scaling), chosen, weights)
    return chosen, weights


def moe(x, w, shape):
    """x [n, hidden] float32, contiguous -> this rank's part of y [n, hidden] float32."""
    y = np.zeros(x.shape, np.float32)
    columns = w.gate_up.rows // 2
    if columns:
        chosen, weights = route(x, w, shape)
        experts_host(x, chosen, weights, w.gate_up.w, w.down.w,
                     np.float32(shape.swiglu_limit), columns, y)
    y += mlp(x, w.shared, shape.swiglu_limit)
    return y


# ---- device ------------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def _rising(value):
    """int32 in the order of the floats, -0.0 as 0.0, NaN above all; always above TAKEN."""
    bits = int32(float_bits(add_rn(value, float32(0))))
    if bits < 0:
        bits = int32(bits ^ int32(0x7FFFFFFF))
    if value != value:
        bits = int32(0x7FFFFFFF)
    return bits


@cuda.jit(**KERNEL)
def _choose_kernel(partial, bias, scaling, seats, chosen, weights):
    # grid (n), block 32: lane l keeps the experts l, l + 32, ...
    keys = cuda.shared.array(MAX_EXPERTS, int32)
    scores = cuda.shared.array(MAX_EXPERTS, float32)
    row = int64(cuda.blockIdx.x)
    lane = int32(cuda.threadIdx.x)
    experts, picks = int32(bias.shape[0]), int32(chosen.shape[1])
    if seats[row] < 0:
        if lane < picks:
            chosen[row, lane] = int32(-1)
            weights[row, lane] = float32(0)
        return
    for e in range(lane, experts, 32):
        logit = float32(0)
        for p in range(partial.shape[1]):
            logit += partial[row, p, e]
        scores[e] = sigmoid_device(logit)
        keys[e] = _rising(scores[e] + bias[e])
    # ---- the largest, `picks` times; lane j remembers pick j
    mine = int32(-1)
    for pick in range(picks):
        top = int32(TAKEN)
        best = experts
        for e in range(lane, experts, 32):
            if keys[e] > top:
                top, best = keys[e], int32(e)
        for mask in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, top, mask)
            index = cuda.shfl_xor_sync(FULL, best, mask)
            if other > top or (other == top and index < best):
                top, best = other, index
        if best & 31 == lane:
            keys[best] = int32(TAKEN)
        if lane == pick:
            mine = best
    # ---- ascending experts, and the sum of their scores in that order
    place = int32(0)
    for pick in range(picks):
        if cuda.shfl_sync(FULL, mine, pick) < mine:
            place += 1
    if lane < picks:
        chosen[row, place] = mine
    cuda.syncthreads()
    total = float32(0)
    for pick in range(picks):
        total += scores[chosen[row, pick]]
    if lane < picks:
        weights[row, place] = scores[mine] / (total + float32(SUM_EPS)) * scaling


def route_cuda(x, router, bias, scaling, seats, partial, chosen, weights, stream):
    """chosen [n, k] int32, ascending in a row; weights [n, k] float32.

    x [n, hidden] float32; router [E, hidden] uint16 (BF16) or float32; bias [E] float32; partial
    [n, parts(hidden), E] float32 is scratch.
    """
    n, picks = chosen.shape
    assert picks <= min(32, bias.size) and bias.size <= MAX_EXPERTS, (picks, bias.size)
    assert partial.shape[2] == router.shape[0] == bias.size and weights.shape == (n, picks)
    dots_cuda(x, router, seats, partial, stream)
    if n:
        _choose_kernel[n, 32, stream](partial, bias, np.float32(scaling), seats, chosen, weights)
