# python -m pytest tests/test_weights.py
"""Each rank's weights: the ranks' slices rebuild every tensor; bytes are as stated."""

import copy
import json
import math

import numpy as np
import pytest

from engine.memory import weight_bytes
from engine.linear import BLOCK, Group, Linear
from engine.shape import part
from engine.weights import load_weights, open_model
from hostile import bf16, full, rewrite, stored, values

WORLDS = (1, 2, 3, 5, 6, 8)
LM = "model.language_model."


@pytest.fixture(params=["mini", "tiny-bf16", "tiny-fp8"])
def folder(request, mini, oracle):
    return mini if request.param == "mini" else oracle / request.param


def unpacked(packed, g=None):
    """A Linear, or matrix g of a Group, as float32 [rows, columns]; the padding must be zero."""
    w = packed.w if g is None else packed.w[g]
    flat = w.transpose(0, 2, 1).reshape(w.shape[0] * BLOCK, w.shape[1])
    assert len(flat) == -(-packed.rows // BLOCK) * BLOCK and not flat[packed.rows:].any()
    assert w.dtype in (np.uint16, np.float32) and w.flags.c_contiguous
    flat = flat[:packed.rows]
    return values(flat) if flat.dtype == np.uint16 else flat


def same(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == np.float32
    assert ours.tobytes() == theirs.tobytes()


def cut(matrix, *sizes):
    """Rows of a fused matrix, in pieces; the sizes must use all of them."""
    assert sum(sizes) == len(matrix)
    return np.split(matrix, np.cumsum(sizes)[:-1])


# ---- slices -----------------------------------------------------------------------------------

@pytest.mark.parametrize("world", WORLDS)
def test_the_ranks_slices_rebuild_every_tensor(folder, world):
    shape, checkpoint = open_model(str(folder))
    parts = [part(shape, rank, world) for rank in range(world)]
    ranks = [load_weights(checkpoint, shape, own) for own in parts]
    rebuilt = {}

    def whole(name, found):
        """The same on every rank."""
        assert all(a.tobytes() == found[0].tobytes() for a in found)
        rebuilt[name] = found[0]

    def along(name, axis, pieces):
        rebuilt[name] = np.concatenate(pieces, axis)

    whole(LM + "embed_tokens.weight", [values(w.embed) for w in ranks])
    whole(LM + "norm.weight", [w.norm for w in ranks])
    along("lm_head.weight", 0, [unpacked(w.head) for w in ranks])
    blocks = [[w.layers[i] for w in ranks] for i in range(shape.layers)]
    blocks += [[w.mtp for w in ranks]] if shape.mtp else []
    for i, layer in enumerate(blocks):
        name = f"{LM}layers.{i}."
        draft = i == shape.layers
        whole(name + "input_layernorm.weight", [one.attn_norm for one in layer])
        whole(name + "post_attention_layernorm.weight", [one.ffn_norm for one in layer])
        for site in () if draft else ("attn", "ffn"):
            hyper = [getattr(one, f"{site}_hyper") for one in layer]
            whole(f"{name}hc_{site}_fn", [unpacked(one.fn) for one in hyper])
            whole(f"{name}hc_{site}_base", [one.base for one in hyper])
            whole(f"{name}hc_{site}_scale", [one.scale for one in hyper])
        if draft:
            for norm, at in (("enorm", "enorm"), ("hnorm", "hnorm"), ("norm", "shared_head.norm")):
                whole(f"{name}{at}.weight", [getattr(one, norm) for one in layer])
            whole(name + "eh_proj.weight", [unpacked(one.eh) for one in layer])
        attn = [one.attn for one in layer]
        if draft or shape.layer_types[i] == "dsa":
            rebuild_dsa(shape, parts, attn, name + "self_attn.", along, whole)
        else:
            rebuild_kda(shape, parts, attn, name + "self_attn.", along, whole)
            a_log = full(folder, name + "self_attn.A_log")
            same(np.concatenate([one.decay for one in attn]),
                 np.array([math.exp(a) for a in a_log], np.float32))
            rebuilt[name + "self_attn.A_log"] = a_log
        mlps = [one.mlp for one in layer]
        if not draft and shape.mlp_types[i] == "dense":
            rebuild_mlp([p.dense for p in parts], mlps, name + "mlp.", along)
            continue
        rebuild_mlp([p.shared for p in parts], [m.shared for m in mlps],
                    name + "mlp.shared_experts.", along)
        whole(name + "mlp.gate.weight", [unpacked(m.router) for m in mlps])
        whole(name + "mlp.gate.e_score_correction_bias", [m.bias for m in mlps])
        for e in range(shape.experts):
            columns = [p.expert[1] - p.expert[0] for p in parts]
            both = [cut(unpacked(m.gate_up, e), c, c) for m, c in zip(mlps, columns)]
            along(f"{name}mlp.experts.{e}.gate_proj.weight", 0, [b[0] for b in both])
            along(f"{name}mlp.experts.{e}.up_proj.weight", 0, [b[1] for b in both])
            along(f"{name}mlp.experts.{e}.down_proj.weight", 1, [unpacked(m.down, e) for m in mlps])
    theirs = {n for n in stored(folder) if not n.endswith("_scale_inv")}
    assert rebuilt.keys() == theirs
    for name in theirs:
        same(rebuilt[name], full(folder, name))


def rebuild_mlp(spans, mlps, name, along):
    both = [cut(unpacked(m.gate_up), b - a, b - a) for m, (a, b) in zip(mlps, spans)]
    along(name + "gate_proj.weight", 0, [b[0] for b in both])
    along(name + "up_proj.weight", 0, [b[1] for b in both])
    along(name + "down_proj.weight", 1, [unpacked(m.down) for m in mlps])


def rebuild_kda(shape, parts, ranks, name, along, whole):
    d, counts = shape.kda_dim, [p.kda_heads[1] - p.kda_heads[0] for p in parts]
    inp = [cut(unpacked(a.inp), h * d, h * d, h * d, d, d, h) for a, h in zip(ranks, counts)]
    for at, x in ((0, "q_proj"), (1, "k_proj"), (2, "v_proj"), (5, "b_proj")):
        along(f"{name}{x}.weight", 0, [pieces[at] for pieces in inp])
    for at, x in ((3, "f_a_proj"), (4, "g_a_proj")):
        whole(f"{name}{x}.weight", [pieces[at] for pieces in inp])
    conv = [cut(a.conv, h * d, h * d, h * d) for a, h in zip(ranks, counts)]
    for at, x in enumerate("qkv"):
        along(f"{name}{x}_conv1d.weight", 0, [c[at][:, None] for c in conv])
    along(name + "f_b_proj.weight", 0, [unpacked(a.f_b) for a in ranks])
    along(name + "g_b_proj.weight", 0, [unpacked(a.g_b) for a in ranks])
    along(name + "o_proj.weight", 1, [unpacked(a.out) for a in ranks])
    along(name + "dt_bias", 0, [a.dt_bias for a in ranks])
    whole(name + "o_norm.weight", [a.o_norm for a in ranks])


def rebuild_dsa(shape, parts, ranks, name, along, whole):
    counts = [p.heads[1] - p.heads[0] for p in parts]
    heads = [(a, h) for a, n in zip(ranks, counts) for h in range(n)]
    along(name + "kv_b_proj.weight", 0, [piece for a, h in heads for piece in (
        unpacked(a.key_up, h).T, unpacked(a.value_up, h))])
    along(name + "q_b_proj.weight", 0, [unpacked(a.q_up) for a in ranks])
    along(name + "o_proj.weight", 1, [unpacked(a.out) for a in ranks])
    down = [cut(unpacked(a.down), shape.q_lora, shape.kv_lora) for a in ranks]
    for at, x in enumerate(("q_a_proj", "kv_a_proj_with_mqa")):
        whole(f"{name}{x}.weight", [d[at] for d in down])
    index = [cut(unpacked(a.index_in), shape.index_dim, shape.index_dim, shape.index_heads)
             for a in ranks]
    for at, x in enumerate(("wk.weight", "index_kpool_compress_gate", "weights_proj.weight")):
        whole(f"{name}indexer.{x}", [i[at] for i in index])
    whole(name + "indexer.wq_b.weight", [unpacked(a.index_q) for a in ranks])
    for field, x in (("q_norm", "q_a_layernorm.weight"), ("kv_norm", "kv_a_layernorm.weight"),
                     ("k_norm_w", "indexer.k_norm.weight"), ("k_norm_b", "indexer.k_norm.bias"),
                     ("ape", "indexer.index_kpool_compress_ape")):
        whole(name + x, [getattr(a, field) for a in ranks])


# ---- bytes and progress -------------------------------------------------------------------------

def arrays(tree):
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part_of in tree:
            yield from arrays(part_of)


@pytest.mark.parametrize("world", WORLDS)
def test_stated_planned_and_held_bytes_are_the_same(folder, world):
    shape, checkpoint = open_model(str(folder))
    for rank in range(world):
        own, calls = part(shape, rank, world), []
        weights = load_weights(str(folder), shape, own, lambda *done: calls.append(done))
        held = [a for piece in weights[1:5] for a in arrays(piece)]
        assert not any(np.shares_memory(a, weights.embed) for a in held)
        assert sum(weights.bytes.values()) == sum(a.nbytes for a in held)
        assert weights.bytes == weight_bytes(shape, own, checkpoint.kind)
        assert len(calls) == shape.layers + 1 and calls[-1][0] == calls[-1][1]
        assert [c[0] for c in calls] == sorted({c[0] for c in calls})


def test_the_embedding_stays_in_the_file(folder):
    shape, checkpoint = open_model(str(folder))
    embed = load_weights(checkpoint, shape, part(shape, 0, 1)).embed
    assert np.shares_memory(embed, checkpoint.mapped(LM + "embed_tokens.weight"))
    assert embed.shape == (shape.vocab, shape.hidden) and not embed.flags.writeable


def test_nothing_else_refers_to_the_file(folder):
    """Every array is a copy: a packed weight that were a view would fault long after the load."""
    shape, checkpoint = open_model(str(folder))
    maps = [checkpoint.mapped(name) for name in checkpoint.tensors]
    weights = load_weights(checkpoint, shape, part(shape, 0, 1))
    bounds = [(m.ctypes.data, m.ctypes.data + m.nbytes) for m in maps]
    lowest, highest = min(b[0] for b in bounds), max(b[1] for b in bounds)
    for array in arrays(weights[1:5]):
        assert not lowest <= array.ctypes.data < highest or not array.nbytes


def test_dtypes(oracle):
    for name, dtype in (("tiny-bf16", np.uint16), ("tiny-fp8", np.float32)):
        shape, checkpoint = open_model(str(oracle / name))
        weights = load_weights(checkpoint, shape, part(shape, 0, 2))
        moe = weights.layers[1].mlp
        assert isinstance(moe.gate_up, Group) and isinstance(moe.router, Linear)
        assert moe.gate_up.w.dtype == moe.shared.down.w.dtype == dtype
        assert weights.layers[0].attn.inp.w.dtype == weights.head.w.dtype == np.uint16


def test_a_rank_without_heads_holds_empty_arrays(oracle):
    shape, checkpoint = open_model(str(oracle / "tiny-fp8"))
    weights = load_weights(checkpoint, shape, part(shape, 7, 8))
    dsa, kda = weights.layers[3].attn, weights.layers[0].attn
    assert dsa.key_up.w.shape == (0, 1, 32, 64) and dsa.key_up.rows == 64
    assert dsa.value_up.w.shape == (0, 1, 64, 64) and dsa.value_up.rows == 32
    assert dsa.q_up.rows == 0 and dsa.out.w.shape == (2, 0, 64)
    assert kda.conv.shape == (0, 4) and kda.decay.shape == (0,) and kda.inp.rows == 64


def test_one_fp8_matrix_among_bf16_widens_its_group(oracle, tmp_path):
    """An expert's gate in BF16 beside its up in FP8: bits must be widened, not taken as numbers."""
    folder, name = oracle / "tiny-fp8", f"{LM}layers.1.mlp.experts.2.gate_proj.weight"
    tensors = dict(stored(folder))
    bits = bf16(full(folder, name))
    tensors[name] = "BF16", bits
    del tensors[name + "_scale_inv"]
    rewrite(tmp_path, tensors, folder)
    shape, checkpoint = open_model(str(tmp_path))
    weights = load_weights(checkpoint, shape, part(shape, 0, 1))
    same(unpacked(weights.layers[1].mlp.gate_up, 2)[:64], values(bits))
    assert weights.bytes == weight_bytes(shape, part(shape, 0, 1), checkpoint.kind)


# ---- other folders ------------------------------------------------------------------------------

def test_a_folder_without_draft_block_says_so(oracle, tmp_path):
    source = oracle / "tiny-bf16"
    rewrite(tmp_path, {n: t for n, t in stored(source).items() if ".layers.8." not in n}, source)
    shape, checkpoint = open_model(str(tmp_path))
    assert shape.mtp == 0 and shape.bindings == 2 and len(checkpoint.notes) == 1
    assert "layers.8." in checkpoint.notes[0]
    weights = load_weights(checkpoint, shape, part(shape, 0, 1))
    assert weights.mtp is None and weights.bytes["draft block"] == 0
    assert open_model(str(source))[1].notes == []


def test_vision_tensors_are_skipped(oracle, tmp_path):
    source = oracle / "tiny-bf16"
    extra = {"model.visual.patch.weight": ("F16", np.ones((2, 3), np.float16))}
    rewrite(tmp_path, {**stored(source), **extra}, source)
    shape, checkpoint = open_model(str(tmp_path))
    plain = open_model(str(source))
    assert shape == plain[0]
    assert (load_weights(checkpoint, shape, part(shape, 0, 1)).bytes
            == load_weights(plain[1], shape, part(shape, 0, 1)).bytes)


def test_float32_checkpoints_and_odd_offsets(oracle, tmp_path):
    """All in F32, after one odd byte of vision: values as in BF16, the embedding copied."""
    source = oracle / "tiny-bf16"
    tensors = {"model.visual.odd": ("U8", np.zeros(1, np.uint8))}
    tensors.update({n: ("F32", full(source, n)) for n in stored(source)})
    rewrite(tmp_path, tensors, source)
    shape, checkpoint = open_model(str(tmp_path))
    ours = load_weights(checkpoint, shape, part(shape, 1, 3))
    theirs = load_weights(open_model(str(source))[1], shape, part(shape, 1, 3))
    assert ours.embed.flags.aligned and ours.bytes["embedding"] == ours.embed.nbytes
    assert np.array_equal(ours.embed, values(theirs.embed))
    for a, b in zip(arrays(ours[1:5]), arrays(theirs[1:5])):
        same(a, values(b) if b.dtype == np.uint16 else b)


def test_a_rank_sees_no_byte_of_anothers_slice(oracle, tmp_path):
    """All that is not rank 1's of 3 becomes NaN on disk; what rank 1 loads stays the same."""
    source = oracle / "tiny-bf16"
    shape, checkpoint = open_model(str(source))
    own = part(shape, 1, 3)
    tensors = copy.copy(stored(source))
    h, k = own.heads, [n * shape.kda_dim for n in own.kda_heads]
    both, v, nope = shape.qk_nope + shape.v_head, shape.v_head, shape.qk_nope
    for name, (kind, array) in stored(source).items():
        dsa = any(f".layers.{i}." in name for i in (3, 7, 8))
        keep = None
        if ".experts." in name or ".shared_experts." in name or ".mlp." in name and "_proj" in name:
            span = (own.expert if ".experts." in name else
                    own.shared if ".shared" in name else own.dense)
            keep = (slice(None), slice(*span)) if "down" in name else (slice(*span),)
        elif name == "lm_head.weight":
            keep = (slice(*own.vocab),)
        elif name.endswith("o_proj.weight"):
            keep = (slice(None), slice(h[0] * v, h[1] * v) if dsa else slice(*k))
        elif "kv_b_proj" in name:
            keep = (slice(h[0] * both, h[1] * both),)
        elif "q_b_proj" in name:
            keep = (slice(h[0] * nope, h[1] * nope),)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "conv1d.weight",
                            "f_b_proj.weight", "g_b_proj.weight", "dt_bias")):
            keep = (slice(*k),)
        if keep is not None:
            foreign = np.full_like(array, 0x7FC0 if kind == "BF16" else np.nan)
            foreign[keep] = array[keep]
            assert foreign.tobytes() != array.tobytes()
            tensors[name] = kind, foreign
    rewrite(tmp_path, tensors, source)
    before = load_weights(checkpoint, shape, own)
    after = load_weights(open_model(str(tmp_path))[1], shape, own)
    for a, b in zip(arrays(before[1:5]), arrays(after[1:5])):
        assert a.tobytes() == b.tobytes()


def test_two_shared_experts_are_one_wider_mlp(oracle, tmp_path):
    source, names = oracle / "tiny-bf16", ("gate_proj", "up_proj", "down_proj")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["n_shared_experts"] = 2
    tensors = dict(stored(source))
    rng = np.random.default_rng(11)
    for name in tensors:
        if ".shared_experts." in name:          # [64, 128] and [128, 64] become [128, 128]
            tensors[name] = "BF16", bf16(rng.standard_normal((128, 128)))
    rewrite(tmp_path, tensors, source, config)
    shape, checkpoint = open_model(str(tmp_path))
    parts = [part(shape, rank, 3) for rank in range(3)]
    layers = [load_weights(checkpoint, shape, own).layers[5] for own in parts]
    found = {}
    rebuild_mlp([own.shared for own in parts], [layer.mlp.shared for layer in layers], "",
                lambda name, axis, pieces: found.update({name: np.concatenate(pieces, axis)}))
    for name in names:
        stored_at = f"{LM}layers.5.mlp.shared_experts.{name}.weight"
        same(found[name + ".weight"], values(tensors[stored_at][1]))
