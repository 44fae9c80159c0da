"""Runs intrinsics of engine/attend_parts.py on the CPU: one warp, 32 lanes side by side.

The code generators themselves run: their builder and their PTX are replaced by NumPy, a value being
an array of one element a lane. mma.sync adds its 16 products one after the other in float32, so
that an order shows in the bits. Only the PTX that the file uses is known.
"""

import re
from types import SimpleNamespace

import numpy as np
from numba import types

LANES = np.arange(32)


def lanes(value, dtype=np.int64):
    """A value, an LLVM constant or one value a lane, as one a lane."""
    value = getattr(value, "constant", value)
    return np.broadcast_to(np.asarray(value, dtype), 32).copy()


def _float(value):
    return lanes(value, np.float32)


class Builder:
    """The builder methods that the generators call."""

    def add(self, a, b):
        return lanes(a) + lanes(b)

    def sub(self, a, b):
        return lanes(a) - lanes(b)

    def mul(self, a, b):
        return lanes(a) * lanes(b)

    def xor(self, a, b):
        return lanes(a) ^ lanes(b)

    def and_(self, a, b):
        return lanes(a) & lanes(b)

    def zext(self, a, kind):
        return lanes(a)

    def icmp_signed(self, how, a, b):
        assert how == "<"
        return (lanes(a) < lanes(b)).astype(np.int64)

    def select(self, which, a, b):
        a, b = (getattr(v, "constant", v) for v in (a, b))
        return np.where(lanes(which) != 0, a, b)


class Warp:
    """A warp with `shared` bytes of shared memory and, for stores, a flat float32 array."""

    def __init__(self, shared, flat=None):
        self.shared, self.flat = np.zeros(shared, np.uint8), flat
        self._arithmetic = {
            "add.rn.f32": lambda a, b: a + b, "sub.rn.f32": lambda a, b: a - b,
            "mul.rn.f32": lambda a, b: a * b, "max.f32": np.maximum,
            "div.rn.f32": lambda a, b: a / b, "ex2.approx.ftz.f32": np.exp2,
            "fma.rn.f32": lambda a, b, c: (a.astype(float) * b + c).astype(np.float32)}

    def call(self, intrinsic, *args):
        """What `intrinsic` returns for literal ints and arrays of one value a lane (or lists)."""
        kinds = [types.literal(a) if isinstance(a, int) else
                 types.UniTuple(types.float32, len(a)) if isinstance(a, list) else types.uint32
                 for a in args]
        signature, build = intrinsic._defn(None, *kinds)
        context = SimpleNamespace(make_tuple=lambda builder, kind, values: list(values),
                                  get_dummy_value=lambda: None)
        return build(context, Builder(), signature, args)

    def words(self, where):
        return self.shared.view(np.uint32)[lanes(where) // 4]

    def ptx(self, builder, text, constraints, results, args, effects=False):
        """engine.device.ptx for one warp."""
        name = text.split()[0]
        if name in self._arithmetic:
            return [self._arithmetic[name](*map(_float, args)).astype(np.float32)]
        offset = int((re.search(r"\[\$\d\+(\d+)\]", text) or [0, 0])[1])
        if name.startswith("ldmatrix"):
            return self._matrices(lanes(args[0]) + offset, ".trans" in name)
        if name.startswith("mma"):
            return self._mma(args[:4], args[4:6], args[6:])
        if name.startswith("shfl"):
            step = int(re.search(r"\$1, (\d+),", text)[1])
            return [_float(args[0])[LANES ^ step]]
        if name == "ld.shared.f32":
            return [self.words(lanes(args[0]) + offset).view(np.float32)]
        if name in ("st.shared.f32", "st.shared.b32"):
            value = _float(args[1]).view(np.uint32) if name.endswith("f32") else args[1]
            self.shared.view(np.uint32)[(lanes(args[0]) + offset) // 4] = value
            return []
        if name == "cvt.rn.bf16x2.f32":
            low, high = (_bf16(_float(a)) for a in args)
            return [low | high << np.uint32(16)]
        assert "@p st.global.v4.f32" in text and not (lanes(args[0]) % 4).any(), text
        there = lanes(args[5]) != 0
        for column in range(4):
            self.flat[lanes(args[0])[there] + column] = _float(args[1 + column])[there]
        return []

    def _matrices(self, where, turn):
        assert not (where % 16).any()
        halves = self.shared.view(np.uint16)
        found = []
        for m in range(4):
            rows = np.stack([halves[where[8 * m + r] // 2:][:8] for r in range(8)])
            rows = (rows.T if turn else rows).astype(np.uint32)
            g, t = LANES >> 2, LANES & 3
            found.append(rows[g, 2 * t] | rows[g, 2 * t + 1] << np.uint32(16))
        return found

    def _mma(self, a, b, c):
        g, t = LANES >> 2, LANES & 3
        left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        total = np.zeros((16, 8), np.float32)
        for r in range(4):
            for half in range(2):
                k = 2 * t + half + 8 * (r >> 1)
                left[g + 8 * (r & 1), k] = _half(a[r], half)
                total[g + 8 * (r >> 1), 2 * t + (r & 1)] = _float(c[r])
        for r in range(2):
            for half in range(2):
                right[2 * t + half + 8 * r, g] = _half(b[r], half)
        for k in range(16):
            total = total + left[:, k, None] * right[k]
        return [total[g + 8 * (r >> 1), 2 * t + (r & 1)] for r in range(4)]


def _half(words, half):
    bits = np.asarray(words, np.uint32)
    return (bits << np.uint32(16) if half == 0 else bits & np.uint32(0xFFFF0000)).view(np.float32)


def _bf16(values):
    bits = values.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
