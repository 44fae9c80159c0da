"""The engine's HTTP side: the only file of the console that makes requests.

Every failure is a `ClientError` in words for a reader: what happened, at which address, and what
may help. Nothing that a server sends is trusted (tui/answer.py).
"""

import asyncio
import socket

import httpx

from tui.answer import ClientError, beginning, cause, check, events, object_of, told

URL = "http://127.0.0.1:8114"
CONNECT = 5.0           # seconds to connect in, and to answer small requests in
SILENCE = 25.0          # seconds of telemetry without a byte; the engine sends one every 10
# A reply may be silent for as long as a long prompt takes; a machine that is gone shows by this.
ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)]


def address(url):
    """A URL as it may be typed (host:port, too) -> the one that requests begin with."""
    text = url.strip()
    if "://" not in text:
        text = "http://" + text
    try:
        parts = httpx.URL(text)
    except httpx.InvalidURL as e:
        raise ClientError(f"{url!r} is not an address: {e}") from None
    if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > 65535:
        raise ClientError(f"{url!r} is not an address; {URL} is one")
    return text.rstrip("/")


class Client:
    """An engine at an address. url: as typed. key: its API key, None or "" without one."""

    def __init__(self, url=URL, key=None):
        self.url = address(url)
        headers = {"Accept-Encoding": "identity"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise ClientError("the API key has characters that a header cannot carry")
            headers["Authorization"] = f"Bearer {key}"
        # trust_env: a proxy for the web is no way to an engine
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, trust_env=False,
            timeout=httpx.Timeout(CONNECT),
            transport=httpx.AsyncHTTPTransport(
                socket_options=ALIVE, trust_env=False,
                limits=httpx.Limits(max_connections=64, max_keepalive_connections=4)))

    async def close(self):
        """End all connections."""
        await self._http.aclose()

    # --- what the console asks ------------------------------------------------------------------

    async def telemetry(self):
        """Yields (kind, data): ("snapshot", tree) first, then ("patch", patch). Ends by an error,
        or when the engine ends the stream."""
        async with self._stream("GET", "/telemetry", SILENCE) as answer:
            async for kind, data in events(answer, self.url):
                if kind in ("snapshot", "patch"):
                    yield kind, object_of(data, f"telemetry of {self.url}")

    async def once(self):
        """The newest tree."""
        async def first():
            async for kind, tree in self.telemetry():
                if kind == "snapshot":
                    return tree
            raise ClientError(f"{self.url} ended its telemetry without a snapshot")
        try:
            return await asyncio.wait_for(first(), 2 * CONNECT)
        except TimeoutError:
            raise ClientError(f"{self.url} sent no snapshot in {2 * CONNECT:g} s") from None

    async def chat(self, body):
        """POST /v1/chat/completions, streamed; yields each chunk, an object. body: all but
        `stream`. ClientError: refused, failed half way, or broken off."""
        body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        async with self._stream("POST", "/v1/chat/completions", None, json=body) as answer:
            async for _, data in events(answer, self.url):
                if data == "[DONE]":
                    return
                chunk = object_of(data, "the reply")
                if "error" in chunk:
                    raise ClientError(told(chunk) or "the engine failed", answer.status_code)
                yield chunk
        raise ClientError("the reply broke off: the engine ended the stream before its end")

    async def health(self):
        """(HTTP status, object): 200 while the engine is well, 503 with a reason."""
        answer = await self._request("GET", "/health")
        return answer.status_code, object_of(answer.text, f"{self.url}/health")

    async def models(self):
        """The models that are served: objects with `id` and `max_model_len` (tokens)."""
        answer = await self._request("GET", "/v1/models")
        check(answer.status_code, answer.content, self.url)
        found = object_of(answer.text, f"{self.url}/v1/models").get("data")
        return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []

    async def cancel(self, request_id):
        """End a request: True, or False where it has ended already."""
        answer = await self._request("DELETE", f"/requests/{int(request_id)}")
        if answer.status_code == 404:
            return False
        check(answer.status_code, answer.content, self.url)
        return True

    # --- how ------------------------------------------------------------------------------------

    async def _request(self, method, path):
        try:
            return await self._http.request(method, path)
        except httpx.HTTPError as e:
            raise self._broken(e, CONNECT) from None

    def _stream(self, method, path, silence, **more):
        return _Stream(self, self._http, method, path, silence, more)

    def _broken(self, error, silence):
        """httpx.HTTPError -> ClientError."""
        if isinstance(error, (httpx.ConnectTimeout, httpx.PoolTimeout)):
            return ClientError(f"no engine answers at {self.url}: no connection in {CONNECT:g} s")
        if isinstance(error, httpx.ConnectError):
            return ClientError(f"no engine answers at {self.url}: {cause(error)}")
        if isinstance(error, httpx.ReadTimeout):
            return ClientError(f"{self.url} is connected and says nothing for {silence:g} s")
        return ClientError(f"the connection to {self.url} broke: {cause(error)}")


class _Stream:
    """`async with`: a streamed answer with status 200; httpx's errors become ClientError."""

    def __init__(self, client, http, method, path, silence, more):
        self._client, self._silence = client, silence
        # silence counts until the first byte, too: a queued request has its answer at once
        timeout = httpx.Timeout(CONNECT, read=silence, write=60.0)
        self._answer = http.stream(method, path, timeout=timeout, **more)

    async def __aenter__(self):
        try:
            answer = await self._answer.__aenter__()
        except httpx.HTTPError as e:
            raise self._client._broken(e, self._silence) from None
        try:
            if answer.status_code != 200:
                check(answer.status_code, await beginning(answer), self._client.url)
            kind = answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ClientError(f"{self._client.url} does not answer like an engine "
                                  f"(Content-Type {kind[:60] or 'missing'})", answer.status_code)
        except BaseException as e:
            await self._answer.__aexit__(type(e), e, e.__traceback__)
            if isinstance(e, httpx.HTTPError):
                raise self._client._broken(e, self._silence) from None
            raise
        return answer

    async def __aexit__(self, kind, error, trace):
        await self._answer.__aexit__(kind, error, trace)
        if isinstance(error, httpx.HTTPError):
            raise self._client._broken(error, self._silence) from None
