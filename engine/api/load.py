"""A client that asks for many replies at once and says how long they took: what `bench --serve`
measures with. Of the standard library alone, in a process of its own.

    python -m engine.api.load URL '{"streams": 4, "seconds": 8, "prompt": 128, "tokens": 64, ...}'

Every stream asks again as soon as its reply has ended, with a new random prompt each time. Prints
one JSON object: tokens, seconds, and lists of seconds to a first token and between tokens.
"""

import http.client
import json
import random
import sys
import threading
import time
import urllib.parse


def reply(url, ids, tokens, seed=0):
    """Ask for one reply to prompt ids: (times of its chunks, the last usage object)."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 1.0, "seed": seed, "stream": True,
            "stream_options": {"include_usage": True}, "logprobs": 0}
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise OSError(f"{response.status}: {response.read(300)!r}")
    times, usage, said = [], {}, []
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise OSError(event["error"]["message"])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            names = (choice.get("logprobs") or {}).get("tokens", ())
            said += names
            times += [time.perf_counter() - started] * len(names)
    connection.close()
    return times, usage


def stream(url, until, asked, rng, found, lock):
    """One stream: replies until the time is over."""
    while time.perf_counter() < until:
        ids = [rng.randrange(100, asked["vocab"]) for _ in range(asked["prompt"])]
        times, usage = reply(url, ids, asked["tokens"], rng.randrange(1 << 30))
        with lock:
            found["tokens"] += usage["completion_tokens"]
            found["first"] += times[:1]
            found["gaps"] += [b - a for a, b in zip(times, times[1:])]


def streams(url, asked):
    """`streams` at once for `seconds`: the object that is printed."""
    found, lock = {"tokens": 0, "first": [], "gaps": []}, threading.Lock()
    started = time.perf_counter()
    threads = [threading.Thread(target=stream, args=(
        url, started + asked["seconds"], asked, random.Random(i), found, lock))
        for i in range(asked["streams"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {**found, "seconds": time.perf_counter() - started}


def prefixes(url, asked):
    """Seconds to the first token of a prompt read afresh, and of one that goes on: two lists."""
    rng, cold, warm = random.Random(99), [], []
    for _ in range(asked["runs"]):
        ids = [rng.randrange(100, asked["vocab"]) for _ in range(asked["prompt"])]
        times, _ = reply(url, ids, 1)       # its one token is never fed: the ids go on
        cold += times[:1]
        times, usage = reply(url, ids + [rng.randrange(100, asked["vocab"]) for _ in range(16)], 1)
        warm += times[:1]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids), usage
    return {"cold": cold, "warm": warm}


if __name__ == "__main__":
    what = json.loads(sys.argv[2])
    print(json.dumps((prefixes if "runs" in what else streams)(sys.argv[1], what)))
