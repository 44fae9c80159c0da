# python -m pytest tests/stages/test_attend_parts.py
"""The pieces of stage 4 on CUDA, their own code run on the CPU by tests/emulate_warp.py, warp by
warp, against NumPy."""

import numpy as np
import pytest

from emulate_warp import LANES, Warp, lanes
from engine import attend_parts
from engine.host import from_bf16, to_bf16

ROWS, WIDTH = 64, 512
G, T = LANES >> 2, LANES & 3
SIXTEEN, TURN = LANES & 15, ((LANES >> 4) ^ (LANES & 7)) << 4


def put(shared, base, bits, units):
    """Rows of BF16 bits to shared memory: unit u of row r at u ^ r % 8."""
    flat = shared[base:].view(np.uint16)
    for r, row in enumerate(bits):
        for u in range(units):
            flat[(r * units + (u ^ (r & 7))) * 8:][:8] = row[8 * u:8 * u + 8]


@pytest.mark.parametrize("tiles", [1, 4])
def test_a_block_of_heads(monkeypatch, tiles):
    rng = np.random.default_rng(tiles)
    heads, count = 16 * tiles, 51
    high = eights = 2 if tiles == 4 else 1
    beside, across = 8 // eights, 512 // (8 // eights)
    query = to_bf16(rng.standard_normal((heads, WIDTH)).astype(np.float32))
    rows = to_bf16(rng.standard_normal((ROWS, WIDTH)).astype(np.float32))
    rows[count:] = 0
    asked, weights = 1024 * ROWS, 1024 * (ROWS + heads)
    tops, pairs = weights + 128 * heads, weights + 128 * heads + 4 * beside * heads
    factors = pairs + 128 * heads
    warp = Warp(factors + 8 * heads, np.full(heads * WIDTH + 7, np.nan, np.float32))
    monkeypatch.setattr(attend_parts, "ptx", warp.ptx)
    monkeypatch.setattr(attend_parts, "_unpack", lambda builder, values: list(values))
    monkeypatch.setattr(attend_parts, "address", lambda c, b, kind, array, index: index)
    put(warp.shared, 0, rows, 64)
    put(warp.shared, asked, query, 64)

    # --- as _attend_kernel does it
    places = []
    for w in range(8):
        side, beneath = divmod(w, beside)
        head, eight = side * high * 16, beneath * eights
        unit = (LANES >> 3) & 1 if eights == 2 else LANES >> 3
        above = 8 * (LANES >> 4) if eights == 2 else 0
        found = warp.call(attend_parts.dots, asked + (head + SIXTEEN) * 1024, TURN,
                          (8 * eight + above + (LANES & 7)) * 1024, (unit ^ (LANES & 7)) << 4,
                          high, eights)
        found = warp.call(attend_parts.scaled, found, lanes(0.125, np.float32),
                          count - 8 * eight - 2 * T, high)
        best = warp.call(attend_parts.tops, found, high)
        warp.call(attend_parts.store_heads, tops + 4 * (head + G + beneath * heads), best)
        places.append((found, beneath, head, eight))
    for found, beneath, head, eight in places:
        best = warp.call(attend_parts.largest, tops + 4 * (head + G), 4 * heads, beside, high)
        warp.call(attend_parts.weigh, found, best, weights + 128 * (head + G) + 4 * T,
                  (eight ^ G) << 4, pairs + 16 * (eight * heads + head + G) + 4 * T, heads)
    old, new = rng.random((2, heads)).astype(np.float32)
    warp.shared[factors:].view(np.float32)[:] = np.concatenate([old, new])
    before = rng.standard_normal((heads, WIDTH)).astype(np.float32)
    for found, beneath, head, eight in places:
        column = across * beneath + 2 * T
        sums = [before[head + 16 * (at // 2 % high) + 8 * (at & 1) + G,
                       column + 8 * (at // (2 * high)) + c]
                for at in range(2 * high * (across // 8)) for c in range(2)]
        factor = factors + 4 * (head + G)
        sums = warp.call(attend_parts.folded, sums, weights + 128 * (head + SIXTEEN), TURN,
                         SIXTEEN * 1024 + 2 * across * beneath, TURN,
                         warp.call(attend_parts.load_heads, factor, high),
                         warp.call(attend_parts.load_heads, factor + 4 * heads, high))
        warp.call(attend_parts.store_sums, lanes(0), (head + G) * WIDTH + column, lanes(WIDTH),
                  heads - 1 - head - G, WIDTH - 8 - column, sums, high, LANES & 1)

    # --- the same in NumPy: the last head and the last eight columns do not exist
    exact = from_bf16(query).astype(float) @ from_bf16(rows).astype(float).T * 0.125
    exact[:, count:] = -np.inf
    top = exact.max(axis=1)
    p = np.exp2(exact - top[:, None])
    found = warp.shared[tops:pairs].view(np.float32).reshape(beside, heads).max(axis=0)
    assert np.abs(found - top).max() <= 1e-5
    mass = warp.shared[pairs:factors].view(np.float32).reshape(8, heads, 4).sum(axis=(0, 2))
    assert np.abs(mass / p.sum(axis=1) - 1).max() <= 1e-5
    wanted = p @ from_bf16(rows).astype(float) * new[:, None] + before * old[:, None]
    out = warp.flat[:heads * WIDTH].reshape(heads, WIDTH)
    assert np.isnan(out[-1]).all() and np.isnan(out[:, -8:]).all()
    assert np.isnan(warp.flat[-7:]).all()
    assert np.abs(out - wanted)[:-1, :-8].max() <= 2e-2
