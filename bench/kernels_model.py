"""python bench/kernels_model.py: the kernels of engine/model at the model's real dimensions.

A line a kernel and number of rows: microseconds a call inside a CUDA graph, and the bytes that it
must move over that time, as a share of what the device reaches copying 1 GiB. Calls walk through as
many sets of weights or states as the model has layers, so that nothing is found in L2 which a
decode step would have pushed out.
"""

import argparse
import pathlib
import sys
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import engine.config  # noqa: E402

engine.config.prepare_environment()

import numpy as np  # noqa: E402
from cuda.bindings import driver  # noqa: E402

from engine.device import cuda, ldg128, st128  # noqa: E402
from engine.gemm import gemm  # noqa: E402
from engine.model import dense, embed, hyper_cuda, kda_cuda, mix_cuda, moe, norm  # noqa: E402

HIDDEN, STREAMS, EXPERTS, PICKS, VOCAB, HEADS, DIM, INTER = 4096, 4, 288, 8, 154880, 64, 128, 2048
Q_LORA, KV_LORA = 1536, 512
SITES, MOE_LAYERS, KDA_LAYERS = 90, 42, 34
SHAPE = SimpleNamespace(eps=1e-5, hc_eps=1e-6, hc_iters=20)
ROWS = (1, 2, 8, 2048)
REPLAYS = 5


def made(shape, dtype=np.float32):
    """A device array of harmless numbers, filled there."""
    array = cuda.device_array(shape, dtype)
    flat = array.reshape(array.size)
    value = {np.dtype(np.float32): np.float32(0.01), np.dtype(np.uint16): np.uint16(0x3C24)}
    _fill[1024, 256](flat, value.get(array.dtype, array.dtype.type(0)))
    return array


@cuda.jit
def _fill(array, value):
    for i in range(cuda.grid(1), array.size, cuda.gridsize(1)):
        array[i] = value


def timed(launches):
    """Microseconds a launch: `launches` (functions of a stream) captured once and replayed."""
    stream = cuda.stream()
    launches[0](stream)                     # compiles outside the capture
    stream.synchronize()
    handle = int(getattr(stream.handle, "value", stream.handle))
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.cuStreamBeginCapture(handle, mode)
    for launch in launches:
        launch(stream)
    error, graph = driver.cuStreamEndCapture(handle)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    error, ready = driver.cuGraphInstantiate(graph, 0)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    driver.cuGraphLaunch(ready, handle)
    stream.synchronize()
    times = []
    for _ in range(REPLAYS):
        start, stop = cuda.event(), cuda.event()
        start.record(stream)
        driver.cuGraphLaunch(ready, handle)
        stop.record(stream)
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(launches))
    return min(times)


@cuda.jit
def _copy_kernel(source, target):
    # a step moves 4 x 16 bytes a thread; the grid divides the arrays
    step = cuda.gridsize(1) * 4
    for at in range(cuda.grid(1) * 4, source.size, 4 * step):
        a, b = ldg128(source, at), ldg128(source, at + step)
        c, d = ldg128(source, at + 2 * step), ldg128(source, at + 3 * step)
        st128(target, at, a[0], a[1], a[2], a[3])
        st128(target, at + step, b[0], b[1], b[2], b[3])
        st128(target, at + 2 * step, c[0], c[1], c[2], c[3])
        st128(target, at + 3 * step, d[0], d[1], d[2], d[3])


def copy_speed():
    """GB/s of a device copy of 1 GiB, bytes read plus bytes written: the yardstick of every bench.

    The better of the driver's copy, which reached 2,770 GB/s on an H200, and of a kernel.
    """
    a, b = made(2 ** 28, np.uint32), made(2 ** 28, np.uint32)
    ways = (lambda stream: b.copy_to_device(a, stream=stream),
            lambda stream: _copy_kernel[2048, 256, stream](a, b))
    return 2 * a.nbytes / min(timed([way] * 10) for way in ways) / 1e3


# ---- kernels: each returns (launches, bytes a launch) ------------------------------------------

def embed_rows(n):
    table, streams = made((n, HIDDEN), np.uint16), made((n, STREAMS, HIDDEN))
    pick, seats = cuda.to_device(np.arange(n, dtype=np.int32)), made(n, np.int32)
    return ([lambda s: embed.embed_cuda(table, pick, seats, streams, s)] * 20,
            table.nbytes + streams.nbytes)


def rms_norm(n):
    """Of a query's low-rank part, as a DSA layer has it."""
    x, out, weight = made((n, Q_LORA + KV_LORA)), made((n, Q_LORA), np.uint16), made(Q_LORA)
    seats = made(n, np.int32)
    return ([lambda s: norm.rms_norm_cuda(x, 0, weight, 1e-5, seats, out, 0, s)] * 20,
            4 * n * Q_LORA + out.nbytes)


