# python -m pytest tests/device/test_loading.py
"""From file to device in pieces: the values, the bytes planned, the host memory it takes, refusals.

What needs no GPU runs on a stand-in for Numba's `cuda` whose device arrays lie in host memory.
"""

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from engine import device_weights, slices
from engine.checkpoint import E4M3, open_checkpoint
from engine.device import available, cuda
from engine.device_weights import DeviceLoader, Matrix, Sender, load_device_weights
from engine.errors import ModelError
from engine.host import from_bf16, to_bf16
from engine.linear import BLOCK, Group, Linear
from engine.memory import weight_bytes
from engine.model.thirds import THIRDS, thirds
from engine.shape import part
from engine.slices import PIECE, Reader, Slice, Stack, pieces, rows_a_scale
from engine.weights import _resident, load_weights, open_model
from hostile import bf16, pack_file, rewrite, stored, write_file

ROOT = Path(__file__).resolve().parents[2]
LM = "model.language_model."
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not available(), reason="no CUDA device answers")]


class FakeArray(np.ndarray):
    """A device array as the loader uses it."""

    def copy_to_device(self, source, stream=0):
        assert source.size == self.size and source.dtype == self.dtype
        self[...] = source

    def copy_to_host(self):
        return np.array(self)


class Swallowing(FakeArray):
    """Takes what is sent and keeps nothing, so that it never becomes resident."""

    def copy_to_device(self, source, stream=0):
        assert source.size == self.size


def fake(kind=FakeArray):
    """A `cuda` whose device is the host."""
    event = types.SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    return types.SimpleNamespace(
        device_array=lambda size, dtype: np.empty(size, dtype).view(kind),
        to_device=lambda array: np.array(array).view(kind), pinned_array=np.empty,
        stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
        event=lambda timing: event)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(device_weights, "cuda", fake())
    monkeypatch.setattr(device_weights, "thirds_cuda",
                        lambda matrix, out, stream: np.copyto(out, thirds(matrix)))
    monkeypatch.setattr(device_weights, "PIECE", 1 << 18)   # many pieces of small models
    monkeypatch.setattr(slices, "RUN", 1 << 15)
    monkeypatch.setattr(slices, "BLOCK", 1 << 12)


# ---- values and bytes --------------------------------------------------------------------------

def unpacked(held):
    """A host Linear or Group as float32 [.., rows, columns]."""
    w = held.w if isinstance(held, Group) else held.w[None]
    flat = w.transpose(0, 1, 3, 2).reshape(len(w), w.shape[1] * BLOCK, w.shape[2])[:, :held.rows]
    flat = from_bf16(flat) if flat.dtype == np.uint16 else flat
    return flat if isinstance(held, Group) else flat[0]


