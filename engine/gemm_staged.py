"""Chunks of k staged in shared memory, for gemm_tile: copies, products, and sums on their way out.

A chunk (gemm_parts: 32 k of BF16, 64 of FP8) is the weights' rows, ROW_BYTES each, and the
activations' rows, ROW_BYTES or, for FP8 weights, WIDE_BYTES each with their 16-byte pieces turned
by 5 in odd rows: so 16-byte loads meet no bank conflict. Lane 4 g + t reads 16 bytes at t of row g
of each eight. Tuples: activations [row of nt][4 words], sums [mt][nt][4].
"""

from llvmlite import ir
from numba import types

from engine.device import (F32, I32, I64, INLINE, MMA, MMA_CONSTRAINTS, U32, address, cuda,
                           intrinsic, ptx, unpack_fp8)
from engine.gemm_parts import _is_fp8, _literal, _unpack, is_fp8

ROW_BYTES = 64                  # of weights in a chunk, and of BF16 activations
WIDE_BYTES = 128                # of the activations that go with FP8 weights
STEP = 64                       # rows that one copy of every thread covers
PAD = 4                         # words between rows of a stored tile: no bank conflict
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


def _numbers(*arguments):
    """Values of compile-time constants; None where one is not."""
    found = [_literal(a) for a in arguments]
    return None if None in found else found


# ---- copies to shared memory -------------------------------------------------------------------

@intrinsic
def place(typingctx, array, index):
    """The address, int64, of array.flat[index]."""
    def build(context, builder, signature, args):
        return address(context, builder, signature.args[0], args[0], args[1])
    return I64(array, I64), build


@intrinsic
def places(typingctx, array, base, first, last, step, stride, count):
    """Addresses of array.flat[base + min(first + step i, last) * stride] for i < count, int64."""
    number = _literal(count)
    if number is not None:
        def build(context, builder, signature, args):
            data, start, row, end, by, apart, _ = args
            found = []
            for _ in range(number):
                at = builder.select(builder.icmp_signed("<", row, end), row, end)
                at = builder.add(start, builder.mul(at, apart))
                found.append(address(context, builder, signature.args[0], data, at))
                row = builder.add(row, by)
            return context.make_tuple(builder, signature.return_type, found)
        return types.UniTuple(I64, number)(array, I64, I64, I64, I64, I64, count), build


@intrinsic
def copies(typingctx, where, array, rows, k, size, row_bytes):
    """Start copies of 16 bytes, k elements of `array` after each of the addresses `rows`, to
    where, where + STEP * row_bytes, ...; size 0 writes zeros and reads nothing."""
    apart = _literal(row_bytes)
    if apart is not None:
        width = array.dtype.bitwidth // 8

        def build(context, builder, signature, args):
            for i, row in enumerate(_unpack(builder, args[2])):
                source, = ptx(builder, f"mad.wide.u32 $0, $1, {width}, $2;", "=l,r,l", [_I64],
                              [args[3], row])
                ptx(builder, f"cp.async.cg.shared.global.L2::128B [$0+{STEP * apart * i}], [$1], "
                    "16, $2;", "r,l,r", [], [args[0], source, args[4]], True)
            return context.get_dummy_value()
        return types.void(U32, array, rows, U32, U32, row_bytes), build


@cuda.jit(**INLINE)
def weight_lane(w):
    """First k of a chunk that this thread copies of its weight rows, thread // 4 and 64 i more."""
    return (cuda.threadIdx.x & 3) * (16 if is_fp8(w) else 8)


@cuda.jit(**INLINE)
def row_lane():
    """The same of its activation rows, thread // 4 and 64 i more; FP8: and 32 further."""
    return (cuda.threadIdx.x & 3) * 8


@cuda.jit(**INLINE)
def fill(w_to, x_to, x, w, w_rows, x_rows, k, K):
    """Start this thread's copies of the chunk at k (int32) to its places in the chunk's stage."""
    size = U32(16) if k < I32(K - weight_lane(w)) else U32(0)
    copies(U32(w_to), w, w_rows, U32(k), size, ROW_BYTES)
    if is_fp8(w):
        size = U32(16) if k < I32(K - row_lane()) else U32(0)
        copies(U32(x_to), x, x_rows, U32(k), size, WIDE_BYTES)
        size = U32(16) if k < I32(K - row_lane() - 32) else U32(0)
        copies(U32(x_to) ^ U32(64), x, x_rows, U32(k + 32), size, WIDE_BYTES)
    else:
        copies(U32(x_to), x, x_rows, U32(k), size, ROW_BYTES)


# ---- products of a staged chunk ----------------------------------------------------------------

def _load(builder, where, offset):
    return ptx(builder, f"ld.shared.v4.u32 {{$0,$1,$2,$3}}, [$4+{offset}];", "=r,=r,=r,=r,r",
               [_I32] * 4, [where], True)


