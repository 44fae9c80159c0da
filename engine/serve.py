"""Rank 0's drivers: one reply to the command line's prompt, or a chat by lines of standard input.

Both speak to the engine by submit, cancel and step alone; the other ranks are in `engine.follow()`
meanwhile. A reply goes out as it comes: text, ids (--print-ids), or one JSON object (--json):

    {"ids": [...], "text": "..." | null, "finish_reason": "stop" | "length" | "cancelled",
     "prompt_tokens": n, "seconds": {"load", "compile", "prefill", "decode"}}

`ids` end with the stop id where one ended the reply; the text leaves special tokens out. `prefill`
runs from the prompt's submission to its first token, `decode` from there to the last.

A refused prompt (RequestError) ends `one_reply`, and costs `line_chat` that line only. Ctrl-C ends
the reply: an interactive chat goes on, everything else leaves with 130.
"""

import contextlib
import dataclasses
import json
import signal
import time

from engine.chat import Stream, start_of
from engine.config import utf8
from engine.errors import BROKEN_PIPE, INTERRUPTED, RequestError
from engine.sample import Sampling

HELP = ("/new starts a new conversation, /quit leaves, Ctrl-C stops a reply "
        "(mpirun itself ends at the second one)")


class OutputLost(Exception):
    """Standard output takes no more: its reader left, or its disk is full."""

    def __init__(self, cause):
        super().__init__(cause)
        self.cause = cause      # OSError


class Interrupt:
    """SIGINT as a question: `pending` between rounds, KeyboardInterrupt only while reading a line.

    A round must never be left in the middle: the other ranks are in it too.
    """

    def __init__(self):
        self.pending = False
        self._reading = False

    def __call__(self, signum, frame):
        self.pending = True
        if self._reading:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def installed(self):
        """Takes SIGINT for the block's time."""
        before = signal.signal(signal.SIGINT, self)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    def read(self, stdin):
        """The next line of a binary file, b"" at its end; KeyboardInterrupt on Ctrl-C."""
        self._reading = True
        try:
            return stdin.readline()
        finally:
            self._reading = False


@dataclasses.dataclass
class Desk:
    """Where rank 0 reads and writes. stdin, out: binary files. err: a text file.

    interactive: a person types. seconds: what the start took, by phase.
    """

    stdin: object
    out: object
    err: object
    interactive: bool
    progress: object        # engine.progress.Progress
    interrupt: Interrupt
    seconds: dict
    replying: bool = False  # a reply is being written

    def write(self, text):
        """text to standard output, at once. OutputLost where it takes no more."""
        try:
            self.out.write(text.encode("utf-8"))
            self.out.flush()
        except OSError as e:
            raise OutputLost(e) from None

    def say(self, text):
        """One line to standard error."""
        print(text, file=self.err, flush=True)

    def refuse(self, error):
        """What happened and what would help."""
        self.say(error.report())

    def lost(self, loss):
        """The exit code after an OutputLost; a reader that left is told nothing."""
        if not isinstance(loss.cause, BrokenPipeError):
            self.say(f"sparkgrid: standard output cannot be written: {loss.cause.strerror}")
        return BROKEN_PIPE


def sampling_for(chat, config, prompt_tokens):
    """The Sampling of a reply: the command line's values, else the model's own."""
    temperature, top_p = chat.sampling_defaults
    return Sampling(
        temperature=temperature if config.temperature is None else config.temperature,
        top_p=top_p if config.top_p is None else config.top_p, seed=config.seed,
        max_tokens=config.max_tokens or max(1, config.context - prompt_tokens),
        stop_ids=chat.eos)


# --- one reply ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Reply:
    """A reply while it grows. finish_reason: None, then "stop", "length" or "cancelled"."""

    ids: list
    finish_reason: str | None = None
    prefill: float = 0.0    # seconds
    decode: float = 0.0     # seconds


def generate(engine, ids, sampling, desk, take):
    """Runs one request to its end; `take(token, is_stop)` sees each token as it comes.

    Returns the Reply. On Ctrl-C, or when `take` fails, the request is cancelled first.
    """
    reply = Reply([])
    desk.interrupt.pending, desk.replying = False, True
    started = time.perf_counter()
    request = engine.submit(ids, sampling)
    try:
        with desk.progress.phase(f"reading the prompt, {len(ids)} tokens") as line:
            while reply.finish_reason is None:
                assert engine.busy, "the engine is idle, and the reply has not ended"
                if desk.interrupt.pending:
                    engine.cancel(request)
                    reply.finish_reason = "cancelled"
                    break
                for event in engine.step():
                    if event.id == request:
                        line.done()
                        _append(reply, event, started)
                        take(event.token, event.token in sampling.stop_ids)
    except OutputLost:
        engine.cancel(request)
        raise
    finally:
        desk.replying = False
    return reply


