"""A request's JSON body -> Ask, every field checked; Refused in the OpenAI error shape otherwise.

What would change a reply and is not supported is refused by name, never ignored: penalties and
biases other than none, several choices, images, a forced output format. Fields that only describe
the caller are accepted and have no effect.
"""

import dataclasses
import json
import math

from engine.errors import RequestError
from engine.sample import Sampling

MAX_STOPS = 16
MAX_STOP = 1000             # characters of a stop string
MAX_TOP = 20                # alternatives of a token's log-probability
EFFORTS = ("low", "high", "max")
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that have no effect on the reply.
DESCRIBING = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
              "prompt_cache_retention", "verbosity"}
# Fields of which only the value that does nothing is taken, and which that is.
NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "n": 1, "best_of": 1,
           "suffix": "", "echo": False, "response_format": {"type": "text"}, "modalities": ["text"],
           "parallel_tool_calls": True}
COMMON = {"model", "stream", "stream_options", "stop", "max_tokens", "temperature", "top_p", "seed",
          "logprobs", "draft"}
CHAT = COMMON | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
                 "reasoning_effort"}
TEXT = COMMON | {"prompt"}


class Refused(Exception):
    """A request that is answered with an error. status: HTTP; param: the field, or None."""

    def __init__(self, message, param=None, status=400, code=None, headers=None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        self.headers = headers or {}

    def body(self):
        """The OpenAI error object."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500
                         else "invalid_request_error")
        return {"error": {"message": _sendable(self.message), "type": kind,
                          "param": self.param and _sendable(self.param), "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A checked request. ids: prompt token ids. stops: stop strings. call: the part of a tool
    call's name that the prompt has opened, None where the model decides. logprobs: alternatives a
    token, None for none."""

    chat: bool
    model: str
    ids: list
    sampling: Sampling
    stops: tuple
    stream: bool
    include_usage: bool
    tools: list | None = None
    reasoning: bool = False
    call: str | None = None
    logprobs: int | None = None


def read(data, chat_route, chat, defaults, served):
    """bytes of a body -> Ask. defaults: Sampling for what is not said. served: names of the model.

    Encodes the prompt, so it may take a while for a long one.
    """
    return _shallow(_read, data, chat_route, chat, defaults, served)


def tokens(data, chat):
    """bytes of a /tokenize body -> ids."""
    return _shallow(_tokens, data, chat)


def _shallow(work, *args):
    """work(*args); Refused where the body is nested deeper than can be walked."""
    try:
        return work(*args)
    except RecursionError:
        raise Refused("the body is nested too deeply") from None


def _read(data, chat_route, chat, defaults, served):
    fields = _object(data)
    known = CHAT if chat_route else TEXT
    for name, value in fields.items():
        if name in NEUTRAL:
            if value is not None and not _same(value, NEUTRAL[name]):
                raise Refused(f"{name} {_show(value)} is not supported; leave it out, or "
                              f"{json.dumps(NEUTRAL[name])}", name)
        elif name not in known and name not in DESCRIBING:
            raise Refused(f"unknown parameter {_show(name)}", name[:64], code="unknown_parameter")
    body = _Fields({k: v for k, v in fields.items() if v is not None})
    model = body.text("model", served[0])
    if model not in served:
        raise Refused(f"the model {_show(model)} is not served here; this is {served[0]}", "model",
                      404, "model_not_found")
    options = _Fields(body.get("stream_options", dict, {}), "stream_options.")
    most = body.integer("max_completion_tokens", 1) or body.integer("max_tokens", 1)
    sampling = Sampling(
        temperature=body.number("temperature", 0, 2, defaults.temperature),
        top_p=body.number("top_p", 0, 1, defaults.top_p),
        seed=body.integer("seed", 0, 2 ** 63 - 1, defaults.seed),
        max_tokens=most or defaults.max_tokens, stop_ids=chat.eos)
    body.flag("draft")
    make = _chat_parts if chat_route else _text_parts
    parts = make(body, chat)
    sampling = dataclasses.replace(sampling, logprobs=parts.get("logprobs"))
    return Ask(chat=chat_route, model=model, sampling=sampling, stops=_stops(body),
               stream=body.flag("stream"), include_usage=options.flag("include_usage"), **parts)


def _tokens(data, chat):
    fields = _object(data)
    if "messages" in fields:
        try:
            tools, _ = _tools(_Fields({"tools": fields.get("tools") or []}))
            return chat.encode_chat(messages_of(fields["messages"]), tools)
        except RequestError as e:
            raise Refused(sentence(e), "messages") from None
    if not isinstance(fields.get("prompt"), str):
        raise Refused("give prompt, a string, or messages", "prompt")
    return chat.encode(utf8(fields["prompt"], "prompt"))


# ---- fields ------------------------------------------------------------------------------------

class _Fields:
    """Typed reading of a JSON object; Refused names the field."""

    def __init__(self, values, prefix=""):
        self._values, self._prefix = values, prefix

    def get(self, name, kind, default=None):
        value = self._values.get(name, default)
        if value is not default and not isinstance(value, kind):
            self._wrong(name, value, {dict: "an object", list: "an array", str: "a string"}[kind])
        return value

    def text(self, name, default=None):
        value = self.get(name, str, default)
        return value if value is None else utf8(value, self._prefix + name)

    def flag(self, name):
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false")
        return value

    def integer(self, name, low, high=2 ** 31 - 1, default=None):
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name, low, high, default):
        value = self._values.get(name)
        if value is None:
            return default
        if (isinstance(value, bool) or not isinstance(value, (int, float))
                or not low <= value <= high or not math.isfinite(value)):
            self._wrong(name, value, f"a number from {low} to {high}")
        return float(value)

    def raw(self, name):
        return self._values.get(name)

    def _wrong(self, name, value, wanted):
        name = self._prefix + name
        raise Refused(f"{name} is {_show(value)}, it must be {wanted}", name, code="invalid_type")


