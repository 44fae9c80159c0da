"""config.json of the GLM-5.3-Flash FP8 release, as far as the text model goes, and its FP8 rule."""

DSA_LAYERS = list(range(3, 45, 4))
KDA_LAYERS = [i for i in range(45) if i not in DSA_LAYERS]

CONFIG = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "tie_word_embeddings": False,
    "eos_token_id": [154820, 154827, 154829],
    "vision_config": {"depth": 24, "hidden_size": 1024},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
    "text_config": {
        "model_type": "glm5_next_text", "hidden_size": 4096, "num_hidden_layers": 45,
        "vocab_size": 154880, "max_position_embeddings": 1048576, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "head_dim": 0,
        "layer_types": ["deepseek_sparse_attention" if i in DSA_LAYERS else "linear_attention"
                        for i in range(45)],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "first_k_dense_replace": 3,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 288,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5, "moe_router_dtype": "float32", "swiglu_limit": 10.0,
        "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "qk_head_dim": 256,
        "v_head_dim": 256, "mla_use_nope": True, "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": 2048, "index_kpool": 4, "kpool_compress": True, "always_select_tail": True,
        "indexer_types": ["full"] * 45, "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "linear_attn_config": {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4,
                               "gate_lower_bound": -5.0, "kda_layers": KDA_LAYERS,
                               "full_attn_layers": DSA_LAYERS},
        "mhc": True, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "num_nextn_predict_layers": 1,
    },
}


def is_fp8(name):
    """Whether the FP8 release holds this matrix in e4m3: all MLP projections, four of each DSA."""
    if ".mlp." in name:
        return name.endswith("_proj.weight")
    layer = name.split(".layers.")[-1].split(".")[0]
    return (layer.isdigit() and int(layer) in DSA_LAYERS + [45] and name.endswith(
        tuple(f"self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
                                                "o_proj"))))


def fp8_kind(name):
    """The dtype of a tensor in the FP8 release, for what the plan asks: matrices."""
    return "F8_E4M3" if is_fp8(name) else "BF16"
