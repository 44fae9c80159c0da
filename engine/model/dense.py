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
from numba import int32, int64, njit

from engine.device import (INLINE, KERNEL, U32, bits_float, cuda, ldg128, narrow2,
                           sigmoid as sigmoid_device, st64)
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

@cuda.jit(**INLINE)
def _gated(gate, up, limit):
    """One product of a gate and an up column, given as bits, in float32."""
    gate = bits_float(gate)
    up = bits_float(up)
    if gate > limit:
        gate = limit
    if up > limit:
        up = limit
    elif up < -limit:
        up = -limit
    return gate * sigmoid_device(gate) * up


@cuda.jit(**KERNEL)
def _swiglu_kernel(gate_up, limit, picks, seats, out):
    # grid (rows, tiles of 4 * THREADS columns), block THREADS, 4 columns a thread
    row = int64(cuda.blockIdx.x)
    column = int32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * 4
    if column >= out.shape[1] or seats[row // picks] < 0:
        return
    columns = int32(gate_up.shape[1] // 2)
    where = row * out.shape[1] + column
    if column >= columns:
        st64(out, where, U32(0), U32(0))
        return
    gate = ldg128(gate_up, row * 2 * columns + column)
    up = ldg128(gate_up, row * 2 * columns + columns + column)
    st64(out, where,
         narrow2(_gated(gate[0], up[0], limit), _gated(gate[1], up[1], limit)),
         narrow2(_gated(gate[2], up[2], limit), _gated(gate[3], up[3], limit)))


def swiglu_cuda(gate_up, limit, picks, seats, out, stream):
    """out [m, >= c] uint16 (BF16) from gate_up [m, 2c] float32; columns past c become 0.

    c and the width of out are multiples of 4. seats [m / picks] int32: row r belongs to
    seats[r // picks] (picks > 1: chosen experts' rows).
    """
    m, columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert out.shape[0] == m == picks * seats.size and out.shape[1] >= columns, out.shape
    assert columns % 4 == 0 and out.shape[1] % 4 == 0, (columns, out.shape)
    if m and out.shape[1]:
        _swiglu_kernel[(m, -(-out.shape[1] // (4 * THREADS))), THREADS, stream](
            gate_up, np.float32(limit), picks, seats, out)
