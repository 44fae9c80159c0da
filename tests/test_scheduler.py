# python -m pytest tests/test_scheduler.py
"""The scheduler alone: who is admitted, what a round holds, and what a refusal leaves as it was."""

import numpy as np
import pytest

from engine.errors import QueueFull, RequestError, TooLong
from engine.pool.lease import Pool
from engine.sample import Choice, Sampling
from engine.scheduler import Scheduler

PAGE = 64


def scheduler(pages=8, seats=3, context=256, chunk=100, classes=1, placement="striped"):
    return Scheduler(Pool(pages, classes, placement), seats, context, chunk, PAGE, 512)


def ask(s, prompt, max_tokens=4, stop=()):
    return s.submit(np.arange(prompt) % 500, Sampling(max_tokens=max_tokens, stop_ids=stop))


def pick(row, sampling, position):
    """A token that tells where it came from: never an id that stops, unless a test says so."""
    return 100 + row


def step(s, token=pick):
    """One round: (its plan, its events as (request, token, reason))."""
    plan = s.plan()
    events = s.commit(plan, lambda *where: Choice(token(*where)))
    s.pool.check()
    return plan, [(sequence.id, choice.token, reason) for sequence, choice, reason in events]


def free(s):
    """Pages of each class that a new conversation could have: free, or kept for an ended one."""
    return [c.free + c.kept for c in s.pool.counts()[0]]


def finish(s, rounds=500):
    """Rounds until idle: {request: [(token, reason)]}."""
    said = {}
    while s.busy:
        rounds -= 1
        assert rounds, "the scheduler never ends"
        for request, token, reason in step(s)[1]:
            said.setdefault(request, []).append((token, reason))
    return said


def state(s):
    """What a refusal must leave alone."""
    return (free(s), s.pool.counts(), len(s.waiting), dict(s.live), dict(s.kept),
            list(s._free_seats), list(s._closes), s._submitted, s._rounds)


# --- rounds ---------------------------------------------------------------------------------------


def test_a_prompt_goes_in_chunks_and_its_last_row_gives_the_first_token():
    s = scheduler()
    request = ask(s, 230, max_tokens=3)
    seen = []
    for first, count, ends in ((0, 100, False), (100, 100, False), (200, 30, True)):
        plan, events = step(s)
        seat, at, tokens = plan.chunk
        assert (at, len(tokens), plan.chunk_ends) == (first, count, ends)
        assert tokens.dtype == np.int32 and not plan.tokens.size
        seen += tokens.tolist()
        assert [e[0] for e in events] == ([request] if ends else [])
    assert seen == (np.arange(230) % 500).tolist()
    assert events == [(request, 99, None)]      # row -1 of pick
    plan, events = step(s)
    assert plan.chunk is None and plan.tokens.tolist() == [99] and plan.positions.tolist() == [230]
    assert plan.seats.tolist() == [seat] and events == [(request, 100, None)]
    plan, events = step(s)
    assert plan.tokens.tolist() == [100] and plan.positions.tolist() == [231]
    assert events == [(request, 100, "length")]
    assert not s.busy and free(s) == [8] and list(s.kept) == [seat]


def test_decoding_goes_on_beside_the_chunks_of_a_long_prompt():
    s = scheduler(context=300)
    first = ask(s, 20, max_tokens=20)
    step(s)
    second = ask(s, 250, max_tokens=2)
    for start in (0, 100, 200):
        plan, events = step(s)
        assert plan.chunk[1] == start and plan.tokens.size == 1
        assert first in [e[0] for e in events]
    assert [e[0] for e in events] == [second, first]
    plan, events = step(s)
    assert plan.chunk is None and plan.tokens.size == 2
    assert sorted(plan.positions.tolist()) == [23, 250]
    said = {r: token for r, token, _ in events}     # each row's token goes to its conversation
    rows = {r: np.flatnonzero(plan.positions == p)[0] for r, p in ((first, 23), (second, 250))}
    assert said == {r: 100 + row for r, row in rows.items()}


def test_rounds_are_numbered_one_after_the_other():
    s = scheduler()
    ask(s, 10)
    assert [step(s)[0].number for _ in range(4)] == [1, 2, 3, 4]


def test_positions_of_picked_tokens_count_the_conversation():
    s, positions = scheduler(), []
    ask(s, 10, max_tokens=3)

    def noted(row, sampling, position):
        positions.append(position)
        return 7
    while s.busy:
        step(s, noted)
    assert positions == [10, 11, 12]


