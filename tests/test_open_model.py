# python -m pytest tests/test_open_model.py
"""open_model: the tensors that a model must have, and each folder that is refused by name."""

import json

import numpy as np
import pytest

from engine.checkpoint import expected_tensors
from engine.errors import ModelError
from engine.shape import Shape
from engine.weights import open_model
from hostile import rewrite, stored, write_file
from release import CONFIG, is_fp8

LM = "model.language_model."


@pytest.fixture(params=["mini", "tiny-bf16", "tiny-fp8"])
def folder(request, mini, oracle):
    return mini if request.param == "mini" else oracle / request.param


def test_the_releases_tensors():
    """76,108 names with 347 of vision, 37,338 FP8 matrices, each class as counted in the files."""
    expected = expected_tensors(Shape.from_config(CONFIG))
    fp8 = {name for name in expected if is_fp8(name)}
    assert len(fp8) == 37_338
    names = set(expected) | {name + "_scale_inv" for name in fp8}
    assert len(names) == 76_108 - 347
    assert all("F8_E4M3" in expected[name][1] for name in fp8)
    draft = [n for n in names if n.startswith(LM + "layers.45.")]
    assert len(draft) == 1760
    trunk = names - set(draft)
    counts = {
        "kda": sum(".self_attn." in n and int(n.split(".")[3]) % 4 != 3 for n in trunk),
        "dsa": sum(".self_attn." in n and ".indexer." not in n and int(n.split(".")[3]) % 4 == 3
                   for n in trunk),
        "indexer": sum(".indexer." in n for n in trunk),
        "mhc": sum(".hc_" in n for n in trunk),
        "norm": sum(n.split(".")[-2] in ("norm", "input_layernorm", "post_attention_layernorm")
                    for n in trunk),
        "router": sum(".mlp.gate." in n for n in trunk),
        "dense": sum(".mlp." in n and n.split(".")[3] in ("0", "1", "2") for n in trunk),
        "shared": sum(".shared_experts." in n for n in trunk),
        "routed": sum(".experts." in n for n in trunk)}
    assert counts == dict(kda=510, dsa=121, indexer=77, mhc=270, norm=91, router=84, dense=18,
                          shared=252, routed=72_576)
    assert expected[LM + "layers.3.self_attn.kv_b_proj.weight"][0] == (32768, 512)
    assert expected[LM + "layers.0.self_attn.q_conv1d.weight"][0] == (8192, 1, 4)
    assert expected[LM + "layers.44.hc_ffn_fn"][0] == (24, 16384)
    assert expected[LM + "layers.45.eh_proj.weight"][0] == (4096, 8192)


def test_expected_tensors_are_those_of_the_files(folder):
    shape, _ = open_model(str(folder))
    theirs = {n: a.shape for n, (_, a) in stored(folder).items() if not n.endswith("_scale_inv")}
    assert {n: size for n, (size, _) in expected_tensors(shape).items()} == theirs


GATE = LM + "layers.0.mlp.gate_proj.weight"         # FP8 [256, 128], scales [2, 1]
KV_B = LM + "layers.3.self_attn.kv_b_proj.weight"   # BF16 [448, 64]
A_LOG = LM + "layers.0.self_attn.A_log"             # F32 [7]
EMBED = LM + "embed_tokens.weight"                  # BF16 [512, 128]
SCALE = GATE + "_scale_inv"
U8 = np.zeros((256, 64), np.uint8)

