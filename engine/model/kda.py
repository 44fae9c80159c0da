"""Kimi delta attention: instead of a KV a head keeps one matrix that each row decays and corrects.

| name | shape | dtype | |
|---|---|---|---|
| **reads** x | [n, hidden] | float32 | normalised rows; a conversation's are together, in order |
| w.inp | Linear [3 hl D + 2 D + hl, hidden] | BF16/F32 | q, k, v (hl D), f_a, g_a (D), b (hl) |
| w.conv | [3 hl D, T] | float32 | depthwise taps, oldest row first |
| w.f_b, w.g_b | Linear [hl D, D] | BF16/F32 | decay and output gate of own heads |
| w.decay, w.dt_bias | [hl], [hl D] | float32 | decay = exp(A_log) |
| w.o_norm | [D] | float32 | weight of the norm on o |
| w.out | Linear [hidden, hl D] | BF16/F32 | own columns of o_proj |
| seats | [n] | int32 | index of each row's conversation, below state.shape[0] |
| **modifies** state | [seats, hl, D, D] | float32 | S[key channel, value channel]; zeros at first |
| conv | [seats, T - 1, 3 hl D] | float32 | last rows of q, k, v, oldest first; zeros at first |
| **writes** y | [n, hidden] | float32 | this rank's part: the caller adds parts in rank order |

hl = heads this rank owns, D = their dimension. For a head and a row, q, k, v = silu(causal conv):
  q, k over sqrt(sum of squares + 1e-6), q also times D^-0.5
  g = bound * sigmoid(decay (f_b f_a x + dt_bias)) a channel, in (bound, 0);  beta = sigmoid(b x)
  S = diag(e^g) S;  S += k (beta (v - S^T k))^T;  o = S^T q
  out = RMSnorm(o, eps, o_norm) * sigmoid(g_b g_a x);  y = o_proj out
f, g and b see the row before the convolution; `conv` holds projections from before it.

Order: one recurrence, one row at a time, for prefill and decode alike, so rows may be cut into
calls anywhere. Sums over key channels and taps ascend; sums of squares as in `norm`. Empty cases:
no heads (hl = 0) gives zeros and touches nothing; no rows gives no rows. Bytes a row: the state is
read twice and written once.
Source: config.json linear_attn_config (num_heads, head_dim, short_conv_kernel_size,
gate_lower_bound), rms_norm_eps; checkpoint self_attn.{q,k,v,b,f_a,f_b,g_a,g_b,o}_proj, *_conv1d,
A_log, dt_bias, o_norm.
"""

import math

import numpy as np
from numba import njit

from engine.host import NJIT
from engine.linear import linear
from engine.model.dense import sigmoid
from engine.model.norm import sum_squares

UNIT_EPS = 1e-6       # inside the square root when q and k are brought to unit length


@njit("void(float32[:, ::1], float32[:, ::1], int32[::1], float32[:, :, ::1], float32[:, ::1])",
      **NJIT)
def conv_host(rows, taps, seats, history, out):
    """out [n, C] = silu of the causal depthwise convolution of rows[:, :C], taps [C, T].

    history [seats, T - 1, C] moves on by each row (modified).
    """
    width, depth = taps.shape
    tap = taps.T.copy()                 # [T, C]: channels contiguous
    for i in range(out.shape[0]):
        past = history[seats[i]]
        for c in range(width):
            out[i, c] = np.float32(0.0)
        for t in range(depth - 1):
            for c in range(width):
                out[i, c] += past[t, c] * tap[t, c]
        for c in range(width):
            value = out[i, c] + rows[i, c] * tap[depth - 1, c]
            out[i, c] = value * sigmoid(value)
        for t in range(depth - 2):
            past[t] = past[t + 1]
        if depth > 1:
            past[depth - 2] = rows[i, :width]


@njit("void(float32[::1], float32, float32[::1])", **NJIT)
def unit_host(row, scale, out):
    """out [D] = row at unit length times scale."""
    factor = scale / math.sqrt(sum_squares(row) + np.float32(UNIT_EPS))
    for d in range(row.shape[0]):
        out[d] = row[d] * factor


@njit("void(float32[:, ::1], float32[::1], float32[::1], float32[::1], float32[::1], float32,"
      " float32[::1], float32[::1])", **NJIT)
