"""A local HTTP endpoint of a cache: metrics, health, lookups, and two operations on its contents.

    GET  /metrics    Prometheus' text (`kvkit.observe.metrics`)
    GET  /health     {"status": the worst state, "tiers": {name: state}}; HTTP status 503 while a tier is open
    GET  /engine     {"blend_context": "prefix" or "alone"}, if the engine blends; {} if it does not
    GET  /tiers      [{"name", "scope", "codec", "precision", "in_memory", "state", "queue_depth"}, ...]
    POST /lookup     {"tokens": [...]} -> {"tokens", "hit_tokens", "by_tier", "engine"}; moves nothing
    POST /clear      {"tier": name} -> {"removed_records"}
    POST /pin        {"tokens": [...], "seconds": s} -> {"pinned_tokens"}
    GET  /livez      200: the endpoint serves; without a token, as probes send none
    GET  /readyz     the same: an engine whose tiers are all open computes

/lookup and /pin also take a request's `model` (such as the name of a LoRA adapter) and `cache_salt`. They
answer for a request with these; HTTP status 404 for a model that the cache does not know. A lookup here is a
query: it has a counter of its own, apart from the lookups of requests. With `wait_s` it waits up to that many
seconds for pending stores. `engine` stands for the engine's own blocks, which the cache does not see: its
`hit_tokens` are null, with the `reason`.

Every other request carries the token: `Authorization: Bearer ...`. Clients without it share a few
connections: a new one closes the one that was idle longest (`kvkit.observe.connections`). Errors are reported
in {"error": ...}. An open tier is skipped, not fatal: do not restart a process because /health answers 503.

The endpoint speaks plain HTTP and belongs on loopback; beyond it, put TLS in front.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import uvicorn
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkit.cache import Cache
from kvkit.environment import is_loopback
from kvkit.format.layout import Namespace
from kvkit.observe import metrics
from kvkit.observe.access import DEFAULT_PORT, check_token, listen
from kvkit.observe.connections import Connection, HttpListener
from kvkit.settings import ConfigError
from kvkit.tiers.health import HealthState
from kvkit.transfer.sequence import UnknownModel
from kvkit.workers import Workers

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Maximum bytes of a request's body: enough for a prompt of over a million tokens."""
BODY_S = 10.0
"""Time limit for sending a body, in seconds."""
_STATES_BY_SEVERITY: tuple[HealthState, ...] = ("ok", "slow", "half-open", "open")
_PROBES = ("/livez", "/readyz")
_THREADS = 4
_ENGINE = {"hit_tokens": None, "reason": "the cache does not see which blocks the engine itself keeps"}
_CLOSE_S = 2


