"""Lookups in engines: how many tokens of a prompt each need not compute."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp

from kvkit.observe.access import token_for
from kvkit.router import openai
from kvkit.router.engines import Engine, read_body
from kvkit.router.openai import ParsedRequest
from kvkit.settings import ConfigError

log = logging.getLogger(__name__)

MAX_LOOKUP_BYTES = 64 << 10
"""Maximum length of an answer of kvkit's HTTP endpoint."""
_UNKNOWN = "%s: it is not known what engine %s holds"
_ENDPOINT_ERRORS = (aiohttp.ClientError, OSError, ConfigError, ValueError)


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """Arguments of a lookup in an engine.

    Attributes:
        tokens: token ids of the prompt.
        model: `model` of the request.
        salt: cache salt of the request.
        wait_s: time that the engine may wait for pending stores.
        engine_cache: whether tokens in vLLM's own cache count, if they are known.
    """

    tokens: Sequence[int]
    model: str | None = None
    salt: str = ""
    wait_s: float = 0.0
    engine_cache: bool = False


Lookup = Callable[[Engine, LookupQuery], Awaitable[int | None]]
"""Lookup in an engine: the number of leading prompt tokens that it need not compute; None: not known."""


async def ask_each(
    engines: Sequence[Engine], ask: Callable[[Engine], Awaitable[int | None]], timeout_s: float
) -> dict[str, int | None]:
    """Call `ask` for each engine that is up; return answers by name (None: not known, failed or late)."""

    async def answer(engine: Engine) -> int | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await ask(engine)
        except Exception:  # a failed lookup must not fail the request
            log.warning("it is not known what engine %s holds", engine.name, exc_info=True)
            return None

    up = [engine for engine in engines if engine.up]
    return dict(zip((e.name for e in up), await asyncio.gather(*map(answer, up)), strict=True))


async def held_tokens(
    lookup: Lookup, engine: Engine, request: ParsedRequest, ids: Sequence[int]
) -> int | None:
    """Return how many tokens of a request's prompt an engine need not compute; None: not known.
    Leading tokens count, and those of documents sent with the request."""
    documents = list(openai.documents_of(request, ids))
    sequences = [(*before, *ids[start:stop]) for before, start, stop in documents]
    lookups = [lookup(engine, LookupQuery(ids, request.model, request.salt, engine_cache=True))]
    lookups += [lookup(engine, LookupQuery(sequence, request.model, request.salt)) for sequence in sequences]
    exact, *hits = await asyncio.gather(*lookups)
    if exact is None:
        return None
    held = exact
    for (before, start, stop), hit in zip(documents, hits, strict=True):
        held += max(0, min(stop, start + (hit or 0) - len(before)) - max(start, exact))
    return held


class CacheLookup:
    """Lookup in an engine's kvkit HTTP endpoint; None if the engine has none or it does not answer."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._bearer_tokens: dict[str, str] = {}

    async def __call__(self, engine: Engine, query: LookupQuery) -> int | None:
        options = {"wait_s": query.wait_s} if query.wait_s else {}
        return await self._token_count(engine, "/lookup", query, "hit_tokens", **options)

    async def pin(self, engine: Engine, query: LookupQuery, seconds: float) -> int | None:
        """Pin these tokens in an engine's tiers for `seconds`; return how many they hold."""
        return await self._token_count(engine, "/pin", query, "pinned_tokens", seconds=seconds)

    async def _token_count(
        self, engine: Engine, path: str, query: LookupQuery, name: str, **extra_fields: float
    ) -> int | None:
        """Return a field of an endpoint's answer; None: not known."""
        if engine.config.cache is None:
            return None
        body = {"tokens": list(query.tokens), "model": query.model, "cache_salt": query.salt, **extra_fields}
        try:
            status, raw = await self._send(engine, "POST", path, json.dumps(body).encode())
            if status == 404:  # such as an adapter that no request has used yet
                log.info(_UNKNOWN + " for %.80r", engine.config.cache, engine.name, query.model)
                return None
            if status != 200:
                raise ValueError(f"HTTP {status}")
            return openai.read_token_count(raw, name)
        except _ENDPOINT_ERRORS as error:
            log.warning(_UNKNOWN + ": %s", engine.config.cache, engine.name, error)
            self._bearer_tokens.pop(engine.name, None)
            return None

    async def blend_context(self, engines: Sequence[Engine], timeout_s: float) -> str | None:
        """Return what documents are to be computed behind, as the first engine says that blends; None: no
        engine says it. An engine that cannot be asked is left out."""

        async def ask(engine: Engine) -> str | None:
            try:
                async with asyncio.timeout(timeout_s):
                    status, raw = await self._send(engine, "GET", "/engine")
                told = json.loads(raw) if status == 200 else {}
                return told.get("blend_context") if isinstance(told, dict) else None
            except _ENDPOINT_ERRORS:
                self._bearer_tokens.pop(engine.name, None)
                return None

        asked = [engine for engine in engines if engine.up and engine.config.cache is not None]
        answers = await asyncio.gather(*map(ask, asked))
        return next((told for told in answers if isinstance(told, str)), None)

    async def check(self, engine: Engine, timeout_s: float) -> None:
        """Log a warning if an engine's endpoint cannot be asked."""
        if engine.config.cache is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                status, _ = await self._send(engine, "GET", "/health")
            if status in (200, 503):  # 503: a tier is down, the others work
                return
            problem = f"HTTP {status}"
        except _ENDPOINT_ERRORS as error:
            problem = str(error) or "no answer in time"
        url = engine.config.cache
        log.warning("%s.%s.cache = %s cannot be asked: %s", engine.role, engine.name, url, problem)
        self._bearer_tokens.pop(engine.name, None)

    async def _send(
        self, engine: Engine, method: str, path: str, data: bytes | None = None
    ) -> tuple[int, bytes]:
        """Return HTTP status and body of an endpoint's answer. Raises one of `_ENDPOINT_ERRORS`."""
        url = engine.config.cache or ""
        if engine.name not in self._bearer_tokens:  # read late: an engine creates the file at its first start
            self._bearer_tokens[engine.name] = token_for(url, engine.config.token_file)
        headers = {"Authorization": f"Bearer {self._bearer_tokens[engine.name]}"}
        async with self._session.request(
            method, url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            return response.status, await read_body(response, MAX_LOOKUP_BYTES)
