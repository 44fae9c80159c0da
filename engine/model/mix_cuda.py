"""mHC on the device, the way into a sublayer: coefficients, mix, norm; and the end of the streams.

Arrays, formulas and what `partial` holds: `hyper_cuda`, which has the way out. x leaves as BF16, or
as its three thirds (`thirds`) where a router reads it.

Order: parts are added in quarters, ascending, then the quarters. The norm's sum of squares comes
from the products of the streams, so a row may be cut into blocks anywhere. Doubly stochastic: each
division is kept as a factor of a row or a column, by approximate reciprocals, in one thread's
registers; sums of four are ((0 + 1) + (2 + 3)). The end's mean and norm: streams ascending; squares
as in `norm`, with END threads of 4 neighbours.
"""

import math
from functools import lru_cache

from numba import float32, int32, int64

from engine.device import (F32, FULL, INLINE, KERNEL, add_rn, block_sum, cuda, fma, narrow,
                           narrow2, reciprocal, rsqrt, sigmoid, st64)
from engine.model.hyper_cuda import MANY, OUTPUTS, STREAMS, SUMS, four_of, parts
from engine.model.thirds import THIRDS, third_pairs

MIX = 256                               # threads of a block of hyper_in, 4 elements each at a time
QUARTERS = 4
ASIDE = QUARTERS * SUMS
END = 512


@cuda.jit(**INLINE)
def _part(partial, row, p, end, v):
    """partial[row, p, v], or 0 from `end` on."""
    value = partial[row, min(p, end - 1), v]
    return value if p < end else float32(0)


@lru_cache(None)
def in_kernel(kept):
    """The kernel that writes x alone (kept 1) or all its thirds (3)."""

    @cuda.jit(**KERNEL)
    def _in_kernel(streams, partial, base, scale, eps, hc_eps, iters, weight, seats, x, post, comb,
                   work, blocks):
        # grid (n, works), block MIX; work 0 makes post and comb, work 1 .. blocks mixes
        quarters = cuda.shared.array(ASIDE, float32)
        z = cuda.shared.array(SUMS, float32)
        factor = cuda.shared.array(8, float32)
        row = int64(cuda.blockIdx.x)
        thread = int32(cuda.threadIdx.x)
        width = int32(streams.shape[2])
        work = int32(work) + int32(cuda.blockIdx.y)
        # ---- all that is known is asked for before anything is waited for
        real = seats[row] >= 0
        d = ((work - 1) * MIX + thread) * 4
        step = int32(blocks) * MIX * 4
        at = d if d >= 0 and d < width else int32(0)
        s0 = four_of(streams, row * STREAMS * width + at)
        s1 = four_of(streams, (row * STREAMS + 1) * width + at)
        s2 = four_of(streams, (row * STREAMS + 2) * width + at)
        s3 = four_of(streams, (row * STREAMS + 3) * width + at)
        gain = four_of(weight, int64(at))
        # ---- sums over the parts
        if thread < QUARTERS * SUMS:
            quarter = thread // SUMS
            v = thread - quarter * SUMS
            share = (int32(partial.shape[1]) + QUARTERS - 1) // QUARTERS
            end = min((quarter + 1) * share, int32(partial.shape[1]))
            total = float32(0)
            for p in range(quarter * share, end, 8):
                a = _part(partial, row, p, end, v)
                b = _part(partial, row, p + 1, end, v)
                c = _part(partial, row, p + 2, end, v)
                e = _part(partial, row, p + 3, end, v)
                f = _part(partial, row, p + 4, end, v)
                g = _part(partial, row, p + 5, end, v)
                h = _part(partial, row, p + 6, end, v)
                i = _part(partial, row, p + 7, end, v)
                total = add_rn(add_rn(add_rn(add_rn(total, a), b), c), e)
                total = add_rn(add_rn(add_rn(add_rn(total, f), g), h), i)
            quarters[thread] = total
        if not real:
            return
        cuda.syncthreads()
        if thread < 32:
            for v in range(thread, SUMS, 32):
                total = quarters[v]
                for quarter in range(1, QUARTERS):
                    total = add_rn(total, quarters[quarter * SUMS + v])
                z[v] = total
            cuda.syncwarp()
            square = add_rn(add_rn(add_rn(z[OUTPUTS], z[OUTPUTS + 4]), z[OUTPUTS + 7]),
                            z[OUTPUTS + 9])
            root = rsqrt(square / float32(STREAMS * width) + eps)
            if work == 0:
                _post_comb(z, root, base, scale, hc_eps, iters, row, thread, post, comb)
            else:
                k = thread & 3
                pre = add_rn(sigmoid(fma(z[k] * root, scale[0], base[k])), hc_eps)
                p0 = cuda.shfl_sync(FULL, pre, 0)
                p1 = cuda.shfl_sync(FULL, pre, 1)
                p2 = cuda.shfl_sync(FULL, pre, 2)
                p3 = cuda.shfl_sync(FULL, pre, 3)
                m = OUTPUTS
                # sum_j pre_j (pre_j G_jj + 2 sum_k>j pre_k G_jk), j ascending
                t0 = fma(p3, z[m + 3], fma(p2, z[m + 2], p1 * z[m + 1]))
                t1 = fma(p3, z[m + 6], p2 * z[m + 5])
                t2 = p3 * z[m + 8]
                total = p0 * fma(float32(2), t0, p0 * z[m])
                total = fma(p1, fma(float32(2), t1, p1 * z[m + 4]), total)
                total = fma(p2, fma(float32(2), t2, p2 * z[m + 7]), total)
                total = fma(p3, p3 * z[m + 9], total)
                if total < float32(0):
                    total = float32(0)
                if thread < STREAMS:
                    factor[thread] = pre
                if thread == STREAMS:
                    factor[thread] = rsqrt(total / float32(width) + eps)
        if work == 0:
            return
        cuda.syncthreads()
        # ---- mix and norm
        p0, p1, p2, p3, root = factor[0], factor[1], factor[2], factor[3], factor[4]
        plane = int64(streams.shape[0]) * width
        while d < width:
            a = fma(p3, s3[0], fma(p2, s2[0], fma(p1, s1[0], p0 * s0[0])))
            b = fma(p3, s3[1], fma(p2, s2[1], fma(p1, s1[1], p0 * s0[1])))
            c = fma(p3, s3[2], fma(p2, s2[2], fma(p1, s1[2], p0 * s0[2])))
            e = fma(p3, s3[3], fma(p2, s2[3], fma(p1, s1[3], p0 * s0[3])))
            a = a * root * gain[0]
            b = b * root * gain[1]
            c = c * root * gain[2]
            e = e * root * gain[3]
            to = row * width + d
            if kept == 1:
                st64(x, to, narrow2(a, b), narrow2(c, e))
            else:
                left, right = third_pairs(a, b), third_pairs(c, e)
                for third in range(THIRDS):
                    st64(x, to + third * plane, left[third], right[third])
            d += step
            if d < width:
                s0 = four_of(streams, row * STREAMS * width + d)
                s1 = four_of(streams, (row * STREAMS + 1) * width + d)
                s2 = four_of(streams, (row * STREAMS + 2) * width + d)
                s3 = four_of(streams, (row * STREAMS + 3) * width + d)
                gain = four_of(weight, int64(d))

    return _in_kernel


