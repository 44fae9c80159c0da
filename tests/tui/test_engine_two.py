# python -m pytest tests/tui/test_engine_two.py
"""The whole console against a real engine of two ranks, which wants a key: what it shows of them,
what it asks of them, and what it says without the key."""

import json
import subprocess
import sys

import httpx
import pytest

from chat_driver import Driver
from serving import Serve, bare
from tui.chat.composer import Composer
from tui.chat.conversation import Settings
from tui.state import faults

pytestmark = [pytest.mark.anyio, pytest.mark.mpi]
KEY = "a key"
GREEDY = Settings(temperature=0.0, max_tokens=24)
ENDLESS = "go " * 50        # the model's greedy reply to it finds no end
LONG = Settings(temperature=0.0, max_tokens=7000)
WRONG = "the API key is missing or wrong"
REMEDY = "(--api-key KEY, or SPARKGRID_API_KEY in the environment)"


@pytest.fixture(scope="module")
def engine():
    with Serve(2, "--context", "8192", "--chunk", "16", "--api-key", KEY, launcher=bare) as found:
        yield found


@pytest.fixture
def chat(engine, console, screen_text, until):
    """await chat(steps, key): the console with its chat shown, and `await steps(Driver)` in it."""
    async def run(steps, key=KEY):
        async with console(engine, (120, 40), key) as (app, pilot):
            await pilot.press("f3")
            await steps(Driver(app, pilot, engine, screen_text, until))
    return run


def plain(engine, body):
    """The same request by plain HTTP, not streamed: the message, and its choice's reason."""
    found = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60,
                       headers={"Authorization": f"Bearer {KEY}"})
    (choice,) = found.json()["choices"]
    return choice["message"], choice["finish_reason"]


async def endless(d):
    """Ask for a reply of many seconds; it has begun, and the telemetry has it."""
    d.chat.current.settings = LONG
    d.chat.query_one(Composer).put(ENDLESS)
    await d.say("")
    await d.until(lambda: d.app.state.get("requests"), "the request")
    await d.until(lambda: not d.chat.current.messages[-1].empty, "its first words")


def once(engine, key):
    """`--once` as a process."""
    return subprocess.run([sys.executable, "-m", "tui", "--once", "--connect", engine.url,
                           "--api-key", key], capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL)


async def test_the_ranks_and_a_request_that_is_cancelled_from_the_table(engine, chat, own_state):
    async def steps(d):
        await endless(d)
        await d.press("f2")
        for words in ("● live", "mini  2 ranks", "─rank 0 ", "─rank 1 ", "▶ decode"):
            await d.shows(words)
        tree, notes = d.app.state, d.app.history.notes
        assert faults(tree) == [] and [n["text"] for n in notes] == ["the engine answers"]
        assert len({rank["pid"] for rank in tree["ranks"]}) == 2
        (request,) = tree["requests"]
        assert request["limit"] == LONG.max_tokens and f"{request['id']:<6}▶ decode" in d.screen
        d.app.query_one("Requests").focus()
        await d.press("x")
        await d.shows(f"x again ends request {request['id']}")
        assert d.app.state["requests"]
        await d.press("x")
        await d.until(lambda: not d.app.state["requests"], "the request's end")
        await d.until(lambda: "▶ decode" not in d.screen, "the row's end")
        await d.until(lambda: f"request {request['id']} was cancelled" in [
            n["text"] for n in notes], "the note")
        await d.press("f3")
        await d.idle()
        reply = d.chat.current.messages[-1]
        assert reply.content and reply.figures["reason"] == "failed"
        assert "✗ this request was ended at the engine, by its operator ctrl+r retries" in d.flat
        (file,) = own_state.rglob("conversations/*.json")
        assert json.loads(file.read_text())["messages"][-1]["content"] == reply.content
    await chat(steps)


