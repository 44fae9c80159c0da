"""Every number of the model, from config.json, and how its dimensions divide over the ranks.

Imports nothing of ours. `Shape.from_config` accepts the two spellings in use: the release's, with
the linear attention nested in `linear_attn_config`, and transformers', with flat `linear_*` keys.
A config that asks for what the engine does not compute is a `ShapeProblem`, never a guess: no key
has a default here unless the model family itself has one value only.

`split`, `unit` and `part` are the whole partition: pure, any world of 1 to 8 ranks, nothing need
divide.
"""

import math
from dataclasses import dataclass

ARCHITECTURE = "Glm5NextForConditionalGeneration"
MODEL_TYPE = "glm5_next"
SCALE_BLOCK = 128       # rows and columns that share one FP8 scale, and the widest slicing unit
MAX_WORLD = 8

_DSA_NAMES = ("deepseek_sparse_attention", "indexed_attention", "full_attention")
_KDA_NAMES = ("linear_attention",)
# Keys whose other values change the arithmetic: where given, they must say this.
_ONLY = {
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "qk_rope_head_dim": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "mla_use_nope": True, "mhc": True,
    "kpool_compress": True, "index_kpool_compress": True,
    "always_select_tail": True, "index_kpool_always_select_tail": True,
}


class ShapeProblem(ValueError):
    """The config cannot be used. key: the config.json key at fault; hint: the remedy."""

    def __init__(self, key, what, hint="use a GLM-5.3-Flash checkpoint with its own config.json"):
        super().__init__(f"{key}: {what}")
        self.key = key
        self.hint = hint


@dataclass(frozen=True)
class Shape:
    """The model's numbers. Names follow design.md's words; comments give the config.json key."""

    hidden: int                 # hidden_size
    layers: int                 # num_hidden_layers, the draft (MTP) block not counted
    vocab: int                  # vocab_size
    window: int                 # max_position_embeddings, tokens
    eps: float                  # rms_norm_eps, of every RMS norm
    layer_types: tuple          # "kda" | "dsa", one a layer
    mlp_types: tuple            # "dense" | "sparse", one a layer
    intermediate: int           # intermediate_size: columns of a dense MLP
    moe_intermediate: int       # moe_intermediate_size: columns of one expert
    experts: int                # n_routed_experts
    experts_per_token: int      # num_experts_per_tok
    shared_experts: int         # n_shared_experts, stored as one MLP of that many widths
    routed_scaling: float       # routed_scaling_factor
    swiglu_limit: float         # swiglu_limit
    heads: int                  # num_attention_heads, DSA
    q_lora: int                 # q_lora_rank
    kv_lora: int                # kv_lora_rank: values in a latent row
    qk_nope: int                # qk_nope_head_dim: the whole query head, there is no rotary part
    v_head: int                 # v_head_dim
    index_heads: int            # index_n_heads
    index_dim: int              # index_head_dim: values in a pooled key
    index_topk: int             # index_topk, tokens
    index_kpool: int            # index_kpool, tokens a pool
    kda_heads: int              # linear_num_heads | linear_attn_config.num_heads
    kda_dim: int                # linear_head_dim | linear_attn_config.head_dim
    conv: int                   # linear_conv_kernel_dim | linear_attn_config.short_conv_kernel_size
    gate_bound: float           # linear_lower_bound | linear_attn_config.gate_lower_bound
    hc_mult: int                # hc_mult: residual streams
    hc_iters: int               # hc_sinkhorn_iters
    hc_eps: float               # hc_eps
    mtp: int                    # num_nextn_predict_layers, 0 or 1
    eos: tuple                  # eos_token_id, as in config.json

    @property
    def dsa_layers(self):
        """Indices of the DSA layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "dsa")

    @property
    def kda_layers(self):
        """Indices of the KDA layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "kda")

    @property
    def bindings(self):
        """Layers that keep KV: the DSA layers and the draft block, which is the last one."""
        return len(self.dsa_layers) + self.mtp

    @property
    def pools_kept(self):
        """Pools that selection keeps for a row."""
        return self.index_topk // self.index_kpool

    @property
    def list_width(self):
        """Rows that a selected list can hold: the kept pools' rows and the raw tail."""
        return self.index_topk + self.index_kpool - 1

    @property
    def hyper_rows(self):
        """Outputs of a hyper-connection's projection: S for pre, S for post, S x S for the mix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def shared_intermediate(self):
        """Columns of the shared experts' one MLP."""
        return self.moe_intermediate * self.shared_experts

    @staticmethod
    def from_config(config):
        """The Shape of a parsed config.json. Raises ShapeProblem, which names the key."""
        if not isinstance(config, dict):
            raise ShapeProblem("config.json", "is not a JSON object")
        _check_family(config)
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise ShapeProblem("text_config", "is missing or not an object")
        for key, value in _ONLY.items():
            for given in (text, config):
                if given.get(key) not in (None, value):
                    raise ShapeProblem(key, f"is {given[key]!r}, the engine computes "
                                       f"{value!r} only")
        _check_quantization(config.get("quantization_config", text.get("quantization_config")))
        linear = _linear_numbers(text)
        layers = _count(text, "num_hidden_layers")
        shape = Shape(
            hidden=_count(text, "hidden_size"), layers=layers, vocab=_count(text, "vocab_size"),
            window=_count(text, "max_position_embeddings"), eps=_real(text, "rms_norm_eps"),
            layer_types=_layer_types(text, layers), mlp_types=_mlp_types(text, layers),
            intermediate=_count(text, "intermediate_size"),
            moe_intermediate=_count(text, "moe_intermediate_size"),
            experts=_count(text, "n_routed_experts"),
            experts_per_token=_count(text, "num_experts_per_tok"),
            shared_experts=_count(text, "n_shared_experts"),
            routed_scaling=_real(text, "routed_scaling_factor"),
            swiglu_limit=_real(text, "swiglu_limit"),
            heads=_count(text, "num_attention_heads"), q_lora=_count(text, "q_lora_rank"),
            kv_lora=_count(text, "kv_lora_rank"), qk_nope=_count(text, "qk_nope_head_dim"),
            v_head=_count(text, "v_head_dim"), index_heads=_count(text, "index_n_heads"),
            index_dim=_count(text, "index_head_dim"), index_topk=_count(text, "index_topk"),
            index_kpool=_count(text, "index_kpool"), hc_mult=_count(text, "hc_mult"),
            hc_iters=_count(text, "hc_sinkhorn_iters"), hc_eps=_real(text, "hc_eps"),
            mtp=_count(text, "num_nextn_predict_layers", least=0) if
            text.get("num_nextn_predict_layers") is not None else 0,
            eos=_eos(text, config), **linear)
        _check_relations(shape, text)
        return shape


