"""The engine's tree as the console holds it: merged, read with care, and remembered for rates.

`merge` applies a patch and leaves what it does not name as the same object, so that a widget may
compare with `is` and draw only what changed. Nothing here trusts a field: `number`, `text`, `rows`
and `table` give None or nothing where a field is missing or of another kind, and `faults` says
which those are.
"""

import collections
import math
import time

HISTORY = 300.0         # seconds that rates are remembered
NOW = 3.0               # seconds that "now" is an average of
NOTES = 200             # lines of the console's own
KINDS = 16              # counters of `tokens` that are remembered


def merge(target, patch):
    """A JSON merge patch (RFC 7386) applied to target: the new value; target is not changed."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merge(found.get(key), value)
    return found


# ---- reading -----------------------------------------------------------------------------------

def _at(tree, path):
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int) and -len(tree) <= key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def number(tree, *path):
    """The finite number at a path of names and indices, or None."""
    value = _at(tree, path)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def text(tree, *path):
    """The string at a path, or None."""
    value = _at(tree, path)
    return value if isinstance(value, str) else None


def rows(tree, *path):
    """The objects of the array at a path; [] where there is none."""
    value = _at(tree, path)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def table(tree, *path):
    """{name: number} of the object at a path, other members left out."""
    value = _at(tree, path)
    if not isinstance(value, dict):
        return {}
    return {k: v for k in value if (v := number(value, k)) is not None}


# ---- what is wrong with it ---------------------------------------------------------------------

NUMBER, TEXT, OBJECT, ARRAY = "a number", "a string", "an object", "an array"
FIELDS = {
    "version": TEXT, "model": TEXT, "world": NUMBER, "backend": TEXT, "kv_dtype": TEXT,
    "placement": TEXT, "context": NUMBER, "parallel": NUMBER, "started": NUMBER, "time": NUMBER,
    "fault": TEXT, "rounds": NUMBER, "ranks": ARRAY, "classes": ARRAY, "pool": OBJECT,
    "tokens": OBJECT, "seconds": OBJECT, "queue": OBJECT, "requests": ARRAY, "kept": ARRAY,
    "ended": OBJECT, "refused": NUMBER, "first_token_seconds": OBJECT,
    "token_gap_seconds": OBJECT, "log": ARRAY,
}
MEMBERS = {
    "ranks": {"rank": NUMBER, "host": TEXT, "backend": TEXT, "round": NUMBER, "memory": OBJECT,
              "collectives": OBJECT, "pages": OBJECT, "replicated": OBJECT, "map": TEXT},
    "classes": {"class": NUMBER, "free": NUMBER, "leased": NUMBER, "kept": NUMBER,
                "total": NUMBER, "conversations": NUMBER, "windows_free": NUMBER},
    "requests": {"id": NUMBER, "state": TEXT, "prompt": NUMBER, "cached": NUMBER, "fed": NUMBER,
                 "generated": NUMBER, "age": NUMBER},
    "kept": {"seat": NUMBER, "tokens": NUMBER, "pages": NUMBER, "idle": NUMBER},
    "log": {"time": NUMBER, "level": TEXT, "text": TEXT},
    "pool": {"page_rows": NUMBER, "tokens": NUMBER, "tokens_leased": NUMBER,
             "tokens_kept": NUMBER},
    "tokens": {"prefill": NUMBER, "decode": NUMBER, "hit": NUMBER},
    "queue": {"waiting": NUMBER, "limit": NUMBER},
}


def faults(tree):
    """A line for each member that is there and of another kind than docs/telemetry.md says."""
    found = {}
    for name, kind in FIELDS.items():
        if name not in tree:
            continue
        if not _is(tree[name], kind):
            found[name] = kind
        elif name in MEMBERS and kind == OBJECT:
            found |= {f"{name}.{key}": wanted for key, wanted in MEMBERS[name].items()
                      if key in tree[name] and not _is(tree[name][key], wanted)}
        elif name in MEMBERS:
            for row in tree[name]:
                if not isinstance(row, dict):
                    found[f"{name}[]"] = OBJECT
                    continue
                found |= {f"{name}[].{key}": wanted for key, wanted in MEMBERS[name].items()
                          if key in row and not _is(row[key], wanted)}
    return [f"the engine's {name} is not {kind}" for name, kind in found.items()]


def _is(value, kind):
    if kind == NUMBER:
        return number(value) is not None
    return isinstance(value, {TEXT: str, OBJECT: dict, ARRAY: list}[kind])


# ---- over time ---------------------------------------------------------------------------------

class History:
    """Counters of the last five minutes, and the console's own log lines.

    Counters: those of `tokens` (prefill, decode, hit, and what an engine may add) and "rounds".
    They carry the engine's own clock (`time`), which the tree was made by; a clock that goes back
    or a counter that falls is another engine, and begins anew. notes: {"time", "level", "text"},
    like the tree's `log`.
    """

    def __init__(self):
        self.samples = collections.deque()      # (seconds, {name: count})
        self.notes = collections.deque(maxlen=NOTES)

    def note(self, level, line):
        """Add a line of the console's own."""
        self.notes.append({"time": time.time(), "level": level, "text": line})

    def add(self, tree, seconds):
        """Remember a tree. seconds: the console's clock, for a tree without `time`."""
        at = number(tree, "time")
        at = seconds if at is None else at
        counts = dict(list(table(tree, "tokens").items())[:KINDS])
        if (rounds := number(tree, "rounds")) is not None:
            counts["rounds"] = rounds
        if self.samples:
            before, old = self.samples[-1]
            if at == before:
                self.samples.pop()
            elif at < before or any(counts.get(k, n) < n for k, n in old.items()):
                self.samples.clear()
        self.samples.append((at, counts))
        while self.samples[0][0] < at - HISTORY:
            self.samples.popleft()

    def clear(self):
        """Forget the counters (not the notes)."""
        self.samples.clear()

    @property
    def span(self):
        """Seconds between the oldest and the newest sample."""
        return self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0

    def rate(self, name, over=NOW):
        """Counts a second over the last `over` seconds; None where that is not known."""
        if len(self.samples) < 2:
            return None
        end, newest = self.samples[-1]
        for at, counts in reversed(self.samples):
            oldest = at, counts
            if at <= end - over:
                break
        return _slope(oldest, (end, newest), name)


def _slope(first, last, name):
    (t0, a), (t1, b) = first, last
    if t1 <= t0 or name not in a or name not in b:
        return None
    return (b[name] - a[name]) / (t1 - t0)
