"""What a decode step of GLM-5.3-Flash should cost on DGX Sparks (GB10): a projection, not a run.

    python bench/project.py                 # the tables of docs/spark.md
    python bench/project.py --gemv 0.8 --context 500000

Bytes that one token moves on each rank, over the memory speed that a kernel of that kind reaches,
plus launches, plus what crosses the link. The bytes are arithmetic from the model's numbers and
the release's storage formats; the shares of copy speed are measured on another GPU (bench/step.py,
bench/kernels_*.py) and given as options. The slowest rank sets the time: rank 0, which holds one
unit more where a dimension does not divide.
"""

import argparse
import pathlib
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import engine.config  # noqa: E402

engine.config.prepare_environment()

from engine.memory import token_bytes  # noqa: E402
from engine.release import release_shape  # noqa: E402
from engine.shape import SCALE_BLOCK, part  # noqa: E402

# Shares of the device's copy speed, by what a kernel reads; defaults of the options. Measured on an
# H200 (bench/RESULTS.md, 2026-12-01): matrices weighed by their bytes in a token; attend and states
# with 8 rows, where latency rules less; score at 1M tokens, one row.
RATIOS = {"gemv": 0.75, "attend": 0.12, "score": 0.37, "state": 0.41}
PEAK = 273.0                # GB/s of GB10's LPDDR5X
COPY = (208.0, 220.0)       # GB/s that others have reached there
LINK = 12.0                 # GB/s of one of the two PCIe x4 halves of the 200 Gb/s port
LATENCY, PEER = 20.0, 3.5   # us a collective: fixed, and for each peer
LAUNCH, KERNELS = 0.9, 18   # us a kernel in a graph (H200), kernels a layer
MEMORY = 121                # GiB of a Spark
WORLDS, CONTEXTS = (1, 2, 3, 4, 6), (32_768, 131_072, 1_048_576)
FLOAT, BITS16 = 4, 2


# ---- bytes of weights --------------------------------------------------------------------------

def bf16(rows, columns):
    return BITS16 * rows * columns


