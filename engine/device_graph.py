"""Device buffers by name, and a walk of launches captured once into CUDA graphs and replayed.

A walk is a function that launches kernels and calls `cut(host_work)` where the host must act
between kernels (an exchange between ranks). The first run is eager: it compiles the kernels and
sizes the buffers. `capture` runs the walk again and records one graph for each stretch between
cuts; `replay` launches them with the host's work in between. Nothing is allocated after the eager
run, so addresses stay. A kernel launched from Python costs about 18 us, one inside a graph 0.9 us
(H200).

Inside a stretch, kernels that do not wait for each other may lie on a second stream (`Side`): the
graph then runs them at the same time. That changes no bit as long as they write different buffers.
"""

from typing import NamedTuple

import numpy as np

try:
    from cuda.bindings import driver
except ImportError:             # no CUDA here: then no walk is ever made
    driver = None

from engine.device import cuda
from engine.errors import FaultError


def _check(result):
    """The value of a driver call; FaultError with the driver's own name for a failure."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        name = driver.cuGetErrorName(code)[1]
        raise FaultError(f"the CUDA driver answered {name.decode() if name else code}",
                         "look at nvidia-smi and the kernel log; free device memory if it is short")
    return values[0] if values else None


class Crossing(NamedTuple):
    """One array as both sides see it.

    array: what kernels take. wire: what the host or the MPI takes: a NumPy array over the same
    bytes where they are mapped, the device array itself where the MPI reads device memory.
    """

    array: object
    wire: object

    def cut(self, size, shape):
        """The first `size` elements, in a shape."""
        return Crossing(self.array[:size].reshape(shape), self.wire[:size].reshape(shape))


class Buffers:
    """Named arrays that grow until they are `fixed`: in device memory, or mapped (pinned host
    memory that kernels reach in place).

    A name has one dtype and one kind. Content is whatever it last held, zeros at first.
    """

    def __init__(self):
        self._flat, self._views = {}, {}
        self.fixed = False

    def take(self, name, *shape, dtype=np.float32):
        """The device array `name`, cut to shape."""
        return self.crossing(name, shape, dtype, False).array

    def pinned(self, name, shape, dtype=np.float32):
        """The host's side of the mapped array `name`, cut to shape."""
        return self.crossing(name, shape, dtype, True).wire

    def crossing(self, name, shape, dtype, mapped):
        """The array `name`, mapped or in device memory, cut to shape."""
        views = self._views.setdefault(name, {})
        found = views.get(shape)
        if found is None:
            size = int(np.prod(shape, dtype=np.int64))
            flat = self._flat.get(name)
            if flat is None or flat.array.size < size:
                assert not self.fixed, f"buffer {name} would move to grow to {shape}"
                views.clear()
                flat = self._flat[name] = (_mapped if mapped else _held)(max(size, 1), dtype)
            found = views[shape] = flat.cut(size, shape)
        assert found.array.dtype == dtype, (name, found.array.dtype, dtype)
        return found

    def name(self, name, array):
        """Let `take` give this array for that name and its shape: a part of another buffer."""
        self._views.setdefault(name, {})[array.shape] = Crossing(array, array)


def _held(size, dtype):
    array = cuda.to_device(np.zeros(size, dtype))
    return Crossing(array, array)


def _mapped(size, dtype):
    mapped = cuda.mapped_array(size, dtype)
    wire = np.ndarray.view(mapped, np.ndarray)      # Numba's class has a view of its own
    wire[:] = 0
    return Crossing(cuda.as_cuda_array(mapped), wire)


class Side:
    """A second stream for kernels that need not wait for the main one's.

    `fork` gives the stream, behind all that the main one has been given so far; `mark` is a place
    in it that `join` lets the main stream wait for. All that was launched on it is joined before
    the next cut. With `stream` the main one itself, everything is in one line.
    """

    def __init__(self, main, stream):
        self.main, self.stream = main, stream

    def fork(self):
        """The stream to launch on."""
        if self.stream is not self.main:
            _recorded(self.main).wait(self.stream)
        return self.stream

    def mark(self):
        """The end of what has been launched on it."""
        return None if self.stream is self.main else _recorded(self.stream)

    def join(self, mark):
        """Let the main stream wait for a mark."""
        if mark is not None:
            mark.wait(self.main)


def _recorded(stream):
    event = cuda.event(timing=False)
    event.record(stream)
    return event


class Walk:
    """One walk over n rows: eager, captured or replayed. launches(cut): what it launches."""

    def __init__(self, stream, launches):
        self.stream, self._launches = stream, launches
        self._handle = int(getattr(stream.handle, "value", stream.handle))
        self._steps = []            # graph executables and host functions, in order
        self._capturing = False
        self._beside = None         # host work for after the launch of the stretch that is recorded

    def run(self):
        """Once, without a graph."""
        self._launches(self._cut)
        self.stream.synchronize()

    def capture(self):
        """Record the walk; `run` has been called before."""
        self._steps, self._capturing = [], True
        with cuda.defer_cleanup():      # freeing memory would end the capture
            self._begin()
            self._launches(self._cut)
            self._close()
        self._capturing = False

    def replay(self):
        """Launch what was captured, and wait for it."""
        for step in self._steps:
            if callable(step):
                step()
            else:
                _check(driver.cuGraphLaunch(step, self._handle))
        self.stream.synchronize()

    def _cut(self, host_work, beside=False):
        """host_work() after the kernels so far and before the next ones; `beside`: while the next
        ones run, which then touch nothing that it touches."""
        if not self._capturing:
            self.stream.synchronize()
            return host_work()
        self._close()
        self._steps.append(self.stream.synchronize)
        if beside:
            self._beside = host_work
        else:
            self._steps.append(host_work)
        self._begin()

    def _close(self):
        self._end()
        if self._beside is not None:
            self._steps.append(self._beside)
            self._beside = None

    def _begin(self):
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _check(driver.cuStreamBeginCapture(self._handle, mode))

    def _end(self):
        graph = _check(driver.cuStreamEndCapture(self._handle))
        self._steps.append(_check(driver.cuGraphInstantiate(graph, 0)))
