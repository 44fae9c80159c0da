# python -m pytest tests/test_linear.py
"""Products against their documented order of sums, written out in NumPy, byte for byte.

The order is replayed with float32 arrays, one k after the other: elementwise float32 operations
round in one way only, so equality is of bytes. float64 says that the sums mean the product: K
roundings of partial sums of size sqrt(K) make sqrt(K) * sqrt(K) * 2^-24, times 4 for luck.
"""

import numpy as np
import pytest

from engine.linear import BLOCK, linear, linear_group, pack, pack_group

SIZES = [(64, 8), (1, 1), (63, 7), (65, 9), (130, 100), (24, 1024), (257, 514), (0, 16), (5, 0)]
DTYPES = (np.uint16, np.float32)


def matrix(rng, n, k, dtype):
    """(stored [n, k], the float32 values it means)."""
    values = rng.standard_normal((n, k)).astype(np.float32)
    if dtype == np.float32:
        return values, values
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def rows(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def left_to_right(x, w):
    """x [n, K] times w [N, K] in float32, k ascending, a multiply and then an add."""
    out = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        out += x[:, k, None] * w[:, k]
    return out


def test_by_hand():
    # row 0: 1*3 + 2*5 = 13, -1 + 1 = 0, 2^24 + 2; row 1: 8, -0.5 and (2^24 + 1) - 2^24, where
    # from the left the 1 is lost: float32 has 24 bits
    lin = pack([np.array([[3, 5, 0], [-1, 0.5, 0], [2 ** 24, 1, -2 ** 24]], np.float32)])
    x = np.array([[1, 2, 0], [1, 1, 1]], np.float32)
    assert linear(x, lin).tolist() == [[13, 0, 2 ** 24 + 2], [8, -0.5, 0]]


@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_the_documented_order(n, k, dtype, count):
    rng = np.random.default_rng(n * 1000 + k)
    stored, w = matrix(rng, n, k, dtype)
    lin = pack([stored])
    x = rows(rng, count, k)
    out = linear(x, lin)
    assert out.shape == (count, n) and out.dtype == np.float32
    assert out.tobytes() == left_to_right(x, w).tobytes()
    bound = 4 * max(k, 1) * 2.0 ** -24
    assert np.allclose(out, x.astype(np.float64) @ w.T.astype(np.float64), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocked_layout(dtype):
    rng = np.random.default_rng(3)
    stored, _ = matrix(rng, 70, 5, dtype)
    lin = pack([stored])
    assert lin.rows == 70 and lin.w.shape == (2, 5, BLOCK) and lin.w.dtype == dtype
    for j in range(70):
        assert lin.w[j // BLOCK, :, j % BLOCK].tobytes() == stored[j].tobytes()
    assert not lin.w[1, :, 6:].any()                # zero past N


@pytest.mark.parametrize("parts", [(3, 61), (64, 1, 64), (0, 5), (1, 1, 1), (0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_matrices_are_one(parts, dtype):
    rng = np.random.default_rng(4)
    stored = [matrix(rng, n, 12, dtype)[0] for n in parts]
    lin, whole = pack(stored), pack([np.concatenate(stored)])
    assert lin.rows == sum(parts) and lin.w.dtype == dtype
    assert lin.w.tobytes() == whole.w.tobytes()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0)])
def test_one_float32_matrix_widens_all(order):
    rng = np.random.default_rng(5)
    made = [matrix(rng, 40, 10, DTYPES[d]) for d in order]
    lin = pack([m[0] for m in made])
    assert lin.w.dtype == np.float32
    x, w = rows(rng, 3, 10), np.concatenate([m[1] for m in made])
    assert linear(x, lin).tobytes() == left_to_right(x, w).tobytes()
    group = pack_group([m[0] for m in made])
    assert group.w.dtype == np.float32
    x = rows(rng, 3, len(made), 10)
    for g, out in enumerate(linear_group(x, group).transpose(1, 0, 2)):
        assert out.tobytes() == left_to_right(x[:, g], made[g][1]).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_widened_weights_give_the_same_bits(dtype):
    rng = np.random.default_rng(6)
    stored, w = matrix(rng, 100, 77, dtype)
    x = rows(rng, 4, 77)
    assert linear(x, pack([stored])).tobytes() == linear(x, pack([w])).tobytes()


@pytest.mark.parametrize("n, k", [(130, 100), (24, 1024), (257, 513)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_law(n, k, dtype):
    rng = np.random.default_rng(7)
    lin = pack([matrix(rng, n, k, dtype)[0]])
    x = rows(rng, 70, k)
    whole = linear(x, lin)
    for size in (1, 2, 33):
        for start in range(0, 70, size):
            part = linear(x[start:start + size], lin)
            assert part.tobytes() == whole[start:start + size].tobytes()
    order = rng.permutation(70)
    assert linear(x[order], lin).tobytes() == whole[order].tobytes()


def test_an_output_does_not_depend_on_the_other_outputs():
    rng = np.random.default_rng(8)
    stored, _ = matrix(rng, 200, 50, np.uint16)
    x = rows(rng, 3, 50)
    whole = linear(x, pack([stored]))
    for a, b in ((0, 1), (1, 70), (63, 65), (150, 200)):    # a rank's slice of the rows
        part = linear(x, pack([stored[a:b]]))
        assert part.tobytes() == whole[:, a:b].tobytes()


def test_rows_keep_their_nan_and_inf():
    lin = pack([np.ones((3, 9), np.float32)])
    x = np.ones((6, 9), np.float32)
    x[1, 4], x[3, 8] = np.nan, np.inf
    out = linear(x, lin)
    assert np.isnan(out[1]).all() and (out[3] == np.inf).all() and (out[[0, 2, 4, 5]] == 9).all()


@pytest.mark.parametrize("groups, n, k", [(1, 64, 8), (3, 130, 33), (32, 20, 12), (2, 0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_group_is_its_matrices(groups, n, k, dtype, count):
    rng = np.random.default_rng(9)
    made = [matrix(rng, n, k, dtype) for _ in range(groups)]
    group = pack_group([m[0] for m in made])
    assert group.rows == n and group.w.dtype == dtype
    x = rows(rng, count, groups, k)
    out = linear_group(x, group)
    assert out.shape == (count, groups, n)
    for g in range(groups):
        assert out[:, g].tobytes() == left_to_right(x[:, g], made[g][1]).tobytes()
    for i in range(count):
        assert linear_group(x[i:i + 1], group).tobytes() == out[i:i + 1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_group(dtype):
    group = pack_group([], shape=(70, 12), dtype=dtype)
    assert group.w.shape == (0, 2, 12, BLOCK) and group.w.dtype == dtype and group.rows == 70
    assert linear_group(np.empty((3, 0, 12), np.float32), group).shape == (3, 0, 70)
