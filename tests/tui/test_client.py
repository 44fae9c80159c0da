# pytest tests/tui/test_client.py
"""The client and the link against a canned engine: one that works, and one that is slow, dead,
lying or behind a key."""

import ast
import asyncio
import json
import pathlib
import socket

import pytest

from canned_server import tree
from tui import answer
from tui import client as client_file
from tui import link
from tui.answer import ClientError
from tui.client import Client, address
from tui.messages import Link, Restarted, Telemetry

pytestmark = pytest.mark.anyio
ASK = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
async def client(server):
    found = Client(server.url)
    yield found
    await found.close()


async def refused(work):
    """The ClientError of a coroutine or an async iterator."""
    with pytest.raises(ClientError) as info:
        if hasattr(work, "__aiter__"):
            async for _ in work:
                pass
        else:
            await work
    return info.value


async def texts(client, body=ASK):
    return "".join([c["choices"][0]["delta"].get("content", "")
                    async for c in client.chat(body) if c["choices"]])


# ---- an engine that works ----------------------------------------------------------------------

async def test_telemetry_is_a_snapshot_and_then_patches(server, client):
    found = []
    async for kind, data in client.telemetry():
        found.append((kind, data))
        if len(found) == 1:
            server.change({"rounds": 1001})
            server.change({"rounds": 1002, "fault": "rank 1 is lost"})
        if len(found) == 3:
            break
    assert [kind for kind, _ in found] == ["snapshot", "patch", "patch"]
    assert found[0][1] == tree() and found[2][1] == {"rounds": 1002, "fault": "rank 1 is lost"}


async def test_a_reply(server, client):
    server.say("Grüße, 東京 \u2028 🚀.\n", reasoning="Let me see.", calls=[("add", '{"a": 1}')])
    chunks = [c async for c in client.chat(ASK)]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert "".join(d.get("content", "") for d in deltas) == "Grüße, 東京 \u2028 🚀.\n"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Let me see."
    assert [c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ())] == [
        "", '{"a": 1}']
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert server.asked == [{**ASK, "stream": True, "stream_options": {"include_usage": True}}]


async def test_events_cut_anywhere_are_the_same(server, client):
    server.say("ä b")
    whole = b"".join(s if isinstance(s, bytes)
                     else f"data: {json.dumps(s, ensure_ascii=False)}\r\n\r\n".encode()
                     for s in server.script)
    server.script = [bytes([b]) for b in b": comment\n\nid: 3\nevent: x\n" + whole]
    assert await texts(client) == "ä b"


async def test_leaving_a_reply_ends_it(server, client, until):
    server.say("word " * 100, pace=0.01)
    replies = client.chat(ASK)
    await anext(replies)
    await replies.aclose()
    await until(lambda: server.left == 1, "the end of the stream")


async def test_once_health_models_cancel(server, client):
    assert await client.once() == tree()
    assert await client.health() == (200, {"status": "ok"})
    server.health = 503, {"status": "late", "reason": "rank 1 has not answered for 4.0 s"}
    assert (await client.health())[0] == 503
    assert [m["id"] for m in await client.models()] == ["mini"]
    assert await client.cancel(40) is True and await client.cancel(40) is False
    assert server.cancelled == [40]


async def test_a_key(server):
    server.key = "secret"
    for key in (None, "", "wrong"):
        client = Client(server.url, key)
        error = await refused(client.once())
        assert error.status == 401 and "key is missing or wrong" in error.message
        assert "SPARKGRID_API_KEY" in error.message
        assert (await refused(client.chat(ASK))).status == 401
        await client.close()
    client = Client(server.url, "secret")
    assert await client.once() == tree() and await texts(client) == "Hello."
    await client.close()


@pytest.mark.parametrize("typed, url", [
    ("http://a:1/", "http://a:1"), ("127.0.0.1:8114", "http://127.0.0.1:8114"),
    (" https://h/x ", "https://h/x"), ("[::1]:80", "http://[::1]:80"), ("spark0", "http://spark0")])
async def test_addresses(typed, url):
    assert address(typed) == url


@pytest.mark.parametrize("typed", ["", "ftp://a", "http://", "http://a:port", "http://a:99999999",
                                   "http://\x00"])
async def test_what_is_no_address(typed):
    with pytest.raises(ClientError):
        Client(typed)


