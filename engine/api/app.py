"""The routes, and the thread that serves them.

| route | |
|---|---|
| POST /v1/chat/completions, /v1/completions | a reply, whole or streamed |
| GET /v1/models, /v1/models/ID | what is served |
| POST /tokenize | {"prompt"} or {"messages"} -> {"count", "tokens", "max_model_len"} |
| DELETE /requests/N | end a running or waiting request by telemetry's id: 204, or 404 |
| GET /health, /metrics, /telemetry | see engine.api.status |

Every error has the OpenAI shape. A key, where one is set, guards everything but /health. Pages of
other sites cannot post here through a browser: bodies must be application/json, which it asks about
first, and without a key the Host must name this machine, which a name that was bent to it does not.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.api import body as bodies
from engine.api.body import Refused, read
from engine.api.reply import Reply, event
from engine.api.status import status_routes
from engine.errors import (EngineError, PlanError, QueueFull, RequestError, TooLong,
                           Unavailable)

RETRY_SECONDS = 2       # Retry-After of a full queue, and while the engine starts or restarts
OPEN = ("/health",)     # routes that need no key
GONE = 499              # status for the log: the client has left
# Bytes of a body: what a window's text can take with escapes, and room for tools and the rest.
MAX_BODY, TOKEN_BYTES, ROOM = 64 << 20, 32, 1 << 20
MAX_DRAIN = 256 << 20   # of a body that is too large, read to its end so that the refusal is too


class Api:
    """The application. hub: engine.hub.Hub. chat: engine.chat.Chat. telemetry: what status serves.

    defaults: Sampling of what a request does not say. served: names of the model. created: seconds
    since 1970. key: None or the API key.
    """

    def __init__(self, hub, chat, telemetry, defaults, served, context, created, key=None):
        self.hub, self.chat, self.defaults, self.served = hub, chat, defaults, served
        self.context, self.created = context, created
        self.max_body = min(MAX_BODY, ROOM + TOKEN_BYTES * context)
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._text, methods=["POST"]),
            Route("/v1/models", self._models), Route("/v1/models/{name:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/requests/{number:int}", self._end, methods=["DELETE"]),
            *status_routes(hub, telemetry)]
        app = Starlette(routes=routes, exception_handlers={
            Refused: _refused, EngineError: _engine_error, HTTPException: _http_error,
            ClientDisconnect: _nobody, Exception: _bug})
        app.router.redirect_slashes = False
        self.app = _Guard(app, key)

    # --- replies --------------------------------------------------------------------------------

    async def _chat(self, request):
        return await self._reply(request, True)

    async def _text(self, request):
        return await self._reply(request, False)

    async def _reply(self, request, chat_route):
        data = await _body(request, self.max_body)
        ask = await run_in_threadpool(read, data, chat_route, self.chat, self.defaults,
                                      self.served)
        reply = Reply(ask, self.chat)
        ticket = await self.hub.submit(ask.ids, ask.sampling)
        if ask.stream:
            return _Events(self._events(ask, ticket, reply), lambda: self._release(ticket))
        work = asyncio.ensure_future(self._run(ticket, reply))
        left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():         # nobody waits for the answer any more
                return Response(status_code=GONE)
            await work
        finally:
            left.cancel()
            work.cancel()
            self._release(ticket)
        return JSONResponse(reply.whole())

    async def _run(self, ticket, reply):
        async for _ in self._chunks(ticket, reply):
            pass

    async def _chunks(self, ticket, reply):
        """Every chunk of a reply, to its end."""
        async for outputs in ticket:
            for output in outputs:
                for chunk in reply.push(output):
                    yield chunk
                if reply.stopped:
                    break
            reason = "stop" if reply.stopped else output.finish_reason
            if reason:
                for chunk in reply.end(reason):
                    yield chunk
                return

    async def _events(self, ask, ticket, reply):
        """The server-sent events of a reply; a failing engine ends them with an error event."""
        try:
            first = reply.first()
            if first:
                yield event(first)
            async for chunk in self._chunks(ticket, reply):
                yield event(chunk)
            if ask.include_usage:
                yield event(reply.usage_chunk())
            yield event("[DONE]")
        except EngineError as error:
            yield event(_of(error).body())

    def _release(self, ticket):
        if not ticket.ended:
            self.hub.cancel(ticket)

    # --- the rest -------------------------------------------------------------------------------

    async def _models(self, request):
        return JSONResponse({"object": "list", "data": [self._card(n) for n in self.served]})

    async def _model(self, request):
        name = request.path_params["name"]
        if name not in self.served:
            raise Refused(f"the model {ascii(name)[:80]} is not served here", "model", 404,
                          "model_not_found")
        return JSONResponse(self._card(name))

    def _card(self, name):
        return {"id": name, "object": "model", "created": self.created, "owned_by": "sparkgrid",
                "max_model_len": self.context}

    async def _end(self, request):
        number = request.path_params["number"]
        if not await self.hub.end(number):
            raise Refused(f"there is no request {number}", status=404)
        return Response(status_code=204)

    async def _tokenize(self, request):
        data = await _body(request, self.max_body)
        ids = await run_in_threadpool(bodies.tokens, data, self.chat)
        return JSONResponse({"count": len(ids), "max_model_len": self.context, "tokens": ids})


class _Events(StreamingResponse):
    """A stream of events. release is called when it has ended, whichever way and however early."""

    def __init__(self, events, release):
        super().__init__(events, media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._release = release

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _body(request, most):
    """The bytes of a JSON body."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(f"Content-Type is {ascii(kind)[:60]}, it must be application/json",
                      status=415)
    found, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_DRAIN:
            break
        if size <= most:
            found.append(piece)
    if size > most:
        raise Refused(f"the body has more than {most:,} bytes, the most for this model's window",
                      status=413)
    return b"".join(found)


