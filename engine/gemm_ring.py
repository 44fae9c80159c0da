"""The ring kernel: matrix products of 9 to 32 rows, and of up to 8 where K is short.

A warp's tile is `eights` x 8 outputs by nt x 8 rows. It walks the blocks of k of one part, or of
all parts in turn, in steps of `chunks` chunks (gemm_parts); cp.async brings a step's weights, 16
bytes a lane, into a ring in shared memory which is refilled as it is read, so that a lane always
has the whole ring, 192 bytes, under way: 48 KiB a block. A lane reads only what it copied itself:
no barrier, only its own wait. Registers stay free for activations. Lane i holds the FP8 scale of
the walk's block i, so that none is waited for. Weights past K are copied as zeros, activations past
K replaced by zeros.

k counts elements from the row's first; rows are held as addresses of the lane's first element.
"""

import functools

from llvmlite import ir
from numba import types

from engine.device import (F32, I64, INLINE, KERNEL, U32, U64, add_rn, address, copy_commit,
                           copy_wait, cuda, intrinsic, lds32, ptx, shared_address)
from engine.gemm_parts import (BLOCK, PARTS, THREADS, _is_fp8, _literal, _unpack, added, is_fp8,
                               product, scaled, zeros)

RING = 12                       # 16-byte copies a lane has under way
WARP_BYTES = RING * 512
RING_WORDS = PARTS * WARP_BYTES // 4
_I32, _I64, _BOOL, _F32 = ir.IntType(32), ir.IntType(64), ir.IntType(1), ir.FloatType()


# ---- one step of a warp ------------------------------------------------------------------------

@intrinsic
def row_addresses(typingctx, array, base, first, last, shift, stride, count):
    """Addresses of array.flat[base + (min(first + 8 i, last) >> shift) * stride], i < count."""
    number = _literal(count)
    if number is not None:
        def build(context, builder, signature, args):
            data, start, row, end, right, step, _ = args
            found = []
            for i in range(number):
                at = builder.add(row, _I64(8 * i))
                at = builder.select(builder.icmp_signed("<", at, end), at, end)
                at = builder.add(start, builder.mul(builder.ashr(at, right), step))
                found.append(address(context, builder, array, data, at))
            return context.make_tuple(builder, signature.return_type, found)
        return types.UniTuple(U64, number)(array, I64, I64, I64, I64, I64, count), build


def _at(builder, base, k, size):
    return builder.add(base, builder.mul(builder.zext(k, _I64), _I64(size)))


@intrinsic
def start_step(typingctx, where, w, rows, k, end, chunks):
    """Start the lane's copies [chunk][row], 512 bytes apart from `where` on; zeros from end on."""
    number = _literal(chunks)
    if number is not None:
        size, step = (1, 64) if _is_fp8(w) else (2, 32)

        def build(context, builder, signature, args):
            to, _, starts, at, stop, _ = args
            starts = _unpack(builder, starts)
            for i in range(number):
                inside = builder.icmp_unsigned("<", builder.add(at, _I32(step * i)), stop)
                count = builder.select(inside, _I32(16), _I32(0))
                for j, start in enumerate(starts):
                    ptx(builder, "cp.async.cg.shared.global.L2::256B "
                        f"[$0+{(i * len(starts) + j) * 512}], [$1+{64 * i}], 16, $2;", "r,l,r", [],
                        [to, _at(builder, start, at, size), count], True)
            return context.get_dummy_value()
        return types.void(U32, w, rows, U32, U32, chunks), build


@intrinsic
def read_step(typingctx, where, count):
    """`count` x 16 bytes of the lane's ring, 512 bytes apart: the weights of `product`."""
    number = _literal(count)
    if number is not None:
        def build(context, builder, signature, args):
            words = [word for i in range(number) for word in ptx(
                builder, f"ld.shared.v4.u32 {{$0,$1,$2,$3}}, [$4+{512 * i}];", "=r,=r,=r,=r,r",
                [_I32] * 4, [args[0]], True)]
            return context.make_tuple(builder, signature.return_type, words)
        return types.UniTuple(U32, 4 * number)(U32, count), build


