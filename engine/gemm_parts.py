"""Pieces of a device matrix product: what one lane loads, multiplies and stores, as intrinsics that
unroll over tuples in registers.

A warp's tile is 16 MT outputs (or 8, one eight) by 8 NT rows; weights are operand A of mma.sync
m16n8k16 and rows are operand B, so lane 4 g + t holds weight rows g, g + 8, ... and activation row
g of each eight.
A 16-byte load holds neighbouring k, so the k of one mma are permuted, for both operands alike:

| weights | a lane's load | chunk | mma s of a chunk: pair t, pair t + 4 of its k slots |
|---|---|---|---|
| BF16 | 8 k from 8 t | 32 k, 2 mma | k = 8 t + 4 s + (0, 1), 8 t + 4 s + (2, 3) |
| FP8 | 16 k from 16 t | 64 k, 4 mma | k = 16 t + 4 s + (0, 1), 16 t + 4 s + (2, 3) |

A block is 128 k: 4 or 2 chunks. Tuples: weights [chunk][row of 2 MT][4 words], activations
[chunk][half, FP8 only][row of NT][4 words], sums [MT][NT][c0..c3]. The dtype of `w` (uint16 BF16,
uint8 e4m3) picks the form at compile time; counts (MT, NT, ...) are compile-time constants.
"""

import math

from llvmlite import ir
from numba import types

from engine.device import (F32, I64, LOAD, MMA, MMA_CONSTRAINTS, U32, address, intrinsic, ptx,
                           unpack_fp8)

BLOCK = 128                     # k of a block: the width of an FP8 scale
PARTS = 8                       # of a sum: part p has blocks p, p + 8, ...
THREADS = 32 * PARTS            # of a block: a warp a part
_I32, _I64, _F32, _BOOL = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.IntType(1)
_CACHED = "ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];"


def _is_fp8(array):
    return array.dtype == types.uint8


def _literal(value):
    return value.literal_value if isinstance(value, types.IntegerLiteral) else None


def _unpack(builder, value):
    return [builder.extract_value(value, i) for i in range(value.type.count)]


@intrinsic
def is_fp8(typingctx, w):
    """Whether w is FP8: a constant."""
    def build(context, builder, signature, args):
        return _BOOL(int(_is_fp8(signature.args[0])))
    return types.boolean(w), build


@intrinsic
def zeros(typingctx, count):
    """A tuple of `count` float32 zeros."""
    number = _literal(count)
    if number is not None:
        def build(context, builder, signature, args):
            return context.make_tuple(builder, signature.return_type, [_F32(0.0)] * number)
        return types.UniTuple(F32, number)(count), build


@intrinsic
def row_offsets(typingctx, base, first, last, shift, stride, count):
    """base + (min(first + 8 i, last) >> shift) * stride for i < count, int64."""
    number = _literal(count)
    if number is not None:
        def build(context, builder, signature, args):
            start, row, end, right, step, _ = args
            found = []
            for i in range(number):
                at = builder.add(row, _I64(8 * i))
                at = builder.select(builder.icmp_signed("<", at, end), at, end)
                at = builder.mul(builder.ashr(at, right), step)
                found.append(builder.add(start, at))
            return context.make_tuple(builder, signature.return_type, found)
        return types.UniTuple(I64, number)(I64, I64, I64, I64, I64, count), build


# ---- loads of one block ------------------------------------------------------------------------

def _gather(context, builder, kind, array, rows, k, offsets, load, end=None):
    """16 bytes of each row at k + each offset; with end, zeros where that reaches end."""
    def fetch(start, offset):
        text = load.replace("$4", f"$4+{offset * (kind.dtype.bitwidth // 8)}")
        return ptx(builder, text, "=r,=r,=r,=r,l", [_I32] * 4, [start], True)

    def start(row, at):
        return address(context, builder, kind, array, builder.add(row, at))

    words, rows = [], _unpack(builder, rows)
    if end is None:
        starts = [start(row, k) for row in rows]
        for offset in offsets:
            for where in starts:
                words += fetch(where, offset)
        return words
    for offset in offsets:
        at = builder.add(k, _I64(offset))
        inside = builder.icmp_signed("<", at, end)
        at = builder.select(inside, at, _I64(0))
        for row in rows:
            words += [builder.select(inside, word, _I32(0)) for word in fetch(start(row, at), 0)]
    return words


def _loader(offsets, load, ends):
    """Typing of load_weights (w, rows, k), load_rows (x, rows, k, w); `ends`: and end."""
    def typing(array, rows, k, w=None, end=None):
        places = offsets[_is_fp8(array if w is None else w)]

        def build(context, builder, signature, args):
            words = _gather(context, builder, signature.args[0], args[0], args[1], args[2], places,
                            load, args[-1] if ends else None)
            return context.make_tuple(builder, signature.return_type, words)
        given = [array, rows, I64] + ([] if w is None else [w]) + ([I64] if ends else [])
        return types.UniTuple(U32, 4 * len(places) * rows.count)(*given), build
    return typing


_WEIGHTS = {False: (0, 32, 64, 96), True: (0, 64)}
_ROWS = {False: (0, 32, 64, 96), True: (0, 8, 64, 72)}