def delta_host(s, q, k, v, keep, beta, error, o):
    """One row of one head: s [D, D] is decayed by keep [D] and corrected (modified), o [D] = s^T q.

    error [D] is scratch. The decayed state is computed twice rather than stored in between.
    """
    width = s.shape[0]
    whole = width & ~3
    for d in range(width):
        error[d] = np.float32(0.0)
        o[d] = np.float32(0.0)
    for c in range(0, whole, 4):
        k0, k1, k2, k3 = k[c], k[c + 1], k[c + 2], k[c + 3]
        e0, e1, e2, e3 = keep[c], keep[c + 1], keep[c + 2], keep[c + 3]
        for d in range(width):
            found = error[d] + k0 * (e0 * s[c, d])
            found += k1 * (e1 * s[c + 1, d])
            found += k2 * (e2 * s[c + 2, d])
            error[d] = found + k3 * (e3 * s[c + 3, d])
    for c in range(whole, width):
        for d in range(width):
            error[d] += k[c] * (keep[c] * s[c, d])
    for d in range(width):
        error[d] = beta * (v[d] - error[d])
    for c in range(width):
        kc, ec, qc = k[c], keep[c], q[c]
        for d in range(width):
            moved = ec * s[c, d] + kc * error[d]
            s[c, d] = moved
            o[d] += qc * moved


@njit("void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[::1],"
      " float32[::1], float32, float32[::1], float32, int32[::1], float32[:, :, :, ::1],"
      " float32[:, ::1])", **NJIT)
def recur_host(rows, qkv, forget, gate, decay, dt_bias, bound, o_norm, eps, seats, state, out):
    """out [n, hl D]: every row through its heads' states (modified).

    forget, gate [n, hl D] come before their sigmoids; b stands in the last hl columns of rows.
    """
    heads, width = state.shape[1:3]
    first_b = rows.shape[1] - heads
    scale = np.float32(1.0) / math.sqrt(np.float32(width))
    q = np.empty(width, np.float32)
    k = np.empty(width, np.float32)
    keep = np.empty(width, np.float32)
    error = np.empty(width, np.float32)
    for h in range(heads):              # heads outside: one head's state stays near while rows pass
        lo = h * width
        hi = lo + width
        for i in range(out.shape[0]):
            unit_host(qkv[i, lo:hi], scale, q)
            unit_host(qkv[i, heads * width + lo:heads * width + hi], np.float32(1.0), k)
            for d in range(width):
                logit = decay[h] * (forget[i, lo + d] + dt_bias[lo + d])
                keep[d] = math.exp(bound * sigmoid(logit))
            o = out[i, lo:hi]
            v = qkv[i, 2 * heads * width + lo:2 * heads * width + hi]
            delta_host(state[seats[i], h], q, k, v, keep, sigmoid(rows[i, first_b + h]), error, o)
            root = np.float32(1.0) / math.sqrt(sum_squares(o) / np.float32(width) + eps)
            for d in range(width):
                o[d] = o[d] * root * o_norm[d] * sigmoid(gate[i, lo + d])


def kda(x, w, shape, state, conv, seats):
    """x [n, hidden] float32, contiguous -> this rank's part of y [n, hidden] float32.

    state and conv are modified in place at the seats named in seats [n] int32, and nowhere else.
    """
    n, heads, width = x.shape[0], state.shape[1], shape.kda_dim
    if heads == 0:
        return np.zeros((n, w.out.rows), np.float32)
    channels = 3 * heads * width
    assert w.inp.rows == channels + 2 * width + heads, (w.inp.rows, heads, width)
    assert conv.shape[2] == w.conv.shape[0] == channels and w.dt_bias.size == heads * width
    assert conv.shape[1] == w.conv.shape[1] - 1 and w.decay.size == heads and w.o_norm.size == width
    rows = linear(x, w.inp)                                         # [n, 3 hl D + 2 D + hl]
    qkv = np.empty((n, channels), np.float32)
    conv_host(rows, w.conv, seats, conv, qkv)
    middle, last = channels + width, channels + 2 * width
    forget = linear(np.ascontiguousarray(rows[:, channels:middle]), w.f_b)      # [n, hl D]
    gate = linear(np.ascontiguousarray(rows[:, middle:last]), w.g_b)            # [n, hl D]
    out = np.empty((n, heads * width), np.float32)
    recur_host(rows, qkv, forget, gate, w.decay, w.dt_bias, np.float32(shape.gate_bound),
               w.o_norm, np.float32(shape.eps), seats, state, out)
    return linear(out, w.out)
