# python -m pytest tests/test_checkpoint.py
"""The safetensors reader: bits and slices against other readers, FP8 against float64, bad files."""

import json
import mmap
import os
import sys

import numpy as np
import pytest
from safetensors import deserialize, safe_open
from safetensors.numpy import save_file

from engine.checkpoint import E4M3, HEADER_LIMIT, open_checkpoint, read_header
from engine.errors import ModelError
from hostile import bf16, data_of, dequantised, e4m3, header_of, pack_file, write_file
from hostile import values as bf16_values

RNG = np.random.default_rng(5)
SOUND = {"a": ("F32", np.arange(6, dtype=np.float32).reshape(2, 3)),
         "b": ("BF16", np.arange(4, dtype=np.uint16)),
         "c": ("F8_E4M3", np.arange(8, dtype=np.uint8).reshape(2, 4))}


def one(folder, tensors):
    write_file(folder / "model.safetensors", tensors)
    return open_checkpoint(str(folder))


# ---- what is read -----------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["tiny-bf16", "tiny-fp8"])
def test_every_tensor_equals_the_format_librarys(oracle, name):
    path = oracle / name / "model.safetensors"
    checkpoint = open_checkpoint(str(path.parent))
    theirs = dict(deserialize(path.read_bytes()))
    assert theirs.keys() == checkpoint.tensors.keys()
    for key, entry in theirs.items():
        ours = checkpoint.mapped(key)
        assert (checkpoint.kind(key), list(ours.shape)) == (entry["dtype"], entry["shape"])
        assert ours.tobytes() == bytes(entry["data"])


def test_shards_equal_the_format_librarys(mini):
    checkpoint = open_checkpoint(str(mini))
    assert len(checkpoint.tensors) == 536
    index = json.loads((mini / "model.safetensors.index.json").read_text())["weight_map"]
    seen = 0
    for shard in sorted(set(index.values())):
        with safe_open(mini / shard, framework="np") as file:
            for name in file.keys():
                if checkpoint.kind(name) == "F32":
                    assert np.array_equal(checkpoint.mapped(name), file.get_tensor(name))
                    seen += 1
    assert seen > 50


def test_files_of_the_format_library_are_read(tmp_path):
    theirs = {"x": RNG.standard_normal((5, 7)).astype(np.float32), "y": np.zeros(0, np.float32)}
    save_file(theirs, tmp_path / "model.safetensors", metadata={"format": "np"})
    checkpoint = open_checkpoint(str(tmp_path))
    assert np.array_equal(checkpoint.matrix("x", (1, 4), (2, 7)), theirs["x"][1:4, 2:7])
    assert checkpoint.vector("y").shape == (0,)


def test_vectors_are_new_float32(tmp_path):
    wide = RNG.standard_normal(9).astype(np.float32)
    checkpoint = one(tmp_path, {"f": ("F32", wide), "h": ("BF16", bf16(wide))})
    assert np.array_equal(checkpoint.vector("f", (2, 5)), wide[2:5])
    assert np.array_equal(checkpoint.vector("h", (2, 5)), bf16_values(bf16(wide))[2:5])
    assert checkpoint.vector("h", (9, 9)).shape == (0,)
    for name in "fh":
        vector = checkpoint.vector(name)
        assert vector.dtype == np.float32 and vector.flags.writeable
        assert not np.shares_memory(vector, checkpoint.mapped(name))


def test_the_mapping_cannot_be_written(tmp_path):
    with pytest.raises(ValueError):
        one(tmp_path, SOUND).mapped("a")[0, 0] = 1.0


def test_every_e4m3_code():
    assert np.array_equal(E4M3.astype(np.float64), e4m3(np.arange(256)), equal_nan=True)
    for code, value in ((0x38, 1.0), (0xB8, -1.0), (0x7E, 448.0), (0x01, 2.0 ** -9),
                        (0x08, 2.0 ** -6), (0x80, 0.0)):
        assert E4M3[code] == value
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()