async def _left(request):
    """Returns when the client has."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- errors ------------------------------------------------------------------------------------

def _of(error):
    """EngineError -> Refused."""
    text = bodies.sentence(error)
    if isinstance(error, QueueFull):
        return Refused(text, status=429, code="queue_full",
                       headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, RequestError):
        return Refused(text, code="context_length_exceeded" if isinstance(error, TooLong)
                       else None)
    if isinstance(error, Unavailable):
        return Refused(text, status=503, code="unavailable",
                       headers={"Retry-After": str(RETRY_SECONDS)})
    return Refused(text, status=500, code=type(error).__name__)


async def _refused(request, error):
    return JSONResponse(error.body(), error.status, error.headers)


async def _engine_error(request, error):
    return await _refused(request, _of(error))


async def _http_error(request, error):
    text = f"{request.method[:20]} {request.scope['path'][:100]} is not served here"
    return JSONResponse(Refused(text, status=error.status_code).body(), error.status_code,
                        error.headers)


async def _nobody(request, error):
    await asyncio.sleep(0.1)    # what broke the body may be known before the connection's end is
    return Response(status_code=GONE)


async def _bug(request, error):
    return JSONResponse(Refused("internal error; the engine's log says more", status=500).body(),
                        500)


class _Guard:
    """Answers 401 where the key is missing or wrong, compared in constant time; without a key, 403
    where the request was meant for another machine's name."""

    def __init__(self, app, key):
        self._app = app
        self._key = None if key is None else key.encode("utf-8")

    async def __call__(self, scope, receive, send):
        refused = self._refusal(scope) if scope["type"] == "http" else None
        app = self._app if refused is None else JSONResponse(refused.body(), refused.status,
                                                             refused.headers)
        return await app(scope, receive, send)

    def _refusal(self, scope):
        headers = dict(scope["headers"])
        if self._key is None:
            host = headers.get(b"host", b"localhost").decode("latin-1")
            return None if _local(host) else Refused(
                f"Host {ascii(host)[:60]} is not this machine; without --api-key only localhost "
                "and loopback addresses are served", status=403, code="wrong_host")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scope["path"] in OPEN or (
                hmac.compare_digest(token.strip(), self._key) and scheme.lower() == b"bearer"):
            return None
        return Refused("the API key is missing or wrong: send Authorization: Bearer KEY",
                       status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _local(host):
    """Whether a Host header names this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name.lower() in ("localhost", "")


# ---- the thread --------------------------------------------------------------------------------

def listen(host, port):
    """A listening socket; port 0 takes a free one. PlanError where it is taken."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, kind, number)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(512)
        except OSError:
            found.close()
            raise
        return found
    except (OSError, UnicodeError) as e:
        raise PlanError(f"port {port} of {host} cannot be served: "
                        f"{getattr(e, 'strerror', None) or e}",
                        "stop what listens there, or take another: --port 0 takes a free one"
                        ) from None


class Server:
    """Serves an Api on a listening socket, in a thread of its own."""

    def __init__(self, api, listening):
        self.host, self.port = listening.getsockname()[:2]
        self._hub = api.hub
        self._server = uvicorn.Server(uvicorn.Config(
            api.app, http="h11", log_config=None, log_level="error", access_log=False,
            lifespan="off", ws="none", proxy_headers=False, server_header=False,
            timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([listening],),
                                        name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self):
        """Whether the thread still serves."""
        return self._thread.is_alive()

    def stop(self, seconds):
        """Take no more connections, end those that are open, wait that long at most. The engine's
        loop has ended before."""
        self._hub.close()
        self._server.should_exit = True
        with contextlib.suppress(RuntimeError):
            self._thread.join(seconds)
