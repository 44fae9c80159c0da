"""Pieces of stage 4 on the device, as intrinsics that unroll over tuples in registers: one warp's
dots of heads with latent rows, their exponentials, and the rows' sums.

| tile in shared memory | row | 16-byte unit u of row r lies at | |
|---|---|---|---|
| latent rows, queries | 1,024 B: 512 BF16 | 1024 r + 16 (u ^ r % 8) | 64 rows; 16 heads a tile |
| weights p | 128 B: 64 BF16 | 128 h + 16 (u ^ h % 8) | a row a head |

So eight rows of a unit lie in eight banks, which is what ldmatrix reads at once. Heads are rows of
mma.sync m16n8k16 (operand A), so lane 4 g + t has heads g and g + 8 of each tile of 16 heads and,
of each eight latent rows, rows 2t and 2t + 1. Tuples: dots [head tile][eight of rows][c0..c3],
one value a head [head tile][g, g + 8], sums [eight of columns][head tile][c0..c3].
"""

from llvmlite import ir
from numba import types

from engine.device import F32, I64, MMA, MMA_CONSTRAINTS, U32, address, intrinsic, ptx

ROW = 1024                      # bytes of a latent row or a query in shared memory
TILE_ROWS = 16 * ROW            # bytes of 16 of them
_WEIGHTS = 16 * 128             # bytes of the weights of 16 heads
_I32, _F32 = ir.IntType(32), ir.FloatType()


def _unpack(builder, value):
    return [builder.extract_value(value, i) for i in range(value.type.count)]


def _literal(value):
    return value.literal_value if isinstance(value, types.IntegerLiteral) else None


def _load_matrices(builder, where, offset, turn=""):
    """Four 8 x 8 BF16 matrices: lane 8 m + r gives the address of row r of matrix m, lane 4 g + t
    gets elements 2t, 2t + 1 of row g of each; with turn, of column g."""
    text = f"ldmatrix.sync.aligned.m8n8.x4{turn}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
    return ptx(builder, text, "=r,=r,=r,=r,r", [_I32] * 4, [where], True)


def _mma(builder, a, b, c):
    return ptx(builder, MMA, MMA_CONSTRAINTS, [_F32] * 4, a + b + c)


def _one(builder, text, *values):
    constraints = "=f" + ",f" * len(values)
    return ptx(builder, text, constraints, [_F32], list(values))[0]


def _add(builder, a, b):
    return _one(builder, "add.rn.f32 $0, $1, $2;", a, b)


def _larger(builder, a, b):
    return _one(builder, "max.f32 $0, $1, $2;", a, b)


def _fetch(builder, where, offset):
    return ptx(builder, f"ld.shared.f32 $0, [$1+{offset}];", "=f,r", [_F32], [where], True)[0]


def _across(builder, value, step):
    return ptx(builder, f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;", "=f,f", [_F32],
               [value], True)[0]


def _turned(builder, base, swap, by):
    """base + (swap ^ i by) for i < 4."""
    return [builder.add(base, builder.xor(swap, _I32(i * by))) for i in range(4)]


