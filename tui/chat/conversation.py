"""A conversation: messages, system prompt and settings; the request it makes; its JSON.

Plain data, without a screen and without files (tui/chat/store.py). `from_json` takes nothing on
trust: `checks.Damaged` names the member that is not what it must be.
"""

import dataclasses
import secrets
import time
from dataclasses import dataclass, field

from tui.chat import checks
from tui.chat.checks import Damaged, choice, complete, expect, number, show, text, whole
from tui.chat.message import Message
from tui.chat.text import one_line, sendable

VERSION = 1
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
