"""Malformed requests against a running engine: it must answer all of them with 4xx, or not at all
where they are no HTTP, and be well afterwards.

    python bench/fuzz.py http://127.0.0.1:8114 --requests 10000 --seed 1

The requests are a function of the seed. Loopback only. Prints counts of statuses; each fault with
its number, so that `--first N --requests 1` sends that one again. Ends with 1 where a request got
5xx or no answer in time, where /health said no, or where a request was still running afterwards.
"""

import argparse
import collections
import copy
import http.client
import ipaddress
import json
import random
import socket
import sys
import time
import urllib.parse

ANSWER_SECONDS = 60.0       # for one answer
CHECK_EVERY = 100           # requests between two looks at /health
REST_SECONDS = 20.0         # until nothing may be running any more

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}}
CALL = {"id": "call_1", "type": "function",
        "function": {"name": "find", "arguments": "{\"text\": \"x\"}"}}
BODIES = (
    ("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 1}),
    ("/v1/chat/completions", {
        "messages": [{"role": "system", "content": "Be short."}, HELLO,
                     {"role": "assistant", "content": None, "tool_calls": [CALL]},
                     {"role": "tool", "tool_call_id": "call_1", "content": "y"}],
        "tools": [TOOL], "tool_choice": "auto", "max_tokens": 1, "stream": True,
        "stream_options": {"include_usage": True}, "stop": ["a"], "temperature": 0.5, "top_p": 0.9,
        "seed": 1, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low", "n": 1}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "logprobs": 1, "stop": "x"}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1, "stream": True}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/tokenize", {"messages": [HELLO], "tools": [TOOL]}))
VALUES = (
    None, True, False, 0, 1, -1, 2 ** 31, 2 ** 63, -2 ** 63, 10 ** 300, 10 ** 4000, 0.5, -0.5,
    1e308, -1e308, 1e-320, "", "x", "\0", "\ud800", "\udfff\ud800", "\U0010ffff", "x" * 5000,
    "東" * 300, "<|user|>", "<|assistant|><think>", "</think><tool_call>", "[gMASK]<sop>",
    "\ufdd01\ufdd0",
    "{{ 7 * 7 }}", "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}",
    "../../etc/passwd", "file:///etc/passwd", "null", "NaN", [], {}, [[]], [{}], [None], [1, "x"],
    {"x": None}, {"": ""}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"\ud800": 1}, {"role": "root"}, [2 ** 70], [-1], [4096], ["a"] * 50)
RAW = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-", b"01", b"\xff", b"\"\xed\xa0\x80\"",
       b"'x'", b"[" * 5000, b"{\"a\":" * 5000, b"[" * 500 + b"]" * 500, b"\"\\u12\"", b"\"\n\"",
       b"tru", b"1" * 6000, b"/**/1", b"\"\\ud800\"", b"\xef\xbb\xbf1", b"\0")
METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "BREW", "post", "\0",
           "G" * 99)
PATHS = ("/", "//", "/v1", "/v1/", "/v1/models/", "/v1/models/x/y", "/v1/models/%00",
         "/v1/models/%ff", "/v1/chat/completions/", "/v1/chat/completions?x={{1}}", "/..",
         "/../../etc/passwd",
         "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "*", "x", "http://[::1",
         "http://other/v1/models", "/" + "a" * 9000, "/\xff", "/;/", "/#", "/ x", "")
HEADERS = ("Host: ", "Host: [::1", "Host: other.example", "Content-Length: x", "Content-Length: -1",
           "Content-Length: 99999999999999999999", "Content-Length: 3", "Transfer-Encoding: gzip",
           "Transfer-Encoding: chunked", "Content-Type: text/plain", "Content-Type: \xff",
           "Content-Encoding: gzip", "Expect: 100-continue", "Upgrade: websocket", "Upgrade: h2c",
           "Connection: upgrade", "Authorization: \0", "Authorization: Bearer " + "x" * 9000,
           "Cookie: " + "y" * 30000, "A" * 70000 + ": 1", ": 1", "x", " folded: 1", "A: b\r\n c",
           "Accept: " + "/" * 999, "Range: bytes=0-", "X-Forwarded-For: ::", "TE: trailers")


