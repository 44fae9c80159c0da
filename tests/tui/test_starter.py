# python -m pytest tests/tui/test_starter.py
"""A console that starts its engine: the process, what it says, and the question at the end."""

import signal
import sys
import time

import pytest

from tui.app import Console
from tui.leave import Leave
from tui.starter import Started

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "sparkgrid"


def python(code):
    return Started([sys.executable, "-c", code])


def waited(started):
    """Its exit code, once it has one."""
    until = time.monotonic() + 30
    while started.code is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return started.code


def test_what_an_engine_says_before_it_ends_is_told(folder):
    started = python("import sys; print('one'); print('port 8114 is taken', file=sys.stderr); "
                     "sys.exit(4)")
    assert waited(started) == 4
    assert "with code 4" in started.ended() and "port 8114 is taken" in started.ended()
    assert str(folder / "engine.log") in started.ended()


def test_a_silent_end_by_a_signal_is_told():
    started = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert waited(started) == -signal.SIGKILL
    assert "by signal 9" in started.ended() and "said nothing" in started.ended()


def test_stopping_is_a_term_and_waits_for_the_end():
    started = python("import signal, sys, time\n"
                     "signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(7)))\n"
                     "print('up', flush=True)\ntime.sleep(60)")
    until = time.monotonic() + 30
    while "up" not in started.tail():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert started.stop() == 7 and "bye" in started.tail()
    assert started.stop() == 7


def test_one_that_does_not_listen_is_killed(monkeypatch):
    monkeypatch.setattr("tui.starter.STOP_SECONDS", 0.1)
    started = python("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                     "print('up', flush=True)\ntime.sleep(60)")
    while "up" not in started.tail():
        time.sleep(0.02)
    assert started.stop() == -signal.SIGKILL


class Engine:
    """A started engine as the app sees it."""

    left = False

    def __init__(self, code=None):
        self.code = code

    def ended(self):
        return "the engine ended with code 4: port 8114 is taken"


def console(engine, **state):
    app = Console(None, replay=[(0.0, "snapshot", state)], engine=engine)
    app.up = True
    app.state = state
    return app


@pytest.mark.parametrize("state, asks", [
    ({"watchers": 1, "requests": []}, False), ({}, False),
    ({"watchers": "x", "requests": 3}, False),
    ({"watchers": 2, "requests": []}, True), ({"watchers": 1, "requests": [{}]}, True)])
async def test_it_asks_only_where_others_use_the_engine(state, asks):
    app = console(Engine(), **state)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.up, app.state = True, state
        await pilot.press("ctrl+q")
        await pilot.pause()
        assert isinstance(app.screen, Leave) == asks
    assert app.engine.left is False


@pytest.mark.parametrize("key, left, ends", [("l", True, True), ("s", False, True),
                                             ("escape", False, False)])
async def test_the_answer_decides(key, left, ends):
    state = {"watchers": 3, "requests": [{}]}
    app = console(Engine(), **state)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.up, app.state = True, state
        await pilot.press("ctrl+q")
        await pilot.pause()
        assert "2 other watchers and 1 request" in app.screen._users
        await pilot.press(key)
        await pilot.pause()
        assert app.engine.left == left and app.is_running != ends


async def test_an_engine_that_ended_by_itself_is_told_once(until):
    app = console(Engine(4))

    def told():
        return [n for n in app._notifications if "code 4" in n.message]
    async with app.run_test(size=(80, 24)) as pilot:
        await until(told, "the note")
        await pilot.pause(0.6)              # and it would have been told again
        assert len(told()) == 1
        await pilot.press("ctrl+q")         # nobody to ask about
        await pilot.pause()
        assert not isinstance(app.screen, Leave)