def _append(reply, event, started):
    now = time.perf_counter() - started
    if not reply.ids:
        reply.prefill = now
    reply.ids.append(event.token)
    reply.decode = now - reply.prefill
    reply.finish_reason = event.finish_reason


def answer(engine, chat, config, ids, desk):
    """One reply to prompt ids, written in the form that the command line asks for; the Reply.

    Raises RequestError before anything is written.
    """
    stream = Stream(chat) if chat.has_text else None
    as_ids = config.print_ids or stream is None
    texts, written = [], []

    def take(token, is_stop):
        if stream is not None and not is_stop:
            texts.append(stream.push(token))
        if not config.json:
            if as_ids:
                piece = f",{token}" if written else str(token)
            else:
                piece = "" if is_stop else texts[-1]
            if piece:
                written.append(piece)
                desk.write(piece)

    reply = generate(engine, ids, sampling_for(chat, config, len(ids)), desk, take)
    if stream is not None:
        texts.append(stream.finish())
    if config.json:
        desk.write(_json_line(reply, "".join(texts) if stream is not None else None, ids, desk))
    else:
        rest = texts[-1] if texts and not as_ids else ""
        desk.write(rest + "\n")
    if reply.finish_reason == "length" and config.max_tokens is None:
        desk.say(f"sparkgrid: the reply ended where the context of {config.context} tokens does")
    return reply


def _json_line(reply, text, ids, desk):
    seconds = {**desk.seconds, "prefill": reply.prefill, "decode": reply.decode}
    return json.dumps({"ids": reply.ids, "text": text, "finish_reason": reply.finish_reason,
                       "prompt_tokens": len(ids),
                       "seconds": {name: round(s, 6) for name, s in seconds.items()}},
                      ensure_ascii=False) + "\n"


def one_reply(engine, chat, config, ids, desk):
    """The reply to the command line's prompt (`ids`: its tokens); the exit code.

    Raises RequestError where the engine refuses it.
    """
    if not chat.has_text and not (config.json or config.print_ids):
        desk.say(f"sparkgrid: {config.model} has no tokenizer.json: printing ids")
    try:
        reply = answer(engine, chat, config, ids, desk)
    except OutputLost as loss:
        return desk.lost(loss)
    return INTERRUPTED if reply.finish_reason == "cancelled" else 0


# --- line by line -------------------------------------------------------------------------------


def line_chat(engine, chat, config, desk):
    """Each line of standard input is a turn of one conversation; the exit code, 0 at end of input.

    A line that is refused, or no UTF-8, is answered on standard error and forgotten. Blank lines
    are skipped. Commands (/help) exist only where a person types.
    """
    messages, number = start_of(config.system), 0
    if desk.interactive:
        desk.say(HELP)
    try:
        while True:
            if desk.interactive:
                desk.write("> ")
            line = desk.interrupt.read(desk.stdin)
            number += 1
            if not line:
                if desk.interactive:
                    desk.write("\n")
                return 0
            try:
                text = utf8(line.rstrip(b"\r\n"), f"line {number}")
            except RequestError as e:
                desk.refuse(e)
                continue
            if not text.strip():
                continue
            if desk.interactive and text.startswith("/") and len(text.split()) == 1:
                if text.strip() == "/quit":
                    return 0
                messages = _command(text.strip(), messages, config, desk)
                continue
            messages, cancelled = _turn(engine, chat, config, desk, messages, text)
            if cancelled and not desk.interactive:
                return INTERRUPTED
    except KeyboardInterrupt:
        desk.write("\n")
        return INTERRUPTED
    except OutputLost as loss:
        return desk.lost(loss)


def _command(word, messages, config, desk):
    """/new, /help or an unknown word: the messages to go on with."""
    if word == "/new":
        desk.say("a new conversation")
        return start_of(config.system)
    desk.say(HELP if word == "/help" else f"sparkgrid: unknown command {word}\n  try: {HELP}")
    return messages


def _turn(engine, chat, config, desk, messages, text):
    """One question: (messages with the reply, or as they were; whether it was cancelled)."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        ids = chat.encode_chat(asked, effort=config.effort)
        reply = answer(engine, chat, config, ids, desk)
    except RequestError as e:
        hint = "/new starts a new conversation" if desk.interactive and messages else e.hint
        desk.refuse(RequestError(e.message, hint))
        return messages, False
    if reply.finish_reason == "cancelled":
        desk.say("stopped; this turn is forgotten")
        return messages, True
    said = [i for i in reply.ids if i not in chat.eos]
    return [*asked, chat.message(ids, said)], False
