# python -m pytest tests/tui/test_chat_engine.py
"""The chat of the whole console against a real engine of two ranks, which wants a key."""

import httpx
import pytest

from chat_driver import Driver
from serving import Serve, bare
from tui.chat.composer import Composer
from tui.chat.conversation import Settings

pytestmark = [pytest.mark.anyio, pytest.mark.mpi]
KEY = "a key"
GREEDY = Settings(temperature=0.0, max_tokens=24)
ENDLESS = "go " * 50        # the model's greedy reply to it finds no end


@pytest.fixture(scope="module")
def engine():
    with Serve(2, "--context", "2048", "--api-key", KEY, launcher=bare) as found:
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
        d.chat.query_one(Composer).put("too long " * 3000)
        await d.ask("")
        error = d.chat.current.messages[-1].figures["error"]
        assert "2048" in error.replace(",", ""), error
        assert "✗ " in d.screen
    await chat(steps)


async def test_a_reply_that_is_stopped_frees_its_request(chat):
    async def steps(d):
        d.chat.current.settings = Settings(temperature=0.0, max_tokens=1500)
        d.chat.query_one(Composer).put(ENDLESS)
        await d.say("")
        await d.until(lambda: d.app.state.get("requests"), "the request")
        await d.until(lambda: not d.chat.current.messages[-1].empty, "its first words")
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


async def test_a_wrong_key_is_told(chat):
    async def steps(d):
        await d.ask("Hello")
        assert "✗ the API key is missing or wrong" in d.flat
        assert "(--api-key KEY, or SPARKGRID_API_KEY in the environment)" in d.flat
    await chat(steps, "another")