@intrinsic
def load_weights(typingctx, w, rows, k):
    """The lane's words of one whole block: rows are offsets of rows, k the block's + the lane's."""
    return _loader(_WEIGHTS, LOAD[True], False)(w, rows, k)


@intrinsic
def load_weights_tail(typingctx, w, rows, k, end):
    """load_weights of a block that may end early: zeros from k = end on."""
    return _loader(_WEIGHTS, LOAD[True], True)(w, rows, k)


@intrinsic
def load_rows(typingctx, x, rows, k, w):
    """The activation words that go with load_weights(w, ..., k)."""
    return _loader(_ROWS, _CACHED, False)(x, rows, k, w)


@intrinsic
def load_rows_tail(typingctx, x, rows, k, w, end):
    """load_rows with zeros from k = end on."""
    return _loader(_ROWS, _CACHED, True)(x, rows, k, w)


@intrinsic
def load_scales(typingctx, scales, rows, block):
    """scales.flat[row + block] for each row offset."""
    def build(context, builder, signature, args):
        found = []
        for row in _unpack(builder, args[1]):
            where = address(context, builder, signature.args[0], args[0],
                            builder.add(row, args[2]))
            found += ptx(builder, "ld.global.nc.f32 $0, [$1];", "=f,l", [_F32], [where], True)
        return context.make_tuple(builder, signature.return_type, found)
    return types.UniTuple(F32, rows.count)(scales, rows, I64), build


# ---- arithmetic --------------------------------------------------------------------------------

@intrinsic
def product(typingctx, sums, w, weights, rows):
    """sums + the products of weights and rows, one mma after the other, chunks ascending.

    One eight of outputs: the lower half of A is zeros, and sums are [NT][c0, c1].
    """
    fp8 = _is_fp8(w)
    wide = 2 if fp8 else 1                          # 4-word groups of BF16 in a lane's chunk
    # weights = 4 chunks eights, rows = 4 wide chunks NT, sums = 2 eights NT
    chunks = math.isqrt(weights.count * rows.count // (8 * wide * sums.count))
    eights, nt = weights.count // (4 * chunks), rows.count // (4 * wide * chunks)
    assert sums.count == 2 * eights * nt, (sums, weights, rows)
    pair = min(eights, 2)

    def build(context, builder, signature, args):
        acc, a, b = _unpack(builder, args[0]), _unpack(builder, args[2]), _unpack(builder, args[3])
        for c in range(chunks):
            pairs = []                              # [row of eights][pair of k]
            for r in range(eights):
                four = a[(c * eights + r) * 4:][:4]
                pairs.append([pair for word in four for pair in unpack_fp8(builder, word)]
                             if fp8 else four)
            for s in range(2 * wide):
                half, word = divmod(2 * s, 4)
                for i in range(eights // pair):
                    upper = pairs[2 * i]
                    lower = pairs[2 * i + 1] if pair == 2 else [_I32(0)] * len(upper)
                    left = [upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1]]
                    for j in range(nt):
                        at = ((c * wide + half) * nt + j) * 4 + word
                        q = slice((i * nt + j) * 2 * pair, (i * nt + j + 1) * 2 * pair)
                        old = acc[q] + [_F32(0.0)] * (4 - 2 * pair)
                        acc[q] = ptx(builder, MMA, MMA_CONSTRAINTS, [_F32] * 4,
                                     left + b[at:at + 2] + old)[:2 * pair]
        return context.make_tuple(builder, signature.return_type, acc)
    return sums(sums, w, weights, rows), build


@intrinsic
def scaled(typingctx, sums, products, scales):
    """fma(scale, product, sum) each; scales: one for each 8 outputs of the tile."""
    nt = sums.count // (2 * scales.count)
    pair = min(scales.count, 2)

    def build(context, builder, signature, args):
        acc, new, scale = (_unpack(builder, a) for a in args)
        for i in range(len(acc)):
            by = scale[i // (2 * pair * nt) * 2 + i % (2 * pair) // 2]
            acc[i], = ptx(builder, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [_F32],
                          [by, new[i], acc[i]])
        return context.make_tuple(builder, signature.return_type, acc)
    return sums(sums, products, scales), build


@intrinsic
def added(typingctx, sums, others):
    """The elementwise sum of two tuples."""
    def build(context, builder, signature, args):
        left, right = (_unpack(builder, a) for a in args)
        both = [ptx(builder, "add.rn.f32 $0, $1, $2;", "=f,f,f", [_F32], [a, b])[0]
                for a, b in zip(left, right)]
        return context.make_tuple(builder, signature.return_type, both)
    return sums(sums, others), build


# ---- shared memory -----------------------------------------------------------------------------

@intrinsic
def store_parts(typingctx, array, index, step, values):
    """array.flat[index + step i] = values[i]."""
    def build(context, builder, signature, args):
        kind = signature.args[0]
        data = context.make_array(kind)(context, builder, args[0]).data
        at = args[1]
        for value in _unpack(builder, args[3]):
            builder.store(value, builder.gep(data, [at]))
            at = builder.add(at, args[2])
        return context.get_dummy_value()
    return types.void(array, I64, I64, values), build
