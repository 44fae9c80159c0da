"""Runs the kernels of engine/gemm.py and engine/gemm_experts.py on the CPU, thread by thread.

The kernels' own Python source runs, one Python thread a CUDA thread; the intrinsics are replaced
by what their docstrings say. mma.sync is one that shows order: float32, the 16 slots of k
ascending, a multiply and then an add each. So two kernels that meet the same k in another order
give other bits here, as they may on a GPU. `late` says when an asynchronous copy lands: at once
(finds a stage that is filled too early) or only when it is waited for (finds one read too early).
"""

import math
import threading
import types as pytypes

import numpy as np

from engine import gemm, gemm_experts, gemm_few, gemm_parts, gemm_ring

_here = threading.local()
DYNAMIC = 99 * 1024             # bytes of dynamic shared memory: all that the smallest GPU has


class Warp:
    """32 threads that meet: each brings a value, all get the list of them."""

    def __init__(self):
        self.values = [None] * 32
        self.barrier = threading.Barrier(32)

    def meet(self, value, together=lambda values: values):
        self.values[_here.lane] = value
        if self.barrier.wait() == 0:
            self.result = together(list(self.values))
        self.barrier.wait()
        return self.result


class Copies:
    """A thread's asynchronous copies. late: they land when they are waited for, not at once."""

    def __init__(self, late):
        self.late, self.new, self.groups = late, [], []

    def start(self, land):
        self.new.append(land)
        if not self.late:
            land()

    def commit(self):
        self.groups.append(self.new)
        self.new = []

    def wait(self, pending):
        while len(self.groups) > pending:
            for land in self.groups.pop(0):
                land()


