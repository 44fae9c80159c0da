"""Runs the KDA kernels on the CPU, thread by thread: `install` makes kda_cuda.kda_cuda take NumPy
arrays (stream: anything).

The kernels' own Python source runs, one Python thread a CUDA thread, with shared memory as one
array of bytes a block, filled with NaN. mma.sync and the accuracy of exp are stand-ins, so bits are
not the GPU's: two kernels that sum in one order agree here too. `late` says when an asynchronous
copy lands: at once, or only when it is waited for.
"""

import threading
import types as pytypes

import emulate_cuda
import numpy as np
from emulate_cuda import Copies, Warp, _bf16, _halves, fma

from engine.model import kda_chunk_cuda, kda_cuda, kda_row_cuda

MODULES = (kda_row_cuda, kda_chunk_cuda, kda_cuda)
F32 = np.float32
_here = threading.local()


class Meeting(Warp):
    """A warp of this module's threads."""

    def meet(self, value, together=lambda values: values):
        self.values[_here.lane] = value
        if self.barrier.wait() == 0:
            self.result = together(list(self.values))
        self.barrier.wait()
        return self.result


class Dtype:
    """A Numba type: converts, and names the dtype of an array."""

    def __init__(self, dtype, convert):
        self.dtype, self.convert = dtype, convert

    def __call__(self, value):
        return self.convert(value)


class Place:
    def __init__(self, name):
        self.name = name

    def __getattr__(self, axis):
        return getattr(_here, self.name)["xyz".index(axis)]