# ---- reading single keys ----------------------------------------------------------------------

def _count(text, key, least=1):
    value = text.get(key)
    if value is None:
        raise ShapeProblem(key, "is missing")
    if type(value) is not int or not least <= value < 1 << 31:
        raise ShapeProblem(key, f"is {value!r}, not a whole number from {least}")
    return value


def _real(text, key):
    value = text.get(key)
    if value is None:
        raise ShapeProblem(key, "is missing")
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ShapeProblem(key, f"is {value!r}, not a finite number")
    return float(value)


def _index_list(values, key, layers):
    if not isinstance(values, list) or any(type(i) is not int or not 0 <= i < layers
                                           for i in values):
        raise ShapeProblem(key, f"is {values!r}, not a list of layers 0 to {layers - 1}")
    return set(values)


def _eos(text, config):
    value = text.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    value = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in value):
        raise ShapeProblem("eos_token_id", f"is {value!r}, not token ids")
    return tuple(value)


def _linear_numbers(text):
    """KDA's four numbers, from the nested or the flat spelling."""
    nested = text.get("linear_attn_config")
    if nested is None:
        keys, source = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim",
                        "linear_lower_bound"), text
    elif isinstance(nested, dict):
        keys, source = ("num_heads", "head_dim", "short_conv_kernel_size",
                        "gate_lower_bound"), nested
    else:
        raise ShapeProblem("linear_attn_config", "is not an object")
    return dict(kda_heads=_count(source, keys[0]), kda_dim=_count(source, keys[1]),
                conv=_count(source, keys[2], least=2), gate_bound=_real(source, keys[3]))


def _layer_types(text, layers):
    """"kda" | "dsa" a layer, from layer_types or the release's lists; both must agree.

    The lists are 0-based. Read as 1-based (an older model's habit) they would name a layer past the
    end or disagree with layer_types, and either is refused.
    """
    named = nested = None
    if text.get("layer_types") is not None:
        names = text["layer_types"]
        if not isinstance(names, list) or len(names) != layers:
            raise ShapeProblem("layer_types", f"must list {layers} layers")
        strange = [n for n in names if n not in _DSA_NAMES + _KDA_NAMES]
        if strange:
            raise ShapeProblem("layer_types", f"has {strange[0]!r}, known are "
                               + ", ".join(_KDA_NAMES + _DSA_NAMES))
        named = tuple("dsa" if n in _DSA_NAMES else "kda" for n in names)
    lists = text.get("linear_attn_config") or {}
    if "full_attn_layers" in lists:
        key = "linear_attn_config.full_attn_layers"
        dsa = _index_list(lists["full_attn_layers"], key, layers)
        rest = set(range(layers)) - dsa
        if _index_list(lists.get("kda_layers", sorted(rest)), "linear_attn_config.kda_layers",
                       layers) != rest:
            raise ShapeProblem("linear_attn_config.kda_layers",
                               "and full_attn_layers do not name each layer once (0-based)")
        nested = tuple("dsa" if i in dsa else "kda" for i in range(layers))
        if named is not None and named != nested:
            raise ShapeProblem(key, "and layer_types disagree")
    types = named or nested
    if types is None:
        raise ShapeProblem("layer_types", "is missing, and so is linear_attn_config's list")
    if "dsa" not in types:
        raise ShapeProblem("layer_types", "names no sparse attention layer")
    return types


