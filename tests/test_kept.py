# python -m pytest tests/test_kept.py
"""Kept conversations in the scheduler: continued, dropped for others, and counted."""

import pytest

from engine.sample import Sampling
from test_scheduler import PAGE, ask, finish, scheduler, step


def talk(s, prompt, max_tokens=4):
    """Submit a prompt (ids) and let everything end: (opens of its admission, tokens said)."""
    request = s.submit(prompt, Sampling(max_tokens=max_tokens))
    said, opens = [], ()
    while s.busy:
        plan, events = step(s)
        opens += plan.opens
        said += [token for r, token, _ in events if r == request]
    return opens, said


def test_a_prompt_that_goes_on_continues_the_kept_conversation():
    s = scheduler(pages=8)
    first = list(range(90))
    ((seat, lease, kept),), said = talk(s, first)
    assert kept == 0 and lease.pages == 2
    # the last token was never fed: what is kept is the prompt and all but that one
    more = first + said[:-1] + [7, 8, 9] * 20
    ((again, longer, kept),), _ = talk(s, more)
    assert (again, kept) == (seat, 93) and longer.ids[:2].tolist() == lease.ids.tolist()
    assert longer.pages == -(-(len(more) + 4) // PAGE) and s.hit_tokens == 93


@pytest.mark.parametrize("change", ["first", "last", "same", "shorter"])
def test_a_prompt_that_does_not_go_on_starts_afresh(change):
    s = scheduler(pages=8)
    ids = list(range(90))
    _, said = talk(s, ids)
    held = ids + said[:-1]
    prompt = {"first": [99] + held[1:] + [5], "last": held[:-1] + [499, 5], "same": held,
              "shorter": held[:-1]}[change]
    ((_, _, kept),), _ = talk(s, prompt)
    assert kept == 0 and s.hit_tokens == 0


def test_the_longest_kept_conversation_is_continued():
    s = scheduler(pages=8)
    ids = list(range(60))
    talk(s, ids, 1)
    talk(s, ids + [400], 1)             # continues the first
    talk(s, ids + [300], 1)             # the first is gone: a fresh one
    assert sorted(k.fed for k in s.kept.values()) == [61, 61]
    ((_, _, kept),), _ = talk(s, ids + [300, 5, 6], 1)
    assert kept == 61


def test_kept_pages_go_to_who_needs_them_the_oldest_first():
    s = scheduler(pages=4, seats=3)
    for start in (0, 100, 200):         # a page each
        talk(s, [start] * 50, 2)
    assert [k.ids[0] for k in s.kept.values()] == [0, 100, 200] and s.pool.available() == [1]
    talk(s, [300] * 100, 2)             # two pages, a seat
    assert [k.ids[0] for k in s.kept.values()] == [100, 200, 300]
    talk(s, [400] * 200, 2)             # all four
    assert [k.ids[0] for k in s.kept.values()] == [400]


def test_nothing_is_dropped_for_a_request_that_must_wait_anyway():
    s = scheduler(pages=4, seats=3)
    talk(s, [1] * 50, 2)
    ask(s, 120, max_tokens=20)          # three pages, live
    step(s)
    waiting = ask(s, 100)               # two pages: the kept one is not enough
    for _ in range(3):
        plan, _ = step(s)
        assert not plan.closes and len(s.kept) == 1
    assert waiting in finish(s)


def test_a_kept_conversation_that_cannot_grow_is_read_afresh():
    s = scheduler(pages=6, seats=3, classes=2, placement="owner", context=192)
    _, said = talk(s, [1] * 60, 2)      # class 0, a page
    ask(s, 120, max_tokens=60)          # three pages: class 1
    step(s)
    ask(s, 60, max_tokens=60)           # two pages: class 0, full now
    step(s)
    assert s.pool.available() == [0, 0]
    request = s.submit([1] * 60 + said[:-1] + [2] * 40, Sampling(max_tokens=2))
    for _ in range(3):
        step(s)
    assert request in finish(s)


def test_check_counts_kept_pages():
    s = scheduler(pages=8)
    talk(s, [1] * 90, 2)
    (counts,), _ = s.pool.counts()
    assert counts == (6, 0, 2, 8)
