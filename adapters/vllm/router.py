"""`kvkit router`: an OpenAI-compatible server in front of vLLM engines that prefill (P) and that decode (D).

    POST /v1/completions, /v1/chat/completions    over a P or straight to a D: `routing.decide`
    GET  /v1/models; POST /tokenize, /detokenize  what a D answers
    GET  /health                                  the state of each engine; HTTP status 503 while no D is up
    GET  /metrics                                 Prometheus' text (`router_metrics`)

A request that an engine fails goes to another one; so does the rest of a stream that breaks off, and its
client sees one answer (`answers`). Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from kvkit.adapters.vllm import openai
from kvkit.adapters.vllm.answers import Answer, CannotContinue
from kvkit.adapters.vllm.engines import RETRIED, CacheLookup, Engine, EngineFailed, Lookup, Refused
from kvkit.adapters.vllm.openai import Asked, Kind
from kvkit.adapters.vllm.router_metrics import RouterMetrics
from kvkit.adapters.vllm.router_settings import RouterConfig
from kvkit.adapters.vllm.routing import Decision, decide
from kvkit.config import ConfigError
from kvkit.server import is_loopback

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""The longest request."""
MAX_SESSIONS = 100_000
"""So many conversations are remembered, with the D that each was at last."""
_SESSION_HEADER = "X-Session-ID"
_REQUEST_HEADER = "X-Request-Id"
_PASSED_ON = ("Authorization", _SESSION_HEADER, "traceparent", "tracestate")
_CLIENT_LEFT = 499
_CLOSE_S = 10.0


class _ClientLeft(Exception):
    """The client has gone, or takes nothing."""