@intrinsic
def dots(typingctx, query, query_swap, rows, rows_swap, tiles, eights):
    """Dots of 16 `tiles` heads with 8 `eights` rows: tuple [tiles][eights][c0..c3].

    query: address of the lane's query row, (lane & 15); query_swap: 16 ((lane >> 4) ^ (lane & 7)).
    rows: of its latent row; rows_swap: 16 (c ^ (lane & 7)), where c, the unit, is (lane >> 3) & 1
    for two eights of rows, lane >> 3 for one.
    """
    m, n = _literal(tiles), _literal(eights)
    if m is None or n is None:
        return None

    def build(context, builder, signature, args):
        a_at = _turned(builder, args[0], args[1], 32)
        b_at = _turned(builder, args[2], args[3], 32 if n == 2 else 64)
        # few tiles: the quarters' chains side by side, for fewer waits; the sums are the same
        beside = max(1, 4 // (m * n))
        rounds = [range(q, q + beside) for q in range(0, 4, beside)]
        found = None
        for quarters in rounds:
            sums = {q: [[_F32(0.0)] * 4] * (m * n) for q in quarters}
            later = {}
            for step in range(8):
                for q in quarters:
                    k = 8 * q + step
                    a = [_load_matrices(builder, a_at[k & 3], TILE_ROWS * i + 128 * (k >> 2))
                         for i in range(m)]
                    if n == 2:
                        four = _load_matrices(builder, b_at[k & 3], 128 * (k >> 2))
                        b = [four[:2], four[2:]]
                    elif step % 2 == 0:
                        four = _load_matrices(builder, b_at[k >> 1 & 1], 128 * (k >> 2))
                        b, later[q] = [four[:2]], [four[2:]]
                    else:
                        b = later[q]
                    for at in range(m * n):
                        sums[q][at] = _mma(builder, a[at // n], b[at % n], sums[q][at])
            for q in quarters:
                flat = [value for four in sums[q] for value in four]
                found = flat if q == 0 else [_add(builder, x, y) for x, y in zip(found, flat)]
        return context.make_tuple(builder, signature.return_type, found)
    return types.UniTuple(F32, 4 * m * n)(U32, U32, U32, U32, tiles, eights), build


@intrinsic
def scaled(typingctx, found, scale, left, tiles):
    """dots * scale; -inf from row `left` on, counted from the lane's first row."""
    m = _literal(tiles)
    if m is None:
        return None
    n = found.count // (4 * m)

    def build(context, builder, signature, args):
        values = []
        for at, value in enumerate(_unpack(builder, args[0])):
            row = _I32(8 * (at // 4 % n) + (at & 1))
            value = _one(builder, "mul.rn.f32 $0, $1, $2;", value, args[1])
            inside = builder.icmp_signed("<", row, args[2])
            values.append(builder.select(inside, value, _F32(float("-inf"))))
        return context.make_tuple(builder, signature.return_type, values)
    return found(found, F32, types.int32, tiles), build


@intrinsic
def tops(typingctx, found, tiles):
    """Largest dot of each head in the warp's rows, on all four lanes: [tiles][g, g + 8]."""
    m = _literal(tiles)
    if m is None:
        return None
    n = found.count // (4 * m)

    def build(context, builder, signature, args):
        values, best = _unpack(builder, args[0]), []
        for i in range(m):
            for side in range(2):
                mine = [values[4 * (i * n + j) + 2 * side + c] for j in range(n) for c in range(2)]
                top = mine[0]
                for other in mine[1:]:
                    top = _larger(builder, top, other)
                for step in (1, 2):
                    top = _larger(builder, top, _across(builder, top, step))
                best.append(top)
        return context.make_tuple(builder, signature.return_type, best)
    return types.UniTuple(F32, 2 * m)(found, tiles), build


@intrinsic
def store_heads(typingctx, where, values):
    """Store one value a head, 64 bytes apart a tile, 32 the half of one."""
    def build(context, builder, signature, args):
        for at, value in enumerate(_unpack(builder, args[1])):
            ptx(builder, f"st.shared.f32 [$0+{32 * at}], $1;", "r,f", [], [args[0], value], True)
        return context.get_dummy_value()
    return types.void(U32, values), build


@intrinsic
def load_heads(typingctx, where, tiles):
    """One value a head from where store_heads put it: [tiles][g, g + 8]."""
    m = _literal(tiles)
    if m is not None:
        def build(context, builder, signature, args):
            values = [_fetch(builder, args[0], 32 * at) for at in range(2 * m)]
            return context.make_tuple(builder, signature.return_type, values)
        return types.UniTuple(F32, 2 * m)(U32, tiles), build


@intrinsic
def largest(typingctx, where, step, count, tiles):
    """The larger of `count` values a head, `step` bytes apart: [tiles][g, g + 8]."""
    m, distance, number = _literal(tiles), _literal(step), _literal(count)
    if m is None or distance is None or number is None:
        return None

    def build(context, builder, signature, args):
        best = []
        for at in range(2 * m):
            top = _fetch(builder, args[0], 32 * at)
            for j in range(1, number):
                top = _larger(builder, top, _fetch(builder, args[0], 32 * at + distance * j))
            best.append(top)
        return context.make_tuple(builder, signature.return_type, best)
    return types.UniTuple(F32, 2 * m)(U32, step, count, tiles), build


@intrinsic
def weigh(typingctx, found, best, weights, swap, sums, heads):
    """p = 2^(dot - best): as BF16 to the weights' tile, and p of rows 2t, 2t + 1 added to `sums`.

    weights: address of the lane's head g at 4 t; swap: 16 (first eight of rows ^ g); sums:
    address [eight of rows][head][t] of the lane's first; heads: heads a block.
    """
    m, wide = best.count // 2, _literal(heads)
    if wide is None:
        return None
    n = found.count // (4 * m)

    def build(context, builder, signature, args):
        values, tops_ = _unpack(builder, args[0]), _unpack(builder, args[1])
        for i in range(m):
            for j in range(n):
                at = builder.add(args[2], builder.xor(args[3], _I32(16 * j)))
                for side in range(2):
                    p = []
                    for c in range(2):
                        x = _one(builder, "sub.rn.f32 $0, $1, $2;",
                                 values[4 * (i * n + j) + 2 * side + c], tops_[2 * i + side])
                        p.append(_one(builder, "ex2.approx.ftz.f32 $0, $1;", x))
                    head = 16 * i + 8 * side
                    pair = ptx(builder, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [_I32], p)[0]
                    ptx(builder, f"st.shared.b32 [$0+{128 * head}], $1;", "r,r", [], [at, pair],
                        True)
                    ptx(builder, f"st.shared.f32 [$0+{16 * (wide * j + head)}], $1;", "r,f", [],
                        [args[4], _add(builder, p[0], p[1])], True)
        return context.get_dummy_value()
    return types.void(found, best, U32, U32, U32, heads), build


@intrinsic
def folded(typingctx, sums, weights, weights_swap, rows, rows_swap, old, new):
    """sums * old + new * (weights times rows), for the warp's heads and columns.

    A new sum is one chain of four mma steps, rows ascending; then fma(new sum, new, sums * old).
    weights: address of the lane's head (lane & 15); rows: of its row (lane & 15), at the warp's
    columns; both swaps: 16 ((lane >> 4) ^ (lane & 7)). old, new: one value a head.
    """
    m = old.count // 2
    pairs = sums.count // (8 * m)

    def build(context, builder, signature, args):
        values = _unpack(builder, args[0])
        before, after = _unpack(builder, args[5]), _unpack(builder, args[6])
        p_at = _turned(builder, args[1], args[2], 32)
        v_at = _turned(builder, args[3], args[4], 32)
        a = [[_load_matrices(builder, p_at[k], _WEIGHTS * i) for k in range(4)] for i in range(m)]
        for pair in range(pairs):
            b = [_load_matrices(builder, v_at[pair & 3], TILE_ROWS * k + 128 * (pair >> 2),
                                ".trans") for k in range(4)]
            fresh = [[_F32(0.0)] * 4] * (2 * m)
            for k in range(4):
                for at in range(2 * m):
                    j = 2 * (at & 1)
                    fresh[at] = _mma(builder, a[at >> 1][k], b[k][j:j + 2], fresh[at])
            for at in range(2 * m):
                for c in range(4):
                    head = 2 * (at >> 1) + (c >> 1)
                    q = ((2 * pair + (at & 1)) * m + (at >> 1)) * 4 + c
                    kept = _one(builder, "mul.rn.f32 $0, $1, $2;", values[q], before[head])
                    values[q] = _one(builder, "fma.rn.f32 $0, $1, $2, $3;", fresh[at][c],
                                     after[head], kept)
        return context.make_tuple(builder, signature.return_type, values)
    return sums(sums, U32, U32, U32, U32, old, new), build


@intrinsic
def same(typingctx, value, count):
    """A tuple of `count` times value."""
    number = _literal(count)
    if number is not None:
        def build(context, builder, signature, args):
            return context.make_tuple(builder, signature.return_type, [args[0]] * number)
        return types.UniTuple(F32, number)(F32, count), build


@intrinsic
def power(typingctx, x):
    """2^x by the hardware's approximation (2 ulp); 0 for -inf."""
    def build(context, builder, signature, args):
        return _one(builder, "ex2.approx.ftz.f32 $0, $1;", args[0])
    return F32(F32), build


@intrinsic
def store_unit(typingctx, where, a, b, c, d):
    """Store 16 bytes to shared memory."""
    def build(context, builder, signature, args):
        ptx(builder, "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "r,r,r,r,r", [], list(args), True)
        return context.get_dummy_value()
    return types.void(U32, U32, U32, U32, U32), build


# ---- global memory -----------------------------------------------------------------------------

@intrinsic
def store_sums(typingctx, array, index, width, heads, columns, values, tiles, odd):
    """Store sums to array.flat: index of the lane's first head and column, rows `width` apart;
    heads, columns: how many there are from the lane's first on; odd: lane & 1.

    Neighbouring lanes swap halves of two eights of columns first, so that a head's four lanes
    write 64 bytes side by side.
    """
    m = _literal(tiles)
    if m is None:
        return None
    eights = values.count // (4 * m)

    def build(context, builder, signature, args):
        i64, found, odd = ir.IntType(64), _unpack(builder, args[5]), args[7]
        upper = builder.icmp_signed("<", _I32(0), odd)
        start = builder.add(args[1], builder.select(upper, i64(6), i64(0)))
        columns = builder.sub(args[4], builder.select(upper, _I32(8), _I32(0)))
        text = "{.reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.f32 [$0], {$1,$2,$3,$4};}"
        for head in range(2 * m):
            exists = builder.icmp_signed("<", _I32(8 * head), args[3])
            row = builder.add(start, builder.mul(args[2], i64(8 * head)))
            for eight in range(0, eights, 2):
                at = ((eight * m + (head >> 1)) * 2 + (head & 1)) * 2
                a, b = found[at:at + 2], found[at + 4 * m:at + 4 * m + 2]
                came = [_across(builder, builder.select(upper, x, y), 1) for x, y in zip(a, b)]
                four = [builder.select(upper, x, y) for x, y in zip(came + b, a + came)]
                valid = builder.and_(exists, builder.icmp_signed("<", _I32(8 * eight), columns))
                where = address(context, builder, signature.args[0], args[0],
                                builder.add(row, i64(8 * eight)))
                ptx(builder, text, "l,f,f,f,f,r", [],
                    [where, *four, builder.zext(valid, _I32)], True)
        return context.get_dummy_value()
    return types.void(array, I64, I64, types.int32, types.int32, values, tiles,
                      types.int32), build


@intrinsic
def load_sums(typingctx, array, index, width, heads, columns, values, tiles):
    """What store_sums stored, zeros elsewhere; values: a tuple of as many, not read."""
    m = _literal(tiles)
    if m is None:
        return None
    eights = values.count // (4 * m)

    def build(context, builder, signature, args):
        i64, found = ir.IntType(64), _unpack(builder, args[5])
        text = ("{.reg .pred p; setp.ne.b32 p, $3, 0; mov.f32 $0, 0f00000000; "
                "mov.f32 $1, 0f00000000; @p ld.global.v2.f32 {$0,$1}, [$2];}")
        for head in range(2 * m):
            exists = builder.icmp_signed("<", _I32(8 * head), args[3])
            row = builder.add(args[1], builder.mul(args[2], i64(8 * head)))
            for eight in range(eights):
                at = ((eight * m + (head >> 1)) * 2 + (head & 1)) * 2
                valid = builder.and_(exists, builder.icmp_signed("<", _I32(8 * eight), args[4]))
                where = address(context, builder, signature.args[0], args[0],
                                builder.add(row, i64(8 * eight)))
                found[at:at + 2] = ptx(builder, text, "=&f,=&f,l,r", [_F32] * 2,
                                       [where, builder.zext(valid, _I32)], True)
        return context.make_tuple(builder, signature.return_type, found)
    return values(array, I64, I64, types.int32, types.int32, values, tiles), build


@intrinsic
def divided(typingctx, sums, by):
    """sums / one value a head."""
    m = by.count // 2

    def build(context, builder, signature, args):
        values, bottoms = _unpack(builder, args[0]), _unpack(builder, args[1])
        for at, value in enumerate(values):
            bottom = bottoms[2 * (at // 4 % m) + (at >> 1 & 1)]
            values[at] = _one(builder, "div.rn.f32 $0, $1, $2;", value, bottom)
        return context.make_tuple(builder, signature.return_type, values)
    return sums(sums, by), build


@intrinsic
def load_every(typingctx, array, index, step, last, wide):
    """array.flat[at] (wide 1), or [at] and [at + 1] (wide 2), for at = min(index + step i, last),
    i < 8."""
    number = _literal(wide)
    if number is None:
        return None
    text = {1: "ld.global.f32 $0, [$1];", 2: "ld.global.v2.f32 {$0,$1}, [$2];"}[number]

    def build(context, builder, signature, args):
        found, at = [], args[1]
        for _ in range(8):
            place = builder.select(builder.icmp_signed("<", at, args[3]), at, args[3])
            where = address(context, builder, signature.args[0], args[0], place)
            found += ptx(builder, text, "=f," * number + "l", [_F32] * number, [where], True)
            at = builder.add(at, args[2])
        return context.make_tuple(builder, signature.return_type, found)
    return types.UniTuple(F32, 8 * number)(array, I64, I64, I64, wide), build