class Request:
    """Bytes to send. http: an answer is due. leave: close without waiting for one."""

    def __init__(self, kind, data, http=True, leave=False):
        self.kind, self.data, self.http, self.leave = kind, data, http, leave


# ---- making them -------------------------------------------------------------------------------

def made(seed, number):
    """Request `number` of a seed."""
    rng = random.Random(f"{seed} {number}")
    path, body = rng.choice(BODIES)
    return rng.choices((_field, _raw, _bytes, _head, _noise, _cut),
                       (50, 20, 15, 20, 5, 5))[0](rng, path, json.loads(json.dumps(body)))


def _post(path, body, headers=()):
    """A POST as a client would send it; headers: more of them."""
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close",
            "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def _spots(value, found):
    """Every place of a JSON value that something else can be put at."""
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ())
    for key, inner in items:
        found.append((value, key))
        _spots(inner, found)
    return found


def _field(rng, path, body):
    """Some values of a body exchanged, left out or added. The reply's length stays bounded."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        where, key = rng.choice(_spots(body, []) or [(body, None)])
        action, value = rng.random(), copy.deepcopy(rng.choice(VALUES))
        bounded = where is body and key == "max_tokens"
        if key is None:         # all of it is gone
            body["model"] = value
        elif action < 0.1 and not bounded:
            del where[key]
        elif action < 0.2 and isinstance(where, dict):
            where[rng.choice(("x", "\ud800", "echo", "top_k", "functions", "n", "best_of", "suffix",
                              "logit_bias", "response_format", "model", "draft", key))] = value
        elif not bounded or value not in (None, 2 ** 31):
            where[key] = value
    if "tokenize" not in path and body.get("max_tokens") is None:
        body["max_tokens"] = 1
    return Request("field", _post(path, json.dumps(body).encode()))


def _raw(rng, path, body):
    """Text that JSON does not have, in the place of a value, or around the body."""
    where, key = rng.choice(_spots(body, []))
    if where is body and key == "max_tokens":
        return Request("raw", _post(path, rng.choice(RAW)))
    where[key] = "@@"
    return Request("raw", _post(path, json.dumps(body).encode().replace(b'"@@"', rng.choice(RAW))))


def _bytes(rng, path, body):
    """A body with bytes changed, cut or of no meaning at all."""
    data = bytearray(json.dumps(body, ensure_ascii=False).encode())
    if rng.random() < 0.2:
        data = bytearray(rng.randbytes(rng.randrange(2000)))
    for _ in range(rng.choice((0, 1, 3, 20))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return Request("bytes", _post(path, bytes(data[:rng.randrange(len(data) + 1)])))


def _head(rng, path, body):
    """A wrong method, path, version or header before a good body; it may end the connection."""
    data = json.dumps(body).encode()
    method = rng.choice(METHODS) if rng.random() < 0.4 else "POST"
    path = rng.choice(PATHS) if rng.random() < 0.4 else path
    headers = rng.sample(HEADERS, rng.choice((0, 1, 1, 2, 4)))
    lines = ["Host: localhost", "Connection: close", "Content-Type: application/json",
             f"Content-Length: {len(data)}", *headers]
    rng.shuffle(lines)
    version = rng.choice(("1.1", "1.1", "1.1", "1.0", "0.9", "2", "x"))
    lines.insert(0, f"{method} {path} HTTP/{version}")
    return Request("head", "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data, http=False)


def _noise(rng, path, body):
    """No HTTP at all."""
    data = rng.choice((rng.randbytes(rng.randrange(1, 3000)), b"\r\n" * 50, b"\x16\x03\x01\x02\0",
                       b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET", b"\0" * 70000))
    return Request("noise", data, http=False)


def _cut(rng, path, body):
    """A client that leaves: in its request, or before its answer."""
    data = _post(path, json.dumps(body).encode())
    return Request("cut", data[:rng.randrange(1, len(data) + 1)], http=False, leave=True)


# ---- sending them ------------------------------------------------------------------------------

def exchange(address, request):
    """Send a request: its status, None where the connection ended without one. TimeoutError."""
    with socket.create_connection(address, ANSWER_SECONDS) as s:
        try:
            s.sendall(request.data)
            if request.leave:
                return None
            if not request.http:        # it may wait for more
                s.shutdown(socket.SHUT_WR)
            found = b""
            while piece := s.recv(1 << 16):
                found = (found + piece)[:4096]
        except (ConnectionResetError, BrokenPipeError):
            pass
    if found.startswith(b"HTTP/1.1 100 "):      # an interim answer
        found = found.partition(b"\r\n\r\n")[2]
    words = found.split(None, 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else None


def fuzz(url, requests, seed, first=0, say=print):
    """Send requests first .. first + requests - 1 of a seed: (Counter of statuses, [fault])."""
    address = _loopback(url)
    counts, faults = collections.Counter(), []
    for number in range(first, first + requests):
        request = made(seed, number)
        try:
            status = exchange(address, request)
        except OSError as e:
            status = None
            faults.append(f"request {number} ({request.kind}): {type(e).__name__} {e}")
            if isinstance(e, ConnectionRefusedError):
                return counts, faults
        counts[status] += 1
        if status is None and request.http or status is not None and status >= 500:
            faults.append(f"request {number} ({request.kind}): {status}: {request.data[:3000]!r}")
        if (number - first) % CHECK_EVERY == CHECK_EVERY - 1:
            faults += _health(address, number)
            say(f"{number + 1}: {dict(sorted(counts.items(), key=str))}, faults {len(faults)}")
    faults += _health(address, "all")
    return counts, faults + _resting(address)


def _loopback(url):
    """(host, port) of a URL. SystemExit where it is not this machine's."""
    parts = urllib.parse.urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    if host is None or not ipaddress.ip_address(host).is_loopback:
        raise SystemExit(f"{url} is not on this machine: only a loopback address is fuzzed")
    return host, parts.port or 80