SLICES = [(None, None), ((0, 300), (0, 200)), ((0, 128), (128, 200)), ((127, 129), (0, 1)),
          ((130, 299), (5, 190)), ((256, 300), (127, 128)), ((299, 300), (199, 200)),
          ((7, 7), None), (None, (150, 150)), ((300, 300), (200, 200))]


@pytest.mark.parametrize("scale_kind", ["F32", "BF16"])
@pytest.mark.parametrize("rows, columns", SLICES)
def test_fp8_slices_equal_float64(tmp_path, rows, columns, scale_kind):
    """Partial blocks at both edges: 300 x 200 has 3 x 2 scales. The product is exact in float64."""
    codes = RNG.integers(0, 127, (300, 200)).astype(np.uint8) | np.uint8(128) * (
        RNG.integers(0, 2, (300, 200)).astype(np.uint8))
    scales = RNG.uniform(1e-4, 3e-2, (3, 2)).astype(np.float32)
    stored = bf16(scales) if scale_kind == "BF16" else scales
    scales = bf16_values(stored) if scale_kind == "BF16" else scales
    checkpoint = one(tmp_path, {"w": ("F8_E4M3", codes), "w_scale_inv": (scale_kind, stored)})
    ours = checkpoint.matrix("w", rows, columns)
    theirs = dequantised(codes, scales)[slice(*rows or (None,)), slice(*columns or (None,))]
    assert ours.dtype == np.float32
    assert ours.tobytes() == theirs.astype(np.float32).tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")
