# python -m pytest tests/device/test_random.py
"""Random weights: bits without NaN of the size asked for; both kernels compile for both GPUs."""

import numpy as np
import pytest

from engine import random_weights
from engine.device import available, cuda
from engine.host import from_bf16
from engine.release import release_shape

CODES = 1 << 16
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason="no CUDA device answers")]


def values(codes):
    """e4m3 codes as float64; NaN for the two NaN codes."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0 ** -9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes & 128, -size, size)


@pytest.mark.parametrize("target", [(9, 0), (12, 1)])
def test_compile_for_both_gpus(target):
    pytest.importorskip("numba_cuda", reason="PTX is compiled by numba-cuda: pip install .[cuda]")
    from numba import float32, types, uint16, uint32
    for kernel, signature in (
            (random_weights._codes_kernel, (types.Array(uint32, 1, "C"), uint32)),
            (random_weights._bf16_kernel, (types.Array(uint16, 1, "C"), uint32, float32))):
        text = cuda.compile_ptx(kernel.py_func, signature, cc=target)[0]
        assert f".target sm_{target[0]}{target[1]}" in text and ".f64" not in text


def test_code_rms():
    """CODE_RMS is that of all codes with the two NaNs replaced by 448 of their sign."""
    every = values(np.arange(256))
    every[np.isnan(every)] = 448
    assert abs(np.sqrt((every ** 2).mean()) / random_weights.CODE_RMS - 1) < 1e-3


class TestOnDevice:
    pytestmark = on_gpu

    def test_codes(self):
        array = cuda.to_device(np.zeros((2, CODES), np.uint8))
        random_weights.fill_codes(array, 7)
        found = array.copy_to_host()
        wide = values(found)
        assert not np.isnan(wide).any()
        assert abs(np.sqrt((wide ** 2).mean()) / random_weights.CODE_RMS - 1) < 0.02
        counts = np.bincount(found.ravel(), minlength=256)
        assert (np.delete(counts, [0x7F, 0xFF]) > 0.7 * found.size / 256).all()
        assert abs(np.corrcoef(found[0], found[1])[0, 1]) < 0.02

    def test_bf16(self):
        arrays = [cuda.to_device(np.zeros(CODES, np.uint16)) for _ in range(3)]
        for array, number in zip(arrays, (1, 1, 2)):
            random_weights.fill_bf16(array, number, 0.25)
        first, again, other = (from_bf16(a.copy_to_host()) for a in arrays)
        assert np.array_equal(first, again) and abs(np.corrcoef(first, other)[0, 1]) < 0.02
        assert abs(first.std() / 0.25 - 1) < 0.02 and abs(first.mean()) < 0.01

    def test_a_product_keeps_its_size(self):
        make = random_weights._Maker(release_shape(4), None, 3)
        for matrix in (make.fp8(256, 1024), make.bf16(256, 1024)):
            w = matrix.w.copy_to_host()
            if matrix.scales is None:
                w = from_bf16(w).astype(np.float64)
            else:
                scales = matrix.scales.copy_to_host()
                w = values(w) * np.repeat(np.repeat(scales, 128, 0), 128, 1)
            y = w @ np.random.default_rng(0).standard_normal(1024)
            assert 0.8 < y.std() < 1.3
