"""A rank's slices of a checkpoint, read in pieces so that host memory stays bounded.

A `Slice` names rows and columns of one matrix and reads nothing. Slices one under the other make a
`Stack`, which says how the device holds it. `pieces` cuts stacks into runs of whole rows that fit a
buffer; a `Reader` fills that buffer from the file:

| stored | held | how |
|---|---|---|
| e4m3, columns from a multiple of 128 on | e4m3, a scale for R = 8 to 128 rows | as it is |
| e4m3 off that grid (small models, several ranks) | BF16 | value x scale in float32, rounded |
| BF16 | BF16 | as it is |
| F32, of mHC and router | 3 BF16 | their sum is exact (model/thirds) |
| F32, other | BF16 | rounded |

All slices of a stack are held alike. Bytes go from the file to the buffer by `preadv`; only where
columns are cut, or values changed, do they pass through `BLOCK` bytes more a thread.

Refused by name (ModelError): the e4m3 codes 0x7F and 0xFF, which are NaN; scales that are not
finite; a file that gives fewer bytes than its header promised.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from engine.checkpoint import E4M3, STORED, forget, refuse_nan_codes, scales_of
from engine.errors import ModelError
from engine.host import from_bf16, to_bf16
from engine.shape import SCALE_BLOCK

PIECE = 64 << 20                        # bytes of a buffer
RUN = 8 << 20                           # bytes that one thread reads at a time
BLOCK = 1 << 20                         # bytes of rows that are cut or changed at a time
THREADS = 8
SCALE_ROWS = (128, 64, 32, 16, 8)       # rows that one scale of the kernels may cover
KEPT = ("hc_attn_fn", "hc_ffn_fn", "mlp.gate.weight")       # float32 where the file has it so


@dataclass(frozen=True)
class Slice:
    """Rows and columns (start, stop) of matrix `name`. turned: its transpose is meant."""

    name: str
    kind: str
    rows: tuple
    columns: tuple
    turned: bool = False

    @property
    def shape(self):
        """(rows, columns) as the device holds them."""
        size = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return size[::-1] if self.turned else size

    @property
    def dtype(self):
        """Of the file."""
        return STORED[self.kind]

    @property
    def T(self):
        return replace(self, turned=not self.turned)

    def __getitem__(self, rows):
        """Some of the rows of a slice that is not turned."""
        first, stop, step = rows.indices(self.rows[1] - self.rows[0])
        assert step == 1 and not self.turned
        return replace(self, rows=(self.rows[0] + first, self.rows[0] + stop))


@dataclass(frozen=True)
class Stack:
    """Slices of one width, one under the other. held: dtype on the device; by: rows a scale."""

    slices: tuple
    held: np.dtype
    by: int | None

    @classmethod
    def of(cls, slices):
        """The Stack of slices, held as the module's table says."""
        slices, by = tuple(slices), None
        assert len({s.shape[1] for s in slices}) == 1
        if all(s.kind == "F8_E4M3" and not s.turned and not s.columns[0] % SCALE_BLOCK
               for s in slices):
            by = rows_a_scale([s.rows for s in slices])
        kept = all(s.kind == "F32" and s.name.endswith(KEPT) for s in slices)
        return cls(slices, np.dtype(np.uint8 if by else np.float32 if kept else np.uint16), by)

    @property
    def shape(self):
        return sum(s.shape[0] for s in self.slices), self.slices[0].shape[1]

    def like(self, others):
        """The same slices, held so that all `others` can be held alike."""
        by = min((s.by or 0 for s in others), default=0)
        if by:
            return replace(self, by=by)
        return replace(self, by=None, held=np.dtype(np.uint16))

    def scales(self, checkpoint):
        """Float32 [ceil(rows / by), ceil(columns / 128)]. ModelError where one is not finite."""
        found = []
        for s in self.slices:
            rows = np.arange(*s.rows, self.by) // SCALE_BLOCK
            across = np.arange(s.columns[0], s.columns[1], SCALE_BLOCK) // SCALE_BLOCK
            found.append(scales_of(checkpoint, s.name, rows, across))
        return np.concatenate(found)


def rows_a_scale(spans):
    """How many rows of (start, stop) spans, one under the other, one scale can cover; or None.

    The most of SCALE_ROWS for which every change of scale falls on a multiple of it.
    """
    at, changes = 0, []
    for first, stop in spans:
        changes += [at, *range(at - first % SCALE_BLOCK, at + stop - first, SCALE_BLOCK)[1:]]
        at += stop - first
    return next((rows for rows in SCALE_ROWS if not any(c % rows for c in changes)), None)