@cuda.jit(**INLINE)
def _four(value, lane):
    """value of lanes lane .. lane + 3."""
    return (cuda.shfl_sync(FULL, value, lane), cuda.shfl_sync(FULL, value, lane + 1),
            cuda.shfl_sync(FULL, value, lane + 2), cuda.shfl_sync(FULL, value, lane + 3))


@cuda.jit(**INLINE)
def _divided(own, a, x, b, y, c, z, d, w, eps):
    """What the inverse of a factor becomes: own eps + (a x + b y) + (c z + d w)."""
    return add_rn(fma(b, y, fma(a, x, own * eps)), fma(d, w, c * z))


@cuda.jit(**INLINE)
def _post_comb(z, root, base, scale, hc_eps, iters, row, lane, post, comb):
    """One warp: post and comb of a row. Lanes 4 j + k and 16 + 4 j + k have comb[j, k]."""
    if lane < STREAMS:
        at = STREAMS + lane
        post[row, lane] = float32(2) * sigmoid(fma(z[at] * root, scale[1], base[at]))
    place = lane & 15
    j, k = place >> 2, place & 3
    at = 2 * STREAMS + place
    c = fma(z[at] * root, scale[2], base[at])
    top = c
    for i in range(STREAMS):
        top = max(top, cuda.shfl_sync(FULL, c, 4 * j + i))
    c = math.exp(c - top)
    total = float32(0)
    for i in range(STREAMS):
        total = add_rn(total, cuda.shfl_sync(FULL, c, 4 * j + i))
    c = add_rn(c / total, hc_eps)
    m00, m01, m02, m03 = _four(c, 0)
    m10, m11, m12, m13 = _four(c, 4)
    m20, m21, m22, m23 = _four(c, 8)
    m30, m31, m32, m33 = _four(c, 12)
    # ---- comb[j, k] = c[j, k] / (p[j] q[k]); dividing row j by its sum + eps leaves
    # p[j] = sum_k c[j, k] / q[k] + eps p[j]. u = 1 / p, v = 1 / q
    u0 = u1 = u2 = u3 = v0 = v1 = v2 = v3 = float32(1)
    p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = float32(1)
    for turn in range(iters):
        if turn:
            p0 = _divided(p0, m00, v0, m01, v1, m02, v2, m03, v3, hc_eps)
            p1 = _divided(p1, m10, v0, m11, v1, m12, v2, m13, v3, hc_eps)
            p2 = _divided(p2, m20, v0, m21, v1, m22, v2, m23, v3, hc_eps)
            p3 = _divided(p3, m30, v0, m31, v1, m32, v2, m33, v3, hc_eps)
            u0, u1, u2, u3 = reciprocal(p0), reciprocal(p1), reciprocal(p2), reciprocal(p3)
        q0 = _divided(q0, m00, u0, m10, u1, m20, u2, m30, u3, hc_eps)
        q1 = _divided(q1, m01, u0, m11, u1, m21, u2, m31, u3, hc_eps)
        q2 = _divided(q2, m02, u0, m12, u1, m22, u2, m32, u3, hc_eps)
        q3 = _divided(q3, m03, u0, m13, u1, m23, u2, m33, u3, hc_eps)
        v0, v1, v2, v3 = reciprocal(q0), reciprocal(q1), reciprocal(q2), reciprocal(q3)
    u0 = u1 if j == 1 else u2 if j == 2 else u3 if j == 3 else u0
    v0 = v1 if k == 1 else v2 if k == 2 else v3 if k == 3 else v0
    c = c * u0 * v0
    if lane < 16:
        comb[row, j, k] = c


