"""One reply's stream -> a message that grows, and the Textual messages that say so.

`Reader` takes OpenAI chunks and is lenient: a member of the wrong type counts as absent, for a
server may be anything. `stream` runs one request; cancelling it closes the connection, and with it
the engine frees the reply's pages.
"""

import asyncio
import time
from contextlib import aclosing

from tui.answer import ClientError
from tui.chat.message import figures_of
from tui.chat.text import sendable
from tui.messages import ReplyDelta, ReplyEnded, ReplyFailed, ReplyStarted

WRITES = 20             # times a second, at most, that what arrived is told
MAX_CALLS = 128         # tool calls of a reply


class Reader:
    """Chunks -> a Message. reason: why it ended, None before. usage: the OpenAI object or {}.
    pieces: chunks that said something, about as many as tokens."""

    def __init__(self, message):
        self._message = message
        self._new = {"reasoning": [], "content": [], "call": []}
        self._calls = {}            # index: call of the message
        self.reason, self.usage, self.pieces = None, {}, 0

    def take(self, chunk):
        """Read a chunk; whether it said something."""
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return False
        if isinstance(choice.get("finish_reason"), str):
            self.reason = sendable(choice["finish_reason"])[:40]
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return False
        said = False
        for name, kind in (("reasoning_content", "reasoning"), ("content", "content")):
            if isinstance(delta.get(name), str) and delta[name]:
                self._new[kind].append(sendable(delta[name]))
                said = True
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            said = self._call(call) or said
        self.pieces += said
        return said

    def _call(self, delta):
        index = delta.get("index", 0) if isinstance(delta, dict) else None
        function = delta.get("function") if isinstance(delta, dict) else None
        if type(index) is not int or not isinstance(function, dict):
            return False
        if index not in self._calls:
            if len(self._calls) == MAX_CALLS:
                return False
            self._calls[index] = {"id": f"call_{index}", "type": "function",
                                  "function": {"name": "", "arguments": ""}}
            self._message.tool_calls.append(self._calls[index])
        call = self._calls[index]
        if isinstance(delta.get("id"), str):
            call["id"] = sendable(delta["id"])
        for name in ("name", "arguments"):
            if isinstance(function.get(name), str):
                self._new["call"].append((call["function"], name, sendable(function[name])))
        return True

    def settle(self):
        """Put what arrived since the last time into the message: [(kind, text)]."""
        calls, self._new["call"] = self._new["call"], []
        joined = {}
        for function, name, text in calls:
            joined.setdefault((id(function), name), (function, []))[1].append(text)
        for (_, name), (function, texts) in joined.items():
            function[name] += "".join(texts)
        found = [(kind, "".join(texts)) for kind, texts in self._new.items() if texts]
        for kind, text in found:
            self._new[kind].clear()
            if kind == "reasoning":
                self._message.reasoning_content += text
            else:
                self._message.content += text
        return found + [("call", "".join(text for _, _, text in calls))] * bool(calls)


async def stream(client, conversation, message, post):
    """Ask for the conversation's next reply and let `message`, its last, grow. post: takes Textual
    messages. It has its figures, and grows no more, when ReplyEnded or ReplyFailed is posted."""
    body, reader = conversation.body(), Reader(message)
    started, told = time.monotonic(), 0.0
    first = later = None        # later: the timer of a `tell` that is due

    def tell():
        nonlocal told, later
        if later is not None:
            later.cancel()
        told, later = time.monotonic(), None
        for kind, text in reader.settle():
            post(ReplyDelta(conversation.id, kind, text))

    def figures(reason, error=None):
        tell()
        seconds = time.monotonic() - started
        message.figures = figures_of(reason, reader.usage, seconds, first, error)
        if "tokens" not in message.figures and reader.pieces:
            message.figures["pieces"] = reader.pieces
        message.growing = False
        return seconds

    try:
        async with aclosing(client.chat(body)) as chunks:
            async for chunk in chunks:
                if not told:
                    post(ReplyStarted(conversation.id))
                if reader.take(chunk) and first is None:
                    first = time.monotonic() - started
                wait = told + 1 / WRITES - time.monotonic()
                if wait <= 0:
                    tell()
                    await asyncio.sleep(0)      # a stream that never waits must not stop the rest
                elif later is None:             # a stream that pauses must not hide its last words
                    later = asyncio.get_running_loop().call_later(wait, tell)
    except asyncio.CancelledError:
        seconds = figures("stopped")
        post(ReplyEnded(conversation.id, "stopped", reader.usage, seconds, first))
        raise
    except ClientError as e:
        figures("failed", sendable(e.message))
        post(ReplyFailed(conversation.id, e.message))
        return
    if reader.reason is None:
        error = "the engine ended the reply without saying why"
        figures("failed", error)
        post(ReplyFailed(conversation.id, error))
        return
    seconds = figures(reader.reason)
    post(ReplyEnded(conversation.id, reader.reason, reader.usage, seconds, first))