def pieces(stacks, limit=PIECE):
    """Cut stacks, which lie one after the other, into lists of Slices of at most `limit` bytes.

    A list is one piece: its slices in order are consecutive in memory. A turned slice is not cut.
    """
    run, piece, size = min(RUN, limit), [], 0
    for stack in stacks:
        width = stack.shape[1] * stack.held.itemsize
        for whole in stack.slices:
            count = 0 if not width else len(range(*whole.rows))
            step = max(count, 1) if whole.turned else max(run // max(width, 1), 1)
            for first in range(0, count, step):
                part = whole[first:first + step] if not whole.turned else whole
                bytes_of = part.shape[0] * width
                assert bytes_of <= limit, f"{bytes_of} bytes of {whole.name} are too many at once"
                if size + bytes_of > limit:
                    yield piece
                    piece, size = [], 0
                piece.append(part)
                size += bytes_of
    if piece:
        yield piece


class Reader:
    """Reads slices of one checkpoint with a few threads. drop: the page cache forgets them."""

    def __init__(self, checkpoint, drop=False):
        self._checkpoint, self._drop, self._files = checkpoint, drop, {}
        self._pool = ThreadPoolExecutor(THREADS, "read")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown(cancel_futures=True)
        if self._drop:
            self._checkpoint.forget()       # vectors and scales, which were read through maps
        for file in self._files.values():
            if self._drop:                  # the page cache's own units may reach over two pieces
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def fill(self, piece, buffer, held):
        """Write a piece's slices, as dtype `held`, into `buffer` (uint8); how many bytes it takes.

        Raises ModelError that names the tensor.
        """
        jobs, at = [], 0
        for part in piece:
            n, k = part.shape
            end = at + n * k * held.itemsize
            jobs.append((part, buffer[at:end].view(held).reshape(n, k), self._file(part.name)))
            at = end
        for _ in self._pool.map(lambda job: self._read(*job), jobs):
            pass
        return at

    def _file(self, name):
        path = self._checkpoint.tensors[name].file
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror}",
                                 "see that the folder is still there") from None
        return self._files[path]

    def _read(self, part, out, file):
        """Fill out [n, k] with one slice."""
        tensor = self._checkpoint.tensors[part.name]
        width = tensor.shape[1]
        if out.dtype == part.dtype and not part.turned and out.shape[1] == width:
            self._bytes(tensor, part, part.rows, out, file)
            return self._refuse_nan(part, part.rows[0], out)
        row = width * part.dtype.itemsize
        for first in range(*part.rows, max(BLOCK // row, 1)):
            rows = first, min(first + max(BLOCK // row, 1), part.rows[1])
            raw = np.empty((rows[1] - rows[0], width), part.dtype)
            self._bytes(tensor, part, rows, raw, file)
            raw = np.ascontiguousarray(raw[:, slice(*part.columns)])
            self._refuse_nan(part, first, raw)
            if out.dtype != part.dtype:
                raw = self._rounded(part, rows, raw)
            own = slice(first - part.rows[0], rows[1] - part.rows[0])
            if part.turned:
                out[:, own] = raw.T
            else:
                out[own] = raw

    def _refuse_nan(self, part, first, codes):
        if part.kind == "F8_E4M3":
            refuse_nan_codes(self._checkpoint, part.name, codes, first, part.columns[0])

    def _rounded(self, part, rows, raw):
        """BF16 bits of rows (start, stop) of a slice that is stored otherwise."""
        if part.kind == "F8_E4M3":
            across = np.arange(*part.columns) // SCALE_BLOCK
            scales = scales_of(self._checkpoint, part.name, np.arange(*rows) // SCALE_BLOCK, across)
            return to_bf16(E4M3[raw] * scales)
        return to_bf16(from_bf16(raw) if raw.dtype == np.uint16 else raw)

    def _bytes(self, tensor, part, rows, out, file):
        """Whole rows (start, stop) of the tensor into out, C-contiguous."""
        row = tensor.shape[1] * part.dtype.itemsize
        start, left = tensor.start + rows[0] * row, memoryview(out.reshape(-1).view(np.uint8))
        at = start
        while len(left):
            try:
                count = os.preadv(file, [left], at)
            except OSError as error:
                raise ModelError(f"{part.name} in {tensor.file} cannot be read: {error.strerror}",
                                 "see the kernel log; fetch the file again") from None
            if not count:
                raise ModelError(f"{part.name} in {tensor.file} ends at byte {at}: the file was "
                                 "cut since the start", "fetch the file again")
            left, at = left[count:], at + count
        if self._drop:
            forget(file, start, at - start)
