"""An engine's HTTP side without an engine, for the console's tests: it says what a test wants.

    with CannedServer(tree(world=6)) as server:
        server.change({"rounds": 8})            # a merge patch: to every telemetry stream
        server.say("Hello", reasoning="Hm.")    # the next chat replies
        go_on = server.say("a b c", hold=2)     # c comes after go_on.set()
    server.script = [0.1, {...}, b"raw"]    # or exactly this: pauses, events, chunks, bytes
        server.mode = "500"                     # every route goes wrong, see MODES
        server.stop(); server.start()           # gone, and back on the same port

`tree` makes telemetry of any size; docs/telemetry.md says what is in it. asked: bodies of the chat
requests so far; cancelled: ids of DELETE /requests/ID; left: chat streams that a client broke off.
"""

import asyncio
import itertools
import json
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tui.state import merge

STATES = ".#k"
MODES = {
    "ok": "as an engine does",
    "401": "wants an API key", "500": "fails, with the error object", "html": "another server",
    "json": "events that are not JSON", "types": "telemetry with every field of a wrong kind",
    "stall": "answers and then says nothing", "cut": "breaks off in the middle of an event",
}


def tree(world=2, pages=50, *, busy=True, now=1_800_000_000.0, page_rows=64, requests=3, log=2):
    """Telemetry of `world` ranks of `pages` pages each. busy: some are leased and kept."""
    cells = min(256, pages)
    leased, kept = (pages * 2 // 5, pages // 5) if busy else (0, 0)
    count = {"free": pages - leased - kept, "leased": leased, "kept": kept, "total": pages}
    none = {"free": 0, "leased": 0, "kept": 0, "total": 0}
    filled = [STATES[1 if i * 5 < cells * 2 else 2 if i * 5 < cells * 3 else 0]
              if busy else "." for i in range(cells)]
    stages = {"plan": 0.5, "insert": 1.25, "score": 3.5, "merge": 2.0, "project": 0.75}
    return {
        "version": "0.1.0", "model": "mini", "world": world, "placement": "striped",
        "split": True, "replicate": 0, "kv_dtype": "bf16", "context": 4096, "parallel": 4,
        "backend": "host", "started": now - 600, "time": now, "rounds": 1000,
        "ranks": [{"rank": r, "pid": 4000 + r, "host": f"spark{r}", "round": 1000,
                   "backend": "host", "memory": {"resident": (240 + r) << 20},
                   "collectives": dict(stages), "pages": dict(count), "replicated": dict(none),
                   "map": "".join(filled)} for r in range(world)],
        "classes": [{"class": c, **count, "conversations": 0, "windows_free": pages - leased}
                    for c in range(world)],
        "pool": {"page_rows": page_rows, "tokens": world * pages * page_rows,
                 "tokens_leased": world * leased * page_rows,
                 "tokens_kept": world * kept * page_rows, "replicated": dict(none)},
        "tokens": {"prefill": 20_000, "decode": 5_000, "hit": 3_000},
        "seconds": {"prefill": 40.0, "decode": 100.0},
        "queue": {"waiting": 1 if busy else 0, "limit": 4},
        "requests": [{"id": 40 + i, "state": ("decode", "prefill", "queued")[i % 3],
                      "prompt": 100 * (i + 1), "cached": 50 * i, "fed": 120 * (i + 1),
                      "generated": 20 if i % 3 == 0 else 0, "limit": 1024,
                      "seat": i if i % 3 < 2 else None, "owner": None,
                      "rate": 12.5 if i % 3 == 0 else None, "age": 3.5 + i}
                     for i in range(requests if busy else 0)],
        "kept": [{"seat": 3, "tokens": 640, "pages": 10, "owner": None, "idle": 42.0}]
        if busy else [],
        "ended": {"stop": 12, "length": 3}, "refused": log,
        "first_token_seconds": {"bounds": [0.1, 1.0], "counts": [3, 10, 2], "sum": 9.5,
                                "count": 15},
        "token_gap_seconds": {"bounds": [0.01, 0.1], "counts": [100, 4000, 10], "sum": 200.0,
                              "count": 4110},
        "log": [{"time": now - 60 + i, "level": "refusal",
                 "text": f"the prompt of {5000 + i:,} tokens is longer than the window of 4,096"}
                for i in range(log)],
    }


def wrong(value):
    """A tree with a value of another kind in every place."""
    if isinstance(value, dict):
        return {k: wrong(v) for k, v in value.items()}
    if isinstance(value, list):
        return [wrong(v) for v in value] + [None, "x", 7]
    return {"wrong": 1} if isinstance(value, str) else "wrong"


class Prompt(uvicorn.Server):
    """Sees at once that it is to end, not at the next tenth of a second."""

    async def main_loop(self):
        while not self.should_exit:
            await asyncio.sleep(0.005)


class CannedServer:
    """On a port of its own, in a thread. tree: its telemetry. key: None, or the API key."""

    def __init__(self, telemetry=None, key=None):
        self.tree, self.key, self.mode = telemetry or tree(), key, "ok"
        self.script = []
        self.gate = threading.Event()       # chat streams wait while it is clear
        self.gate.set()
        self.asked, self.cancelled, self.left, self.watching = [], [], 0, 0
        self.health = 200, {"status": "ok"}
        self._changes = []
        self._numbers = itertools.count()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._app = Starlette(routes=[
            Route("/telemetry", self._telemetry), Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/requests/{number:int}", self._cancel, methods=["DELETE"])])
        self._thread = None
        self.say("Hello.")

    # --- what a test does -----------------------------------------------------------------------

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._end()                     # its thread does by itself, in a tenth of a second

    def start(self):
        """Serve, on the same port as before."""
        listening = self._socket or socket.create_server(("127.0.0.1", self.port))
        self._socket = None
        self._server = Prompt(uvicorn.Config(
            self._app, log_config=None, log_level="critical", access_log=False, lifespan="off",
            http="h11", ws="none", timeout_graceful_shutdown=0))
        self._stopping = False
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def stop(self):
        """Close every connection and the port."""
        self._end()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _end(self):
        self._stopping = True
        self._server.should_exit = self._server.force_exit = True

    def change(self, patch):
        """A merge patch of the tree, sent to every stream within a few milliseconds."""
        self.tree = merge(self.tree, patch)
        self._changes.append(patch)

    def say(self, text="", reasoning="", calls=(), pace=0.0, hold=None, usage=None, reason=None):
        """The next replies: reasoning, text (a word a chunk), tool calls (name, arguments).

        pace: seconds before each chunk. hold: chunks after which they wait until the event that is
        returned is set. usage: the OpenAI object; one with 3 cached tokens else.
        """
        words = [{"reasoning_content": w} for w in _words(reasoning)]
        words += [{"content": w} for w in _words(text)]
        for i, (name, arguments) in enumerate(calls):
            words.append({"tool_calls": [{"index": i, "id": f"call_{i}", "type": "function",
                                          "function": {"name": name, "arguments": ""}}]})
            words.append({"tool_calls": [{"index": i, "function": {"arguments": arguments}}]})
        chunks = [chunk({"role": "assistant", "content": ""})]
        go_on = threading.Event()
        for i, word in enumerate(words):
            if i == hold:
                chunks.append(go_on)
            chunks += [pace, chunk(word)] if pace else [chunk(word)]
        chunks.append(chunk({}, reason or ("tool_calls" if calls else "stop")))
        usage = usage or {"prompt_tokens": 12, "completion_tokens": len(words),
                          "total_tokens": 12 + len(words),
                          "prompt_tokens_details": {"cached_tokens": 3}}
        chunks.append({"object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.script = [*chunks, b"data: [DONE]\n\n"]
        return go_on

    # --- routes ---------------------------------------------------------------------------------

    def _refusal(self, request):
        """What every route says in a mode that is not "ok", or None."""
        if self.mode == "500":
            return _error(500, "rank 1 is lost; start the engine again")
        if self.mode == "html":
            return Response("<html><body>It works!</body></html>", media_type="text/html")
        sent = request.headers.get("authorization")
        if self.mode == "401" or self.key and sent != f"Bearer {self.key}":
            return _error(401, "the API key is missing or wrong: send Authorization: Bearer KEY")
        return None

    async def _telemetry(self, request):
        return self._refusal(request) or StreamingResponse(self._events(),
                                                           media_type="text/event-stream")

    async def _events(self):
        self.watching += 1
        try:
            seen, shown = len(self._changes), self.tree
            if self.mode == "json":
                yield "event: snapshot\ndata: {\"world\": \n\n"
            elif self.mode == "types":
                yield _event("snapshot", wrong(shown))
            elif self.mode == "cut":
                yield _event("snapshot", shown)[:200]
                raise ConnectionResetError
            elif self.mode != "stall":
                yield _event("snapshot", shown)
            while not self._stopping and self.mode != "dead":
                await asyncio.sleep(0.005)
                while self.mode not in ("stall", "json") and seen < len(self._changes):
                    seen += 1
                    yield _event("patch", self._changes[seen - 1])
        finally:
            self.watching -= 1

    async def _health(self, request):
        status, found = self.health
        return self._refusal(request) or JSONResponse(found, status)

    async def _models(self, request):
        return self._refusal(request) or JSONResponse({"object": "list", "data": [
            {"id": "mini", "object": "model", "created": int(time.time()), "max_model_len": 4096}]})

    async def _chat(self, request):
        self.asked.append(await request.json())
        return self._refusal(request) or StreamingResponse(self._reply(),
                                                           media_type="text/event-stream")

    async def _reply(self):
        ended = False
        try:
            if self.mode == "json":
                yield "data: {\"choices\": [\n\n"
            if self.mode == "types":
                yield _data({"choices": "none", "usage": 3})
                yield _data({"choices": [{"delta": {"content": 5, "tool_calls": 7}}, None]})
            for step in list(self.script):
                while (self.mode == "stall" or not self.gate.is_set()) and not self._stopping:
                    await asyncio.sleep(0.005)
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, threading.Event):
                    while not step.is_set() and not self._stopping:
                        await asyncio.sleep(0.005)
                elif isinstance(step, bytes):
                    yield step
                else:
                    yield _data(step)
                if self.mode == "cut":
                    raise ConnectionResetError
            ended = True
        finally:
            self.left += not ended

    async def _cancel(self, request):
        if refusal := self._refusal(request):
            return refusal
        number = request.path_params["number"]
        if number not in [r.get("id") for r in self.tree.get("requests", ())]:
            return _error(404, f"request {number} has ended")
        self.cancelled.append(number)
        self.change({"requests": [r for r in self.tree["requests"] if r["id"] != number]})
        return PlainTextResponse("", 204)


def chunk(delta, reason=None):
    """A chat chunk."""
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "mini", "usage": None,
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}


def _words(text):
    """Pieces of a text that make it up again, a word each."""
    return [w for w in text.replace(" ", " \0").split("\0") if w]


def _data(value):
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _event(kind, value):
    return f"event: {kind}\n{_data(value)}"


def _error(status, message):
    return JSONResponse({"error": {"message": message, "type": "server_error", "param": None,
                                   "code": None}}, status)
