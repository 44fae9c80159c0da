# python -m pytest tests/faults/test_front.py
"""The front with a scripted server behind it: what it passes on, mends, and starts again."""

import http.client
import json
import signal
import socket
import sys
import urllib.parse

import pytest

import fake_server
from engine.relay import Answer, closing, refusal
from fake_server import EVENTS, chunk, whole
from serving import Serve, until

FAKE = str(fake_server.__file__)


def front(*fake, command=(sys.executable, FAKE), **how):
    def launcher(world, *options):
        return [sys.executable, "-m", "engine.front", *options, "--", *command, *fake]
    return Serve(1, launcher=launcher, **how)


def exchange(engine, data):
    """All bytes that come back for these, until the other side closes."""
    parts = urllib.parse.urlsplit(engine.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    return found


def get(path, method="GET"):
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n".encode()


def test_requests_and_answers_pass_as_they_are(tmp_path):
    with front() as engine:
        body = bytes(range(256)) * 2_000
        post = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        found = exchange(engine, post)
        heard = post.replace(b"\r\n\r\n", b"\r\nConnection: close\n\n", 1)
        assert found == whole(heard)
        assert exchange(engine, get("/echo")).endswith(b"\r\nConnection: close\n\n")
        assert exchange(engine, get("/echo", "HEAD")).endswith(b"\r\n\r\n")
        asked = b"POST /echo HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx"
        assert exchange(engine, asked).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")

        parts, go = urllib.parse.urlsplit(engine.url), tmp_path / "go"
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
            connection.sendall(get(f"/events?{go}"))
            found = b""
            while not found.endswith(b"data: 1\n\n\r\n"):       # at once, not at the end
                found += connection.recv(65536)
            go.touch()
            while piece := connection.recv(65536):
                found += piece
        assert found == EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + chunk(b"")


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"GET / SMTP\r\n\r\n",
                                  b"GET / HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n"])
def test_what_is_no_request_is_refused(data):
    with front() as engine:
        found = exchange(engine, data)
        assert found.startswith(b"HTTP/1.1 400 ") and b'"error"' in found
        assert engine.health()[0] == 200