def _object(data):
    """The JSON object of a body."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        raise Refused(f"the body is not UTF-8: byte {data[e.start]:#04x} at {e.start}") from None
    except ValueError as e:
        raise Refused(f"the body is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise Refused(f"the body is {_show(value)}, it must be a JSON object")
    return value


def _same(value, neutral):
    """Equal, and not merely 1 and true."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _no_constant(name):
    raise ValueError(f"{name} is not JSON")


def utf8(text, name):
    """text; Refused where it holds half a character (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise Refused(f"{name} is not valid Unicode: a lone surrogate at character {e.start}",
                      name) from None
    return text


def _sendable(text):
    """text with lone surrogates written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _show(value):
    """A value in a message, cut short."""
    text = ascii(value) if not isinstance(value, (dict, list)) else (
        "an object" if isinstance(value, dict) else "an array")
    return text if len(text) <= 60 else text[:57] + "..."


def _stops(body):
    value = body.raw("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (not isinstance(stops, list) or len(stops) > MAX_STOPS
            or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP for s in stops)):
        raise Refused(f"stop must be a string or up to {MAX_STOPS} strings, each of 1 to "
                      f"{MAX_STOP} characters", "stop")
    return tuple(utf8(s, "stop") for s in stops)


# ---- completions -------------------------------------------------------------------------------

