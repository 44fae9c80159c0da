"""What a server's answer says, read without trust: events have a largest size, what is not JSON or
not an object is an error by name, and an error is told in the server's own words where it has some.
"""

import json
import os

MAX_EVENT = 16 << 20    # bytes of one server-sent event
MAX_ERROR = 1 << 16     # bytes of an error's body that are read


class ClientError(Exception):
    """message: for a reader. status: HTTP, None where there was no answer."""

    def __init__(self, message, status=None):
        super().__init__(message)
        self.message, self.status = message, status


async def events(answer, url):
    """Server-sent events of an httpx.Response: yields (kind, data); comments are left out."""
    kind, data, size = "message", [], 0
    async for line in _lines(answer, url):
        if line:
            size += len(line)
            if size > MAX_EVENT:
                raise ClientError(f"{url} sent an event of more than {MAX_EVENT:,} bytes")
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ").decode("utf-8", "replace")
            if name == b"data":
                data.append(value)
            elif name == b"event":
                kind = value
        else:
            if data:
                yield kind, "\n".join(data)
            kind, data, size = "message", [], 0


async def _lines(answer, url):
    """Lines of an answer's body as bytes, without their ends (LF or CR LF)."""
    held, size = [], 0
    async for piece in answer.aiter_bytes():
        *lines, rest = piece.split(b"\n")
        for line in lines:
            yield b"".join((*held, line)).removesuffix(b"\r")
            held, size = [], 0
        held.append(rest)
        size += len(rest)
        if size > MAX_EVENT:
            raise ClientError(f"{url} sent a line of more than {MAX_EVENT:,} bytes")


async def beginning(answer):
    """The first bytes of a body."""
    found = b""
    async for piece in answer.aiter_bytes():
        found += piece
        if len(found) > MAX_ERROR:
            break
    return found


def check(status, body, url):
    """ClientError with the server's own words where status is none of success."""
    if 200 <= status < 300:
        return
    try:
        why = told(json.loads(body))
    except (ValueError, RecursionError):
        why = None
    if why is None:
        why = f"{url} answers {status} and no reason"
    if status == 401:
        why += " (--api-key KEY, or SPARKGRID_API_KEY in the environment)"
    raise ClientError(why, status)


def told(value):
    """The message of an OpenAI error object, None where there is none."""
    error = value.get("error") if isinstance(value, dict) else None
    found = error.get("message") if isinstance(error, dict) else error
    return found[:2000] if isinstance(found, str) and found else None


def object_of(data, what):
    """The JSON object of a text. what: what it is of, in words."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ClientError(f"{what} is not JSON: {data[:60]!r}") from None
    if not isinstance(value, dict):
        raise ClientError(f"{what} is not a JSON object: {data[:60]!r}")
    return value


def cause(error):
    """The innermost words of an exception."""
    found = error
    while inner := (found.__cause__ or found.__context__
                    or next(iter(getattr(found, "exceptions", ())), None)):
        found = inner
    if isinstance(found, OSError) and found.errno and found.errno > 0:
        return os.strerror(found.errno)
    return getattr(found, "strerror", None) or str(found) or type(error).__name__
