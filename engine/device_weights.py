"""A rank's weights on the device: the tree of weights.py, its matrices as the kernels multiply by
them.

| held as | array | dtype |
|---|---|---|
| Matrix.w | [N, K] or [G, N, K], row-major as on disk | uint16 (BF16), uint8 (e4m3), float32 |
| Matrix.scales | [ceil(N / R), ceil(K / 128)], G of them | float32, for e4m3; R = 8 to 128 rows |

BF16 and FP8 bits go to the device as they are. FP8 stays FP8 where the slice starts on the scale
grid: always so for the release's dimensions. Elsewhere (small models on several ranks) the values
are rounded to BF16 once. Float32 matrices stay float32 where the kernel takes them (router, mHC)
and are rounded to BF16 where not. One layer at a time passes through host memory.
"""

from typing import NamedTuple

import numpy as np

from engine.checkpoint import E4M3, EMBED, HEAD, NORM, layer_name, scale_name
from engine.device import cuda
from engine.host import from_bf16, to_bf16
from engine.shape import SCALE_BLOCK
from engine.weights import Loader, Weights

SCALE_ROWS = (128, 64, 32, 16, 8)       # rows that one scale of the kernels may cover


class Matrix(NamedTuple):
    w: object
    scales: object


class Quantized(NamedTuple):
    """A slice of an FP8 matrix on its way: codes uint8 [N, K], one scale a row and 128 columns."""

    codes: np.ndarray
    scales: np.ndarray          # [N, ceil(K / 128)] float32

    @property
    def shape(self):
        return self.codes.shape

    @property
    def dtype(self):
        return self.codes.dtype


class DeviceLoader(Loader):
    """Reads layers in the device's form, on the host; `upload` sends a tree."""

    def matrix(self, layer, name, rows=None, columns=None):
        full = layer_name(layer, name + ".weight")
        checkpoint = self.checkpoint
        if checkpoint.kind(full) != "F8_E4M3":
            return checkpoint.matrix(full, rows, columns)
        codes = checkpoint.mapped(full)
        (r0, r1), (c0, c1) = rows or (0, codes.shape[0]), columns or (0, codes.shape[1])
        if c0 % SCALE_BLOCK:
            return to_bf16(checkpoint.matrix(full, rows, columns))
        scales = checkpoint.mapped(scale_name(full))
        scales = from_bf16(scales) if scales.dtype == np.uint16 else np.asarray(scales)
        across = slice(c0 // SCALE_BLOCK, -(-c1 // SCALE_BLOCK))
        return Quantized(codes[r0:r1, c0:c1], scales[np.arange(r0, r1) // SCALE_BLOCK, across])

    @staticmethod
    def stack(matrices):
        if all(isinstance(m, Quantized) for m in matrices):
            return Quantized(*(np.concatenate(a) for a in zip(*matrices)))
        plain = [_plain(m) for m in matrices]
        if len({m.dtype for m in plain}) > 1:
            plain = [m if m.dtype == np.uint16 else to_bf16(m) for m in plain]
        return np.concatenate(plain)

    @classmethod
    def pack(cls, matrices):
        whole = cls.stack(matrices)
        if isinstance(whole, Quantized):
            return Matrix(np.ascontiguousarray(whole.codes), _coarse([whole.scales])[0])
        return Matrix(np.ascontiguousarray(whole), None)

    @classmethod
    def pack_group(cls, matrices, shape=None, dtype=np.uint16):
        if not matrices:
            return Matrix(np.zeros((0, *shape), np.uint16), None)
        if all(isinstance(m, Quantized) for m in matrices):
            return Matrix(np.stack([m.codes for m in matrices]),
                          np.stack(_coarse([m.scales for m in matrices])))
        return Matrix(_bf16(np.stack([_plain(m) for m in matrices])), None)


def _plain(matrix):
    """A matrix without scales: FP8 becomes BF16, rounded."""
    if not isinstance(matrix, Quantized):
        return matrix
    scales = np.repeat(matrix.scales, SCALE_BLOCK, axis=1)[:, :matrix.shape[1]]
    return to_bf16(E4M3[matrix.codes] * scales)


def _bf16(matrix):
    return matrix if matrix.dtype == np.uint16 else to_bf16(matrix)


def _coarse(all_scales):
    """[N, blocks] scales a row, of matrices of one shape -> a scale for as many rows as agree."""
    for rows in SCALE_ROWS:
        if all(np.array_equal(s, np.repeat(s[::rows], rows, axis=0)[:len(s)]) for s in all_scales):
            return [np.ascontiguousarray(s[::rows]) for s in all_scales]
    raise AssertionError(f"scales change within {SCALE_ROWS[-1]} rows")


def upload(tree, exact=False):
    """A tree of NumPy arrays and Matrices -> the same tree on the device.

    exact: float32 matrices stay float32; else they become BF16.
    """
    if isinstance(tree, Matrix):
        w = np.ascontiguousarray(tree.w if exact or tree.scales is not None else _bf16(tree.w))
        scales = None if tree.scales is None else cuda.to_device(tree.scales)
        return Matrix(cuda.to_device(w), scales)
    if isinstance(tree, np.ndarray):
        return cuda.to_device(np.ascontiguousarray(tree))
    if isinstance(tree, tuple):
        names = getattr(tree, "_fields", [""] * len(tree))
        values = [upload(v, exact or name in ("fn", "router")) for name, v in zip(names, tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree


def load_device_weights(checkpoint, shape, part, progress=None):
    """This rank's Weights on the device; embed stays in the file. progress(done, total): layers."""
    load = DeviceLoader(checkpoint, shape, part)
    layers = []
    for i in range(shape.layers):
        layers.append(upload(load.layer(i)))
        if progress:
            progress(i + 1, shape.layers)
    norm = cuda.to_device(checkpoint.vector(NORM))
    head = upload(load.pack([checkpoint.matrix(HEAD, part.vocab)]))
    mtp = upload(load.mtp(shape.layers)) if shape.mtp else None
    embed = checkpoint.mapped(EMBED)
    return Weights(embed, tuple(layers), norm, head, mtp, {})
