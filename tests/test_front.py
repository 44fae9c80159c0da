# python -m pytest tests/test_front.py
"""The front's drivers, one reply and line by line, against a scripted engine."""

import io
import json
import re
import time
import types

import pytest

from engine.chat import Chat
from engine.config import Config
from engine.errors import (BROKEN_PIPE, INTERRUPTED, EngineError, FaultError, RequestError,
                           ResidueMismatch, UsageError, WorldError)
from engine.progress import Progress
from engine.prompt import check_prompt
from engine.serve import Desk, Interrupt, line_chat, one_reply, sampling_for

STOP = 4083


class ScriptedEngine:
    """Engine's face for rank 0: the i-th submitted prompt gets the i-th scripted token list.

    Two rounds without events stand for the prefill. before_round: called with the round's number.
    """

    def __init__(self, *scripts, refuse=(), before_round=None, context=1 << 20):
        self.shape = types.SimpleNamespace(vocab=4096)
        self.scripts, self.refuse, self.before_round = list(scripts), refuse, before_round
        self.context = context
        self.prompts, self.samplings, self.cancelled = [], [], []
        self._live, self._rounds = None, 0

    def submit(self, prompt, sampling):
        if len(self.prompts) in self.refuse:
            self.prompts.append(None)
            self.scripts.insert(len(self.prompts) - 1, None)
            raise RequestError("does not fit: 9 pages of 3", "raise --pages")
        assert self._live is None
        check_prompt(prompt, self.context, self.shape.vocab)
        script = self.scripts[len(self.prompts)]
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        self._live = [None, None, *script]
        return len(self.prompts) - 1

    def cancel(self, request):
        assert request == len(self.prompts) - 1
        self.cancelled.append(request)
        self._live = None

    @property
    def busy(self):
        return self._live is not None

    def step(self):
        self._rounds += 1
        if self.before_round:
            self.before_round(self._rounds)
        token = self._live.pop(0)
        if token is None:
            return []
        done = "stop" if token in self.samplings[-1].stop_ids else None if self._live else "length"
        if done:
            self._live = None
        return [types.SimpleNamespace(id=len(self.prompts) - 1, token=token, finish_reason=done)]


@pytest.fixture(scope="module")
def chat(mini):
    return Chat(mini)


@pytest.fixture(scope="module")
def cases(mini):
    return {c["name"]: c for c in json.loads((mini / "expected.json").read_text())["cases"]}


class Pieces(io.BytesIO):
    """A binary output that remembers each flushed piece."""

    def __init__(self):
        super().__init__()
        self.flushed = []

    def flush(self):
        done = sum(map(len, self.flushed))
        if self.tell() > done:
            self.flushed.append(self.getvalue()[done:])


def make_desk(stdin=b"", interactive=False, out=None):
    return Desk(io.BytesIO(stdin), out or Pieces(), io.StringIO(), interactive, Progress(False),
                Interrupt(), {"load": 1.5, "compile": 0.25})


CONFIG = Config(context=32768)


# --- one reply ----------------------------------------------------------------------------------


def test_text_streams_token_by_token(chat, cases):
    case, desk = cases["capital"], make_desk()
    engine = ScriptedEngine(case["greedy_ids"])
    assert one_reply(engine, chat, CONFIG, case["prompt_ids"], desk) == 0
    assert desk.out.getvalue() == b"The capital of France is Paris.\n"
    assert len(desk.out.flushed) == len(case["greedy_ids"])     # the stop id shows as the newline
    assert engine.prompts == [case["prompt_ids"]] and desk.err.getvalue() == ""


def test_no_piece_cuts_a_character(chat):
    desk = make_desk()
    assert one_reply(ScriptedEngine([*chat.encode("é🎈"), STOP]), chat, CONFIG, [1], desk) == 0
    assert desk.out.flushed == ["é".encode(), "🎈".encode(), b"\n"]


