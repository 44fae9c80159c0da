# pytest tests/api/test_reply.py
"""Outputs -> chunks and objects: a stream says what the whole object says, stop strings across
tokens, log-probabilities, reasons and usage."""

import itertools
import json
import random

import pytest

from engine.api.body import Ask
from engine.api.reply import Reply, event
from engine.hub import Output
from engine.sample import Sampling

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}}]
CALL = ("<tool_call>find<arg_key>text</arg_key><arg_value>a \"b\" 東</arg_value>"
        "<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>")


def asked(chat_route=True, stops=(), **more):
    return Ask(chat=chat_route, model="m", ids=[1, 2, 3], sampling=Sampling(), stops=tuple(stops),
               stream=True, include_usage=True, **more)


def replied(chat, text, ask, reason="stop", logprobs=False):
    """(Reply, chunks) of a reply's text; ends with a stop id where that is the reason."""
    ids = text if isinstance(text, list) else chat.encode(text)
    outputs = [Output(i, None, -0.25 if logprobs else None, ((5, -0.5),) if logprobs else (), 0)
               for i in ids]
    if reason == "stop":
        outputs.append(Output(chat.eos[0], "stop", -0.25 if logprobs else None, (), 0))
    reply = Reply(ask, chat)
    chunks = [reply.first()] if ask.chat else []
    for output in outputs:
        chunks += reply.push(output)
        if reply.stopped:
            break
    return reply, chunks + reply.end("stop" if reply.stopped else reason)


def joined(chunks, chat_route=True):
    """A stream as the object it adds up to: (content, reasoning, calls, reason, logprobs)."""
    content, reasoning, calls, reasons, logprobs = "", "", [], [], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["usage"] is None and choice["index"] == 0
        reasons.append(choice["finish_reason"])
        if not chat_route:
            content += choice["text"]
            logprobs += (choice["logprobs"] or {"tokens": []})["tokens"]
            continue
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
    assert not any(reasons[:-1]) and reasons[-1]
    return content, reasoning, [tuple(c) for c in calls], reasons[-1], logprobs


def same(reply, chunks, chat_route=True):
    """The stream says what the whole says; returns it."""
    content, reasoning, calls, reason, logprobs = joined(chunks, chat_route)
    whole = reply.whole()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == reason
    assert {c["id"] for c in chunks} == {whole["id"]}
    if chat_route:
        message = choice["message"]
        assert (message["content"] or "") == content
        assert message.get("reasoning_content", "") == reasoning
        assert [(c["id"], c["function"]["name"], c["function"]["arguments"])
                for c in message.get("tool_calls", ())] == calls
        assert (choice["logprobs"] or {"content": []})["content"] == logprobs
    else:
        assert choice["text"] == content
        assert (choice["logprobs"] or {"tokens": []})["tokens"] == logprobs
    return content, reasoning, calls, reason


@pytest.mark.parametrize("chat_route", [True, False])
@pytest.mark.parametrize("text", ["", "a", "Grüße, 東京 🚀.\n\ttab", "e\u0301 👨‍👩‍👧"])
def test_text(chat, text, chat_route):
    reply, chunks = replied(chat, text, asked(chat_route))
    assert same(reply, chunks, chat_route) == (text, "", [], "stop")
    assert reply.usage_chunk()["usage"]["completion_tokens"] == len(chat.encode(text)) + 1
    assert reply.id.startswith("chatcmpl-" if chat_route else "cmpl-")


