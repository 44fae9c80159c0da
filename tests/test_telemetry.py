# python -m pytest tests/test_telemetry.py
"""The telemetry tree: merge patches, histograms, the page map, and what a scheduler shows."""

import json
import random
from types import SimpleNamespace

import pytest

from engine import telemetry
from engine.pool.lease import Pool
from engine.sample import Choice, Sampling
from engine.scheduler import Scheduler
from engine.telemetry import CELLS, Histogram, Meters, page_map, patch, tree


def applied(target, change):
    """RFC 7386, section 2, word for word."""
    if not isinstance(change, dict):
        return change
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in change.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = applied(target.get(name), value)
    return target


def some_tree(rng, depth=3):
    """A random JSON object without nulls, as telemetry's members that may change have none."""
    kinds = [lambda: rng.randrange(3), lambda: "x" * rng.randrange(3),
             lambda: [rng.randrange(2)] * rng.randrange(3)]
    if depth:
        kinds.append(lambda: some_tree(rng, depth - 1))
    return {name: rng.choice(kinds)() for name in rng.sample("abcdef", rng.randrange(5))}


def test_a_patch_turns_one_tree_into_the_other():
    rng = random.Random(3)
    for _ in range(3000):
        old, new = some_tree(rng), some_tree(rng)
        change = patch(old, new)
        assert json.dumps(applied(old, change), sort_keys=True) == json.dumps(new, sort_keys=True)
        assert (change == {}) == (old == new)


def test_a_patch_holds_only_what_changed():
    old = {"a": 1, "b": {"c": 2, "d": [1, 2]}, "e": "x"}
    assert patch(old, {"a": 1, "b": {"c": 3, "d": [1, 2]}, "e": "x"}) == {"b": {"c": 3}}
    assert patch(old, {"a": 1, "b": {"c": 2, "d": [2]}}) == {"b": {"d": [2]}, "e": None}


def test_a_histogram_counts_up_to_each_bound():
    h = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        h.observe(value)
    assert h.tree() == {"bounds": [1.0, 2.0], "counts": [2, 2, 1], "sum": 14.0, "count": 5}


@pytest.mark.parametrize("pages, classes", [(8, 1), (9, 3), (1000, 3), (5000, 1)])
def test_the_map_shows_what_most_pages_of_a_cell_are(pages, classes):
    pool = Pool(pages, classes, "striped")
    maps = page_map(pool)
    assert [len(m) for m in maps] == [min(CELLS, pool.class_total(c)) for c in range(classes)]
    assert set("".join(maps)) == {"."}
    half = pool.grant(pages // 2)
    assert abs("".join(page_map(pool)).count("#") - sum(map(len, maps)) / 2) <= classes
    pool.keep(half)
    assert set("".join(page_map(pool))) == {".", "k"}
    pool.release(half)
    assert page_map(pool) == maps


def test_no_pages_of_a_class_are_an_empty_map():
    assert page_map(Pool(2, 3, "striped")) == [".", ".", ""]


def engine():
    """An engine as far as the tree looks at it."""
    scheduler = Scheduler(Pool(12, 3, "owner"), 2, 256, 64, 64, 512)
    return SimpleNamespace(
        scheduler=scheduler, pool=scheduler.pool, meters=Meters(),
        config=SimpleNamespace(page_rows=64), page_bytes=4096, world=SimpleNamespace(size=3),
        ledger=SimpleNamespace(number=7), tokens={"prefill": 1, "decode": 2},
        seconds={"prefill": 0.5, "decode": 0.25})


class Pulse:
    @staticmethod
    def everyone():
        return {0: {"host": "a", "round": 7}, 2: {"host": "c", "round": 6}}


def test_what_a_scheduler_is_doing_is_in_the_tree():
    e = engine()
    s = e.scheduler
    for n in (100, 10, 20):
        s.submit(list(range(n)), Sampling(max_tokens=3))
    for _ in range(3):
        plan = s.plan()
        for sequence, _, reason in s.commit(plan, lambda *_: Choice(5)):
            e.meters.token(sequence, reason)
    t = json.loads(json.dumps(tree(e, Pulse)))
    states = {r["id"]: r["state"] for r in t["requests"]}
    assert states == {0: "decode", 1: "decode", 2: "queued"} or "queued" in states.values()
    assert t["queue"] == {"waiting": 1, "limit": 64} and t["rounds"] == 7
    assert [r["host"] for r in (t["ranks"][0], t["ranks"][2])] == ["a", "c"]
    assert "host" not in t["ranks"][1] and t["ranks"][1]["pages"]["total"] == 4
    assert sum(c["leased"] for c in t["classes"]) == t["pool"]["tokens_leased"] // 64 == 3
    assert sum(c["conversations"] for c in t["classes"]) == 2
    assert t["first_token_seconds"]["count"] >= 1 and t["pool"]["tokens"] == 768
    while s.busy:
        for sequence, _, reason in s.commit(s.plan(), lambda *_: Choice(5)):
            e.meters.token(sequence, reason)
    t = tree(e, Pulse)
    assert t["requests"] == [] and len(t["kept"]) == 2 and t["ended"] == {"length": 3}
    assert t["pool"]["tokens_kept"] == 64 * sum(k["pages"] for k in t["kept"])


def test_the_log_keeps_the_newest_lines():
    meters = Meters()
    for i in range(500):
        meters.note("refusal", f"line {i}")
    meters.note("fault", "gone")
    assert len(meters.log) == 200 and meters.log[-1]["text"] == "gone" and meters.refused == 500


def test_a_rank_that_does_not_follow_is_behind(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: now[0])
    e, rounds = engine(), {0: {"round": 0}, 1: {"round": 0}, 2: {}}
    board = telemetry.Board({}, SimpleNamespace(everyone=lambda: rounds))
    for second in range(30):
        now[0], e.ledger.number = float(second), second
        rounds[0]["round"] = second
        rounds[1]["round"] = min(second, 5)     # alive, and stuck in its sixth round
        board.update(e)
        late = second - telemetry.ROUND_SECONDS > 6
        assert board.behind() == ({1: 5} if late else {}), second
