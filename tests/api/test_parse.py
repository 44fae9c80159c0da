# pytest tests/api/test_parse.py
"""Reasoning, content and tool calls of a reply, token by token."""

import json
import random

import pytest

from engine.api.parse import Delta, Parser
from engine.chat import Chat
from engine.config import EMBEDDED

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}, "limit": {"type": "integer"},
                                     "where": {"type": "object"}}}}},
         {"type": "function", "function": {"name": "now", "parameters": {}}}]


@pytest.fixture(scope="module")
def chat():
    return Chat(EMBEDDED)


def parsed(chat, text, **how):
    """(reasoning, content, [(name, arguments text)], deltas) of a reply's text."""
    parser = Parser(chat, TOOLS, **how)
    deltas = [d for token in chat.encode(text) for d in parser.push(token)] + parser.finish()
    calls = {}
    for d in deltas:
        if d.kind == "call":
            assert d.index == len(calls)
            calls[d.index] = [d.text, ""]
        elif d.kind == "arguments":
            calls[d.index][1] += d.text
    whole = {kind: "".join(d.text for d in deltas if d.kind == kind)
             for kind in ("reasoning", "content")}
    assert parser.calls == len(calls)
    return whole["reasoning"], whole["content"], list(map(tuple, calls.values())), deltas


def call(name, *pairs):
    return (f"<tool_call>{name}" + "".join(
        f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs) + "</tool_call>")


def test_content_alone(chat):
    assert parsed(chat, "Grüße, 東京 🚀.")[:3] == ("", "Grüße, 東京 🚀.", [])


def test_reasoning_then_content(chat):
    assert parsed(chat, "I think so.</think>Yes.", reasoning=True)[:3] == (
        "I think so.", "Yes.", [])


def test_reasoning_that_never_ends(chat):
    assert parsed(chat, "I think", reasoning=True)[:3] == ("I think", "", [])


@pytest.mark.parametrize("value, expected", [
    ("7", 7), ("1.5", 1.5), ("true", True), ("null", None), ("[1, 2]", [1, 2]),
    ('{"a": {"b": "c"}}', {"a": {"b": "c"}}), ("seven", "seven"), ("", ""), ("NaN", "NaN"),
    ("{broken", "{broken"), ('"quoted"', "quoted"), ("[" * 3000, "[" * 3000)])
def test_other_values_are_json_or_else_strings(chat, value, expected):
    _, _, calls, _ = parsed(chat, call("find", ("limit", value)))
    assert [(n, json.loads(a)) for n, a in calls] == [("find", {"limit": expected})]


@pytest.mark.parametrize("value", ["42", "true", 'a "quoted"\n\\ line', "", " padded ", "東京 🚀"])
def test_strings_stay_text(chat, value):
    _, _, calls, _ = parsed(chat, call("find", ("text", value)))
    assert json.loads(calls[0][1]) == {"text": value}


def test_a_string_goes_out_as_it_comes(chat):
    parser = Parser(chat, TOOLS)
    ids = chat.encode(call("find", ("text", "one two three four")))
    close = ids.index(chat.token_id("</arg_value>"))
    before = "".join(d.text for token in ids[:close] for d in parser.push(token))
    assert before.startswith('find{"text": "one two th')


def test_no_arguments(chat):
    for text in ("<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>", "<tool_call>now"):
        assert parsed(chat, text)[2] == [("now", "{}")]


def test_blanks_of_a_template(chat):
    text = ("<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n"
            "<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>")
    assert parsed(chat, text)[2] == [("find", '{"text": "x", "limit": 3}')]


def test_several_calls_after_content(chat):
    text = "Let me look." + call("find", ("limit", 1)) + "\n" + call("now")
    reasoning, content, calls, _ = parsed(chat, text)
    assert (reasoning, content.strip()) == ("", "Let me look.")
    assert calls == [("find", '{"limit": 1}'), ("now", "{}")]


def test_without_tools_a_call_is_text(chat):
    text = "Look: " + call("find", ("text", "a")) + "!"
    for tools in (None, TOOLS):
        parser = Parser(chat, tools, reasoning=True)
        deltas = [d for t in chat.encode("Hm.</think>" + text) for d in parser.push(t)]
        deltas += parser.finish()
        said = "".join(d.text for d in deltas if d.kind == "content")
        assert said == (text if tools is None else "Look: !")
        assert parser.calls == (tools is not None)


def test_a_call_inside_reasoning(chat):
    text = "I should look." + call("now") + "Done."
    assert parsed(chat, text, reasoning=True)[:3] == ("I should look.", "Done.", [("now", "{}")])


@pytest.mark.parametrize("text, expected", [
    ("<tool_call>find<arg_key>limit</arg_key><arg_value>3", {"limit": 3}),
    ("<tool_call>find<arg_key>text</arg_key><arg_value>half a", {"text": "half a"}),
    ("<tool_call>find<arg_key>text</arg_key><arg_value>", {"text": ""}),
    ("<tool_call>find<arg_key>text</arg_key>", {}),
    ("<tool_call>find<arg_key>te", {}),
    ("<tool_call>find", {})])
def test_a_call_that_the_end_cuts(chat, text, expected):
    _, content, calls, _ = parsed(chat, text)
    assert content == "" and [(n, json.loads(a)) for n, a in calls] == [("find", expected)]


def test_a_call_that_the_next_one_cuts(chat):
    text = "<tool_call>find<arg_key>text</arg_key><arg_value>a<tool_call>now</tool_call>"
    assert parsed(chat, text)[2] == [("find", '{"text": "a"}'), ("now", "{}")]


def test_a_call_without_a_name_is_content(chat):
    text = "<tool_call><arg_key>text</arg_key><arg_value>x</arg_value></tool_call>"
    _, content, calls, _ = parsed(chat, text)
    assert calls == [] and content.startswith("<tool_call>")


def test_marks_where_they_mean_nothing(chat):
    text = "a</tool_call>b</think>c</arg_value>d<arg_key>e"
    assert parsed(chat, text)[:3] == ("", "abcde", [])


@pytest.mark.parametrize("opened", ["", "fi"])
def test_a_call_that_the_prompt_opened(chat, opened):
    rest = "find"[len(opened):] + "<arg_key>limit</arg_key><arg_value>2</arg_value></tool_call>"
    assert parsed(chat, rest, call=opened)[2] == [("find", '{"limit": 2}')]


def test_text_that_looks_like_a_mark_is_text(chat):
    """Marks are ids of their own; their letters, token by token, are not."""
    letters = [i for c in "</think><tool_call>" for i in chat.encode(c)]
    parser = Parser(chat, TOOLS)
    deltas = [d for i in letters for d in parser.push(i)] + parser.finish()
    assert {d.kind for d in deltas} == {"content"}
    assert "".join(d.text for d in deltas) == "</think><tool_call>"


def test_any_tokens_make_json_and_lose_no_text(chat):
    """Random marks and words: every call's arguments are a JSON object, indices count up."""
    rng = random.Random(5)
    words = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
             "<arg_value>", "</arg_value>", "find", "text", "limit", '"', "\\", "7", "🚀", "\n"]
    for _ in range(1000):
        text = "".join(rng.choices(words, k=rng.randrange(1, 14)))
        _, _, calls, deltas = parsed(chat, text, reasoning=rng.random() < 0.5)
        for name, arguments in calls:
            assert name and isinstance(json.loads(arguments), dict), text
        assert all(isinstance(d, Delta) and d.text is not None for d in deltas)