def _together(builder, words, zero):
    """The words of an operand in four neighbouring registers, through an operation that ptxas
    cannot see through: else it copies them anew for every mma."""
    return ptx(builder, "xor.b32 $0,$4,$8; xor.b32 $1,$5,$8; xor.b32 $2,$6,$8; xor.b32 $3,$7,$8;",
               "=&r,=&r,=&r,=&r,r,r,r,r,r", [_I32] * 4, words + [zero], True)


def _chunk_bytes(fp8, mt, nt, side):
    """Bytes of a chunk's weights and activations."""
    return 16 * mt * side * ROW_BYTES, 8 * nt * (8 // side) * (WIDE_BYTES if fp8 else ROW_BYTES)


@intrinsic
def staged_rows(typingctx, where, w, mt, nt, side, chunk):
    """Activation words of one chunk: [row of nt][4 words]; FP8: those of its first 8 k a lane.

    where: the lane's 16 bytes in chunk 0.
    """
    fp8, found = _is_fp8(w), _numbers(mt, nt, side, chunk)
    if found is not None:
        number = found[1]
        at = sum(_chunk_bytes(fp8, *found[:3])) * found[3]

        def build(context, builder, signature, args):
            step = 8 * (WIDE_BYTES if fp8 else ROW_BYTES)
            words = [word for j in range(number)
                     for word in _load(builder, args[0], at + step * j)]
            return context.make_tuple(builder, signature.return_type, words)
        return types.UniTuple(U32, 4 * number)(U32, w, mt, nt, side, chunk), build


@intrinsic
def staged_product(typingctx, sums, w, rows, at_weights, at_rows, zero, mt, nt, side, chunk):
    """sums + the products of one chunk, mma s of it ascending (gemm_parts: the k of each).

    rows: of staged_rows. at_weights, at_rows: the lane's 16 bytes in chunk 0. zero: 0, but not
    known to be.
    """
    fp8, found = _is_fp8(w), _numbers(mt, nt, side, chunk)
    if found is None:
        return None
    m, n = found[:2]
    at = sum(_chunk_bytes(fp8, *found[:3])) * found[3]

    def build(context, builder, signature, args):
        acc, words = _unpack(builder, args[0]), _unpack(builder, args[2])

        def multiply(i, s, left):
            for j in range(n):
                q, p = (i * n + j) * 4, 4 * j + 2 * (s & 1)
                acc[q:q + 4] = ptx(builder, MMA, MMA_CONSTRAINTS, [_F32] * 4,
                                   left + words[p:p + 2] + acc[q:q + 4], True)

        def weights(i):
            return [_load(builder, args[3], at + (16 * i + 8 * h) * ROW_BYTES) for h in (0, 1)]
        if not fp8:
            for i in range(m):
                upper, lower = weights(i)
                for s in (0, 1):
                    multiply(i, s, _together(builder, [upper[2 * s], lower[2 * s], upper[2 * s + 1],
                                                       lower[2 * s + 1]], args[5]))
        else:
            a = [weights(i) for i in range(m)]
            for half in (0, 1):
                if half:
                    other = builder.xor(args[4], _I32(16))
                    words = [word for j in range(n)
                             for word in _load(builder, other, at + 8 * WIDE_BYTES * j)]
                for i in range(m):
                    for s in (2 * half, 2 * half + 1):
                        upper, lower = (unpack_fp8(builder, a[i][h][s]) for h in (0, 1))
                        multiply(i, s, [upper[0], lower[0], upper[1], lower[1]])
        return context.make_tuple(builder, signature.return_type, acc)
    return sums(sums, w, rows, U32, U32, U32, mt, nt, side, chunk), build


@intrinsic
def filled(typingctx, value, mt, nt):
    """Sums of a warp's tile, 4 mt nt float32, all equal to value."""
    found = _numbers(mt, nt)
    if found is not None:
        count = 4 * found[0] * found[1]

        def build(context, builder, signature, args):
            return context.make_tuple(builder, signature.return_type, [args[0]] * count)
        return types.UniTuple(F32, count)(F32, mt, nt), build


@intrinsic
def put_sums(typingctx, where, sums, mt, nt, side):
    """Store a warp's tile to shared [row][output], outputs + PAD words a row.

    where: address of row 2 t, output g of the warp's tile.
    """
    found = _numbers(mt, nt, side)
    if found is not None:
        n, stride = found[1], 16 * found[0] * found[2] + PAD

        def build(context, builder, signature, args):
            for q, value in enumerate(_unpack(builder, args[1])):
                at = (8 * (q // 4 % n) + (q & 1)) * stride + 16 * (q // (4 * n)) + 8 * (q >> 1 & 1)
                ptx(builder, f"st.shared.f32 [$0+{4 * at}], $1;", "r,f", [], [args[0], value], True)
            return context.get_dummy_value()
        return types.void(U32, sums, mt, nt, side), build
