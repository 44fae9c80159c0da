"""Drive an Engine from a test: all rows of a prompt, decode steps one by one, and what came of it.

SPMD: every rank makes the same calls. A lease comes from each rank's own pool, which the same calls
leave alike, so no plan is broadcast. `Trace` is one conversation as arrays; two traces that must
agree to the bit are compared by `differences`. `Report` gathers what every rank found.
"""

import contextlib
import functools
import json
import pathlib
from dataclasses import dataclass

from engine.config import fit, parse, prepare_environment

prepare_environment()   # before numpy and numba are imported

import numpy as np  # noqa: E402

import engine.dsa  # noqa: E402
import engine.prefill  # noqa: E402
import engine.step  # noqa: E402
from engine.engine import Engine  # noqa: E402
from engine.forward import Rows, forward, logits  # noqa: E402
from engine.prefill import fetch_pages, prefill_attention  # noqa: E402
from engine.sample import Sampling  # noqa: E402
from engine.shape import part  # noqa: E402
from engine.step import decode_attention  # noqa: E402
from engine.weights import load_weights, open_model  # noqa: E402
from engine.world import World  # noqa: E402

TESTS = pathlib.Path(__file__).resolve().parent
ORACLE = TESTS / "oracle"
MINI = TESTS.parent / "models" / "mini"
LENGTHS = (5, 64, 130, 700)     # prompts of the reference data
LONG = 1000                     # tokens from which a prompt of the embedded model is a long one
UNSEEN = -2                     # in Trace.lists: no rank met this list
MARGIN = 1e-3                   # two logits closer than this are a near tie
ATTENTION = (engine.dsa, engine.step, engine.prefill)


# --- an engine ------------------------------------------------------------------------------------


@functools.cache
def world():
    """This process's World."""
    return World.join()


@functools.cache
def _weights(folder):
    shape, checkpoint = open_model(folder)
    return shape, load_weights(checkpoint, shape, part(shape, world().rank, world().size))


def make(*argv):
    """An Engine from command line options; a model's weights are read once a process."""
    config = parse([str(a) for a in argv])
    shape, weights = _weights(config.model)
    return Engine(fit(config, shape), world(), shape, weights)


def reference(model):
    """The reference data of tests/oracle: arrays by name (its README)."""
    with np.load(ORACLE / f"{model}.npz") as data:
        return dict(data)


def random_ids(count, seed=0, vocab=512):
    """Token ids of a prompt that nobody wrote: int32 [count]."""
    return np.random.default_rng(seed).integers(2, vocab, count).astype(np.int32)


# --- rows -----------------------------------------------------------------------------------------


