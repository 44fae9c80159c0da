"""A conversation: messages, system prompt and settings; the request it makes; its JSON.

Plain data, without a screen and without files (tui/chat/store.py). `from_json` takes nothing on
trust: `checks.Damaged` names the member that is not what it must be.
"""

import dataclasses
import secrets
import time
from dataclasses import dataclass, field

from tui.chat import checks
from tui.chat.checks import (Damaged, call_of, choice, complete, expect, number, part_of, show,
                             text, whole)
from tui.chat.text import fence, one_line, sendable

VERSION = 1
ROLES = ("user", "assistant", "tool")
EFFORTS = ("low", "high", "max")
UNTITLED = "New conversation"
TITLE = 40              # characters of a title made of the first question


@dataclass(frozen=True)
class Settings:
    """What a request says beside its messages; None leaves it to the engine. max_tokens counts
    reasoning too. tools: OpenAI tool definitions."""

    effort: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    tools: tuple = ()

    def body(self):
        """The members of a request that are set."""
        found = {"reasoning_effort": self.effort, "temperature": self.temperature,
                 "top_p": self.top_p, "seed": self.seed, "max_tokens": self.max_tokens,
                 "tools": list(self.tools) or None}
        return {name: value for name, value in found.items() if value is not None}

    def json(self):
        found = dataclasses.asdict(self)
        return {**found, "tools": list(self.tools)}

    @classmethod
    def from_json(cls, value):
        expect(value, dict, "settings")
        return cls(effort=choice(value.get("effort"), EFFORTS, "effort"),
                   temperature=number(value.get("temperature"), 0, 2, "temperature"),
                   top_p=number(value.get("top_p"), 0, 1, "top_p"),
                   seed=whole(value.get("seed"), 0, 2 ** 63 - 1, "seed"),
                   max_tokens=whole(value.get("max_tokens"), 1, 2 ** 31 - 1, "max_tokens"),
                   tools=checks.tools(value.get("tools") or []))


@dataclass
class Message:
    """One turn. content: text, or for a question with files a list of OpenAI text parts, each
    file's with its `name`. figures: of a reply, what it took (see `figures_of`). growing: whether
    more of it is on its way; in a file it is interrupted, for so it is to who finds it there."""

    role: str
    content: str | list = ""
    reasoning_content: str = ""
    tool_calls: list = field(default_factory=list)
    tool_call_id: str | None = None
    figures: dict = field(default_factory=dict)
    growing: bool = False

    @property
    def text(self):
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part["text"] for part in self.content)

    @property
    def typed(self):
        """What was typed, without the files."""
        return self.content if isinstance(self.content, str) else self.content[0]["text"]

    @property
    def files(self):
        """[(name, text as sent)] of what came with it."""
        if isinstance(self.content, str):
            return []
        return [(part.get("name", "text"), part["text"]) for part in self.content[1:]]

    @property
    def empty(self):
        """Whether a reply says nothing at all."""
        return not (self.text or self.reasoning_content or self.tool_calls)

    def request(self):
        """The message as it is sent, or None where there is nothing to send."""
        if self.role != "assistant":
            found = {"role": self.role, "content": self.text}
            if self.tool_call_id is not None:
                found["tool_call_id"] = self.tool_call_id
            return found
        found = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            found["reasoning_content"] = self.reasoning_content
        calls = [c for c in self.tool_calls if complete(c)]
        if calls:
            found["tool_calls"] = calls
        return None if self.empty else found

    def json(self):
        found = {name: value for name, value in dataclasses.asdict(self).items()
                 if value or name in ("role", "content")}
        if found.pop("growing", False):
            found["figures"] = {"reason": "interrupted"}
        return found

    @classmethod
    def from_json(cls, value, at):
        expect(value, dict, at)
        role = choice(value.get("role"), ROLES, f"{at}.role", True)
        content = value.get("content", "")
        if isinstance(content, list) and role == "user" and content:
            content = [part_of(part, f"{at}.content[{i}]") for i, part in enumerate(content)]
        else:
            content = text(content, f"{at}.content")
        calls = expect(value.get("tool_calls", []), list, f"{at}.tool_calls")
        answers = value.get("tool_call_id")
        return cls(role, content,
                   text(value.get("reasoning_content", ""), f"{at}.reasoning_content"),
                   [call_of(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)],
                   None if answers is None else text(answers, f"{at}.tool_call_id"),
                   checks.figures(expect(value.get("figures", {}), dict, f"{at}.figures")))


