# pytest tests/api/test_openai.py    (starts two ranks)
"""Two real ranks behind the real openai client and behind raw sockets: replies are the reference's,
streamed or not; refusals have their numbers; a client that leaves frees its pages."""

import contextlib
import json
import socket
import threading
import time

import httpx
import openai
import pytest

from serving import Serve, until

pytestmark = pytest.mark.mpi
MODEL = "mini"


@pytest.fixture(scope="module")
def engine():
    with Serve(2, "--parallel", "2", "--queue", "2", "--context", "8192", "--round-ms", "50",
               "--served-name", MODEL) as served:
        yield served


@pytest.fixture(scope="module")
def client(engine):
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0,
                       timeout=120) as made:
        yield made


@pytest.fixture
def resting(engine):
    """Nothing runs before the test, nor after it."""
    until(lambda: not engine.telemetry()["requests"], "an engine at rest")
    yield
    until(lambda: not engine.telemetry()["requests"], "an engine at rest")


def create(client, case, **more):
    return client.chat.completions.create(
        model=MODEL, messages=case["messages"], temperature=0,
        **({"tools": case["tools"]} if case["tools"] else {}), **more)


def text_of(case):
    return case["greedy_text"].removesuffix("<|user|>")


NAMES = ("hello", "capital", "count", "spell", "recall_turns")


@pytest.mark.parametrize("name", NAMES)
def test_replies_are_the_reference(client, cases, name):
    case = cases[name]
    cut = not case["greedy_text"].endswith("<|user|>")
    more = {"max_tokens": len(case["greedy_ids"])} if cut else {}
    whole = create(client, case, **more)
    choice = whole.choices[0]
    assert choice.message.content == text_of(case) and choice.message.tool_calls is None
    assert choice.finish_reason == ("length" if cut else "stop")
    assert whole.usage.prompt_tokens == case["n_prompt"]
    assert whole.usage.completion_tokens == len(case["greedy_ids"])
    chunks = list(create(client, case, stream=True, stream_options={"include_usage": True}, **more))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text_of(case)
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == choice.finish_reason
    assert len({c.id for c in chunks}) == 1 and chunks[0].id != whole.id
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == case["n_prompt"]


def test_tool_calls(client, cases):
    case = cases["tool_call"]
    whole = create(client, case)
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    assert (call.type, call.function.name) == ("function", "calculator")
    assert json.loads(call.function.arguments) == {"expression": "417 + 268"}
    name, arguments, ids, reasons = "", "", set(), []
    for chunk in create(client, case, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.index == 0
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
            ids |= {piece.id} - {None}
    assert (name, arguments, reasons[-1]) == (
        "calculator", call.function.arguments, "tool_calls")
    assert len(ids) == 1 and not any(reasons[:-1])
    # the next turn, as a client sends it back
    answer = client.chat.completions.create(
        model=MODEL, temperature=0, tools=case["tools"], messages=[
            *case["messages"], whole.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "685"}])
    assert "685" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_forced_call(client, cases):
    case = cases["tool_call"]
    choice = {"type": "function", "function": {"name": "calculator"}}
    whole = create(client, case, tool_choice=choice, max_tokens=100)
    function = whole.choices[0].message.tool_calls[0].function
    assert function.name == "calculator" and "expression" in json.loads(function.arguments)


def test_the_next_turn_continues_from_the_last(client, cases, resting):
    case = cases["capital"]
    first = create(client, case)
    more = [*case["messages"], {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Hello"}]
    second = client.chat.completions.create(model=MODEL, messages=more, temperature=0)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert case["n_prompt"] < cached < second.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, cases, stream):
    case = cases["count"]       # 3, 4, 5, 6, ...
    found = create(client, case, stop=["7, 8", "9"], stream=stream)
    if stream:
        chunks = list(found)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = found.choices[0].message.content, found.choices[0].finish_reason
    assert (text, reason) == (text_of(case).partition("7, 8")[0], "stop")


def test_a_seed_repeats_a_sampled_reply(client):
    def sampled(seed):
        return client.completions.create(model=MODEL, prompt=[5, 6], temperature=2, top_p=1,
                                         seed=seed, max_tokens=9).choices[0].text
    assert sampled(5) == sampled(5)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_logprobs(client, cases):
    case = cases["capital"]
    whole = create(client, case, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == text_of(case)
    for e in entries:       # greedy: the token is the best
        assert e.top_logprobs[0].token == e.token and e.logprob == e.top_logprobs[0].logprob <= 0
        values = [t.logprob for t in e.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 3
    streamed = [e for c in create(client, case, logprobs=True, top_logprobs=3, stream=True)
                for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else ())]
    assert streamed == entries


def test_completions(client, cases):
    case = cases["capital"]
    whole = client.completions.create(model=MODEL, prompt=case["prompt_ids"], temperature=0,
                                      logprobs=1)
    assert whole.choices[0].text == text_of(case) and whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs.token_logprobs[0] <= 0
    chunks = client.completions.create(model=MODEL, prompt=case["prompt_ids"], temperature=0,
                                       stream=True)
    assert "".join(c.choices[0].text for c in chunks) == text_of(case)


def test_models_and_tokenize(engine, client, cases):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "sparkgrid"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    status, _, found = engine.ask("POST", "/tokenize", {"messages": cases["hello"]["messages"]})
    assert status == 200 and found["tokens"] == cases["hello"]["prompt_ids"]


def test_characters_are_never_cut(engine, resting):
    """A reply of random bytes: every event is UTF-8 by itself, and together they are the whole."""
    body = {"prompt": list(range(100, 180)), "temperature": 2, "seed": 0, "max_tokens": 60}
    whole = httpx.post(engine.url + "/v1/completions", json=body, timeout=60).json()
    raw = httpx.post(engine.url + "/v1/completions", json={**body, "stream": True},
                     timeout=60).content
    events = [json.loads(e[6:].decode("utf-8", "strict")) for e in raw.split(b"\n\n")[:-2]]
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
    assert whole["choices"][0]["finish_reason"] in ("length", "stop")


# --- refusals -------------------------------------------------------------------------------------


def test_errors_are_the_clients_own(client):
    hello = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=hello, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=hello)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=hello, n=2)


