"""One rank's share of the weights, as the arrays that the layers compute with.

`open_model` reads a folder's config.json and headers and checks every tensor against them before a
byte of data is read; `load_weights` then reads this rank's rows and columns only. Matrices are
packed `Linear`s or `Group`s (engine/linear.py): uint16 BF16 bits where all that is packed
together is BF16, else float32 (FP8 is dequantised on the way). Vectors are float32. Names below: h
own DSA heads, hl own KDA heads of D values, c own columns of an MLP, S streams, E experts; an own
range may be empty.

The embedding is not read: it stays a view of the file, whole on every rank, and costs no resident
memory.
"""

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.checkpoint import (EMBED, HEAD, MATRIX, NORM, PLAIN, Checkpoint, expected_tensors,
                               layer_name, open_checkpoint, read_json, scale_name, scale_shape)
from engine.errors import ModelError
from engine.host import from_bf16
from engine.memory import weight_bytes
from engine.linear import Group, Linear, pack, pack_group
from engine.shape import Shape, ShapeProblem

VISION = "model.visual."            # tensors of the release that a text engine skips
_OTHER_QUANTIZATION = (".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_scale_2",
                       ".input_scale", ".input_global_scale", ".weight_zero_point", ".weight_shape",
                       ".qweight", ".qzeros", ".scales", ".g_idx")
_RELEASE = "use the release's FP8 checkpoint (e4m3 with weight_scale_inv) or its BF16 one"


class Hyper(NamedTuple):
    """One hyper-connection site; the projection's rows are pre S, post S, mix S x S."""

    fn: Linear              # [(2 + S) * S, S * hidden]
    base: np.ndarray        # [(2 + S) * S]
    scale: np.ndarray       # [3]


class Kda(NamedTuple):
    """Linear attention, own heads."""

    inp: Linear             # rows q hl*D | k hl*D | v hl*D | f_a D | g_a D | b hl, of hidden
    conv: np.ndarray        # [3 * hl*D, conv], channels q | k | v
    f_b: Linear             # [hl*D, D]
    g_b: Linear             # [hl*D, D]
    decay: np.ndarray       # [hl] = exp(A_log)
    dt_bias: np.ndarray     # [hl*D]
    o_norm: np.ndarray      # [D]
    out: Linear             # [hidden, hl*D]


class Dsa(NamedTuple):
    """Sparse latent attention, own heads; the indexer is whole on every rank."""

    down: Linear            # rows q_a q_lora | kv_a kv_lora, of hidden
    q_norm: np.ndarray      # [q_lora]
    kv_norm: np.ndarray     # [kv_lora]
    q_up: Linear            # [h * qk_nope, q_lora]
    key_up: Group           # h of [kv_lora, qk_nope]: kv_b's key rows, transposed
    value_up: Group         # h of [v_head, kv_lora]
    out: Linear             # [hidden, h * v_head]
    index_in: Linear        # rows wk index_dim | gate index_dim | weights_proj index_heads
    index_q: Linear         # [index_heads * index_dim, q_lora]
    k_norm_w: np.ndarray    # [index_dim]
    k_norm_b: np.ndarray    # [index_dim]
    ape: np.ndarray         # [index_kpool, index_dim]


class Mlp(NamedTuple):
    """A gated MLP, own columns."""

    gate_up: Linear         # rows gate c | up c, of hidden
    down: Linear            # [hidden, c]


class Moe(NamedTuple):
    """Routed experts, own columns of every one, and the shared experts."""

    router: Linear          # [E, hidden]
    bias: np.ndarray        # [E], added for selection only
    gate_up: Group          # E of rows gate c | up c, of hidden
    down: Group             # E of [hidden, c]
    shared: Mlp


class Layer(NamedTuple):
    """One trunk layer. kind: "kda" | "dsa"."""

    kind: str
    attn: Kda | Dsa
    attn_hyper: Hyper
    ffn_hyper: Hyper
    attn_norm: np.ndarray   # [hidden], input_layernorm
    ffn_norm: np.ndarray    # [hidden], post_attention_layernorm
    mlp: Mlp | Moe


class Mtp(NamedTuple):
    """The draft block: one plain residual layer that shares embedding and output head."""

    enorm: np.ndarray       # [hidden]
    hnorm: np.ndarray       # [hidden]
    eh: Linear              # [hidden, 2 * hidden], the embedding's half first
    attn_norm: np.ndarray   # [hidden]
    ffn_norm: np.ndarray    # [hidden]
    attn: Dsa
    mlp: Moe
    norm: np.ndarray        # [hidden], shared_head.norm


