"""What the CUDA kernels share: Numba's `cuda`, 16-byte loads, tensor-core products, BF16 and FP8
bits, sums over a warp or block in a fixed order.

The one importer of `numba.cuda`: kernels say `from engine.device import cuda`. It imports where
there is no GPU and no numba-cuda; the intrinsics (PTX through inline assembly) compile for sm_90
and later only, and the simulator does not know them.

Bits: the compiler may contract `a * b + c` into one rounding, in one kernel and not in another.
Where two kernels must give the same bits, write `fma`, `add_rn` or `mul_rn`: none is ever
contracted. `math.exp` of a float32 is the accurate one (fastmath stays off).

Memory: an index counts elements of the array's own dtype from its first one, as if it were flat;
the array is C-contiguous and 16-byte accesses need 16-byte alignment. Shared addresses are the
uint32 of `shared_address`. Static shared memory ends at 48 KiB a block; `with_shared` gives more.
"""

import math

from llvmlite import ir
from numba import config, cuda, types
from numba.cuda.extending import intrinsic

KERNEL = {} if config.ENABLE_CUDASIM else dict(cache=True)
INLINE = dict(device=True, inline="always")
FULL = 0xFFFFFFFF               # all lanes of a warp
U32, U64, I32, I64, F32 = types.uint32, types.uint64, types.int32, types.int64, types.float32
U16 = types.uint16
_BITS = {U16: ir.IntType(16), U32: ir.IntType(32), I32: ir.IntType(32), U64: ir.IntType(64),
         I64: ir.IntType(64), F32: ir.FloatType()}


def available():
    """Whether a CUDA device answers."""
    try:
        return cuda.is_available()
    except Exception:           # a broken driver raises whatever it likes: then there is none
        return False


def with_shared(kernel, grid, threads, stream, size):
    """kernel[grid, threads, stream] with `size` bytes of dynamic shared memory, past 48 KiB too."""
    launch = kernel[grid, threads, stream, size]
    launch.pre_launch_callbacks.append(_allow_shared)
    return launch


def _allow_shared(kernel, launch):
    function, api = kernel._codelibrary.get_cufunc(), cuda.driver
    attribute = api.binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    api.driver.cuKernelSetAttribute(attribute, launch.sharedmem, function.handle,
                                    function.device.id)


# ---- PTX as intrinsics -------------------------------------------------------------------------

def ptx(builder, text, constraints, results, args, effects=False):
    """Emit PTX; results: list of LLVM types. Returns the list of result values."""
    kind = ir.VoidType() if not results else results[0] if len(results) == 1 else \
        ir.LiteralStructType(results)
    asm = ir.InlineAsm(ir.FunctionType(kind, [a.type for a in args]), text, constraints, effects)
    value = builder.call(asm, args)
    if len(results) > 1:
        return [builder.extract_value(value, i) for i in range(len(results))]
    return [value] if results else []


def _instruction(result, args, text, constraints, effects=False):
    """(signature, code generator) of one PTX text from Numba types; tuple results are tuples."""
    many = isinstance(result, types.BaseTuple)

    def build(context, builder, signature, values):
        outs = [] if result == types.void else [_BITS[r] for r in (result if many else (result,))]
        found = ptx(builder, text, constraints, outs, values, effects)
        if many:
            return context.make_tuple(builder, signature.return_type, found)
        return found[0] if found else context.get_dummy_value()
    return result(*args), build


