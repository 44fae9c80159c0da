"""A safetensors checkpoint, mapped: headers checked in full, slices read in place.

A file is 8 bytes of header length N (little endian), N bytes of JSON, then the data:
{name: {"dtype": ..., "shape": [...], "data_offsets": [start, stop]}}, offsets from the data's first
byte, with an optional "__metadata__" entry. A file is taken if and only if

1. N is at most 100,000,000 and the file is as long as header and data together, to the byte,
2. the header is a JSON object with no name twice,
3. each entry's shape and dtype make exactly its stop - start bytes,
4. the entries, in order of their offsets, cover the data with no gap and no overlap.

A folder holds one `model.safetensors`, or `model.safetensors.index.json` whose "weight_map" says
which file of the folder holds each tensor; where both exist the index counts. Every fault is a
ModelError that names file and tensor. `expected_tensors` lists what a model of a given Shape must
hold.

FP8: a matrix of kind F8_E4M3 goes with `<name>_scale_inv`, F32 or BF16, one value for each 128 x
128 block (partial at the edges); the value of an element is e4m3(byte) * scale[row // 128, column
// 128] in float32. What is read of either is refused by name where it is no number: the codes 0x7F
and 0xFF, scales that are not finite.
"""

import json
import mmap
import os
from typing import NamedTuple

import numpy as np
from numba import njit, types

from engine.errors import ModelError
from engine.host import NJIT, from_bf16
from engine.shape import SCALE_BLOCK

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT = "model.language_model."      # before every text tensor's name but lm_head's
EMBED, NORM, HEAD = TEXT + "embed_tokens.weight", TEXT + "norm.weight", "lm_head.weight"
PLAIN = ("BF16", "F32")             # kinds that any tensor may have
MATRIX = PLAIN + ("F8_E4M3",)       # kinds that a projection may have
HEADER_LIMIT = 100_000_000          # the format's own limit
# Bits an element, all kinds of the format: tensors nobody reads (vision) must measure right too.
KIND_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}
STORED = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "F8_E4M3": np.dtype("u1")}
_AGAIN = "the file is damaged or its download incomplete: fetch it again"


def _e4m3_table():
    """The 256 values of e4m3 (no infinities, 0x7F and 0xFF are NaN) as float32; all are exact."""
    table = np.empty(256, np.float32)
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        size = mantissa * 2.0 ** -9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        size = float("nan") if exponent == 15 and mantissa == 7 else size
        table[code] = -size if code & 128 else size
    return table


E4M3 = _e4m3_table()


class Tensor(NamedTuple):
    """Where one tensor lies. file: path; kind: the format's dtype word; start: byte in the file."""

    file: str
    kind: str
    shape: tuple
    start: int


def layer_name(layer, name):
    """The tensor `name` of layer `layer`; the draft block counts as the layer after the last."""
    return f"{TEXT}layers.{layer}.{name}"


def scale_name(name):
    """The tensor that holds the block scales of matrix `name`."""
    return name + "_scale_inv"


