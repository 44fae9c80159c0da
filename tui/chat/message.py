"""One turn of a conversation: what is sent of it, its JSON, and what a reply took.

Plain data; `from_json` takes nothing on trust: `checks.Damaged` names the member that is not what
it must be.
"""

import dataclasses
from dataclasses import dataclass, field

from tui.chat import checks
from tui.chat.checks import call_of, choice, complete, expect, part_of, text
from tui.chat.text import fence

ROLES = ("user", "assistant", "tool")


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
