# python -m pytest tests/test_host.py
"""BF16 bits in and out, over every BF16 number there is, and the product's order of sums.

Rounding cases are built, not computed: between the neighbours b and b + 1 the float32 bits
b << 16 | 0x7FFF, 0x8000 and 0x8001 lie below, at and above the middle, so what is nearest (and, in
the middle, even) is known without rounding anything.
"""

import numpy as np
import pytest
from numba import njit

from engine.host import (LANES, bits_float, float_bits, from_bf16, narrow_into, product, to_bf16,
                         widen)

NAN_BITS = 0x7FC0
INF_BITS = 0x7F80


@njit
def narrow_all(x, out):
    for i in range(x.shape[0]):
        narrow_into(out, i, x[i])


@njit
def widen_all(x, out):
    for i in range(x.shape[0]):
        out[i] = widen(x[i])


@njit
def reinterpret(x, bits, back):
    for i in range(x.shape[0]):
        bits[i] = float_bits(x[i])
        back[i] = bits_float(bits[i])


def narrowed(x):
    """x through narrow_into into a BF16 row."""
    out = np.full(len(x), 0xBEEF, np.uint16)
    narrow_all(x, out)
    return out


def wide(bits):
    """The float32 whose upper half is `bits`, put together as bytes."""
    halves = np.zeros((len(bits), 2), "<u2")
    halves[:, 1] = bits
    return halves.view("<f4")[:, 0]


EVERY = np.arange(65536, dtype=np.uint32).astype(np.uint16)
FINITE = np.arange(INF_BITS, dtype=np.uint32)       # 0 and above; inf follows the last one


@pytest.mark.parametrize("narrow", [to_bf16, narrowed])
@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("low, up", [(0, FINITE * 0), (1, FINITE * 0), (0x7FFF, FINITE * 0),
                                     (0x8000, FINITE % 2), (0x8001, FINITE * 0 + 1),
                                     (0xFFFF, FINITE * 0 + 1)])
def test_nearest_even_between_all_neighbours(narrow, sign, low, up):
    x = (FINITE + np.uint32(sign) << np.uint32(16) | np.uint32(low)).view(np.float32)
    want = (FINITE + up + sign).astype(np.uint16)
    got = narrow(x)
    assert got.dtype == np.uint16 and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("narrow", [to_bf16, narrowed])
def test_rounding_by_hand(narrow):
    # BF16 has 8 significant bits: next to 1 the step is 2^-7, next to 256 it is 2
    cases = [(1.0, 0x3F80), (-2.0, 0xC000), (1 + 2 ** -8, 0x3F80),      # middle, 1.0 is even
             (1 + 3 * 2 ** -8, 0x3F82), (257.0, 0x4380), (259.0, 0x4382), (0.0, 0), (-0.0, 0x8000),
             (3.4028235e38, INF_BITS), (-3.4028235e38, 0xFF80),          # the largest float32
             (3.3895314e38, 0x7F7F),                                     # the largest BF16
             (1e-45, 0), (-1e-45, 0x8000), (2.0 ** -133, 1),       # subnormal of float32, BF16
             (2.0 ** -134, 0), (2.0 ** -126, 0x0080), (np.inf, INF_BITS), (-np.inf, 0xFF80)]
    x, want = np.array([c[0] for c in cases], np.float32), [c[1] for c in cases]
    assert narrow(x).tolist() == want


@pytest.mark.parametrize("narrow", [to_bf16, narrowed])
def test_every_nan_becomes_one_nan(narrow):
    # a payload in the low half alone would round to inf, 0x7FFFFFFF and 0xFFFFFFFF to a zero
    bits = [0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF]
    assert narrow(np.array(bits, np.uint32).view(np.float32)).tolist() == [NAN_BITS] * len(bits)


def test_widening_is_exact_for_every_bf16():
    out = np.empty(65536, np.float32)
    widen_all(EVERY, out)
    want = wide(EVERY).tobytes()
    assert out.tobytes() == want
    assert from_bf16(EVERY).tobytes() == want


def test_widen_and_narrow_leave_float32_alone():
    x = np.random.default_rng(0).integers(0, 2 ** 32, 5000, np.uint32).view(np.float32)
    out = np.empty_like(x)
    widen_all(x, out)
    assert out.tobytes() == x.tobytes()
    out[:] = 0
    narrow_all(x, out)
    assert out.tobytes() == x.tobytes()


def test_bits_and_back():
    x = np.random.default_rng(1).integers(0, 2 ** 32, 5000, np.uint32).view(np.float32)
    bits, back = np.empty(len(x), np.uint32), np.empty(len(x), np.float32)
    reinterpret(x, bits, back)
    assert bits.tobytes() == x.tobytes() and back.tobytes() == x.tobytes()


def test_numpy_helpers_keep_shapes_and_take_views():
    x = np.random.default_rng(2).standard_normal((6, 10, 4)).astype(np.float32)
    for view in (x, x[::2, 1::3], x.transpose(2, 0, 1), x[:0]):
        bits = to_bf16(view)
        assert bits.shape == view.shape
        assert bits.tobytes() == to_bf16(np.ascontiguousarray(view).ravel()).tobytes()
        back = from_bf16(bits.T)
        assert back.shape == view.T.shape and back.dtype == np.float32
        assert (np.abs(back.T - view) <= np.abs(view) * 2 ** -8).all()   # half a step of 8 bits


def test_narrow_into_is_for_compiled_code():
    with pytest.raises(NotImplementedError):
        narrow_into(np.zeros(1, np.uint16), 0, np.float32(1))


@pytest.mark.parametrize("k", [0, 1, 7, 8, 9, 16, 23, 512])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_product_adds_one_term_after_the_other(k, dtype):
    rng = np.random.default_rng(k)
    x = (rng.standard_normal(k) * 10.0 ** rng.integers(-4, 4, k)).astype(np.float32)
    block = rng.standard_normal((k, LANES)).astype(np.float32)
    if dtype == np.uint16:
        block = (block.view(np.uint32) >> 16).astype(np.uint16)
    acc = np.full(LANES, np.nan, np.float32)        # what was there is not part of the sum
    product(x, block, acc)
    want = np.zeros(LANES, np.float32)
    for i in range(k):
        want += x[i] * (wide(block[i]) if dtype == np.uint16 else block[i])
    assert acc.tobytes() == want.tobytes()
