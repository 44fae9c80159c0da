"""A decode step and a prefill chunk of the first layers of GLM-5.3-Flash, at real dimensions.

    python bench/step.py                     # 4 and 8 layers, under 4 minutes, 50 GB of GPU memory
    python bench/step.py --layers 4 --no-prefill

Weights are random bits in the release's formats (engine/random_weights.py), the KV is random BF16
at each context, no prompt is run before. A step is timed as the engine runs it, a captured graph
that is replayed: `device` between events around 20 launches, `replay` from Python until the host
knows that it is done, `call` all of DeviceModel.decode, token embedding and logits copied.
Floor: the bytes that the step must move (weights read once, of the experts those that were chosen;
KV rows, pooled keys, states) at the speed of a device copy of 1 GiB in this run. Parts are timed
by events recorded inside the graph. Prefill is held against torch.matmul on the same products in
BF16, experts as one batched product of evenly filled experts.

A section that fails says so and the next one runs.
"""

import argparse
import collections
import resource
import time
import traceback

import numpy as np
from kernels_model import copy_speed        # prepares the environment first
from project import kv_bytes, length, state_bytes, weight_bytes

from cuda.bindings import driver
from engine.backend import DeviceBackend
from engine.config import Config
from engine.device import cuda
from engine.device_graph import Walk
from engine.forward import Rows
from engine.random_weights import fill_bf16, random_device_weights
from engine.release import release_shape
from engine.shape import part
from engine.world import World

SHORT = 8192
STEPS = ((1, SHORT), (4, SHORT), (16, SHORT), (1, 131_072), (1, 1 << 20))   # rows, context
SEATS, PAGE, CHUNK = 16, 64, 2048
REPLAYS = 20
EXTERNAL = 1                    # CU_EVENT_RECORD_EXTERNAL: the record becomes a node of the graph
# Method that launches a part, its name, the weights it reads; indented parts lie inside another.
PARTS = (("", "_kda", "KDA", ("KDA",)), ("attention", "layer", "DSA", ("DSA", "indexer")),
         ("attention", "_own_keys", "  own keys", ()), ("attention", "_down", "  down", ()),
         ("attention", "_absorb", "  absorb", ()), ("attention", "_insert", "  insert", ()),
         ("attention", "best_pools", "  score", ()), ("attention", "lists", "  merge", ()),
         ("attention", "_attend", "  attend", ()),
         ("attention", "_project", "  values, output", ()),
         ("", "_experts", "router, experts", ("routers", "experts")),
         ("", "_mlp", "dense and shared MLPs", ("dense MLPs", "shared experts")),
         ("", "_head", "head", ("head",)))
REST = "mHC, norms, the rest"
STARTED = time.perf_counter()


def say(*words):
    print(*words, flush=True)


