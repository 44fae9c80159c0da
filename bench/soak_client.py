"""What bench/soak.py asks: its cases, one request as a client sends it, and its reply in a form
that can be compared with another. Loopback only.
"""

import contextlib
import http.client
import ipaddress
import json
import random
import urllib.parse
from typing import NamedTuple

PATIENCE = 90.0        # seconds for one reply
MARK = 37               # max_tokens of requests that are left in some state; no case has it
MOST_PROMPT = 4000      # tokens
WORDS = ("river", "stone", "the", "a", "old", "count", "green", "of", "seven", "lamp", "and",
         "house", "why", "small", "tree", "which", "under", "light", "to", "paper", "12", "dog,")
QUESTIONS = ("Define river.", "Count from 3 to 9.", "Spell the word lamp.", "Hello",
             "What is the capital of France?", "Name a colour.")


class Case(NamedTuple):
    """A request. data: its body as JSON, without stream."""

    name: str
    path: str
    data: str


class Answer(NamedTuple):
    """status: HTTP. reply: what is compared, or as much of it as came. cached: prompt tokens that
    were continued. retry: Retry-After in seconds, None where it is missing."""

    status: int
    reply: dict = {}
    cached: int = 0
    retry: float | None = None


# ---- asking ------------------------------------------------------------------------------------

