"""Matrix kernels on the device: GB/s of weights against the device's own copy speed.

    python bench/kernels_gemm.py            # dimensions of GLM-5.3-Flash, rows 1, 2, 8
    python bench/kernels_gemm.py --forms    # forms of the few-row kernels beside gemm()'s choice
    python bench/kernels_gemm.py --rows 2048

Weights rotate through copies larger than any L2; launches are captured in a CUDA graph, so that
Python's time does not count. Copy speed: bytes read and written a second by a device copy of 1 GiB.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import engine.config  # noqa: E402

engine.config.prepare_environment()

import numpy as np  # noqa: E402
from cuda.bindings import driver  # noqa: E402

from kernels_model import copy_speed  # noqa: E402

from engine import gemm as products  # noqa: E402
from engine import gemm_experts, gemm_few, gemm_ring  # noqa: E402
from engine.device import cuda  # noqa: E402
from engine.gemm_parts import THREADS  # noqa: E402

SPREAD = 400 << 20              # bytes of weights that launches rotate through
SIZES = [(4096, 4096, 1), (8192, 4096, 1), (16384, 4096, 1), (154880, 4096, 1), (4096, 8192, 1),
         (4096, 16384, 1), (1536, 4096, 1), (512, 4096, 1), (128, 4096, 1), (32, 4096, 1),
         (16384, 1536, 1), (8192, 128, 1), (512, 256, 64), (256, 512, 64), (4096, 2048, 1)]


def checked(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def seconds(launch, stream, calls):
    """Time of one launch(i, stream), i < calls, inside a graph of all of them."""
    launch(0, stream)
    stream.synchronize()
    handle = int(getattr(stream.handle, "value", stream.handle))
    checked(driver.cuStreamBeginCapture(
        handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    for i in range(calls):
        launch(i, stream)
    graph = checked(driver.cuGraphInstantiate(checked(driver.cuStreamEndCapture(handle)), 0))
    best = np.inf
    for _ in range(3):
        start, end = cuda.event(), cuda.event()
        start.record(stream)
        checked(driver.cuGraphLaunch(graph, handle))
        end.record(stream)
        end.synchronize()
        best = min(best, start.elapsed_time(end) / calls / 1e3)
    return best


def random_weights(rng, fp8, shape):
    """One device array of random bits: finite BF16 around 1, or e4m3 without NaN codes."""
    count = int(np.prod(shape))
    piece = rng.integers(0, 0x70, 1 << 22).astype(np.uint8) if fp8 else \
        rng.integers(0x3F00, 0x3FC0, 1 << 22).astype(np.uint16)
    return cuda.to_device(np.resize(piece, count).reshape(shape))


def bench_gemm(rows, forms, stream, copy):
    rng = np.random.default_rng(0)
    for fp8 in (False, True):
        for N, K, G in SIZES:
            grouped = (G,) if G > 1 else ()
            size = G * N * K * (1 if fp8 else 2)
            count = max(1, min(64, SPREAD // size))
            held = [random_weights(rng, fp8, (*grouped, N, K)) for _ in range(count)]
            scales = cuda.to_device(np.ones((*grouped, -(-N // 128), -(-K // 128)), np.float32)) \
                if fp8 else None
            for n in rows:
                x = random_weights(rng, False, (n, *grouped, K))
                y = cuda.device_array((n, *grouped, N), np.float32)
                calls = max(count, 20) if n < 100 else count

                def report(name, launch):
                    t = seconds(launch, stream, calls)
                    print(f"{'fp8 ' if fp8 else 'bf16'} {G:2} x {N:6} x {K:5} rows {n:4} {name:16}"
                          f"{t * 1e6:9.1f} us {size / t / 1e9:6.0f} GB/s {size / t / copy:5.2f} of "
                          f"copy {2e-12 * n * G * N * K / t:7.1f} TFLOP/s", flush=True)
                report("gemm", lambda i, s: products.gemm(x, held[i % count], y, s, scales))
                if not forms or n > 8:
                    continue
                flat = products.flat
                scale, shift, blocks = products.check(x, held[0], scales, G, N, K)
                table = [(gemm_few.gemv_kernel, (2, 2)), (gemm_few.gemv_kernel, (2, 4)),
                         (gemm_few.gemv_kernel, (4, 2)), (gemm_ring.ring_kernel, (1, 1, 2, False))]
                if K <= 512:
                    table.append((gemm_ring.ring_kernel, (1, 1, 2, True)))
                for make, form in table:
                    kernel = make(*form)
                    grid = (-(-N // (8 * form[0] * (8 if form[-1] is True else 1))), G)
                    report(f"{make.__name__[:4]} {form}", lambda i, s: kernel[grid, THREADS, s](
                        flat(x), flat(held[i % count]), flat(y) if scale is None else scale,
                        flat(y), n, N, K, G, shift, blocks, False))


def bench_experts(rows, stream, copy):
    rng = np.random.default_rng(1)
    E, picks, D = 288, 8, 4096
    for fp8 in (False, True):
        for c in (2048, 384):
            up, down = (random_weights(rng, fp8, s) for s in ((E, 2 * c, D), (E, D, c)))
            scales = [None, None]
            if fp8:
                scales = [cuda.to_device(np.ones((E, a // 128, b // 128), np.float32))
                          for a, b in ((2 * c, D), (D, c))]
            for n in rows:
                calls = 8 if n < 100 else 2
                routes = [np.array([np.sort(rng.permutation(E)[:picks]) for _ in range(n)],
                                   np.int32) for _ in range(calls)]
                used = np.mean([len(np.unique(r)) for r in routes])
                chosen = [cuda.to_device(r) for r in routes]
                share = cuda.to_device(np.full((n, picks), 1 / picks, np.float32))
                x = random_weights(rng, False, (n, D))
                y = cuda.device_array((n, D), np.float32)
                act = cuda.device_array((n * picks, c), np.uint16)
                space = gemm_experts.Space(
                    cuda.device_array(n * picks, np.int32),
                    cuda.device_array((n * picks // 64 + E, 3), np.int32),
                    cuda.device_array((n * picks, D), np.float32)) if n > 32 else None
                t = seconds(lambda i, s: gemm_experts.experts(
                    x, chosen[i], share, up, down, 10.0, y, act, s, *scales, space), stream, calls)
                size = used * 3 * c * D * (1 if fp8 else 2)
                print(f"{'fp8 ' if fp8 else 'bf16'} experts c {c:4} rows {n:4} used {used:5.1f}"
                      f"{t * 1e6:9.1f} us {size / t / 1e9:6.0f} GB/s {size / t / copy:5.2f} of copy"
                      f" {6e-12 * n * picks * c * D / t:7.1f} TFLOP/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--forms", action="store_true")
    options = parser.parse_args()
    stream = cuda.stream()
    copy = copy_speed() * 1e9
    print(f"copy {copy / 1e9:.0f} GB/s")
    bench_gemm(options.rows, options.forms, stream, copy)
    bench_experts(options.rows, stream, copy)


if __name__ == "__main__":
    main()
