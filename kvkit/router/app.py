"""`kvkit router`: an OpenAI-compatible server in front of vLLM prefill (P) and decode (D) engines.

    POST /v1/completions, /v1/chat/completions    through a P or straight to a D: `routing.decide`
    /v1/documents                                 KV for blending, computed ahead (`documents`)
    GET  /v1/models; POST /tokenize, /detokenize  answered by any D
    GET  /health                                  the state of each engine; HTTP status 503 while no D is up
    GET  /metrics                                 Prometheus text (`metrics`)

If an engine fails a request, another one takes it. If a stream breaks off, another engine continues it, and
the client sees one answer (`answers`). Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import aiohttp
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from kvkit.environment import is_loopback
from kvkit.observe.access import listen
from kvkit.router import openai
from kvkit.router.clients import MAX_BODY_BYTES, Client, ClientDisconnected, NullClient
from kvkit.router.connections import IDLE_S, BoundedSite, BusyConnections, raise_limit
from kvkit.router.dispatch import Dispatcher, RequestFailed, RoutedRequest
from kvkit.router.documents import Documents, PostedDocument
from kvkit.router.engines import IDENTITY_ENCODING, Engine, EngineFailed, RequestRefused, open_engines
from kvkit.router.events import EventLookup, EventSubscriber
from kvkit.router.lookups import CacheLookup, Lookup
from kvkit.router.marks import extract_documents
from kvkit.router.metrics import RouterMetrics
from kvkit.router.openai import Kind
from kvkit.router.settings import BlendLimits, RouterConfig
from kvkit.router.tokens import Headers, NoTokens, Tokenizer
from kvkit.router.traces import Traces
from kvkit.router.warmer import DocumentWarmer
from kvkit.settings import ConfigError
from kvkit.transfer import requests

log = logging.getLogger(__name__)

_SESSION_HEADER = "X-Session-ID"
_REQUEST_HEADER = "X-Request-Id"
_FORWARDED_HEADERS = ("Authorization", _SESSION_HEADER, "traceparent", "tracestate")
_CLIENT_LEFT = 499
_CLOSE_S = 10.0
_AnswerFunction = Callable[[Client, dict[str, str], bytes], Awaitable[web.StreamResponse]]


class Router:
    """The server, run by `runner`. Lives in one event loop.

    Args:
        lookup: lookup in an engine; default: its KV events and kvkit's HTTP endpoint, as configured.

    Attributes:
        busy: connections with a request in flight.
    """

    def __init__(self, config: RouterConfig, lookup: Lookup | None = None) -> None:
        self._config = config
        self._lookup = lookup
        self._warmer_count = 0 if config.blend is None else config.blend.first_use
        self._limits = config.blend
        self.busy = BusyConnections()

    def runner(self, close_s: float) -> web.AppRunner:
        """Return the application's runner; at shutdown, requests in flight get `close_s` seconds."""
        return web.AppRunner(
            self.app(),
            handler_cancellation=True,  # otherwise disconnected clients go unnoticed
            shutdown_timeout=close_s,
            keepalive_timeout=IDLE_S,
            access_log=None,
        )

    def app(self) -> web.Application:
        """Return a new application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self.busy.middleware])
        app.cleanup_ctx.append(self._run_engines)
        for kind, path in openai.PATHS.items():
            app.router.add_post(path, partial(self._serve, kind))
        if self._config.blend is not None:
            app.router.add_post("/v1/documents", self._post_document)
            app.router.add_get("/v1/documents/{id}", self._get_document)
            app.router.add_delete("/v1/documents/{id}", self._delete_document)
        app.router.add_get("/v1/models", self._forward)
        app.router.add_post("/tokenize", self._forward)
        app.router.add_post("/detokenize", self._forward)
        app.router.add_get("/health", self._health)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/readyz", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    async def _run_engines(self, _: web.Application) -> AsyncIterator[None]:
        """Connect to the engines, and watch their health, while the server runs."""
        config = self._config
        # one connection per request: a reused one may be closing, and aiohttp does not resend a POST
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=IDENTITY_ENCODING,
            auto_decompress=False,
        ) as session:
            prefills = open_engines("prefill", config, session)
            decodes = open_engines("decode", config, session)
            self._engines = engines = [*prefills, *decodes]
            self._metrics = RouterMetrics(engines)
            has_cache = any(engine.config.cache for engine in engines)
            caches = CacheLookup(session) if has_cache else None
            lookup, checks = self._lookup, []
            if lookup is None and caches is not None:
                lookup = caches
                checks = [caches.check(engine, config.health_timeout_s) for engine in engines]
            subscribers = {e.name: EventSubscriber(e, config) for e in engines if e.config.events is not None}
            if subscribers and self._lookup is None:
                lookup = EventLookup(subscribers, caches)
            self._tokenizer = Tokenizer(decodes, config.prefill_timeout_s)
            limit_s = config.lookup_timeout_s
            self._documents = Documents(self._tokenizer, decodes, lookup, caches, limit_s, config.requests)
            self._traces = Traces(config.otlp_traces_endpoint)
            self._dispatcher = Dispatcher(
                config, engines, self._tokenizer, self._metrics, lookup, self._traces
            )
            for warning in config.warnings:
                log.warning(warning)
            await asyncio.gather(*(engine.probe() for engine in engines), *checks)
            self._warmer = DocumentWarmer(self._compute_later, self._documents, self._metrics)
            tasks = [asyncio.create_task(engine.monitor()) for engine in engines]
            tasks += [asyncio.create_task(subscriber.run()) for subscriber in subscribers.values()]
            if caches is not None and self._limits is not None and self._limits.context == "auto":
                tasks.append(asyncio.create_task(self._follow_context(self._limits, decodes, caches)))
            tasks += [asyncio.create_task(self._warmer.run()) for _ in range(self._warmer_count)]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._traces.close)

    async def _serve(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        """Answer a completion request, to the last byte."""

        async def complete(client: Client, headers: dict[str, str], data: bytes) -> web.StreamResponse:
            with self._traces.span("kvkit.router", headers, request=headers[_REQUEST_HEADER]) as below:
                return await complete_below(client, below, data)

        async def complete_below(client: Client, headers: Headers, data: bytes) -> web.StreamResponse:
            parsed = openai.parse(kind, data)
            openai.check_request_policy(parsed, self._config.requests)
            posted = partial(self._documents.posted, request=parsed)
            parsed, marked = extract_documents(parsed, self._limits, posted)
            parsed, ids = await self._tokenizer.locate_documents(parsed, marked, headers)
            session = openai.session_of(parsed, request.headers.get(_SESSION_HEADER))
            routed = RoutedRequest(client, parsed, headers[_REQUEST_HEADER], session, headers, ids)
            response = await self._dispatcher.answer(routed)
            if self._warmer_count and requests.FIELD not in parsed.params:
                self._warmer.offer(parsed, ids, headers)
            return response

        status = _CLIENT_LEFT
        try:
            with self._metrics.seconds.labels("total").time():
                response = await self._answer(request, complete)
            status = response.status
            return response
        finally:
            self._metrics.answers.labels(str(status)).inc()

    async def _follow_context(
        self, limits: BlendLimits, decodes: Sequence[Engine], caches: CacheLookup
    ) -> None:
        """Ask decode engines what documents are to be computed behind, until one that blends says it."""
        while (told := await caches.blend_context(decodes, self._config.lookup_timeout_s)) is None:
            await asyncio.sleep(self._config.health_interval_s)
        self._limits = limits.model_copy(update={"context": "system" if told == "prefix" else "alone"})

    async def _post_document(self, request: web.Request) -> web.StreamResponse:
        """Make an engine compute a posted document."""

        async def compute(client: Client, headers: dict[str, str], data: bytes) -> web.StreamResponse:
            document, seconds = await self._documents.parse(data, headers)
            await self._compute(client, document, headers)
            return web.json_response(await self._documents.remember(document, seconds))

        return await self._answer(request, compute)

    async def _compute(self, client: Client, document: PostedDocument, headers: Headers) -> None:
        routed = RoutedRequest(client, document.request, headers[_REQUEST_HEADER], document.id, headers)
        await self._dispatcher.answer(routed)

    async def _compute_later(self, document: PostedDocument, headers: Headers) -> None:
        """Compute a document of an answered prompt, with only the Authorization of its headers."""
        passed = {name: headers[name] for name in ("Authorization",) if name in headers}
        await self._compute(NullClient(), document, passed | {_REQUEST_HEADER: document.id})

    async def _get_document(self, request: web.Request) -> web.StreamResponse:
        async def describe(*_: object) -> web.StreamResponse:
            document = self._documents.get(request.match_info["id"])
            return web.json_response(await self._documents.describe(document))

        return await self._answer(request, describe)

    async def _delete_document(self, request: web.Request) -> web.StreamResponse:
        async def forget(*_: object) -> web.StreamResponse:
            return web.json_response(self._documents.forget(request.match_info["id"]))

        return await self._answer(request, forget)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Forward a request to a D and return its answer; if it fails, ask the next D."""

        async def forward(_: Client, headers: dict[str, str], data: bytes) -> web.StreamResponse:
            method, path, limit_s = request.method, request.path, self._config.prefill_timeout_s
            failure: EngineFailed | None = None
            for engine in self._engines:
                if engine.role == "decode" and engine.up:
                    try:
                        reply = await engine.ask(method, path, data, headers, limit_s, openai.read_object)
                    except EngineFailed as error:
                        failure = error
                    else:
                        return web.json_response(reply)
            message = f"no decode engine answers: {failure or 'none is up'}"
            raise RequestFailed(503, message, None if failure is None else failure.answer)

        return await self._answer(request, forward)

    async def _answer(self, request: web.Request, answer: _AnswerFunction) -> web.StreamResponse:
        """Call `answer` with the client, headers for engines and the body; turn errors into responses."""
        client, limit_s = Client(request, self._config.idle_timeout_s), self._config.request_timeout_s
        try:
            try:
                async with asyncio.timeout(limit_s):
                    return await answer(client, _headers(request), await client.read())
            except openai.BadRequest as error:
                return await client.send_error(error.status, str(error))
            except (RequestRefused, RequestFailed) as error:
                if error.answer is None or client.stream_began:
                    return await client.send_error(error.status, str(error))
                status, body = error.answer  # passed on unchanged
                return web.Response(status=status, body=body, content_type="application/json")
            except NoTokens as error:
                return await client.send_error(503, str(error))
            except TimeoutError:
                return await client.send_error(504, f"no answer within {limit_s:g} s")
            except ClientDisconnected:
                raise
            except Exception:
                log.exception("internal error in the router")
                return await client.send_error(500, "internal error in the router; see the router's log")
        except ClientDisconnected:
            return web.Response(status=_CLIENT_LEFT)

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})  # whether or not engines are up: a restart helps none

    async def _health(self, _: web.Request) -> web.Response:
        states = [{"name": e.name, "role": e.role, "url": e.config.url, "up": e.up} for e in self._engines]
        healthy = any(engine.up for engine in self._engines if engine.role == "decode")
        return web.json_response({"engines": states}, status=200 if healthy else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics.registry), headers={"Content-Type": content_type})