@pytest.mark.parametrize("emitted", [1, 2, 3])
def test_a_stop_id_ends_a_reply_at_any_token(emitted):
    s = scheduler()
    request = ask(s, 10, max_tokens=5, stop=(1, 2))
    tokens = iter([50] * (emitted - 1) + [2])
    events = []
    while s.busy:
        events += step(s, lambda *_: next(tokens))[1]
    assert [e[2] for e in events] == [None] * (emitted - 1) + ["stop"]
    assert {e[0] for e in events} == {request} and free(s) == [8]


# --- admission ------------------------------------------------------------------------------------


def test_admission_is_in_order_of_arrival_and_nobody_overtakes():
    s = scheduler(pages=4)
    first, second, third = ask(s, 150), ask(s, 150), ask(s, 5)      # 3, 3 and 1 pages
    plan, _ = step(s)
    # the third would fit beside the first, but the second came before it
    assert len(plan.opens) == 1 and free(s) == [1]
    while s.waiting:
        assert [q.id for q in s.waiting] == [second, third]
        step(s)
    assert [q.id for q in s.live.values()] == [second, third]
    assert first == 0 and set(finish(s)) == {second, third}


def test_a_lease_is_granted_whole_or_not_at_all():
    s = scheduler(pages=5)
    ask(s, 150)
    step(s)
    ask(s, 150)
    for _ in range(2):
        plan, _ = step(s)
        assert not plan.opens and free(s) == [2] and len(s.waiting) == 1
    finish(s)
    assert free(s) == [5]


def test_a_lease_holds_the_prompt_and_the_longest_reply():
    s = scheduler()
    ask(s, 64, max_tokens=1)
    ask(s, 60, max_tokens=4)
    ask(s, 60, max_tokens=5)
    plan, _ = step(s)
    assert [lease.pages for _, lease, _ in plan.opens] == [2, 1, 2]


def test_no_more_conversations_than_seats_and_a_seat_closes_before_it_opens_again():
    s = scheduler(pages=50, seats=2)
    requests = [ask(s, 10, max_tokens=2) for _ in range(5)]
    open_seats, live = set(), []
    while s.busy:
        plan, _ = step(s)
        for seat in plan.closes:
            open_seats.remove(seat)
        for seat, _, _ in plan.opens:
            assert seat not in open_seats
            open_seats.add(seat)
        assert len(open_seats) <= 2
        live.append(len(open_seats))
    assert max(live) == 2 and open_seats == set(s.kept)
    assert requests == list(range(5)) and free(s) == [50]


def test_many_requests_through_a_small_pool_end_all():
    rng = np.random.default_rng(4)
    s = scheduler(pages=9, seats=4, classes=3, placement="owner", context=192)
    wanted = {ask(s, int(rng.integers(1, 180)), int(m)): int(m) for m in rng.integers(1, 12, 40)}
    said = finish(s)
    assert {r: len(t) for r, t in said.items()} == wanted
    assert all([reason for _, reason in t] == [None] * (len(t) - 1) + ["length"]
               for t in said.values())
    assert free(s) == [3, 3, 3]


# --- clipping and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("prompt, wanted, given", [(255, 100, 1), (200, 100, 56), (200, 56, 56),
                                                   (200, 55, 55), (1, 10 ** 9, 255)])
def test_a_reply_is_clipped_to_the_context(prompt, wanted, given):
    s = scheduler(pages=4)      # exactly a context: a longer lease would be refused
    request = ask(s, prompt, max_tokens=wanted)
    said = finish(s)[request]
    assert len(said) == given and said[-1][1] == "length"


