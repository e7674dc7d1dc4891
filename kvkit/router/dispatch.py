"""Dispatch of a request to engines, through a P or straight to a D, until the answer is complete."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from aiohttp import web

from kvkit.router import openai
from kvkit.router.answers import Answer, CannotContinue
from kvkit.router.clients import Client
from kvkit.router.engines import (
    RETRIED_STATUSES,
    Engine,
    EngineAnswer,
    EngineFailed,
    EngineRole,
    EngineShare,
    RequestRefused,
)
from kvkit.router.lookups import Lookup, ask_each, held_tokens
from kvkit.router.metrics import RouterMetrics
from kvkit.router.openai import Body, ParsedRequest
from kvkit.router.routing import Candidate, Decision, decide, update_speed
from kvkit.router.settings import RouterConfig
from kvkit.router.tokens import NoTokens, Tokenizer
from kvkit.router.traces import Traces

log = logging.getLogger(__name__)

DECODE = "kvkit.router.decode"
"""Name of the span of a decode engine's answer."""
MAX_SESSIONS = 100_000
"""Maximum number of conversations to remember, each with its last D."""


class RequestFailed(Exception):
    """No engine could answer a request.

    Attributes:
        answer: the last engine's error response, if it sent one.
    """

    def __init__(self, status: int, message: str, answer: EngineAnswer | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


@dataclass(slots=True)
class RoutedRequest:
    """A request in flight.

    Attributes:
        request: the client's request.
        id: request id in the log and for the engines.
        session: name of its conversation.
        headers: headers for the engines.
        token_ids: token ids of the prompt, if an engine was asked for them; None: it was not.
        held: by engine, number of prompt tokens that it need not compute.
        failed: names of the engines that failed the request.
        answer: the stream so far.
        engine_request: request to the engines: `request`, or one for the missing part of the answer.
        prompt_tokens: number of prompt tokens of `request`; an estimate until an engine was asked.
        can_disaggregate: True if P may compute the prompt.
    """

    client: Client
    request: ParsedRequest
    id: str
    session: str
    headers: Mapping[str, str]
    token_ids: tuple[int, ...] | None = None
    held: dict[str, int | None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    answer: Answer = field(init=False)
    engine_request: ParsedRequest = field(init=False)
    prompt_tokens: int = field(init=False)
    can_disaggregate: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = openai.estimated_tokens(self.request)
        self.can_disaggregate = self.request.can_disaggregate
        self.restart()

    def restart(self) -> None:
        """Request the whole answer, because the client has none of it. Mutates."""
        self.answer, self.engine_request = Answer(self.request), self.request

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt that engines get."""
        ids = self.engine_request.token_ids
        return self.prompt_tokens if ids is None else len(ids)

    def candidate(self, engine: Engine) -> Candidate:
        """Return an engine as a candidate for this request."""
        return engine.candidate(self.held.get(engine.name))


class Dispatcher:
    """Dispatcher of all requests of a router. Lives in one event loop.

    Args:
        lookup: lookup in an engine; None: there are no lookups.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Sequence[Engine],
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        lookup: Lookup | None,
        traces: Traces,
    ) -> None:
        self._config = config
        self._traces = traces
        self._engines = {engine.name: engine for engine in engines}
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._lookup = lookup
        self._sessions: OrderedDict[str, str] = OrderedDict()

    async def answer(self, routed: RoutedRequest) -> web.StreamResponse:
        """Answer a request. Mutates `routed`.

        Raises:
            RequestFailed: no engine can answer.
            RequestRefused: an engine rejected the request as wrong.
            ClientDisconnected: the client disconnected, or stopped reading.
        """
        await self._find_held_tokens(routed)
        try:
            response = await self._attempt_until_answered(routed)
        except (RequestFailed, RequestRefused):
            if routed.client.stream_began:
                self._metrics.takeovers.labels("failed").inc()
            raise
        if routed.answer.took_over:
            self._metrics.takeovers.labels("continued").inc()
        return response

    async def _attempt_until_answered(self, routed: RoutedRequest) -> web.StreamResponse:
        """Make one attempt after another, each without the engines that failed before."""
        failure: EngineFailed | None = None
        while True:
            decision = self._decide(routed, failure)
            try:
                return await self._attempt(routed, decision)
            except EngineFailed as error:
                failure = error
            log.warning("%s: %s", routed.id, failure)
            self._metrics.failures.labels(failure.engine.name, failure.cause).inc()
            if decision.prefill and failure.cause == "error" and self._usable(routed) == [failure.engine]:
                routed.can_disaggregate = False  # the handoff may be the cause: ask D again without handoff
            else:
                routed.failed.add(failure.engine.name)
            if not routed.client.stream_began:
                routed.restart()
            elif failure.engine.role == "decode":
                if routed.answer.finished:
                    usage = routed.answer.last_event()
                    last = b"" if usage is None else openai.event_bytes(usage)
                    return await routed.client.end_stream(last)
                try:
                    routed.engine_request = routed.answer.resume()
                except CannotContinue as error:
                    raise RequestFailed(502, f"{failure}; {error}") from failure

    def _usable(self, routed: RoutedRequest, role: EngineRole = "decode") -> list[Engine]:
        """Return the engines of a role that are up and have not failed this request."""
        engines = self._engines.values()
        return [e for e in engines if e.role == role and e.up and e.name not in routed.failed]

    async def _find_held_tokens(self, routed: RoutedRequest) -> None:
        """Look the prompt up in the engines. Mutates `routed`; the result of a late engine stays unknown."""
        if self._lookup is None or not (routed.can_disaggregate or routed.request.blends):
            return
        limit_s = self._config.lookup_timeout_s
        span = self._traces.span("kvkit.router.lookup", routed.headers)
        with self._metrics.seconds.labels("lookup").time(), span:
            ids = await self._prompt_ids(routed)
            if ids is None:
                return
            routed.prompt_tokens = len(ids)
            lookup, up = self._lookup, list(self._engines.values())
            routed.held = await ask_each(up, lambda e: held_tokens(lookup, e, routed.request, ids), limit_s)

    async def _prompt_ids(self, routed: RoutedRequest) -> tuple[int, ...] | None:
        """Return the prompt's token ids; None: no engine returned them in time."""
        token_ids = routed.request.prompt_ids if routed.token_ids is None else routed.token_ids
        if token_ids is not None:
            return token_ids
        body, limit_s = openai.tokenize_body(routed.request), self._config.lookup_timeout_s
        try:
            return await self._tokenizer.tokenize(body, routed.headers, limit_s)
        except (NoTokens, RequestRefused) as error:
            log.warning("no lookup: /tokenize: %s", error)
            return None

    def _decide(self, routed: RoutedRequest, failure: EngineFailed | None) -> Decision:
        """Choose the engines of the next attempt. Raises Failed if no D is left."""
        decodes = self._usable(routed)
        if not decodes:
            raise RequestFailed(
                503 if failure is None else 502,
                f"no decode engine is left: {failure or 'none is up'}",
                None if failure is None else failure.answer,
            )
        decision = decide(
            routed.tokens,
            [routed.candidate(engine) for engine in self._usable(routed, "prefill")],
            [routed.candidate(engine) for engine in decodes],
            session=routed.session,
            last_decode=self._sessions.get(routed.session),
            can_disaggregate=routed.can_disaggregate,
            limits=self._config,
        )
        route = f"{decision.prefill} -> {decision.decode}" if decision.prefill else decision.decode
        new_tokens, tokens, reason = decision.new_tokens, routed.tokens, decision.reason
        log.info("%s: %s, %s: %d new of %d tokens", routed.id, route, reason, new_tokens, tokens)
        self._metrics.requests.labels(decision.decode, decision.prefill or "", reason).inc()
        self._metrics.prompt_tokens.inc(tokens)
        self._metrics.new_tokens.labels("prefill" if decision.prefill else "decode").inc(new_tokens)
        return decision

    async def _attempt(self, routed: RoutedRequest, decision: Decision) -> web.StreamResponse:
        """Prefill and decode as decided. Raises EngineFailed if an engine failed."""
        decode = self._engines[decision.decode]
        params: Body | None = None
        # D counts the request already during prefill; otherwise all of P's requests would go to the same D
        with decode.counted_request(0 if decision.prefill else decision.new_tokens) as share:
            if decision.prefill:
                prefill = self._engines[decision.prefill]
                try:
                    params = await self._prefill(routed, prefill, decode, decision.new_tokens)
                except RequestRefused as refusal:  # the client gets an error only if D refuses, too
                    log.warning("prefill engine %s refuses the request: %s", prefill.name, refusal)
                    routed.can_disaggregate = False
                if params is None:
                    share.tokens = routed.candidate(decode).new_tokens(routed.tokens)
            if routed.engine_request.streams:
                return await self._stream(routed, params, decode, share)
            return await self._reply(routed, params, decode)

    async def _prefill(
        self, routed: RoutedRequest, prefill: Engine, decode: Engine, new_tokens: int
    ) -> Body | None:
        """Make P compute the prompt; return the KV transfer parameters for D (None: D must compute it)."""
        prefill_params: Body = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": uuid.uuid4().hex,
        }
        if decode.config.handoff is not None:
            prefill_params["handoff"] = decode.config.handoff
        start = _now()
        span = self._traces.span(
            "kvkit.router.prefill", routed.headers, engine=prefill.name, new_tokens=new_tokens
        )
        with (
            prefill.counted_request(new_tokens),
            self._metrics.seconds.labels("prefill").time(),
            span as headers,
        ):
            body = openai.prefill_body(routed.engine_request, prefill_params)
            reply = await self._ask_engine(routed, prefill, body, headers, self._config.prefill_timeout_s)
        computed = openai.computed_tokens(reply)
        tokens = new_tokens if computed is None else computed
        prefill.prefill_speed = update_speed(prefill.prefill_speed, tokens, _now() - start)
        decode_params = reply.get("kv_transfer_params")
        if decode_params and not isinstance(decode_params, dict):
            message = f"it answered kv_transfer_params = {decode_params!r}, want an object"
            raise EngineFailed(prefill, "error", message)
        if not decode_params:
            log.warning(
                "%s: prefill engine %s handed nothing off to %s, which computes the prompt again; %s",
                routed.id,
                prefill.name,
                decode.name,
                "see the prefill engine's log"
                if decode.config.handoff
                else f"decode.{decode.name}.handoff is not given",
            )
            self._metrics.failures.labels(prefill.name, "kept").inc()
        return decode_params or None

    async def _reply(self, routed: RoutedRequest, params: Body | None, decode: Engine) -> web.StreamResponse:
        """Return an answer that is not a stream."""
        body = openai.decode_body(routed.engine_request, params)
        with self._traces.span(DECODE, routed.headers, engine=decode.name) as headers:
            reply = await self._ask_engine(routed, decode, body, headers, self._config.request_timeout_s)
        self._remember_session(routed, decode)
        openai.remove_params(reply)
        return web.json_response(reply)

    async def _ask_engine(
        self, routed: RoutedRequest, engine: Engine, body: Body, headers: Mapping[str, str], limit_s: float
    ) -> Body:
        """Return an engine's whole answer."""
        read = partial(openai.read_answer, routed.engine_request)
        reply = await engine.ask("POST", routed.engine_request.path, body, headers, limit_s, read)
        if openai.is_aborted(reply):
            raise EngineFailed(engine, "aborted", "it aborted the request")
        return reply

    async def _stream(
        self, routed: RoutedRequest, params: Body | None, decode: Engine, share: EngineShare
    ) -> web.StreamResponse:
        """Stream an answer, or the rest of one, to the client."""
        start, began = _now(), False
        body, limit_s = openai.decode_body(routed.engine_request, params), self._config.first_token_timeout_s
        with self._traces.span(DECODE, routed.headers, engine=decode.name) as headers:
            async with decode.request("POST", routed.engine_request.path, body, headers, limit_s) as (
                response,
                deadline,
            ):
                async for event in _read_events(decode, routed.engine_request, response):
                    if not began:
                        began = True
                        share.tokens = 0
                        self._remember_session(routed, decode)
                        self._record_speed(routed, decode, params is not None, _now() - start)
                    deadline.reschedule(None)  # the client's time does not count against the engine
                    await _forward_event(routed, decode, event)
                    deadline.reschedule(_now() + self._config.idle_timeout_s)
        if not routed.answer.finished:
            raise EngineFailed(decode, "cut", "its stream ended before its answer did")
        return await routed.client.end_stream()

    def _record_speed(self, routed: RoutedRequest, decode: Engine, handed_off: bool, seconds: float) -> None:
        """Record D's speed, if the number of tokens new to it is known. Mutates `decode`."""
        self._metrics.seconds.labels("first_event").observe(seconds)
        if routed.held.get(decode.name) is None or routed.request.blends:
            return
        new_tokens = routed.candidate(decode).new_tokens(routed.tokens)
        if handed_off:
            decode.handoff_speed = update_speed(decode.handoff_speed, new_tokens, seconds)
        else:
            decode.prefill_speed = update_speed(decode.prefill_speed, new_tokens, seconds)

    def _remember_session(self, routed: RoutedRequest, decode: Engine) -> None:
        self._sessions[routed.session] = decode.name
        self._sessions.move_to_end(routed.session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


async def _forward_event(routed: RoutedRequest, decode: Engine, event: Body) -> None:
    """Send the client its part of an event.

    Raises:
        EngineFailed: the event reports an error or an abort.
        RequestRefused: the event rejects the request as wrong.
        RequestFailed: the answer departs from what the client has, or is too long.
        ClientDisconnected: the client disconnected, or stopped reading.
    """
    error = event.get("error")
    if error is not None:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500 and code not in RETRIED_STATUSES:
            raise RequestRefused(code, json.dumps(event).encode())
        raise EngineFailed(decode, "error", str(error))
    if openai.is_aborted(event):
        raise EngineFailed(decode, "aborted", "it aborted the request")
    try:
        client_event = routed.answer.advance(event)
    except CannotContinue as divergence:
        raise RequestFailed(502, f"decode engine {decode.name}: {divergence}") from divergence
    if client_event is not None:
        await routed.client.send(openai.event_bytes(client_event))


async def _read_events(
    engine: Engine, request: ParsedRequest, response: aiohttp.ClientResponse
) -> AsyncIterator[Body]:
    """Yield the events of a stream, to its end. Raises EngineFailed if it breaks off or is invalid."""
    parser = openai.EventParser()
    try:
        async for piece in response.content.iter_any():
            for data in parser.feed(piece):
                if data == openai.DONE:
                    return
                yield openai.read_event(request, data)
    except ValueError as error:
        raise EngineFailed(engine, "error", str(error)) from error
    raise EngineFailed(engine, "cut", "its stream broke off")


def _now() -> float:
    return asyncio.get_running_loop().time()
