"""A reply's tokens, sorted as they come into reasoning, content and tool calls.

The model marks them by tokens of their own:

    reasoning</think>content<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>

They are known by id, so text that merely looks like a mark stays text. Values of parameters that a
tool's schema calls strings are raw text and go out as they come; other values are JSON and go out
whole, as a string where they are no JSON. Blanks around names and keys are the template's. A call
inside reasoning ends the reasoning; a call that the reply's end cuts is closed, without an argument
whose value had not begun. A mark where it has no meaning is dropped; a call without a name becomes
content again, so that nothing is lost, and so does all of a call where no tools were given.
"""

import json
from typing import NamedTuple

from engine.chat import Stream

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
         "<arg_value>", "</arg_value>")
THINKING = MARKS[:2]
REASONING, CONTENT, NAME, BETWEEN, KEY, VALUE = range(6)     # where the next token belongs


class Delta(NamedTuple):
    """A piece of the reply. kind: "reasoning", "content", "call" (text: its name) or "arguments"
    (text: a piece of the JSON object). index: of the call, 0 for the first."""

    kind: str
    text: str
    index: int = 0


class Parser:
    """One reply.

    chat: engine.chat.Chat. tools: the request's tool list, or None. reasoning: the prompt ends
    inside <think>. call: None, or the part of a call's name that the prompt has already opened.
    state: where the next token belongs.
    """

    def __init__(self, chat, tools=None, reasoning=False, call=None):
        self._chat = chat
        self._marks = {chat.token_id(mark): mark for mark in MARKS}
        self._marks.pop(None, None)
        self._calls_wanted = tools is not None
        self._strings = _string_parameters(tools)
        self._stream = Stream(chat)
        self.state = NAME if call is not None else REASONING if reasoning else CONTENT
        self._text = call or ""         # of the name, key or value so far
        self._name = self._key = None   # of the call; of the argument whose value is next
        self._keys = 0                  # arguments begun
        self._raw = False               # the value is a string and goes out as it comes
        self.calls = 0                  # calls begun with a name

    def push(self, token):
        """One more id -> [Delta]."""
        mark = self._marks.get(token)
        if mark is None:
            return self._take(self._stream.push(token))
        found = self._take(self._stream.finish())
        if not self._calls_wanted and mark not in THINKING:
            return found + self._take(mark)
        return found + self._turn(mark)

    def finish(self):
        """The reply has ended -> the last [Delta]."""
        found = self._take(self._stream.finish())
        if self.state not in (REASONING, CONTENT):
            found += self._end_call()
        return found

    # --- text -----------------------------------------------------------------------------------

    def _take(self, text):
        if not text:
            return []
        if self.state == REASONING:
            return [Delta("reasoning", text)]
        if self.state == CONTENT:
            return [Delta("content", text)]
        if self.state == VALUE and self._raw:
            return [self._argument(json.dumps(text, ensure_ascii=False)[1:-1])]
        if self.state != BETWEEN:
            self._text += text
        return []

    # --- marks ----------------------------------------------------------------------------------

    def _turn(self, mark):
        """What a mark ends, and where the tokens after it belong."""
        state = self.state
        if mark == "<think>" and state == CONTENT:
            self.state = REASONING
        elif mark == "</think>" and state == REASONING:
            self.state = CONTENT
        elif mark == "<tool_call>":
            found = self._end_call() if state > CONTENT else []
            self.state, self._text = NAME, ""
            return found
        elif mark == "</tool_call>" and state > CONTENT:
            return self._end_call()
        elif mark == "<arg_key>" and state in (NAME, BETWEEN):
            found = self._begin_call() if state == NAME else []
            if self.state == CONTENT:      # a call without a name
                return found
            self.state, self._text = KEY, ""
            return found
        elif mark == "</arg_key>" and state == KEY:
            self._key, self.state = self._text.strip(), BETWEEN
        elif mark == "<arg_value>" and state in (KEY, BETWEEN):
            if state == KEY:                # its end was left out
                self._key = self._text.strip()
            return self._begin_value()
        elif mark == "</arg_value>" and state == VALUE:
            return self._end_value()
        return []

    # --- a call ---------------------------------------------------------------------------------

    def _argument(self, text):
        return Delta("arguments", text, self.calls - 1)

    def _begin_call(self):
        """The name is complete."""
        self._name, self._keys = self._text.strip(), 0
        if not self._name:
            self.state = CONTENT
            return [Delta("content", "<tool_call>" + self._text)]
        self.calls += 1
        self._key, self.state = None, BETWEEN
        return [Delta("call", self._name, self.calls - 1)]

    def _begin_value(self):
        if self._key is None:               # a value without a key has no place in an object
            self.state = BETWEEN
            return []
        self.state, self._text = VALUE, ""
        self._raw = self._key in self._strings.get(self._name, ())
        start = ("{" if not self._keys else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "
        self._keys += 1
        return [self._argument(start + '"' * self._raw)]

    def _end_value(self):
        self._key, self.state = None, BETWEEN
        if self._raw:
            self._raw = False
            return [self._argument('"')]
        return [self._argument(_json_value(self._text))]

    def _end_call(self):
        """</tool_call>, the next call, or the end of the reply."""
        found = self._begin_call() if self.state == NAME else []
        if self.state == CONTENT:
            return found
        if self.state == VALUE:
            found += self._end_value()
        found.append(self._argument("}" if self._keys else "{}"))
        self.state = CONTENT
        return found


def _string_parameters(tools):
    """{tool name: names of its parameters of type string}."""
    found = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if isinstance(properties, dict):
            found[function.get("name")] = {
                name for name, p in properties.items()
                if isinstance(p, dict) and p.get("type") == "string"}
    return found


def _json_value(text):
    """The JSON text of a value: itself where it is JSON, else a string."""
    try:
        return json.dumps(json.loads(text, parse_constant=_refuse), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _refuse(name):
    raise ValueError(f"{name} is no JSON")
