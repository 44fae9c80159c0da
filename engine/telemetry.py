"""What the engine reports of itself: one tree of plain values, made four times a second.

`Meters` are counted where things happen; `Board` puts them together with what the pool, the
scheduler and the ranks say. The tree and its fields are described in docs/telemetry.md; `patch`
gives the difference between two trees as a JSON merge patch (RFC 7386).
"""

import bisect
import collections
import time

import numpy as np

FIRST_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)       # seconds
GAP_BOUNDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LOG_LINES = 200
CELLS = 256             # of a rank's page map
ROUND_SECONDS = 10.0    # within which every rank follows a round
STATES = ".#k"          # cells of the map: mostly free, leased, kept pages


class Histogram:
    """Counts of observations up to each bound; one more for those above. Seconds."""

    def __init__(self, bounds):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds):
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def tree(self):
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum,
                "count": sum(self.counts)}


class Meters:
    """What has happened on rank 0 since the start."""

    def __init__(self):
        self.first, self.gap = Histogram(FIRST_BOUNDS), Histogram(GAP_BOUNDS)
        self.ended = collections.Counter()          # replies by finish reason
        self.refused = 0
        self.log = collections.deque(maxlen=LOG_LINES)

    def token(self, sequence, reason):
        """A conversation emitted a token."""
        if sequence.gap is None:
            self.first.observe(sequence.latest - sequence.arrived)
        else:
            self.gap.observe(sequence.gap)
        if reason:
            self.ended[reason] += 1

    def note(self, level, text):
        """A line of the log. level: "refusal" or "fault"."""
        self.refused += level == "refusal"
        self.log.append({"time": time.time(), "level": level, "text": text})


class Board:
    """The newest tree, and what /health is judged by. Written by the loop, read by HTTP.

    facts: what never changes (model, version, world, ...). pulse: engine.pulse.Pulse. moved:
    time.monotonic of the loop's last turn. fault: None, or (EngineError, seconds since 1970).
    """

    def __init__(self, facts, pulse):
        self._facts, self._pulse = facts, pulse
        self.latest = dict(facts)
        self.moved = time.monotonic()
        self.watchers = 0                   # open /telemetry streams; the HTTP thread counts
        self.fault = None
        self._due = 0                       # the round that every rank must have computed by now
        self._rounds = collections.deque()  # (time.monotonic, round) since ROUND_SECONDS ago

    def update(self, engine):
        """Make a new tree. On the loop's thread, between two rounds."""
        self.latest = {**self._facts, **tree(engine, self._pulse), "watchers": self.watchers}
        now = time.monotonic()
        self._rounds.append((now, engine.ledger.number))
        while now - self._rounds[0][0] > ROUND_SECONDS:
            self._due = self._rounds.popleft()[1]

    def behind(self):
        """{rank: its last round} of the ranks that have not followed in time, though alive."""
        return {rank: facts["round"] for rank, facts in self._pulse.everyone().items()
                if facts.get("round", self._due) < self._due}

    def fail(self, error):
        self.fault = error, time.time()
        self.latest = {**self.latest, "time": time.time(), "fault": error.message}

    def silent(self):
        """{rank: seconds} of the ranks that are late with their pulse."""
        return self._pulse.silent()


def tree(engine, pulse):
    """The changing part of the tree."""
    scheduler, pool, now = engine.scheduler, engine.pool, time.monotonic()
    classes, replicated = pool.counts()
    ranks = pulse.everyone()
    page_rows, meters = engine.config.page_rows, engine.meters
    maps = page_map(pool)
    return {
        "time": time.time(),
        "rounds": engine.ledger.number,
        "ranks": [_rank(r, ranks.get(r, {}), classes, replicated, maps)
                  for r in range(engine.world.size)],
        "classes": [{"class": c, **n._asdict(), "conversations": sum(
            s.lease.owner == c for s in scheduler.live.values()), "windows_free": n.free + n.kept}
            for c, n in enumerate(classes)],
        "pool": {"page_rows": page_rows, "page_bytes": engine.page_bytes,
                 "tokens": page_rows * sum(n.total for n in classes),
                 "tokens_leased": page_rows * sum(n.leased for n in classes),
                 "tokens_kept": page_rows * sum(n.kept for n in classes),
                 "replicated": replicated._asdict()},
        "tokens": {**engine.tokens, "hit": scheduler.hit_tokens},
        "seconds": dict(engine.seconds),
        "queue": {"waiting": len(scheduler.waiting), "limit": scheduler.queue},
        "requests": [_request(s, now) for s in (*scheduler.live.values(), *scheduler.waiting)],
        "kept": [{"seat": s.seat, "tokens": s.fed, "pages": s.lease.pages,
                  "owner": s.lease.owner, "idle": round(now - (s.latest or now), 1)}
                 for s in scheduler.kept.values()],
        "ended": dict(meters.ended), "refused": meters.refused,
        "first_token_seconds": meters.first.tree(), "token_gap_seconds": meters.gap.tree(),
        "log": list(meters.log),
    }


def _rank(rank, facts, classes, replicated, maps):
    """One rank's part. Where nothing is split, every rank holds the one class."""
    c = rank if len(classes) > 1 else 0
    return {**facts, "rank": rank, "pages": classes[c]._asdict(),
            "replicated": replicated._asdict(), "map": maps[c]}


def _request(sequence, now):
    generated = len(sequence.emitted)
    if sequence.seat is None:
        state = "queued"
    else:
        state = "prefill" if sequence.in_prefill else "decode"
    spent = sequence.latest - sequence.first if generated > 1 else 0.0
    return {"id": sequence.id, "state": state, "prompt": len(sequence.prompt),
            "cached": sequence.cached, "fed": sequence.fed, "generated": generated,
            "limit": sequence.sampling.max_tokens, "seat": sequence.seat,
            "owner": sequence.lease.owner if sequence.lease else None,
            "rate": round((generated - 1) / spent, 2) if spent else None,
            "age": round(now - sequence.arrived, 1)}


def page_map(pool):
    """For each class a string of up to CELLS cells: what most of each cell's pages are."""
    states = pool.states()
    found = []
    for c in range(pool.classes):
        own = states[c::pool.classes]
        cells = min(CELLS, len(own))
        edges = np.linspace(0, len(own), cells + 1).astype(int)
        counts = [np.add.reduceat(own == s, edges[:-1]) if cells else [] for s in range(3)]
        found.append("".join(STATES[i] for i in np.argmax(counts, axis=0)) if cells else "")
    return found


def patch(old, new):
    """A JSON merge patch (RFC 7386) that turns one tree into the other; {} where they are equal."""
    found = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = patch(before, value)
            if inner:
                found[key] = inner
        elif key not in old or value != before:
            found[key] = value
    return found
