# python -m pytest tests/test_shape.py
"""Shape: the release's numbers, each spelling, each refusal; the partition at every world."""

import copy
import json

import pytest

from engine.shape import Shape, ShapeProblem, part, split, unit
from release import CONFIG, DSA_LAYERS, KDA_LAYERS


def changed(**changes):
    """The release's config with text_config keys set, or deleted where the value is None."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        if value is None:
            del config["text_config"][key]
        else:
            config["text_config"][key] = value
    return config


def test_release():
    shape = Shape.from_config(CONFIG)
    assert (shape.hidden, shape.layers, shape.vocab, shape.window) == (4096, 45, 154880, 1 << 20)
    assert shape.dsa_layers == tuple(DSA_LAYERS) and len(shape.dsa_layers) == 11
    assert shape.kda_layers == tuple(KDA_LAYERS) and len(shape.kda_layers) == 34
    assert shape.layer_types[44] == "kda" and shape.mlp_types == ("dense",) * 3 + ("sparse",) * 42
    assert (shape.bindings, shape.pools_kept, shape.list_width, shape.hyper_rows) == (
        12, 512, 2051, 24)
    assert (shape.kda_heads, shape.kda_dim, shape.conv, shape.gate_bound) == (64, 128, 4, -5.0)
    assert (shape.eps, shape.hc_eps, shape.swiglu_limit, shape.routed_scaling) == (
        1e-5, 1e-6, 10.0, 2.5)
    assert shape.eos == (154820, 154827, 154829) and shape.mtp == 1


FLAT = dict(linear_attn_config=None, linear_num_heads=64, linear_head_dim=128,
            linear_conv_kernel_dim=4, linear_lower_bound=-5.0)
NESTED = CONFIG["text_config"]["linear_attn_config"]


@pytest.mark.parametrize("changes", [
    FLAT,
    dict(layer_types=None),
    dict(mlp_layer_types=None),
    dict(layer_types=["indexed_attention" if i in DSA_LAYERS else "linear_attention"
                      for i in range(45)]),
    dict(layer_types=["full_attention" if i in DSA_LAYERS else "linear_attention"
                      for i in range(45)]),
    dict(layer_types=None, linear_attn_config={k: v for k, v in NESTED.items()
                                               if k != "kda_layers"}),
], ids=["flat linear keys", "lists only", "first_k_dense", "indexed", "full", "one list"])
def test_spellings_agree(changes):
    assert Shape.from_config(changed(**changes)) == Shape.from_config(CONFIG)


def test_small_models(mini, oracle):
    shape = Shape.from_config(json.loads((mini / "config.json").read_text()))
    assert (shape.dsa_layers, shape.bindings, shape.pools_kept, shape.kda_heads) == (
        (3, 7), 3, 64, 8)
    assert shape.eos == (4079, 4083, 4085)
    for name in ("tiny-bf16", "tiny-fp8"):
        shape = Shape.from_config(json.loads((oracle / name / "config.json").read_text()))
        assert (shape.heads, shape.experts, shape.pools_kept, shape.eos) == (7, 10, 16, (1,))


def test_draft_block_is_optional():
    assert Shape.from_config(changed(num_nextn_predict_layers=None)).bindings == 11


@pytest.mark.parametrize("key", [
    "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
    "n_shared_experts", "routed_scaling_factor", "swiglu_limit", "num_attention_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_n_heads",
    "index_head_dim", "index_topk", "index_kpool", "hc_mult", "hc_sinkhorn_iters", "hc_eps"])
def test_a_missing_key_is_named(key):
    with pytest.raises(ShapeProblem, match=f"^{key}: is missing"):
        Shape.from_config(changed(**{key: None}))


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "short_conv_kernel_size",
                                 "gate_lower_bound"])
def test_a_missing_nested_key_is_named(key):
    with pytest.raises(ShapeProblem, match=f"^{key}: is missing"):
        Shape.from_config(changed(linear_attn_config={
            k: v for k, v in NESTED.items() if k != key}))


@pytest.mark.parametrize("key, value", [
    ("qk_rope_head_dim", 64), ("n_group", 8), ("topk_group", 4), ("attention_bias", True),
    ("tie_word_embeddings", True), ("hidden_act", "gelu"), ("norm_topk_prob", False),
    ("scoring_func", "softmax"), ("mhc", False), ("index_kpool_always_select_tail", False),
    ("always_select_tail", False), ("kpool_compress", False), ("mla_use_nope", False),
    ("hidden_size", 0), ("hidden_size", -1), ("hidden_size", "4096"), ("hidden_size", True),
    ("hidden_size", 4096.0), ("rms_norm_eps", "small"), ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", -1e-5), ("q_lora_rank", 1 << 40), ("index_topk", 2047),
    ("num_experts_per_tok", 289), ("num_nextn_predict_layers", 2), ("num_key_value_heads", 8),
    ("qk_head_dim", 320), ("eos_token_id", [154880]), ("eos_token_id", ["</s>"]),
    ("layer_types", ["linear_attention"] * 45), ("layer_types", ["linear_attention"] * 44),
    ("layer_types", ["sliding_attention"] * 45), ("layer_types", "all"),
    ("mlp_layer_types", ["dense"] * 44), ("mlp_layer_types", ["thick"] * 45),
    ("indexer_types", ["full"] * 44 + ["shared"]), ("indexer_types", 5),
    ("linear_attn_config", [])])
def test_a_value_that_is_not_computed_is_refused(key, value):
    with pytest.raises(ShapeProblem) as caught:
        Shape.from_config(changed(**{key: value}))
    assert key in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("dsa, kda", [
    ([i + 1 for i in DSA_LAYERS], [i + 1 for i in KDA_LAYERS]),     # 1-based: names layer 45
    (DSA_LAYERS[:-1], KDA_LAYERS), ([4, 8], None), (DSA_LAYERS, KDA_LAYERS + [3])])
def test_layer_lists_must_agree(dsa, kda):
    lists = {**NESTED, "full_attn_layers": dsa, "kda_layers": kda}
    if kda is None:
        del lists["kda_layers"]
    with pytest.raises(ShapeProblem, match="linear_attn_config"):
        Shape.from_config(changed(linear_attn_config=lists))


@pytest.mark.parametrize("changes, key", [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ({"model_type": "glm4"}, "model_type"),
    ({"text_config": None}, "text_config"), ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack"}},
     "quant_method"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "quant_method"),
    ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2",
                              "weight_block_size": [128, 128]}}, "fmt"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
     "weight_block_size"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    ({"quantization_config": "fp8"}, "quantization_config")])
def test_an_unknown_family_or_quantization_is_refused(changes, key):
    with pytest.raises(ShapeProblem) as caught:
        Shape.from_config({**CONFIG, **changes})
    assert key in caught.value.key and caught.value.hint


@pytest.mark.parametrize("config", [None, [], "config", {}])
def test_no_config_at_all(config):
    with pytest.raises(ShapeProblem):
        Shape.from_config(config)


# ---- the partition ----------------------------------------------------------------------------

@pytest.mark.parametrize("n, world, counts", [
    (64, 6, [11, 11, 11, 11, 10, 10]), (7, 8, [1] * 7 + [0]), (16, 5, [4, 3, 3, 3, 3]),
    (0, 3, [0] * 3), (5, 1, [5])])
def test_split_by_hand(n, world, counts):
    ranges = split(n, world)
    assert [stop - start for start, stop in ranges] == counts
    assert ranges[0][0] == 0 and ranges[-1][1] == n
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))


@pytest.mark.parametrize("n, world, size", [
    (2048, 8, 128), (12288, 6, 128), (154880, 7, 128), (1024, 8, 128), (512, 5, 64), (512, 8, 64),
    (64, 1, 64), (64, 3, 16), (64, 6, 8), (64, 8, 8), (4096, 6, 128), (7, 8, 1), (1030, 8, 2),
    (3, 2, 1)])
def test_unit_by_hand(n, world, size):
    assert unit(n, world) == size


@pytest.mark.parametrize("world", range(1, 9))
def test_parts_cover_everything_once(world, oracle):
    tiny = Shape.from_config(json.loads((oracle / "tiny-bf16" / "config.json").read_text()))
    for shape in (Shape.from_config(CONFIG), tiny):
        parts = [part(shape, rank, world) for rank in range(world)]
        for name, n in (("heads", shape.heads), ("kda_heads", shape.kda_heads),
                        ("dense", shape.intermediate), ("expert", shape.moe_intermediate),
                        ("shared", shape.shared_intermediate), ("vocab", shape.vocab)):
            ranges = [getattr(p, name) for p in parts]
            assert [i for start, stop in ranges for i in range(start, stop)] == list(range(n))


@pytest.mark.parametrize("world", range(1, 9))
def test_the_releases_slices_cut_no_scale_block(world):
    shape = Shape.from_config(CONFIG)
    for rank in range(world):
        own = part(shape, rank, world)
        for start, stop in (own.dense, own.expert, own.shared, own.vocab):
            assert start % 128 == 0 and stop % 128 == 0 and stop > start
