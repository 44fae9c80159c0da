"""How arrays of the device cross the ranks: in host memory that kernels reach, or in device memory
that the MPI reaches; and the kernels that lay heads out for the way.

`buffer` gives an array that crosses: kernels write it in place, World.exchange sends and fills its
other side (Crossing). A kernel that reads each element once reads it in place too; one that reads
them more often, or one after the other, reads them in device memory: `here`. On an H200 behind
PCIe, 128 KB in place cost 4 us more than in device memory, a copy as a node of the graph 12 us.

| transport | where such an array lies | for |
|---|---|---|
| pinned | mapped pinned host memory | any MPI; a Spark, whose NIC cannot read device memory |
| device | device memory | a CUDA-aware MPI; it is asked, others crash on a device pointer |

`auto` takes whichever moves a decode step's sums faster, by a probe at start; ranks decide from
the same times.

Heads in one flat array, "rank by rank": rank r's part [n, heads of r, width] begins at n * width
times the number of heads before them, so that each part is one message.
"""

import time

import numpy as np

from engine.device import F32, KERNEL, cuda, ld128, st128
from engine.device_graph import Buffers
from engine.errors import PlanError

PROBE_BYTES, PROBES = 16384, 20     # a row of the largest model's hidden state; exchanges timed
THREADS, MOST_BLOCKS = 256, 1024


class Transport:
    """Where what crosses the ranks lies. name: "pinned" or "device"."""

    def __init__(self, world, name):
        self.name = name
        self._mapped = name == "pinned" and world.size > 1      # alone, nothing crosses

    def buffer(self, buffers, name, *shape, dtype=np.float32):
        """The Crossing `name` of buffers, cut to shape."""
        return buffers.crossing(name, shape, dtype, self._mapped)

    def here(self, buffers, name, crossing, stream):
        """The array in device memory: copied there, as the buffer `name`, where it is mapped."""
        if not self._mapped:
            return crossing.array
        held = buffers.take(name, *crossing.array.shape, dtype=crossing.array.dtype)
        copy(crossing.array, held, stream)
        return held


def choose(asked, world):
    """The transport for "auto", "pinned" or "device". PlanError for a device that MPI cannot do."""
    pinned, direct = Transport(world, "pinned"), Transport(world, "device")
    if world.size == 1 or asked == "pinned":
        return pinned
    if not world.cuda_aware():
        if asked == "device":
            raise PlanError("--transport device: this MPI is not CUDA-aware and would crash on a "
                            "device pointer", "--transport pinned, or an MPI built with CUDA")
        return pinned
    if asked == "device":
        return direct
    seconds = np.array([_probe(way, world) for way in (pinned, direct)])
    slowest = world.gather(seconds).max(axis=0)
    return (pinned, direct)[int(slowest.argmin())]


def _probe(way, world):
    """Seconds of PROBES exchanges of a decode step's size."""
    wire = way.buffer(Buffers(), "probe", world.size, PROBE_BYTES // 4).wire
    parts = [wire[r] for r in range(world.size)]
    exchange = world.repeated(([parts[world.rank]] * world.size, parts))
    exchange()                  # the first one makes connections
    started = time.perf_counter()
    for _ in range(PROBES):
        exchange()
    return time.perf_counter() - started


# ---- copies -------------------------------------------------------------------------------------

@cuda.jit(**KERNEL)
def _copy_kernel(source, target):
    # grid-stride over 16 bytes, then over the words that are left
    quads = source.size // 4
    for i in range(cuda.grid(1), quads, cuda.gridsize(1)):
        a, b, c, d = ld128(source, 4 * i)
        st128(target, 4 * i, a, b, c, d)
    for i in range(4 * quads + cuda.grid(1), source.size, cuda.gridsize(1)):
        target[i] = source[i]


def copy(source, target, stream):
    """target = source, arrays of one shape and dtype, each at a multiple of 16 bytes, mapped or in
    device memory."""
    assert source.shape == target.shape and source.dtype == target.dtype, (source, target)
    if source.size:
        source, target = (a.reshape(a.size).view(np.uint32) for a in (source, target))
        blocks = min(-(-source.size // (4 * THREADS)), MOST_BLOCKS)
        _copy_kernel[blocks, THREADS, stream](source, target)


# ---- heads of all ranks, rank by rank ----------------------------------------------------------

def head_spans(heads):
    """Device int32 [H, 2]: first head and number of heads of the rank that owns head h.

    heads: (start, stop) of every rank, ascending.
    """
    return cuda.to_device(np.array([(a, b - a) for a, b in heads for _ in range(a, b)], np.int32))


@cuda.jit(**KERNEL)
def _gather_heads_kernel(parts, spans, whole):
    # grid (heads, n), THREADS of every THREADS-th column
    h, i = cuda.blockIdx.x, cuda.blockIdx.y
    n, width = whole.shape[0], whole.shape[2]
    at = (n * spans[h, 0] + i * spans[h, 1] + h - spans[h, 0]) * width
    for d in range(cuda.threadIdx.x, width, THREADS):
        whole[i, h, d] = parts[at + d]


@cuda.jit(**KERNEL)
def _scatter_heads_kernel(whole, spans, first, mine, parts):
    # grid (heads, n), THREADS of every THREADS-th column
    h, i = cuda.blockIdx.x, cuda.blockIdx.y
    n, width = whole.shape[0], whole.shape[2]
    own = h - first
    at = (n * spans[h, 0] + i * spans[h, 1] + h - spans[h, 0]) * width
    for d in range(cuda.threadIdx.x, width, THREADS):
        if 0 <= own and own < mine.shape[1]:
            mine[i, own, d] = whole[i, h, d]
        else:
            parts[at + d] = whole[i, h, d]


def gather_heads(parts, spans, whole, stream):
    """whole [n, H, width] float32 from flat parts, rank by rank."""
    n, heads, width = whole.shape
    assert parts.size == whole.size and spans.shape == (heads, 2), (parts.shape, whole.shape)
    _gather_heads_kernel[(heads, n), THREADS, stream](parts, spans, whole)


def scatter_heads(whole, spans, first, mine, parts, stream):
    """Flat parts, rank by rank, from whole [n, H, width] float32; the own heads, from `first` on,
    go to mine [n, own, width] instead."""
    n, heads, width = whole.shape
    assert parts.size == whole.size and spans.shape == (heads, 2), (parts.shape, whole.shape)
    assert mine.shape[0] == n and mine.shape[2] == width, (mine.shape, whole.shape)
    _scatter_heads_kernel[(heads, n), THREADS, stream](whole, spans, first, mine, parts)


# ---- a rank's part of a sum --------------------------------------------------------------------

@cuda.jit(**KERNEL)
def _sum_parts_kernel(parts, count, y):
    # grid-stride over the elements of y
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        total = F32(0.0)
        if count:
            total = parts[i]
        for p in range(1, count):
            total += parts[p * y.size + i]
        y[i] = total


def sum_parts(parts, count, y, stream):
    """y [n, D] = the sum of first `count` of parts [m, n, D], float32, ascending; 0 of none."""
    assert parts.shape[1:] == y.shape and 0 <= count <= parts.shape[0], (parts.shape, y.shape)
    if y.size:
        _sum_parts_kernel[-(-y.size // THREADS), THREADS, stream](
            parts.reshape(parts.size), count, y.reshape(y.size))


def zero(y, stream):
    """y [n, D] = 0, where this rank has nothing to add."""
    sum_parts(y.reshape(1, *y.shape), 0, y, stream)