class Weights(NamedTuple):
    """All that one rank holds."""

    embed: np.ndarray       # [vocab, hidden] uint16 or float32, read only, in the file
    layers: tuple           # of Layer
    norm: np.ndarray        # [hidden]
    head: Linear            # [own vocabulary rows, hidden]
    mtp: Mtp | None
    bytes: dict             # name -> resident bytes, the names of memory.weight_bytes


# ---- what a folder must hold ------------------------------------------------------------------

def check_tensors(shape, checkpoint):
    """Hold every tensor of the checkpoint against `expected_tensors`. Raises ModelError."""
    expected, tensors = expected_tensors(shape), checkpoint.tensors

    def refuse(name, what, hint=_RELEASE):
        raise ModelError(f"{name} in {tensors[name].file} {what}", hint)

    for name in tensors:
        if name in expected or name.startswith(VISION):
            continue
        matrix = name.removesuffix("_scale_inv")
        if matrix != name and matrix in expected:
            if expected[matrix][1] != MATRIX:
                refuse(name, f"scales {matrix}, which the engine reads as BF16 or F32 only")
        elif name.endswith(_OTHER_QUANTIZATION):
            refuse(name, "belongs to a quantization that the engine does not read (NVFP4, "
                   "compressed-tensors and the like)")
        else:
            refuse(name, "is no tensor of this model", "config.json and checkpoint are of "
                   "different models or releases: fetch the folder again")
    missing = [name for name in expected if name not in tensors]
    if missing:
        more = f" ({len(missing)} tensors in all)" if missing[1:] else ""
        raise ModelError(f"{missing[0]} is missing from {checkpoint.listing}{more}",
                         "the folder is incomplete or of another model: fetch it again")
    for name, (size, kinds) in expected.items():
        tensor, scale = tensors[name], scale_name(name)
        if tensor.kind not in kinds:
            refuse(name, f"is {tensor.kind}, it must be {' or '.join(kinds)}")
        if tensor.shape != size:
            refuse(name, f"is {list(tensor.shape)}, config.json makes it {list(size)}",
                   "config.json and checkpoint are of different models: fetch the folder again")
        if tensor.kind != "F8_E4M3":
            if scale in tensors:
                refuse(scale, f"scales {name}, which is {tensor.kind} and not F8_E4M3")
        elif scale not in tensors:
            refuse(name, f"is F8_E4M3, but {scale} is missing")
        elif tensors[scale].kind not in PLAIN:
            refuse(scale, f"is {tensors[scale].kind}, it must be {' or '.join(PLAIN)}")
        elif tensors[scale].shape != scale_shape(size):
            refuse(scale, f"is {list(tensors[scale].shape)}, blocks of 128 x 128 make it "
                   f"{list(scale_shape(size))}")


def open_model(folder):
    """(Shape, Checkpoint) of a model folder, all of it checked. Raises ModelError.

    A folder without any tensor of the draft block opens with shape.mtp 0 and says so in the notes.
    """
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is no folder", "give the folder that holds config.json and the "
                         "safetensors files")
    path = os.path.join(folder, "config.json")
    try:
        shape = Shape.from_config(read_json(path))
    except ShapeProblem as problem:
        raise ModelError(f"{path}: {problem}", problem.hint)
    checkpoint = open_checkpoint(folder)
    draft = layer_name(shape.layers, "")
    if shape.mtp and not any(name.startswith(draft) for name in checkpoint.tensors):
        shape = replace(shape, mtp=0)
        checkpoint.notes.append(f"{folder} holds no draft block ({draft}*): no token is drafted")
    check_tensors(shape, checkpoint)
    return shape, checkpoint


# ---- loading ----------------------------------------------------------------------------------

