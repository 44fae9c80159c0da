"""The kernels that need no warp and no tensor core, in Numba's simulator against their host paths.

    python tests/simulated.py

Run by tests/test_simulator.py in a process of its own: the simulator is chosen when numba is first
imported. The intrinsics of engine.device that are PTX have stand-ins here, one value at a time;
what exchanges values between the lanes of a warp, copies asynchronously or multiplies matrices has
none. Prints one JSON object: case -> "" or what went wrong.
"""

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import engine.config  # noqa: E402

engine.config.prepare_environment()

import numpy as np  # noqa: E402

import engine.device as device  # noqa: E402

F32, U32 = np.float32, np.uint32
warnings.simplefilter("ignore")     # integers of the kernels wrap


# ---- stand-ins ---------------------------------------------------------------------------------

def plain(array):
    """The NumPy array inside what the simulator hands to a kernel, in one dimension."""
    while not isinstance(array, np.ndarray):
        array = array.__dict__.get("_item", array.__dict__.get("_ary"))
    return array.reshape(-1)


def words(array, index, count):
    """The `count` uint32 from array.flat[index] on, as a view."""
    flat = plain(array)
    assert index * flat.itemsize % (4 * count) == 0, "not aligned"
    return flat.view(U32)[index * flat.itemsize // 4:][:count]


def store(array, index, *values):
    words(array, index, len(values))[:] = values


def bits(value):
    return np.asarray(value, F32).view(U32)[()]


def number(pattern):
    return np.asarray(pattern, U32).view(F32)[()]


def narrow(value):
    """Nearest even by integers; not the engine's own conversion."""
    pattern = int(bits(value))
    if value != value:
        return np.uint16(0x7FFF)
    return np.uint16((pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16)


def fma(a, b, c):
    return F32(np.float64(a) * np.float64(b) + np.float64(c))


STAND_INS = dict(
    ldg128=lambda a, i: tuple(words(a, i, 4)), ld128=lambda a, i: tuple(words(a, i, 4)),
    ldg64=lambda a, i: tuple(words(a, i, 2)), st128=store, st64=store, fma=fma, narrow=narrow,
    add_rn=lambda a, b: F32(F32(a) + F32(b)), mul_rn=lambda a, b: F32(F32(a) * F32(b)),
    reciprocal=lambda x: F32(1) / F32(x), float_bits=bits, bits_float=number,
    widen=lambda v: F32(v) if isinstance(v, F32) else number(U32(v) << U32(16)),
    narrow2=lambda low, high: U32(narrow(low)) | U32(narrow(high)) << U32(16))
for name, stand_in in STAND_INS.items():
    assert hasattr(device, name), name
    setattr(device, name, stand_in)     # before the kernels' modules take it from there

from engine import random_weights  # noqa: E402
from engine.device_history import gather  # noqa: E402
from engine.host import from_bf16, to_bf16  # noqa: E402
from engine.model.dense import swiglu_cuda, swiglu_host  # noqa: E402
from engine.model.embed import embed, embed_cuda  # noqa: E402
from engine.model.hyper import hyper_out_host  # noqa: E402
from engine.model.hyper_cuda import hyper_out_cuda  # noqa: E402
from engine.model.norm import narrow_cuda  # noqa: E402
from engine.model.thirds import THIRDS, thirds, thirds_cuda  # noqa: E402
from engine.stages.insert import insert, insert_host  # noqa: E402
from engine.stages.project import combine, combine_host  # noqa: E402
from engine.transport import copy, gather_heads, scatter_heads, sum_parts  # noqa: E402

NAN = F32(np.nan)


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*size, seed=0, scale=1.0):
    return (scale * rng(seed).standard_normal(size)).astype(F32)


def ints(*values):
    return np.array(values, np.int32)


def near(ours, theirs, bound=1e-6):
    """Equal but for the last bits, NaN where the other has it."""
    np.testing.assert_allclose(ours, theirs, bound, bound)


def equal(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


# ---- the cases: kernels that the simulator runs ------------------------------------------------

def case_embed():
    """Row -1 of the seats is left alone; the last row of the table; no row at all."""
    for table in (normal(7, 8), to_bf16(normal(7, 8))):
        streams = np.full((4, 3, 8), NAN)
        embed_cuda(table, ints(6, 0, 3, 9), ints(0, -1, 2, 1), streams, 0)
        for k in range(3):
            equal(streams[[0, 2], k], embed(table, ints(6, 3)))
        assert np.isnan(streams[1]).all() and not streams[3].any()
        embed_cuda(table, ints(), ints(), np.zeros((0, 3, 8), F32), 0)


def case_narrow():
    x, out = normal(3, 9), np.full((3, 5), 7, np.uint16)
    x[0, 4] = np.inf
    narrow_cuda(x, 4, ints(0, -1, 1), out, 0)
    equal(out[[0, 2]], to_bf16(x[[0, 2], 4:]))
    assert (out[1] == 7).all()
    narrow_cuda(x[:0], 4, ints(), out[:0], 0)


def case_swiglu():
    """Two picks a seat, one of them padding; columns past c are 0."""
    gate_up, out, host = normal(4, 8, scale=4), np.full((4, 8), 7, np.uint16), np.empty((4, 4), F32)
    gate_up[0, 0], gate_up[0, 5] = 60, -60
    swiglu_cuda(gate_up, 3.0, 2, ints(0, -1), out, 0)
    swiglu_host(gate_up, F32(3), host)
    near(from_bf16(out[:2, :4]), host[:2], 2 ** -8)
    assert not out[:2, 4:].any() and (out[2:] == 7).all()
    swiglu_cuda(gate_up[:0], 3.0, 2, ints(), out[:0], 0)


def case_hyper_out():
    streams, y = normal(3, 4, 1024), normal(2, 3, 1024, seed=1)
    post, comb = normal(3, 4, seed=2), normal(3, 4, 4, seed=3)
    ours, theirs = streams.copy(), streams.copy()
    hyper_out_cuda(ours, y, post, comb, None, ints(0, -1, 5), None, 0)
    hyper_out_host(theirs, y[0] + y[1], post, comb)
    near(ours[[0, 2]], theirs[[0, 2]], 1e-5)
    equal(ours[1], streams[1])


def case_thirds():
    matrix, out = normal(3, 5), np.zeros((THIRDS * 3, 5), np.uint16)
    matrix[0, 0], matrix[0, 1] = 0, 1 + 2 ** -23
    thirds_cuda(matrix, out, 0)
    equal(out, thirds(matrix))
    first, second, third = from_bf16(out).astype(np.float64).reshape(THIRDS, 3, 5)
    assert (first + second + third == matrix).all()


def case_random_weights():
    """The hash in Python's own whole numbers; no code is NaN; BF16 stay inside their range."""
    random_weights.BLOCKS, random_weights.THREADS = 2, 8    # grid-stride: any grid will do
    codes, other = np.zeros((4, 40), np.uint8), np.zeros(50, np.uint16)
    random_weights.fill_codes(codes, 7)
    for i, word in enumerate(codes.reshape(-1).view(U32)[:40].tolist()):
        x = (i * 0x9E3779B1 + 7) % 2 ** 32
        x = (x ^ x >> 16) * 0x7FEB352D % 2 ** 32
        x = (x ^ x >> 15) * 0x846CA68B % 2 ** 32
        x ^= x >> 16
        for b in range(4):
            code = x >> 8 * b & 255
            assert word >> 8 * b & 255 == code - (code & 127 == 127)
    random_weights.fill_bf16(other, 3, 0.25)
    values = from_bf16(other)
    assert 0.1 < values.std() < 0.4 and abs(values).max() <= 0.25 * 3 ** 0.5 * 1.01


def case_insert():
    """Runs of two seats from inside a pool on, the last page's last row, pages held elsewhere, and
    padding; the tail is exact, what is pooled is exact to BF16."""
    kpool, width, page, latent_width = 4, 6, 8, 10
    seats = ints(*[2] * 7, *[0] * 3, -1, 1)
    positions = ints(*range(17, 24), 6, 7, 8, 0, 3)
    table = ints([-1, 1, -1], [3, -1, -1], [-1, 0, 2])
    args = [normal(12, latent_width), normal(12, width, seed=1), normal(12, width, seed=2),
            normal(kpool, width, seed=3), seats, positions, table]
    held = [np.full((4, page, latent_width), 7, np.uint16),
            np.full((4, page // kpool, width), 7, np.uint16),
            normal(3, kpool - 1, width, seed=4), normal(3, kpool - 1, width, seed=5)]
    ours, theirs = ([a.copy() for a in held] for _ in range(2))
    insert(*args, *ours, 0)
    real = seats >= 0
    insert_host(*[a[real] for a in args[:3]], args[3], seats[real], positions[real], table, *theirs)
    for i in (0, 2, 3):
        equal(ours[i], theirs[i])
    assert (theirs[1] != 7).any() and (abs(ours[1].astype(int) - theirs[1]) <= 1).all()


def case_combine():
    """Empty groups, a row without any, a weight that vanishes."""
    out, lse = normal(3, 2, 2, 5), normal(3, 2, 2, seed=1)
    lse[1, 0, 0], lse[:, 1, 1], lse[0, 1, 0] = -np.inf, -np.inf, 200
    out[1, 0, 0], out[:, 1, 1] = 0, 0
    ours, theirs = ((np.full((2, 2, 5), NAN), np.full((2, 2), NAN)) for _ in range(2))
    combine(out, lse, *ours, 0)
    combine_host(out, lse, *theirs)
    near(ours[0], theirs[0])
    near(ours[1], theirs[1])


def case_heads():
    """Heads of three ranks, one of which has none: gathered, and scattered but for the own."""
    heads, n, width = ((0, 3), (3, 3), (3, 5)), 2, 4
    spans = np.array([(a, b - a) for a, b in heads for _ in range(a, b)], np.int32)
    whole, back = normal(n, 5, width), np.zeros((n, 5, width), F32)
    flat = np.concatenate([whole[:, a:b].reshape(-1) for a, b in heads])
    gather_heads(flat, spans, back, 0)
    equal(back, whole)
    mine, parts = np.zeros((n, 2, width), F32), np.full(flat.size, NAN)
    scatter_heads(whole, spans, 3, mine, parts, 0)
    equal(mine, np.ascontiguousarray(whole[:, 3:]))
    equal(parts[:n * 3 * width], flat[:n * 3 * width])
    assert np.isnan(parts[n * 3 * width:]).all()


def case_copy():
    """Quads, and the words after the last of them; nothing."""
    for size in (8, 11, 2, 0):
        source, target = normal(size), np.zeros(size, F32)
        copy(source, target, 0)
        equal(target, source)


def case_sum_parts():
    parts, y = normal(3, 2, 5), np.full((2, 5), NAN)
    sum_parts(parts, 3, y, 0)
    equal(y, (parts[0] + parts[1]) + parts[2])
    sum_parts(parts, 0, y, 0)
    assert not y.any()
    sum_parts(parts[:, :0], 3, y[:0], 0)


def case_gather():
    """Pages of here and there, the last of each; as many as are asked for and no more."""
    here, there = (rng(s).integers(0, 2 ** 60, (3, 5), np.uint64) for s in (0, 1))
    target = np.zeros((3, 5), np.uint64)
    gather(here, there, ints(9, 2, ~2, 0), 1, 2, target, 0)
    equal(target, np.stack([here[2], there[2], np.zeros(5, np.uint64)]))
    gather(here, there, ints(0), 0, 0, target, 0)


CASES = {name.removeprefix("case_"): work for name, work in sorted(globals().items())
         if name.startswith("case_")}


def main():
    sys.setswitchinterval(1e-4)     # a thread of the simulator waits for the others by polling
    found = {}
    for case, work in CASES.items():
        try:
            work()
            found[case] = ""
        except Exception:
            found[case] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