@cuda.jit(**KERNEL)
def _end_kernel(streams, pick, weight, eps, x):
    # grid (rows of x), block END, hidden floats of shared memory
    scratch = cuda.shared.array(32, float32)
    mean = cuda.shared.array(0, float32)
    row = int64(pick[cuda.blockIdx.x])
    width = int32(streams.shape[2])
    if row < 0:
        return
    total = float32(0)
    for d in range(4 * cuda.threadIdx.x, width, 4 * END):
        s0 = four_of(streams, row * STREAMS * width + d)
        s1 = four_of(streams, (row * STREAMS + 1) * width + d)
        s2 = four_of(streams, (row * STREAMS + 2) * width + d)
        s3 = four_of(streams, (row * STREAMS + 3) * width + d)
        for i in range(4):
            value = add_rn(add_rn(add_rn(s0[i], s1[i]), s2[i]), s3[i]) / float32(STREAMS)
            mean[d + i] = value
            total = fma(value, value, total)
    root = rsqrt(block_sum(total, scratch) / float32(width) + eps)
    for d in range(cuda.threadIdx.x, width, END):
        x[cuda.blockIdx.x, d] = narrow(mean[d] * root * weight[d])


# ---- launch ------------------------------------------------------------------------------------

def hyper_in_cuda(streams, partial, base, scale, shape, weight, seats, x, post, comb, stream,
                  beside):
    """x [1 or 3, n, D]: RMS norm (weight [D] float32) of a site's input; post and comb of the site.

    base [24] and scale [3] float32; partial from hyper_first_cuda or hyper_out_cuda. beside: the
    stream that makes post and comb, which takes longer than x and is not needed before the way
    out; where it is `stream` itself one launch does all.
    """
    n, count, width = streams.shape
    assert count == STREAMS and partial.shape == (n, parts(width), SUMS), partial.shape
    assert x.shape[0] in (1, THIRDS) and x.shape[1:] == (n, width), x.shape
    assert weight.size == width and post.shape == (n, count), (weight.size, post.shape)
    if n:
        blocks = 1 if n >= MANY else -(-width // (4 * MIX))
        kernel = in_kernel(x.shape[0])
        args = (streams, partial, base, scale, F32(shape.eps), F32(shape.hc_eps), shape.hc_iters,
                weight, seats, x, post, comb)
        if beside is stream:
            kernel[(n, 1 + blocks), MIX, stream](*args, 0, blocks)
            return
        kernel[(n, 1), MIX, beside](*args, 0, blocks)
        kernel[(n, blocks), MIX, stream](*args, 1, blocks)


def hyper_end_cuda(streams, pick, weight, eps, x, stream):
    """x [m, D] uint16 (BF16) = RMS norm of the mean over the streams of row pick[i].

    pick [m] int32, -1 is padding; weight [D] float32.
    """
    width = streams.shape[2]
    assert streams.shape[1] == STREAMS and x.shape == (pick.size, width), (x.shape, pick.size)
    if pick.size:
        _end_kernel[pick.size, END, stream, 4 * width](streams, pick, weight, F32(eps), x)
