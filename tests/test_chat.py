# python -m pytest tests/test_chat.py
"""Text and ids: reference prompts, what a template finds, streaming, damaged folders."""

import json
import random
import shutil

import pytest

from engine.chat import Chat, Stream, prompt_ids
from engine.config import Config
from engine.errors import ModelError, RequestError
from engine.prompt import check_prompt

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def chat(mini):
    return Chat(mini)


@pytest.fixture(scope="module")
def cases(mini):
    return json.loads((mini / "expected.json").read_text())["cases"]


@pytest.fixture
def folder(mini, tmp_path):
    """The embedded model's text files, to be damaged."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(mini / name, tmp_path / name)
    return tmp_path


# --- encoding -----------------------------------------------------------------------------------


def test_every_reference_prompt_encodes_to_its_ids(chat, cases):
    for case in cases:
        assert chat.encode_chat(case["messages"], case["tools"]) == case["prompt_ids"], case["name"]
        assert len(case["prompt_ids"]) == case["n_prompt"]
    assert any(case["tools"] for case in cases) and len(cases) >= 15


def test_every_reference_reply_decodes_to_its_text(chat, cases):
    """greedy_text has the special tokens written out; decode leaves them out."""
    special = [t["content"] for t in json.loads(
        (chat.folder / "tokenizer.json").read_text())["added_tokens"] if t["special"]]
    for case in cases:
        expected = case["greedy_text"]
        for word in special:
            expected = expected.replace(word, "")
        assert chat.decode(case["greedy_ids"]) == expected, case["name"]


def test_text_goes_round(chat):
    for text in ("", "plain", "naïve – 東京 🎈\n\ttab", "\0", "<|user|", "a\r\nb"):
        assert chat.decode(chat.encode(text)) == text


def test_special_tokens_in_text_become_their_ids(chat):
    assert chat.encode("<|user|>")[0] in chat.eos and len(chat.encode("<|user|>")) == 1


def test_the_prompt_of_the_command_line(chat, cases):
    config = Config(prompt="Hello", context=100)
    hello = next(c for c in cases if c["name"] == "hello")["prompt_ids"]
    assert prompt_ids(chat, config, 4096) == hello
    with_system = prompt_ids(chat, Config(prompt="Hello", system="Be short.", context=100), 4096)
    assert with_system == chat.encode_chat([{"role": "system", "content": "Be short."}, *USER])
    assert prompt_ids(chat, Config(prompt_ids=(5, 6), context=100), 4096) == [5, 6]


def test_a_prompt_no_engine_could_take_is_refused_with_the_numbers():
    check_prompt([0, 4095], context=3, vocab=4096)
    with pytest.raises(RequestError, match="3 tokens.* 3") as caught:
        check_prompt([1, 2, 3], context=3, vocab=4096)
    assert "2 tokens" in caught.value.hint
    with pytest.raises(RequestError, match="token 4096 at position 1 .* 4096") as caught:
        check_prompt([0, 4096], context=100, vocab=4096)
    assert "4095" in caught.value.hint


# --- stop ids and sampling defaults -------------------------------------------------------------


def test_stop_ids(chat, folder):
    assert chat.eos == (4079, 4083, 4085)
    generation = folder / "generation_config.json"
    generation.write_text('{"eos_token_id": 7}')
    assert Chat(folder).eos == (7,)
    generation.unlink()
    assert Chat(folder).eos == (4079, 4083, 4085)       # config.json's text_config
    (folder / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert Chat(folder).eos == (3, 4)
    (folder / "config.json").unlink()
    assert Chat(folder).eos == ()


@pytest.mark.parametrize("generation, expected", [
    ({"do_sample": False, "temperature": 1.0, "top_p": 0.95}, (0.0, 1.0)),
    ({"temperature": 1.0, "top_p": 0.95}, (1.0, 0.95)),
    ({"do_sample": True, "temperature": 0.6}, (0.6, 1.0)),
    ({"do_sample": True}, (1.0, 1.0)),
    ({"do_sample": True, "temperature": 0}, (0.0, 1.0)),
    ({}, (0.0, 1.0)),
])
def test_sampling_defaults_are_the_models(folder, generation, expected):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Chat(folder).sampling_defaults == expected


# --- the template's world -----------------------------------------------------------------------


def rendered(folder, template, messages=USER, **kwargs):
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    chat = Chat(folder)
    return chat.decode(chat.encode_chat(messages, **kwargs))


def test_the_template_has_what_the_fields_renderer_gives(folder):
    assert rendered(folder, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}"
                            "{{ i }}{% endfor %}") == "01"
    assert rendered(folder, "  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    tools = [{"name": "é<&>'", "n": [1, None]}]
    plain = '{"name": "é<&>\'", "n": [1, null]}'
    assert rendered(folder, "{{ tools[0] | tojson }}", tools=tools) == plain
    assert rendered(folder, "{{ tools[0] | tojson(ensure_ascii=False) }}", tools=tools) == plain
    assert rendered(folder, "{{ add_generation_prompt }} {{ clear_thinking }}") == "True False"


def test_effort_reaches_the_template_only_where_given(folder):
    template = "{{ reasoning_effort if reasoning_effort is defined else 'none given' }}"
    assert rendered(folder, template) == "none given"
    assert rendered(folder, template, effort="low") == "low"


def test_a_template_may_refuse_messages(folder):
    with pytest.raises(RequestError, match="roles must alternate"):
        rendered(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="cannot render"):
        rendered(folder, "{{ messages[5].content.strip() }}")


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"])
def test_a_template_is_sandboxed(folder, template):
    with pytest.raises(RequestError, match="cannot render"):
        rendered(folder, template)


def test_the_template_may_live_in_tokenizer_config(folder):
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    chat = Chat(folder)
    assert chat.decode(chat.encode_chat(USER)) == "Hello"


# --- the next turn ------------------------------------------------------------------------------


def test_a_reply_becomes_the_next_turns_message(chat):
    prompt = chat.encode_chat(USER)
    ids = chat.encode("Hi there.")
    assert chat.message(prompt, ids) == {"role": "assistant", "content": "Hi there."}


def test_reasoning_is_told_apart_where_the_prompt_opened_it(chat):
    prompt = chat.encode("<|assistant|><think>")
    ids = chat.encode("First, count.</think>Two.")
    assert chat.message(prompt, ids) == {
        "role": "assistant", "content": "Two.", "reasoning_content": "First, count."}
    assert chat.message(prompt, chat.encode("still thin")) == {
        "role": "assistant", "content": "", "reasoning_content": "still thin"}


# --- streaming ----------------------------------------------------------------------------------


def streamed(chat, ids):
    stream = Stream(chat)
    return [stream.push(i) for i in ids] + [stream.finish()]


def test_streamed_text_is_the_decoded_text(chat, cases):
    for case in cases:
        assert "".join(streamed(chat, case["greedy_ids"])) == chat.decode(case["greedy_ids"])


def test_a_character_is_never_cut(chat):
    text = "é東🎈a"
    ids = chat.encode(text)
    assert len(ids) > len(text)     # the vocabulary has no token for them: bytes
    pieces = streamed(chat, ids)
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces)
    assert [p for p in pieces if p] == list(text)


def test_random_bytes_stream_to_what_they_decode_to(chat):
    """Half of the ids are single bytes: cut, overlong, surrogate and stray sequences come up."""
    random.seed(5)
    for _ in range(200):
        ids = [random.randrange(256) if random.random() < 0.6 else random.randrange(4096)
               for _ in range(40)]
        assert "".join(streamed(chat, ids)) == chat.decode(ids)


def test_text_is_not_held_back_longer_than_a_character(chat):
    """After invalid bytes only the last sequence waits."""
    stream = Stream(chat)
    bad = chat.encode("é")[0]
    out = [stream.push(bad) for _ in range(6)]
    assert out == [""] + ["\ufffd"] * 5 and stream.finish() == "\ufffd"


def test_a_token_costs_the_same_however_long_the_text_is(chat):
    stream, longest = Stream(chat), 0
    for token in chat.encode("word and 東京 " * 200):
        stream.push(token)
        longest = max(longest, len(stream._ids))
    assert longest < 16


def test_an_unfinished_character_shows_at_the_end(chat):
    assert streamed(chat, chat.encode("a🎈")[:-1])[-1] == "\ufffd"


# --- folders ------------------------------------------------------------------------------------


def test_without_a_tokenizer_ids_still_work(folder):
    (folder / "tokenizer.json").unlink()
    chat = Chat(folder)
    assert not chat.has_text and chat.eos
    assert prompt_ids(chat, Config(prompt_ids=(5,), context=9), 4096) == [5]
    for use in (chat.require_text, lambda: chat.encode("x"), lambda: chat.decode([1]),
                lambda: chat.encode_chat(USER)):
        with pytest.raises(ModelError, match="tokenizer.json") as caught:
            use()
        assert "--prompt-ids" in caught.value.hint


def test_without_a_template_a_chat_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    chat = Chat(folder)
    assert chat.decode(chat.encode("x")) == "x"
    with pytest.raises(ModelError, match="chat_template.jinja"):
        chat.require_text()


@pytest.mark.parametrize("name, data", [
    ("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff\xfe"), ("tokenizer.json", b""),
    ("generation_config.json", b"{"), ("generation_config.json", b"[1]"),
    ("generation_config.json", b'{"do_sample": true, "temperature": "hot"}'),
    ("generation_config.json", b'{"do_sample": true, "temperature": -1}'),
    ("config.json", b"\xff"), ("chat_template.jinja", b"{% if %}"),
    ("chat_template.jinja", b"\xff"),
])
def test_a_damaged_file_is_named(folder, name, data):
    (folder / name).write_bytes(data)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")) as caught:
        Chat(folder)
    assert caught.value.hint
