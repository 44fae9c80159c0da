# python -m pytest tests/tui/test_chat_long.py
"""Replies of any length in the chat: a window on their parts, and a loop that stays free."""

import asyncio
import threading

import pytest
from textual.app import App
from textual.containers import VerticalScroll
from textual.content import Content

from chat_driver import runner
from tui.chat.composer import Composer
from tui.chat.cutter import PART
from tui.chat.message import Message
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


# ---- a loop that stays free ----------------------------------------------------------------------

SHAPES = {              # of text that grows for long without a place where it may well be cut
    "paragraph": "word " * 24_000,
    "solid": "x" * 100_000,
    "code": "```python\n" + "value = f(1) # word word\n" * 4000,
    "list": "- item word word word word word word\n" * 2500,
    "table": "| a | b |\n|---|---|\n" + "| word word | word |\n" * 4000,
    "prose": f"{'word ' * 12}\n\n" * 1500,
}
LARGEST = 4 * PART + 200        # characters of a part, by the cutter's rule, and what frames it


@pytest.fixture
def laid(monkeypatch):
    """Characters that are laid out in each turn of the loop: what a key waits for."""
    found = [0]
    turn, height = asyncio.events.Handle._run, Content.get_height

    def counted(self, *args):
        found[-1] += len(self.plain)
        return height(self, *args)

    def run(self):
        found.append(0)
        turn(self)
    monkeypatch.setattr(Content, "get_height", counted)
    monkeypatch.setattr(asyncio.events.Handle, "_run", run)
    return found


class Text(App):
    """Nothing but a text, which is followed."""

    def compose(self):
        with VerticalScroll():
            yield Parts()

    def on_mount(self):
        self.query_one(VerticalScroll).anchor()


@pytest.mark.parametrize("name", SHAPES)
async def test_a_turn_lays_out_one_part_of_what_grows(name, laid):
    app = Text()
    async with app.run_test(size=(100, 40)) as pilot:
        for end in range(1500, 7 * PART, 1500):
            await app.query_one(Parts).show(SHAPES[name][:end])
            await pilot.pause()
        assert 0 < max(laid) <= LARGEST


@pytest.mark.parametrize("name", SHAPES)
async def test_a_turn_lays_out_one_window_of_what_comes_at_once(name, laid):
    app = Text()
    async with app.run_test(size=(100, 40)) as pilot:
        await app.query_one(Parts).show(SHAPES[name])
        await pilot.pause()
        assert 0 < max(laid) <= WINDOW * LARGEST < len(SHAPES[name])
        assert len(app.query("*")) < 400        # each of them makes every frame cost more


async def test_a_conversation_is_opened_at_its_end(run, server, laid):
    """Of many long replies few are there: the others cost nothing until they are asked for."""
    async def steps(d):
        for i in range(20):
            d.chat.current.ask(f"question {i}")
            d.chat.current.messages.append(Message("assistant", numbered(300)))
        await d.chat.show(d.chat.current)
        await d.pilot.pause()
        assert "Line 299" in d.screen and len(d.app.query("Reply")) <= 3
        assert "messages earlier: Enter" in d.chat.query(More).first().render().plain
        assert max(laid) <= 3 * WINDOW * LARGEST
        for _ in range(3):
            await d.press("pageup")
        await d.chat.show(d.chat.current)       # the end is followed again
        await d.pilot.pause()
        assert "Line 299" in d.screen
        assert all(parts.widgets <= WINDOW for parts in d.chat.query(Parts))
        for _ in range(3):                      # and they go again as more comes
            server.say(numbered(300))
            await d.ask("more")
            assert len(d.app.query("Reply")) <= 5
    await run(steps)