def test_json_is_one_line_with_everything(chat, cases):
    case, desk = cases["tool_call"], make_desk()
    config, engine = Config(context=32768, json=True), ScriptedEngine(case["greedy_ids"])
    assert one_reply(engine, chat, config, case["prompt_ids"], desk) == 0
    assert len(desk.out.flushed) == 1 and desk.out.getvalue().count(b"\n") == 1
    got = json.loads(desk.out.getvalue())
    assert got["ids"] == case["greedy_ids"] and got["finish_reason"] == "stop"
    assert got["text"] == "calculator\nexpression\n417 + 268\n"
    assert got["prompt_tokens"] == case["n_prompt"]
    assert list(got["seconds"]) == ["load", "compile", "prefill", "decode"]
    assert got["seconds"]["load"] == 1.5 and all(s >= 0 for s in got["seconds"].values())


def test_json_seconds_tell_prefill_from_decode(chat):
    desk = make_desk()
    engine = ScriptedEngine([5, 6, STOP], before_round=lambda n: time.sleep((0.08, 0.08, 0, 0.03,
                                                                             0.03)[n - 1]))
    one_reply(engine, chat, Config(context=99, json=True), [1], desk)
    seconds = json.loads(desk.out.getvalue())["seconds"]
    assert 0.16 <= seconds["prefill"] < 0.4 and 0.06 <= seconds["decode"] < 0.16


def test_print_ids(chat, cases):
    case, desk = cases["hello"], make_desk()
    config = Config(context=32768, print_ids=True)
    one_reply(ScriptedEngine(case["greedy_ids"]), chat, config, case["prompt_ids"], desk)
    assert desk.out.getvalue().decode() == ",".join(map(str, case["greedy_ids"])) + "\n"


def test_a_reply_that_ends_at_its_length(chat):
    desk = make_desk()
    config = Config(context=99, json=True, max_tokens=2)
    engine = ScriptedEngine([5, 6])
    one_reply(engine, chat, config, [1], desk)
    got = json.loads(desk.out.getvalue())
    assert (got["ids"], got["finish_reason"]) == ([5, 6], "length")
    assert got["text"] == chat.decode([5, 6]) and desk.err.getvalue() == ""
    assert engine.samplings[0].max_tokens == 2
    full = make_desk()
    one_reply(ScriptedEngine([5, 6]), chat, Config(context=99), [1], full)
    assert "context of 99 tokens" in full.err.getvalue()


def test_without_a_tokenizer_ids_are_printed_and_said_so(mini, tmp_path):
    (tmp_path / "config.json").write_bytes((mini / "config.json").read_bytes())
    bare, desk = Chat(tmp_path), make_desk()
    one_reply(ScriptedEngine([5, STOP]), bare, Config(context=99, model="m"), [1], desk)
    assert desk.out.getvalue() == b"5,4083\n" and "no tokenizer.json" in desk.err.getvalue()
    desk = make_desk()
    one_reply(ScriptedEngine([5, STOP]), bare, Config(context=99, json=True), [1], desk)
    got = json.loads(desk.out.getvalue())
    assert got["text"] is None and got["ids"] == [5, STOP] and desk.err.getvalue() == ""


