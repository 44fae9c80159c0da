# python -m pytest tests/tui/test_mouse.py
"""The mouse at the two usual sizes of a terminal: what is clicked, and what the wheel scrolls."""

import re
from types import SimpleNamespace

import pytest
from textual.events import MouseScrollDown, MouseScrollUp
from textual.geometry import Offset

from chat_driver import Driver
from tui import link
from tui.chat.composer import Composer
from tui.chat.conversation import Conversation
from tui.chat.message import Message
from tui.chat.store import Store

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)]


@pytest.fixture
def at(console, server, size, screen_text, until):
    """await at(steps): the console at a size, and `await steps(Mouse)` in it."""
    async def run(steps):
        async with console(server, size) as (app, pilot):
            await until(lambda: app.state, "the first tree")
            await pilot.pause()
            await steps(Mouse(app, pilot, server, screen_text, until))
    return run


class Mouse(Driver):
    """Finds what it clicks by the words on the screen."""

    def where(self, words, nth=0):
        """The place of the words' first character."""
        found = [Offset(line.index(words), y)
                 for y, line in enumerate(self.screen.split("\n")) if words in line]
        assert len(found) > nth, f"{words!r} is not on the screen:\n{self.screen}"
        return found[nth]

    async def click(self, words, nth=0):
        await self.pilot.click(offset=self.where(words, nth))
        await self.pilot.pause()

    async def wheel(self, place, turns):
        """Turn the wheel: down, or up where turns is below 0."""
        kind = MouseScrollDown if turns > 0 else MouseScrollUp
        await self.pilot._post_mouse_events([kind] * abs(turns), offset=place)
        await self.pilot.pause()


async def test_the_dashboard(at, size, server):
    async def steps(m):
        views = m.app.query_one("#views")
        await m.click("F3 Chat")
        assert views.current == "chat" and m.app.focused in m.app.query("#chat *")
        await m.click("F2 Dashboard")
        assert views.current == "dashboard" and m.app.focused in m.app.query("#dashboard *")
        if size[0] < 112:
            for page, words in (("Ranks", "rank 0"), ("Pool", "conv."), ("Log", "refusal"),
                                ("Engine", "refused"), ("Requests", "prefill")):
                await m.click(page)
                await m.shows(words)
        await m.click("» prefill")
        assert m.app.focused.selected == "41"
        await m.click("x End request")
        await m.shows("x again ends request 41")
        await m.click("▶ decode")       # another row: the first press does not count for it
        await m.click("x End request")
        await m.shows("x again ends request 40")
        assert server.cancelled == []
        await m.click("x again ends request 40")
        await m.until(lambda: server.cancelled == [40], "its end")
        await m.until(lambda: "▶ decode" not in m.screen, "the row's end")
    await at(steps)


