# pytest tests/tui/test_state.py
"""Merging, careful reading, and rates, against values worked out by hand."""

import copy
import math
import random

import pytest

from canned_server import tree, wrong
from tui.dashboard.plot import stretches
from tui.state import HISTORY, KINDS, NOTES, History, faults, merge, number, rows, table, text

# RFC 7386, appendix A: original, patch, result.
RFC = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}), ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}), ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}), ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}), (["a", "b"], ["c", "d"], ["c", "d"]),
    ({"a": "b"}, ["c"], ["c"]), ({"a": "foo"}, None, None), ({"a": "foo"}, "bar", "bar"),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}), ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]


@pytest.mark.parametrize("target, patch, result", RFC)
def test_the_merge_patches_of_the_rfc(target, patch, result):
    before = copy.deepcopy(target)
    assert merge(target, patch) == result
    assert target == before


def test_what_a_patch_does_not_name_stays_the_same_object():
    old = tree()
    new = merge(old, {"tokens": {"decode": 5001}})
    assert new["ranks"] is old["ranks"] and new["pool"] is old["pool"]
    assert new["tokens"] == {**old["tokens"], "decode": 5001}


def test_readers_take_nothing_on_trust():
    data = {"a": [{"n": 1}, "x", {"n": "1"}], "t": "text", "b": True, "inf": math.inf,
            "nan": math.nan, "big": 10 ** 400, "o": {"x": 1, "y": "2", "z": False}}
    assert number(data, "a", 0, "n") == 1 and number(data, "a", 2, "n") is None
    assert [number(data, k) for k in ("b", "t", "inf", "nan", "none", "a", "big")] == [None] * 7
    assert number(data, "a", 9, "n") is None and number(data, "a", "0", "n") is None
    assert number(None, "a") is None and number(7, "a") is None
    assert text(data, "t") == "text" and text(data, "a") is None
    assert rows(data, "a") == [{"n": 1}, {"n": "1"}] and rows(data, "t") == rows(data, "q") == []
    assert table(data, "o") == {"x": 1} and table(data, "a") == {}


def test_faults_name_each_member_of_a_wrong_kind():
    good = tree()
    assert faults(good) == [] and faults({}) == []
    assert faults({**good, "world": "6"}) == ["the engine's world is not a number"]
    assert faults({**good, "ranks": [7]}) == ["the engine's ranks[] is not an object"]
    assert faults({**good, "kept": [{"seat": None}, {"seat": "a"}]}) == [
        "the engine's kept[].seat is not a number"]
    found = faults(wrong(good))
    assert "the engine's pool.tokens is not a number" in found
    assert "the engine's ranks[].map is not a string" in found and len(found) < 80


def test_no_tree_raises():
    values = [None, True, -1, 1e308, "", "x\x1b[31m", [], {}, [None], {"a": 1}, math.nan, 10 ** 400]
    dice, history = random.Random(5), History()
    for _ in range(400):
        data = tree()
        for _ in range(5):
            at = data
            while True:
                key = dice.choice(list(at) if isinstance(at, dict) else range(len(at)))
                inner = at[key]
                if isinstance(inner, (dict, list)) and inner and dice.random() < 0.7:
                    at = inner
                else:
                    at[key] = dice.choice(values)
                    break
        assert all(line.startswith("the engine's ") for line in faults(data))
        history.add(data, dice.random() * 1e6)
        for name in ("prefill", "decode", "rounds", "nothing"):
            assert history.rate(name) is None or history.rate(name) >= 0
            assert len(stretches(history.samples, name, 7, HISTORY)) == 7


# ---- rates -------------------------------------------------------------------------------------

def grown(seconds, per_second, history=None, start=1000.0, step=0.25):
    """A history of counters that grow evenly: {name: counts a second}."""
    history = history or History()
    for i in range(int(seconds / step) + 1):
        at = i * step
        counts = {name: rate * at for name, rate in per_second.items()}
        history.add({"time": start + at, "rounds": counts.pop("rounds", 0), "tokens": counts}, 0)
    return history


def test_rates_are_counts_over_seconds_of_the_engines_clock():
    history = grown(20, {"decode": 12, "prefill": 500, "rounds": 3})
    assert history.rate("decode") == pytest.approx(12)
    assert history.rate("prefill", over=10) == pytest.approx(500)
    assert history.rate("rounds") == pytest.approx(3)
    assert history.rate("drafted") is None and History().rate("decode") is None
    assert history.span == 20


def test_a_fast_engine_is_not_forgotten_early_and_a_long_one_does_not_grow():
    history = grown(HISTORY * 3, {"decode": 1})
    assert history.span == HISTORY and len(history.samples) == HISTORY * 4 + 1


def test_an_engine_that_starts_again_begins_anew():
    history = grown(50, {"decode": 10})
    grown(8, {"decode": 2}, history, start=1060.0)
    assert history.rate("decode") == pytest.approx(2) and history.span == 8
    history.add({"time": 5.0, "tokens": {"decode": 1000}}, 0)
    assert history.rate("decode") is None and len(history.samples) == 1


def test_without_a_clock_of_the_engine_the_consoles_counts():
    history = History()
    for i in range(5):
        history.add({"tokens": {"decode": 8 * i}}, 100.0 + i)
    assert history.rate("decode") == pytest.approx(8)


def test_what_is_remembered_is_bounded():
    history = History()
    for i in range(3 * NOTES):
        history.note("info", f"line {i}")
    history.add({"time": 1, "tokens": {str(i): i for i in range(10_000)}}, 0)
    assert len(history.notes) == NOTES and history.notes[-1]["text"] == f"line {3 * NOTES - 1}"
    assert len(history.samples[0][1]) == KINDS
