"""The plan of memory: bytes that each rank will hold, by name, before anything is allocated.

Pure arithmetic from the Shape, the Config's numbers and the kinds in the checkpoint's headers.
What it says for weights, pages, states and page tables is what those allocate, to the byte. A
window is what one conversation can grow to, `context` tokens and the draft's overhang, in whole
pages.

`plan` refuses (PlanError) a pool in which no window could ever lie, before anything is changed;
`check_memory` ranks whose plans together are more than their device, or machine, has free.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.checkpoint import HEAD, layer_name
from engine.errors import PlanError
from engine.linear import BLOCK
from engine.pool.owner import OWNER, STRIPED, class_size, needed, smallest_pool
from engine.shape import SCALE_BLOCK, part
from engine.slices import KEPT, rows_a_scale

FLOAT = 4
KV_ITEM = {"bf16": 2, "float32": 4}
DRAFT_OVERHANG = 1      # rows that a draft of one token writes past the window's last


@dataclass(frozen=True)
class Plan:
    """What a start will take.

    window: pages of one window. classes: split pages of each class (one class where nothing is
    split). replicated: pages of the region below R, on every rank. windows: windows that lie in the
    empty pool at once. token_bytes: KV bytes a token a rank, rounded. ranks: for each rank its
    (name, bytes) pairs.
    """

    window: int
    classes: tuple
    replicated: int
    windows: int
    token_bytes: int
    ranks: tuple

    def total(self, rank):
        """Bytes of one rank."""
        return sum(size for _, size in self.ranks[rank])


def plan(config, shape, world, kind, scratch=()):
    """The Plan of `world` ranks. Raises PlanError where no window fits the pool.

    config: engine.config.Config with `context` filled in. kind: tensor name -> "BF16" | "F32" |
    "F8_E4M3". scratch: (name, bytes) of buffers that each rank allocates besides.
    """
    window = window_pages(config.context, config.page_rows)
    split_pages, replicated = pool_pages(config, world)
    classes = classes_of(config, world)
    totals = tuple(class_size(split_pages, classes, c) for c in range(classes))
    windows = _windows(config, window, totals)
    if not windows:
        raise _too_small(config, window, totals, split_pages)
    ranks = []
    for rank in range(world):
        own = part(shape, rank, world)
        pages = replicated + totals[rank if classes > 1 else 0]
        ranks.append((*weight_bytes(shape, own, kind, config.backend).items(),
                      *page_bytes(shape, config, pages), *state_bytes(shape, own, config.parallel),
                      ("page tables", table_bytes(config.parallel, window)), *scratch))
    return Plan(window, totals, replicated, windows,
                token_bytes(shape, classes, item=KV_ITEM[config.kv_dtype]), tuple(ranks))


class Place(NamedTuple):
    """The memory that one rank takes from: ranks of one key share it. Bytes; pid: the rank's own.
    """

    key: int
    free: int
    total: int
    pid: int


def check_memory(made, places, users=lambda ranks: ""):
    """PlanError where ranks that share a memory need more of it than is free.

    made: Plan. places: a Place for each rank, so every rank comes to the same verdict.
    users(ranks): who else uses the memory of these ranks, in words, or "".
    """
    for key in dict.fromkeys(place.key for place in places):
        ranks = [r for r, place in enumerate(places) if place.key == key]
        needs, free = sum(made.total(r) for r in ranks), min(places[r].free for r in ranks)
        if needs <= free:
            continue
        most = max(ranks, key=made.total)
        names = sorted(made.ranks[most], key=lambda pair: -pair[1])[:4]
        several = (f"ranks {', '.join(map(str, ranks))} share a memory and need {_gib(needs)} "
                   f"together; " if ranks[1:] else "")
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in names)
        others = "; ".join(("", *filter(None, [users(ranks)])))
        raise PlanError(f"{several}rank {most} needs {_gib(made.total(most))} ({parts}, ...); "
                        f"{_gib(free)} of {_gib(places[most].total)} are free{others}",
                        "fewer --pages, a shorter --context or less --parallel; more ranks on "
                        "other machines; `plan` lists what takes how much")


def _gib(size):
    return f"{size / 2 ** 30:,.2f} GiB"


# ---- pages ------------------------------------------------------------------------------------

def window_pages(context, page_rows, overhang=DRAFT_OVERHANG):
    """Pages of one conversation of `context` tokens, the draft's rows past its end included."""
    return -(-(context + overhang) // page_rows)


def pool_pages(config, world):
    """(split pages over all classes, pages of the replicated region).

    --pages counts split pages. Without it there are enough for `parallel` windows: under owner
    whole windows in every class; striped, as many pages as the windows have, and in each class
    what `parallel` conversations of `context` tokens take of it.
    """
    classes = classes_of(config, world)
    window = window_pages(config.context, config.page_rows)
    below = min(pages_below(config, classes), window)
    replicated = config.parallel * below
    if config.pages is not None:
        return config.pages, replicated
    if config.placement == OWNER:
        return classes * -(-config.parallel // classes) * window, replicated
    full = needed(STRIPED, window_pages(config.context, config.page_rows, 0), below, classes)
    return max(config.parallel * (window - below),
               smallest_pool([config.parallel * n for n in full])), replicated


def classes_of(config, world):
    """Owner classes: one a rank where the KV is split, else one in all."""
    return world if config.split else 1


def pages_below(config, classes):
    """Pages of a conversation below R; where nothing is split, none is apart."""
    return config.replicate // config.page_rows if classes > 1 else 0


def _windows(config, window, totals):
    """Windows that lie in an empty pool at once."""
    if config.placement == OWNER:
        return sum(total // window for total in totals)
    counts = needed(STRIPED, window, pages_below(config, len(totals)), len(totals))
    fits = [total // n for total, n in zip(totals, counts) if n]
    return min(fits, default=config.parallel)


def _too_small(config, window, totals, pages):
    counts = needed(config.placement, window, pages_below(config, len(totals)), len(totals))
    striped = needed(STRIPED, window, 0, len(totals))
    rows = min(totals) if config.placement == OWNER else pages
    hints = [f"--pages {smallest_pool(counts)}"]
    if config.placement == OWNER:
        hints[0] = f"--pages {len(totals) * window}"
        if smallest_pool(striped) <= pages:
            hints.append(f"--placement striped ({max(striped)} pages a class)")
    if rows * config.page_rows > DRAFT_OVERHANG:
        hints.append(f"--context of at most {rows * config.page_rows - DRAFT_OVERHANG}")
    return PlanError(f"--context {config.context} takes {window} pages of {config.page_rows} rows "
                     f"a window, {max(counts)} of one class under {config.placement}; a pool of "
                     f"{pages} pages has {min(totals)} a class ({len(totals)} "
                     f"class{'es' if len(totals) > 1 else ''})", " or ".join(hints))


# ---- bytes ------------------------------------------------------------------------------------

def token_bytes(shape, world, latents=True, keys=True, draft=True, item=2):
    """KV bytes a token takes on a rank, averaged over the ranks and rounded to the nearest.

    latents, keys: whether these are split over the ranks. draft: whether the draft block's KV
    follows; where not, both its parts are whole on every rank. item: bytes a value.
    """
    latent, key = shape.kv_lora * item, shape.index_dim * item       # a key serves kpool tokens
    trunk = len(shape.dsa_layers)
    times_world = 0                     # bytes a token * kpool * world, in whole numbers
    for size, split in ((latent * shape.index_kpool, latents), (key, keys)):
        times_world += size * trunk * (1 if split else world)
        times_world += size * shape.mtp * (1 if split and draft else world)
    return (2 * times_world + shape.index_kpool * world) // (2 * shape.index_kpool * world)


def page_bytes(shape, config, pages):
    """(name, bytes) of `pages` local pages in all bindings."""
    item, rows = KV_ITEM[config.kv_dtype], pages * config.page_rows * shape.bindings
    return (("KV latents", rows * shape.kv_lora * item),
            ("pooled keys", rows // shape.index_kpool * shape.index_dim * item))


def state_bytes(shape, own, seats):
    """(name, bytes) of what `seats` conversations keep outside pages. own: the rank's Part."""
    heads, layers = own.kda_heads[1] - own.kda_heads[0], len(shape.kda_layers)
    tail = shape.bindings * (shape.index_kpool - 1) * 2 * shape.index_dim
    return (("KDA states", seats * layers * heads * shape.kda_dim ** 2 * FLOAT),
            ("convolution states",
             seats * layers * (shape.conv - 1) * 3 * heads * shape.kda_dim * FLOAT),
            ("index tails", seats * tail * FLOAT))


def table_bytes(seats, window):
    """Page tables: local page and holder of each page of a window, and each seat's owner, int32."""
    return seats * (2 * window + 1) * 4


def weight_bytes(shape, own, kind, backend="host"):
    """{name: bytes} of the weights that a rank holds. own: its Part; kind: name -> dtype word.

    Host: packed matrices are padded to whole blocks of 64 outputs; BF16 takes 2 bytes a value, all
    else 4, and one wider tensor among those packed together widens them. Device: as engine.slices
    holds them. The embedding stays in the file.
    """
    s, hidden = shape, shape.hidden
    sizes = dict.fromkeys(("KDA", "DSA", "indexer", "hyper-connections", "norms", "dense MLPs",
                           "routers", "experts", "shared experts", "output head", "draft block",
                           "embedding"), 0)

    def length(span):
        return span[1] - span[0]

    def packed(layer, rows, columns, *names, turned=False):
        """Bytes of matrices under each other: rows, columns are numbers, or spans in the file."""
        names = [layer_name(layer, name) for name in names] if layer is not None else names
        rows = [(0, rows)] if isinstance(rows, int) else rows
        first, stop = (0, columns) if isinstance(columns, int) else columns
        count, width = sum(map(length, rows)), stop - first
        kinds = {kind(name) for name in names}
        if backend != "cuda":
            return -(-count // BLOCK) * BLOCK * width * (2 if kinds == {"BF16"} else 4)
        fp8 = kinds == {"F8_E4M3"} and not turned and first % SCALE_BLOCK == 0
        by = rows_a_scale(rows) if fp8 else None
        if by:
            return count * width + -(-count // by) * -(-width // SCALE_BLOCK) * FLOAT
        kept = kinds == {"F32"} and all(name.endswith(KEPT) for name in names)
        return count * width * (6 if kept else 2)       # float32: three BF16 (model/thirds)

    def projections(group, *names):
        return [f"{group}.{name}.weight" for name in names]

    def mlp(i, group, span):
        return (packed(i, [span] * 2, hidden, *projections(group, "gate_proj", "up_proj"))
                + packed(i, hidden, span, *projections(group, "down_proj")))

    def moe(i):
        every = [f"mlp.experts.{e}" for e in range(s.experts)]
        gate_up = [n for group in every for n in projections(group, "gate_proj", "up_proj")]
        down = [n for group in every for n in projections(group, "down_proj")]
        return (("routers", packed(i, s.experts, hidden, "mlp.gate.weight") + FLOAT * s.experts),
                ("experts", s.experts * (packed(i, [own.expert] * 2, hidden, *gate_up)
                                         + packed(i, hidden, own.expert, *down))),
                ("shared experts", mlp(i, "mlp.shared_experts", own.shared)))

    def kda(i):
        heads, d = length(own.kda_heads), s.kda_dim
        rows, one = tuple(n * d for n in own.kda_heads), [(0, d)] * 2
        names = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
        low = [packed(i, [rows], d, name)
               for name in projections("self_attn", "f_b_proj", "g_b_proj")]
        return (("KDA", packed(i, [rows] * 3 + one + [own.kda_heads], hidden,
                               *projections("self_attn", *names)) + sum(low)
                 + packed(i, hidden, rows, *projections("self_attn", "o_proj"))
                 + FLOAT * (3 * heads * d * s.conv + heads + heads * d + d)),)

    def dsa(i):
        group, index = "self_attn", "self_attn.indexer"
        kv_b, both = projections(group, "kv_b_proj"), s.qk_nope + s.v_head
        up = sum(packed(i, s.kv_lora, s.qk_nope, *kv_b, turned=True)
                 + packed(i, [(h * both + s.qk_nope, (h + 1) * both)], s.kv_lora, *kv_b)
                 for h in range(*own.heads))
        gate = f"{index}.index_kpool_compress_gate"
        q_rows, out_columns = (tuple(h * size for h in own.heads) for size in (s.qk_nope, s.v_head))
        return (("DSA", packed(i, [(0, s.q_lora), (0, s.kv_lora)], hidden,
                               *projections(group, "q_a_proj", "kv_a_proj_with_mqa"))
                 + packed(i, [q_rows], s.q_lora, *projections(group, "q_b_proj"))
                 + up + FLOAT * (s.q_lora + s.kv_lora)
                 + packed(i, hidden, out_columns, *projections(group, "o_proj"))),
                ("indexer", packed(i, [(0, s.index_dim)] * 2 + [(0, s.index_heads)], hidden,
                                   *projections(index, "wk", "weights_proj"), gate)
                 + packed(i, s.index_heads * s.index_dim, s.q_lora, *projections(index, "wq_b"))
                 + FLOAT * s.index_dim * (2 + s.index_kpool)))

    def count(pairs, name=None):
        for group, size in pairs:
            sizes[name or group] += size

    for i, (attention, feed) in enumerate(zip(s.layer_types, s.mlp_types)):
        count(dsa(i) if attention == "dsa" else kda(i))
        count(moe(i) if feed == "sparse" else (("dense MLPs", mlp(i, "mlp", own.dense)),))
        for site in ("hc_attn", "hc_ffn"):
            sizes["hyper-connections"] += (packed(i, s.hyper_rows, s.hc_mult * hidden, f"{site}_fn")
                                           + FLOAT * (s.hyper_rows + 3))
        sizes["norms"] += 2 * FLOAT * hidden
    sizes["norms"] += FLOAT * hidden
    sizes["output head"] = packed(None, [own.vocab], hidden, HEAD)
    if s.mtp:
        count((*dsa(s.layers), *moe(s.layers)), "draft block")
        sizes["draft block"] += (packed(s.layers, hidden, 2 * hidden, "eh_proj.weight")
                                 + 5 * FLOAT * hidden)
    return sizes