def _health(address, number):
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        text = answer.read()[:300]
        return [] if answer.status == 200 else [f"after {number}: /health {answer.status} {text!r}"]
    except (OSError, http.client.HTTPException) as e:
        return [f"after {number}: /health {type(e).__name__} {e}"]
    finally:
        connection.close()


def _resting(address):
    """[] once no request is running or waiting any more."""
    end, running = time.monotonic() + REST_SECONDS, None
    while time.monotonic() < end:
        connection = http.client.HTTPConnection(*address, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", "/telemetry")
            answer = connection.getresponse()
            line = next(line for line in answer if line.startswith(b"data: "))
        except (OSError, http.client.HTTPException, StopIteration) as e:
            return [f"/telemetry afterwards: {type(e).__name__} {e}"]
        finally:
            connection.close()
        running = json.loads(line[6:])["requests"]
        if not running:
            return []
        time.sleep(0.2)
    return [f"still running afterwards: {running}"]


def main(argv):
    parser = argparse.ArgumentParser(description="malformed requests against a running engine")
    parser.add_argument("url", help="http://127.0.0.1:PORT")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    given = parser.parse_args(argv)
    started = time.monotonic()
    counts, faults = fuzz(given.url, given.requests, given.seed, given.first)
    for fault in faults:
        print(fault)
    print(f"{given.requests} requests in {time.monotonic() - started:.0f} s, seed {given.seed}: "
          f"{dict(sorted(counts.items(), key=str))}, faults: {len(faults)}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