def _row_words(rows, k, w, chunks, end=None):
    """Typing of row_words, and with end of row_words_tail."""
    number = _literal(chunks)
    if number is None:
        return None
    places = [64 * c + half for c in range(number) for half in (0, 8)] if _is_fp8(w) else \
        [32 * c for c in range(number)]

    def build(context, builder, signature, args):
        words = []
        for place in places:
            at = builder.add(args[1], _I32(place))
            inside = _BOOL(1) if end is None else builder.icmp_unsigned("<", at, args[4])
            for start in _unpack(builder, args[0]):
                where = _at(builder, start, builder.select(inside, at, _I32(0)), 2)
                four = ptx(builder, "ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l",
                           [_I32] * 4, [where], True)
                words += [builder.select(inside, word, _I32(0)) for word in four]
        return context.make_tuple(builder, signature.return_type, words)
    given = [rows, U32, w, chunks] + ([] if end is None else [U32])
    return types.UniTuple(U32, 4 * len(places) * rows.count)(*given), build


@intrinsic
def row_words(typingctx, rows, k, w, chunks):
    """The activation words that go with a step of weights at k."""
    return _row_words(rows, k, w, chunks)


@intrinsic
def row_words_tail(typingctx, rows, k, w, chunks, end):
    """row_words where K ends within the step: zeros, and no reading, from k = end on."""
    return _row_words(rows, k, w, chunks, end)


@intrinsic
def lane_scales(typingctx, rows, block, w):
    """The scale of `block`, this lane's own, at each row address; zeros where w is not FP8."""
    fp8 = _is_fp8(w)

    def build(context, builder, signature, args):
        found = [ptx(builder, "ld.global.nc.f32 $0, [$1];", "=f,l", [_F32],
                     [_at(builder, row, args[1], 4)], True)[0] if fp8 else _F32(0.0)
                 for row in _unpack(builder, args[0])]
        return context.make_tuple(builder, signature.return_type, found)
    return types.UniTuple(F32, rows.count)(rows, U32, w), build