def same(ours, theirs, where=""):
    """A device tree against the host's: FP8, BF16 and thirds exact, all else rounded once."""
    if isinstance(theirs, (Linear, Group)):
        assert isinstance(ours, Matrix), where
        w, values = ours.w.copy_to_host(), unpacked(theirs)
        if w.shape[-2] == THIRDS * values.shape[-2] and values.size:
            assert w.tobytes() == thirds(np.ascontiguousarray(values)).tobytes(), where
            return
        assert w.shape == values.shape and (ours.scales is None) == (w.dtype != np.uint8), where
        if w.dtype == np.uint8:
            scales = ours.scales.copy_to_host()
            by = next(r for r in slices.SCALE_ROWS if scales.shape[-2] == -(-w.shape[-2] // r))
            scales = np.repeat(np.repeat(scales, by, -2)[..., :w.shape[-2], :], 128, -1)
            found = E4M3[w] * scales[..., :w.shape[-1]]
            assert found.tobytes() == values.tobytes(), where
        else:
            assert w.tobytes() == to_bf16(np.ascontiguousarray(values)).tobytes(), where
    elif isinstance(theirs, np.ndarray):
        assert ours.copy_to_host().tobytes() == theirs.tobytes() and ours.shape == theirs.shape
    elif isinstance(theirs, tuple):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{where}.{getattr(theirs, '_fields', range(len(theirs)))[i]}")
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("world", (1, 2, 3, 8))
@pytest.mark.parametrize("name", ("tiny-bf16", "tiny-fp8", "mini"))
def test_the_device_holds_what_the_host_does_and_the_plan_says(oracle, mini, device, name, world):
    shape, checkpoint = open_model(str(mini if name == "mini" else oracle / name))
    for rank in (0, world - 1):
        own, calls = part(shape, rank, world), []
        ours = load_device_weights(checkpoint, shape, own, lambda *done: calls.append(done))
        theirs = load_weights(checkpoint, shape, own)
        for one, other in zip(ours[1:5], theirs[1:5]):
            same(one, other)
        sizes = _resident(ours.layers, ours.norm, ours.head, ours.mtp)
        assert {**sizes, "embedding": 0} == weight_bytes(shape, own, checkpoint.kind, "cuda")
        assert calls == sorted(calls) and calls[-1] == (sum(sizes.values()),) * 2


def loaded(checkpoint, names, drop=False, **slice_of):
    """Matrix of whole matrices (or some rows and columns) under each other, on the device."""
    with Reader(checkpoint, drop) as reader:
        load = DeviceLoader(checkpoint, None, None, Sender(reader))
        return load.pack([load.tensor(name, **slice_of) for name in names])


def checkpoint_of(folder, tensors):
    write_file(folder / "model.safetensors", tensors)
    return open_checkpoint(str(folder))


def fp8(rng, rows, columns):
    """{name: tensor} of a random FP8 matrix `w`."""
    codes = rng.integers(0, 127, (rows, columns)).astype(np.uint8)
    scales = rng.random((-(-rows // 128), -(-columns // 128))).astype(np.float32)
    return {"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scales)}


@pytest.mark.parametrize("rows, columns, by", [
    ((0, 300), (0, 200), 128), ((128, 256), (128, 200), 128), ((64, 300), (0, 200), 64),
    ((8, 40), (0, 128), 128), ((120, 200), (0, 200), 8), ((4, 300), (0, 200), None),
    ((0, 300), (64, 200), None), ((0, 0), (0, 200), 128)])
def test_a_slice_of_an_fp8_matrix(tmp_path, device, rows, columns, by):
    tensors = fp8(np.random.default_rng(3), 300, 200)
    checkpoint = checkpoint_of(tmp_path, tensors)
    ours = loaded(checkpoint, ["w"], rows=rows, columns=columns)
    values = checkpoint.matrix("w", rows, columns)
    assert ours.w.dtype == (np.uint8 if by else np.uint16) and ours.w.shape == values.shape
    if by:
        assert ours.w.tobytes() == tensors["w"][1][slice(*rows), slice(*columns)].tobytes()
        assert ours.scales.shape[0] == -(-(rows[1] - rows[0]) // by)
        spread = np.repeat(np.repeat(ours.scales, by, 0)[:len(values)], 128, 1)
        assert (E4M3[ours.w] * spread[:, :values.shape[1]]).tobytes() == values.tobytes()
    else:
        assert ours.scales is None and ours.w.tobytes() == to_bf16(values).tobytes()


def test_rows_a_scale():
    assert rows_a_scale([(0, 2048), (0, 2048)]) == 128
    assert rows_a_scale([(128, 256), (384, 512)]) == 128
    assert rows_a_scale([(0, 96), (0, 96)]) == 32
    assert rows_a_scale([(0, 8), (16, 24)]) == 8
    assert rows_a_scale([(0, 4), (0, 4)]) is None


def test_one_bf16_expert_makes_all_bf16(oracle, tmp_path, device):
    source, name = oracle / "tiny-fp8", f"{LM}layers.1.mlp.experts.2.gate_proj.weight"
    tensors = dict(stored(source))
    tensors[name] = "BF16", bf16(np.random.default_rng(0).standard_normal(tensors[name][1].shape))
    del tensors[name + "_scale_inv"]
    rewrite(tmp_path, tensors, source)
    shape, checkpoint = open_model(str(tmp_path))
    own = part(shape, 0, 1)
    ours, theirs = (read(checkpoint, shape, own).layers[1].mlp
                    for read in (load_device_weights, load_weights))
    assert ours.gate_up.w.dtype == np.uint16 and ours.gate_up.scales is None
    same(ours, theirs)


# ---- pieces ------------------------------------------------------------------------------------

@pytest.mark.parametrize("limit", [1000, 4096, 1 << 20])
def test_pieces_are_bounded_and_hold_every_row_once(limit):
    stacks = [Stack.of([Slice(f"{g}.{n}", "F8_E4M3", (128, 128 + 7 * g), (0, 250))
                        for n in "ab"]) for g in (1, 2, 3)]
    found = list(pieces(stacks, limit))
    sizes = [sum(s.shape[0] * s.shape[1] * stacks[0].held.itemsize for s in p) for p in found]
    assert max(sizes) <= limit and sum(sizes) == stacks[0].held.itemsize * 250 * 2 * (7 + 14 + 21)
    assert [(s.name, r) for p in found for s in p for r in range(*s.rows)] == [
        (s.name, r) for stack in stacks for s in stack.slices for r in range(*s.rows)]


def grown(folder, columns, made):
    """Bytes by which host memory grew at most while 640 MiB of FP8 experts, all zeros and a hole
    on disk, were loaded; made(Matrix) looks at them."""
    experts, rows, width = 20, 2048, 1 << 14
    header, at = {}, 0
    for e in range(experts):
        for name, kind, size, length in (
                (f"w{e}", "F8_E4M3", [rows, width], rows * width),
                (f"w{e}_scale_inv", "F32", [rows // 128, width // 128], rows * width // 4096)):
            header[name] = {"dtype": kind, "shape": size, "data_offsets": [at, at + length]}
            at += length
    path = folder / "model.safetensors"
    start = pack_file(header, b"")
    path.write_bytes(start)
    os.truncate(path, len(start) + at)
    checkpoint = open_checkpoint(str(folder))
    with Reader(checkpoint) as reader:
        sender = Sender(reader)
        load = DeviceLoader(checkpoint, None, None, sender)
        before = peak(reset=True)
        matrix = load.pack_group([load.tensor(f"w{e}", columns=columns) for e in range(experts)])
        sender.wait()
        after = peak()
    assert sender.sent == matrix.w.size == experts * rows * (columns[1] - columns[0])
    made(matrix)
    return after - before


def peak(reset=False):
    """Peak resident bytes of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


counts_peaks = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK),
                                  reason="/proc/self/clear_refs is Linux's")
BOUND = 2 * PIECE + (48 << 20)      # two buffers, and what threads and driver take


@counts_peaks
@pytest.mark.parametrize("columns", [(0, 1 << 14), (128, 1 << 13)])
def test_host_memory_is_bounded_whatever_a_layer_holds(tmp_path, monkeypatch, columns):
    monkeypatch.setattr(device_weights, "cuda", fake(Swallowing))

    def larger(matrix):
        assert matrix.w.nbytes > 1.4 * BOUND
    assert grown(tmp_path, columns, larger) < BOUND


def resident(path):
    """Pages of a file in the page cache, by a fresh map's mincore."""
    import ctypes
    import mmap
    size = os.path.getsize(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as area:
        view = (ctypes.c_char * size).from_buffer(area)
        pages = -(-size // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        assert not ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(size), vector)
        del view
    return sum(v & 1 for v in vector)


@pytest.mark.parametrize("backend", ("device", "host"))
def test_the_page_cache_is_given_up(tmp_path, device, oracle, backend):
    rewrite(tmp_path, stored(oracle / "tiny-bf16"), oracle / "tiny-bf16")
    path = tmp_path / "model.safetensors"
    os.sync()                                           # what is dirty cannot be dropped
    shape, checkpoint = open_model(str(tmp_path))
    read = load_device_weights if backend == "device" else load_weights
    found = []
    for drop in (False, True):
        read(checkpoint, shape, part(shape, 0, 1), None, drop)
        found.append(resident(path))
    if found[0] < 100:
        pytest.skip("this file system keeps no page cache that mincore shows")
    assert found[1] < found[0] / 10, found


# ---- refusals ----------------------------------------------------------------------------------

@pytest.mark.parametrize("code", (0x7F, 0xFF))
@pytest.mark.parametrize("columns", ((0, 200), (128, 200), (64, 200)))
def test_nan_codes_are_refused_by_name(tmp_path, device, code, columns):
    tensors = fp8(np.random.default_rng(1), 300, 200)
    tensors["w"][1][257, 131] = code
    checkpoint = checkpoint_of(tmp_path, tensors)
    for read in (lambda: loaded(checkpoint, ["w"], columns=columns),
                 lambda: checkpoint.matrix("w", None, columns)):
        with pytest.raises(ModelError, match=f"^w in .*0x{code:02X}.* row 257, column 131$"):
            read()
    assert loaded(checkpoint, ["w"], rows=(0, 256)).w.shape == (256, 200)


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path, device, value):
    tensors = fp8(np.random.default_rng(1), 300, 200)
    tensors["w_scale_inv"][1][2, 1] = value
    checkpoint = checkpoint_of(tmp_path, tensors)
    for columns in ((0, 200), (64, 200)):
        with pytest.raises(ModelError, match="^w_scale_inv in .* holds .*(nan|inf)"):
            loaded(checkpoint, ["w"], columns=columns)
    with pytest.raises(ModelError, match="w_scale_inv"):
        checkpoint.matrix("w")


def test_a_file_cut_after_the_start_is_named(tmp_path, device):
    checkpoint = checkpoint_of(tmp_path, fp8(np.random.default_rng(1), 300, 200))
    checkpoint.mapped("w_scale_inv")
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(checkpoint.tensors["w"].start + 1000)
    with Reader(checkpoint) as reader, pytest.raises(ModelError, match="w in .* was cut"):
        whole = Slice("w", "F8_E4M3", (0, 300), (0, 200))
        reader.fill([whole], np.empty(60000, np.uint8), np.dtype(np.uint8))


# ---- on a device -------------------------------------------------------------------------------

class TestOnDevice:
    pytestmark = on_gpu

    @pytest.mark.parametrize("name", ("tiny-bf16", "tiny-fp8"))
    def test_the_device_holds_what_the_host_does(self, oracle, name):
        shape, checkpoint = open_model(str(oracle / name))
        own = part(shape, 0, 3)
        ours, theirs = (read(checkpoint, shape, own)
                        for read in (load_device_weights, load_weights))
        for one, other in zip(ours[1:5], theirs[1:5]):
            same(one, other)

    @counts_peaks
    def test_host_memory_is_bounded(self, tmp_path):
        def zeros(matrix):
            assert not matrix.w[0].copy_to_host().any() and matrix.w.nbytes > 3 * BOUND
        grown(tmp_path, (0, 1 << 14), zeros)            # the driver's own first allocations
        assert grown(tmp_path, (0, 1 << 14), zeros) < BOUND

    def test_a_pool_larger_than_the_device_is_refused(self):
        done = subprocess.run(
            [sys.executable, "-m", "engine", *"--weights random --shape glm-5.3-flash --layers 4 "
             "--context 1048576 --parallel 4096 --prompt-ids 5 --print-ids".split()],
            cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 4 and not done.stdout and "Traceback" not in done.stderr
        assert "rank 0 needs" in done.stderr and "KV latents" in done.stderr
        assert "GiB are free" in done.stderr and "fewer --pages" in done.stderr

    def test_what_the_plan_did_not_see_is_named_too(self):
        from engine.backend import device_memory
        from engine.errors import PlanError
        _, total = cuda.current_context().get_memory_info()
        with pytest.raises(PlanError, match="in spite of the plan.*OUT_OF_MEMORY"):
            with device_memory(0):
                cuda.device_array(2 * total, np.uint8)