def load_weights(source, shape, part, progress=None, drop=False):
    """This rank's Weights. source: a folder, or the Checkpoint that open_model gave with `shape`.

    progress(done, total), where given, is called after each layer with resident bytes; the last
    call has done = total. drop: the page cache forgets what was read after each layer.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    load = Loader(checkpoint, shape, part)
    total = sum(weight_bytes(shape, part, checkpoint.kind).values())
    layers = []
    for i in range(shape.layers):
        layers.append(load.layer(i))
        if drop:
            checkpoint.forget()
        if progress:
            progress(_nbytes(layers), total)
    embed = checkpoint.mapped(EMBED)
    if not embed.flags.aligned:         # an odd offset in the file: compiled code cannot read it
        embed = embed.copy()
    norm, head = checkpoint.vector(NORM), pack([checkpoint.matrix(HEAD, part.vocab)])
    mtp = load.mtp(shape.layers) if shape.mtp else None
    if drop:
        checkpoint.forget()
    sizes = _resident(layers, norm, head, mtp)
    sizes["embedding"] = embed.nbytes if embed.flags.owndata else 0
    if progress:
        progress(sum(sizes.values()), total)
    return Weights(embed, tuple(layers), norm, head, mtp, sizes)


class Loader:
    """Reads one rank's slices of a layer. Everything here follows the names on disk.

    How matrices are held is the methods `tensor`, `pack`, `pack_group` and `stack`: here as the
    host path multiplies by them; engine.device_weights holds them as the kernels do. What `tensor`
    gives is cut by rows, transposed, and handed to the others.
    """

    pack, pack_group = staticmethod(pack), staticmethod(pack_group)

    def __init__(self, checkpoint, shape, part):
        self.checkpoint, self.shape, self.part = checkpoint, shape, part

    def tensor(self, name, rows=None, columns=None):
        return self.checkpoint.matrix(name, rows, columns)

    def matrix(self, layer, name, rows=None, columns=None):
        return self.tensor(layer_name(layer, name + ".weight"), rows, columns)

    def vector(self, layer, name, rows=None):
        return self.checkpoint.vector(layer_name(layer, name), rows)

    def layer(self, i):
        kind, feed = self.shape.layer_types[i], self.shape.mlp_types[i]
        return Layer(kind, self.dsa(i) if kind == "dsa" else self.kda(i),
                     self.hyper(i, "attn"), self.hyper(i, "ffn"),
                     self.vector(i, "input_layernorm.weight"),
                     self.vector(i, "post_attention_layernorm.weight"),
                     self.moe(i) if feed == "sparse" else self.mlp(i, "mlp", self.part.dense))

    def hyper(self, i, site):
        fn = self.tensor(layer_name(i, f"hc_{site}_fn"))
        return Hyper(self.pack([fn]), self.vector(i, f"hc_{site}_base"),
                     self.vector(i, f"hc_{site}_scale"))

    def kda(self, i):
        heads, width = self.part.kda_heads, self.shape.kda_dim
        own = (heads[0] * width, heads[1] * width)
        inp = [self.matrix(i, f"self_attn.{x}_proj", own) for x in "qkv"]
        inp += [self.matrix(i, f"self_attn.{x}_a_proj") for x in "fg"]
        inp += [self.matrix(i, "self_attn.b_proj", heads)]
        conv = [self.vector(i, f"self_attn.{x}_conv1d.weight", own) for x in "qkv"]
        # in double and rounded once: numpy's float32 exp differs between processors
        with np.errstate(over="ignore"):
            decay = np.exp(self.vector(i, "self_attn.A_log", heads).astype(np.float64))
            decay = decay.astype(np.float32)
        return Kda(self.pack(inp), np.concatenate(conv).reshape(-1, self.shape.conv),
                   self.pack([self.matrix(i, "self_attn.f_b_proj", own)]),
                   self.pack([self.matrix(i, "self_attn.g_b_proj", own)]),
                   decay, self.vector(i, "self_attn.dt_bias", own),
                   self.vector(i, "self_attn.o_norm.weight"),
                   self.pack([self.matrix(i, "self_attn.o_proj", None, own)]))

    def dsa(self, i):
        s, (first, stop) = self.shape, self.part.heads
        both = s.qk_nope + s.v_head         # kv_b goes head by head: its key rows, its value rows
        kv_b = self.matrix(i, "self_attn.kv_b_proj", (first * both, stop * both))
        keys = [kv_b[h * both:h * both + s.qk_nope].T for h in range(stop - first)]
        values = [kv_b[h * both + s.qk_nope:(h + 1) * both] for h in range(stop - first)]
        index = "self_attn.indexer."
        gate = self.tensor(layer_name(i, index + "index_kpool_compress_gate"))
        return Dsa(self.pack([self.matrix(i, "self_attn.q_a_proj"),
                              self.matrix(i, "self_attn.kv_a_proj_with_mqa")]),
                   self.vector(i, "self_attn.q_a_layernorm.weight"),
                   self.vector(i, "self_attn.kv_a_layernorm.weight"),
                   self.pack([self.matrix(i, "self_attn.q_b_proj",
                                          (first * s.qk_nope, stop * s.qk_nope))]),
                   self.pack_group(keys, (s.kv_lora, s.qk_nope), kv_b.dtype),
                   self.pack_group(values, (s.v_head, s.kv_lora), kv_b.dtype),
                   self.pack([self.matrix(i, "self_attn.o_proj", None,
                                          (first * s.v_head, stop * s.v_head))]),
                   self.pack([self.matrix(i, index + "wk"), gate,
                              self.matrix(i, index + "weights_proj")]),
                   self.pack([self.matrix(i, index + "wq_b")]),
                   self.vector(i, index + "k_norm.weight"), self.vector(i, index + "k_norm.bias"),
                   self.vector(i, index + "index_kpool_compress_ape"))

    def mlp(self, i, group, own):
        return Mlp(self.pack([self.matrix(i, f"{group}.gate_proj", own),
                              self.matrix(i, f"{group}.up_proj", own)]),
                   self.pack([self.matrix(i, f"{group}.down_proj", None, own)]))

    def moe(self, i):
        own, names = self.part.expert, [f"mlp.experts.{e}" for e in range(self.shape.experts)]
        gate_up = [self.stack([self.matrix(i, f"{name}.gate_proj", own),
                               self.matrix(i, f"{name}.up_proj", own)]) for name in names]
        down = [self.matrix(i, f"{name}.down_proj", None, own) for name in names]
        return Moe(self.pack([self.matrix(i, "mlp.gate")]),
                   self.vector(i, "mlp.gate.e_score_correction_bias"), self.pack_group(gate_up),
                   self.pack_group(down), self.mlp(i, "mlp.shared_experts", self.part.shared))

    def mtp(self, i):
        return Mtp(self.vector(i, "enorm.weight"), self.vector(i, "hnorm.weight"),
                   self.pack([self.matrix(i, "eh_proj")]), self.vector(i, "input_layernorm.weight"),
                   self.vector(i, "post_attention_layernorm.weight"), self.dsa(i), self.moe(i),
                   self.vector(i, "shared_head.norm.weight"))

    @staticmethod
    def stack(matrices):
        """Matrices one under the other; BF16 bits beside float32 are widened first."""
        if len({m.dtype for m in matrices}) > 1:
            matrices = [from_bf16(m) if m.dtype == np.uint16 else m for m in matrices]
        return np.concatenate(matrices)


def _nbytes(tree):
    """Bytes of all arrays in nested tuples and lists."""
    if isinstance(tree, np.ndarray):
        return tree.nbytes
    return sum(map(_nbytes, tree)) if isinstance(tree, (tuple, list)) else 0


def _resident(layers, norm, head, mtp):
    """{name: bytes} of what was loaded, by the names of memory.weight_bytes."""
    sizes = dict.fromkeys(("KDA", "DSA", "indexer", "hyper-connections", "norms", "dense MLPs",
                           "routers", "experts", "shared experts"), 0)
    for layer in layers:
        attention = "DSA" if layer.kind == "dsa" else "KDA"
        indexer = _nbytes(layer.attn[7:]) if layer.kind == "dsa" else 0     # from index_in on
        sizes[attention] += _nbytes(layer.attn) - indexer
        sizes["indexer"] += indexer
        sizes["hyper-connections"] += _nbytes((layer.attn_hyper, layer.ffn_hyper))
        sizes["norms"] += layer.attn_norm.nbytes + layer.ffn_norm.nbytes
        if isinstance(layer.mlp, Mlp):
            sizes["dense MLPs"] += _nbytes(layer.mlp)
            continue
        sizes["routers"] += _nbytes((layer.mlp.router, layer.mlp.bias))
        sizes["experts"] += _nbytes((layer.mlp.gate_up, layer.mlp.down))
        sizes["shared experts"] += _nbytes(layer.mlp.shared)
    sizes["norms"] += norm.nbytes
    sizes["output head"] = _nbytes(head)
    sizes["draft block"] = _nbytes(mtp) if mtp else 0
    return sizes