REFUSED = {
    "empty": ([], {}, ("empty",)),
    "above the vocabulary": ([3, 5, 512], {}, ("512", "position 2")),
    "negative": ([3, -1, 5], {}, ("-1", "position 1")),
    "as long as the context": ([1] * 256, {}, ("256", "255")),
    "far too long": ([1] * 5000, {}, ("5000", "256", "255")),
    "never fits": ([1] * 100, dict(pages=1), ("2 pages", "1 page")),
    "never fits with its reply": ([1] * 60, dict(pages=1), ("2 pages", "1 page")),
    "never fits a class": ([1] * 150, dict(pages=4, classes=2, placement="owner"),
                           ("3 pages", "2 pages")),
    "never fits a stripe": ([1] * 150, dict(pages=2, classes=2), ("3 pages", "1 page")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_the_numbers_and_changes_nothing(name):
    prompt, options, numbers = REFUSED[name]
    s = scheduler(**options)
    ask(s, 10, max_tokens=40)
    step(s)
    ask(s, 20)
    before = state(s)
    with pytest.raises(RequestError) as caught:
        s.submit(prompt, Sampling(max_tokens=5))
    told = f"{caught.value.message} {caught.value.hint}"
    assert all(number in told for number in numbers), told
    assert caught.value.hint
    assert state(s) == before
    finish(s)
    s.pool.check()


# --- cancelling -----------------------------------------------------------------------------------


def test_cancelled_while_waiting():
    s = scheduler(pages=4)
    first, second, third = ask(s, 150), ask(s, 150), ask(s, 150)
    step(s)
    s.cancel(second)
    said = finish(s)
    assert list(said) == [first, third] and free(s) == [4]


def test_cancelled_before_the_first_round():
    s = scheduler()
    s.cancel(ask(s, 150))
    assert not s.busy and free(s) == [8]


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_cancelled_in_prefill_and_decode_frees_pages_within_a_round(rounds):
    s = scheduler(pages=4, seats=1)
    first = ask(s, 150, max_tokens=50)      # two chunks; decoding from round 3 on
    for _ in range(rounds):
        plan, _ = step(s)
    seat = next(iter(s.live))
    second = ask(s, 150, max_tokens=1)
    s.cancel(first)
    s.pool.check()
    plan, events = step(s)
    assert plan.closes == (seat,)
    assert [opened for opened, _, _ in plan.opens] == [seat] and plan.chunk[1] == 0
    assert not plan.tokens.size and not events
    assert list(finish(s)) == [second] and free(s) == [4]


def test_cancelled_twice_ended_and_unknown_requests_are_no_error():
    s = scheduler()
    first = ask(s, 10, max_tokens=1)
    step(s)
    before = state(s)
    for request in (first, first, 99, -1):
        s.cancel(request)
    assert state(s) == before
    second = ask(s, 10, max_tokens=9)
    step(s)
    s.cancel(second)
    s.cancel(second)
    assert finish(s) == {} and free(s) == [8]


# --- the queue, turns and the size of a chunk -----------------------------------------------------


def test_the_queue_is_bounded_and_says_so():
    s = Scheduler(Pool(8, 1, "striped"), 1, 256, 100, PAGE, 512, queue=2)
    ask(s, 10, max_tokens=50)
    step(s)
    ask(s, 10), ask(s, 10)
    before = state(s)
    with pytest.raises(QueueFull) as caught:
        ask(s, 10)
    assert "2 requests wait" in caught.value.message and "--queue" in caught.value.hint
    assert state(s) == before


def test_those_that_the_next_round_can_seat_do_not_count_as_waiting():
    s = Scheduler(Pool(8, 1, "striped"), 2, 256, 100, PAGE, 512, queue=1)
    for _ in range(3):      # two seats and a place in the queue, all in one round
        ask(s, 10, max_tokens=50)
    with pytest.raises(QueueFull):
        ask(s, 10)
    step(s)
    assert len(s.live) == 2 and len(s.waiting) == 1
    with pytest.raises(QueueFull):
        ask(s, 10)


@pytest.mark.parametrize("name, fits", [("striped", 512), ("owner", 256)])
def test_a_request_that_is_too_long_is_told_what_would_fit(name, fits):
    s = Scheduler(Pool(8, 2, name), 2, 4096, 100, 64, 512)
    with pytest.raises(TooLong) as caught:
        ask(s, 700, max_tokens=50)
    for number in ("12 pages", "prompt 700 tokens", "reply up to 50", "window 4096",
                   "pool 8 pages of 64", f"{fits} tokens with the reply would fit"):
        assert number in caught.value.message
    ask(s, fits - 50, max_tokens=50)
    with pytest.raises(TooLong, match="the prompt has 4096 tokens.*prompt 4096 tokens"):
        ask(s, 4096)


def test_conversations_in_prefill_take_turns():
    s = scheduler(pages=12, chunk=64)
    a, b = ask(s, 190, max_tokens=1), ask(s, 190, max_tokens=1)
    seats = [step(s)[0].chunk[0] for _ in range(6)]
    assert seats[:2] == seats[2:4] == seats[4:] and seats[0] != seats[1]
    assert not s.busy and {k.id for k in s.kept.values()} == {a, b}


@pytest.mark.parametrize("token_seconds, expected", [(1e-3, 192), (1e-2, 64), (1.0, 64),
                                                     (1e-5, 1000)])
def test_a_chunk_is_what_a_round_has_time_for_while_others_wait(token_seconds, expected):
    s = scheduler(pages=40, chunk=1000, context=2048)
    ask(s, 10, max_tokens=50)
    step(s)
    s.measured(100, 100 * token_seconds)
    ask(s, 1500, max_tokens=1)
    assert len(step(s)[0].chunk[2]) == expected


def test_alone_a_prompt_gets_the_whole_chunk():
    s = scheduler(pages=40, chunk=1000, context=2048)
    s.measured(100, 100.0)
    ask(s, 1500, max_tokens=1)
    assert len(step(s)[0].chunk[2]) == 1000