def address(context, builder, array_type, array, index):
    """The generic address, as i64, of element `index` (i64) of a flat array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.ptrtoint(builder.gep(data, [index]), ir.IntType(64))


LOAD = {True: "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];",
        False: "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];"}


def _load128(stream):
    def typing(typingctx, array, index):
        def build(context, builder, signature, args):
            where = address(context, builder, signature.args[0], args[0], args[1])
            words = ptx(builder, LOAD[stream], "=r,=r,=r,=r,l", [ir.IntType(32)] * 4, [where], True)
            return context.make_tuple(builder, signature.return_type, words)
        return types.UniTuple(U32, 4)(array, I64), build
    return typing


@intrinsic
def ldg128(typingctx, array, index):
    """16 bytes at array.flat[index] as four uint32; read only by all and streamed past L1."""
    return _load128(True)(typingctx, array, index)


@intrinsic
def ld128(typingctx, array, index):
    """16 bytes at array.flat[index] as four uint32, through L1."""
    return _load128(False)(typingctx, array, index)


@intrinsic
def st128(typingctx, array, index, a, b, c, d):
    """Store four uint32 at array.flat[index]."""
    def build(context, builder, signature, args):
        where = address(context, builder, signature.args[0], args[0], args[1])
        ptx(builder, "st.global.v4.u32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r", [],
            [where] + list(args[2:]), True)
        return context.get_dummy_value()
    return types.void(array, I64, U32, U32, U32, U32), build


@intrinsic
def ldg64(typingctx, array, index):
    """8 bytes at array.flat[index] as two uint32; read only by all and streamed past L1."""
    def build(context, builder, signature, args):
        where = address(context, builder, signature.args[0], args[0], args[1])
        words = ptx(builder, "ld.global.nc.L1::no_allocate.v2.u32 {$0,$1}, [$2];", "=r,=r,l",
                    [ir.IntType(32)] * 2, [where], True)
        return context.make_tuple(builder, signature.return_type, words)
    return types.UniTuple(U32, 2)(array, I64), build


@intrinsic
def st64(typingctx, array, index, a, b):
    """Store two uint32 at array.flat[index]."""
    def build(context, builder, signature, args):
        where = address(context, builder, signature.args[0], args[0], args[1])
        ptx(builder, "st.global.v2.u32 [$0], {$1,$2};", "l,r,r", [], [where, args[2], args[3]],
            True)
        return context.get_dummy_value()
    return types.void(array, I64, U32, U32), build


@intrinsic
def mma_bf16(typingctx, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """mma.sync m16n8k16, BF16 pairs in uint32, float32 sums: D = A B + C.

    Lane 4 g + t holds A[g, 2t..] a0, A[g + 8, 2t..] a1, A[g, 2t + 8..] a2, A[g + 8, 2t + 8..] a3,
    B[2t.., g] b0, B[2t + 8.., g] b1, and C[g, 2t] c0, [g, 2t + 1] c1, [g + 8, 2t] c2, [.., +1] c3.
    """
    return _instruction(types.UniTuple(F32, 4), [U32] * 6 + [F32] * 4, MMA, MMA_CONSTRAINTS)


MMA = ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, "
       "{$8,$9}, {$10,$11,$12,$13};")
MMA_CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"


# ---- arithmetic that is never contracted -------------------------------------------------------

@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c with one rounding."""
    return _instruction(F32, [F32] * 3, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")


@intrinsic
def add_rn(typingctx, a, b):
    """a + b, rounded on its own whatever a and b were computed from."""
    return _instruction(F32, [F32] * 2, "add.rn.f32 $0, $1, $2;", "=f,f,f")


@intrinsic
def mul_rn(typingctx, a, b):
    """a * b, rounded on its own whatever is done with it."""
    return _instruction(F32, [F32] * 2, "mul.rn.f32 $0, $1, $2;", "=f,f,f")


@intrinsic
def reciprocal(typingctx, x):
    """1 / x by the hardware's approximation (1 ulp); a subnormal counts as 0."""
    return _instruction(F32, [F32], "rcp.approx.ftz.f32 $0, $1;", "=f,f")


@cuda.jit(**INLINE)
def sigmoid(x):
    """1 / (1 + e^-x) in float32; 0 where e^-x overflows, NaN for NaN."""
    return F32(1.0) / add_rn(F32(1.0), math.exp(-x))


@cuda.jit(**INLINE)
def rsqrt(x):
    """1 / sqrt(x), both rounded to nearest."""
    return F32(1.0) / math.sqrt(x)


# ---- BF16, FP8 and order -----------------------------------------------------------------------

@intrinsic
def float_bits(typingctx, value):
    """The bits of a float32 as uint32."""
    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))
    return U32(F32), build


@intrinsic
def bits_float(typingctx, bits):
    """The float32 whose bits a uint32 holds."""
    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())
    return F32(U32), build


@intrinsic
def widen(typingctx, value):
    """One BF16 (uint16 bits) or float32 as float32, exactly."""
    def build(context, builder, signature, args):
        if signature.args[0] == F32:
            return args[0]
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
    return F32(value), build


@intrinsic
def narrow(typingctx, value):
    """float32 -> BF16 bits (uint16), nearest even; NaN becomes 0x7FFF."""
    return _instruction(U16, [F32], "cvt.rn.bf16.f32 $0, $1;", "=h,f")


@intrinsic
def narrow2(typingctx, low, high):
    """Two float32 -> a uint32 of two BF16, `low` in the low half, nearest even."""
    return _instruction(U32, [F32, F32], "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f")


@cuda.jit(**INLINE)
def low(pair):
    """The float32 of the BF16 in the low half of a uint32."""
    return bits_float(U32(pair) << U32(16))


@cuda.jit(**INLINE)
def high(pair):
    """The float32 of the BF16 in the high half of a uint32."""
    return bits_float(U32(pair) & U32(0xFFFF0000))


