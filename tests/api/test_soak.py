# pytest tests/api/test_soak.py    (starts two ranks; the long form is bench/soak.py)
"""Ten seconds of mixed load on two real ranks, with too few pages, seats and places in the queue:
every reply is the one that the request gets alone. And the load finds what it is there for: a
server that does wrong is told from one that does not."""

import contextlib
import http.server
import itertools
import json
import threading
import time

import pytest

from bench import soak
from bench.soak import Soak
from bench.soak_client import catalogue, difference, read
from serving import Serve

SMALL = ("--parallel", "3", "--context", "1024", "--pages", "32", "--queue", "4", "--chunk", "256",
         "--round-ms", "50")


@pytest.mark.mpi
def test_replies_under_load_are_the_replies_alone():
    with Serve(2, *SMALL) as engine:
        lines = []
        run = Soak(engine.url, 10, 8, seed=1, say=lines.append)
        code = run.run()
        told = "\n".join(lines)
        assert run.faults == [] and code == 0, told
        # it was a load: replies, waiting, refusals, clients that left, conversations gone on with
        assert run.counts["compared"] >= 20 and run.counts["429"] > 0, told
        assert run.peaks["live"] == 3 and run.peaks["waiting"] > 0, told
        assert sum(n for name, n in run.counts.items() if name.startswith("left ")) > 0, told
        assert run.counts["continued turns alone"] >= 8, told
        assert engine.process.poll() is None and "Traceback" not in engine.log, engine.log


# ---- what it would notice ----------------------------------------------------------------------

