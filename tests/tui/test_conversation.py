# python -m pytest tests/tui/test_conversation.py
"""Conversations as data and as files: requests, edits, hostile files, cutting long replies."""

import json
import os

import pytest
from markdown_it import MarkdownIt

from tui.chat import store as stores
from tui.chat.checks import Damaged
from tui.chat.conversation import Conversation, Settings
from tui.chat.cutter import PART, Cutter
from tui.chat.export import figures, markdown
from tui.chat.message import Message, figures_of, file_part
from tui.chat.store import Store
from tui.chat.text import cut, fence, one_line, printable

CALL = {"id": "c1", "type": "function", "function": {"name": "weather",
                                                     "arguments": '{"city": "Bern"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def talk():
    """A conversation with everything in it."""
    found = Conversation.new(Settings("low", 0.5, 0.9, 7, 100, (TOOL,)), "Be brief.")
    found.ask("What is in it?", [("a.txt", file_part("a.txt", "one\n```\ntwo\n"))])
    found.messages += [
        Message("assistant", "Two words.", "It has two lines.", [CALL],
                figures=figures_of("tool_calls", {"prompt_tokens": 9, "completion_tokens": 5},
                                   3.0, 1.0)),
        Message("tool", "sunny", tool_call_id="c1"),
        Message("assistant", "It is sunny.")]
    return found


# ---- requests ----------------------------------------------------------------------------------

def test_a_request_has_what_the_engine_takes_and_nothing_else():
    body = talk().body()
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is in it?\n\nFile a.txt:\n\n````\none\n```\ntwo\n````\n"},
        {"role": "assistant", "content": "Two words.", "reasoning_content": "It has two lines.",
         "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is sunny."}]
    assert {k: v for k, v in body.items() if k != "messages"} == {
        "reasoning_effort": "low", "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 100,
        "tools": [TOOL]}


def test_what_is_not_set_is_not_sent():
    found = Conversation.new()
    found.ask("hi")
    assert found.body() == {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("arguments", ['{"city": "Be', "[1]", '{"x": NaN}', "[" * 100_000])
def test_a_call_that_was_cut_off_is_not_sent(arguments):
    """The engine refuses a conversation with one, for good."""
    broken = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    found = Conversation.new()
    found.ask("hi")
    found.messages.append(Message("assistant", "", "", [broken]))
    assert "tool_calls" not in found.body()["messages"][-1]
    assert found.pending_calls() == []


def test_an_empty_reply_is_not_sent():
    found = Conversation.new()
    found.ask("hi")
    found.messages.append(Message("assistant", figures={"reason": "failed"}))
    assert len(found.body()["messages"]) == 1


def test_lone_surrogates_do_not_reach_a_request_or_a_file(tmp_path):
    found = Conversation.new()
    found.ask("a\ud800b", [("n\udc00", "c\ud83dd")])
    json.dumps(found.body(), ensure_ascii=False).encode()
    Store(tmp_path).save(found)
    assert found.messages[0].text == "a\ufffdbc\ufffdd"


def test_pending_calls_are_those_without_a_result():
    found = Conversation.new()
    found.ask("hi")
    second = {**CALL, "id": "c2"}
    found.messages.append(Message("assistant", tool_calls=[CALL, second]))
    assert found.pending_calls() == [CALL, second]
    found.messages.append(Message("tool", "x", tool_call_id="c1"))
    assert found.pending_calls() == [second]
    found.messages.append(Message("tool", "y", tool_call_id="c2"))
    assert found.pending_calls() == []
    found.ask("other")
    assert found.pending_calls() == []


def test_retry_and_edit_drop_what_they_must():
    found = talk()
    found.drop_answer()
    assert [m.role for m in found.messages] == ["user", "assistant", "tool"]
    question = found.drop_question()
    assert question.typed == "What is in it?" and [n for n, _ in question.files] == ["a.txt"]
    assert found.messages == [] and found.drop_question() is None


def test_a_title_is_the_first_questions_beginning():
    found = Conversation.new()
    found.ask("  Why\nis \x1b[31mthe sky blue? " + "x" * 100)
    assert found.title.startswith("Why is ␛[31mthe sky blue?") and len(found.title) == 40
    found.ask("second")
    assert found.title.startswith("Why")


def test_figures():
    usage = {"prompt_tokens": 210, "completion_tokens": 91,
             "prompt_tokens_details": {"cached_tokens": 200},
             "completion_tokens_details": {"reasoning_tokens": 30}}
    found = figures_of("stop", usage, 2.5, 0.5)
    assert found["rate"] == 45.0        # 90 tokens after the first, in 2 seconds
    assert figures(found) == ("complete · 91 tokens (30 reasoning) · 45.0 tokens/s · "
                              "first token 0.50 s · in all 2.5 s · "
                              "prompt 210 tokens, 200 of them cached")
    assert figures({"reason": "stop", "tokens": 1, "prompt": 1}) == (
        "complete · 1 token · prompt 1 token, ? of them cached")


@pytest.mark.parametrize("usage", [
    {}, {"prompt_tokens": "many", "completion_tokens": -4, "prompt_tokens_details": [1]},
    {"completion_tokens": True, "prompt_tokens": 1.5,
     "prompt_tokens_details": {"cached_tokens": {}}}])
def test_figures_of_a_server_that_lies(usage):
    assert figures_of("stop", usage, 1.0, None) == {"reason": "stop", "seconds": 1.0}


# ---- files -------------------------------------------------------------------------------------

def test_a_file_gives_the_conversation_back(tmp_path):
    store, found = Store(tmp_path / "deep" / "er"), talk()
    store.save(found)
    assert Store(store.path).load(found.id) == found
    (path,) = store.path.iterdir()
    assert path.stat().st_mode & 0o077 == 0 and store.path.stat().st_mode & 0o077 == 0
    assert json.loads(path.read_text())["version"] == 1


def test_entries_are_newest_first(tmp_path):
    store = Store(tmp_path)
    for i, changed in enumerate((5.0, 9.0, 7.0)):
        store.save(Conversation(f"c{i}", f"title {i}", changed=changed))
    assert [e.title for e in store.entries()[0]] == ["title 1", "title 2", "title 0"]
    assert Store(tmp_path / "none").entries() == ([], [])


GOOD = '{"version": 1, "title": "t", "messages": [{"role": "user", "content": "x"}]}'


@pytest.mark.parametrize("data, reason", [
    (b"", "not JSON"), (b"{", "not JSON"), (b"\xff\xfe", "not UTF-8 at byte 0"),
    (b"[" * 200_000, "nested too deeply"), (b"[]", "the file is []"),
    (b'{"version": 2, "messages": []}', "version is 2, this console reads 1"),
    (b'{"version": 1}', "messages is missing"),
    (b'{"version": 1, "messages": [3]}', "messages[0] is 3"),
    (b'{"version": 1, "messages": [{"role": "root"}]}', "messages[0].role is 'root'"),
    (b'{"version": 1, "messages": [{"role": ["user"]}]}', "messages[0].role"),
    (b'{"version": 1, "messages": [{"role": "user", "content": 5}]}', "messages[0].content is 5"),
    (b'{"version": 1, "messages": [{"role": "user", "content": [{}]}]}', "content[0].text"),
    (b'{"version": 1, "messages": [{"role": "assistant", "tool_calls": [{}]}]}', "tool_calls[0]"),
    (b'{"version": 1, "messages": [], "title": null}', "title is missing"),
    (b'{"version": 1, "messages": [], "settings": {"temperature": NaN}}', "temperature is nan"),
    (b'{"version": 1, "messages": [], "settings": {"seed": 1e3}}', "seed is 1000.0"),
    (b'{"version": 1, "messages": [], "settings": {"tools": [{"function": {}}]}}', "tools[0]"),
    (b'{"version": 1, "messages": [], "changed": 1' + b"0" * 5000 + b"}", "not JSON"),
    (GOOD.encode()[:-1], "not JSON"),
])
def test_damaged_files_are_named_and_left_alone(tmp_path, data, reason):
    store = Store(tmp_path)
    (tmp_path / "bad.json").write_bytes(data)
    (tmp_path / "good.json").write_text(GOOD)
    entries, (fault,) = store.entries()
    assert [e.id for e in entries] == ["good"]
    assert fault.startswith("bad.json: ") and reason in fault, fault
    assert len(fault) < 200
    with pytest.raises(Damaged):
        store.load("bad")
    store.save(Conversation("bad", "mine"))
    assert (tmp_path / "bad.json").read_bytes() == data
    store.delete("bad")
    assert (tmp_path / "bad.json").read_bytes() == data


def test_other_kinds_of_files_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to("nowhere")
    entries, faults = Store(tmp_path).entries()
    assert entries == [] and [f.split(":")[0] for f in faults] == [
        "folder.json", "gone.json", "pipe.json"]


def test_a_wrong_figure_does_not_cost_the_reply(tmp_path):
    value = json.loads(GOOD)
    value["messages"].append({"role": "assistant", "content": "y", "figures": {
        "tokens": "many", "rate": float("inf"), "first": -1, "reason": "stop", "x": []}})
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert Store(tmp_path).load("a").messages[1].figures == {"reason": "stop"}


def test_another_consoles_change_is_not_overwritten(tmp_path):
    mine, other = Store(tmp_path), Store(tmp_path)
    found = talk()
    mine.save(found)
    theirs = other.load(found.id)
    theirs.title = "theirs"
    other.save(theirs)
    found.title, before = "mine", found.id
    mine.save(found)
    assert found.id != before
    assert sorted(e.title for e in mine.entries()[0]) == ["mine", "theirs"]
    mine.save(found)
    assert len(list(tmp_path.iterdir())) == 2
    mine.delete(before)
    assert (tmp_path / f"{before}.json").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    store, found = Store(tmp_path), talk()
    store.save(found)
    before = (tmp_path / f"{found.id}.json").read_bytes()

    def full(file):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(stores.os, "fsync", full)
    found.ask("more")
    with pytest.raises(OSError):
        store.save(found)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before]


def test_a_file_is_taken_under_a_new_id(tmp_path):
    (tmp_path / "x.json").write_text(GOOD)
    found = Store(tmp_path / "store").take(tmp_path / "x.json")
    assert found.id != "x" and found.messages[0].text == "x"


def test_where_conversations_are(own_state, monkeypatch):
    assert stores.folder() == own_state / "sparkgrid" / "conversations"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert str(stores.folder()).endswith("/.local/state/sparkgrid/conversations")


def test_markdown_export():
    text = markdown(talk())
    for piece in ("# What is in it?", "## System\n\nBe brief.", "<summary>Reasoning</summary>",
                  "Calls `weather`:\n\n```json\n", "## Tool result\n\n```\nsunny\n```",
                  "first token 1.00 s"):
        assert piece in text
    assert text.index("## You") < text.index("## Reply") < text.index("sunny")


# ---- text --------------------------------------------------------------------------------------

def test_what_a_terminal_would_obey_is_shown_instead():
    assert printable("a\x1b]52;c;x\x07\x9b1m\x7f\r\nb\tc\u2028d") == "a␛]52;c;x␇\ufffd1m␡\nb\tc\nd"


def test_cut_and_line_and_fence():
    assert cut("a\nb\nc", 100, 2) == ("a\nb", 2) and cut("abc", 2, 9) == ("ab", 1)
    assert cut("abc", 5, 5) == ("abc", 0)
    assert one_line("a  b\n c", 9) == "a b c" and one_line("x" * 20, 5) == "xxxx…"
    assert fence("a ```` b") == "`````" and fence("a") == "```"


# ---- long replies in parts ---------------------------------------------------------------------

def pieces(text, size):
    return [text[i:i + size] for i in range(0, len(text), size)]


def fed(text, size=7):
    """The parts of a text that came in pieces; what `feed` told must add up to them."""
    cutter, told = Cutter(), [""]
    for piece in pieces(text, size):
        more, *fresh = cutter.feed(piece)
        told[-1] += more
        told += fresh
    assert told == cutter.parts
    return cutter.parts


TEXTS = {
    "paragraphs": "".join(f"Paragraph {i} has *some* words.\n\n" for i in range(400)),
    "code": "Before\n\n```python\n" + "".join(f"x{i} = f({i})\n\n" for i in range(800)) + "```\n",
    "table": "| a | b |\n|---|---|\n" + "".join(f"| {i} | x |\n" for i in range(900)),
    "one line": "word " * 6000,
    "solid": "x" * 40_000,
    "list": "".join(f"- item {i}\n" for i in range(900)),
    "tildes": "~~~\n" + "```\n\n" * 3000 + "~~~\n\nAfter\n",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [5, 1000, 10 ** 9])
def test_parts_are_small_and_hold_everything(name, size):
    parts = fed(TEXTS[name], size)
    assert len(parts) > 3 and max(map(len, parts)) <= 5 * PART
    if name in ("paragraphs", "one line", "solid", "list"):
        assert "".join(parts) == TEXTS[name]


def test_parts_do_not_depend_on_how_the_text_came():
    for text in TEXTS.values():
        assert fed(text, 3) == fed(text, 10 ** 9)


def test_code_is_cut_between_lines_and_goes_on_as_code():
    parts = fed(TEXTS["code"])
    lines = []
    for part in parts:
        tokens = [t for t in MarkdownIt().parse(part) if t.type == "fence"]
        assert len(tokens) == 1 and tokens[0].info == "python"
        lines += [line for line in tokens[0].content.split("\n") if line]
    assert lines == [f"x{i} = f({i})" for i in range(800)]


def test_a_table_goes_on_under_its_header():
    parts = fed(TEXTS["table"])
    rows = 0
    for part in parts:
        tokens = MarkdownIt("gfm-like").parse(part)
        assert tokens[0].type == "table_open", part[:40]
        rows += sum(t.type == "tr_open" for t in tokens) - 1
    assert rows == 900


def test_a_longer_fence_is_not_closed_by_a_shorter_one():
    text = "````\n" + "```\n" * 2000 + "````\n\n" + "After.\n\n" * 500
    for part in fed(text):
        kinds = {t.type for t in MarkdownIt().parse(part)}
        assert "fence" in kinds or part.replace("After.", "").strip() == ""