def test_a_prompt_that_is_too_long_is_told_what_would_fit(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 9000, stream=True)
    assert caught.value.code == "context_length_exceeded"
    for number in ("9000", "8192", "8191", "prompt 9000 tokens", "pool 258 pages"):
        assert number in caught.value.message, caught.value.message


def streams(client, count):
    """That many long replies, begun one after the other: their iterators."""
    return [client.completions.create(model=MODEL, prompt=("a b " * 8).strip(), stream=True,
                                      temperature=0, max_tokens=6000) for _ in range(count)]


def test_a_full_queue_is_429_before_a_stream_opens(engine, client, resting):
    """Two are answered, two wait, the next one is refused; a place becomes free when one leaves."""
    running = streams(client, 4)
    with pytest.raises(openai.RateLimitError) as caught:
        streams(client, 1)
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert caught.value.code == "queue_full" and "2" in caught.value.message
    running.pop().close()
    until(lambda: engine.telemetry()["queue"]["waiting"] < 2, "a place in the queue")
    running += streams(client, 1)
    for stream in running:
        stream.close()


# --- clients that leave ---------------------------------------------------------------------------


def states(engine):
    return sorted(r["state"] for r in engine.telemetry()["requests"])


def leased(engine):
    return sum(c["leased"] for c in engine.telemetry()["classes"])


def test_a_client_that_leaves_while_its_reply_streams(engine, client, resting):
    (stream,) = streams(client, 1)
    next(iter(stream))
    until(lambda: states(engine) == ["decode"] and leased(engine), "a reply")
    stream.close()
    until(lambda: not states(engine) and not leased(engine), "its pages free", 10)


def test_a_client_that_leaves_in_prefill_and_in_the_queue(engine, client, resting):
    prompt = [i % 4000 for i in range(8000)]
    body = json.dumps({"prompt": prompt, "max_tokens": 100}).encode()
    request = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
               b"Content-Type: application/json\r\n\r\n" % len(body)) + body
    port = int(engine.url.rpartition(":")[2])
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for s in sockets:
        s.sendall(request)
    until(lambda: states(engine) == ["prefill", "prefill", "queued"], "two in prefill, one waiting")
    sockets.pop().close()
    for s in sockets:
        s.close()
    until(lambda: not states(engine) and not leased(engine), "their pages free", 10)


def test_replies_side_by_side_are_those_alone(client, cases):
    found = {}

    def one(name):
        found[name] = create(client, cases[name]).choices[0].message.content
    names = ("hello", "capital", "who", "spell")
    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {name: text_of(cases[name]) for name in names}


def test_replies_hold_while_others_come_and_leave(engine, client, cases, resting):
    """Clients that leave at every moment of a request, beside one that reads to the end."""
    over = threading.Event()

    def leaver(seconds):
        while not over.is_set():
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(engine.url + "/v1/completions", timeout=seconds, json={
                    "prompt": "a b a b a b", "temperature": 0, "max_tokens": 500,
                    "stream": seconds > 0.1})
            over.wait(0.05)
    threads = [threading.Thread(target=leaver, args=(s,)) for s in (0.02, 0.08, 0.3)]
    for thread in threads:
        thread.start()
    try:
        for name in (*NAMES[:2], *NAMES[3:]) * 2:
            for _ in range(100):
                with contextlib.suppress(openai.RateLimitError):
                    found = create(client, cases[name])
                    break
                time.sleep(0.1)
            assert found.choices[0].message.content == text_of(cases[name])
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    until(lambda: not states(engine) and not leased(engine), "all pages free or kept", 10)


def test_it_ends_well(engine):
    """The last test: after all of this the engine is well."""
    status, health = engine.health()
    assert status == 200 and health["status"] == "ok"
    until(lambda: not engine.telemetry()["requests"], "an engine at rest")
    assert len(engine.telemetry()["ranks"]) == 2
    metrics = httpx.get(engine.url + "/metrics").text
    assert "sparkgrid_tokens_total" in metrics
    assert "Traceback" not in engine.log