async def test_what_opens_is_closed(at, size):
    async def steps(m):
        await m.click("F1 Help")
        await m.shows("Everywhere")
        before = m.screen
        await m.wheel(m.where("Everywhere"), 3)
        assert m.screen != before
        await m.pilot.click(offset=(1, size[1] // 2))      # beside it
        assert len(m.app.screen_stack) == 1
        await m.click("F1 Help")
        await m.click("Esc closes")
        assert len(m.app.screen_stack) == 1
    await at(steps)


@pytest.mark.parametrize("words, left, ends", [
    ("Leave it running", True, True), ("Stop it", False, True), ("Stay", False, False)])
async def test_the_question_before_it_ends(console, server, size, screen_text, until, words, left,
                                           ends):
    engine = SimpleNamespace(left=False, code=None)
    async with console(server, size, engine=engine) as (app, pilot):
        m = Mouse(app, pilot, server, screen_text, until)
        await until(lambda: app.up and app.state, "the first tree")
        await pilot.pause()
        await m.click("^q Quit")
        await m.shows("3 requests would")
        await pilot.click(offset=m.where(words))
        await until(lambda: app.is_running != ends and len(app.screen_stack) == 1, "its answer")
        assert engine.left == left


async def test_a_click_ends_the_countdown(at, size, server, monkeypatch):
    monkeypatch.setattr(link, "BACKOFF", (60.0,))

    async def steps(m):
        server.mode = "dead"
        await m.shows("next try in")
        server.mode = "ok"
        await m.click("next try in")
        await m.until(lambda: m.app.up, "the engine")
    await at(steps)


async def test_the_chat(at, size):
    store = Store()
    for i, title in enumerate(("first", "second")):
        lines = "\n\n".join(f"{title} line {i}" for i in range(40))
        store.save(Conversation(title, title, changed=float(i), messages=[
            Message("user", "Why?"),
            Message("assistant", lines, "Let me think.", figures={"reason": "stop"})]))

    async def steps(m):
        await m.click("F3 Chat")
        await m.shows("second line 39")
        if size[0] < 110:
            assert "Conversations" not in m.screen
            await m.click("^t List")
        await m.click("  first")
        await m.shows("first line 39")
        assert m.chat.current.id == "first"
        assert ("Conversations" in m.screen) == (size[0] >= 110)
        middle = (size[0] - 20, size[1] // 2)
        await m.wheel(middle, -3)
        assert "first line 39" not in m.screen
        await m.wheel(middle, -40)
        await m.shows("Why?")
        await m.click("▶ Reasoning")
        await m.shows("Let me think.")
        await m.click("▼ Reasoning")
        assert "Let me think." not in m.screen
        await m.wheel(middle, 40)
        await m.shows("first line 39")
        await m.click("Enter sends")
        await m.press("h", "i")
        assert m.chat.query_one(Composer).text == "hi"
    await at(steps)


async def test_the_wheel_leaves_the_end_of_a_growing_reply(at, size, server):
    go_on = server.say("\n\n".join(f"line-{i} " for i in range(60)), hold=50)

    async def steps(m):
        middle = (size[0] - 20, size[1] // 2)
        await m.click("F3 Chat")
        await m.say("x")
        await m.shows("line-49")
        await m.wheel(middle, -3)
        before = re.findall(r"line-\d+", m.screen)
        go_on.set()
        await m.idle()
        assert re.findall(r"line-\d+", m.screen) == before != []
        await m.wheel(middle, 40)
        await m.shows("line-59")
    await at(steps)


async def test_what_shows_a_key_is_clicked(at, size, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def steps(m):
        composer = m.chat.query_one(Composer)
        await m.click("F3 Chat")
        server.say("one two", reasoning="Let me think.", hold=3)
        await m.say("Why?")
        await m.click("esc stops")
        await m.shows("stopped by you")
        await m.click("F8 reasoning")
        await m.shows("Let me think.")
        await m.click("^J new line")
        await m.click("^J new line")
        assert composer.text == "\n\n" and m.app.focused in composer.query("*")
        composer.put("")
        await m.click("^G edit last")
        assert composer.text == "Why?"
        await m.click("Esc leaves it as it was")
        assert composer.text == ""
        server.mode = "500"
        await m.click("^r Retry")
        await m.shows("rank 1 is lost")
        server.mode = "ok"
        server.say("Because.")
        await m.click("ctrl+r retries")
        await m.shows("Because.")
    await at(steps)


async def test_dialogs_are_answered_and_left(at, size, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a\n")

    async def steps(m):
        await m.click("F3 Chat")
        await m.ask("Why?")
        await m.click("^S save")
        await m.shows("Save this conversation")
        await m.click("Leave it (Esc)")
        assert len(m.app.screen_stack) == 1 and not (tmp_path / "Why.md").exists()
        await m.click("^S save")
        await m.click("Do it (Enter)")
        await m.until((tmp_path / "Why.md").exists, "the file")
        await m.click("^S save")
        await m.click("Do it (Enter)")
        await m.shows("✗ Why.md is there already")
        await m.click("Leave it (Esc)")
        await m.click("^F file")
        await m.shows("Attach a text file")
        await m.press(*"notes.txt")
        await m.click("Do it (Enter)")
        await m.shows("+ notes.txt")
        if size[0] < 110:
            await m.click("^t List")
        await m.click("r rename")
        await m.click("Leave it (Esc)")
        await m.click("d delete")
        await m.shows("Delete “Why?” and its file?")
        await m.click("No (n, Esc)")
        assert m.chat.current.messages
        await m.click("d delete")
        await m.press("enter")          # what the keyboard is on is the harmless answer
        assert m.chat.current.messages
        await m.click("d delete")
        await m.click("Yes (y)")
        await m.shows("No messages yet.")
    await at(steps)