class Server:
    """The endpoint of one cache, in its own thread; a context manager. Needs the extra `server`.

    Args:
        cache: cache to serve. It is not closed with the endpoint; close the endpoint first.
        token: token that clients must show, at least MIN_TOKEN_CHARS printable ASCII characters.
        port: port to listen on; 0: any free port, named in `url`.
        timeout_s: longest time that a request waits for the cache, in seconds.

    Attributes:
        engine: what the engine tells of itself, the answer of /engine.

    Raises:
        ConfigError: a setting is invalid, or the address is taken.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        timeout_s: float = 30.0,
    ) -> None:
        check_token(token, "server.token")
        self.engine: dict[str, str] = {}
        try:
            self._socket, self.url = listen(host, port)
            # accepted sockets inherit it; without it an answer waits 40 ms for the client's acknowledgement
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"server.host={host!r}, server.port={port}: {error}") from error
        self._workers = Workers(_THREADS, "kvkit-http-work")
        self._clearing = Workers(1, "kvkit-http-clear")  # a tier that hangs blocks only other clears
        app = _guarded(_app(cache, self.engine, self._workers, self._clearing, timeout_s), token)
        if not is_loopback(host):
            log.warning("server.host=%r: other hosts can reach it, and tokens travel in plain text", host)
        settings = uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            backlog=1,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        self._server = HttpListener(settings)
        self._thread = threading.Thread(target=self._run, name="kvkit-http", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish requests for up to 2 s and end the thread; return whether it ended within `timeout_s`."""
        self._server.should_exit = True
        self._thread.join(timeout_s)
        self._workers.close(0.0)
        self._clearing.close(0.0)
        if self._thread.is_alive():
            log.warning("%s did not close within %s s", self.url, timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("%s ended", self.url)
        finally:
            self._socket.close()


def _guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Wrap `app` for clients with the token, and probes. Others get 401 before anything they sent is read."""
    expected = token.encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _PROBES and scope["method"] in ("GET", "HEAD"):
            await JSONResponse({"status": "ok"}, headers={"Connection": "close"})(scope, receive, send)
            return
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, presented = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        respond, headers = app, {"Connection": "close"}
        if scheme.lower() != b"bearer" or not secrets.compare_digest(presented.strip(), expected):
            headers["WWW-Authenticate"] = "Bearer"
            respond = JSONResponse({"error": "want Authorization: Bearer and the token"}, 401, headers)
        elif not scope["state"]["connection"].authenticate():
            respond = JSONResponse({"error": "too many requests are in flight"}, 503, headers)
        await respond(scope, receive, send)

    return guarded


_TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class _TokensBody(_Body):
    tokens: list[_TokenId]
    model: str | None = None
    cache_salt: str = ""


class _LookupBody(_TokensBody):
    wait_s: float = Field(0.0, ge=0, le=10)


class _ClearBody(_Body):
    tier: str


class _PinBody(_TokensBody):
    seconds: float = Field(gt=0, le=86400, allow_inf_nan=False)


_B = TypeVar("_B", bound=_Body)


def _app(
    cache: Cache, engine: Mapping[str, str], workers: Workers, clearing: Workers, timeout_s: float
) -> Starlette:
    """Build the routes. Threads do, with a deadline, all work that may wait for a tier or parse for long."""
    registry = metrics.register(cache)

    async def show_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    async def health(_: Request) -> Response:
        states = dict(cache.tier_states())
        worst = max(states.values(), key=_STATES_BY_SEVERITY.index, default="ok")
        return JSONResponse({"status": worst, "tiers": states}, 503 if worst == "open" else 200)

    async def tiers(_: Request) -> Response:
        return JSONResponse(_tiers(cache))

    async def describe_engine(_: Request) -> Response:
        return JSONResponse(dict(engine))

    def namespace(body: _TokensBody) -> Namespace:
        try:
            return cache.namespace_of(body.model, body.cache_salt)
        except UnknownModel as error:
            raise HTTPException(404, str(error)) from None

    def lookup(body: _LookupBody) -> dict[str, Any]:
        hit = cache.query(body.tokens, namespace(body), body.wait_s)
        counts = {"tokens": len(body.tokens), "hit_tokens": hit.tokens, "by_tier": dict(hit.by_tier)}
        return counts | {"engine": _ENGINE}

    def clear(body: _ClearBody) -> dict[str, Any]:
        if body.tier not in cache.tiers:
            choices = ", ".join(cache.tiers)
            raise HTTPException(404, f"tier = {body.tier!r}: no such tier; the tiers are {choices}")
        try:
            return {"removed_records": cache.clear(body.tier)}
        except TimeoutError as error:
            raise HTTPException(504, str(error)) from None

    def pin(body: _PinBody) -> dict[str, Any]:
        return {"pinned_tokens": cache.pin(body.tokens, body.seconds, namespace(body))}

    routes = [
        Route("/metrics", show_metrics),
        Route("/health", health),
        Route("/tiers", tiers),
        Route("/engine", describe_engine),
        _post("/lookup", _LookupBody, lookup, workers, timeout_s),
        _post("/clear", _ClearBody, clear, clearing, timeout_s),
        _post("/pin", _PinBody, pin, workers, timeout_s),
    ]
    # each type by name: a handler of Exception itself would make the server log a second traceback
    errors: Sequence[type[Exception]] = (OSError, RuntimeError, ValueError, LookupError, TypeError)
    handlers = {HTTPException: _refuse, ClientDisconnect: _drop} | dict.fromkeys(errors, _report_failure)
    return Starlette(routes=routes, exception_handlers=handlers)


def _tiers(cache: Cache) -> list[dict[str, Any]]:
    states, depths = cache.tier_states(), cache.queue_depths()
    return [
        {
            "name": name,
            "scope": tier.scope,
            "codec": tier.codec,
            "precision": tier.precision,
            "in_memory": tier.in_memory,
            "near": tier.in_memory,  # its former name, until the next version
            "state": states[name],
            "queue_depth": depths.get(name, 0),
        }
        for name, tier in cache.tiers.items()
    ]


def _post(
    path: str, model: type[_B], operation: Callable[[_B], dict[str, Any]], threads: Workers, timeout_s: float
) -> Route:
    """Build the route of an operation; one of `threads` parses the body and runs it."""

    def work(raw: bytes) -> dict[str, Any]:
        try:
            body = model.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            location = ".".join(map(str, first["loc"])) or "body"
            fields = ", ".join(model.model_fields)
            raise HTTPException(422, f"{location}: {first['msg']}; the fields are {fields}") from None
        return operation(body)

    async def endpoint(request: Request) -> Response:
        raw = await _read_body(request)
        # shielded: a worker completes its future even if nobody waits for it any more
        future = asyncio.wrap_future(threads.submit(lambda: work(raw)))
        try:
            return JSONResponse(await asyncio.wait_for(asyncio.shield(future), timeout_s))
        except TimeoutError:
            if future.done():  # the tier timed out, not this wait
                raise
            raise HTTPException(504, f"no answer within {timeout_s} s") from None

    return Route(path, endpoint, methods=["POST"])


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _report_failure(request: Request, error: Exception) -> Response:
    log.warning("%s failed", request.url.path, exc_info=error)
    kind = type(error).__name__  # the error's text may quote a store's address, so only the log has it
    return JSONResponse({"error": f"{request.url.path} failed: {kind}; see the log"}, 500)


async def _drop(_: Request, __: Exception) -> Response:
    return Response(status_code=400)


async def _read_body(request: Request) -> bytes:
    """Read the body, up to MAX_BODY_BYTES and within BODY_S seconds."""
    close = {"Connection": "close"}
    too_long = HTTPException(413, f"the body is longer than {MAX_BODY_BYTES} bytes", close)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_long
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_S} s", close) from None
    return bytes(body)
