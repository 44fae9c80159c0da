# python -m pytest tests/tui/test_chat.py
"""Questions and replies in the chat by its keys: what is sent, what is shown, what goes wrong."""

import pytest
from textual.widgets import Collapsible

from chat_driver import asked, runner
from tui.chat.composer import Composer

pytestmark = pytest.mark.anyio
SIZES = [(80, 24), (120, 40), (240, 60)]


@pytest.fixture
def run(server, screen_text, until):
    return runner(server, screen_text, until)


# ---- a question and its reply ------------------------------------------------------------------

@pytest.mark.parametrize("size", SIZES)
async def test_every_size(run, server, size):
    server.say("It is **blue**.\n\n```python\nx = 1\n```\n", reasoning="Light scatters.")

    async def steps(d):
        assert "No messages yet." in d.screen and "Enter sends" in d.screen
        await d.ask("Why is the sky blue?")
        shown = d.screen
        for text in ("You", "Why is the sky blue?", "▶ Reasoning · 15 characters", "It is blue.",
                     "x = 1", "tokens/s", "first token", "prompt 12 tokens", "3 of them cached"):
            assert text in d.flat, (text, shown)
        assert "**" not in shown and "Light scatters" not in shown
        footer = shown.splitlines()[-1]
        for key in ("^n New", "^r Retry", "^o Settings", "^t List"):
            assert key in footer
        assert ("Conversations" in shown) == (size[0] >= 110)
        assert all(len(line) <= size[0] for line in shown.splitlines())
    await run(steps, size)
    assert asked(server) == [{"role": "user", "content": "Why is the sky blue?"}]


async def test_reasoning_unfolds_while_it_comes_and_after(run, server):
    go_on = server.say("Done.", reasoning="one two three", hold=3)
    server.gate.clear()

    async def steps(d):
        await d.say("hi")
        await d.shows("waiting for the first token")
        server.gate.set()
        await d.shows("Reasoning ·")
        assert "one" not in d.screen
        await d.press("f8")
        await d.shows("one two three")
        go_on.set()
        await d.idle()
        assert "one two three" in d.screen and "Done." in d.screen
        await d.press("f8")
        await d.pilot.pause()
        assert "one two" not in d.screen and d.app.query_one(Collapsible).collapsed
    await run(steps)


async def test_a_pause_hides_nothing_of_what_came(run, server):
    """Two words at once, then silence: the second does not wait for a third."""
    go_on = server.say("first second third", hold=2)

    async def steps(d):
        await d.say("hi")
        await d.shows("first second")
        assert d.chat.current.messages[-1].content == "first second "
        go_on.set()
        await d.idle()
        assert "first second third" in d.screen
    await run(steps)


async def test_the_next_question_carries_what_was_said(run, server):
    server.say("Yes.", reasoning="Hm.")

    async def steps(d):
        await d.ask("one")
        await d.ask("two\nlines")
    await run(steps)
    assert asked(server) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
        {"role": "user", "content": "two\nlines"}]


async def test_stop_keeps_what_was_said_and_closes_the_stream(run, server):
    server.say("word " * 500, hold=5)

    async def steps(d):
        await d.say("go")
        await d.shows("word word")
        assert "esc Stop" in d.screen
        await d.press("escape")
        await d.idle()
        await d.until(lambda: server.left == 1, "the connection's end")
        assert "stopped by you" in d.screen and "about" in d.screen
        assert "esc Stop" not in d.screen
        text = d.chat.current.messages[-1].content
        assert text.startswith("word word") and len(text) < 2000
        server.say("ok")
        await d.ask("more")
        assert asked(server)[1] == {"role": "assistant", "content": text}
    await run(steps)


async def test_a_second_message_waits_for_the_reply(run, server):
    server.say("slow " * 100, hold=5)

    async def steps(d):
        await d.say("one")
        await d.shows("slow")
        await d.say("two")
        await d.pilot.pause()
        assert len(server.asked) == 1 and "Esc stops it" in d.app.notes[-1]
        assert d.chat.query_one(Composer).text == "two"
        await d.press("escape")
        await d.idle()
    await run(steps)


async def test_retry_asks_the_same_again(run, server):
    async def steps(d):
        server.say("first answer")
        await d.ask("question")
        server.say("second answer")
        await d.press("ctrl+r")
        await d.idle()
        assert "second answer" in d.screen and "first answer" not in d.screen
    await run(steps)
    assert server.asked[0] == server.asked[1]


