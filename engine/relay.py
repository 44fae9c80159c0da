"""The bytes of one HTTP/1.1 exchange on their way through engine.front: requests and answers as
they must be rewritten, and how an answer ends whose sender is gone.

A request is passed on with `Connection: close`, so each connection carries one exchange, and what
follows the request's head needs no understanding. `Answer` follows the engine's bytes: it lets
whole chunks through only, so an event stream that breaks off can always be ended as HTTP and as
events must end.
"""

import json

HEAD_END = b"\r\n\r\n"
RETRY_SECONDS = 2           # Retry-After of a refusal

HEAD, LENGTH, CHUNKS, REST, DONE = range(5)     # what an Answer waits for


def error_object(message):
    """The OpenAI error object of an engine that is not there."""
    return {"error": {"message": message, "type": "server_error", "param": None,
                      "code": "unavailable"}}


def refusal(message, status="503 Service Unavailable", facts=None):
    """A whole answer: the error in the OpenAI shape, `facts` beside it, and when to ask again."""
    body = json.dumps({**error_object(message), **(facts or {})}).encode()
    head = (f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            f"\r\nRetry-After: {RETRY_SECONDS}\r\nConnection: close\r\n\r\n")
    return head.encode() + body


def closing(head):
    """A request's head, to its empty line -> (method, the head asking to close afterwards).

    ValueError where it is none.
    """
    first, *lines = head[:-len(HEAD_END)].split(b"\r\n")
    method, _, version = first.split(b" ", 2)
    if not version.startswith(b"HTTP/1."):
        raise ValueError(version)
    kept = [line for line in lines
            if line.split(b":")[0].strip().lower() not in (b"connection", b"keep-alive")]
    return method, b"\r\n".join([first, *kept, b"Connection: close"]) + HEAD_END


class Answer:
    """One answer, to a request of this method. done: it has come whole. begun: its head has."""

    def __init__(self, method):
        self._bodiless = method == b"HEAD"
        self._state, self._left = HEAD, 0
        self._data = b""            # come, and not to be passed on yet
        self._tail = b"\n\n"        # of the body passed on: where an event ends
        self.begun = self.events = False

    @property
    def done(self):
        return self._state == DONE

    def feed(self, data):
        """The engine's next bytes -> the bytes to pass on. ValueError where they are no HTTP."""
        self._data += data
        found = []
        while piece := self._next():
            found.append(piece)
        return b"".join(found)

    def ended(self):
        """The engine has closed in good order: the end of an answer that says no length."""
        if self._state == REST:
            self._state = DONE

    def mend(self, message):
        """The bytes that end a broken answer with an error; b"" where nothing can."""
        if self.done:
            return b""
        if not self.begun:
            return refusal(message)
        if not self.events or self._state == LENGTH:
            return b""
        event = f"data: {json.dumps(error_object(message))}\n\n".encode()
        if self._tail != b"\n\n":
            event = b"\n\n" + event
        if self._state == REST:
            return event
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)

    # --- what comes next ------------------------------------------------------------------------

    def _next(self):
        if self._state == HEAD:
            return self._head()
        if self._state == CHUNKS:
            return self._chunk()
        if self._state == LENGTH:
            piece = self._take(min(self._left, len(self._data)))
            self._left -= len(piece)
            if not self._left:
                self._state = DONE
            return piece
        return self._take(len(self._data)) if self._state == REST else b""

    def _take(self, size):
        piece, self._data = self._data[:size], self._data[size:]
        return piece

    def _head(self):
        end = self._data.find(HEAD_END)
        if end < 0:
            return b""
        first, *lines = self._data[:end].split(b"\r\n")
        status = int(first.split(b" ")[1])
        fields = {name.strip().lower(): value.strip().lower()
                  for name, _, value in (line.partition(b":") for line in lines)}
        if status >= 200:           # below, the answer itself is still to come
            self.begun = True
            self.events = fields.get(b"content-type", b"").startswith(b"text/event-stream")
            self._left = int(fields.get(b"content-length", b"0"))
            if self._bodiless or status in (204, 304):
                self._state = DONE
            elif fields.get(b"transfer-encoding") == b"chunked":
                self._state = CHUNKS
            elif b"content-length" in fields:
                self._state = LENGTH if self._left else DONE
            else:
                self._state = REST
        return self._take(end + len(HEAD_END))

    def _chunk(self):
        """A whole chunk, or the end of all. The engine sends no trailers."""
        end = self._data.find(b"\r\n")
        if end < 0:
            return b""
        size = int(self._data[:end].split(b";")[0], 16)
        whole = end + 2 + size + 2
        if len(self._data) < whole:
            return b""
        if size == 0:
            self._state = DONE
        else:
            self._tail = (self._tail + self._data[end + 2:whole - 2][-2:])[-2:]
        return self._take(whole)
