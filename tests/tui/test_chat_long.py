# python -m pytest tests/tui/test_chat_long.py
"""Replies of any length in the chat: a window on their parts, and a loop that stays free."""

import asyncio
import threading
import time

import pytest

from chat_driver import runner
from tui.chat.composer import Composer
from tui.chat.cutter import PART
from tui.chat.more import More
from tui.chat.parts import WINDOW, Part, Parts

pytestmark = pytest.mark.anyio


@pytest.fixture
def run(server, screen_text, until):
    return runner(server, screen_text, until)


LINES = 600             # forty parts


def numbered(n):
    return "".join(f"Line {i} of the reply.\n\n" for i in range(n))


async def test_a_long_reply_is_a_window_on_its_parts(run, server):
    server.say(numbered(LINES))

    async def steps(d):
        await d.ask("hi")
        parts = d.app.query_one(".text", Parts)
        assert parts.widgets <= WINDOW and len(d.app.query(Part)) <= WINDOW
        assert f"Line {LINES - 1}" in d.screen and len(d.app.query("*")) < 400
        above = parts.query(More).first()
        assert "earlier: Enter" in above.render().plain
        seen = set()
        for _ in range(1000):
            if not above.display:
                break
            above.focus()
            await d.press("enter")
            await d.pilot.pause()
            assert parts.widgets <= 2 * WINDOW
            seen.add(parts._first)
        assert not above.display and 0 in seen
        below = parts.query(More).last()
        assert below.display
        await d.press("ctrl+end")
        d.chat.query_one(Composer).focus()
        await d.press("ctrl+end")
        await d.shows(f"Line {LINES - 1}")
        assert not below.display
    await run(steps)


async def test_a_reply_that_grows_does_not_pull_the_reader_along(run, server):
    first = server.say(numbered(LINES), hold=5 * 60)
    second = threading.Event()
    server.script.insert(5 * 300, second)

    async def steps(d):
        await d.say("hi")
        await d.until(lambda: "Line 59 " in d.chat.current.messages[-1].content, "a beginning")
        await d.press("pageup", "pageup")
        await d.pilot.pause()
        top = d.chat.query_one("Transcript").scroll_y
        first.set()
        await d.until(lambda: "Line 298 " in d.chat.current.messages[-1].content, "more")
        await d.until(lambda: "later: Enter" in d.chat.query(More).last().render().plain,
                      "what is not shown of it")
        assert d.chat.query_one("Transcript").scroll_y == top
        await d.press("ctrl+end")
        second.set()
        await d.idle()
        assert f"Line {LINES - 1}" in d.screen
    await run(steps)


async def test_many_messages_are_a_window_too(run, server):
    async def steps(d):
        for i in range(100):
            d.chat.current.ask(f"question {i}")
        d.chat.keep(d.chat.current)
        await d.chat.show(d.chat.current)
        await d.pilot.pause()
        assert "question 99" in d.screen and len(d.app.query("Question")) == 24
        line = d.chat.query(More).first()
        assert "76 messages earlier" in line.render().plain
        line.focus()
        await d.press("enter")
        await d.pilot.pause()
        assert len(d.app.query("Question")) == 36
    await run(steps)


async def test_large_tails_keep_the_loop_free(run, server):
    """While a reply comes as fast as it can, other work gets its turn.

    Held against processor seconds of the loop's thread: those of a busy machine pass without them.
    """
    server.say("".join(f"{'word ' * 12}\n\n" for _ in range(600)))

    async def steps(d):
        longest = 0.0
        await d.say("hi")
        while d.chat.runs:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            longest = max(longest, time.thread_time() - before)
        assert longest < 2.0, longest
        assert len(d.chat.current.messages[-1].content) > 10 * PART
    await run(steps)
