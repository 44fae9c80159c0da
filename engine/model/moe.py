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
On the device the logits come from products with the thirds of a row (`thirds`), added smallest
first; padding rows (seat < 0) choose -1 with weight 0.
Source: config.json n_routed_experts, num_experts_per_tok, routed_scaling_factor, norm_topk_prob,
swiglu_limit; checkpoint mlp.gate.weight, mlp.gate.e_score_correction_bias, mlp.experts.*,
mlp.shared_experts.*.
"""

from functools import lru_cache

import numpy as np
from numba import float32, int32, int64, njit

from engine.device import (FULL, INLINE, KERNEL, add_rn, cuda, float_bits,
                           sigmoid as sigmoid_device, warp_top)
from engine.host import NJIT
from engine.linear import linear, matvec_rows
from engine.model.dense import mlp, sigmoid, swiglu_host
from engine.model.thirds import THIRDS

SUM_EPS = 1e-20       # keeps the weights finite where every chosen score is 0
WARPS = 4             # of a block that chooses, a row each
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


@lru_cache(None)
def choose_kernel(each, picks, planes):
    """The kernel that picks among up to 32 * each experts; planes: 3 where the router is given as
    thirds."""

    @cuda.jit(**KERNEL)
    def _choose_kernel(logits, bias, scaling, seats, chosen, weights):
        # grid ceil(n / WARPS), block 32 * WARPS: a warp a row, lane l keeps experts l, l + 32, ...
        keys = cuda.local.array(each, int32)
        scores = cuda.local.array(each, float32)
        row = int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)
        lane = int32(cuda.threadIdx.x) & 31
        experts = int32(bias.shape[0])
        if row >= chosen.shape[0]:
            return
        real = seats[row] >= 0
        for i in range(each):
            e = lane + 32 * i
            at = min(e, experts - 1)
            low = logits[2, row, at]
            middle = logits[1, row, at]
            if planes == 3:
                low = add_rn(add_rn(low, logits[1, row, at + experts]),
                             logits[0, row, at + 2 * experts])
                middle = add_rn(middle, logits[0, row, at + experts])
            scores[i] = sigmoid_device(add_rn(add_rn(low, middle), logits[0, row, at]))
            keys[i] = _rising(scores[i] + bias[at]) if e < experts else int32(TAKEN)
        # ---- the largest, `picks` times; lane j remembers pick j
        mine = int32(-1)
        score = float32(0)
        for pick in range(picks):
            top = int32(TAKEN)
            best = int32(TAKEN)                     # minus the lane's lowest expert of that key
            value = float32(0)
            for i in range(each):
                if keys[i] > top:
                    top, best, value = keys[i], -(lane + 32 * i), scores[i]
            whole = warp_top(top)
            best = -warp_top(best if top == whole else int32(TAKEN))
            value = cuda.shfl_sync(FULL, value, best & 31)
            for i in range(each):
                if best == lane + 32 * i:
                    keys[i] = int32(TAKEN)
            if lane == pick:
                mine, score = best, value
        # ---- ascending experts, and the sum of their scores in that order
        place = int32(0)
        for pick in range(picks):
            if cuda.shfl_sync(FULL, mine, pick) < mine:
                place += 1
        ordered = float32(0)
        for pick in range(picks):
            value = cuda.shfl_sync(FULL, score, pick)
            if cuda.shfl_sync(FULL, place, pick) == lane:
                ordered = value
        total = float32(0)
        for pick in range(picks):
            total = add_rn(total, cuda.shfl_sync(FULL, ordered, pick))
        if lane < picks:
            chosen[row, place if real else lane] = mine if real else int32(-1)
            score = score / add_rn(total, float32(SUM_EPS)) * scaling
            weights[row, place if real else lane] = score if real else float32(0)

    return _choose_kernel


def choose_cuda(logits, bias, scaling, seats, chosen, weights, stream):
    """chosen [n, k] int32, ascending in a row; weights [n, k] float32.

    logits [3, n, E or 3 E] float32: the router's products (or those of its thirds, in order) with
    the thirds of the rows; bias [E] float32.
    """
    n, picks = chosen.shape
    planes = logits.shape[2] // bias.size
    assert logits.shape == (THIRDS, n, planes * bias.size) and planes in (1, THIRDS), logits.shape
    assert picks <= min(32, bias.size) and weights.shape == (n, picks), (picks, bias.size)
    if n:
        choose_kernel(-(-bias.size // 32), picks, planes)[-(-n // WARPS), 32 * WARPS, stream](
            logits, bias, np.float32(scaling), seats, chosen, weights)
