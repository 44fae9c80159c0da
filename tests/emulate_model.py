"""Runs the kernels of engine/model/{hyper,mix}_cuda.py and the chooser of engine/model/moe.py on
the CPU, thread by thread, as emulate_cuda does for matrix products.

Loads and stores check alignment and bounds. mma.sync is emulate_cuda's stand-in, so a kernel that
meets the same terms in another order gives other bits here, as it may on a GPU.
"""

import types as pytypes

import numpy as np

from engine.model import hyper_cuda, mix_cuda, moe
from tests.emulate_cuda import Launch, _bf16, _fake_cuda, _here, fma, mma

F32 = np.float32


def _bits(value):
    return int(np.array([value], F32).view(np.uint32)[0])


def _float(bits):
    return np.array([int(bits) & 0xFFFFFFFF], np.uint32).view(F32)[0]


def _place(array, index, size):
    raw, start = array.reshape(-1).view(np.uint8), int(index) * array.itemsize
    assert start % size == 0 and 0 <= start <= raw.size - size, (start, raw.size)
    return raw[start:start + size]


def _load(size):
    return lambda array, index: tuple(int(w) for w in _place(array, index, size).view(np.uint32))


def _store(array, index, *words):
    _place(array, index, 4 * len(words))[:] = np.array(words, np.uint32).view(np.uint8)


def _narrow2(low, high):
    return int(_bf16(low)) | int(_bf16(high)) << 16


def _third_pairs(a, b):
    pairs = []
    for _ in range(3):
        pairs.append(_narrow2(a, b))
        a, b = F32(a) - _float(pairs[-1] << 16), F32(b) - _float(pairs[-1] & 0xFFFF0000)
    return tuple(pairs)


def _halves(word):
    return _float(word << 16), _float(word & 0xFFFF0000)


def _mma_bf16(*operands):
    def together(lanes):
        a, b, c = np.zeros((16, 16), F32), np.zeros((16, 8), F32), np.zeros((16, 8), F32)
        for lane, (a0, a1, a2, a3, b0, b1, c0, c1, c2, c3) in enumerate(lanes):
            g, t = divmod(lane, 4)
            near, far = slice(2 * t, 2 * t + 2), slice(2 * t + 8, 2 * t + 10)
            a[g, near], a[g + 8, near] = _halves(a0), _halves(a1)
            a[g, far], a[g + 8, far] = _halves(a2), _halves(a3)
            b[near, g], b[far, g] = _halves(b0), _halves(b1)
            c[g, near], c[g + 8, near] = (c0, c1), (c2, c3)
        return mma(a, b, c)
    d = _here.warp.meet(operands, together)
    g, t = divmod(_here.lane, 4)
    return d[g, 2 * t], d[g, 2 * t + 1], d[g + 8, 2 * t], d[g + 8, 2 * t + 1]


def _cuda():
    cuda = _fake_cuda()
    cuda.shfl_sync = lambda mask, value, lane: _here.warp.meet(value)[int(lane) & 31]
    cuda.shfl_xor_sync = lambda mask, value, step: _here.warp.meet(value)[_here.lane ^ step]
    cuda.syncwarp = lambda: _here.warp.meet(None)
    cuda.local = pytypes.SimpleNamespace(
        array=lambda count, dtype: np.zeros(count, F32 if "float" in str(dtype) else np.int64))
    return cuda


def _sigmoid(x):
    return F32(1) / (F32(1) + F32(np.exp(-F32(x))))


FAKES = dict(
    cuda=_cuda(), U32=lambda v: int(v) & 0xFFFFFFFF, F32=F32, float32=F32, int32=int, int64=int,
    fma=fma, add_rn=lambda a, b: F32(a) + F32(b), ld128=_load(16), ldg64=_load(8), st128=_store,
    st64=_store, bits_float=_float, float_bits=_bits, narrow=_bf16, narrow2=_narrow2,
    third_pairs=_third_pairs, mma_bf16=_mma_bf16, reciprocal=lambda x: F32(1) / F32(x),
    rsqrt=lambda x: F32(1) / np.sqrt(F32(x)), sigmoid=_sigmoid, sigmoid_device=_sigmoid,
    warp_top=lambda value: max(_here.warp.meet(int(value))),
    math=pytypes.SimpleNamespace(exp=lambda x: F32(np.exp(F32(x)))))


def _rising(value):
    bits = int(np.array([value + F32(0)], F32).view(np.int32)[0])
    return 0x7FFFFFFF if value != value else bits ^ 0x7FFFFFFF if bits < 0 else bits


def install(monkeypatch):
    """Make hyper_first_cuda, hyper_in_cuda, hyper_out_cuda and choose_cuda run on NumPy arrays."""
    for module in (hyper_cuda, mix_cuda, moe):
        for name, value in list(vars(module).items()):
            if name in FAKES and not (module is moe and name == "sigmoid"):     # the host path's
                monkeypatch.setattr(module, name, FAKES[name])
            elif (name.startswith("_") or name == "four_of") and hasattr(value, "py_func"):
                python = value.py_func
                monkeypatch.setattr(module, name, Launch(python, False)
                                    if name.endswith("_kernel") else python)
    monkeypatch.setattr(moe, "_rising", _rising)
    for module, name in ((hyper_cuda, "turn_kernel"), (mix_cuda, "in_kernel"),
                         (moe, "choose_kernel")):
        make = getattr(module, name).__wrapped__    # past its cache, as in emulate_cuda
        monkeypatch.setattr(module, name, lambda *key, make=make: Launch(make(*key), False))