TENSORS = {
    "missing": ({A_LOG: None}, A_LOG, "missing"),
    "several missing": ({A_LOG: None, EMBED: None}, EMBED, "2 tensors"),
    "MTP in part": ({LM + "layers.8.hnorm.weight": None}, "layers.8.hnorm", "missing"),
    "scale missing": ({SCALE: None}, GATE, "missing"),
    "wrong shape": ({KV_B: ("BF16", np.zeros((448, 63), np.uint16))}, KV_B, "[448, 63]"),
    "transposed": ({KV_B: ("BF16", np.zeros((64, 448), np.uint16))}, KV_B, "[448, 64]"),
    "flattened": ({KV_B: ("BF16", np.zeros(448 * 64, np.uint16))}, KV_B, "[28672]"),
    "one dimension more": ({A_LOG: ("F32", np.zeros((7, 1), np.float32))}, A_LOG, "[7, 1]"),
    "a number": ({A_LOG: ("F32", np.zeros((), np.float32))}, A_LOG, "[]"),
    "F16": ({KV_B: ("F16", np.zeros((448, 64), np.float16))}, KV_B, "F16"),
    "I64": ({A_LOG: ("I64", np.zeros(7, np.int64))}, A_LOG, "I64"),
    "FP8 vector": ({A_LOG: ("F8_E4M3", np.zeros(7, np.uint8))}, A_LOG, "F8_E4M3"),
    "FP8 embedding": ({EMBED: ("F8_E4M3", np.zeros((512, 128), np.uint8))}, EMBED, "F8_E4M3"),
    "scale of BF16": ({KV_B + "_scale_inv": ("F32", np.ones((4, 1), np.float32))}, KV_B, "BF16"),
    "scale of a vector": ({A_LOG + "_scale_inv": ("F32", np.ones(1, np.float32))}, A_LOG,
                          "BF16 or F32"),
    "scale of embedding": ({EMBED + "_scale_inv": ("F32", np.ones((4, 1), np.float32))}, EMBED,
                           "BF16 or F32"),
    "scale a row": ({SCALE: ("F32", np.ones((256, 1), np.float32))}, SCALE, "[2, 1]"),
    "scale F16": ({SCALE: ("F16", np.ones((2, 1), np.float16))}, SCALE, "F16"),
    "unknown tensor": ({LM + "layers.0.self_attn.rotary.inv_freq": (
        "F32", np.zeros(4, np.float32))}, "inv_freq", "no tensor of this model"),
    "a layer too many": ({LM + "layers.9.input_layernorm.weight": (
        "BF16", np.zeros(128, np.uint16))}, "layers.9", "no tensor of this model"),
    "compressed-tensors": ({GATE: None, SCALE: None, GATE + "_packed": ("U8", U8)},
                           GATE + "_packed", "NVFP4"),
    "NVFP4 scales": ({GATE + "_scale_2": ("F32", np.zeros((), np.float32))}, GATE, "NVFP4"),
    "ModelOpt": ({GATE: ("U8", U8), SCALE: None}, GATE, "U8"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_wrong_tensor_is_refused_by_name(oracle, tmp_path, case):
    changes, name, says = TENSORS[case]
    tensors = {**stored(oracle / "tiny-fp8"), **changes}
    rewrite(tmp_path, {n: t for n, t in tensors.items() if t is not None}, oracle / "tiny-fp8")
    with pytest.raises(ModelError) as caught:
        open_model(str(tmp_path))
    said = str(caught.value)
    assert name in said and says in said and caught.value.hint
    assert str(tmp_path / "model.safetensors") in said


CONFIGS = {
    "another family": ({"model_type": "llama"}, "model_type"),
    "NVFP4": ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
              "quant_method"),
    "rows scaled": ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 128]}},
                    "weight_block_size"),
    "key missing": ({"text_config": {"hidden_size": 128}}, "text_config|missing"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_run_is_refused(oracle, tmp_path, case):
    changes, says = CONFIGS[case]
    source = oracle / "tiny-fp8"
    config = {**json.loads((source / "config.json").read_text()), **changes}
    rewrite(tmp_path, stored(source), source, config)
    with pytest.raises(ModelError, match=says) as caught:
        open_model(str(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("text, says", [(None, "cannot be read"), ("", "not JSON"),
                                        ("[1]", "not a JSON object"), ("\x00", "not JSON")])
def test_a_config_that_is_none_is_refused(oracle, tmp_path, text, says):
    write_file(tmp_path / "model.safetensors", stored(oracle / "tiny-fp8"))
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=says):
        open_model(str(tmp_path))


def test_what_is_no_folder_is_refused(oracle, mini):
    with pytest.raises(ModelError, match="is no folder"):
        open_model(str(mini / "no such folder"))
    with pytest.raises(ModelError, match="is no folder"):
        open_model(str(mini / "config.json"))


def test_another_models_config_is_refused(oracle, mini, tmp_path):
    rewrite(tmp_path, stored(oracle / "tiny-bf16"), mini)
    with pytest.raises(ModelError, match="is missing from .*model.safetensors .48 tensors"):
        open_model(str(tmp_path))


def test_a_draft_block_that_the_config_denies_is_refused(oracle, tmp_path):
    source = oracle / "tiny-bf16"
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    rewrite(tmp_path, stored(source), source, config)
    with pytest.raises(ModelError, match=r"layers\.8\."):
        open_model(str(tmp_path))