def _shared(count, kind):
    _here.arrays += 1
    block = _here.block_state
    with block.lock:
        if _here.arrays not in block.arrays:
            size = -(-count * np.dtype(kind.dtype).itemsize // 16) * 16
            array = block.bytes[block.top:block.top + size].view(kind.dtype)[:count]
            block.arrays[_here.arrays] = array
            block.address[id(array)] = block.top
            block.top += size
    return block.arrays[_here.arrays]


def _atomic_min(array, index, value):
    with _here.block_state.lock:
        array[index] = min(array[index], value)


def _meet(value, together=lambda values: values):
    return _here.warp.meet(value, together)


def _words(array, index):
    return emulate_cuda._words(array.reshape(-1), int(index))


def _store(array, index, *words):
    raw, start = array.reshape(-1).view(np.uint8), int(index) * array.itemsize
    assert start % 16 == 0 and 0 <= start <= raw.size - 16, (start, raw.size)
    raw[start:start + 16].view(np.uint32)[:] = words


def _lds128(where):
    assert where % 16 == 0
    return tuple(_here.block_state.bytes[where:where + 16].view(np.uint32))


def _copy16(where, array, index, size):
    data, memory = np.array(_words(array, index), np.uint32).view(np.uint8), _here.block_state.bytes

    def land():
        memory[where:where + 16] = data
    _here.copies.start(land)


def _mma(*operands):
    def together(lanes):
        a, b = np.zeros((16, 16), F32), np.zeros((16, 8), F32)
        c = np.zeros((16, 8), F32)
        for lane, words in enumerate(lanes):
            g, t = divmod(lane, 4)
            near, far = [2 * t, 2 * t + 1], [2 * t + 8, 2 * t + 9]
            for i, (row, columns) in enumerate(((g, near), (g + 8, near), (g, far), (g + 8, far))):
                a[row, columns] = _halves(int(words[i]))
            b[near, g], b[far, g] = _halves(int(words[4])), _halves(int(words[5]))
            c[g, near], c[g + 8, near] = words[6:8], words[8:10]
        return emulate_cuda.mma(a, b, c)
    d = _meet(operands, together)
    g, t = divmod(_here.lane, 4)
    return d[g, 2 * t], d[g, 2 * t + 1], d[g + 8, 2 * t], d[g + 8, 2 * t + 1]


def _warp_sum(value):
    for step in (16, 8, 4, 2, 1):
        value = value + _meet(value)[_here.lane ^ step]
    return value


CUDA = pytypes.SimpleNamespace(
    threadIdx=Place("thread"), blockIdx=Place("block"), gridDim=Place("grid"),
    blockDim=Place("dim"), syncthreads=lambda: _here.all.wait(), syncwarp=lambda: _meet(0),
    shared=pytypes.SimpleNamespace(array=_shared),
    local=pytypes.SimpleNamespace(array=lambda count, kind: np.zeros(count, kind.dtype)),
    atomic=pytypes.SimpleNamespace(min=_atomic_min), jit=lambda **options: lambda kernel: kernel,
    shfl_xor_sync=lambda mask, value, bits: _meet(value)[_here.lane ^ bits],
    shfl_sync=lambda mask, value, lane: _meet(value)[lane])
FAKES = dict(
    cuda=CUDA, float32=Dtype(F32, F32), uint16=Dtype(np.uint16, int), int32=Dtype(np.int32, int),
    uint32=Dtype(np.uint32, int), int64=Dtype(np.int64, int), uint64=Dtype(np.uint64, int),
    U32=int, fma=fma, add_rn=lambda a, b: F32(a) + F32(b), mul_rn=lambda a, b: F32(a) * F32(b),
    narrow=_bf16, rsqrt=lambda x: F32(1) / np.sqrt(F32(x)),
    sigmoid=lambda x: F32(1) / (F32(1) + np.exp(-F32(x))),
    bits_float=lambda bits: np.uint32(bits).view(F32), st128=_store, ld128=_words, ldg128=_words,
    float_bits=lambda value: F32(value).view(np.uint32), lds128=_lds128,
    lds32=lambda where: _here.block_state.bytes[where:where + 4].view(F32)[0], copy16=_copy16,
    copy_commit=lambda: _here.copies.commit(),
    copy_wait=lambda pending: _here.copies.wait(pending), mma_bf16=_mma, warp_sum=_warp_sum,
    shared_address=lambda array: _here.block_state.address[id(array)])


class Launch:
    """What `kernel[grid, threads, stream](*args)` needs of a kernel."""

    def __init__(self, kernel, late):
        self.kernel, self.late = kernel, late

    def __getitem__(self, shape):
        grid = shape[0] if isinstance(shape[0], tuple) else (shape[0],)
        grid = tuple(grid) + (1,) * (3 - len(grid))

        def launch(*args):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    self.block((x, y, 0), grid, shape[1], args)
        return launch

    def block(self, block, grid, threads, args):
        state = pytypes.SimpleNamespace(bytes=np.full(49152, 0xFF, np.uint8), top=0, arrays={},
                                        address={}, lock=threading.Lock())
        everyone, faults = threading.Barrier(threads), []
        warps = [Meeting() for _ in range(threads // 32)]

        def run(thread):
            _here.thread, _here.block, _here.grid = (thread, 0, 0), block, grid
            _here.dim, _here.lane, _here.warp = (threads, 1, 1), thread % 32, warps[thread // 32]
            _here.all, _here.block_state, _here.arrays = everyone, state, 0
            _here.copies = Copies(self.late)
            try:
                with np.errstate(all="ignore"):
                    self.kernel(*args)
            except Exception as fault:
                if not isinstance(fault, threading.BrokenBarrierError):
                    faults.append(fault)
                for barrier in [everyone] + [warp.barrier for warp in warps]:
                    barrier.abort()
        workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if faults:
            raise faults[0]


def install(monkeypatch, late=False):
    """Make kda_cuda.kda_cuda run here on NumPy arrays."""
    makers = {name: getattr(kda_chunk_cuda, name).__wrapped__
              for name in ("prepare_kernel", "recur_kernel", "finish_kernel")}
    makers["few_kernel"] = kda_cuda.few_kernel.__wrapped__
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if name in FAKES:
                monkeypatch.setattr(module, name, FAKES[name])
            elif hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)
    for name, make in makers.items():       # past the caches, which must not keep a Python kernel
        monkeypatch.setattr(kda_cuda, name, lambda *key, make=make: Launch(make(*key), late))
