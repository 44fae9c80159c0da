# python -m pytest tests/tui/test_chat_kept.py
"""The chat's conversations, its message and settings, by its keys."""

import json
import threading

import pytest
from textual import events
from textual.widgets import Input, TextArea

from chat_driver import asked, runner
from tui.chat import replies
from tui.chat.composer import Composer
from tui.chat.reply import Reply
from tui.chat.settings import SettingsForm
from tui.chat.sidebar import Sidebar
from tui.chat.store import Store, folder

pytestmark = pytest.mark.anyio
SIZES = [(80, 24), (120, 40), (240, 60)]


@pytest.fixture
def run(server, screen_text, until):
    return runner(server, screen_text, until)


# ---- conversations -----------------------------------------------------------------------------

async def test_a_conversation_outlives_the_console(run, server):
    server.say("the answer", reasoning="thoughts")

    async def first(d):
        await d.ask("the question")

    async def second(d):
        await d.shows("the answer")
        assert "the question" in d.screen and "▶ Reasoning · 8" in d.screen
        assert "tokens/s" in d.screen
    await run(first)
    await run(second)


async def test_leaving_in_the_middle_keeps_what_came(run, server):
    server.say("word " * 20, hold=5)

    async def first(d):
        await d.say("go")
        await d.shows("word word")

    async def second(d):
        await d.shows("word word")
        assert "stopped by you" in d.screen
    await run(first)
    await run(second)


async def test_a_killed_console_leaves_what_came(run, server, monkeypatch):
    """The file is taken in the middle of a reply, and found by the next console."""
    monkeypatch.setattr(replies, "KEEP", 0.0)
    third, fourth = server.say("one two three four", hold=2), threading.Event()
    server.script.insert(-4, fourth)
    path, found = folder(), []

    def kept():
        (file,) = path.glob("*.json")
        return json.loads(file.read_text())["messages"][1:]

    async def first(d):
        await d.say("go")
        await d.until(kept, "what came")
        assert kept() == [{"role": "assistant", "content": "one two ",
                           "figures": {"reason": "interrupted"}}]
        (file,) = path.glob("*.json")
        found.append((file, file.read_bytes()))
        third.set()
        await d.until(lambda: kept()[0]["content"] == "one two three ", "more")
        assert "interrupted" not in d.screen and "streaming" in d.screen
        fourth.set()
        await d.idle()
        assert kept()[0]["figures"]["reason"] == "stop"

    async def second(d):
        await d.shows("one two")
        assert "✗ its end was not kept" in d.flat and "interrupted" in d.flat
        server.say("all of it")
        await d.press("ctrl+r")
        await d.shows("all of it")
        await d.idle()
        assert "✗" not in d.screen and "one two" not in d.screen
    await run(first)
    for file, data in found:
        file.write_bytes(data)
    await run(second)
    assert asked(server) == [{"role": "user", "content": "go"}]


async def test_a_conversation_that_is_deleted_stays_so(run, server, tmp_path):
    """A write of its growing reply that was begun before, and comes after."""
    server.say("one two three", hold=2)

    async def steps(d):
        await d.say("go")
        await d.shows("one two")
        conversation = d.chat.current
        await d.press("ctrl+t", "d", "y")
        await d.shows("No messages yet.")
        d.chat.store.save_part(conversation)
    await run(steps)
    assert Store().entries() == ([], [])


async def test_several_conversations_at_once(run, server):
    async def steps(d):
        go_on = server.say("slow " * 80, hold=5)
        await d.say("first")
        await d.shows("slow")
        await d.press("ctrl+n")
        await d.pilot.pause()
        server.say("quick")
        await d.say("second")
        await d.shows("quick")
        assert "… first" in d.screen and "● second" in d.screen
        await d.press("ctrl+t", "down", "enter")
        await d.shows("slow slow")
        assert "quick" not in d.screen
        go_on.set()
        await d.idle()
        assert d.chat.current.messages[-1].content == "slow " * 80
        assert "● first" in d.screen
    await run(steps, (120, 40))
    assert len(Store().entries()[0]) == 2


async def test_the_list_at_80_columns_renames_and_deletes(run, server):
    server.say("ok")

    async def steps(d):
        await d.ask("alpha")
        await d.press("ctrl+t")
        await d.shows("● alpha")
        await d.press("r")
        await d.form("beta [x]")
        await d.shows("● beta [x]")
        await d.press("d")
        await d.shows("Delete “beta [x]”")
        await d.press("n")
        await d.pilot.pause()
        assert len(Store().entries()[0]) == 1
        await d.press("d", "y")
        await d.shows("No messages yet.")
        assert Store().entries() == ([], [])
        await d.press("ctrl+t")
        await d.pilot.pause()
        assert not d.app.query_one(Sidebar).display
    await run(steps)


async def test_deleting_a_conversation_stops_its_reply(run, server):
    server.say("word " * 20, hold=5)

    async def steps(d):
        await d.say("go")
        await d.shows("word word")
        await d.press("ctrl+t", "d", "y")
        await d.until(lambda: server.left == 1, "the connection's end")
        assert Store().entries() == ([], [])
    await run(steps)
    assert Store().entries() == ([], [])


