"""Text to token ids and back: the model folder's tokenizer, chat template and stop ids.

    tokenizer.json          tokens (needed only where text is)
    chat_template.jinja     messages -> prompt text, else tokenizer_config.json "chat_template"
    generation_config.json  stop ids, temperature, top_p; config.json's stop ids without it

The template is the checkpoint's own code: it runs in Jinja's immutable sandbox, with the settings
and globals that its field's renderer gives it (transformers `apply_chat_template`).

Only the template writes marks, as <|user|> or <think>. A mark in what a message or a tool says
stays text, so that nobody's text can speak in another role: it is broken by a sign before the
template sees it, and what is rendered is encoded piece by piece between the signs.
"""

import datetime
import json
import pathlib
import re

import jinja2
import jinja2.sandbox
import tokenizers

from engine.errors import ModelError, RequestError
from engine.prompt import check_prompt

REPLACEMENT = "\ufffd"      # what an incomplete or invalid UTF-8 sequence decodes to
SIGN = "\ufdd0"             # no character of any text (Unicode 23.7); one that comes is escaped
BREAK, ESCAPED = SIGN + "1", SIGN + "0"


class Chat:
    """What turns messages into ids and ids into text for one model folder.

    eos: stop ids. sampling_defaults: the temperature and top_p that the model asks for.
    Raises ModelError naming the file where one is there but cannot be used.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self._config = _read_json(self.folder / "config.json")
        self._generation = _read_json(self.folder / "generation_config.json")
        self.eos = self._stop_ids()
        self.sampling_defaults = self._sampling_defaults()
        self._tokenizer = self._load_tokenizer()
        self._marks = _marks_of(self._tokenizer) if self._tokenizer else ()
        self._template = self._load_template()

    @property
    def has_text(self):
        """False where the folder has no tokenizer.json: then only ids go in and out."""
        return self._tokenizer is not None

    def require_text(self):
        """ModelError where the folder lacks what a chat in text needs."""
        self._text_tokenizer()
        if self._template is None:
            raise ModelError(f"{self.folder} has no chat_template.jinja",
                             "add the model's own, or give --prompt-ids")

    def encode(self, text):
        """text -> ids; marks written in the text become their ids, none is added."""
        return self._text_tokenizer().encode(text, add_special_tokens=False).ids

    def encode_plain(self, text):
        """text -> ids; marks written in the text stay text."""
        return self._encode_broken(self._broken(text))

    def _broken(self, value):
        """A JSON value with every mark in its strings, keys too, broken after its first letter."""
        if isinstance(value, str):
            value = value.replace(SIGN, ESCAPED)
            if not any(mark in value for mark in self._marks):
                return value
            begin = "|".join(map(re.escape, self._marks))
            return re.sub(f"(?s)(?=(?:{begin}))(.)", rf"\1{BREAK}", value)
        if isinstance(value, dict):
            return {self._broken(k): self._broken(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._broken(v) for v in value]
        return value

    def _encode_broken(self, text):
        return [i for part in text.split(BREAK) for i in self.encode(part.replace(ESCAPED, SIGN))]

    def token_id(self, token):
        """The id of a token written as the vocabulary has it, or None."""
        return self._text_tokenizer().token_to_id(token)

    def token_bytes(self, token):
        """The bytes that one token stands for; a special token's are those of its name."""
        text = self._text_tokenizer().id_to_token(token)
        try:
            return bytes(_BYTE_OF[c] for c in text)
        except KeyError:        # a special token's name with blanks or other letters
            return text.encode("utf-8")

    def decode(self, ids):
        """ids -> text without special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._text_tokenizer().decode(list(ids), skip_special_tokens=True)

    def encode_chat(self, messages, tools=None, effort=None):
        """Messages ({"role", "content", ...} each) -> prompt ids, ready for the model's reply.

        effort: "low" | "high" | "max", for templates that know it. Old reasoning is kept in the
        prompt (clear_thinking false), so that a next turn extends the ids of the last one.
        """
        self.require_text()
        extra = {} if effort is None else {"reasoning_effort": effort}
        try:
            text = self._template.render(
                messages=self._broken(messages), tools=self._broken(tools), clear_thinking=False,
                add_generation_prompt=True, **extra)
        except _Refusal as e:
            raise RequestError(f"the chat template refuses these messages: {e}") from None
        except (jinja2.TemplateError, TypeError, AttributeError, ValueError, LookupError,
                ArithmeticError) as e:
            raise RequestError(f"the chat template cannot render these messages: {e}",
                               "check roles and contents") from None
        return self._encode_broken(text)

    def message(self, prompt_ids, ids):
        """The assistant message that a reply's ids make, for the next turn's messages.

        Where the prompt ends inside <think>, what comes before </think> is reasoning_content.
        """
        tokenizer = self._text_tokenizer()
        opened, closed = (tokenizer.token_to_id(t) for t in ("<think>", "</think>"))
        tail = [i for i in prompt_ids[-4:] if i in (opened, closed)]
        if tail[-1:] != [opened] or opened is None:
            return {"role": "assistant", "content": self.decode(ids)}
        end = ids.index(closed) if closed in ids else len(ids)
        return {"role": "assistant", "content": self.decode(ids[end + 1:]),
                "reasoning_content": self.decode(ids[:end])}

    def _text_tokenizer(self):
        if self._tokenizer is None:
            raise ModelError(f"{self.folder} has no tokenizer.json: it reads and writes no text",
                             "add the model's tokenizer.json, or give --prompt-ids")
        return self._tokenizer

    def _load_tokenizer(self):
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:      # the library raises bare Exception
            raise ModelError(f"{path} is not a tokenizer: {e}",
                             "copy it again from the model's release") from None

    def _load_template(self):
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            source = _read_text(path)
        else:
            path = self.folder / "tokenizer_config.json"
            source = _read_json(path).get("chat_template")
        if not isinstance(source, str):
            return None
        try:
            return _environment().from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ModelError(f"{path}, line {e.lineno} of the template: {e.message}",
                             "copy it again from the model's release") from None

    def _stop_ids(self):
        text = self._config.get("text_config")
        for source in (self._generation, text if isinstance(text, dict) else {}, self._config):
            given = source.get("eos_token_id")
            ids = [given] if isinstance(given, int) else given
            if ids and all(isinstance(i, int) for i in ids):
                return tuple(ids)
        return ()

    def _sampling_defaults(self):
        """(temperature, top_p): greedy unless generation_config.json asks for sampling."""
        g = self._generation
        if not g.get("do_sample", "temperature" in g or "top_p" in g):
            return 0.0, 1.0
        values = [1.0 if g.get(name) is None else g[name] for name in ("temperature", "top_p")]
        if not all(isinstance(v, (int, float)) and v >= 0 for v in values):
            raise ModelError(f"{self.folder}/generation_config.json: temperature {values[0]!r}, "
                             f"top_p {values[1]!r} are not numbers of 0 or more",
                             "copy it again from the model's release")
        return float(values[0]), min(float(values[1]), 1.0)


class Stream:
    """Ids in, text out as soon as it is final: never half a character, never a special token.

    A sequence that may still become a character decodes to one U+FFFD at the end of the text, so
    that character alone is held back; all before it is final.
    """

    def __init__(self, chat):
        self._decode = chat.decode
        self._ids = []      # since the second last point where nothing was held back
        self._clean = 0     # ids up to the last such point
        self._sent = 0      # characters of decode(_ids) already given out

    def push(self, token):
        """One more id -> the text that became final, possibly ""."""
        self._ids.append(token)
        text = self._decode(self._ids)
        final = len(text) - text.endswith(REPLACEMENT)
        new = text[self._sent:final]
        self._sent = max(self._sent, final)
        if text and final == len(text):
            # Keep the ids since the last such point: some decoders treat a text's first id apart.
            del self._ids[:self._clean]
            self._clean = len(self._ids)
            self._sent = len(self._decode(self._ids))
        return new

    def finish(self):
        """The held back rest: an incomplete character shows as U+FFFD."""
        rest = self._decode(self._ids)[self._sent:]
        self._ids, self._clean, self._sent = [], 0, 0
        return rest


def start_of(system):
    """The messages a conversation starts with, given the system message or None."""
    return [{"role": "system", "content": system}] if system else []


def prompt_ids(chat, config, vocab):
    """The ids of the command line's prompt, held to the model. RequestError, ModelError."""
    if config.prompt_ids is not None:
        ids = list(config.prompt_ids)
    else:
        messages = [*start_of(config.system), {"role": "user", "content": config.prompt}]
        ids = chat.encode_chat(messages, effort=config.effort)
    check_prompt(ids, config.context, vocab)
    return ids


def _marks_of(tokenizer):
    """The added tokens that say something about the text: special ones, and <these> or [these]."""
    return tuple(t.content for t in tokenizer.get_added_tokens_decoder().values()
                 if t.special or t.content[:1] + t.content[-1:] in ("<>", "[]"))


def _byte_level():
    """{character: byte} of byte-level BPE vocabularies (GPT-2's bytes_to_unicode, inverted)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level()


class _Refusal(Exception):
    """A template called raise_exception."""


def _environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Jinja's own tojson escapes HTML; a prompt wants plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _refuse(message):
    raise _Refusal(message)


def _read_text(path):
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"{path} cannot be read: {e}", "copy the model folder again") from None


def _read_json(path):
    """A JSON object, {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}", "copy the model folder again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", "copy the model folder again")
    return value