def scale_shape(shape):
    """[ceil(rows / 128), ceil(columns / 128)] of a matrix's scales."""
    return tuple(-(-n // SCALE_BLOCK) for n in shape)


def expected_tensors(shape):
    """{name: (shape, allowed kinds)} of every text tensor, block scales of FP8 matrices aside.

    A matrix of kind F8_E4M3 needs its scale_name tensor too; which matrices are FP8 is the
    file's choice.
    """
    s, hidden, found = shape, shape.hidden, {}

    def plain(layer, sizes):
        found.update({layer_name(layer, name): (size, PLAIN) for name, size in sizes.items()})

    def matrices(layer, group, **sizes):
        found.update({layer_name(layer, f"{group}.{name}.weight"): (size, MATRIX)
                      for name, size in sizes.items()})

    def mlp(layer, group, columns):
        matrices(layer, group, gate_proj=(columns, hidden), up_proj=(columns, hidden),
                 down_proj=(hidden, columns))

    def moe(layer):
        plain(layer, {"mlp.gate.weight": (s.experts, hidden),
                      "mlp.gate.e_score_correction_bias": (s.experts,)})
        for expert in range(s.experts):
            mlp(layer, f"mlp.experts.{expert}", s.moe_intermediate)
        mlp(layer, "mlp.shared_experts", s.shared_intermediate)

    def dsa(layer):
        matrices(layer, "self_attn", q_a_proj=(s.q_lora, hidden),
                 q_b_proj=(s.heads * s.qk_nope, s.q_lora),
                 kv_a_proj_with_mqa=(s.kv_lora, hidden),
                 kv_b_proj=(s.heads * (s.qk_nope + s.v_head), s.kv_lora),
                 o_proj=(hidden, s.heads * s.v_head))
        matrices(layer, "self_attn.indexer", wq_b=(s.index_heads * s.index_dim, s.q_lora),
                 wk=(s.index_dim, hidden), weights_proj=(s.index_heads, hidden))
        plain(layer, {"self_attn.q_a_layernorm.weight": (s.q_lora,),
                      "self_attn.kv_a_layernorm.weight": (s.kv_lora,),
                      "self_attn.indexer.k_norm.weight": (s.index_dim,),
                      "self_attn.indexer.k_norm.bias": (s.index_dim,),
                      "self_attn.indexer.index_kpool_compress_gate": (s.index_dim, hidden),
                      "self_attn.indexer.index_kpool_compress_ape": (s.index_kpool, s.index_dim)})

    def kda(layer):
        wide = s.kda_heads * s.kda_dim
        matrices(layer, "self_attn", q_proj=(wide, hidden), k_proj=(wide, hidden),
                 v_proj=(wide, hidden), f_a_proj=(s.kda_dim, hidden), g_a_proj=(s.kda_dim, hidden),
                 f_b_proj=(wide, s.kda_dim), g_b_proj=(wide, s.kda_dim),
                 b_proj=(s.kda_heads, hidden), o_proj=(hidden, wide))
        plain(layer, {f"self_attn.{x}_conv1d.weight": (wide, 1, s.conv) for x in "qkv"})
        plain(layer, {"self_attn.A_log": (s.kda_heads,), "self_attn.dt_bias": (wide,),
                      "self_attn.o_norm.weight": (s.kda_dim,)})

    def norms(layer, *names):
        plain(layer, {f"{name}.weight": (hidden,) for name in
                      ("input_layernorm", "post_attention_layernorm", *names)})

    found[EMBED], found[HEAD] = ((s.vocab, hidden), PLAIN), ((s.vocab, hidden), MATRIX)
    found[NORM] = ((hidden,), PLAIN)
    for layer, (attention, feed) in enumerate(zip(s.layer_types, s.mlp_types)):
        for site in ("attn", "ffn"):
            plain(layer, {f"hc_{site}_fn": (s.hyper_rows, s.hc_mult * hidden),
                          f"hc_{site}_base": (s.hyper_rows,), f"hc_{site}_scale": (3,)})
        norms(layer)
        dsa(layer) if attention == "dsa" else kda(layer)
        moe(layer) if feed == "sparse" else mlp(layer, "mlp", s.intermediate)
    if s.mtp:
        norms(s.layers, "enorm", "hnorm", "shared_head.norm")
        found[layer_name(s.layers, "eh_proj.weight")] = ((hidden, 2 * hidden), MATRIX)
        dsa(s.layers)
        moe(s.layers)
    return found


class Checkpoint:
    """The tensors of one folder by name. Reads map the files; nothing is held but the maps.

    listing: path of the file that lists the tensors. tensors: {name: Tensor}. notes: lines that a
    start should print about what the folder lacks.
    """

    def __init__(self, listing, tensors):
        self.listing = listing
        self.tensors = tensors
        self.notes = []
        self._maps = {}

    def kind(self, name):
        """The dtype word of tensor `name`."""
        return self.tensors[name].kind

    def mapped(self, name):
        """The whole tensor in place, read only: uint16 (BF16 bits), float32 or uint8 (FP8 codes).

        Touching an element pages it in from the file; the pages stay reclaimable.
        """
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            self._maps[tensor.file] = np.memmap(tensor.file, np.uint8, "r")
        dtype = STORED[tensor.kind]
        count = int(np.prod(tensor.shape, dtype=np.int64)) * dtype.itemsize
        data = self._maps[tensor.file].view(np.ndarray)[tensor.start:tensor.start + count]
        return data.view(dtype).reshape(tensor.shape)

    def forget(self):
        """Drop what was read so far from the maps and the page cache."""
        for path, whole in self._maps.items():
            whole._mmap.madvise(mmap.MADV_DONTNEED)
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def matrix(self, name, rows=None, columns=None):
        """Rows (start, stop) and columns (start, stop) of a matrix; None means all of them.

        BF16 and F32 come as views of the file (uint16 bits, float32), FP8 as new float32 values.
        Only the pages of the slice are touched.
        """
        codes = self.mapped(name)
        r0, r1 = rows or (0, codes.shape[0])
        c0, c1 = columns or (0, codes.shape[1])
        codes = codes[r0:r1, c0:c1]
        if self.kind(name) != "F8_E4M3":
            return codes
        refuse_nan_codes(self, name, codes, r0, c0)
        values, blocks = E4M3[codes], np.arange(r0 // SCALE_BLOCK, -(-r1 // SCALE_BLOCK))
        scales = scales_of(self, name, blocks, np.arange(c0, c1) // SCALE_BLOCK)
        for block, scale in zip(blocks.tolist() if r1 > r0 else (), scales):
            first, stop = block * SCALE_BLOCK - r0, (block + 1) * SCALE_BLOCK - r0
            values[max(first, 0):stop] *= scale
        return values

    def vector(self, name, rows=None):
        """Rows (start, stop) of a small tensor as a new float32 array, whatever it is stored as."""
        values = self.mapped(name)
        values = values[slice(*rows)] if rows else values
        return from_bf16(values) if values.dtype == np.uint16 else np.array(values, np.float32)


@njit(types.uint64(types.Array(types.uint64, 1, "C", readonly=True)), **NJIT)
def _tops(words):
    """Nonzero where a byte is 0x7F or 0xFF: eight codes an addition, none carries over."""
    found = np.uint64(0)
    for i in range(words.size):
        found |= (words[i] & np.uint64(0x7F7F7F7F7F7F7F7F)) + np.uint64(0x0101010101010101)
    return found & np.uint64(0x8080808080808080)


def refuse_nan_codes(checkpoint, name, codes, row, column):
    """ModelError where a part of FP8 matrix `name`, from row and column on, has a NaN code."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    flat = flat if flat.ctypes.data % 8 == 0 else flat.copy()
    whole = flat.size // 8 * 8
    if _tops(flat[:whole].view(np.uint64)) or (flat[whole:] & 0x7F == 0x7F).any():
        at = np.argwhere(codes & 0x7F == 0x7F)[0]
        raise ModelError(f"{name} in {checkpoint.tensors[name].file} holds the FP8 code "
                         f"0x{codes[tuple(at)]:02X}, which is no number, in row {row + at[0]}, "
                         f"column {column + at[1]}", _AGAIN)


def scales_of(checkpoint, name, rows, columns):
    """Block scales of FP8 matrix `name`: rows and columns (indices) of them, new float32.

    ModelError where one is not finite.
    """
    found = checkpoint.mapped(scale_name(name))[np.ix_(rows, columns)]
    found = from_bf16(found) if found.dtype == np.uint16 else found
    if not np.isfinite(found).all():
        raise ModelError(f"{scale_name(name)} in {checkpoint.tensors[scale_name(name)].file} holds "
                         f"{found[~np.isfinite(found)][0]}, which is no scale", _AGAIN)
    return found


def forget(file, start, count):
    """Tell the system that bytes of an open file are not needed again, nor the pages they touch."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(start + count) // mmap.PAGESIZE) * mmap.PAGESIZE
    os.posix_fadvise(file, first, stop - first, os.POSIX_FADV_DONTNEED)


# ---- opening ----------------------------------------------------------------------------------

def open_checkpoint(folder):
    """Map the headers of all files of `folder`. Raises ModelError."""
    index = os.path.join(folder, INDEX)
    if not os.path.exists(index):
        single = os.path.join(folder, SINGLE)
        if not os.path.exists(single):
            raise ModelError(f"{folder} holds neither {INDEX} nor {SINGLE}",
                             "give the folder of a safetensors checkpoint (not GGUF, not .bin)")
        return Checkpoint(single, read_header(single))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map", _AGAIN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or os.path.basename(file) != file:
            raise ModelError(f"{index} places {name} in {file!r}, which is no file name",
                             "shards lie beside the index: " + _AGAIN)
    headers = {}
    for file in sorted(set(weight_map.values())):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            named = next(n for n, f in weight_map.items() if f == file)
            raise ModelError(f"{path} is missing; {INDEX} says that it holds {named}",
                             "fetch the missing file; all shards must be in the folder")
        headers[file] = read_header(path)
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ModelError(f"{os.path.join(folder, file)} does not hold {name}, "
                             f"though {INDEX} says so",
                             "index and shards are of different releases: fetch the folder again")
    return Checkpoint(index, {name: headers[file][name] for name, file in weight_map.items()})


def read_json(path):
    """The JSON object in a file. Raises ModelError that names the file."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}",
                         "give a folder with a whole checkpoint in it")
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}", _AGAIN)
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", _AGAIN)
    return value


def _no_twins(pairs):
    names = dict(pairs)
    if len(names) != len(pairs):
        seen = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in seen if seen.count(n) > 1)!r} is there twice")
    return names


def read_header(path):
    """{name: Tensor} of one safetensors file, checked as the module says. Raises ModelError."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(f"{path} is a Git LFS pointer, not the checkpoint itself",
                                 "run `git lfs pull` in that folder")
            if len(start) < 8:
                raise ModelError(f"{path} has {size} bytes, too few for a header", _AGAIN)
            if length > HEADER_LIMIT:
                raise ModelError(f"{path} claims a header of {length} bytes, past the format's "
                                 f"limit of {HEADER_LIMIT}", "no safetensors file: " + _AGAIN)
            if 8 + length > size:
                raise ModelError(f"{path} claims a header of {length} bytes but has {size} in all",
                                 _AGAIN)
            text = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}",
                         "give a folder with a whole checkpoint in it")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a header that is not JSON: {error}", _AGAIN)
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a header that is not a JSON object", _AGAIN)
    header.pop("__metadata__", None)
    spans = []
    tensors = {}
    for name, entry in header.items():
        kind, shape, begin, stop = _entry(path, name, entry)
        tensors[name] = Tensor(path, kind, shape, 8 + length + begin)
        spans.append((begin, stop, name))
    _check_cover(path, sorted(spans), size - 8 - length)
    return tensors


def _entry(path, name, entry):
    """(kind, shape, start, stop) of one header entry whose numbers agree with each other."""
    def whole(values, counts):
        return (isinstance(values, list) and len(values) in counts
                and all(type(v) is int and 0 <= v < 1 << 63 for v in values))

    if not isinstance(entry, dict) or not whole(entry.get("shape"), range(9)) or not whole(
            entry.get("data_offsets"), (2,)):
        raise ModelError(f"{name} in {path} lacks a proper dtype, shape and data_offsets", _AGAIN)
    kind, shape, (begin, stop) = entry.get("dtype"), entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in KIND_BITS:
        raise ModelError(f"{name} in {path} is of dtype {kind!r}, which the format does not know",
                         "use the release's BF16 or FP8 checkpoint")
    bits = KIND_BITS[kind]
    for n in shape:
        bits *= n
    if 8 * (stop - begin) != bits:
        raise ModelError(f"{name} in {path}: {kind} {shape} takes {bits // 8} bytes, its "
                         f"data_offsets {begin} to {stop} hold {stop - begin}", _AGAIN)
    return kind, tuple(shape), begin, stop


def _check_cover(path, spans, size):
    """The sorted spans (start, stop, name) cover `size` bytes of data: no overlap, gap or rest."""
    reached, last = 0, "the header"
    for begin, stop, name in spans:
        if begin < reached:
            raise ModelError(f"{name} in {path} starts at byte {begin} of the data, inside {last} "
                             f"which ends at {reached}", _AGAIN)
        if begin > reached:
            raise ModelError(f"{name} in {path} starts at byte {begin} of the data, {last} ends at "
                             f"{reached}: the bytes between belong to nothing", _AGAIN)
        reached, last = stop, name
        if reached > size:
            raise ModelError(f"{name} in {path} ends at byte {stop} of the data, the file has "
                             f"{size} of them: it is truncated", _AGAIN)
    if reached != size:
        raise ModelError(f"{path} has {size} bytes of data, its header describes {reached}", _AGAIN)