def _fake_cuda():
    cuda = pytypes.SimpleNamespace(jit=lambda **options: lambda kernel: kernel)

    class Place:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, axis):
            return getattr(_here, self.name)["xyz".index(axis)]

    cuda.threadIdx, cuda.blockIdx, cuda.gridDim = Place("thread"), Place("block"), Place("grid")
    cuda.syncthreads = lambda: _here.all.wait()
    cuda.ballot_sync = lambda mask, p: _here.warp.meet(
        bool(p), lambda v: sum(bit << i for i, bit in enumerate(v)))
    cuda.shfl_sync = lambda mask, value, lane: _here.warp.meet(value)[lane]
    cuda.popc = lambda bits: bin(int(bits) & 0xFFFFFFFF).count("1")
    cuda.ffs = lambda bits: (int(bits) & -int(bits)).bit_length()

    def array(count, dtype):
        _here.arrays += 1
        kind = dtype if dtype is np.float32 else np.int64 if dtype is int else np.uint32
        with _here.lock:
            return _here.shared.setdefault(_here.arrays, np.zeros(count or DYNAMIC // 4, kind))
    cuda.shared = pytypes.SimpleNamespace(array=array)
    return cuda


# ---- intrinsics --------------------------------------------------------------------------------

def _words(array, index):
    raw = array.view(np.uint8)
    start = index * array.itemsize
    assert start % 16 == 0 and 0 <= start <= raw.size - 16, (start, raw.size)
    return tuple(int(w) for w in raw[start:start + 16].view(np.uint32))


def _is_fp8(w):
    return w.dtype == np.uint8


def _load(array, rows, k, w, table, end=None):
    words = ()
    for offset in table[_is_fp8(w)]:
        for row in rows:
            outside = end is not None and k + offset >= end
            words += (0,) * 4 if outside else _words(array, row + k + offset)
    return words


def e4m3(codes):
    """float32 of e4m3 codes, by the format's definition."""
    codes = np.asarray(codes).astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0 ** -9,
                    (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 128, -size, size).astype(np.float32)


def _halves(word):
    return np.array([word << 16 & 0xFFFFFFFF, word & 0xFFFF0000], np.uint32).view(np.float32)


def mma(a, b, c):
    """c [M, N] + a [M, 16] b [16, N] in the stand-in's order."""
    for k in range(16):
        c = c + a[:, k, None] * b[k]
    return c


def _product(sums, w, weights, rows):
    fp8 = _is_fp8(w)
    wide = 2 if fp8 else 1
    chunks = math.isqrt(len(weights) * len(rows) // (8 * wide * len(sums)))
    nt = len(rows) // (4 * wide * chunks)
    if len(sums) == 2 * nt:                 # one eight of outputs: zeros for the lower half
        full = sum((sums[i:i + 2] + (np.float32(0),) * 2 for i in range(0, len(sums), 2)), ())
        both = sum((weights[i:i + 4] + (0,) * 4 for i in range(0, len(weights), 4)), ())
        full = _product(full, w, both, rows)
        return sum((full[i:i + 2] for i in range(0, len(full), 4)), ())
    mt = len(sums) // (4 * nt)

    def together(lanes):
        d = np.zeros((mt, nt, 16, 8), np.float32)
        for lane, (acc, _, _) in enumerate(lanes):
            g, t = divmod(lane, 4)
            for q, value in enumerate(acc):
                d[q // (4 * nt), q // 4 % nt, g + 8 * (q >> 1 & 1), 2 * t + (q & 1)] = value
        for c in range(chunks):
            for s in range(2 * wide):
                a, b = np.zeros((mt, 16, 16), np.float32), np.zeros((nt, 16, 8), np.float32)
                for lane, (_, wl, xl) in enumerate(lanes):
                    g, t = divmod(lane, 4)
                    for r in range(2 * mt):
                        four = wl[(c * 2 * mt + r) * 4:][:4]
                        if fp8:
                            k = e4m3(np.array([four[s] >> 8 * i & 255 for i in range(4)]))
                        else:
                            k = np.concatenate([_halves(four[2 * s]), _halves(four[2 * s + 1])])
                        a[r // 2, g + 8 * (r % 2), [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]] = k
                    for j in range(nt):
                        at = ((c * wide + 2 * s // 4) * nt + j) * 4 + 2 * s % 4
                        b[j, [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9], g] = np.concatenate(
                            [_halves(xl[at]), _halves(xl[at + 1])])
                for i in range(mt):
                    for j in range(nt):
                        d[i, j] = mma(a[i], b[j], d[i, j])
        return d
    d = _here.warp.meet((sums, weights, rows), together)
    g, t = divmod(_here.lane, 4)
    return tuple(d[q // (4 * nt), q // 4 % nt, g + 8 * (q >> 1 & 1), 2 * t + (q & 1)]
                 for q in range(len(sums)))


def fma(a, b, c):
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def _scaled(sums, products, scales):
    nt, pair = len(sums) // (2 * len(scales)), min(len(scales), 2)
    return tuple(fma(scales[q // (2 * pair * nt) * 2 + q % (2 * pair) // 2], products[q], s)
                 for q, s in enumerate(sums))


def _shared_bytes():
    return _here.shared[1].view(np.uint8)


def _lds128(where):
    assert where % 16 == 0
    return tuple(int(w) for w in _shared_bytes()[where:where + 16].view(np.uint32))


def _copy16(where, array, index, size):
    data = np.array(_words(array, index) if size else (0,) * 4, np.uint32).view(np.uint8)

    def land():
        _shared_bytes()[where:where + 16] = data
    assert where % 16 == 0
    _here.copies.start(land)


# ---- of gemm_ring: an address is (array, index) --------------------------------------------------

def _row_addresses(array, base, first, last, shift, stride, count):
    return tuple((array, base + (min(first + 8 * i, last) >> shift) * stride)
                 for i in range(count))


def _start_step(where, w, rows, k, end, chunks):
    step = 64 if _is_fp8(w) else 32
    for i in range(chunks):
        for j, (array, at) in enumerate(rows):
            inside = k + step * i < end
            _copy16(where + (i * len(rows) + j) * 512, array, at + k + step * i if inside else 0,
                    16 if inside else 0)


def _row_words(rows, k, w, chunks, end=None):
    places = [64 * c + half for c in range(chunks) for half in (0, 8)] if _is_fp8(w) else \
        [32 * c for c in range(chunks)]
    return sum(((0,) * 4 if end is not None and k + place >= end else
                _words(array, at + k + place) for place in places for array, at in rows), ())


def _lane_scales(rows, block, w):
    return tuple(array[at + block] if _is_fp8(w) else np.float32(0) for array, at in rows)


def _scales_of(scales, lane, w_rows):
    many = len(w_rows) // len(scales)
    return sum(((_here.warp.meet(scale)[lane],) * many for scale in scales), ())


def _store_sums(where, values):
    words = _shared_bytes().view(np.float32)
    for i, value in enumerate(values):
        words[where // 4 + 32 * i] = value


def _store_parts(array, index, step, values):
    for i, value in enumerate(values):
        array[index + step * i] = value


def _bf16(value):
    bits = int(np.float32(value).view(np.uint32))
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


FAKES = dict(
    cuda=_fake_cuda(), U32=lambda v: int(v) & 0xFFFFFFFF, F32=np.float32, int32=int, fma=fma,
    add_rn=lambda a, b: np.float32(a) + np.float32(b), narrow=_bf16,
    mul_rn=lambda a, b: np.float32(a) * np.float32(b),
    sigmoid=lambda x: np.float32(1) / (np.float32(1) + np.exp(-np.float32(x))),
    copy16=_copy16, copy_commit=lambda: _here.copies.commit(),
    copy_wait=lambda pending: _here.copies.wait(pending), shared_address=lambda array: 0,
    lds32=lambda where: _shared_bytes().view(np.float32)[where // 4],
    is_fp8=_is_fp8, zeros=lambda count: (np.float32(0),) * count,
    row_offsets=lambda base, first, last, shift, stride, count: tuple(
        base + (min(first + 8 * i, last) >> shift) * stride for i in range(count)),
    load_weights=lambda w, rows, k: _load(w, rows, k, w, gemm_parts._WEIGHTS),
    load_weights_tail=lambda w, rows, k, end: _load(w, rows, k, w, gemm_parts._WEIGHTS, end),
    load_rows=lambda x, rows, k, w: _load(x, rows, k, w, gemm_parts._ROWS),
    load_rows_tail=lambda x, rows, k, w, end: _load(x, rows, k, w, gemm_parts._ROWS, end),
    load_scales=lambda scales, rows, block: tuple(scales[row + block] for row in rows),
    product=_product, scaled=_scaled, store_parts=_store_parts,
    added=lambda a, b: tuple(x + y for x, y in zip(a, b)),
    row_addresses=_row_addresses, start_step=_start_step,
    read_step=lambda where, count: sum((_lds128(where + 512 * i) for i in range(count)), ()),
    row_words=_row_words, row_words_tail=_row_words, lane_scales=_lane_scales,
    scales_of=_scales_of, store_sums=_store_sums)


# ---- launches ----------------------------------------------------------------------------------

def _run_block(kernel, args, block, grid, threads, late):
    shared, lock, everyone = {}, threading.Lock(), threading.Barrier(threads)
    warps = [Warp() for _ in range(threads // 32)]
    faults = []

    def run(thread):
        _here.thread, _here.block, _here.grid = (thread, 0, 0), block, grid
        _here.lane, _here.warp, _here.all = thread % 32, warps[thread // 32], everyone
        _here.shared, _here.lock, _here.arrays = shared, lock, 0
        _here.copies = Copies(late)
        try:
            with np.errstate(over="ignore"):
                kernel(*args)
        except Exception as fault:
            if not isinstance(fault, threading.BrokenBarrierError):
                faults.append(fault)
            for barrier in [everyone] + [w.barrier for w in warps]:
                barrier.abort()
    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]


class Launch:
    """What `kernel[grid, threads, stream](*args)` needs of a kernel."""

    def __init__(self, kernel, late):
        self.kernel, self.late = kernel, late

    def __getitem__(self, shape):
        grid = shape[0] if isinstance(shape[0], tuple) else (shape[0],)
        grid = tuple(grid) + (1,) * (3 - len(grid))

        def launch(*args):
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in range(grid[0]):
                        _run_block(self.kernel, args, (x, y, z), grid, shape[1], self.late)
        return launch


def install(monkeypatch, late=False):
    """Make gemm.gemm and gemm_experts.experts run here on NumPy arrays (stream: anything)."""
    for module in (gemm, gemm_few, gemm_ring, gemm_experts):
        for name, value in list(vars(module).items()):
            if name in FAKES:
                monkeypatch.setattr(module, name, FAKES[name])
            elif hasattr(value, "py_func"):
                python = value.py_func
                monkeypatch.setattr(module, name, Launch(python, late)
                                    if name.endswith("_kernel") else python)
    # past their caches, which must not keep a Python kernel
    makers = gemm_few.gemv_kernel.__wrapped__, gemm_ring.ring_kernel.__wrapped__
    monkeypatch.setattr(gemm_few, "gemv_kernel", lambda *form: Launch(makers[0](*form), late))
    for module in (gemm_few, gemm_ring):
        monkeypatch.setattr(module, "ring_kernel", lambda *form: Launch(makers[1](*form), late))
