# pytest tests/api/test_app.py
"""The server over a fake engine: HTTP in all its forms, refusals, keys, clients that leave, readers
that are slow, an engine that fails."""

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest

from engine.api.app import listen
from engine.config import parse
from engine.errors import (FaultError, PlanError, QueueFull, RequestError, TooLong, Unavailable,
                           UsageError, WorldError)
from engine.hub import CLOSED, DRAINING, FAILED, STARTING
from fake_engine import CONTEXT, PATIENCE, Fake, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def post(fake, body=HELLO, path="/v1/chat/completions", **more):
    return httpx.post(fake.url + path, json=body, timeout=PATIENCE, **more)


def raw(method, path, headers=(), body=b"", version="1.1"):
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def posted(body=HELLO, headers=("Connection: close",), version="1.1"):
    data = json.dumps(body).encode()
    return raw("POST", "/v1/chat/completions", ("Content-Type: application/json",
               f"Content-Length: {len(data)}", *headers), data, version)


def error_of(response, status, code=None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["code"] == code
    return error


# --- replies --------------------------------------------------------------------------------------


def test_whole_and_streamed_replies_are_the_same(fake):
    text = "Grüße, 東京 🚀."
    fake.say(text)
    whole = post(fake).json()
    assert whole["choices"][0]["message"]["content"] == text and whole["model"] == "fake"
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    response = post(fake, {**HELLO, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [e.removeprefix("data: ") for e in response.text.split("\n\n")[:-1]]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == text
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    assert len({c["id"] for c in chunks}) == 1 and chunks[0]["id"] != whole["id"]


def test_the_alias_is_the_model_that_answers(fake):
    assert post(fake, {**HELLO, "model": "alias"}).json()["model"] == "alias"
    error_of(post(fake, {**HELLO, "model": "gpt"}), 404, "model_not_found")


def test_a_stop_string_ends_the_work_too(fake):
    fake.say("one two three " * 50)
    fake.pace = 0.005
    assert post(fake, {**HELLO, "stop": "two"}).json()["choices"][0]["message"]["content"] == "one "
    until(lambda: fake.engine.cancelled and not fake.engine.live)


def test_a_template_of_the_client_is_text(fake):
    for text in ("{{ 7 * 7 }}", "{% include '/etc/passwd' %}", "{{ ''.__class__ }}"):
        post(fake, {"messages": [{"role": "user", "content": text}]})
        ids, _ = fake.engine.asked[max(fake.engine.asked)]
        assert text in fake.chat.decode(ids)


def test_no_path_reads_a_file(fake, send):
    for path in ("/../../etc/passwd", "/v1/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc",
                 "/v1/models/../../../etc/passwd", "/v1/models/%2Fetc%2Fpasswd", "/v1/models/%ff",
                 "/%00", "/v1/chat/completions/", "/v1/models/{{7*7}}", "/file:///etc/passwd"):
        found = send(fake.url, raw("GET", path, ["Connection: close"]))
        assert found.split()[1] in (b"404", b"400"), found
        assert b"root:" not in found and b"49" not in found.partition(b'"message"')[2]


def test_models_and_tokenize(fake):
    models = httpx.get(fake.url + "/v1/models").json()["data"]
    assert [m["id"] for m in models] == ["fake", "alias"] and models[0]["max_model_len"] == CONTEXT
    assert httpx.get(fake.url + "/v1/models/fake").json() == models[0]
    error_of(httpx.get(fake.url + "/v1/models/other"), 404, "model_not_found")
    found = post(fake, {"prompt": "a b"}, "/tokenize").json()
    assert found == {"count": 2, "tokens": fake.chat.encode("a b"), "max_model_len": CONTEXT}


# --- HTTP -----------------------------------------------------------------------------------------


def test_http_1_0_and_connection_close(fake, send):
    fake.say("Hi.")
    for version, headers in (("1.0", ()), ("1.1", ("Connection: close",))):
        found = send(fake.url, posted(HELLO, headers, version))
        assert b" 200 OK" in found[:20] and b'"content":"Hi."' in found, found
        found = send(fake.url, posted({**HELLO, "stream": True}, headers, version))
        assert b" 200 OK" in found[:20] and b"data: [DONE]" in found


def test_a_chunked_body(fake, send):
    fake.say("Hi.")
    data = json.dumps(HELLO).encode()
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (data[:5], data[5:])) + b"0\r\n\r\n"
    found = send(fake.url, raw("POST", "/v1/chat/completions", (
        "Content-Type: application/json; charset=utf-8", "Transfer-Encoding: chunked",
        "Connection: close"), pieces))
    assert b'"content":"Hi."' in found


def test_two_requests_on_one_connection(fake):
    fake.say("Hi.")
    with httpx.Client(base_url=fake.url) as client:
        for _ in range(3):
            assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
            error_of(client.post("/v1/chat/completions", json={}), 400)


def test_other_methods(fake, send):
    for path in ("/v1/models", "/health", "/metrics", "/telemetry"):
        found = send(fake.url, raw("HEAD", path, ["Connection: close"]))    # ends, without a body
        assert found.split()[1] == b"200" and found.endswith(b"\r\n\r\n"), found
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/chat/completions"),
                         ("DELETE", "/v1/models"), ("PUT", "/health"), ("BREW", "/v1/models"),
                         ("POST", "/telemetry")):
        response = httpx.request(method, fake.url + path)
        error_of(response, 405)
        assert response.headers["allow"]
    error_of(httpx.get(fake.url + "/"), 404)


def test_what_is_not_http(fake, send):
    for data in (b"\0\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/x\r\n\r\n",
                 raw("GET", "/nothing", ["A: " + "x" * 100_000, "Connection: close"]),
                 raw("GET", "/health", ["Host: other", "Host: third"]),
                 raw("POST", "/v1/chat/completions", ["Content-Length: -5"]),
                 raw("POST", "/v1/chat/completions", ["Content-Length: 5",
                                                      "Transfer-Encoding: chunked"], b"zz\r\n")):
        found = send(fake.url, data)
        assert not found or found.split()[1].startswith(b"4"), found
    assert httpx.get(fake.url + "/health").status_code == 200


def test_content_types(fake):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        error_of(httpx.post(fake.url + "/v1/chat/completions", content=json.dumps(HELLO),
                            headers={"Content-Type": kind}), 415)


def test_a_body_that_is_too_large_is_refused_not_cut(fake):
    most = fake.api.max_body
    assert most < 2 << 20
    body = json.dumps({"messages": [{"role": "user", "content": "x" * most}]}).encode()
    for _ in range(3):      # the answer must come though the body was not wanted
        response = httpx.post(fake.url + "/v1/chat/completions", content=body, timeout=PATIENCE,
                              headers={"Content-Type": "application/json"})
        assert f"{most:,}" in error_of(response, 413)["message"]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_before_a_stream_opens(fake, stream):
    body = {**HELLO, "stream": stream}
    fake.engine.refusal = QueueFull("8 requests wait already", "try again")
    response = post(fake, body)
    assert error_of(response, 429, "queue_full")["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) > 0 and "8 requests" in response.text
    fake.engine.refusal = TooLong("too long")
    error_of(post(fake, body), 400, "context_length_exceeded")
    fake.engine.refusal = RequestError("these tokens are odd")
    error_of(post(fake, body), 400)
    fake.engine.refusal = None
    assert post(fake, body).status_code == 200


def test_a_prompt_that_is_too_long(fake):
    response = post(fake, {"prompt": [5] * CONTEXT}, "/v1/completions")
    message = error_of(response, 400, "context_length_exceeded")["message"]
    assert str(CONTEXT) in message and str(CONTEXT - 1) in message


@pytest.mark.parametrize("state", [STARTING, DRAINING, FAILED, CLOSED])
def test_an_engine_that_takes_nothing(fake, state):
    fake.hub.become(state, "there is a reason")
    response = post(fake)
    assert "there is a reason" in error_of(response, 503, "unavailable")["message"]
    assert int(response.headers["retry-after"]) > 0
    health = httpx.get(fake.url + "/health")
    assert health.status_code == 503 and health.json()["status"] == state


def test_names_of_other_machines_are_not_served_without_a_key(fake):
    port = fake.server.port
    for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}", "127.9.9.9:80"):
        assert httpx.get(fake.url + "/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", f"localhost.evil.example:{port}", "127.0.0.1.evil.example",
                 "10.0.0.1", "[::1", "@localhost", "127.0.0.1@evil"):
        response = httpx.get(fake.url + "/v1/models", headers={"Host": host})
        assert response.status_code == 403, host
        error_of(response, 403, "wrong_host")


def test_the_key(chat):
    served = Fake(chat, key="sécret key")
    try:
        client = httpx.Client(base_url=served.url)
        for given in (None, "", "Bearer", "Bearer x", "Bearer sécret", "sécret key",
                      "Basic sécret key", "Bearer sécret key2", "Bearer SÉCRET KEY"):
            headers = {} if given is None else {b"Authorization": given.encode()}
            for path in ("/v1/models", "/metrics", "/telemetry", "/v1/chat/completions", "/nothing",
                         "/health/", "/v1/models/fake", "//health"):
                response = client.get(path, headers=headers)
                error = error_of(response, 401, "invalid_api_key")
                assert error["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
        good = {b"Authorization": "bearer sécret key".encode(), b"Host": b"spark1:8114"}
        assert httpx.get(served.url + "/v1/models", headers=good).status_code == 200
        assert httpx.get(served.url + "/health").status_code == 200
    finally:
        served.close()


def test_other_machines_need_a_key_at_the_start(monkeypatch):
    monkeypatch.delenv("SPARKGRID_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "192.168.1.2", "spark1", "127.evil.example", "127.0.0.1.nip.io"):
        with pytest.raises(UsageError, match="no key is set") as caught:
            parse(["--host", host])
        assert "--api-key" in caught.value.hint and "SPARKGRID_API_KEY" in caught.value.hint
        assert parse(["--host", host, "--api-key", "k"]).api_key == "k"
    for host in ("127.0.0.1", "127.3.2.1", "localhost", "::1"):
        assert parse(["--host", host]).api_key is None
    monkeypatch.setenv("SPARKGRID_API_KEY", "from there")
    assert parse(["--host", "0.0.0.0"]).api_key == "from there"


def test_a_port_that_is_taken_or_no_address():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PlanError, match=f"port {port} of 127.0.0.1 .*in use"):
            listen("127.0.0.1", port)
    for host in ("no.such.host.invalid", "a" * 70, "1.2.3.4.5"):
        with pytest.raises(PlanError, match="cannot be served"):
            listen(host, 0)


# --- clients that leave, and readers that are slow ------------------------------------------------


def leaving(fake, stream, after):
    """A request whose client leaves once `after(socket)` returns."""
    with socket.create_connection(("127.0.0.1", fake.server.port), PATIENCE) as s:
        s.sendall(posted({**HELLO, "stream": stream}, ()))
        after(s)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(fake, stream):
    fake.say("x " * 500)
    fake.gate.clear()
    leaving(fake, stream, lambda s: until(lambda: fake.engine.live))
    until(lambda: fake.engine.cancelled and not fake.engine.live)


def test_a_client_that_leaves_in_the_middle(fake):
    fake.say("x " * 1900)
    fake.pace = 0.005

    def some(s):
        found = b""
        while b'"content": "' not in found.replace(b'"content": ""', b""):
            found += s.recv(4096)
        fake.gate.clear()
    leaving(fake, True, some)
    until(lambda: fake.engine.cancelled and not fake.engine.live)


def test_a_client_that_leaves_at_once(fake):
    """Whatever had been done by then, nothing goes on for it."""
    fake.say("x " * 1900)
    fake.gate.clear()
    for i in range(30):
        leaving(fake, i % 2 == 0, lambda s: time.sleep(i % 5 * 1e-3))
    time.sleep(0.2)
    until(lambda: not fake.engine.live)


def test_a_client_that_leaves_within_its_body(fake):
    with socket.create_connection(("127.0.0.1", fake.server.port)) as s:
        s.sendall(raw("POST", "/v1/chat/completions",
                      ("Content-Type: application/json", "Content-Length: 100"), b'{"mes'))
    assert post(fake).status_code == 200 and len(fake.engine.asked) == 1


def test_a_slow_reader_does_not_hold_the_others(fake):
    """Its replies wait in memory; the others, and its own pages, do not."""
    fake.say("x " * 1900)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            s = stack.enter_context(socket.socket())
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect(("127.0.0.1", fake.server.port))
            s.sendall(posted({**HELLO, "stream": True}))
        until(lambda: len(fake.engine.asked) == 8)
        fake_reply = post(fake, {**HELLO, "max_tokens": 3})
        assert fake_reply.status_code == 200
        until(lambda: not fake.engine.live)     # all has been said, though nobody read it
        found = b""
        while piece := s.recv(1 << 16):
            found += piece
        assert found.count(b'"content"') >= 1900 and b"data: [DONE]" in found


# --- an engine that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("error, status", [
    (WorldError("rank 3 is gone: its connection closed", "look at its log", 3), 500),
    (FaultError("NaN in the logits"), 500), (Unavailable("stopped"), 503)])
def test_a_lost_engine_is_said_to_everybody(fake, error, status):
    fake.say("x " * 500)
    fake.gate.clear()
    found = {}

    def client(stream):
        found[stream] = post(fake, {**HELLO, "stream": stream})
    threads = [threading.Thread(target=client, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    until(lambda: len(fake.engine.live) == 2)
    fake.break_with(error)
    fake.gate.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert found[False].status_code == status and error.message in found[False].text
    last = found[True].text.strip().split("\n\n")[-1]
    assert error.message in json.loads(last.removeprefix("data: "))["error"]["message"]
    error_of(post(fake), 503, "unavailable")