class _Failed(Exception):
    """No engine answers a request.

    Attributes:
        answer: status, body and content type of the last engine's own error, if it had one.
    """

    def __init__(self, status: int, message: str, answer: tuple[int, bytes, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class _Client:
    """The client of one request, and the stream that it gets."""

    def __init__(self, request: web.Request, patience_s: float) -> None:
        self._request = request
        self._patience_s = patience_s
        self._stream: web.StreamResponse | None = None

    @property
    def began(self) -> bool:
        """Whether it has got anything."""
        return self._stream is not None

    async def read(self) -> bytes:
        """The body of its request."""
        async with self._patience():
            return await self._request.read()

    async def send(self, data: bytes) -> web.StreamResponse:
        """Events of the stream, which begins with the first."""
        async with self._patience():
            if self._stream is None:
                headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
                self._stream = web.StreamResponse(headers=headers)
                await self._stream.prepare(self._request)
            await self._stream.write(data)
            return self._stream

    async def fail(self, status: int, message: str) -> web.StreamResponse:
        """Say what went wrong: in the stream, where that has begun."""
        error = openai.error_body(status, message)
        if self._stream is None:
            return web.json_response(error, status=status)
        return await self.send(openai.event_bytes(error) + openai.DONE_EVENT)

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._patience_s):
                yield
        except (TimeoutError, ConnectionError) as error:
            raise _ClientLeft from error


@dataclass(slots=True)
class _Job:
    """One request on its way."""

    client: _Client
    asked: Asked
    session: str
    headers: Mapping[str, str]
    prompt_tokens: int
    held: dict[str, int | None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    hands_over: bool = True

    def held_by(self, engine: Engine) -> int | None:
        return self.held.get(engine.name)


class Router:
    """The server: `app` makes it. One event loop.

    Args:
        lookup: asks an engine what it holds; default: kvkit's HTTP endpoint, where the engine has one.
    """

    def __init__(self, config: RouterConfig, lookup: Lookup | None = None) -> None:
        self._config = config
        self._lookup = lookup
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prefills: list[Engine] = []
        self._decodes: list[Engine] = []

    def app(self) -> web.Application:
        """The application. Run it with `handler_cancellation`, or clients that leave are not noticed."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._engines_open)
        for kind, path in openai.PATHS.items():
            app.router.add_post(path, partial(self._serve, kind))
        app.router.add_get("/v1/models", self._pass_on)
        app.router.add_post("/tokenize", self._pass_on)
        app.router.add_post("/detokenize", self._pass_on)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    async def _engines_open(self, _: web.Application) -> AsyncIterator[None]:
        """The connections to the engines, and a watch on each one's health, while the server runs."""
        config = self._config
        # each request has a connection of its own: a kept one may be closing, and a POST is not sent again
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            self._prefills = [
                Engine(name, "prefill", engine, config, session) for name, engine in config.prefill.items()
            ]
            self._decodes = [
                Engine(name, "decode", engine, config, session) for name, engine in config.decode.items()
            ]
            engines = [*self._prefills, *self._decodes]
            self._metrics = RouterMetrics(engines)
            if self._lookup is None and any(engine.config.cache for engine in engines):
                self._lookup = CacheLookup(session)
            await asyncio.gather(*(engine.probe() for engine in engines))
            watches = [asyncio.create_task(engine.watch()) for engine in engines]
            yield
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _serve(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        """A completion, from its request to its last byte."""
        client = _Client(request, self._config.idle_timeout_s)
        status = _CLIENT_LEFT
        try:
            with self._metrics.seconds.labels("total").time():
                response = await self._answer(kind, request, client)
            status = response.status
            return response
        finally:
            self._metrics.answers.labels(str(status)).inc()

    async def _answer(self, kind: Kind, request: web.Request, client: _Client) -> web.StreamResponse:
        limit_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                asked = openai.parse(kind, await client.read())
                job = _Job(
                    client,
                    asked,
                    openai.session_of(asked, request.headers.get(_SESSION_HEADER)),
                    _headers(request),
                    openai.estimated_tokens(asked),
                    hands_over=asked.hands_over,
                )
                await self._look_up(job)
                return await self._route(job)
        except openai.BadRequest as error:
            return await client.fail(400, str(error))
        except web.HTTPRequestEntityTooLarge:
            return await client.fail(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        except (Refused, _Failed) as error:
            if error.answer is not None and not client.began:
                status, body, content_type = error.answer
                return web.Response(status=status, body=body, content_type=content_type)
            return await client.fail(getattr(error, "status", 502), str(error))
        except TimeoutError:
            return await client.fail(504, f"no answer within {limit_s:g} s")
        except _ClientLeft:
            return web.Response(status=_CLIENT_LEFT)

    async def _look_up(self, job: _Job) -> None:
        """Ask the engines what they hold of the prompt. Mutates `job`: nothing is known of who is late."""
        if self._lookup is None or not job.hands_over or job.asked.body.get("cache_salt"):
            return  # (salted, its records are not those that a lookup of the tokens alone is about)
        with self._metrics.seconds.labels("lookup").time():
            tokens = await self._tokens(job)
            if tokens is None:
                return
            job.prompt_tokens = len(tokens)
            up = [engine for engine in (*self._prefills, *self._decodes) if engine.up]
            asking = {asyncio.ensure_future(self._lookup(engine, tokens)): engine.name for engine in up}
            if not asking:
                return
            try:
                done, _ = await asyncio.wait(asking, timeout=self._config.lookup_timeout_s)
                job.held |= {asking[task]: task.result() for task in done}
            finally:
                for task in asking:
                    task.cancel()

    async def _tokens(self, job: _Job) -> tuple[int, ...] | None:
        """The prompt's tokens; None where no engine says so in time."""
        if job.asked.prompt_ids is not None:
            return job.asked.prompt_ids
        up = [engine for engine in self._decodes if engine.up]
        if not up:
            return None
        engine = min(up, key=lambda e: e.requests)
        try:
            return tuple(await engine.tokenize(openai.tokenize_body(job.asked), job.headers))
        except (EngineFailed, Refused) as error:
            log.warning("no lookup: %s", error)
            return None

    async def _route(self, job: _Job) -> web.StreamResponse:
        """Take a request to engines until one has answered it to the end."""
        asked, answer = job.asked, Answer(job.asked)
        failure: EngineFailed | None = None
        while True:
            decision = self._decide(job, asked, failure)
            try:
                return await self._attempt(job, asked, answer, decision)
            except EngineFailed as error:
                failure = error
            log.warning("%s", failure)
            job.failed.add(failure.engine.name)
            self._metrics.failures.labels(failure.engine.name, failure.cause).inc()
            if failure.engine.role == "decode" and job.client.began:
                if answer.finished:
                    owed = answer.last_event()
                    last = openai.event_bytes(owed) if owed is not None else b""
                    return await job.client.send(last + openai.DONE_EVENT)
                asked = self._resumed(answer, failure)

    def _resumed(self, answer: Answer, failure: EngineFailed) -> Asked:
        try:
            asked = answer.resume()
        except CannotContinue as error:
            self._metrics.takeovers.labels("failed").inc()
            raise _Failed(502, f"{failure}; {error}") from failure
        self._metrics.takeovers.labels("continued").inc()
        return asked

    def _decide(self, job: _Job, asked: Asked, failure: EngineFailed | None) -> Decision:
        prompt_tokens = _prompt_tokens(job, asked)
        prefills, decodes = (
            [e.candidate(job.held_by(e)) for e in engines if e.up and e.name not in job.failed]
            for engines in (self._prefills, self._decodes)
        )
        if not decodes:
            raise _Failed(
                503 if failure is None else 502,
                f"no decode engine is left: {failure or 'none is up'}",
                None if failure is None else failure.answer,
            )
        decision = decide(
            prompt_tokens,
            prefills,
            decodes,
            session=job.session,
            last=self._sessions.get(job.session),
            suitable=job.hands_over,
            limits=self._config.limits,
        )
        log.info(
            "%s: %s%s, %s: %d new of %d tokens",
            job.headers[_REQUEST_HEADER],
            f"{decision.prefill} -> " if decision.prefill else "",
            decision.decode,
            decision.reason,
            decision.new_tokens,
            prompt_tokens,
        )
        labels = decision.decode, decision.prefill or "", decision.reason
        self._metrics.requests.labels(*labels).inc()
        self._metrics.prompt_tokens.inc(prompt_tokens)
        computed = "decode" if decision.prefill is None else "prefill"
        self._metrics.new_tokens.labels(computed).inc(decision.new_tokens)
        return decision

    async def _attempt(
        self, job: _Job, asked: Asked, answer: Answer, decision: Decision
    ) -> web.StreamResponse:
        """Prefill and decode where it was decided.

        Raises:
            EngineFailed: one of the two failed.
        """
        decode = next(e for e in self._decodes if e.name == decision.decode)
        prefill = next((e for e in self._prefills if e.name == decision.prefill), None)
        params: Mapping[str, Any] | None = None
        if prefill is not None:
            try:
                params = await self._prefill(job, asked, prefill, decode, decision.new_tokens)
            except Refused as refusal:  # whether the client hears of it is for D to say
                log.warning("prefill engine %s refuses: %s", prefill.name, refusal)
                job.hands_over = False
        body = openai.decode_body(asked, params)
        with decode.working(0 if params else decision.new_tokens) as work:
            if not asked.streams:
                return await self._whole(job, body, decode)
            start, began = _now(), False
            limit_s = self._config.first_token_timeout_s
            async with decode.post(asked.path, body, job.headers, limit_s) as (response, deadline):
                async for event in _events(decode, response):
                    if not began:
                        began = True
                        work.computed()
                        self._remember(job, decode)
                        self._learn(job, asked, decode, params is not None, _now() - start)
                    deadline.reschedule(None)  # how long the client takes is not the engine's doing
                    await self._hand_on(job, answer, decode, event)
                    deadline.reschedule(_now() + self._config.idle_timeout_s)
            return await job.client.send(openai.DONE_EVENT)

    async def _prefill(
        self, job: _Job, asked: Asked, prefill: Engine, decode: Engine, new_tokens: int
    ) -> Mapping[str, Any]:
        """Have P compute the prompt; what D is to be told about its KV."""
        transfer = uuid.uuid4().hex
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        if decode.config.handoff is not None:
            params["handoff"] = decode.config.handoff
        body = openai.prefill_body(asked, params)
        start = _now()
        with prefill.working(new_tokens), self._metrics.seconds.labels("prefill").time():
            async with prefill.post(asked.path, body, job.headers, self._config.prefill_timeout_s) as (
                response,
                _,
            ):
                reply = _parsed(prefill, await response.read())
        computed = openai.computed_tokens(reply)
        prefill.prefill = prefill.prefill.after(new_tokens if computed is None else computed, _now() - start)
        given = reply.get("kv_transfer_params")
        return given or {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}

    def _learn(self, job: _Job, asked: Asked, decode: Engine, handed: bool, seconds: float) -> None:
        """Note how fast D was, where it is known how much was new for it. Mutates `decode`."""
        self._metrics.seconds.labels("first_event").observe(seconds)
        if job.held.get(decode.name) is None:
            return
        new = decode.candidate(job.held[decode.name]).new_tokens(_prompt_tokens(job, asked))
        if handed:
            decode.handoff = decode.handoff.after(new, seconds)
        else:
            decode.prefill = decode.prefill.after(new, seconds)

    async def _hand_on(self, job: _Job, answer: Answer, decode: Engine, event: openai.Body) -> None:
        """Give the client what it is to have of an event.

        Raises:
            EngineFailed: the event says so.
            Refused: it says that the request is wrong.
        """
        error = event.get("error")
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            body = json.dumps(event).encode()
            if isinstance(code, int) and 400 <= code < 500 and code not in RETRIED:
                raise Refused(code, body, "application/json")
            raise EngineFailed(decode, "error", str(error))
        if openai.aborted(event):
            raise EngineFailed(decode, "aborted", "it gave the request up")
        try:
            shown = answer.take(event)
        except CannotContinue as departed:
            self._metrics.takeovers.labels("failed").inc()
            raise _Failed(502, f"decode engine {decode.name}: {departed}") from departed
        if shown is not None:
            await job.client.send(openai.event_bytes(shown))

    async def _whole(self, job: _Job, body: openai.Body, decode: Engine) -> web.StreamResponse:
        """An answer that is no stream."""
        limit_s = self._config.request_timeout_s
        async with decode.post(job.asked.path, body, job.headers, limit_s) as (response, _):
            raw = await response.read()
        reply = _parsed(decode, raw)
        if openai.aborted(reply):
            raise EngineFailed(decode, "aborted", "it gave the request up")
        self._remember(job, decode)
        if reply.pop("kv_transfer_params", None) is not None:
            raw = json.dumps(reply).encode()
        return web.Response(body=raw, content_type="application/json")

    def _remember(self, job: _Job, decode: Engine) -> None:
        self._sessions[job.session] = decode.name
        self._sessions.move_to_end(job.session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """What any D answers."""
        data = await request.read()
        failure: EngineFailed | None = None
        for engine in [engine for engine in self._decodes if engine.up]:
            try:
                async with engine.request(
                    request.method, request.path, data, _headers(request), self._config.prefill_timeout_s
                ) as (response, _):
                    raw = await response.read()
                    return web.Response(status=response.status, body=raw, content_type=response.content_type)
            except EngineFailed as error:
                failure = error
        message = f"no decode engine answers: {failure or 'none is up'}"
        return web.json_response(openai.error_body(503, message), status=503)

    async def _health(self, _: web.Request) -> web.Response:
        engines = (*self._prefills, *self._decodes)
        shown = [{"name": e.name, "role": e.role, "url": e.config.url, "up": e.up} for e in engines]
        well = any(engine.up for engine in self._decodes)
        return web.json_response({"engines": shown}, status=200 if well else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics.registry), headers={"Content-Type": content_type})


def serve(config: RouterConfig) -> None:
    """Run the router until SIGINT or SIGTERM; requests under way then have a few seconds.

    Raises:
        ConfigError: it cannot listen on its address.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host = {config.host!r}, port = {config.port}: {error}") from error
    if not is_loopback(config.host):
        log.warning("host = %r: other hosts can reach it; it checks no keys itself", config.host)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%s", f"[{host}]" if ":" in host else host, port)
    web.run_app(
        Router(config).app(),
        sock=listener,
        handler_cancellation=True,
        shutdown_timeout=_CLOSE_S,
        access_log=None,
        print=None,
    )


def _headers(request: web.Request) -> dict[str, str]:
    """What engines get of a request's headers."""
    passed = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    return passed | {_REQUEST_HEADER: request.headers.get(_REQUEST_HEADER) or uuid.uuid4().hex}


def _prompt_tokens(job: _Job, asked: Asked) -> int:
    return job.prompt_tokens if asked.token_ids is None else len(asked.token_ids)


def _parsed(engine: Engine, raw: bytes) -> openai.Body:
    """A JSON object that an engine sent.

    Raises:
        EngineFailed: it is none.
    """
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise EngineFailed(engine, "error", f"it sent no JSON: {error}") from error
    if not isinstance(found, dict):
        raise EngineFailed(engine, "error", f"it sent a JSON {type(found).__name__}, want an object")
    return found


async def _events(engine: Engine, response: aiohttp.ClientResponse) -> AsyncIterator[openai.Body]:
    """The events of a stream, to its end.

    Raises:
        EngineFailed: it breaks off, or is no stream.
    """
    parser = openai.EventParser()
    async for piece in response.content.iter_any():
        try:
            found = list(parser.feed(piece))
        except ValueError as error:
            raise EngineFailed(engine, "error", str(error)) from error
        for data in found:
            if data == openai.DONE:
                return
            yield _parsed(engine, data)
    raise EngineFailed(engine, "cut", "its stream broke off")


def _now() -> float:
    return asyncio.get_running_loop().time()