def open_seat(engine, seat, tokens):
    """Lease what `tokens` positions need and bind it to a seat. Returns the Lease."""
    lease = engine.pool.grant(-(-tokens // engine.config.page_rows))
    assert lease is not None, "the test's pool is too small"
    engine.backend.open(seat, lease)
    return lease


def close_seat(engine, seat, lease):
    """Give a seat's pages back, and hold the pool to its books."""
    engine.backend.model.table.unbind(seat)
    engine.pool.release(lease)
    engine.pool.check()


def prefill(engine, seat, ids, chunk=None):
    """A prompt in chunks -> hidden of all its positions, [n, hidden] float32, on every rank."""
    chunk, hidden = chunk or engine.config.chunk, []
    for first in range(0, len(ids), chunk):
        some = ids[first:first + chunk]
        rows = Rows.of(some, np.full(len(some), seat), np.arange(first, first + len(some)))
        hidden.append(forward(engine.backend.model, rows, prefill_attention))
    return np.concatenate(hidden)


def decode(engine, seats, tokens, positions):
    """One decode step of several conversations -> hidden [n, hidden] on every rank."""
    return forward(engine.backend.model, Rows.of(tokens, seats, positions), decode_attention)


def replies(engine, requests):
    """Serve (prompt, Sampling) pairs at once: their ids, on rank 0; the others return at the end.

    Rank 0's pool is checked after each round. Returns (replies, what requests had to wait for while
    others were live: a set of "seats", "pages").
    """
    waited = set()
    if engine.world.rank:
        engine.follow()
        return None, waited
    out = {engine.submit(prompt, sampling): [] for prompt, sampling in requests}
    while engine.busy:
        ended = 0
        for event in engine.step():
            out[event.id].append(event.token)
            ended += event.finish_reason is not None
        engine.pool.check()
        scheduler = engine.scheduler
        if scheduler.live and scheduler.waiting:
            free = len(scheduler._free_seats) + len(scheduler.kept) - ended
            waited.add("pages" if free else "seats")    # when the round was planned
    engine.stop()
    return list(out.values()), waited


def greedy(count, stop=()):
    """Sampling of a greedy reply of up to `count` tokens."""
    return Sampling(max_tokens=count, stop_ids=tuple(stop))


def unequal_replies(data, found):
    """Lengths of the reference prompts whose greedy reply is another before the first near tie."""
    unequal, compared = [], 0
    for n, reply in zip(LENGTHS, found, strict=True):
        near = np.flatnonzero(data[f"margin_{n}"] < MARGIN)
        count = int(near[0]) if len(near) else 24
        compared += count
        if reply[:count] != data[f"greedy_{n}"][:count].tolist():
            unequal.append(n)
    assert compared > 48, "the reference data holds too few clear tokens"
    return unequal


def mini_replies(which, *options):
    """The embedded model's cases, all submitted at once: (cases, replies, waited for), on rank 0.

    which: "all", or "short" for those below `LONG` tokens.
    """
    cases = json.loads((MINI / "expected.json").read_text())["cases"]
    cases = [c for c in cases if which == "all" or len(c["prompt_ids"]) < LONG]
    engine = make("--model", MINI, "--context", 8192 if which == "all" else 1024, *options)
    sampling = greedy(64, engine.shape.eos)
    return cases, *replies(engine, [(c["prompt_ids"], sampling) for c in cases])


# --- what came of it ------------------------------------------------------------------------------


class Recorder:
    """Lists of every DSA layer and position that this rank met, and how a split prefill found them.

    exchanged, gathered: DSA layers of a chunk whose lists came from exchanged candidates, or from
    gathered pooled keys.
    """

    def __init__(self):
        self.lists = {}         # (binding, position) -> int32 positions
        self.exchanged = self.gathered = 0
        self._binding = None

    @contextlib.contextmanager
    def installed(self):
        """Listens for the block's time, at each place that imported the functions."""
        places = [(m, name, getattr(m, name)) for m in ATTENTION
                  for name in ("insert", "merged_lists", "best_pools") if hasattr(m, name)]
        for module, name, function in places:
            setattr(module, name, getattr(self, "_" + name)(function, module))
        try:
            yield self
        finally:
            for module, name, function in places:
                setattr(module, name, function)

    def _insert(self, function, module):
        def insert(model, binding, *args):
            self._binding = binding
            return function(model, binding, *args)
        return insert

    def _merged_lists(self, function, module):
        def merged_lists(model, candidates, positions):
            lists, lengths = function(model, candidates, positions)
            for position, line, length in zip(positions.tolist(), lists, lengths):
                self.lists[self._binding, position] = line[:length].copy()
            if module is ATTENTION[-1] and len(candidates.counts) == model.world.size > 1:
                self.exchanged += 1
            return lists, lengths
        return merged_lists

    def _best_pools(self, function, module):
        def best_pools(model, binding, queries, rows, group, keys=None, table=None):
            self.gathered += keys is not None
            return function(model, binding, queries, rows, group, keys, table)
        return best_pools

    def table(self, model, bindings, count):
        """All ranks' lists in one: int32 [bindings, count, width], -1 beyond a list's end.

        UNSEEN where no rank met one. Ranks that met the same list must have the same.
        """
        mine = np.full((bindings, count, model.shape.list_width), UNSEEN, np.int32)
        for (binding, position), line in self.lists.items():
            if binding < bindings and position < count:
                mine[binding, position] = -1
                mine[binding, position, :len(line)] = line
        known = np.full_like(mine, UNSEEN)
        for theirs in model.world.gather(mine):
            new = theirs[..., :1] != UNSEEN
            both = new & (known[..., :1] != UNSEEN)
            assert (~both | (known == theirs)).all(), "two ranks have two lists"
            known = np.where(new, theirs, known)
        return known


@dataclass
class Trace:
    """One conversation of n positions. All but logits are the same on every rank.

    hidden: [n, hidden] float32. logits: [n, vocab] float32 on rank 0, None elsewhere. lists: int32
    [DSA layers, n, width]. latents, keys: the KV bytes of the DSA layers and written positions.
    """

    hidden: np.ndarray
    logits: np.ndarray
    lists: np.ndarray
    latents: np.ndarray
    keys: np.ndarray
    recorder: Recorder

    def first(self, count):
        """The Trace of the first `count` positions."""
        pools = count // (self.latents.shape[1] // self.keys.shape[1])
        rows = None if self.logits is None else self.logits[:count]
        return Trace(self.hidden[:count], rows, self.lists[:, :count], self.latents[:, :count],
                     self.keys[:, :pools], self.recorder)


def kv(engine, seat, count, bindings):
    """A seat's [latents [bindings, count, kv_lora], keys [bindings, count // kpool, index_dim]]."""
    model = engine.backend.model
    pages = np.arange(-(-count // model.pages.page_rows))
    found = []
    for arrays, rows in ((model.pages.latents, count),
                         (model.pages.keys, count // model.shape.index_kpool)):
        whole = [fetch_pages(model, a, seat, pages) for a in arrays[:bindings]]
        found.append(np.stack([w.reshape(-1, w.shape[-1])[:rows] for w in whole]))
    return found


def trace(engine, ids, prompt, chunk=None, seat=0):
    """Prefill ids[:prompt], decode the rest token by token as given, and take everything down."""
    lease = open_seat(engine, seat, len(ids))
    recorder = Recorder()
    with recorder.installed():
        hidden = [prefill(engine, seat, ids[:prompt], chunk)]
        hidden += [decode(engine, [seat], [ids[p]], [p]) for p in range(prompt, len(ids))]
    hidden = np.concatenate(hidden)
    layers = len(engine.shape.dsa_layers)
    result = Trace(hidden, logits(engine.backend.model, hidden),
                   recorder.table(engine.backend.model, layers, len(ids)),
                   *kv(engine, seat, len(ids), layers), recorder)
    close_seat(engine, seat, lease)
    return result


def differences(trace, baseline):
    """What of a trace is not the baseline's bytes, in words; [] where all is."""
    found = []
    for name in ("hidden", "logits", "lists", "latents", "keys"):
        a, b = getattr(trace, name), getattr(baseline, name)
        if a is None and b is None:
            continue
        if a.shape != b.shape:
            found.append(f"{name}: shapes {a.shape} and {b.shape}")
        elif a.tobytes() != b.tobytes():
            bits = f"u{a.itemsize}"
            unequal = np.argwhere(a.view(bits) != b.view(bits))
            found.append(f"{name}: {len(unequal)} places, the first {unequal[0].tolist()}")
    return found


# --- what the ranks say ---------------------------------------------------------------------------


class Report:
    """Checks of a script that runs on every rank; rank 0 prints one JSON line at the end."""

    def __init__(self):
        self.checks, self.failed, self.facts = 0, [], {}

    def check(self, name, ok, note=""):
        """Count one check; a failure is told with its rank."""
        self.checks += 1
        if not ok:
            self.failed.append(f"rank {world().rank}: {name} {note}".rstrip())

    def same(self, name, trace, baseline):
        """Two traces must be the same bytes."""
        found = differences(trace, baseline)
        self.check(name, not found, "; ".join(found))

    def finish(self):
        """Gather every rank's failures; rank 0 prints them."""
        mine = np.frombuffer(json.dumps(self.failed).encode(), np.uint8)
        sizes = world().gather(np.array([mine.size], np.int64))[:, 0]
        parts = world().gather(mine, [np.empty(s, np.uint8) for s in sizes])
        if world().rank == 0:
            failed = [line for p in parts for line in json.loads(p.tobytes())]
            print(json.dumps({"checks": self.checks, "failed": failed, "facts": self.facts}),
                  flush=True)


def run_script(body, *args):
    """body(report, *args), then the report; an exception on one rank ends all, with its traceback.
    """
    import traceback
    report = Report()
    try:
        body(report, *args)
        report.finish()
    except BaseException:
        traceback.print_exc()
        world().abort(1)
