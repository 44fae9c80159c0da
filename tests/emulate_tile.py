"""Runs the many-row kernels, engine/gemm_tile.py and gemm_experts_many.py, as emulate_cuda runs
the few-row ones: their own source, intrinsics replaced by what their docstrings say."""

import numpy as np

import emulate_cuda as few
from emulate_cuda import _here
from engine import gemm_experts_many, gemm_staged, gemm_tile
from engine.gemm_staged import PAD, ROW_BYTES, STEP, WIDE_BYTES


def _bytes():
    return _here.shared[1].view(np.uint8)


def _lds128(where):
    assert where % 16 == 0
    return tuple(int(w) for w in _bytes()[where:where + 16].view(np.uint32))


def _copies(where, array, rows, k, size, row_bytes):
    for i, (held, at) in enumerate(rows):
        assert held is array
        to = where + STEP * row_bytes * i
        data = np.array(few._words(array, at + k) if size else (0,) * 4, np.uint32).view(np.uint8)

        def land(to=to, data=data):
            _bytes()[to:to + 16] = data
        assert to % 16 == 0
        _here.copies.start(land)


def _chunk(w, mt, nt, side, chunk):
    return sum(gemm_staged._chunk_bytes(few._is_fp8(w), mt, nt, side)) * chunk


def _staged_rows(where, w, mt, nt, side, chunk):
    step = 8 * (WIDE_BYTES if few._is_fp8(w) else ROW_BYTES)
    at = where + _chunk(w, mt, nt, side, chunk)
    return sum((_lds128(at + step * j) for j in range(nt)), ())


def _staged_product(sums, w, rows, at_weights, at_rows, zero, mt, nt, side, chunk):
    assert zero == 0
    at = _chunk(w, mt, nt, side, chunk)
    words = sum((_lds128(at_weights + at + 8 * ROW_BYTES * r) for r in range(2 * mt)), ())
    if few._is_fp8(w):
        rows += sum((_lds128((at_rows ^ 16) + at + 8 * WIDE_BYTES * j) for j in range(nt)), ())
    return few._product(sums, w, words, rows)


def _put_sums(where, sums, mt, nt, side):
    words, stride = _bytes().view(np.float32), 16 * mt * side + PAD
    for q, value in enumerate(sums):
        at = (8 * (q // 4 % nt) + (q & 1)) * stride + 16 * (q // (4 * nt)) + 8 * (q >> 1 & 1)
        words[where // 4 + at] = value


def _places(array, base, first, last, step, stride, count):
    return tuple((array, base + min(first + step * i, last) * stride) for i in range(count))


def _pair_offsets(base, column, c, shift, stride, mt):
    eights = [(min(column + i // 4 * 16 + i % 2 * 8, c - 1), i // 2 % 2) for i in range(2 * mt)]
    return tuple(base + (row + up * c >> shift) * stride for row, up in eights)


def _launch(kernel, grid, shared, stream, args):
    assert shared <= few.DYNAMIC
    kernel[grid, gemm_tile.THREADS, stream](*args)


FAKES = dict(
    few.FAKES, I32=int, I64=int, copies=_copies, staged_rows=_staged_rows,
    staged_product=_staged_product, place=lambda array, index: (array, index), put_sums=_put_sums,
    places=_places, pair_offsets=_pair_offsets, launch=_launch,
    filled=lambda value, mt, nt: (np.float32(value),) * (4 * mt * nt),
    lds32=lambda where: _bytes().view(np.float32)[where // 4])


def install(monkeypatch, late=False):
    """emulate_cuda.install, and the kernels for many rows too."""
    few.install(monkeypatch, late)
    for module in (gemm_staged, gemm_tile, gemm_experts_many):
        for name, value in list(vars(module).items()):
            if name in FAKES:
                monkeypatch.setattr(module, name, FAKES[name])
            elif hasattr(value, "py_func"):
                python = value.py_func
                monkeypatch.setattr(module, name, few.Launch(python, late)
                                    if name.endswith("_kernel") else python)
            elif name.endswith("_kernel"):      # a maker; past its cache
                make = value.__wrapped__
                monkeypatch.setattr(module, name, lambda *key, make=make: few.Launch(
                    make(*key), late))