@intrinsic
def scales_of(typingctx, scales, lane, w_rows):
    """The scales that lane `lane` holds, each for as many neighbouring eights of outputs."""
    def build(context, builder, signature, args):
        found = []
        for scale in _unpack(builder, args[0]):
            found += ptx(builder, "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r",
                         [_F32], [scale, args[1]], True) * (w_rows.count // scales.count)
        return context.make_tuple(builder, signature.return_type, found)
    return types.UniTuple(F32, w_rows.count)(scales, U32, w_rows), build


@intrinsic
def store_sums(typingctx, where, values):
    """Store the lane's sums to shared where, where + 128, ... bytes."""
    def build(context, builder, signature, args):
        for i, value in enumerate(_unpack(builder, args[1])):
            ptx(builder, f"st.shared.f32 [$0+{128 * i}], $1;", "r,f", [], [args[0], value], True)
        return context.get_dummy_value()
    return types.void(U32, values), build


# ---- walk over k -------------------------------------------------------------------------------

@cuda.jit(**INLINE)
def after(k, step, end, alone):
    """The step after k: through the block, then on to the next of the part, then the part."""
    c = U32(k + step)
    if c & U32(BLOCK - 1) == 0:
        c = U32(c + (PARTS - 1) * BLOCK)
        if alone and c >= end:
            c = U32((c & U32((PARTS - 1) * BLOCK)) + BLOCK)
    return c


@cuda.jit(**INLINE)
def rows_at(x_rows, k, w, chunks, step, K, stop):
    """The activation words of the step at k."""
    if k + step <= K:
        return row_words(x_rows, k, w, chunks)
    return row_words_tail(x_rows, k, w, chunks, stop)


@cuda.jit(**INLINE)
def walk(ring, x_rows, w, w_rows, scale_rows, K, lane_k, first, blocks, nothing, chunks, copies,
         pending, alone, early):
    """Sums of a warp's tile over `blocks` blocks from k = first on, in gemm's order.

    ring: the lane's address in shared memory; lane_k: its first k in a chunk; scale_rows: one
    address, the scales of all the tile's outputs; nothing: a tuple of zeros. Constants: copies =
    chunks x weight rows of the lane; pending = steps of the ring - 1; alone: over all parts in
    turn, else over one; early: there are registers for activations a step ahead.
    """
    step = U32(chunks * (64 if is_fp8(w) else 32))
    end = U32((K + BLOCK - 1) // BLOCK * BLOCK)
    stop = U32(max(K - lane_k, 0))
    apart = U32(7 if alone else 10)     # log2 of k between the blocks of a walk
    lane = cuda.threadIdx.x & 31        # holds the scale of the walk's block number `lane`
    block = lane if alone else (first >> U32(7)) + PARTS * lane
    scales = lane_scales(scale_rows, U32(min(block, (end >> U32(7)) - 1)), w)
    left = U32(blocks * BLOCK // step)
    ahead = first
    for i in range(pending + 1):
        if i < left:
            start_step(U32(ring + i * 512 * copies), w, w_rows, ahead, stop, chunks)
            ahead = after(ahead, step, end, alone)
        copy_commit()
    total = nothing
    part = nothing
    new = nothing
    k = first
    at = U32(0)
    rows = rows_at(x_rows, k, w, chunks, step, K, stop)
    while left > 0:
        left = U32(left - 1)
        c = after(k, step, end, alone)
        m = c if left > 0 else first
        later = rows_at(x_rows, m, w, chunks, step, K, stop) if early else rows
        copy_wait(pending)
        weights = read_step(U32(ring + at), copies)
        if left > pending:
            start_step(U32(ring + at), w, w_rows, ahead, stop, chunks)
            ahead = after(ahead, step, end, alone)
        copy_commit()
        at = U32(at + 512 * copies)
        if at == WARP_BYTES:
            at = U32(0)
        if is_fp8(w):
            new = product(new if k & U32(BLOCK - 1) != 0 else nothing, w, weights, rows)
            if c & U32(BLOCK - 1) == 0:
                part = scaled(part, new, scales_of(scales, k >> apart, w_rows))
        else:
            part = product(part, w, weights, rows)
        rows = later
        if not early and left > 0:
            rows = rows_at(x_rows, c, w, chunks, step, K, stop)
        if not alone:
            total = part
        elif c & U32(BLOCK - 1) == 0 and (left == 0 or c < U32(PARTS * BLOCK)):
            # a part ends; part 0 is the one that begins with block 0
            total = added(total, part) if k & U32((PARTS - 1) * BLOCK) != 0 else part
            part = nothing
        k = c
    return total


@functools.cache
def ring_kernel(eights, nt, chunks, alone):
    """8 eights outputs x 8 nt rows a tile; alone: a warp a tile, else 8 warps a tile.

    FP8: a tile lies within the rows of one scale, and a walk has at most 32 blocks.
    """
    sums = 2 * eights * nt
    words, tiles = 32 * sums, PARTS if alone else 1
    pair = min(eights, 2)                   # eights of outputs of an mma
    copies = chunks * eights
    pending, early = RING // copies - 1, nt == 1
    registers = {1: 64, 2: 96, 4: 128}[nt]  # 4 or 2 blocks an SM

    @cuda.jit(**({**KERNEL, "max_registers": registers} if KERNEL else {}))
    def _ring_kernel(x, w, scales, y, n, N, K, groups, shift, scale_blocks, add):
        # grid: (ceil(N / (8 eights tiles)), groups), 8 warps
        base = shared_address(cuda.shared.array(RING_WORDS, U32))
        thread = cuda.threadIdx.x
        warp = thread >> 5
        lane = thread & 31
        g = lane >> 2
        group = cuda.blockIdx.y
        blocks = (K + BLOCK - 1) // BLOCK
        output = (cuda.blockIdx.x * tiles + (warp if alone else 0)) * 8 * eights
        lane_k = (lane & 3) * (16 if is_fp8(w) else 8)
        first = 0 if alone else warp
        w_rows = row_addresses(w, group * N * K + lane_k, output + g, N - 1, 0, K, eights)
        x_rows = row_addresses(x, group * K + lane_k, g, n - 1, 0, groups * K, nt)
        scale_rows = row_addresses(scales, group * (((N - 1) >> shift) + 1) * scale_blocks, output,
                                   N - 1, shift, scale_blocks, 1)
        if first < blocks:
            total = walk(U32(base + warp * WARP_BYTES + lane * 16), x_rows, w, w_rows, scale_rows,
                         K, lane_k, U32(first * BLOCK),
                         blocks if alone else (blocks - warp + PARTS - 1) // PARTS, zeros(sums),
                         chunks, copies, pending, alone, early)
            store_sums(U32(base + warp * WARP_BYTES + lane * 4), total)
        cuda.syncthreads()

        # ---- parts in order, then out ----
        parts = 1 if alone else min(PARTS, blocks)
        for i in range(thread, tiles * words, THREADS):
            where = base + i // words * WARP_BYTES + i % words * 4
            value = lds32(U32(where))
            for p in range(1, parts):
                value = add_rn(value, lds32(U32(where + p * WARP_BYTES)))
            q = i % words // 32
            at = (cuda.blockIdx.x * tiles + i // words) * 8 * eights
            at += q // (2 * pair * nt) * 16 + ((i & 31) >> 2) + 8 * (q % (2 * pair) >> 1)
            row = q // (2 * pair) % nt * 8 + 2 * (i & 3) + (q & 1)
            if at < N and row < n:
                where = (row * groups + group) * N + at
                y[where] = add_rn(y[where], value) if add else value
    return _ring_kernel