def _mlp_types(text, layers):
    names = text.get("mlp_layer_types")
    if names is None:
        dense = _count(text, "first_k_dense_replace", least=0)
        return tuple("dense" if i < dense else "sparse" for i in range(layers))
    if not isinstance(names, list) or len(names) != layers or any(
            n not in ("dense", "sparse") for n in names):
        raise ShapeProblem("mlp_layer_types", f"must list {layers} times dense or sparse")
    return tuple(names)


# ---- what the engine does not compute ---------------------------------------------------------

def _check_family(config):
    names = config.get("architectures")
    if names is not None and names != [ARCHITECTURE]:
        raise ShapeProblem("architectures", f"is {names!r}, the engine runs {ARCHITECTURE} only")
    if config.get("model_type") != MODEL_TYPE:
        raise ShapeProblem("model_type", f"is {config.get('model_type')!r}, "
                           f"the engine runs {MODEL_TYPE} only")


def _check_quantization(quantization):
    remedy = ("use the release's FP8 checkpoint (e4m3 with weight_scale_inv, 128 x 128 blocks) "
              "or its BF16 one")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise ShapeProblem("quantization_config", "is not an object", remedy)
    method = quantization.get("quant_method")
    if method != "fp8":
        raise ShapeProblem("quantization_config.quant_method",
                           f"is {method!r}, the engine reads 'fp8' only", remedy)
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise ShapeProblem("quantization_config.fmt",
                           f"is {quantization['fmt']!r}, the engine reads 'e4m3' only", remedy)
    block = quantization.get("weight_block_size")
    if block != [SCALE_BLOCK, SCALE_BLOCK]:
        raise ShapeProblem("quantization_config.weight_block_size",
                           f"is {block!r}, the engine reads [128, 128] only", remedy)


def _check_relations(shape, text):
    if shape.index_topk % shape.index_kpool:
        raise ShapeProblem("index_topk", f"{shape.index_topk} is no multiple of index_kpool "
                           f"{shape.index_kpool}")
    if shape.experts_per_token > shape.experts:
        raise ShapeProblem("num_experts_per_tok", f"{shape.experts_per_token} is more than "
                           f"n_routed_experts {shape.experts}")
    if shape.mtp > 1:
        raise ShapeProblem("num_nextn_predict_layers", f"is {shape.mtp}, the engine knows one "
                           "draft block")
    for key, value in (("eps", shape.eps), ("hc_eps", shape.hc_eps)):
        if value < 0:
            raise ShapeProblem("rms_norm_eps" if key == "eps" else key, f"is {value}, below 0")
    for key, value in (("num_key_value_heads", shape.heads), ("qk_head_dim", shape.qk_nope)):
        if text.get(key, value) != value:
            raise ShapeProblem(key, f"is {text[key]!r}, the engine computes {value} only "
                               "(one latent, no rotary part)")
    indexers = text.get("indexer_types")
    if indexers is not None and indexers != ["full"] * shape.layers:
        raise ShapeProblem("indexer_types", f"must say 'full' for each of {shape.layers} layers: "
                           "the engine shares no indexer between layers")
    if any(i >= shape.vocab for i in shape.eos):
        raise ShapeProblem("eos_token_id", f"{max(shape.eos)} is outside the vocabulary of "
                           f"{shape.vocab}")


# ---- the partition ----------------------------------------------------------------------------

def split(n, world):
    """[(start, stop)] of n units over the ranks, in order: the first n % world get one more."""
    base, more = divmod(n, world)
    starts = [rank * base + min(rank, more) for rank in range(world + 1)]
    return list(zip(starts[:-1], starts[1:]))


def unit(n, world):
    """Rows or columns that are dealt together: 128 where every rank gets one, else less.

    The largest power of two up to 128 that divides n and leaves at least `world` units, 1 if none
    does. 128 keeps a slice from cutting an FP8 scale block; a smaller unit cuts one, which the
    reader allows since it scales by absolute row and column.
    """
    size = SCALE_BLOCK
    while size > 1 and (n % size or n // size < world):
        size //= 2
    return size


@dataclass(frozen=True)
class Part:
    """What one rank holds: (start, stop) in each divided dimension. A range may be empty."""

    rank: int
    world: int
    heads: tuple        # DSA heads
    kda_heads: tuple    # KDA heads
    dense: tuple        # columns of a dense MLP
    expert: tuple       # columns of every routed expert
    shared: tuple       # columns of the shared experts' MLP
    vocab: tuple        # rows of the output head


def part(shape, rank, world):
    """The Part of `rank` in a world of 1 to 8 ranks."""
    assert 1 <= world <= MAX_WORLD and 0 <= rank < world, (rank, world)

    def own(n):
        size = unit(n, world)
        start, stop = split(n // size, world)[rank]
        return start * size, stop * size

    return Part(rank=rank, world=world, heads=split(shape.heads, world)[rank],
                kda_heads=split(shape.kda_heads, world)[rank], dense=own(shape.intermediate),
                expert=own(shape.moe_intermediate), shared=own(shape.shared_intermediate),
                vocab=own(shape.vocab))
