"""A reply's tokens -> OpenAI objects: chunks of a stream, or one object. The text is the same.

`Reply.push(output)` gives the chunks that a token makes final, `Reply.end(reason)` the rest, and
`Reply.whole()` the object of everything so far. A stop string ends the reply where it begins, also
across tokens: text that may still become one is held back. It is looked for in content, not in
reasoning or tool calls.
"""

import json
import time
import uuid

from engine.api.parse import CONTENT, Parser
from engine.chat import Stream


class Reply:
    """One reply to an Ask. stopped: a stop string was met; the rest of the tokens are not wanted.

    Log-probabilities belong to tokens, content to text: those of tokens whose text is held back
    go out with the next chunk.
    """

    def __init__(self, ask, chat):
        self._ask, self._chat = ask, chat
        self.id = ("chatcmpl-" if ask.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        self._parser = Parser(chat, ask.tools, ask.reasoning, ask.call) if ask.chat else None
        self._stream = None if ask.chat else Stream(chat)
        self._held = ""             # content that a stop string may begin in
        self._texts = {"reasoning": [], "content": []}
        self._calls = []            # [id, name, [argument pieces]]
        self._logprobs = []         # entries of all tokens
        self._unsent = 0            # the first of them that is in no chunk yet
        self.tokens = self.cached = self.reasoning_tokens = 0
        self.stopped = False
        self.reason = None

    def first(self):
        """The chunk a stream begins with, or None."""
        return self._chunk({"role": "assistant", "content": ""}) if self._ask.chat else None

    def push(self, output):
        """Output -> [chunk]."""
        self.tokens += 1
        self.cached = max(self.cached, output.cached)
        if output.finish_reason == "stop":      # the stop id itself says nothing
            return []
        if output.logprob is not None:
            self._logprobs.append(self._entry(output))
        if self._parser is None:
            return self._content(self._stream.push(output.token))
        thinking = self._parser.state < CONTENT
        self.reasoning_tokens += thinking
        return self._deltas(self._parser.push(output.token))

    def end(self, reason):
        """The reply has ended for "stop", "length" or "cancelled" -> the last [chunk]."""
        chunks = []
        if not self.stopped:
            if self._parser is None:
                chunks = self._content(self._stream.finish())
            else:
                chunks = self._deltas(self._parser.finish())
            if not self.stopped and self._held:     # it began no stop string after all
                chunks += self._out(self._held)
        reason = "stop" if self.stopped else reason     # also by the last of the text
        self.reason = "tool_calls" if self._calls and reason == "stop" else reason
        return [*chunks, self._chunk({}, self.reason)]

    def usage(self, prompt_tokens):
        """The usage object."""
        found = {"prompt_tokens": prompt_tokens, "completion_tokens": self.tokens,
                 "total_tokens": prompt_tokens + self.tokens,
                 "prompt_tokens_details": {"cached_tokens": self.cached}}
        if self._ask.chat:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return found

    def usage_chunk(self):
        """The chunk without choices that `include_usage` asks for."""
        return {**self._head(True), "choices": [], "usage": self.usage(len(self._ask.ids))}

    def whole(self):
        """The object of a reply that has ended."""
        text = "".join(self._texts["content"])
        choice = {"index": 0, "finish_reason": self.reason, "logprobs": self._all(self._logprobs)}
        if self._ask.chat:
            message = {"role": "assistant", "content": text}
            if self._texts["reasoning"]:
                message["reasoning_content"] = "".join(self._texts["reasoning"])
            if self._calls:
                message["content"] = text or None
                message["tool_calls"] = [
                    {"id": i, "type": "function",
                     "function": {"name": name, "arguments": "".join(pieces)}}
                    for i, name, pieces in self._calls]
            choice["message"] = message
        else:
            choice["text"] = text
        return {**self._head(False), "choices": [choice],
                "usage": self.usage(len(self._ask.ids))}

    # --- text -----------------------------------------------------------------------------------

    def _deltas(self, deltas):
        chunks = []
        for d in deltas:
            if d.kind == "content":
                chunks += self._content(d.text)
            elif self.stopped:
                break
            elif d.kind == "reasoning":
                self._texts["reasoning"].append(d.text)
                chunks.append(self._chunk({"reasoning_content": d.text}))
            else:
                chunks += self._let_go()
                chunks.append(self._call(d))
        return chunks

    def _call(self, delta):
        if delta.kind == "call":
            self._calls.append(["call_" + uuid.uuid4().hex[:24], delta.text, []])
            call = {"index": delta.index, "id": self._calls[-1][0], "type": "function",
                    "function": {"name": delta.text, "arguments": ""}}
        else:
            self._calls[delta.index][2].append(delta.text)
            call = {"index": delta.index, "function": {"arguments": delta.text}}
        return self._chunk({"tool_calls": [call]})

    def _let_go(self):
        """What was held back, once something other than content follows."""
        held, self._held = self._held, ""
        return self._out(held) if held else []

    def _content(self, text):
        """More content -> chunks of what no stop string can reach any more."""
        if self.stopped or not text:
            return []
        text = self._held + text
        at = min((i for i in map(text.find, self._ask.stops) if i >= 0), default=None)
        if at is not None:
            self.stopped, self._held = True, ""
            return self._out(text[:at]) if at else []
        keep = _beginning(text, self._ask.stops)
        self._held = text[len(text) - keep:]
        return self._out(text[:len(text) - keep]) if keep < len(text) else []

    def _out(self, text):
        self._texts["content"].append(text)
        return [self._chunk({"content": text})]

    # --- objects --------------------------------------------------------------------------------

    def _head(self, chunk):
        kind = "chat.completion" if self._ask.chat else "text_completion"
        head = {"id": self.id, "object": kind + ".chunk" * (chunk and self._ask.chat),
                "created": self.created, "model": self._ask.model}
        return {**head, "usage": None} if chunk and self._ask.include_usage else head

    def _chunk(self, delta, reason=None):
        choice = {"index": 0, "finish_reason": reason,
                  "logprobs": self._all(self._logprobs[self._unsent:])}
        self._unsent = len(self._logprobs)
        if self._ask.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return {**self._head(True), "choices": [choice]}

    def _entry(self, output):
        """A token's log-probability, as the chat routes show it."""
        def shown(token, logprob):
            data = self._chat.token_bytes(token)
            return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0),
                    "bytes": list(data)}
        return {**shown(output.token, output.logprob),
                "top_logprobs": [shown(*pair) for pair in output.top]}

    def _all(self, entries):
        if not entries:
            return None
        if self._ask.chat:
            return {"content": entries}
        return {"tokens": [e["token"] for e in entries],
                "token_logprobs": [e["logprob"] for e in entries],
                "top_logprobs": [{t["token"]: t["logprob"] for t in e["top_logprobs"]}
                                 for e in entries]}


def _beginning(text, stops):
    """Characters at the end of text that are the beginning of a stop string: the most of them."""
    for size in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        if any(len(stop) > size and text.endswith(stop[:size]) for stop in stops):
            return size
    return 0


def event(value):
    """A server-sent event of a JSON value, or of "[DONE]"."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n"