async def test_a_key_that_no_header_can_carry():
    for key in ("ключ", "a\nb"):
        with pytest.raises(ClientError, match="API key"):
            Client("h", key)


async def test_a_proxy_of_the_environment_is_not_used(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    client = Client(server.url)
    assert await client.once() == tree()
    await client.close()


# ---- one that does not -------------------------------------------------------------------------

async def test_nobody_listens():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        client = Client(f"127.0.0.1:{port}")
        for work in (client.once(), client.chat(ASK), client.health(), client.cancel(1)):
            error = await refused(work)
            assert error.status is None
            assert error.message == f"no engine answers at {client.url}: Connection refused"
    await client.close()


async def test_a_name_that_is_none():
    client = Client("no-such-machine.invalid")
    assert "no engine answers at http://no-such-machine.invalid" in (
        await refused(client.once())).message
    await client.close()


@pytest.mark.parametrize("mode, status, words", [
    ("500", 500, "rank 1 is lost; start the engine again"),
    ("html", 200, "does not answer like an engine (Content-Type text/html"),
    ("json", None, "is not JSON")])
async def test_lies(server, client, mode, status, words):
    server.mode = mode
    for work in (client.once(), client.chat(ASK)):
        error = await refused(work)
        assert error.status == status and words in error.message


async def test_a_stall_is_found(server, client, monkeypatch):
    monkeypatch.setattr(client_file, "SILENCE", 0.3)
    server.mode = "stall"
    assert "says nothing for 0.3 s" in (await refused(client.telemetry())).message


async def test_once_does_not_wait_for_ever(server, client, monkeypatch):
    monkeypatch.setattr(client_file, "CONNECT", 0.1)
    server.mode = "stall"
    assert "sent no snapshot in 0.2 s" in (await refused(client.once())).message


async def test_a_reply_that_breaks_off(server, client):
    server.script = server.script[:2]
    assert "the reply broke off" in (await refused(client.chat(ASK))).message
    server.mode = "cut"
    assert "broke" in (await refused(client.chat(ASK))).message
    server.mode = "ok"
    server.script = [server.script[0], {"error": {"message": "rank 3 is lost"}}]
    assert (await refused(client.chat(ASK))).message == "rank 3 is lost"


@pytest.mark.parametrize("data", [b"data: [1]\n\n", b"data: 7\n\n", b"data: \xff\xfe\n\n",
                                  b"data: " + b"[" * 100_000 + b"\n\n"])
async def test_events_that_are_no_objects(server, client, data):
    server.script = [data]
    assert "the reply is not" in (await refused(client.chat(ASK))).message


@pytest.mark.parametrize("data", [b"data: x" * 200, b"data: x\n" * 200], ids=["line", "event"])
async def test_events_without_an_end(server, client, monkeypatch, data):
    monkeypatch.setattr(answer, "MAX_EVENT", 1000)
    server.script = [data] * 100
    assert "of more than 1,000 bytes" in (await refused(client.chat(ASK))).message


@pytest.mark.parametrize("head", [
    b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Content-Length: 99\r\n\r\ndata:", b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 302 X\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n"])
async def test_servers_that_hardly_speak_http(head):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        await writer.drain()
        writer.close()
    rough = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Client(f"127.0.0.1:{rough.sockets[0].getsockname()[1]}")
    for work in (client.once(), client.cancel(1)):
        if not (head.endswith(b"data:") and work.__name__ == "cancel"):
            assert (await refused(work)).message
        else:
            assert (await refused(work)).status is None
    await client.close()
    rough.close()


# ---- the link ----------------------------------------------------------------------------------

class Linked:
    """link.run in a task; posted: its messages."""

    def __init__(self, client, **more):
        self.posted, self.hurry = [], asyncio.Event()
        self.task = asyncio.ensure_future(
            link.run(client, self.posted.append, hurry=self.hurry, **more))

    def of(self, kind):
        return [m for m in self.posted if isinstance(m, kind)]

    async def end(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.task


async def test_the_link_merges(server, client, until):
    events = []
    linked = Linked(client, record=lambda *event: events.append(event))
    await until(lambda: linked.of(Telemetry), "a tree")
    assert linked.posted[0] == Link(True)
    server.change({"tokens": {"decode": 6000}})
    server.change({"rounds": 2000})
    await until(lambda: linked.of(Telemetry)[-1].state["rounds"] == 2000, "the patch")
    assert linked.of(Telemetry)[-1].state == {**tree(), "rounds": 2000,
                                              "tokens": {**tree()["tokens"], "decode": 6000}}
    assert [kind for kind, _ in events] == ["snapshot", "patch", "patch"]
    await linked.end()


async def test_a_flood_of_patches_posts_few_trees(server, client, until):
    linked = Linked(client)
    await until(lambda: linked.of(Telemetry), "a tree")
    for i in range(500):
        server.change({"rounds": i})
    await until(lambda: linked.of(Telemetry)[-1].state["rounds"] == 499, "the last patch")
    seconds = [m.seconds for m in linked.of(Telemetry)]
    assert all(b - a > 0.9 * link.GENTLE for a, b in zip(seconds, seconds[1:]))
    await linked.end()


async def test_the_link_waits_longer_and_longer_and_comes_back(server, client, until, monkeypatch):
    monkeypatch.setattr(link, "BACKOFF", (0.01, 0.02, 0.04, 0.08))
    linked = Linked(client)
    await until(lambda: linked.of(Telemetry), "a tree")
    server.stop()
    await until(lambda: len([m for m in linked.of(Link) if m.retry_in]) >= 5, "tries")
    downs = [m for m in linked.of(Link) if m.retry_in]
    assert [m.retry_in for m in downs[:5]] == [0.01, 0.02, 0.04, 0.08, 0.08]
    assert "no engine answers" in downs[1].reason
    server.tree = {**tree(), "started": 5.0}
    server.start()
    await until(lambda: linked.of(Restarted), "the engine started again")
    await until(lambda: linked.of(Telemetry)[-1].state["started"] == 5.0, "its tree")
    assert linked.of(Link)[-1].up
    server.stop()
    await until(lambda: linked.of(Link)[-1].retry_in, "its end")
    assert linked.of(Link)[-1].retry_in == 0.01
    server.start()
    await until(lambda: linked.of(Link)[-1].up, "it is back")
    assert len(linked.of(Restarted)) == 1       # the same engine: only the connection was lost
    await linked.end()


async def test_a_wait_can_be_cut_short(server, client, until):
    server.mode = "500"
    linked = Linked(client)
    for _ in range(4):
        count = len(linked.of(Link))
        await until(lambda: linked.posted[count:] and linked.posted[-1].retry_in, "a failure")
        linked.hurry.set()
        await until(lambda: len(linked.of(Link)) > count + 1, "a try")
    server.mode = "ok"
    await until(lambda: linked.posted[-1].retry_in, "a failure")
    linked.hurry.set()
    await until(lambda: linked.of(Telemetry), "a tree")
    await linked.end()


@pytest.mark.parametrize("mode", ["500", "401", "html", "json", "cut", "types"])
async def test_no_answer_ends_the_link(server, client, until, mode, monkeypatch):
    monkeypatch.setattr(link, "BACKOFF", (0.02,))
    server.mode = mode
    linked = Linked(client)
    await until(lambda: len(linked.posted) > (1 if mode == "types" else 6), "messages")
    assert not linked.task.done()
    server.mode = "dead"
    await until(lambda: server.watching == 0, "the end of the lies")
    server.mode = "ok"
    await until(lambda: linked.of(Telemetry) and linked.of(Telemetry)[-1].state == tree(), "a tree")
    assert (await linked.end()).cancelled()


async def test_a_patch_first_is_a_lie(server, client, until):
    class Liar:
        url = "http://liar"

        async def telemetry(self):
            yield "patch", {"rounds": 1}
    linked = Linked(Liar())
    await until(lambda: linked.posted, "a message")
    assert "patch before a snapshot" in linked.posted[0].reason
    await linked.end()


# ---- the rule ----------------------------------------------------------------------------------

async def test_the_client_alone_makes_requests():
    for path in pathlib.Path(client_file.__file__).parent.rglob("*.py"):
        names = [alias.name for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, (ast.Import, ast.ImportFrom))
                 for alias in node.names] + [
            node.module or "" for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)]
        if path != pathlib.Path(client_file.__file__):
            assert not {"httpx", "socket", "http.client", "urllib.request"} & set(names), path