def test_broken_answers_are_mended_where_they_can_be():
    with front() as engine:
        found = exchange(engine, get("/break"))
        assert found.startswith(EVENTS + chunk(b"data: 1\n\n")) and b"data: 2" not in found
        size, _, rest = found.removeprefix(EVENTS + chunk(b"data: 1\n\n")).partition(b"\r\n")
        event, end = rest[:int(size, 16)], rest[int(size, 16):]
        assert end == b"\r\n0\r\n\r\n" and event.startswith(b"data: ") and event.endswith(b"\n\n")
        error = json.loads(event[6:])["error"]
        assert "rank 0 of the engine ended in the middle" in error["message"]

        until(lambda: engine.health()[0] == 200, "its return")
        head, _, body = exchange(engine, get("/nothing")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 2" in head
        assert json.loads(body)["error"]["code"] == "unavailable"

        until(lambda: engine.health()[0] == 200, "its return")
        parts = urllib.parse.urlsplit(engine.url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
        connection.request("GET", "/half")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            connection.getresponse().read()
        connection.close()


def test_a_client_that_leaves_is_known_to_the_engine(tmp_path):
    with front() as engine:
        parts, left = urllib.parse.urlsplit(engine.url), tmp_path / "left"
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(get(f"/wait?{left}"))
        until(left.exists, "the engine's notice")


def test_an_engine_that_loads_is_not_waited_for(tmp_path):
    go = tmp_path / "go"
    with front("--accept-after", str(go), ready=False) as engine:
        until(lambda: "supervising on" in engine.log, "the front")
        engine.url = engine.log.split(" on ")[1].split(",")[0]
        status, headers, found = engine.ask("GET", "/health")
        assert status == 503 and headers["Retry-After"] == "2"
        assert found["status"] == "down" and found["reason"] == "the engine loads"
        assert found["error"]["message"] == "the engine takes no requests: the engine loads"
        go.touch()
        until(lambda: engine.health()[0] == 200, "the engine")


@pytest.mark.parametrize("code, again", [(0, False), (3, True), (6, True)])
def test_the_exit_code_decides_whether_it_starts_again(code, again):
    with front("--child") as engine:
        engine.ask("GET", f"/end?{code}")
        if again:
            until(lambda: f"ended with exit code {code}; starting again in 1 s" in engine.log,
                  "the start")
            until(lambda: engine.health()[0] == 200, "the engine's return")
            assert len(engine.left()) == 3      # the front, the engine and its stopped child
            engine.process.send_signal(signal.SIGTERM)
            assert engine.wait() == 128 + signal.SIGTERM    # a server that knows no drain
        else:
            assert engine.wait() == code


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_refusal_at_the_start_is_final(code):
    with front(command=("sh", "-c", f"exit {code}"), ready=False) as engine:
        assert engine.wait() == code and "starting again" not in engine.log


def test_the_pauses_grow_and_a_stop_ends_them():
    with front(command=("sh", "-c", "exit 6"), ready=False) as engine:
        until(lambda: "starting again in 4 s" in engine.log, "the third pause")
        assert engine.log.index("in 1 s") < engine.log.index("in 2 s") < engine.log.index("in 4 s")
        engine.process.send_signal(signal.SIGINT)
        assert engine.wait() == 0


@pytest.mark.parametrize("command, code, what", [
    ((), 2, "there is no command after --"), (("/no/such/mpirun",), 127, "cannot be started")])
def test_a_command_that_cannot_be_started(command, code, what):
    with front(command=command, ready=False) as engine:
        assert engine.wait() == code and what in engine.log


def test_a_second_signal_does_not_wait():
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" \
           "print('deaf', flush=True)\nwhile True: signal.pause()"
    with front(command=(sys.executable, "-c", deaf), ready=False) as engine:
        until(lambda: "deaf" in engine.log, "the command")
        engine.url = engine.log.split(" on ")[1].split(",")[0]
        engine.process.send_signal(signal.SIGTERM)
        until(lambda: "being stopped" in str(engine.ask("GET", "/")), "the first signal's effect")
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait() == 128 + signal.SIGKILL


# ---- bytes -------------------------------------------------------------------------------------

@pytest.mark.parametrize("data, method, done", [
    (whole(b"{}"), b"GET", True), (whole(b"{}")[:-1], b"GET", False),
    (whole(b"{}", b"HEAD"), b"HEAD", True), (whole(b""), b"GET", True),
    (b"HTTP/1.1 204 No Content\r\n\r\n", b"GET", True),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"{}"), b"POST", True),
    (EVENTS + chunk(b"data: 1\n\n") + chunk(b""), b"GET", True),
    (EVENTS + chunk(b"data: 1\n\n"), b"GET", False),
])
def test_an_answer_is_followed_however_it_comes(data, method, done):
    for step in (1, 7, len(data)):
        answer, found = Answer(method), b""
        for at in range(0, len(data), step):
            found += answer.feed(data[at:at + step])
        assert found == data and answer.done is done and answer.begun


def test_an_event_cut_in_two_chunks_is_closed_before_the_error():
    answer = Answer(b"GET")
    answer.feed(EVENTS + chunk(b"data: {") + b"5\r\nabc")
    end = answer.mend("gone")
    assert end.split(b"\r\n")[1].startswith(b"\n\ndata: {\"error\"") and end.endswith(b"0\r\n\r\n")


def test_an_answer_without_a_length_ends_with_its_connection():
    answer = Answer(b"GET")
    assert answer.feed(b"HTTP/1.0 200 OK\r\n\r\nab") == b"HTTP/1.0 200 OK\r\n\r\nab"
    assert not answer.done
    answer.ended()
    assert answer.done and answer.mend("gone") == b""


def test_mending_before_the_head_is_a_refusal():
    answer = Answer(b"GET")
    assert answer.feed(whole(b"{}")[:20]) == b"" and answer.mend("gone") == refusal("gone")


def test_a_request_asks_to_close_and_keeps_the_rest():
    head = b"GET /a HTTP/1.1\r\nconnection : Upgrade\r\nKeep-Alive: 5\r\nA: b\r\n\r\n"
    assert closing(head) == \
        (b"GET", b"GET /a HTTP/1.1\r\nA: b\r\nConnection: close\r\n\r\n")