async def test_damaged_files_are_named_and_left(run, server):
    folder().mkdir(parents=True)
    (folder() / "bad.json").write_bytes(b"{\x00")
    server.say("ok")

    async def steps(d):
        await d.until(lambda: d.app.notes, "a note")
        assert "bad.json: not JSON" in d.app.notes[0]
        await d.ask("hi")
    await run(steps)
    assert (folder() / "bad.json").read_bytes() == b"{\x00"
    assert len(list(folder().iterdir())) == 2


async def test_save_and_load(run, server, tmp_path):
    server.say("the answer")

    async def steps(d):
        await d.ask("the question")
        for name in ("talk.json", "talk.md"):
            await d.press("ctrl+s")
            await d.form(str(tmp_path / name))
        assert "the answer" in (tmp_path / "talk.md").read_text()
        assert json.loads((tmp_path / "talk.json").read_text())["title"] == "the question"
        await d.press("ctrl+s")
        await d.form(str(tmp_path / "talk.md"))
        assert "is there already" in d.fault
        await d.press("escape", "ctrl+n", "ctrl+t", "l")
        await d.form(str(tmp_path / "talk.md"))
        assert "✗ not JSON" in d.fault
        d.app.screen.query_one(Input).value = str(tmp_path / "talk.json")
        await d.press("enter")
        await d.until(lambda: len(Store().entries()[0]) == 2, "the copy")
        await d.shows("the answer")
    await run(steps)


async def test_a_full_disk_is_told(run, server, monkeypatch):
    server.say("the answer")

    def full(self, conversation):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(Store, "save", full)

    async def steps(d):
        await d.ask("hi")
        assert "No space left on device" in d.app.notes[0] and "the answer" in d.screen
    await run(steps)


# ---- the message and its settings --------------------------------------------------------------

async def test_a_long_paste_is_an_attachment(run, server):
    server.say("ok")
    long = "line of text\n" * 100_000

    async def steps(d):
        await d.write("see ")
        d.app.post_message(events.Paste("short\r\npaste"))
        d.app.post_message(events.Paste(long))
        await d.shows("+ paste 1: 1,300,002 characters")
        assert d.chat.query_one(Composer).text == "see short\npaste"
        await d.press("enter")
        await d.idle()
        assert "+ paste 1" in d.screen
        await d.press("up")
        await d.pilot.pause()
        assert len(d.chat.query_one(Composer).files) == 1
    await run(steps)
    assert asked(server)[0]["content"] == "see short\npaste\n\n" + long


async def test_an_attachment_can_be_taken_away(run, server):
    async def steps(d):
        d.chat.query_one(Composer).focus()
        d.app.post_message(events.Paste("x" * 5000))
        await d.shows("+ paste 1")
        await d.press("backspace")
        await d.pilot.pause()
        assert "+ paste" not in d.screen and d.chat.query_one(Composer).empty
        await d.press("enter")
        await d.pilot.pause()
        assert server.asked == []
    await run(steps)


async def test_a_file_is_attached(run, server, tmp_path):
    (tmp_path / "notes.txt").write_text("some ``` text\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    server.say("ok")

    async def steps(d):
        await d.press("ctrl+f")
        await d.form(str(tmp_path / "none"))
        assert "is not there" in d.fault
        await d.form(str(tmp_path / "image.png"))
        assert "no UTF-8 text" in d.fault
        await d.form(str(tmp_path / "notes.txt"))
        await d.shows("+ notes.txt")
        await d.ask("sum up")
    await run(steps)
    assert asked(server)[0]["content"] == (
        "sum up\n\nFile notes.txt:\n\n````\nsome ``` text\n````\n")


@pytest.mark.parametrize("size", SIZES)
async def test_settings(run, server, size):
    server.say("ok")

    async def steps(d):
        await d.press("ctrl+o")
        await d.shows("Settings of this conversation")
        form = d.app.screen
        assert isinstance(form, SettingsForm)
        for name, value in (("temperature", "3"), ("top_p", "0.9"), ("seed", "7"),
                            ("max_tokens", "64")):
            form.query_one(f"#{name}", Input).value = value
        form.query_one("#effort").value = "low"
        form.query_one("#system", TextArea).text = "Be brief."
        await d.press("ctrl+s")
        await d.shows("✗ temperature is 3, it must be a number from 0 to 2")
        form.query_one("#temperature", Input).value = "0.5"
        form.query_one("#tools", TextArea).text = "[{]"
        await d.press("ctrl+s")
        await d.shows("✗ tools are not JSON")
        form.query_one("#tools", TextArea).text = '[{"function": {"name": "f"}}]'
        await d.press("ctrl+s")
        await d.until(lambda: d.app.screen is not form, "the form's end")
        await d.ask("hi")
        await d.press("ctrl+n")         # the next one begins with the same
        await d.ask("hi")
    await run(steps, size)
    for body in server.asked:
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["top_p"], body["seed"], body["max_tokens"]) == (
            0.5, 0.9, 7, 64)
        assert body["reasoning_effort"] == "low" and body["tools"] == [{"function": {"name": "f"}}]


async def test_copy_takes_the_whole_reply(run, server):
    text = "paragraph\n\n" * 4000
    server.say(text)

    async def steps(d):
        await d.ask("hi")
        d.app.query_one(Reply).focus()
        await d.press("c")
        assert d.app.clipboard == text
    await run(steps)
