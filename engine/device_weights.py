"""A rank's weights on the device: the tree of weights.py, its matrices as the kernels multiply by
them.

| held as | array | dtype |
|---|---|---|
| Matrix.w | [N, K] or [G, N, K], row-major as on disk | uint16 (BF16), uint8 (e4m3) |
| Matrix.scales | [ceil(N / R), ceil(K / 128)], G of them | float32, for e4m3; R = 8 to 128 rows |

BF16 and FP8 bits go to the device as they are; engine/slices.py says when they do not. A matrix is
allocated whole and filled piece by piece through two pinned buffers: while one is on its way to the
device, the other is filled from the file. So the host holds two pieces and the vectors of one
layer, whatever the model; experts go into their [E, N, K] array one after the other.
"""

from typing import NamedTuple

import numpy as np

from engine.checkpoint import EMBED, HEAD, NORM
from engine.device import cuda
from engine.memory import weight_bytes
from engine.model.thirds import THIRDS, thirds_cuda
from engine.slices import PIECE, Reader, Slice, Stack, pieces
from engine.weights import Loader, Weights


class Matrix(NamedTuple):
    w: object
    scales: object


class Sender:
    """Fills device arrays from files through two pinned buffers. sent: bytes so far."""

    def __init__(self, reader, progress=None):
        self._reader, self._progress = reader, progress
        self._stream = cuda.stream()
        self._buffers = [cuda.pinned_array(PIECE, np.uint8) for _ in range(2)]
        self._free = [cuda.event(timing=False) for _ in self._buffers]
        self._turn = self.sent = 0

    def send(self, stacks, array):
        """Start filling a C-contiguous device array with stacks, which are held in its dtype."""
        held, at = np.dtype(array.dtype), 0
        flat = array.reshape(array.size)
        for piece in pieces(stacks, PIECE):
            buffer, free = self._buffers[self._turn], self._free[self._turn]
            free.synchronize()          # at once where it was never recorded
            count = self._reader.fill(piece, buffer, held) // held.itemsize
            flat[at:at + count].copy_to_device(buffer.view(held)[:count], stream=self._stream)
            free.record(self._stream)
            self._turn, at = 1 - self._turn, at + count
            self.sent += count * held.itemsize
            if self._progress:
                self._progress(self.sent)
        assert at == array.size, (at, array.shape)

    def thirds(self, matrix):
        """The [3 N, K] BF16 thirds of a float32 matrix [N, K] on its way to the device."""
        out = cuda.device_array((THIRDS * matrix.shape[0], matrix.shape[1]), np.uint16)
        thirds_cuda(matrix, out, self._stream)
        self._stream.synchronize()      # the matrix goes away
        return out

    def wait(self):
        """Return when all is on the device."""
        self._stream.synchronize()


class DeviceLoader(Loader):
    """Sends a rank's layers to the device; what `tensor` and `stack` give reads nothing yet."""

    def __init__(self, checkpoint, shape, part, sender):
        super().__init__(checkpoint, shape, part)
        self._sender = sender

    def tensor(self, name, rows=None, columns=None):
        entry = self.checkpoint.tensors[name]
        return Slice(name, entry.kind, rows or (0, entry.shape[0]), columns or (0, entry.shape[1]))

    @staticmethod
    def stack(matrices):
        return Stack.of(matrices)

    def pack(self, matrices):
        """Matrix [N, K] of slices one under the other."""
        return self._send([Stack.of(matrices)], ())

    def pack_group(self, matrices, shape=None, dtype=None):
        """Matrix [G, N, K] of G slices or stacks; with G = 0, shape (N, K) stands for them."""
        if not matrices:
            return Matrix(cuda.device_array((0, *shape), np.uint16), None)
        stacks = [m if isinstance(m, Stack) else Stack.of([m]) for m in matrices]
        return self._send([s.like(stacks) for s in stacks], (len(stacks),))

    def _send(self, stacks, group):
        shape, held = stacks[0].shape, stacks[0].held
        scales = None
        if stacks[0].by:
            scales = np.stack([s.scales(self.checkpoint) for s in stacks])
            scales = cuda.to_device(scales.reshape(*group, *scales.shape[1:]))
        w = cuda.device_array((*group, *shape), held)
        if w.size:
            self._sender.send(stacks, w)
        if held == np.float32:
            w = self._sender.thirds(w)
        return Matrix(w, scales)


def upload(tree):
    """A tree of NumPy arrays and Matrices -> the same tree on the device."""
    if isinstance(tree, Matrix):
        return tree
    if isinstance(tree, np.ndarray):
        return cuda.to_device(np.ascontiguousarray(tree))
    if isinstance(tree, tuple):
        values = [upload(v) for v in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree


def load_device_weights(checkpoint, shape, part, progress=None, drop=False):
    """This rank's Weights on the device; embed stays in the file.

    progress(done, total): bytes of the matrices, the last call with done = total. drop: the page
    cache forgets what was read. Raises ModelError as engine.slices says.
    """
    total = sum(weight_bytes(shape, part, checkpoint.kind, "cuda").values())
    with Reader(checkpoint, drop) as reader:
        sender = Sender(reader, progress and (lambda done: progress(min(done, total), total)))
        load = DeviceLoader(checkpoint, shape, part, sender)
        layers = tuple(upload(load.layer(i)) for i in range(shape.layers))
        norm = upload(checkpoint.vector(NORM))
        head = load.pack([load.tensor(HEAD, part.vocab)])
        mtp = upload(load.mtp(shape.layers)) if shape.mtp else None
        sender.wait()
    if progress:
        progress(total, total)
    return Weights(checkpoint.mapped(EMBED), layers, norm, head, mtp, {})
