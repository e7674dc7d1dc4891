"""Takes one request to engines, over a P or straight to a D, until one has answered it to the end."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvkit.router import openai
from kvkit.router.answers import Answer, CannotContinue
from kvkit.router.clients import Client
from kvkit.router.engines import (
    RETRIED,
    Engine,
    EngineFailed,
    EngineShare,
    Lookup,
    LookupQuery,
    Refused,
    Said,
)
from kvkit.router.metrics import RouterMetrics
from kvkit.router.openai import Asked
from kvkit.router.routing import Decision, decide
from kvkit.router.settings import RouterConfig

log = logging.getLogger(__name__)

MAX_SESSIONS = 100_000
"""So many conversations are remembered, with the D that each was at last."""


class Failed(Exception):
    """No engine answers a request.

    Attributes:
        answer: the last engine's own error, if it had one.
    """

    def __init__(self, status: int, message: str, answer: Said | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


@dataclass(slots=True)
class RoutedRequest:
    """One request on its way.

    Attributes:
        id: in the log, and for the engines.
        session: the conversation that it belongs to.
        headers: for the engines.
        prompt_tokens: about, until an engine was asked.
        held: by engine, tokens of the prompt that it can have without computing.
        failed: engines that have failed it.
        hands_over: whether P may compute its prompt.
    """

    client: Client
    asked: Asked
    id: str
    session: str
    headers: Mapping[str, str]
    prompt_tokens: int = field(init=False)
    held: dict[str, int | None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    hands_over: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = openai.estimated_tokens(self.asked)
        self.hands_over = self.asked.hands_over


class Dispatcher:
    """What all requests have in common. Lives in one event loop.

    Args:
        lookup: None: nobody is asked what is held.
    """

    def __init__(
        self,
        config: RouterConfig,
        prefills: Sequence[Engine],
        decodes: Sequence[Engine],
        metrics: RouterMetrics,
        lookup: Lookup | None,
    ) -> None:
        self._config = config
        self._prefills = prefills
        self._decodes = decodes
        self._metrics = metrics
        self._lookup = lookup
        self._sessions: OrderedDict[str, str] = OrderedDict()

    async def answer(self, routed: RoutedRequest) -> web.StreamResponse:
        """Answer a request. Mutates `routed`.

        Raises:
            Failed: no engine can.
            Refused: an engine says that the request is wrong.
            ClientLeft: there is nobody to answer.
        """
        await self._look_up(routed)
        try:
            return await self._rounds(routed)
        except (Failed, Refused):
            if routed.client.began:
                self._metrics.takeovers.labels("failed").inc()
            raise

    async def _rounds(self, routed: RoutedRequest) -> web.StreamResponse:
        """One attempt after the other, each without the engines that failed before. Counts a takeover that
        came to its end; `answer` counts those that did not."""
        asked, answer = routed.asked, Answer(routed.asked)
        failure: EngineFailed | None = None
        while True:
            decision = self._decide(routed, asked, failure)
            try:
                return self._ended(answer, await self._attempt(routed, asked, answer, decision))
            except EngineFailed as error:
                failure = error
            log.warning("%s: %s", routed.id, failure)
            self._metrics.failures.labels(failure.engine.name, failure.cause).inc()
            if (
                decision.prefill is not None
                and failure.cause == "error"
                and self._is_last(routed, failure.engine)
            ):
                routed.hands_over = False  # what it was handed may be the trouble: it is asked again, without
            else:
                routed.failed.add(failure.engine.name)
            if not routed.client.began:
                answer = Answer(routed.asked)  # nobody has any of the one that was begun
            elif failure.engine.role == "decode":
                if answer.finished:
                    owed = answer.last_event()
                    last = b"" if owed is None else openai.event_bytes(owed)
                    return self._ended(answer, await routed.client.send(last + openai.DONE_EVENT))
                try:
                    asked = answer.resume()
                except CannotContinue as error:
                    raise Failed(502, f"{failure}; {error}") from failure

    def _ended(self, answer: Answer, response: web.StreamResponse) -> web.StreamResponse:
        """`response`, which ends `answer`."""
        if answer.took_over:
            self._metrics.takeovers.labels("continued").inc()
        return response

    def _is_last(self, routed: RoutedRequest, engine: Engine) -> bool:
        """Whether `engine` is the only D left for a request."""
        return [e for e in self._decodes if e.up and e.name not in routed.failed] == [engine]

    async def _look_up(self, routed: RoutedRequest) -> None:
        """Ask the engines what they hold of the prompt. Mutates `routed`: nothing is known of who is late."""
        if self._lookup is None or not routed.hands_over:
            return
        with self._metrics.seconds.labels("lookup").time():
            tokens = await self._tokens(routed)
            if tokens is None:
                return
            routed.prompt_tokens = len(tokens)
            up = [engine for engine in (*self._prefills, *self._decodes) if engine.up]
            query = LookupQuery(tokens, routed.asked.model, routed.asked.salt)
            asking = {asyncio.ensure_future(self._lookup(engine, query)): engine.name for engine in up}
            if not asking:
                return
            try:
                await asyncio.wait(asking, timeout=self._config.lookup_timeout_s)
            finally:
                for task in asking:
                    task.cancel()
            for task, name in asking.items():
                if task.done() and not task.cancelled():
                    routed.held[name] = _result(task, name)

    async def _tokens(self, routed: RoutedRequest) -> tuple[int, ...] | None:
        """The prompt's tokens; None where no engine says so in time."""
        if routed.asked.prompt_ids is not None:
            return routed.asked.prompt_ids
        up = [engine for engine in self._decodes if engine.up]
        if not up:
            return None
        engine = min(up, key=lambda e: e.requests)
        try:
            return tuple(await engine.tokenize(openai.tokenize_body(routed.asked), routed.headers))
        except (EngineFailed, Refused) as error:
            log.warning("no lookup: %s", error)
            return None

    def _decide(self, routed: RoutedRequest, asked: Asked, failure: EngineFailed | None) -> Decision:
        """Where the next attempt goes.

        Raises:
            Failed: no D is left.
        """
        prefills, decodes = (
            [e.candidate(routed.held.get(e.name)) for e in engines if e.up and e.name not in routed.failed]
            for engines in (self._prefills, self._decodes)
        )
        prompt_tokens = _prompt_tokens(routed, asked)
        if not decodes:
            raise Failed(
                503 if failure is None else 502,
                f"no decode engine is left: {failure or 'none is up'}",
                None if failure is None else failure.answer,
            )
        decision = decide(
            prompt_tokens,
            prefills,
            decodes,
            session=routed.session,
            last=self._sessions.get(routed.session),
            suitable=routed.hands_over,
            limits=self._config.limits,
        )
        log.info(
            "%s: %s%s, %s: %d new of %d tokens",
            routed.id,
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
        self, routed: RoutedRequest, asked: Asked, answer: Answer, decision: Decision
    ) -> web.StreamResponse:
        """Prefill and decode where it was decided.

        Raises:
            EngineFailed: one of the two failed.
        """
        decode = next(e for e in self._decodes if e.name == decision.decode)
        prefill = next((e for e in self._prefills if e.name == decision.prefill), None)
        params: Mapping[str, Any] | None = None
        # D counts it from now on, or all that P is at work on would go to the same D
        with decode.working(decision.new_tokens if prefill is None else 0) as share:
            if prefill is not None:
                try:
                    params = await self._prefill(routed, asked, prefill, decode, decision.new_tokens)
                except Refused as refusal:  # whether the client hears of it is for D to say
                    log.warning("prefill engine %s refuses: %s", prefill.name, refusal)
                    routed.hands_over = False
                if params is None:
                    share.add(self._new_tokens(routed, asked, decode))
            if asked.streams:
                return await self._stream(routed, asked, params, answer, decode, share)
            return await self._whole(routed, asked, params, decode)

    async def _stream(
        self,
        routed: RoutedRequest,
        asked: Asked,
        params: Mapping[str, Any] | None,
        answer: Answer,
        decode: Engine,
        share: EngineShare,
    ) -> web.StreamResponse:
        """An answer that is a stream, or what is left of it."""
        start, began = _now(), False
        body, limit_s = openai.decode_body(asked, params), self._config.first_token_timeout_s
        async with decode.post(asked.path, body, routed.headers, limit_s) as (response, deadline):
            async for event in _events(decode, asked, response):
                if not began:
                    began = True
                    share.computed()
                    self._remember(routed, decode)
                    self._learn(routed, asked, decode, params is not None, _now() - start)
                deadline.reschedule(None)  # how long the client takes is not the engine's doing
                await self._hand_on(routed, answer, decode, event)
                deadline.reschedule(_now() + self._config.idle_timeout_s)
        if not answer.finished:
            raise EngineFailed(decode, "cut", "its stream ended before its answer did")
        return await routed.client.send(openai.DONE_EVENT)

    async def _prefill(
        self, routed: RoutedRequest, asked: Asked, prefill: Engine, decode: Engine, new_tokens: int
    ) -> Mapping[str, Any] | None:
        """Have P compute the prompt; what D is to be told about its KV. None: P kept it, and D computes."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": uuid.uuid4().hex}
        if decode.config.handoff is not None:
            params["handoff"] = decode.config.handoff
        body = openai.prefill_body(asked, params)
        start = _now()
        with prefill.working(new_tokens), self._metrics.seconds.labels("prefill").time():
            async with prefill.post(asked.path, body, routed.headers, self._config.prefill_timeout_s) as (
                response,
                _,
            ):
                raw = await prefill.read(response)
        reply = _understood(prefill, openai.read_answer, asked, raw)
        if openai.aborted(reply):
            raise EngineFailed(prefill, "aborted", "it gave the request up")
        computed = openai.computed_tokens(reply)
        prefill.prefill = prefill.prefill.after(new_tokens if computed is None else computed, _now() - start)
        given = reply.get("kv_transfer_params")
        if given and not isinstance(given, dict):
            raise EngineFailed(
                prefill, "error", f"it answered kv_transfer_params = {given!r}, want an object"
            )
        if not given:
            log.warning(
                "%s: prefill engine %s handed nothing off to %s, which computes the prompt, too; %s",
                routed.id,
                prefill.name,
                decode.name,
                "its log says why" if decode.config.handoff else f"decode.{decode.name}.handoff is not given",
            )
            self._metrics.failures.labels(prefill.name, "kept").inc()
        return given or None

    def _learn(
        self, routed: RoutedRequest, asked: Asked, decode: Engine, handed: bool, seconds: float
    ) -> None:
        """Note how fast D was, where it is known how much was new for it. Mutates `decode`."""
        self._metrics.seconds.labels("first_event").observe(seconds)
        if routed.held.get(decode.name) is None:
            return
        new = self._new_tokens(routed, asked, decode)
        if handed:
            decode.handoff = decode.handoff.after(new, seconds)
        else:
            decode.prefill = decode.prefill.after(new, seconds)

    def _new_tokens(self, routed: RoutedRequest, asked: Asked, engine: Engine) -> int:
        """Tokens of the prompt that an engine would have to compute."""
        held = routed.held.get(engine.name)
        return engine.candidate(held).new_tokens(_prompt_tokens(routed, asked))

    async def _hand_on(
        self, routed: RoutedRequest, answer: Answer, decode: Engine, event: openai.Body
    ) -> None:
        """Give the client what it is to have of an event.

        Raises:
            EngineFailed: the event says so.
            Refused: it says that the request is wrong.
        """
        error = event.get("error")
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            if isinstance(code, int) and 400 <= code < 500 and code not in RETRIED:
                raise Refused(code, json.dumps(event).encode())
            raise EngineFailed(decode, "error", str(error))
        if openai.aborted(event):
            raise EngineFailed(decode, "aborted", "it gave the request up")
        try:
            shown = answer.take(event)
        except CannotContinue as departed:
            raise Failed(502, f"decode engine {decode.name}: {departed}") from departed
        if shown is not None:
            await routed.client.send(openai.event_bytes(shown))

    async def _whole(
        self, routed: RoutedRequest, asked: Asked, params: Mapping[str, Any] | None, decode: Engine
    ) -> web.StreamResponse:
        """An answer that is no stream."""
        body, limit_s = openai.decode_body(asked, params), self._config.request_timeout_s
        async with decode.post(asked.path, body, routed.headers, limit_s) as (response, _):
            raw = await decode.read(response)
        reply = _understood(decode, openai.read_answer, asked, raw)
        if openai.aborted(reply):
            raise EngineFailed(decode, "aborted", "it gave the request up")
        self._remember(routed, decode)
        reply.pop("kv_transfer_params", None)
        return web.json_response(reply)

    def _remember(self, routed: RoutedRequest, decode: Engine) -> None:
        self._sessions[routed.session] = decode.name
        self._sessions.move_to_end(routed.session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def _prompt_tokens(routed: RoutedRequest, asked: Asked) -> int:
    return routed.prompt_tokens if asked.token_ids is None else len(asked.token_ids)


def _understood(
    engine: Engine, read: Callable[[Asked, bytes], openai.Body], asked: Asked, raw: bytes
) -> openai.Body:
    """What an engine sent.

    Raises:
        EngineFailed: it makes no sense.
    """
    try:
        return read(asked, raw)
    except ValueError as error:
        raise EngineFailed(engine, "error", str(error)) from error


async def _events(
    engine: Engine, asked: Asked, response: aiohttp.ClientResponse
) -> AsyncIterator[openai.Body]:
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
            yield _understood(engine, openai.read_event, asked, data)
    raise EngineFailed(engine, "cut", "its stream broke off")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _result(task: asyncio.Future[int | None], name: str) -> int | None:
    """What a lookup found; an error of its own is none of the request's."""
    error = task.exception()
    if error is None:
        return task.result()
    log.warning("what engine %s holds is not known", name, exc_info=error)
    return None