class Server(http.server.ThreadingHTTPServer):
    """Answers as an engine does, fast and without one; `wrong` names what it does wrong."""

    daemon_threads, request_queue_size = True, 100

    def __init__(self, wrong):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wrong, self.numbers, self.started = wrong, itertools.count(1), time.monotonic()
        self.kept = {}          # first message -> messages of its last reply
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def tree(self):
        grown = (time.monotonic() - self.started) * 2 ** 30 if self.wrong == "memory" else 0
        leased = int(self.wrong == "pages")
        none = {"free": 0, "leased": 0, "kept": 0, "total": 0}
        return {"model": "none", "world": 1, "placement": "striped", "backend": "host",
                "context": 1024, "parallel": 2, "queue": {"waiting": 0, "limit": 2},
                "classes": [{"class": 0, "free": 16 - leased, "leased": leased, "kept": 0,
                             "total": 16}],
                "pool": {"page_rows": 64, "tokens": 1024, "replicated": none},
                "requests": [], "kept": [], "rounds": 1, "tokens": {"prefill": 0},
                "ranks": [{"memory": {"resident": 100 * 2 ** 20 + int(grown)}}]}

    def reply(self, body):
        """A function of the prompt alone, where nothing is wrong; a token is 8 characters."""
        messages = body.get("messages", ())
        prompt, lie = json.dumps(messages or body["prompt"]), next(self.numbers) % 5 == 0
        tokens = len(prompt) // 8 + 2
        said = f"{len(prompt)} characters" + "!" * (lie and self.wrong == "text")
        logprob = -0.125 - 2.0 ** -52 * (lie and self.wrong == "logprob")
        cached = 0
        if messages:
            if self.kept.get(messages[0]["content"]) == messages[:-2] or self.wrong == "afresh":
                cached = (tokens - 1) * (self.wrong != "cached")
            self.kept[messages[0]["content"]] = messages
        else:
            self.kept.clear()       # other prompts take the states' places
        entry = {"token": "x", "bytes": [120], "logprob": logprob, "top_logprobs": []}
        return said, {"content": [entry]}, {
            "prompt_tokens": tokens, "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached}}


class Handler(http.server.BaseHTTPRequestHandler):
    """Server's routes."""

    def log_message(self, *_):
        """Nothing."""

    def answer(self, data, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        with contextlib.suppress(OSError):      # the client has left
            self.wfile.write(data.encode())

    def do_GET(self):
        if self.path == "/telemetry":
            self.answer(f"event: snapshot\ndata: {json.dumps(self.server.tree())}\n\n")
        else:
            self.answer("{}", 503 if self.server.wrong == "health" else 200)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.answer(json.dumps({"tokens": list(range(9))}))
        if self.server.wrong == "refusal" and next(self.server.numbers) % 5 == 0:
            return self.answer("{}", 429)
        said, chances, usage = self.server.reply(body)
        choice = {"index": 0, "finish_reason": "length", "logprobs": chances}
        if not body.get("stream"):
            part = {"message": {"content": said}} if "messages" in body else {"text": said}
            return self.answer(json.dumps({"choices": [choice | part], "usage": usage}))
        part = {"delta": {"content": said}} if "messages" in body else {"text": said}
        chunks = [{"choices": [choice | part], "usage": None}, {"choices": [], "usage": usage}]
        events = [*map(json.dumps, chunks), *(["[DONE]"] * (self.server.wrong != "stream"))]
        self.answer("".join(f"data: {e}\n\n" for e in events))


WRONG = {"text": "text: ", "logprob": "logprobs[0]: ", "memory": "MiB more", "pages": "pages",
         "health": "/health", "cached": "the last turn left", "afresh": "alone: HTTP 200, cached",
         "stream": "without [DONE]", "refusal": "HTTP 429, "}


@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_every_kind_of_fault_is_found(wrong, monkeypatch):
    monkeypatch.setattr(soak, "SIGHT", 0.05)
    server = Server(wrong)
    try:
        run = Soak(server.url, 0.8, 2, seed=1, say=lambda line: None)
        code = run.run()
    finally:
        server.shutdown()
        server.server_close()
    assert run.counts["replies"] > 5
    if wrong is None:
        assert run.faults == [] and code == 0 and run.counts["compared"] > 5
    else:
        assert code == 1 and all(WRONG[wrong] in fault for fault in run.faults), run.faults[:5]


def test_what_came_of_a_reply_that_was_left_is_its_beginning():
    alone = {"text": "abc", "tokens": ["a", "b", "c"], "reason": "length"}
    assert difference({"text": "ab", "tokens": ["a"], "reason": None}, alone, False) is None
    assert difference({"text": "ab", "tokens": ["a"], "reason": None}, alone, True)
    assert "tokens[1]" in difference({"text": "ab", "tokens": ["a", "x"]}, alone, False)
    assert "tokens[3]" in difference({"text": "abc", "tokens": [*"abcd"]}, alone, True)


def test_a_stream_reads_as_the_whole():
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "reasoning_content": "hm", "tool_calls": [call]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    whole = read([{"choices": [{"finish_reason": "tool_calls", "message": message}],
                   "usage": usage}])
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "h"},
              {"reasoning_content": "m"},
              {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
              {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}]
    chunks = [{"choices": [{"finish_reason": None, "delta": d}]} for d in deltas]
    chunks += [{"choices": [{"finish_reason": "tool_calls", "delta": {}}]},
               {"choices": [], "usage": usage}]
    assert read(chunks) == whole and whole["calls"] == [["f", "{}"]]


def test_cases_are_a_function_of_the_seed_and_fit():
    made, beginnings = catalogue(1, range(50), 1024)
    assert catalogue(1, range(50), 1024)[0] == made and catalogue(2, range(50), 1024)[0] != made
    for first, *more in beginnings:
        prompt, *others = (json.loads(c.data)["prompt"] for c in (first, *more))
        same = [next(i for i, (a, b) in enumerate(zip(prompt + [None], other)) if a != b)
                for other in others]
        assert same == [len(prompt)] * 3 + [len(prompt) - 1, len(prompt) - len(prompt) // 2]
    for case in made:
        body = json.loads(case.data)
        prompt = body.get("prompt", "")
        assert len(prompt) * isinstance(prompt, list) + body["max_tokens"] <= 1024


def test_only_loopback_is_loaded():
    for url in ("http://10.0.0.1:8114", "http://192.168.1.5", "nothing"):
        with pytest.raises(SystemExit, match="loopback"):
            Soak(url, 1, 1, 1)
