# pytest tests/api/test_hub.py
"""The hub between two threads: whatever happens to the engine, nobody waits for ever."""

import asyncio

import pytest

from engine.errors import FaultError, QueueFull, Unavailable
from engine.hub import DRAINING, SERVING, Hub
from engine.sample import Sampling
from engine.telemetry import Meters
from fake_engine import PATIENCE, Event


class Refusing:
    """An engine whose submit raises what is given, or takes all."""

    def __init__(self, error=None):
        self.error, self.cancelled = error, []

    def submit(self, ids, sampling):
        if self.error:
            raise self.error
        return 7

    def cancel(self, request):
        self.cancelled.append(request)


def hubbed(work):
    """asyncio.run(work(hub)) of a serving hub."""
    hub = Hub(Meters())
    hub.become(SERVING, "")
    return asyncio.run(asyncio.wait_for(work(hub), PATIENCE))


async def submitted(hub):
    task = asyncio.ensure_future(hub.submit([1], Sampling()))
    await asyncio.sleep(0)
    return task


def test_the_engine_fails_before_a_request_is_taken():
    async def work(hub):
        task = await submitted(hub)
        hub.fail(FaultError("broken"))
        with pytest.raises(Unavailable, match="broken"):
            await task
        with pytest.raises(Unavailable, match="broken"):
            await hub.submit([1], Sampling())
    hubbed(work)


def test_the_engine_fails_between_taking_a_request_and_saying_so():
    async def work(hub):
        task = await submitted(hub)
        hub.take(Refusing())
        hub.fail(FaultError("broken"))
        ticket = await task
        with pytest.raises(FaultError, match="broken"):
            async for _ in ticket:
                pass
        assert ticket.ended
    hubbed(work)


def test_a_bug_of_submit_leaves_nobody_waiting():
    async def work(hub):
        task = await submitted(hub)
        with pytest.raises(ZeroDivisionError):
            hub.take(Refusing(ZeroDivisionError()))
        hub.fail(FaultError("broken"))
        with pytest.raises(Unavailable, match="broken"):
            await task
    hubbed(work)


def test_a_hub_is_closed_with_a_request_in_hand():
    async def work(hub):
        task = await submitted(hub)
        hub.become(DRAINING, "it is being stopped")
        hub.close()
        with pytest.raises(Unavailable, match="stopped"):
            await task
        with pytest.raises(Unavailable, match="stopped"):
            await hub.submit([1], Sampling())
        assert not hub.busy
    hubbed(work)


def test_a_waiting_submit_that_is_cancelled_is_forgotten():
    async def work(hub):
        task = await submitted(hub)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine = Refusing()
        hub.take(engine)
        assert not hub.busy and engine.cancelled in ([], [7])
    hubbed(work)


def test_a_refusal_is_raised_and_noted():
    async def work(hub):
        task = await submitted(hub)
        hub.take(Refusing(QueueFull("8 wait")))
        with pytest.raises(QueueFull, match="8 wait"):
            await task
        assert not hub.busy
    hubbed(work)


def test_tokens_come_in_order_and_the_last_ends_the_ticket():
    async def work(hub):
        task = await submitted(hub)
        hub.take(Refusing())
        ticket = await task
        for i in range(5):
            hub.deliver([Event(7, i, "length" if i == 4 else None), Event(8, 99, "stop")])
        assert not hub.busy
        found = [o.token async for outputs in ticket for o in outputs]
        assert found == [0, 1, 2, 3, 4] and ticket.ended
    hubbed(work)


def test_tokens_before_a_failure_are_not_lost():
    async def work(hub):
        task = await submitted(hub)
        hub.take(Refusing())
        ticket = await task
        hub.deliver([Event(7, 1, None)])
        hub.fail(FaultError("broken"))
        await asyncio.sleep(0)
        found = []
        with pytest.raises(FaultError):
            async for outputs in ticket:
                found += [o.token for o in outputs]
        assert found == [1]
    hubbed(work)


def test_cut_ends_what_runs_and_frees_it():
    async def work(hub):
        task = await submitted(hub)
        engine = Refusing()
        hub.take(engine)
        ticket = await task
        assert hub.cut(engine, Unavailable("stopped")) == 1 and engine.cancelled == [7]
        with pytest.raises(Unavailable):
            async for _ in ticket:
                pass
    hubbed(work)


def test_an_operator_ends_a_request_by_its_id():
    async def work(hub):
        task = await submitted(hub)
        engine = Refusing()
        hub.take(engine)
        ticket = await task
        ends = [asyncio.ensure_future(hub.end(number)) for number in (7, 7, 8)]
        await asyncio.sleep(0)
        hub.take(engine)
        assert await asyncio.gather(*ends) == [True, False, False] and engine.cancelled == [7]
        with pytest.raises(Unavailable, match="operator"):
            await anext(ticket)
        assert not hub.busy
    hubbed(work)


def test_ending_a_request_of_a_lost_engine_says_no():
    async def work(hub):
        hub.fail(FaultError("broken"))
        assert await hub.end(7) is False
    hubbed(work)