class Site:
    """What the two halves of a site work on."""

    def __init__(self, n):
        self.fn = [made((hyper_cuda.OUTPUTS, STREAMS * HIDDEN), np.uint16) for _ in range(SITES)]
        self.streams, self.y = made((n, STREAMS, HIDDEN)), made((1, n, HIDDEN))
        self.seats, self.sums = made(n, np.int32), made((n, hyper_cuda.parts(HIDDEN),
                                                         hyper_cuda.SUMS))
        self.post, self.comb = made((n, STREAMS)), made((n, STREAMS, STREAMS))


def hyper_in(n):
    site, base, scale, weight = Site(n), made(hyper_cuda.OUTPUTS), made(3), made(HIDDEN)
    x = made((1, n, HIDDEN), np.uint16)
    return ([lambda s: mix_cuda.hyper_in_cuda(site.streams, site.sums, base, scale, SHAPE, weight,
                                              site.seats, x, site.post, site.comb, s, s)] * 20,
            site.streams.nbytes + site.sums.nbytes + x.nbytes)


def hyper_out(n):
    """With the sums for the next site."""
    site = Site(n)

    def launch(fn):
        return lambda s: hyper_cuda.hyper_out_cuda(site.streams, site.y, site.post, site.comb, fn,
                                                   site.seats, site.sums, s)
    return ([launch(fn) for fn in site.fn],
            2 * site.streams.nbytes + site.y.nbytes + site.fn[0].nbytes + site.sums.nbytes)


def route(n):
    gates = [made((EXPERTS, HIDDEN), np.uint16) for _ in range(MOE_LAYERS)]
    x, bias, seats = made((3 * n, HIDDEN), np.uint16), made(EXPERTS), made(n, np.int32)
    flat = made((3 * n, EXPERTS))
    logits = flat.reshape(3, n, EXPERTS)
    chosen, weights = made((n, PICKS), np.int32), made((n, PICKS))

    def launch(w):
        def run(s):
            gemm(x, w, flat, s)
            moe.choose_cuda(logits, bias, 2.5, seats, chosen, weights, s)
        return run
    return [launch(w) for w in gates], gates[0].nbytes + x.nbytes + 2 * logits.nbytes


def swiglu(n):
    gate_up, out = made((n * PICKS, 2 * INTER)), made((n * PICKS, INTER), np.uint16)
    seats = made(n, np.int32)
    return ([lambda s: dense.swiglu_cuda(gate_up, 10.0, PICKS, seats, out, s)] * 20,
            gate_up.nbytes + out.nbytes)


def kda(n):
    """All between the two big products: up to 8 rows of as many seats, or a chunk of one seat."""
    seats_held = n if n <= 8 else 1
    wide = HEADS * DIM
    states = [made((seats_held, HEADS, DIM, DIM)) for _ in range(KDA_LAYERS)]
    history, rows = made((seats_held, 3, 3 * wide)), made((n, 3 * wide + 2 * DIM + HEADS))
    seats = cuda.to_device(np.arange(n, dtype=np.int32) % seats_held)
    factors, o = made((n, HEADS, 4 * DIM + 4)), made((n, wide))
    out = made((n, wide), np.uint16)

    def launch(state):
        w = SimpleNamespace(
            f_b=SimpleNamespace(w=made((wide, DIM), np.uint16)),
            g_b=SimpleNamespace(w=made((wide, DIM), np.uint16)), conv=made((3 * wide, 4)),
            decay=made(HEADS), dt_bias=made(wide), o_norm=made(DIM))
        return lambda s: kda_cuda.kda_cuda(rows, w, -5.0, 1e-5, seats, state, history, factors, o,
                                           out, s)
    moved = 2 * states[0].nbytes + 4 * wide * DIM + rows.nbytes + out.nbytes
    if n > kda_cuda.FEW:
        moved += 2 * factors.nbytes + 2 * o.nbytes
    return [launch(state) for state in states], moved


def bench(rows=ROWS):
    """Print a line for each kernel and number of rows."""
    copy = copy_speed()
    print(f"device copy {copy:.0f} GB/s")
    print("kernel       rows        us     GB/s  of copy")
    for kernel in (embed_rows, rms_norm, hyper_in, hyper_out, route, swiglu, kda):
        for n in rows:
            launches, moved = kernel(n)
            us = timed(launches)
            speed = moved / us / 1e3
            print(f"{kernel.__name__:10} {n:6} {us:9.1f} {speed:8.0f} {speed / copy:8.2f}",
                  flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    bench(parser.parse_args().rows)
