# python -m pytest tests/device/test_device.py
"""The helpers of engine/device.py on a GPU, against definitions written here; PTX without one."""

import importlib.util

import numpy as np
import pytest
from numba import types

from emulate_cuda import e4m3
from engine import device as dev
from engine.device import cuda

gpu = [pytest.mark.gpu, pytest.mark.skipif(not dev.available(), reason="no CUDA device answers")]
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None,
                                    reason="numba-cuda is not installed")


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


def scalars(x, pools, out, keys, back):
    i = cuda.grid(1)
    if i < x.size:
        v = x[i]
        out[0, i] = dev.widen(dev.narrow(v))
        pair = dev.narrow2(v, dev.F32(1.0))
        out[1, i] = dev.low(pair)
        out[2, i] = dev.high(pair)
        out[3, i] = dev.sigmoid(v)
        out[4, i] = dev.rsqrt(abs(v))
        out[5, i] = dev.add_rn(dev.mul_rn(v, v), dev.F32(-1.0))
        out[6, i] = dev.fma(v, v, dev.F32(-1.0))
        out[7, i] = dev.bits_float(dev.float_bits(v))
        keys[i] = dev.order_key(v, pools[i])
        back[i] = dev.order_score(keys[i])


def fp8(codes, out):
    pair = dev.fp8_pairs(codes[cuda.threadIdx.x])
    at = 4 * cuda.threadIdx.x
    out[at] = dev.low(pair[0])
    out[at + 1] = dev.high(pair[0])
    out[at + 2] = dev.low(pair[1])
    out[at + 3] = dev.high(pair[1])


def memory(source, out):
    shared = cuda.shared.array(256, types.uint32)
    i = cuda.threadIdx.x
    where = dev.shared_address(shared) + dev.U32(16 * i)
    dev.copy16(dev.U32(where), source, 8 * i, dev.U32(16 if i % 3 else 0))
    dev.copy_commit()
    dev.copy_wait(0)
    cuda.syncthreads()
    a = dev.lds128(where)
    dev.st128(out, 12 * i, a[0], a[1], a[2], a[3])
    b = dev.ldg128(source, 8 * i)
    dev.st128(out, 12 * i + 4, b[0], b[1], b[2], b[3])
    c = dev.ld128(source, 8 * (63 - i))
    dev.st128(out, 12 * i + 8, c[0], c[1], c[2], c[3])


def sums(x, out):
    scratch = cuda.shared.array(32, types.float32)
    i = cuda.threadIdx.x
    out[0, i] = dev.warp_sum(x[i])
    out[1, i] = dev.block_sum(x[i], scratch)


def matrix(a, b, c):
    lane = cuda.threadIdx.x
    g = lane >> 2
    t = lane & 3
    d = dev.mma_bf16(a[g, t], a[g + 8, t], a[g, t + 4], a[g + 8, t + 4], b[g, t], b[g, t + 4],
                     c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1])
    c[g, 2 * t] = d[0]
    c[g, 2 * t + 1] = d[1]
    c[g + 8, 2 * t] = d[2]
    c[g + 8, 2 * t + 1] = d[3]


@needs_compiler
@pytest.mark.parametrize("target", [(9, 0), (12, 1)])
def test_all_compile_for_both_gpus(target):
    def array(kind, axes=1):
        return types.Array(kind, axes, "C")
    f = types.float32
    table = [(scalars, (array(f), array(types.int32), array(f, 2), array(types.uint64), array(f))),
             (fp8, (array(types.uint32), array(f))),
             (memory, (array(types.uint16), array(types.uint32))), (sums, (array(f), array(f, 2))),
             (matrix, (array(types.uint32, 2), array(types.uint32, 2), array(f, 2)))]
    for kernel, signature in table:
        text = cuda.compile_ptx(kernel, signature, cc=target)[0]
        assert f".target sm_{target[0]}{target[1]}" in text and "call" not in text, kernel


@on_gpu
def test_scalars():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(1000), [0.0, -0.0, 1e30, -1e30, 300.0, -300.0, 1e-40]])
    x = x.astype(np.float32)
    pools = rng.integers(0, 2 ** 31, x.size).astype(np.int32)
    out, keys, back = np.zeros((8, x.size), np.float32), np.zeros(x.size, np.uint64), x.copy()
    cuda.jit(scalars)[8, 128](x, pools, out, keys, back)
    bits = x.view(np.uint32)
    near = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    assert np.array_equal(out[0], near) and np.array_equal(out[1], near) and (out[2] == 1).all()
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        want = 1 / (1 + np.exp(-wide))
        assert (np.abs(out[3] - want) <= 2.0 ** -22 * want + 1e-38).all()
        assert np.allclose(out[4], 1 / np.sqrt(np.abs(wide)), rtol=2.0 ** -22)
        assert np.array_equal(out[5], x * x + np.float32(-1))
        assert np.array_equal(out[6], (wide * wide - 1).astype(np.float32))
    assert np.array_equal(out[7].view(np.uint32), bits)
    assert np.array_equal(np.argsort(keys), np.lexsort((pools, -x)))
    assert np.array_equal(back, x + np.float32(0))
    assert np.array_equal(keys & 0xFFFFFFFF, pools.astype(np.uint64))


@on_gpu
def test_fp8_is_exact_for_every_code():
    codes = np.arange(256, dtype=np.uint8)
    out = np.zeros(256, np.float32)
    cuda.jit(fp8)[1, 64](codes.view(np.uint32), out)
    numbers = codes & 0x7F != 0x7F
    assert out[numbers].tobytes() == e4m3(codes)[numbers].tobytes()


@on_gpu
def test_loads_stores_and_copies():
    source = np.arange(8 * 64, dtype=np.uint16)
    out = np.zeros((64, 3, 4), np.uint32)
    cuda.jit(memory)[1, 64](source, out.reshape(-1))
    words = source.view(np.uint32).reshape(64, 4)
    copied = np.where(np.arange(64)[:, None] % 3 == 0, 0, words)
    assert np.array_equal(out[:, 0], copied) and np.array_equal(out[:, 1], words)
    assert np.array_equal(out[:, 2], words[::-1])


@on_gpu
def test_sums_have_their_order():
    x = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    out = np.zeros((2, 256), np.float32)
    cuda.jit(sums)[1, 256](x, out)
    warps = x.reshape(8, 32)
    step = warps
    for half in (16, 8, 4, 2, 1):
        step = step[:, :half] + step[:, half:]
    total = np.float32(0)
    for i, part in enumerate(step[:, 0]):
        total = part if i == 0 else total + part
    assert np.array_equal(out[0], np.repeat(step[:, 0], 32)) and (out[1] == total).all()


@on_gpu
def test_mma_has_the_layout_of_its_docstring():
    rng = np.random.default_rng(2)
    a, b = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8))
    c = rng.integers(-8, 9, (16, 8)).astype(np.float32)
    want = a @ b + c

    def pairs(m):                               # [rows, 8] of two BF16 along k
        bits = (m.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.ascontiguousarray(bits).view(np.uint32)
    cuda.jit(matrix)[1, 32](pairs(a), pairs(b.T), c)
    assert np.array_equal(c, want)