def test_a_stop_id_that_is_an_ordinary_token_is_no_text(mini, tmp_path):
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((mini / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 40}')
    desk, plain = make_desk(), Chat(tmp_path)
    assert plain.decode([40]) == "I"
    one_reply(ScriptedEngine([5, 40]), plain, Config(context=99), [1], desk)
    assert desk.out.getvalue().decode() == plain.decode([5]) + "\n"


def test_a_refused_prompt_leaves_nothing_on_standard_output(chat):
    desk = make_desk()
    with pytest.raises(RequestError, match="9 pages"):
        one_reply(ScriptedEngine(refuse=[0]), chat, CONFIG, [1], desk)
    assert desk.out.getvalue() == b""


def test_a_fault_goes_through(chat):
    def fault(number):
        raise FaultError("NaN")
    with pytest.raises(FaultError):
        one_reply(ScriptedEngine([5], before_round=fault), chat, CONFIG, [1], make_desk())


def test_ctrl_c_cancels_between_rounds(chat):
    desk = make_desk()

    def press(number):
        if number == 4:
            desk.interrupt(2, None)
    engine = ScriptedEngine([5, 6, 7, 8], before_round=press)
    assert one_reply(engine, chat, CONFIG, [1], desk) == INTERRUPTED
    assert engine.cancelled == [0] and desk.out.getvalue().decode() == chat.decode([5, 6]) + "\n"


def test_a_reader_that_left_cancels(chat):
    class Gone(Pieces):
        def flush(self):
            raise error
    for error, words in ((BrokenPipeError(), ""), (OSError(28, "No space left"), "No space left")):
        for drive in (lambda *a: one_reply(*a[:3], [1], a[3]), line_chat):
            engine, desk = ScriptedEngine([5, 6]), make_desk(b"a\nb\n", out=Gone())
            assert drive(engine, chat, CONFIG, desk) == BROKEN_PIPE
            assert engine.cancelled == [0] and words in desk.err.getvalue()
            assert bool(desk.err.getvalue()) == bool(words)


@pytest.mark.parametrize("options, model, expected", [
    ({}, (0.0, 1.0), (0.0, 1.0)),
    ({}, (1.0, 0.95), (1.0, 0.95)),
    ({"temperature": 0.5}, (1.0, 0.95), (0.5, 0.95)),
    ({"temperature": 0.0}, (1.0, 0.95), (0.0, 0.95)),
    ({"temperature": 0.7, "top_p": 0.0}, (0.0, 1.0), (0.7, 0.0)),
])
def test_the_command_line_goes_before_the_models_own_sampling(options, model, expected):
    stub = types.SimpleNamespace(sampling_defaults=model, eos=(1, 2))
    got = sampling_for(stub, Config(context=100, seed=9, **options), prompt_tokens=60)
    assert (got.temperature, got.top_p) == expected
    assert (got.seed, got.stop_ids, got.max_tokens) == (9, (1, 2), 40)


# --- line by line -------------------------------------------------------------------------------


def test_a_pipe_gets_a_reply_a_line_and_end_of_input_ends_it(chat, cases):
    first, second = cases["hello"], cases["who"]
    desk = make_desk(b"Hello\n\n  \r\nWho are you?")
    engine = ScriptedEngine(first["greedy_ids"], second["greedy_ids"])
    assert line_chat(engine, chat, CONFIG, desk) == 0
    assert desk.out.getvalue().decode().splitlines() == [
        chat.decode(first["greedy_ids"]), chat.decode(second["greedy_ids"])]
    assert desk.err.getvalue() == "" and len(engine.prompts) == 2


def test_the_second_turn_sees_the_first(chat, cases):
    case = cases["recall_turns"]
    turns = [m["content"] for m in case["messages"]]
    replies = [[*chat.encode(text), STOP] for text in turns[1::2]] + [case["greedy_ids"]]
    desk = make_desk("\n".join(turns[::2]).encode() + b"\n")
    engine = ScriptedEngine(*replies)
    assert line_chat(engine, chat, CONFIG, desk) == 0
    assert engine.prompts[-1] == case["prompt_ids"]
    for earlier, later in zip(engine.prompts, engine.prompts[1:]):
        assert later[:len(earlier)] == earlier      # each prompt extends the last one


def test_the_system_message_leads_every_conversation(chat):
    desk = make_desk(b"a\n/new\nb\n", interactive=True)
    engine = ScriptedEngine([5, STOP], [6, STOP])
    line_chat(engine, chat, Config(context=999, system="Be short."), desk)
    system = {"role": "system", "content": "Be short."}
    assert engine.prompts == [chat.encode_chat([system, {"role": "user", "content": text}])
                              for text in "ab"]


def test_a_line_that_is_no_utf8_costs_itself_only(chat):
    desk = make_desk(b"ok\n\xffbad\n\xc3\nfine\n")
    engine = ScriptedEngine([5, STOP], [6, STOP])
    assert line_chat(engine, chat, CONFIG, desk) == 0
    lines = desk.err.getvalue().splitlines()
    assert "line 2" in lines[0] and "0xff" in lines[0] and "line 3" in lines[2] and len(lines) == 4
    assert len(engine.prompts) == 2


def test_a_refused_line_is_forgotten_and_the_chat_goes_on(chat):
    desk = make_desk(b"a\nb\nc\n")
    engine = ScriptedEngine([5, STOP], [7, STOP], refuse=[1])
    assert line_chat(engine, chat, CONFIG, desk) == 0
    assert "9 pages" in desk.err.getvalue() and "raise --pages" in desk.err.getvalue()
    assert engine.prompts[2] == chat.encode_chat(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": chat.decode([5])},
         {"role": "user", "content": "c"}])


