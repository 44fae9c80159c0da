"""The gated MLP of a dense layer or shared expert, both halves clamped before they are multiplied.

| name | shape | dtype | |
|---|---|---|---|
| **reads** x | [n, hidden] | float32 | normalised rows, contiguous |
| w.gate_up | Linear [2c, hidden] | BF16/F32 | gate columns this rank owns, then their up columns |
| w.down | Linear [hidden, c] | BF16/F32 | own columns of the down projection |
| limit | | float | shape.swiglu_limit |
| **writes** y | [n, hidden] | float32 | this rank's part: the caller adds parts in rank order |

y = down(silu(min(gate x, limit)) * clamp(up x, -limit, limit)): a gate has no lower bound.
NaN stays NaN. Order: sums as in `linear`. Empty cases: no columns (c = 0) gives zeros; no rows
gives no rows.
Source: config.json swiglu_limit, hidden_act silu; checkpoint mlp.{gate,up,down}_proj,
mlp.shared_experts.*.
"""

import math

import numpy as np
from numba import int32, int64, njit, uint16

from engine.device import KERNEL, cuda, narrow, sigmoid as sigmoid_device
from engine.host import NJIT
from engine.linear import linear

THREADS = 256


@njit("float32(float32)", **NJIT)
def sigmoid(x):
    """1 / (1 + e^-x); where e^-x overflows the quotient is 0, so only a NaN gives NaN."""
    return np.float32(1.0) / (np.float32(1.0) + math.exp(-x))


@njit("void(float32[:, ::1], float32, float32[:, ::1])", **NJIT)
def swiglu_host(gate_up, limit, out):
    """out [n, c] = silu(min(gate, limit)) * clamp(up, -limit, limit); gate_up [n, 2c] = gate|up."""
    columns = out.shape[1]
    for i in range(out.shape[0]):
        for j in range(columns):
            gate = gate_up[i, j]
            up = gate_up[i, columns + j]
            if gate > limit:
                gate = limit
            if up > limit:
                up = limit
            elif up < -limit:
                up = -limit
            out[i, j] = gate * sigmoid(gate) * up


def mlp(x, w, limit):
    """x [n, hidden] float32, contiguous -> this rank's part of y [n, hidden] float32."""
    columns = w.gate_up.rows // 2
    if columns == 0:
        return np.zeros((x.shape[0], w.down.rows), np.float32)
    active = np.empty((x.shape[0], columns), np.float32)
    swiglu_host(linear(x, w.gate_up), np.float32(limit), active)
    return linear(active, w.down)


# ---- device ------------------------------------------------------------------------------------

@cuda.jit(**KERNEL)
def _swiglu_kernel(gate_up, limit, picks, seats, out):
    # grid (rows, tiles of THREADS columns), block THREADS
    row = int64(cuda.blockIdx.x)
    column = int32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
    if column >= out.shape[1] or seats[row // picks] < 0:
        return
    columns = int32(gate_up.shape[1] // 2)
    if column >= columns:
        out[row, column] = uint16(0)
        return
    gate = gate_up[row, column]
    up = gate_up[row, columns + column]
    if gate > limit:
        gate = limit
    if up > limit:
        up = limit
    elif up < -limit:
        up = -limit
    out[row, column] = narrow(gate * sigmoid_device(gate) * up)


def swiglu_cuda(gate_up, limit, picks, seats, out, stream):
    """out [m, >= c] uint16 (BF16) from gate_up [m, 2c] float32; columns past c become 0.

    seats [m / picks] int32: row r belongs to seats[r // picks] (picks > 1: chosen experts' rows).
    """
    m, columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert out.shape[0] == m == picks * seats.size and out.shape[1] >= columns, out.shape
    if m and out.shape[1]:
        _swiglu_kernel[(m, -(-out.shape[1] // THREADS)), THREADS, stream](
            gate_up, np.float32(limit), picks, seats, out)
