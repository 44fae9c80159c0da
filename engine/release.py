"""Released models known by name: their Shapes and storage formats, without a file of theirs.

For `--weights random`: `named_shape` gives the first layers of a model, without its draft block,
and `Unwritten` stands where a Checkpoint does: which tensor is FP8 is the release's choice, and
`engine.random_weights` makes them so.
"""

from engine.errors import RequestError, UsageError
from engine.shape import Shape

LAYERS = 45                 # of GLM-5.3-Flash
DENSE = 3                   # its first layers have a dense MLP
DSA_EVERY = 4               # layers 3, 7, 11, ... are DSA
FP8_OF_DSA = tuple(f"self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
                                                     "o_proj"))


def release_shape(layers=LAYERS):
    """The Shape of GLM-5.3-Flash's first `layers` layers, no draft block."""
    assert 1 <= layers <= LAYERS, layers
    kinds = tuple("dsa" if i % DSA_EVERY == DSA_EVERY - 1 else "kda" for i in range(layers))
    return Shape(
        hidden=4096, layers=layers, vocab=154880, window=1 << 20, eps=1e-5, layer_types=kinds,
        mlp_types=tuple("dense" if i < DENSE else "sparse" for i in range(layers)),
        intermediate=12288, moe_intermediate=2048, experts=288, experts_per_token=8,
        shared_experts=1, routed_scaling=2.5, swiglu_limit=10.0, heads=64, q_lora=1536,
        kv_lora=512, qk_nope=256, v_head=256, index_heads=32, index_dim=128, index_topk=2048,
        index_kpool=4, kda_heads=64, kda_dim=128, conv=4, gate_bound=-5.0, hc_mult=4, hc_iters=20,
        hc_eps=1e-6, mtp=0, eos=(154820, 154827, 154829))


SHAPES = {"glm-5.3-flash": (LAYERS, release_shape)}     # name -> its layers, Shape of the first n


def named_shape(name, layers=None):
    """The Shape of a released model's first `layers` layers (None: all). UsageError by name."""
    if name not in SHAPES:
        raise UsageError(f"--shape {name}: not a released model that is known here",
                         "known: " + ", ".join(f"--shape {known}" for known in SHAPES))
    most, make = SHAPES[name]
    if layers is not None and layers > most:
        raise UsageError(f"--layers {layers}: {name} has {most} layers", f"--layers {most}")
    return make(layers or most)


class Unwritten:
    """What a Checkpoint is for a model from files, for one that is made: kinds, and a note."""

    notes = ("the weights are random: what this model replies means nothing",)

    @staticmethod
    def kind(name):
        """The dtype word of a matrix: FP8 MLP projections and four matrices of each DSA layer."""
        layer = name.split(".layers.")[-1].split(".")[0]
        dsa = layer.isdigit() and int(layer) % DSA_EVERY == DSA_EVERY - 1
        if ".mlp." in name:
            fp8 = name.endswith("_proj.weight")
        else:
            fp8 = dsa and name.endswith(FP8_OF_DSA)
        return "F8_E4M3" if fp8 else "BF16"


class IdsOnly:
    """What a Chat is for a model with a folder, for one that has no tokenizer: ids in, ids out."""

    has_text = False
    sampling_defaults = (0.0, 1.0)

    def __init__(self, shape):
        self.eos = shape.eos

    def require_text(self):
        """RequestError: there is no text here."""
        raise RequestError("--weights random makes a model without a tokenizer: it reads and "
                           "writes token ids only", "--prompt-ids 5,17,42")