def test_a_line_past_the_context_is_refused_with_the_numbers(chat):
    desk = make_desk(b"word " * 300 + b"\nHello\n")
    engine = ScriptedEngine([5, STOP], context=64)
    assert line_chat(engine, chat, Config(context=64), desk) == 0
    assert re.search(r"\d{3} tokens; the context holds 64", desk.err.getvalue())
    assert len(engine.prompts) == 1


def test_commands_exist_only_where_a_person_types(chat):
    desk = make_desk(b"/quit\n")
    line_chat(ScriptedEngine([5, STOP]), chat, CONFIG, desk)
    assert desk.out.getvalue().decode() == chat.decode([5]) + "\n"

    desk = make_desk(b"/help\n/nwe\n/etc/passwd is what?\n/quit\nnever\n", interactive=True)
    engine = ScriptedEngine([5, STOP])
    assert line_chat(engine, chat, CONFIG, desk) == 0
    assert len(engine.prompts) == 1 and "unknown command /nwe" in desk.err.getvalue()
    assert desk.err.getvalue().count("/new starts") == 3    # greeting, /help, the unknown one
    assert desk.out.getvalue().count(b"> ") == 4


def test_ctrl_c_in_a_chat(chat):
    def press_in(desk):
        return lambda number: desk.interrupt(2, None) if number == 4 else None
    desk = make_desk(b"a\nb\n", interactive=True)
    engine = ScriptedEngine([5, 6, 7, 8], [9, STOP], before_round=press_in(desk))
    assert line_chat(engine, chat, CONFIG, desk) == 0
    assert engine.cancelled == [0] and "forgotten" in desk.err.getvalue()
    assert engine.prompts[1] == chat.encode_chat([{"role": "user", "content": "b"}])

    desk = make_desk(b"a\nb\n")     # on a pipe it ends the run
    engine = ScriptedEngine([5, 6, 7, 8], before_round=press_in(desk))
    assert line_chat(engine, chat, CONFIG, desk) == INTERRUPTED
    assert len(engine.prompts) == 1


def test_ctrl_c_at_the_prompt_sign_leaves(chat):
    desk = make_desk(interactive=True)

    class Waiting:
        def readline(self):
            desk.interrupt(2, None)
    desk.stdin = Waiting()
    assert line_chat(ScriptedEngine(), chat, CONFIG, desk) == INTERRUPTED


def test_json_a_line(chat):
    desk = make_desk(b"a\nb\n")
    line_chat(ScriptedEngine([5, STOP], [6, STOP]), chat, Config(context=999, json=True), desk)
    replies = [json.loads(line)["ids"] for line in desk.out.getvalue().splitlines()]
    assert replies == [[5, STOP], [6, STOP]]


# --- errors -------------------------------------------------------------------------------------


def test_errors_say_what_happened_and_what_would_help():
    error = UsageError("--chunk 0", "--chunk 1")
    assert str(error) == "--chunk 0" and error.report() == "sparkgrid: --chunk 0\n  try: --chunk 1"
    assert WorldError("lost", rank=3).report() == "sparkgrid: rank 3: lost"
    codes = {kind.__name__: kind.exit_code for kind in EngineError.__subclasses__()}
    assert codes == {"UsageError": 2, "ModelError": 3, "PlanError": 4, "RequestError": 5,
                     "WorldError": 6, "FaultError": 7, "Unavailable": 8}
    assert ResidueMismatch("x").exit_code == 6