def unpack_fp8(builder, word):
    """LLVM: i32 of four e4m3 -> [i32 of BF16 elements 0, 1; i32 of elements 2, 3], exactly.

    Each half becomes the byte with its sign spread over the byte above, moved up by 4 bits: sign
    and the seven bits of exponent and mantissa where BF16 has them, the rest masked away. Under a
    BF16 exponent they mean the value times 2^-120, subnormal or not; one BF16 multiplication by
    2^120 is exact. The code 0x7F (NaN) would read as 480: a loader refuses it.
    """
    i32 = ir.IntType(32)
    pairs = []
    for selector in ("0x9180", "0xB3A2"):           # bytes 0 and 1, or 2 and 3, signs above each
        raw, = ptx(builder, f"prmt.b32 $0, $1, 0, {selector};", "=r,r", [i32], [word])
        bits = builder.and_(builder.shl(raw, i32(4)), i32(0x87F087F0))
        pairs += ptx(builder, "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [i32], [bits, i32(0x7B807B80)])
    return pairs


@intrinsic
def fp8_pairs(typingctx, word):
    """Four e4m3 in a uint32 -> two uint32 of two BF16 each, ascending, exactly (no NaN codes)."""
    def build(context, builder, signature, args):
        return context.make_tuple(builder, signature.return_type, unpack_fp8(builder, args[0]))
    return types.UniTuple(U32, 2)(U32), build


@cuda.jit(**INLINE)
def order_key(score, pool):
    """uint64 that ascends in the total order: score descending (-0.0 as 0.0), pool ascending."""
    bits = float_bits(add_rn(score, F32(0.0)))
    rising = bits ^ (U32(0xFFFFFFFF) if bits >> U32(31) else U32(0x80000000))
    return (U64(U32(~rising)) << U64(32)) | U64(U32(pool))


@cuda.jit(**INLINE)
def order_score(key):
    """The score inside an order key."""
    rising = U32(~U32(key >> U64(32)))
    return bits_float(rising ^ (U32(0x80000000) if rising >> U32(31) else U32(0xFFFFFFFF)))


# ---- sums over threads, in a fixed order -------------------------------------------------------

@cuda.jit(**INLINE)
def warp_sum(value):
    """Sum over the 32 lanes, the same bits on each: pairs at distance 16, 8, 4, 2, 1."""
    total = value
    for step in (16, 8, 4, 2, 1):
        total = add_rn(total, cuda.shfl_xor_sync(FULL, total, step))
    return total


@intrinsic
def warp_top(typingctx, value):
    """The largest int32 of the 32 lanes, on each."""
    return _instruction(I32, [I32], "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", True)


@cuda.jit(**INLINE)
def block_sum(value, scratch):
    """Sum over a 1-D block of whole warps, on each thread: warp_sum, then warps ascending.

    scratch: shared float32, one element a warp; free to use again after the call.
    """
    total = warp_sum(value)
    if cuda.threadIdx.x & 31 == 0:
        scratch[cuda.threadIdx.x >> 5] = total
    cuda.syncthreads()
    total = scratch[0]
    for warp in range(1, cuda.blockDim.x >> 5):
        total = add_rn(total, scratch[warp])
    cuda.syncthreads()
    return total


# ---- shared memory by address, asynchronous copies ---------------------------------------------

@intrinsic
def shared_address(typingctx, array):
    """The uint32 address, in bytes, of a shared array's first element."""
    def build(context, builder, signature, args):
        where = address(context, builder, signature.args[0], args[0], ir.IntType(64)(0))
        text = "{ .reg .u64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }"
        return ptx(builder, text, "=r,l", [ir.IntType(32)], [where], True)[0]
    return U32(array), build


@intrinsic
def lds128(typingctx, where):
    """16 bytes of shared memory as four uint32."""
    return _instruction(types.UniTuple(U32, 4), [U32], "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];",
                        "=r,=r,=r,=r,r", True)


@intrinsic
def lds32(typingctx, where):
    """One float32 of shared memory."""
    return _instruction(F32, [U32], "ld.shared.f32 $0, [$1];", "=f,r", True)


@intrinsic
def copy16(typingctx, where, array, index, size):
    """Start a copy of 16 bytes at array.flat[index] to shared `where`; size 0 writes zeros."""
    def build(context, builder, signature, args):
        source = address(context, builder, signature.args[1], args[1], args[2])
        ptx(builder, "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "r,l,r", [],
            [args[0], source, args[3]], True)
        return context.get_dummy_value()
    return types.void(U32, array, I64, U32), build


@intrinsic
def copy_commit(typingctx):
    """Close the group of this thread's copies started since the last one."""
    return _instruction(types.void, [], "cp.async.commit_group;", "", True)


@intrinsic
def copy_wait(typingctx, pending):
    """Wait until at most `pending` (a constant) of this thread's groups are still under way."""
    if isinstance(pending, types.IntegerLiteral):
        text = f"cp.async.wait_group {pending.literal_value};"

        def build(context, builder, signature, args):
            ptx(builder, text, "", [], [], True)
            return context.get_dummy_value()
        return types.void(pending), build