def _text_parts(body, chat):
    prompt = body.raw("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = chat.encode(utf8(prompt, "prompt"))
    elif isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        ids = prompt
    else:
        raise Refused("prompt must be a string or token ids, one prompt a request", "prompt")
    return {"ids": ids, "logprobs": body.integer("logprobs", 0, MAX_TOP)}


# ---- chat --------------------------------------------------------------------------------------

def _chat_parts(body, chat):
    messages = messages_of(body.raw("messages"))
    tools, call = _tools(body)
    effort = body.text("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise Refused(f"reasoning_effort is {_show(effort)}, it must be low, high or max",
                      "reasoning_effort")
    logprobs = body.integer("top_logprobs", 0, MAX_TOP)
    if logprobs is not None and not body.flag("logprobs"):
        raise Refused("top_logprobs needs logprobs true", "top_logprobs")
    if logprobs is None and body.flag("logprobs"):
        logprobs = 0
    try:
        ids = chat.encode_chat(messages, tools, effort)
    except RequestError as e:
        raise Refused(sentence(e), "messages") from None
    opened, closed = chat.token_id("<think>"), chat.token_id("</think>")
    thinking = [i for i in ids[-4:] if i in (opened, closed)][-1:] == [opened]
    if call is not None:            # the model goes on from inside the call
        mark = chat.token_id("<tool_call>")
        if mark is None:
            raise Refused("this model has no tool calls", "tool_choice")
        ids = [*ids, *([closed] if thinking and opened is not None else []), mark,
               *(chat.encode_plain(call) if call else [])]
        thinking = False
    return {"ids": ids, "tools": tools, "call": call, "logprobs": logprobs,
            "reasoning": thinking and opened is not None}


def messages_of(messages):
    """Messages as the chat template wants them: text contents, arguments as objects."""
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be an array of at least one message", "messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message, at):
    if not isinstance(message, dict):
        raise Refused(f"{at} is {_show(message)}, it must be an object", at)
    role = message.get("role")
    if role not in ROLES:
        raise Refused(f"{at}.role is {_show(role)}, it must be one of {', '.join(ROLES)}",
                      f"{at}.role")
    calls = message.get("tool_calls")
    found = {"role": "system" if role == "developer" else role,
             "content": _content(message.get("content"), f"{at}.content",
                                 role == "assistant" or bool(calls))}
    if role == "assistant":
        reasoning = message.get("reasoning_content")
        if reasoning is not None:
            found["reasoning_content"] = _content(reasoning, f"{at}.reasoning_content", True)
        if calls:
            if not isinstance(calls, list):
                raise Refused(f"{at}.tool_calls must be an array", f"{at}.tool_calls")
            found["tool_calls"] = [_call(c, f"{at}.tool_calls[{i}]") for i, c in enumerate(calls)]
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        found["tool_call_id"] = utf8(message["tool_call_id"], f"{at}.tool_call_id")
    return found


def _content(content, at, may_lack):
    if content is None and may_lack:
        return ""
    if isinstance(content, str):
        return utf8(content, at)
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(
                    part.get("text"), str):
                raise Refused(f"{at}: only text parts are supported, {{\"type\": \"text\", "
                              "\"text\": ...}", at)
        return "".join(utf8(part["text"], at) for part in content)
    raise Refused(f"{at} is {_show(content)}, it must be a string or an array of text parts", at)


def _call(call, at):
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{at} must be {{\"function\": {{\"name\": ..., \"arguments\": ...}}}}", at)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{at}.function.arguments must be a JSON object", f"{at}.function.arguments")
    utf8(json.dumps(arguments, ensure_ascii=False), f"{at}.function.arguments")
    found = {"type": "function", "function": {"name": utf8(function["name"], at),
                                              "arguments": arguments}}
    if isinstance(call.get("id"), str):
        found["id"] = utf8(call["id"], at)
    return found


def _tools(body):
    """(tools for the template or None, what a forced call's name starts with or None)."""
    tools = body.get("tools", list, []) or []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (not isinstance(function, dict) or tool.get("type", "function") != "function"
                or not isinstance(function.get("name"), str)
                or not function["name"] or not isinstance(function.get("parameters", {}), dict)):
            raise Refused(f"tools[{i}] must be {{\"type\": \"function\", \"function\": {{\"name\": "
                          "..., \"parameters\": {...}}}", f"tools[{i}]")
        utf8(json.dumps(tool, ensure_ascii=False), f"tools[{i}]")
    choice = body.raw("tool_choice")
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise Refused("tool_choice needs tools", "tool_choice")
        return None, None
    if choice in (None, "auto", "required"):
        return tools, "" if choice == "required" else None
    name = choice.get("function") if isinstance(choice, dict) else None
    name = name.get("name") if isinstance(name, dict) else None
    if name not in [tool["function"]["name"] for tool in tools]:
        raise Refused("tool_choice must be none, auto, required or {\"type\": \"function\", "
                      "\"function\": {\"name\": one of the tools}}", "tool_choice")
    return tools, name


def sentence(error):
    """An EngineError in one line."""
    return f"{error.told}; {error.hint}" if error.hint else error.told