@pytest.mark.parametrize("key", ["ctrl+g", "up"])
async def test_edit_puts_the_last_question_back(run, server, key):
    server.say("answer")

    async def steps(d):
        await d.ask("old")
        await d.press(key)
        await d.pilot.pause()
        assert d.chat.query_one(Composer).text == "old" and "The last question again" in d.screen
        await d.press("escape")
        await d.pilot.pause()
        assert d.chat.query_one(Composer).text == "" and len(d.chat.current.messages) == 2
        await d.press(key)
        await d.pilot.pause()
        await d.ask("er")
        assert [m.text for m in d.chat.current.messages] == ["older", "answer"]
        assert "older" in d.screen
    await run(steps)
    assert asked(server) == [{"role": "user", "content": "older"}]


async def test_tool_calls_are_shown_and_answered(run, server):
    server.say("", calls=[("weather", '{"city": "Bern"}'), ("time", "{}")])

    async def steps(d):
        await d.ask("how is it?")
        for text in ("⚙ calls weather", '"city": "Bern"', "⚙ calls time", "Result of weather",
                     "waits for tool results"):
            assert text in d.screen, text
        await d.ask("sunny")
        assert "Result of time" in d.screen and len(server.asked) == 1
        server.say("It is sunny.")
        await d.ask("noon")
        assert "It is sunny." in d.screen and "Result of weather" in d.screen
        assert [m["role"] for m in asked(server)] == ["user", "assistant", "tool", "tool"]
        assert asked(server)[2:] == [
            {"role": "tool", "content": "sunny", "tool_call_id": "call_0"},
            {"role": "tool", "content": "noon", "tool_call_id": "call_1"}]
    await run(steps, (120, 40))


async def test_a_tool_call_may_be_left_unanswered(run, server):
    server.say("", calls=[("weather", "{}")])

    async def steps(d):
        await d.ask("how is it?")
        await d.press("escape")
        await d.pilot.pause()
        assert "Result of weather" not in d.screen
        server.say("Fine.")
        await d.ask("never mind")
        assert asked(server)[-1] == {"role": "user", "content": "never mind"}
    await run(steps)


# ---- what goes wrong ---------------------------------------------------------------------------

@pytest.mark.parametrize("mode, words", [
    ("401", "the API key is missing or wrong"), ("500", "rank 1 is lost"),
    ("json", "is not JSON"), ("cut", "broke"), ("html", "does not answer like an engine")])
async def test_a_failure_is_told_in_the_servers_words(run, server, mode, words):
    server.say("answer")
    server.mode = mode

    async def steps(d):
        await d.ask("question")
        await d.shows("✗ ")
        assert words in d.flat and "ctrl+r retries" in d.screen
        server.mode = "ok"
        await d.press("ctrl+r")
        await d.idle()
        assert "answer" in d.screen and "✗" not in d.screen
    await run(steps)


async def test_an_engine_that_is_gone(run, server):
    async def steps(d):
        server.stop()
        await d.ask("question")
        assert "no engine answers at" in d.screen and "ctrl+r retries" in d.screen
    await run(steps)


async def test_wrong_types_are_nothing(run, server):
    server.say("answer")
    server.mode = "types"

    async def steps(d):
        await d.ask("question")
        assert d.chat.current.messages[-1].content == "answer"
    await run(steps)


async def test_a_stream_that_stalls_can_be_stopped(run, server):
    server.say("answer")
    server.mode = "stall"

    async def steps(d):
        await d.say("question")
        await d.shows("waiting for the first token")
        await d.press("escape")
        await d.idle()
        assert "stopped by you" in d.screen
    await run(steps)


async def test_a_reply_without_an_end_has_failed(run, server):
    server.say("answer")
    server.script = server.script[:-3] + server.script[-1:]

    async def steps(d):
        await d.ask("question")
        assert "without saying why" in d.screen and "answer" in d.screen
    await run(steps)


async def test_a_terminal_obeys_nothing_of_a_reply(run, server):
    server.say("\x1b]0;title\x07 \x1b[2J [red]plain[/red] \x9b5n",
               reasoning="\x1b[31m", calls=[("\x1b[5m", '{"a": "\x1b[1m"}')])

    async def steps(d):
        await d.ask("[bold]hi")
        await d.press("f8")
        await d.pilot.pause()
        assert not set(d.screen) & set("\x1b\x07\x9b")
        assert "[bold]hi" in d.screen and "[red]plain[/red]" in d.screen and "␛" in d.screen
    await run(steps, (120, 40))


@pytest.mark.parametrize("text", ["what does [/b] do?", "[red]x[/red] [x", "[@click=app.quit]x[/]"])
async def test_brackets_in_a_title_are_brackets(run, server, text):
    """The first question's is the conversation's, a tool's name stands there as well."""
    async def steps(d):
        await d.ask(text)
        assert f"╭─ {text} ─" in d.screen and f"█ {text}" in d.screen
        server.say("", calls=[(text, "{}")])
        await d.ask("call it")
        assert f"╭─ Result of {text} (Esc: write as yourself) ─" in d.screen
    await run(steps, (100, 24))