def serve(config: RouterConfig) -> None:
    """Run the router until SIGINT or SIGTERM; requests in flight then get a few seconds.
    Raises ConfigError if it cannot listen on its address."""
    try:
        listening, url = listen(config.host, config.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host = {config.host!r}, port = {config.port}: {error}") from error
    if not is_loopback(config.host):
        log.warning("host = %r: other hosts can reach the router, which itself checks no keys", config.host)
    max_connections = raise_limit()
    log.info("listening on %s, for %d connections", url, max_connections)
    asyncio.run(_run(Router(config), listening, max_connections))


async def _run(router: Router, listening: socket.socket, max_connections: int) -> None:
    """Serve on a socket until SIGINT or SIGTERM."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopping.set)
    runner = router.runner(_CLOSE_S)
    await runner.setup()
    try:
        await BoundedSite(runner, listening, router.busy, max_connections).start()
        await stopping.wait()
    finally:
        await runner.cleanup()


def _headers(request: web.Request) -> dict[str, str]:
    """Return the headers to pass to engines. Raises BadRequest if one is not printable text."""
    for name in (*_FORWARDED_HEADERS, _REQUEST_HEADER):
        value = request.headers.get(name, "")
        if not value.isprintable():
            raise openai.BadRequest(f"{name}: want printable text in UTF-8")
    passed = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
    return passed | {_REQUEST_HEADER: request.headers.get(_REQUEST_HEADER) or uuid.uuid4().hex}