async def test_a_request_is_cancelled_in_the_middle_of_its_prompt(chat):
    """Of 6,000 tokens, sixteen a round: seconds of work, of which most is never done."""
    async def steps(d):
        computed = d.app.state["tokens"]["prefill"]
        d.chat.query_one(Composer).put("word " * 6000)
        await d.say("")
        await d.press("f2")
        await d.shows("» prefill")
        d.app.query_one("Requests").focus()
        await d.press("x", "x")
        await d.until(lambda: not d.app.state["requests"], "the request's end")
        await d.press("f3")
        await d.idle()
        reply = d.chat.current.messages[-1]
        assert reply.empty and reply.figures["reason"] == "failed"
        assert "✗ this request was ended at the engine, by its operator" in d.flat
        assert 0 < d.app.state["tokens"]["prefill"] - computed < 5000
        await d.until(lambda: d.app.state["pool"]["tokens_leased"] == 0, "its pages")
    await chat(steps)


def test_one_snapshot(engine):
    found = once(engine, KEY)
    assert found.returncode == 0 and ": mini, 2 ranks, up " in found.stdout, found
    assert "\nrank 0  " in found.stdout and "\nrank 1  " in found.stdout


async def test_replies_are_the_engines(engine, chat):
    async def steps(d):
        d.chat.current.settings = GREEDY
        body = {**GREEDY.body(), "messages": [{"role": "user", "content": "What is 2 plus 2?"}]}
        await d.ask("What is 2 plus 2?")
        reply = d.chat.current.messages[-1]
        message, reason = plain(engine, body)
        assert reply.content == message["content"] and reply.content in d.screen
        assert reply.figures["reason"] == reason
        assert reply.figures["tokens"] > 1 and reply.figures["cached"] == 0
        for words in ("tokens/s", "first token", "in all", "0 of them cached"):
            assert words in d.flat, words
        body = d.chat.current.body()
        body["messages"].append({"role": "user", "content": "And 3 plus 4?"})
        await d.ask("And 3 plus 4?")
        reply = d.chat.current.messages[-1]
        assert reply.figures["cached"] > 0      # what the first left is there still
        assert f"{reply.figures['cached']} of them cached" in d.flat
        message, _ = plain(engine, body)
        assert reply.content == message["content"]
        d.chat.query_one(Composer).put("too long " * 6000)
        await d.ask("")
        error = d.chat.current.messages[-1].figures["error"]
        assert "8192" in error.replace(",", ""), error
        assert "✗ " in d.screen
    await chat(steps)


async def test_a_reply_that_is_stopped_frees_its_request(chat):
    async def steps(d):
        await endless(d)
        await d.press("escape")
        await d.idle()
        assert d.chat.current.messages[-1].figures["reason"] == "stopped"
        assert "stopped by you" in d.screen
        await d.until(lambda: not d.app.state["requests"], "the request's end")
        assert "length" not in d.app.state["ended"]     # it did not go on to its own
        d.chat.current.settings = GREEDY
        await d.press("ctrl+r")
        await d.idle()
        assert len(d.chat.current.messages) == 2
        assert d.chat.current.messages[-1].figures["reason"] in ("stop", "length")
        assert "stopped by you" not in d.screen
    await chat(steps)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
async def test_a_wrong_key_is_told(engine, console, screen_text, until, size):
    async with console(engine, size, "another") as (app, pilot):
        d = Driver(app, pilot, engine, screen_text, until)
        await d.until(lambda: f"✗ {WRONG}" in d.flat and REMEDY in d.flat, "the reason")
        assert "next try in" in d.flat or "trying now" in d.flat
        assert d.app.up is False and "✗ lost" in d.screen
        await d.press("f3")
        await d.ask("Hello")
        assert f"✗ {WRONG}" in d.flat.partition("Reply ✗")[2] and REMEDY in d.flat
        await d.shows("✗ lost")


def test_a_wrong_key_without_a_screen(engine):
    found = once(engine, "another")
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.startswith(f"tui: {WRONG}") and found.stderr.endswith(f"{REMEDY}\n")
