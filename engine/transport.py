"""How device arrays cross the ranks: staged through pinned host memory, or handed to the MPI
itself.

`exchange(buffers, name, pairs, cut)` takes (outgoing, incoming) pairs of W device arrays each, as
World.exchange takes host arrays; the stream's work before it is done when they travel, and what
is launched after it finds them arrived. `cut` is the walk's: the host acts there, between two
graphs.

| transport | what travels | for |
|---|---|---|
| pinned | copies in pinned host memory | any MPI; a Spark, whose NIC cannot read device memory |
| device | the device arrays | a CUDA-aware MPI; it is asked, others crash on a device pointer |

`auto` takes whichever moves a decode step's sums faster, by a probe at start; ranks decide from
the same times.
"""

import time

import numpy as np

from engine.device import KERNEL, cuda
from engine.errors import PlanError

PROBE_BYTES, PROBES = 16384, 20     # a row of the largest model's hidden state; exchanges timed


class Pinned:
    """Through pinned host memory."""

    name = "pinned"

    def __init__(self, world, stream):
        self._world, self._stream = world, stream

    def exchange(self, buffers, name, pairs, cut):
        """See the module; the pinned copies are `buffers`' by `name`."""
        staged = []
        for k, (outgoing, incoming) in enumerate(pairs):
            hosts = {}
            for j, array in enumerate(outgoing):
                if id(array) not in hosts:      # one array for all ranks is copied once
                    host = buffers.pinned(f"{name} {k} to {j}", array.shape, array.dtype)
                    hosts[id(array)] = host
                    if array.size:
                        array.copy_to_host(host, stream=self._stream)
            staged.append(([hosts[id(a)] for a in outgoing],
                           [buffers.pinned(f"{name} {k} from {i}", a.shape, a.dtype)
                            for i, a in enumerate(incoming)]))
        cut(lambda: self._world.exchange(*staged))
        for (_, incoming), (_, hosts) in zip(pairs, staged):
            for array, host in zip(incoming, hosts):
                if array.size:
                    array.copy_to_device(host, stream=self._stream)


class Direct:
    """Device pointers in the hands of a CUDA-aware MPI."""

    name = "device"

    def __init__(self, world, stream):
        self._world, self._stream = world, stream

    def exchange(self, buffers, name, pairs, cut):
        """See the module."""
        cut(lambda: self._world.exchange(*pairs))


def choose(asked, world, stream, buffers):
    """The transport for "auto", "pinned" or "device". PlanError for a device that MPI cannot do."""
    pinned, direct = Pinned(world, stream), Direct(world, stream)
    if world.size == 1 or asked == "pinned":
        return pinned
    if not world.cuda_aware():
        if asked == "device":
            raise PlanError("--transport device: this MPI is not CUDA-aware and would crash on a "
                            "device pointer", "--transport pinned, or an MPI built with CUDA")
        return pinned
    if asked == "device":
        return direct
    seconds = np.array([_probe(way, world, stream, buffers) for way in (pinned, direct)])
    slowest = world.gather(seconds).max(axis=0)
    return (pinned, direct)[int(slowest.argmin())]


def _probe(way, world, stream, buffers):
    """Seconds of PROBES exchanges of a decode step's size."""
    mine = cuda.to_device(np.zeros(PROBE_BYTES // 4, np.float32))
    all_ = cuda.to_device(np.zeros((world.size, mine.size), np.float32))
    pair = [mine] * world.size, [all_[r] for r in range(world.size)]

    def cut(host_work):
        stream.synchronize()
        host_work()
    started = 0.0
    for turn in range(PROBES + 1):
        if turn == 1:       # the first one makes connections
            started = time.perf_counter()
        way.exchange(buffers, "probe", [pair], cut)
    stream.synchronize()
    return time.perf_counter() - started


# ---- heads of several ranks in one array --------------------------------------------------------

@cuda.jit(**KERNEL)
def _copy_heads_kernel(source, first, target, at):
    # grid (heads, n), 128 threads of every 128th column
    h, i = cuda.blockIdx.x, cuda.blockIdx.y
    for d in range(cuda.threadIdx.x, source.shape[2], 128):
        target[i, at + h, d] = source[i, first + h, d]


def copy_heads(source, first, target, at, count, stream):
    """target[:, at:at + count] = source[:, first:first + count], both [n, heads, width] float32."""
    assert source.shape[0] == target.shape[0] and source.shape[2] == target.shape[2]
    if count and source.shape[0]:
        _copy_heads_kernel[(count, source.shape[0]), 128, stream](source, first, target, at)
