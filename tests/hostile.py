"""Safetensors files written byte by byte, so that a test can get any of them wrong, and what the
format's own library reads in a sound one.
"""

import functools
import json
import shutil

import numpy as np
from safetensors import deserialize

NUMPY = {"BF16": np.uint16, "F32": np.float32, "F8_E4M3": np.uint8, "U8": np.uint8,
         "F16": np.float16, "I64": np.int64}


def header_of(tensors):
    """{name: (kind, array)} -> the header dict with contiguous offsets, in the given order."""
    header, reached = {"__metadata__": {"format": "pt"}}, 0
    for name, (kind, array) in tensors.items():
        assert array.dtype == NUMPY[kind], (name, kind, array.dtype)
        header[name] = {"dtype": kind, "shape": list(array.shape),
                        "data_offsets": [reached, reached + array.nbytes]}
        reached += array.nbytes
    return header


def pack_file(header, data):
    """The bytes of a file with `header` (dict or raw bytes) before `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def data_of(tensors):
    """The data part of a file that holds these tensors."""
    return b"".join(array.tobytes() for _, array in tensors.values())


def write_file(path, tensors):
    """A sound file."""
    path.write_bytes(pack_file(header_of(tensors), data_of(tensors)))


def bf16(array):
    """Random test values -> BF16 bits by truncation, exact for what is already BF16."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def e4m3(codes):
    """float64 values of e4m3 codes, from the IEEE fields and not from a table."""
    codes = np.asarray(codes, np.int64)
    sign, exponent, mantissa = 1 - 2 * (codes >> 7), (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6),
                     np.ldexp(1 + mantissa / 8, exponent - 7))
    return np.where((codes & 127) == 127, np.nan, sign * value)


def dequantised(codes, scales):
    """float64 values of an FP8 matrix, each element with its own scale looked up."""
    row, column = np.indices(codes.shape)
    return e4m3(codes) * scales.astype(np.float64)[row // 128, column // 128]


def values(bits):
    """float32 values of BF16 bits."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


@functools.cache
def stored(folder):
    """{name: (kind, array)} of a folder, by the format's own library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in deserialize(path.read_bytes()):
            array = np.frombuffer(entry["data"], NUMPY[entry["dtype"]])
            found[name] = entry["dtype"], array.reshape(entry["shape"])
    return found


def full(folder, name):
    """A tensor of the folder in float32; FP8 through float64, where the product is exact."""
    kind, array = stored(folder)[name]
    if kind == "F8_E4M3":
        return dequantised(array, stored(folder)[name + "_scale_inv"][1]).astype(np.float32)
    return values(array) if kind == "BF16" else array


def rewrite(folder, tensors, source, config=None):
    """A model folder with these tensors and the source's config.json, or another."""
    write_file(folder / "model.safetensors", tensors)
    if config is None:
        shutil.copy(source / "config.json", folder)
    else:
        (folder / "config.json").write_text(json.dumps(config))