@dataclass
class Conversation:
    """id: its file's name. created, changed: seconds since 1970. system: the system prompt."""

    id: str
    title: str = UNTITLED
    system: str = ""
    settings: Settings = Settings()
    messages: list = field(default_factory=list)
    created: float = 0.0
    changed: float = 0.0

    @classmethod
    def new(cls, settings=Settings(), system=""):
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        return cls(f"{stamp}-{secrets.token_hex(4)}", system=system, settings=settings,
                   created=now, changed=now)

    def ask(self, typed, files=()):
        """Add a question. files: [(name, text as sent)]."""
        typed = sendable(typed)
        content = typed if not files else [
            {"type": "text", "text": typed},
            *({"type": "text", "text": sendable(text), "name": sendable(name)}
              for name, text in files)]
        self.messages.append(Message("user", content))
        if self.title == UNTITLED:
            self.title = one_line(typed or files[0][0], TITLE) or UNTITLED

    def pending_calls(self):
        """Tool calls of the last reply that have no result yet, those before which all have."""
        results = set()
        for message in reversed(self.messages):
            if message.role == "tool":
                results.add(message.tool_call_id)
            else:
                return [c for c in message.tool_calls
                        if complete(c) and c["id"] not in results]
        return []

    def last_question(self):
        """Index of the last message that was not a reply, or None."""
        return next((i for i in reversed(range(len(self.messages)))
                     if self.messages[i].role != "assistant"), None)

    def drop_answer(self):
        """Forget what came after the last question."""
        at = self.last_question()
        if at is not None:
            del self.messages[at + 1:]

    def drop_question(self):
        """Forget the user's last question and everything after it; returns it, or None."""
        at = next((i for i in reversed(range(len(self.messages)))
                   if self.messages[i].role == "user"), None)
        if at is None:
            return None
        question = self.messages[at]
        del self.messages[at:]
        return question

    def body(self):
        """The request for the next reply."""
        system = [{"role": "system", "content": self.system}] if self.system.strip() else []
        sent = [m.request() for m in self.messages]
        return {"messages": system + [m for m in sent if m is not None], **self.settings.body()}

    def json(self):
        return {"version": VERSION, "title": self.title, "created": self.created,
                "changed": self.changed, "system": self.system, "settings": self.settings.json(),
                "messages": [m.json() for m in self.messages if m.figures or not m.empty]}

    @classmethod
    def from_json(cls, value, name):
        """Of a file with this name (without .json). Damaged where it is none."""
        expect(value, dict, "the file")
        version = value.get("version")
        if version != VERSION:
            raise Damaged(f"version is {show(version)}, this console reads {VERSION}")
        messages = expect(value.get("messages"), list, "messages")
        created = number(value.get("created"), 0, 1e12, "created") or 0.0
        return cls(name, text(value.get("title", UNTITLED), "title"),
                   text(value.get("system", ""), "system"),
                   Settings.from_json(value.get("settings", {})),
                   [Message.from_json(m, f"messages[{i}]") for i, m in enumerate(messages)],
                   created, number(value.get("changed"), 0, 1e12, "changed") or created)


def file_part(name, text):
    """A file's text as it is sent: named, in a code block that it cannot end."""
    ticks = fence(text)
    return f"\n\nFile {name}:\n\n{ticks}\n{text.removesuffix(chr(10))}\n{ticks}\n"


def figures_of(reason, usage, seconds, first, error=None):
    """What a reply took: why it ended, tokens, seconds to the first token and in all, tokens a
    second after the first. Members that a server left out or got wrong are left out."""
    found = {"reason": reason, "seconds": round(seconds, 3)}
    if first is not None:
        found["first"] = round(first, 3)
    for name, path in (("prompt", ("prompt_tokens",)), ("tokens", ("completion_tokens",)),
                       ("cached", ("prompt_tokens_details", "cached_tokens")),
                       ("reasoning", ("completion_tokens_details", "reasoning_tokens"))):
        value = usage
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if type(value) is int and value >= 0:
            found[name] = value
    if first is not None and found.get("tokens", 0) > 1 and seconds > first:
        found["rate"] = round((found["tokens"] - 1) / (seconds - first), 2)
    if error:
        found["error"] = error
    return found
