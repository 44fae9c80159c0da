"""What the parts of the console tell each other, as Textual messages.

To the app from the link: `Telemetry`, `Link`, `Restarted`; from its look at /health: `Health`;
from the dashboard: `CancelRequest`; for the log from anything: `Note`. To the chat from a worker
that streams a reply: `ReplyStarted`, `ReplyDelta`, `ReplyEnded`, `ReplyFailed`.
"""

from dataclasses import dataclass

from textual.message import Message


@dataclass
class Telemetry(Message, bubble=False):
    """A new tree (docs/telemetry.md). seconds: time.monotonic() when it came, or a recording's."""

    state: dict
    seconds: float

    def can_replace(self, message):
        """Of several that wait only the newest counts."""
        return isinstance(message, Telemetry)


@dataclass
class Link(Message, bubble=False):
    """Whether the engine answers. reason: why not. retry_in: seconds to the next try, 0: now."""

    up: bool
    reason: str = ""
    retry_in: float = 0.0


@dataclass
class Health(Message, bubble=False):
    """What /health says: status "ok", or another with a reason (docs/telemetry.md)."""

    status: str
    reason: str = ""


@dataclass
class Restarted(Message, bubble=False):
    """Another engine answers at the same address. started: seconds since 1970."""

    started: float


@dataclass
class Note(Message):
    """A line of the console's own for the log. level: "info", "warning" or "fault"."""

    level: str
    text: str


@dataclass
class CancelRequest(Message):
    """End the request with this id."""

    id: int


@dataclass
class ReplyStarted(Message):
    """The engine has taken a chat request."""

    conversation_id: str


@dataclass
class ReplyDelta(Message):
    """More of a reply. kind: "reasoning", "content", or "call" (a tool call's text)."""

    conversation_id: str
    kind: str
    text: str


@dataclass
class ReplyEnded(Message):
    """A reply's end. reason: "stop", "length", "tool_calls", "stopped" (by the user). usage: the
    OpenAI object, {} where there is none. seconds: from the request to the end; first: to the
    first token, None without one."""

    conversation_id: str
    reason: str
    usage: dict
    seconds: float
    first: float | None


@dataclass
class ReplyFailed(Message):
    """A request was refused or its reply broke off. message: the engine's own words."""

    conversation_id: str
    message: str