def checked(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def memory():
    free, total = cuda.current_context().get_memory_info()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
    return f"GPU {(total - free) / 2 ** 30:.1f} of {total / 2 ** 30:.0f} GiB, host {host:.1f} GiB"


# ---- a model with a filled KV ------------------------------------------------------------------

def build(layers, weights, world):
    """(DeviceModel, Shape) of the first `layers` layers, every page filled with small numbers."""
    shape = release_shape(layers)
    config = Config(context=shape.window, parallel=SEATS, page_rows=PAGE, chunk=CHUNK,
                    pages=shape.window // PAGE + 1, backend="cuda")
    model = DeviceBackend(config, world, shape,
                          weights._replace(layers=weights.layers[:layers])).device
    for b, arrays in enumerate(zip(model.attention.latents, model.attention.keys)):
        for i, array in enumerate(arrays):
            fill_bf16(array, 1000 + 2 * b + i, 0.5)
    cuda.synchronize()
    return model, shape


def place(model, n, context):
    """n rows at the end of a context each, seat i on pages of its own; returns the Rows."""
    pages, window = -(-context // PAGE), model.attention.table.shape[1]
    for seat in range(n):
        row = np.full(window, -1, np.int32)
        row[:pages] = np.arange(seat * pages, (seat + 1) * pages)
        model.attention.bind(seat, row)
    tokens = np.random.default_rng(n).integers(0, model.shape.vocab, n)
    return Rows.of(tokens, np.arange(n), np.full(n, context - 2))


# ---- graphs ------------------------------------------------------------------------------------

class Counted(Walk):
    """A Walk that counts the nodes it captures, by kind."""

    def __init__(self, stream, launches):
        super().__init__(stream, launches)
        self.nodes = collections.Counter()

    def _end(self):
        graph = checked(driver.cuStreamEndCapture(self._handle))
        count = int(driver.cuGraphGetNodes(graph, 0)[-1])
        for node in driver.cuGraphGetNodes(graph, count)[1][:count]:
            self.nodes[driver.cuGraphNodeGetType(node)[1].name.split("_")[-1].lower()] += 1
        self._steps.append(checked(driver.cuGraphInstantiate(graph, 0)))

    def launch(self):
        """Launch without waiting: a world of one has no host work between graphs."""
        for graph in self._steps:
            checked(driver.cuGraphLaunch(graph, self._handle))


def device_us(walk):
    """Microseconds a step on the device, back to back."""
    start, stop = cuda.event(), cuda.event()
    walk.replay()
    start.record(walk.stream)
    for _ in range(REPLAYS):
        walk.launch()
    stop.record(walk.stream)
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / REPLAYS


def host_us(work):
    """Median microseconds of work() by the host's clock."""
    times = []
    for _ in range(REPLAYS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e6


def launch_us(walk):
    """Median microseconds that the launch call alone takes on the host."""
    times = []
    for _ in range(REPLAYS):
        walk.stream.synchronize()
        begin = time.perf_counter()
        walk.launch()
        times.append(time.perf_counter() - begin)
    walk.stream.synchronize()
    return float(np.median(times)) * 1e6


def chosen_experts(model, walk):
    """Mean number of different experts a MoE layer's rows chose in one eager step."""
    work, counts = model._experts, []

    def spy(w, x, *rest):
        work(w, x, *rest)
        model.stream.synchronize()
        chosen = model.buffers.take("chosen", x.shape[1], model.shape.experts_per_token,
                                    dtype=np.int32).copy_to_host()
        counts.append(np.unique(chosen[chosen >= 0]).size)
    model._experts = spy
    try:
        walk.run()
    finally:
        del model._experts
    return float(np.mean(counts)) if counts else 0.0


def part_times(model, launches):
    """{part: (microseconds, times it ran)} of one replayed step, and of all of it (""), with what
    runs side by side in a step one after the other."""
    events = iter([checked(driver.cuEventCreate(0)) for _ in range(1024)])
    handle, marks, replaced = None, collections.defaultdict(list), []

    def marked(name, work):
        def run(*args, **named):
            pair = next(events), next(events)
            checked(driver.cuEventRecordWithFlags(pair[0], handle, EXTERNAL))
            found = work(*args, **named)
            checked(driver.cuEventRecordWithFlags(pair[1], handle, EXTERNAL))
            marks[name].append(pair)
            return found
        return run

    for where, method, name, _ in PARTS:
        owner = getattr(model, where) if where else model
        if hasattr(owner, method):
            setattr(owner, method, marked(name, getattr(owner, method)))
            replaced.append((owner, method))
    model.side = model._sides[1]
    try:
        walk = Counted(model.stream, marked("", launches))
        handle = walk._handle
        walk.capture()
        for _ in range(5):
            walk.replay()
    finally:
        model.side = model._sides[0]
        for owner, method in replaced:
            delattr(owner, method)
    return {name: (sum(checked(driver.cuEventElapsedTime(*p)) for p in pairs) * 1e3, len(pairs))
            for name, pairs in marks.items()}


# ---- decode ------------------------------------------------------------------------------------

def floor_bytes(shape, n, context, experts):
    """{name: bytes} that a step of n rows must move: the weights' names, keys, rows, states."""
    own = part(shape, 0, 1)
    scored, attended = kv_bytes(shape, context, 1)
    return {**weight_bytes(shape, own, experts), "pooled keys": n * scored,
            "latent rows": n * attended, "states": n * state_bytes(shape, own)}


def decode(model, shape, n, context, copy, with_parts):
    rows = place(model, n, context)
    begin = time.perf_counter()
    model.decode(rows)
    compiled = time.perf_counter() - begin
    logits = model.decode(rows)                 # captures, replays
    own = next(w for key, w in model._walks.items() if key[0] == n)
    walk = Counted(model.stream, own._launches)
    experts = chosen_experts(model, walk)
    walk.capture()
    sizes = floor_bytes(shape, n, context, experts)
    floor = sum(sizes.values()) / copy / 1e3
    device, replay = device_us(walk), host_us(walk.replay)
    call, launch = host_us(lambda: model.decode(rows)), launch_us(walk)
    nodes = ", ".join(f"{count} {kind}" for kind, count in walk.nodes.items())
    say(f"{shape.layers:2} layers, rows {n:2}, context {context:8,}: device {device:8.1f} us, "
        f"floor {floor:8.1f} us, ratio {device / floor:5.2f}; replay {replay:8.1f} "
        f"(+{replay - device:.1f}), launch call {launch:.1f}, decode() {call:8.1f} us; "
        f"nodes {nodes}; experts {experts:.1f}; {sum(sizes.values()) / 1e9:.3f} GB; "
        f"{np.count_nonzero(~np.isfinite(logits))} logits not finite; first call {compiled:.1f} s")
    if with_parts:
        section("parts", parts, model, own._launches, sizes, copy)


def parts(model, launches, sizes, copy):
    times = part_times(model, launches)
    whole, _ = times.pop("")
    sizes = {**sizes, "KDA": sizes["KDA"] + sizes["states"],
             "DSA": sizes["DSA"] + sizes["pooled keys"] + sizes["latent rows"]}
    reads = {name: sum(sizes.get(s, 0) for s in names) for _, _, name, names in PARTS}
    reads.update({"  score": sizes["pooled keys"], "  attend": sizes["latent rows"],
                  REST: sizes["hyper-connections"] + sizes["norms"]})
    outer = sum(us for name, (us, _) in times.items() if not name.startswith(" "))
    times[REST] = whole - outer, 1
    say(f"    marked step {whole:.1f} us:")
    for name in [p[2] for p in PARTS] + [REST]:
        if name in times:
            us, ran = times[name]
            floor = reads[name] / copy / 1e3
            say(f"    {name:22} {us:8.1f} us {us / whole:6.1%} in {ran:2}, {us / ran:7.1f} each"
                + (f"; floor {floor:8.1f} us, ratio {us / floor:5.2f}" if floor else ""))


# ---- prefill -----------------------------------------------------------------------------------

def products(s, n):
    """Counter of (groups, rows, N, K): the matrix products of a chunk of n rows, head excepted."""
    own, found = part(s, 0, 1), collections.Counter()
    wide, h = length(own.kda_heads) * s.kda_dim, length(own.heads)
    each = n * s.experts_per_token // s.experts

    def count(*sizes):
        found.update((*((1, n) if len(size) == 2 else size[:2]), *size[-2:]) for size in sizes)

    def mlp(columns):
        count((2 * columns, s.hidden), (s.hidden, columns))

    for kind, feed in zip(s.layer_types, s.mlp_types):
        if kind == "kda":
            count((3 * wide + 2 * s.kda_dim + length(own.kda_heads), s.hidden), (wide, s.kda_dim),
                  (wide, s.kda_dim), (s.hidden, wide))
        else:
            count((s.q_lora + s.kv_lora, s.hidden), (h * s.qk_nope, s.q_lora),
                  (h, n, s.kv_lora, s.qk_nope), (h, n, s.v_head, s.kv_lora),
                  (s.hidden, h * s.v_head), (2 * s.index_dim + s.index_heads, s.hidden),
                  (s.index_heads * s.index_dim, s.q_lora))
        if feed == "dense":
            mlp(s.intermediate)
        else:
            c = s.moe_intermediate
            count((s.experts, each, 2 * c, s.hidden), (s.experts, each, s.hidden, c))
            mlp(s.shared_intermediate)
    return found


def prefill(model, shape):
    """Prints a line a depth; [(layers, depth, seconds, products)]."""
    found, results = products(shape, CHUNK), []
    for depth in (0, SHORT):
        place(model, 1, depth + CHUNK)
        tokens = np.random.default_rng(depth).integers(0, shape.vocab, CHUNK)
        rows = Rows.of(tokens, np.zeros(CHUNK), np.arange(depth, depth + CHUNK))
        times = []
        for _ in range(4):                      # the first compiles and sizes the buffers
            begin = time.perf_counter()
            model.prefill(rows, False)
            times.append(time.perf_counter() - begin)
        best = min(times[1:])
        say(f"{shape.layers:2} layers, prefill of {CHUNK} at {depth:5}: {best * 1e3:8.1f} ms, "
            f"{CHUNK / best:9.0f} tokens/s, {teraflops(found, best):6.1f} TFLOP/s of products; "
            f"first call {times[0]:.1f} s")
        results.append((shape.layers, depth, best, found))
    return results


def teraflops(found, seconds):
    return sum(2e-12 * g * n * N * K * times for (g, n, N, K), times in found.items()) / seconds


def against_torch(results):
    """Prints the prefill times against torch.matmul's for the same products, in BF16."""
    import torch                # last of all: it brings CUDA libraries of its own
    known = {}
    for groups, rows, N, K in {size for *_, found in results for size in found}:
        x, w = (torch.empty((groups, m, K), dtype=torch.bfloat16, device="cuda").normal_()
                for m in (rows, N))
        y = torch.empty((groups, rows, N), dtype=torch.bfloat16, device="cuda")
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for i in range(7):
            if i == 2:
                start.record()
            torch.matmul(x, w.transpose(1, 2), out=y)
        stop.record()
        torch.cuda.synchronize()
        known[groups, rows, N, K] = start.elapsed_time(stop) / 5e3
        del x, w, y
    for layers, depth, best, found in results:
        theirs = sum(known[size] * times for size, times in found.items())
        say(f"{layers:2} layers, torch.matmul BF16 of a chunk's products: {theirs * 1e3:.1f} ms, "
            f"{teraflops(found, theirs):.1f} TFLOP/s; over ours at {depth}: {theirs / best:.2f}")


# ---- all ---------------------------------------------------------------------------------------

def section(name, work, *args):
    """work(*args), or None after printing why it failed."""
    try:
        return work(*args)
    except Exception as error:      # one part that fails must not take the others with it
        say(f"FAILED {name}: {type(error).__name__}: {error}")
        say("".join(traceback.format_tb(error.__traceback__)[-3:]))
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--no-parts", action="store_true")
    parser.add_argument("--seconds", type=float, default=225, help="start no section after this")
    options = parser.parse_args()
    world, most = World.join(), max(options.layers)
    copy = copy_speed()
    say(f"device copy {copy:.0f} GB/s; {memory()}")
    begin = time.perf_counter()
    shape = release_shape(most)
    weights = random_device_weights(shape, part(shape, 0, 1), most, 1)
    say(f"{most} layers of weights in {time.perf_counter() - begin:.1f} s; {memory()}")

    def timed(name, *work):
        if time.perf_counter() - STARTED > options.seconds:
            return say(f"skipped for time: {name}")
        return section(name, *work)

    results = []
    for layers in options.layers:
        made = timed(f"build of {layers} layers", build, layers, weights, world)
        if made is None:
            continue
        say(f"{layers} layers, KV and states: {memory()}")
        for n, context in STEPS:
            with_parts = not options.no_parts and n in (1, 16)
            timed(f"decode {n} at {context}", decode, *made, n, context, copy, with_parts)
        if not options.no_prefill:
            results += timed("prefill", prefill, *made) or []
        say(f"{layers} layers done after {time.perf_counter() - STARTED:.0f} s; {memory()}")
        del made
    if results:
        timed("torch.matmul", against_torch, results)


if __name__ == "__main__":
    main()