def loopback(url):
    """(host, port) of a URL. SystemExit where it is not this machine's."""
    parts = urllib.parse.urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    with contextlib.suppress(TypeError, ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return host, parts.port or 80
    raise SystemExit(f"{url} is not on this machine: only a loopback address is loaded")


@contextlib.contextmanager
def sent(address, method, path, data=None):
    """A connection on which a request has been sent; closed afterwards, answered or not."""
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def json_of(address, method, path, value=None):
    """(status, JSON) of a short request."""
    with sent(address, method, path, value and json.dumps(value)) as connection:
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def telemetry(address):
    """The newest tree."""
    with sent(address, "GET", "/telemetry") as connection:
        with connection.getresponse() as answer:
            return next(json.loads(line[6:]) for line in answer if line.startswith(b"data: "))


def ask(address, case, stream, leave_after=None):
    """An Answer. leave_after: close the connection after so many chunks with choices.

    OSError, ValueError and http.client.HTTPException where no whole answer came.
    """
    body = json.loads(case.data)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    with sent(address, "POST", case.path, json.dumps(body)) as connection:
        answer = connection.getresponse()
        with answer:
            if answer.status != 200:
                retry = answer.headers["Retry-After"]
                answer.read()
                return Answer(answer.status, retry=retry and float(retry))
            if not stream:
                found = [json.loads(answer.read())]
            else:
                found = events(answer, leave_after)
    usage = found[-1].get("usage") or {}
    return Answer(200, read(found), (usage.get("prompt_tokens_details") or {}).get(
        "cached_tokens", 0))


def events(answer, leave_after):
    """The chunks of a stream."""
    found = []
    for line in answer:
        if line.startswith(b"data: [DONE]"):
            return found
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
            if "error" in found[-1]:
                raise ValueError(f"an error event: {found[-1]['error']['message']}")
            if leave_after and len(found) >= leave_after:
                return found
    raise ValueError(f"the stream ended after {len(found)} chunks, without [DONE]")


def read(objects):
    """A reply from one object, or from the chunks of a stream; both give the same."""
    found = {"text": "", "reasoning": "", "calls": [], "tokens": [], "logprobs": [], "top": [],
             "reason": None, "prompt": None, "completion": None}
    for value in objects:
        for choice in value["choices"]:
            part = choice.get("message") or choice.get("delta") or choice
            found["text"] += part.get("content") or part.get("text") or ""
            found["reasoning"] += part.get("reasoning_content") or ""
            for i, call in enumerate(part.get("tool_calls") or ()):
                if call.get("id"):
                    found["calls"].append([call["function"]["name"], ""])
                found["calls"][call.get("index", i)][1] += call["function"]["arguments"]
            found["reason"] = choice["finish_reason"] or found["reason"]
            chances = choice.get("logprobs") or {}
            for entry in chances.get("content", ()):
                found["tokens"].append(entry["bytes"])
                found["logprobs"].append(entry["logprob"])
                found["top"].append([[t["bytes"], t["logprob"]] for t in entry["top_logprobs"]])
            found["tokens"] += chances.get("tokens", ())
            found["logprobs"] += chances.get("token_logprobs", ())
            found["top"] += chances.get("top_logprobs", ())
        if value.get("usage"):
            found["prompt"] = value["usage"]["prompt_tokens"]
            found["completion"] = value["usage"]["completion_tokens"]
    return found


def difference(found, alone, whole):
    """What differs first, or None. whole: found is not the beginning of a reply only."""
    for key, value in found.items():
        other = alone[key]
        if not whole:
            if key in ("reason", "prompt", "completion", "calls"):
                continue
            other = other[:len(value)]
        if value != other:
            if isinstance(value, list):
                i = next((i for i, (a, b) in enumerate(zip(value, other)) if a != b),
                         min(len(value), len(other)))
                value, other, key = value[i:i + 1], other[i:i + 1], f"{key}[{i}]"
            return f"{key}: {str(value)[:200]!r}, alone {str(other)[:200]!r}"
    return None


# ---- cases -------------------------------------------------------------------------------------

def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def catalogue(seed, vocabulary, fit):
    """([Case], [[a case that ends after its prompt, cases that begin like it, ...]]).

    vocabulary: token ids to draw from. fit: tokens of the longest conversation.
    """
    rng, made = random.Random(f"{seed} cases"), []
    most = min(MOST_PROMPT, fit // 2)

    def add(kind, prompt, max_tokens=None, **more):
        body = {"max_tokens": max_tokens or rng.choice((1, 4, 12, 24, 48)), **prompt, **more}
        if "temperature" not in body:
            body |= rng.choice(({"temperature": 0}, {"temperature": rng.choice((0.5, 1.0)),
                                                     "seed": rng.randrange(1 << 40),
                                                     "top_p": rng.choice((0.8, 1.0))}))
        chat = "messages" in prompt
        chances = rng.choice((None, 0, 3))
        if chances is not None:
            body |= {"logprobs": True, "top_logprobs": chances} if chat else {"logprobs": chances}
        made.append(Case(f"{len(made)} {kind}", "/v1/chat/completions" if chat
                         else "/v1/completions", json.dumps(body, sort_keys=True)))

    def ids(count):
        return [rng.choice(vocabulary) for _ in range(count)]
    for size in (1, 1, 3, 63, 64, 65, 127, 128, 129, 200, most // 8, most // 4, most // 2, most):
        add(f"ids {size}", {"prompt": ids(size)})
    for words in (1, 5, 20, 60, most // 12, most // 4):
        add(f"text {words} words", {"prompt": text(rng, words)})
    for stop in ("e", ["the", " a"], ["\n", ".", " of"]):       # leases much, ends soon
        add(f"stop {stop}", {"prompt": text(rng, most // 6)}, fit // 3, stop=stop)
        add(f"long reply, stop {stop}", {"prompt": text(rng, 9)}, 48, stop=stop)
    system = {"role": "system", "content": text(rng, min(150, most // 6))}
    for question in (*QUESTIONS, text(rng, 30)):
        add("chat", {"messages": [system, {"role": "user", "content": question}]})
    groups = []
    for _ in range(2):          # what ends after one token is kept as the prompt, no more
        beginning, first = ids(min(300, most // 3)), len(made)
        add("beginning", {"prompt": beginning}, 1, temperature=0)
        for size in (1, 17, 90):
            add(f"beginning and {size} more", {"prompt": beginning + ids(size)})
        for share in (1, len(beginning) // 2):      # not to be continued from it
            other = [vocabulary[vocabulary.index(beginning[-share]) - 1], *ids(share - 1)]
            add(f"beginning but for the last {share}, and more",
                {"prompt": beginning[:-share] + other + ids(20)})
        groups.append(made[first:])
    return made, groups