def test_objects_and_usage(chat):
    reply, chunks = replied(chat, "x y", asked(), "length")
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    whole = reply.whole()
    assert whole["object"] == "chat.completion" and whole["model"] == "m"
    assert whole["choices"][0]["finish_reason"] == "length" and whole["created"] > 1e9
    n = len(chat.encode("x y"))
    assert whole["usage"] == {
        "prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0}}
    assert reply.usage_chunk()["choices"] == [] and reply.usage_chunk()["usage"] == whole["usage"]
    text, _ = replied(chat, "x", asked(False), "length")
    assert text.whole()["object"] == "text_completion"


def test_cached_tokens_are_the_first_outputs(chat):
    reply = Reply(asked(), chat)
    reply.push(Output(70, None, None, (), 42))
    reply.push(Output(71, None, None, (), 0))
    assert reply.usage(50)["prompt_tokens_details"] == {"cached_tokens": 42}


def test_reasoning_and_calls(chat):
    ask = asked(tools=TOOLS, reasoning=True)
    reply, chunks = replied(chat, "Hm, 東.</think>Yes." + CALL + CALL, ask)
    content, reasoning, calls, reason = same(reply, chunks)
    assert (content, reasoning, reason) == ("Yes.", "Hm, 東.", "tool_calls")
    assert [name for _, name, _ in calls] == ["find"] * 2 and calls[0][0] != calls[1][0]
    assert json.loads(calls[1][2]) == {"text": 'a "b" 東', "n": 3}
    assert reply.usage(0)["completion_tokens_details"]["reasoning_tokens"] == len(
        chat.encode("Hm, 東.</think>"))


def test_a_call_alone_has_no_content(chat):
    reply, chunks = replied(chat, CALL, asked(tools=TOOLS))
    same(reply, chunks)
    assert reply.whole()["choices"][0]["message"]["content"] is None


def test_a_call_that_the_length_cuts_says_so(chat):
    reply, chunks = replied(chat, CALL[:60], asked(tools=TOOLS), "length")
    _, _, calls, reason = same(reply, chunks)
    assert reason == "length" and json.loads(calls[0][2])


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chat_route", [True, False])
@pytest.mark.parametrize("text, stops, expected", [
    ("one two three", ["two"], "one "), ("one two three", ["o t"], "one tw"),
    ("one two three", [" "], "one"), ("one", ["one"], ""), ("one", ["ones"], "one"),
    ("aab", ["ab"], "a"), ("aaab", ["aab"], "a"), ("ababac", ["abac"], "ab"),
    ("x東京y", ["京"], "x東"), ("a🚀b", ["🚀"], "a"), ("one two", ["zz", "wo", "tw"], "one "),
    ("tw", ["two"], "tw"), ("a\n\nb", ["\n\n"], "a")])
def test_a_stop_string_ends_the_reply_where_it_begins(chat, text, stops, expected, chat_route):
    reply, chunks = replied(chat, text, asked(chat_route, stops), "length")
    content, _, _, reason = same(reply, chunks, chat_route)
    assert content == expected
    assert reason == ("stop" if expected != text else "length")


def test_random_stop_strings_cut_where_find_says(chat):
    """Streamed in any token split, the text is the beginning before the first stop string."""
    random.seed(8)
    for _ in range(400):
        text = "".join(random.choices("ab東 ", k=random.randrange(0, 14)))
        stop = "".join(random.choices("ab東 ", k=random.randrange(1, 5)))
        ids = list(itertools.chain.from_iterable(
            chat.encode(c) for c in text)) if random.random() < 0.5 else chat.encode(text)
        reply, chunks = replied(chat, ids, asked(stops=[stop]), "length")
        content, _, _, reason = same(reply, chunks)
        at = text.find(stop)
        assert (content, reason) == ((text[:at], "stop") if at >= 0 else (text, "length")), (
            text, stop)


def test_a_stop_string_that_the_last_held_back_bytes_complete(chat):
    """Half a character becomes U+FFFD at the end, and may itself be a stop string."""
    ids = chat.encode("a🎈")[:-1]
    reply, chunks = replied(chat, ids, asked(stops=["\ufffd"]), "length")
    assert same(reply, chunks) == ("a", "", [], "stop")


def test_stop_strings_are_not_looked_for_in_reasoning_or_calls(chat):
    ask = asked(stops=["b"], tools=TOOLS, reasoning=True)
    reply, chunks = replied(chat, "b b</think>a" + CALL, ask)
    content, reasoning, calls, reason = same(reply, chunks)
    assert (content, reasoning, reason) == ("a", "b b", "tool_calls") and len(calls) == 1


def test_held_back_content_comes_before_a_call(chat):
    reply, chunks = replied(chat, "ab" + CALL, asked(stops=["bc"], tools=TOOLS))
    assert same(reply, chunks)[0] == "ab"
    kinds = ["call" if "tool_calls" in c["choices"][0]["delta"] else "text"
             for c in chunks if c["choices"][0]["delta"].get("content")
             or "tool_calls" in c["choices"][0]["delta"]]
    assert kinds == sorted(kinds, reverse=True)


# --- characters and log-probabilities -------------------------------------------------------------


def test_no_chunk_cuts_a_character(chat):
    for chunk in replied(chat, "東京🚀é", asked())[1]:
        assert "\ufffd" not in json.dumps(chunk, ensure_ascii=False)


def test_logprobs_are_of_every_token_of_the_text(chat):
    text = "Grüße, 東京 🚀."
    for chat_route in (True, False):
        reply, chunks = replied(chat, text, asked(chat_route, logprobs=1), logprobs=True)
        same(reply, chunks, chat_route)
        shown = reply.whole()["choices"][0]["logprobs"]
        if chat_route:
            entries = shown["content"]
            assert b"".join(bytes(e["bytes"]) for e in entries).decode() == text
            assert all(e["logprob"] == -0.25 and e["top_logprobs"][0]["logprob"] == -0.5
                       for e in entries)
        else:
            assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(chat.encode(text))
            assert len(shown["top_logprobs"]) == len(shown["tokens"])


def test_minus_infinity_can_be_sent(chat):
    reply = Reply(asked(logprobs=0), chat)
    reply.push(Output(70, None, float("-inf"), (), 0))
    reply.end("length")
    assert json.loads(json.dumps(reply.whole(), allow_nan=False))


def test_events_are_one_line(chat):
    text = "a\nb\r\u2028\u2029c"
    found = event({"x": text})
    assert found.startswith("data: ") and found.endswith("\n\n")
    assert "\n" not in found[:-2] and "\r" not in found
    assert json.loads(found[6:]) == {"x": text} and event("[DONE]") == "data: [DONE]\n\n"