def fp8(rows, columns):
    """e4m3 codes and a float32 scale for each 128 x 128."""
    return rows * columns + FLOAT * -(-rows // SCALE_BLOCK) * -(-columns // SCALE_BLOCK)


def length(span):
    return span[1] - span[0]


def kda_bytes(s, own):
    heads, d = length(own.kda_heads), s.kda_dim
    wide = heads * d
    vectors = 3 * wide * s.conv + heads + wide + d
    return {"KDA": bf16(3 * wide + 2 * d + heads, s.hidden) + 2 * bf16(wide, d)
            + bf16(s.hidden, wide) + FLOAT * vectors}


def dsa_bytes(s, own):
    h = length(own.heads)
    ups = h * (bf16(s.kv_lora, s.qk_nope) + bf16(s.v_head, s.kv_lora))
    index = bf16(2 * s.index_dim + s.index_heads, s.hidden)
    index += bf16(s.index_heads * s.index_dim, s.q_lora)
    return {"DSA": fp8(s.q_lora + s.kv_lora, s.hidden) + fp8(h * s.qk_nope, s.q_lora) + ups
            + fp8(s.hidden, h * s.v_head) + FLOAT * (s.q_lora + s.kv_lora),
            "indexer": index + FLOAT * s.index_dim * (2 + s.index_kpool)}


def mlp_bytes(s, columns):
    return fp8(2 * columns, s.hidden) + fp8(s.hidden, columns)


def moe_bytes(s, own, experts):
    """experts: how many different ones are read."""
    return {"routers": bf16(s.experts, s.hidden) + FLOAT * s.experts,
            "experts": experts * mlp_bytes(s, length(own.expert)),
            "shared experts": mlp_bytes(s, length(own.shared))}


def weight_bytes(s, own, experts):
    """{name: bytes} of the weights that a step reads once on a rank, `experts` a MoE layer."""
    found = {}

    def count(sizes):
        for name, size in sizes.items():
            found[name] = found.get(name, 0) + size

    for kind, feed in zip(s.layer_types, s.mlp_types):
        count(dsa_bytes(s, own) if kind == "dsa" else kda_bytes(s, own))
        count(moe_bytes(s, own, experts) if feed == "sparse" else
              {"dense MLPs": mlp_bytes(s, length(own.dense))})
        count({"hyper-connections": 2 * (bf16(s.hyper_rows, s.hc_mult * s.hidden)
                                         + FLOAT * (s.hyper_rows + 3)),
               "norms": 2 * FLOAT * s.hidden})
    count({"norms": FLOAT * s.hidden, "head": bf16(length(own.vocab), s.hidden)})
    return found


def draft_bytes(s, own):
    """Bytes that the draft block takes on a rank."""
    return (sum(dsa_bytes(s, own).values()) + sum(moe_bytes(s, own, s.experts).values())
            + bf16(s.hidden, 2 * s.hidden) + 5 * FLOAT * s.hidden)


# ---- bytes of a conversation -------------------------------------------------------------------

def state_bytes(s, own):
    """KDA states and convolution rows of one conversation, read and written."""
    heads, d = length(own.kda_heads), s.kda_dim
    return 2 * FLOAT * len(s.kda_layers) * heads * (d * d + (s.conv - 1) * 3 * d)


def kv_bytes(s, context, world):
    """(pooled keys scored, latent rows attended) a row on one rank of `world`, all DSA layers."""
    pools, layers = context // s.index_kpool, len(s.dsa_layers)
    scored = -(-pools // world) if pools > s.pools_kept else 0
    attended = -(-min(context, s.list_width) // world)
    return BITS16 * layers * scored * s.index_dim, BITS16 * layers * attended * s.kv_lora


# ---- the link ----------------------------------------------------------------------------------

def collectives(s, world, whole=False):
    """[(name, how many a token, bytes that rank 0 receives in each)] of one row, KV split.

    whole: the KV is replicated, or lies below R: then DSA layers exchange nothing.
    """
    if world == 1:
        return []
    own, others = part(s, 0, world), world - 1
    heads, dsa = length(own.heads), len(s.dsa_layers)
    found = [("sums of layers", 2 * s.layers, others * FLOAT * s.hidden),
             ("logits", 1, FLOAT * (s.vocab - length(own.vocab))), ("plan", 1, 64)]
    if not whole:
        queries = (s.heads - heads) * s.kv_lora * FLOAT
        found += [("candidates, queries", dsa, others * 8 * s.pools_kept + queries),
                  ("partials", dsa, others * heads * (s.kv_lora + 1) * FLOAT)]
    return found


def link_ms(s, world, options, whole=False):
    fixed = options.latency + options.peer * (world - 1)
    return sum(n * (fixed + size / options.link / 1e3)
               for _, n, size in collectives(s, world, whole)) / 1e3


# ---- the step ----------------------------------------------------------------------------------

def step_ms(s, context, world, options, copy, whole=False):
    """{part: milliseconds} of one token of one conversation on rank 0 of `world` Sparks."""
    own = part(s, 0, world)
    scored, attended = kv_bytes(s, context, 1 if whole else world)
    if whole:                           # every rank attends its own heads over all rows
        attended = kv_bytes(s, context, 1)[1]

    def ms(size, share):
        return size / (copy * share) / 1e6

    return {"weights": ms(sum(weight_bytes(s, own, s.experts_per_token).values()), options.gemv),
            "states": ms(state_bytes(s, own), options.state),
            "score": ms(scored, options.score), "attend": ms(attended, options.attend),
            "launches": options.kernels * s.layers * options.launch / 1e3,
            "link": link_ms(s, world, options, whole)}


def resident_gib(s, context, world):
    """GiB of rank 0: all weights, the draft block, one conversation's KV and states."""
    own = part(s, 0, world)
    kv = token_bytes(replaced_mtp(s), world) * context
    weights = sum(weight_bytes(s, own, s.experts).values()) + draft_bytes(s, own)
    return (weights + kv + state_bytes(s, own) // 2) / 2 ** 30


def replaced_mtp(s):
    """The shape with its draft block, which has the twelfth binding."""
    return type(s)(**{**vars(s), "mtp": 1})


def tables(options):
    """Lines of the projection, Markdown."""
    s, low, high = release_shape(), *options.copy
    own = part(s, 0, 1)
    sizes = weight_bytes(s, own, s.experts_per_token)
    yield from textwrap.wrap(
        "GB read a token on one rank: " + ", ".join(
            f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
        + f"; in all {sum(sizes.values()) / 1e9:.2f}. States, read and written: "
        f"{state_bytes(s, own) / 1e9:.2f}.", 100)
    yield ""
    yield "| W | rank 0 reads, GB | rank 0 holds at 128k, GiB | collectives | received, MB |"
    yield "|---|---|---|---|---|"
    for world in options.world:
        own, calls = part(s, 0, world), collectives(s, world)
        held = resident_gib(s, 131_072, world)
        read = sum(weight_bytes(s, own, s.experts_per_token).values())
        yield (f"| {world} | {read / 1e9:.2f} | {held:.1f}{'' if held < MEMORY - 8 else ' (!)'} | "
               f"{sum(n for _, n, _ in calls)} | {sum(n * b for _, n, b in calls) / 1e6:.2f} |")
    names = ("weights", "states", "score", "attend", "launches", "link")
    yield "\nMilliseconds a token by part; the last column is tokens/s with the KV whole.\n"
    yield "| W | context | " + " | ".join(names) + " | token | tokens/s | KV whole |"
    yield "|---" * (len(names) + 5) + "|"
    for world in options.world:
        for context in options.context:
            ends = [step_ms(s, context, world, options, copy) for copy in (low, high)]
            slow, fast = (sum(e.values()) for e in ends)
            middle = [(ends[0][n] + ends[1][n]) / 2 for n in names]
            whole = sum(step_ms(s, context, world, options, (low + high) / 2, True).values())
            yield (f"| {world} | {context:,} | " + " | ".join(f"{m:.2f}" for m in middle)
                   + f" | {(slow + fast) / 2:.1f} | {1e3 / slow:.1f} to {1e3 / fast:.1f} | "
                   f"{1e3 / whole:.1f} |")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in RATIOS.items():
        parser.add_argument(f"--{name}", type=float, default=value,
                            help=f"share of copy speed (default {value})")
    add = parser.add_argument
    add("--copy", type=float, nargs=2, default=COPY, metavar=("LOW", "HIGH"),
        help=f"GB/s of a copy on GB10 (default {COPY[0]:.0f} {COPY[1]:.0f}; peak {PEAK:.0f})")
    add("--link", type=float, default=LINK, help=f"GB/s received (default {LINK})")
    add("--latency", type=float, default=LATENCY, help=f"us a collective (default {LATENCY})")
    add("--peer", type=float, default=PEER, help=f"us more for each peer (default {PEER})")
    add("--launch", type=float, default=LAUNCH, help=f"us a kernel (default {LAUNCH})")
    add("--kernels", type=int, default=KERNELS, help=f"kernels a layer (default {KERNELS})")
    add("--world", type=int, nargs="+", default=WORLDS)
    add("--context", type=int, nargs="+", default=CONTEXTS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    for line in tables(parse()):
        print(line)