@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3"])
def test_a_slice_touches_its_own_pages_only(tmp_path, kind):
    """Resident pages of the file's mapping after rows 1/8 of a 32 MiB matrix were read."""
    codes = np.zeros((2048, (1 << 25) // 2048 // (2 if kind == "BF16" else 1)),
                     np.uint16 if kind == "BF16" else np.uint8)
    scales = np.ones((-(-codes.shape[0] // 128), -(-codes.shape[1] // 128)), np.float32)
    checkpoint = one(tmp_path, {"w": (kind, codes), "w_scale_inv": ("F32", scales)})
    assert checkpoint.matrix("w", (256, 512)).sum() == 0.0
    resident = None
    for line in open("/proc/self/smaps"):
        if line.rstrip().endswith(str(tmp_path / "model.safetensors")):
            resident = 0
        elif resident == 0 and line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
    share = 1 << 22         # a fault may map the 2 MiB around it, at either end
    assert share <= resident <= share + (1 << 22) + 2 * mmap.PAGESIZE


# ---- what is refused: one file -----------------------------------------------------------------

def entry(**changes):
    """The sound file's header with entry "b" changed."""
    header = header_of(SOUND)
    header["b"] = {**header["b"], **changes}
    return header


DATA = data_of(SOUND)
TWICE = json.dumps(header_of(SOUND)).replace('"c"', '"b"').encode()
FILES = {
    "empty": (b"", "too few"),
    "seven bytes": (b"\x08\0\0\0\0\0\0", "too few"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "header too long": ((HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}", "limit"),
    "header longest": (b"\xff" * 8 + b"{}", "limit"),
    "header past the end": ((1000).to_bytes(8, "little") + b"{}", "1000 bytes but has 10"),
    "no JSON": (pack_file(b"\x00\x01garbage", DATA), "not JSON"),
    "no UTF-8": (pack_file(b'{"\xff": 1}', DATA), "not JSON"),
    "empty header": (pack_file(b"", b""), "not JSON"),
    "deep JSON": (pack_file(b"[" * 100_000, DATA), "not JSON"),
    "long number": (pack_file(b'{"b":' + b"9" * 10_000 + b"}", DATA), "not JSON"),
    "a list": (pack_file(b"[]", DATA), "not a JSON object"),
    "name twice": (pack_file(TWICE, DATA), "'b' is there twice"),
    "entry is no object": (pack_file({**header_of(SOUND), "b": 5}, DATA), "b in"),
    "no shape": (pack_file(entry(shape=None), DATA), "b in"),
    "negative shape": (pack_file(entry(shape=[-4]), DATA), "b in"),
    "true in shape": (pack_file(entry(shape=[True, 4]), DATA), "b in"),
    "fraction in shape": (pack_file(entry(shape=[4.0]), DATA), "b in"),
    "nine dimensions": (pack_file(entry(shape=[4] + [1] * 8), DATA), "b in"),
    "huge shape": (pack_file(entry(shape=[1 << 62] * 8), DATA), "b in"),
    "one offset": (pack_file(entry(data_offsets=[24]), DATA), "b in"),
    "offsets reversed": (pack_file(entry(data_offsets=[32, 24]), DATA), "b in"),
    "negative offset": (pack_file(entry(data_offsets=[-8, 0]), DATA), "b in"),
    "unknown dtype": (pack_file(entry(dtype="BF17"), DATA), "'BF17'"),
    "no dtype": (pack_file(entry(dtype=None), DATA), "None"),
    "shape against bytes": (pack_file(entry(shape=[5]), DATA), "takes 10 bytes"),
    "dtype against bytes": (pack_file(entry(dtype="F32"), DATA), "takes 16 bytes"),
    "overlap": (pack_file(entry(data_offsets=[20, 28]), DATA), "inside a"),
    "hole": (pack_file(entry(data_offsets=[25, 33]), DATA + b"\0"), "belong to nothing"),
    "past the end": (pack_file({"b": {"dtype": "BF16", "shape": [1 << 40],
                                      "data_offsets": [0, 1 << 41]}}, DATA), "truncated"),
    "truncated": (pack_file(header_of(SOUND), DATA[:-1]), "c in"),
    "truncated to nothing": (pack_file(header_of(SOUND), b""), "a in"),
    "bytes too many": (pack_file(header_of(SOUND), DATA + b"\0"), "describes"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused_by_name(tmp_path, case):
    data, says = FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(tmp_path))
    said = f"{caught.value} {caught.value.hint}"
    assert says in said and str(path) in said and caught.value.hint and len(said) < 1000


def test_any_single_changed_header_byte_is_refused_or_harmless(tmp_path):
    """Every byte of a sound file's length and header, flipped: a ModelError or a proper header."""
    sound = pack_file(header_of(SOUND), DATA)
    path = tmp_path / "model.safetensors"
    refused = 0
    for at in range(len(sound) - len(DATA)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x15]) + sound[at + 1:])
        try:
            read_header(str(path))
        except ModelError:
            refused += 1
    assert refused > 100


def test_a_missing_or_unreadable_file(tmp_path):
    with pytest.raises(ModelError, match="neither .* nor"):
        open_checkpoint(str(tmp_path))
    os.mkdir(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        open_checkpoint(str(tmp_path))


# ---- what is refused: an index -----------------------------------------------------------------

INDEXES = {
    "no JSON": (b"{", "not JSON"),
    "a list": (b"[]", "not a JSON object"),
    "no weight_map": (b"{}", "no weight_map"),
    "empty weight_map": (b'{"weight_map": {}}', "no weight_map"),
    "shard missing": (b'{"weight_map": {"a": "one", "z": "two"}}', "holds z"),
    "tensor not in shard": (b'{"weight_map": {"a": "one", "z": "one"}}', "does not hold z"),
    "path upward": (b'{"weight_map": {"a": "../one"}}', "'../one'"),
    "absolute path": (b'{"weight_map": {"a": "/etc/passwd"}}', "/etc/passwd"),
    "dots": (b'{"weight_map": {"a": ".."}}', "'..'"),
    "no name": (b'{"weight_map": {"a": ""}}', "no file name"),
    "zero byte": (b'{"weight_map": {"a": "o\\u0000"}}', "missing"),
    "a number": (b'{"weight_map": {"a": 1}}', "no file name"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_bad_index_is_refused_by_name(tmp_path, case):
    text, says = INDEXES[case]
    write_file(tmp_path / "one", SOUND)
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(tmp_path))
    assert says in str(caught.value) and str(tmp_path) in str(caught.value) and caught.value.hint


def test_an_index_counts_over_a_single_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    write_file(tmp_path / "one", SOUND)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"c": "one"}}')
    assert list(open_checkpoint(str(tmp_path)).tensors) == ["c"]
