"""An engine as the router sees it: whether it is up, how busy and how fast it is, and requests to it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import aiohttp

from kvkit.observe.top import TopError, token_for
from kvkit.router import openai
from kvkit.router.openai import Body, ParsedRequest
from kvkit.router.routing import Candidate
from kvkit.router.settings import EngineConfig, RouterConfig
from kvkit.settings import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")

EngineRole = Literal["prefill", "decode"]
Cause = Literal["unreachable", "error", "timeout", "cut", "aborted"]
RETRIED = (408, 429)
"""HTTP statuses below 500 that say nothing against the request: another engine may take it."""
MISSING_ANSWERS = 3
"""So many questions for its health that time out in a row: the engine is down."""
MAX_ANSWER_BYTES = 64 << 20
"""The longest answer that is no stream."""
MAX_ERROR_BYTES = 1 << 20
"""The longest answer of another HTTP status than 200."""
MAX_LOOKUP_BYTES = 64 << 10
"""The longest answer of kvkit's HTTP endpoint."""
MAX_MESSAGE_CHARS = 500
"""So much of what is wrong with an engine is told to clients and the log: it may quote that engine."""
PLAIN = {"Accept-Encoding": "identity"}
"""Of all requests: what is compressed has no length that could be held against a limit."""

_RANK_HEADER = "X-data-parallel-rank"
_UNKNOWN = "%s: what engine %s holds is not known"
_NO_ANSWER = (aiohttp.ClientError, OSError, ConfigError, TopError, ValueError)
EngineAnswer = tuple[int, bytes]
"""An error that an engine answered: its HTTP status, 400 to 599, and its JSON object."""


class EngineFailed(RuntimeError):
    """A request to an engine came to nothing; another engine may do better.

    Attributes:
        answer: where it answered with an error of its own.
    """

    def __init__(
        self, engine: Engine, cause: Cause, message: str, answer: EngineAnswer | None = None
    ) -> None:
        super().__init__(f"{engine.role} engine {engine.name}: {message[:MAX_MESSAGE_CHARS]}")
        self.engine = engine
        self.cause = cause
        self.answer = answer


class Refused(RuntimeError):
    """An engine says that the request is wrong; so would every other."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {_start(body)}")
        self.status = status
        self.answer = status, body


@dataclass(eq=False, slots=True)
class EngineShare:
    """One request's share of an engine's load.

    Attributes:
        tokens: of its prompt, those that the engine is yet to compute.
    """

    tokens: int


class Engine:
    """One engine, or one rank of its data parallelism. Lives in one event loop.

    Args:
        rank: None: it has one alone.

    Attributes:
        up: whether it answered when it was last asked for its health, and no request has failed to reach it
            since.
        prefill, handoff: as in `Candidate`.
    """

    def __init__(
        self,
        name: str,
        role: EngineRole,
        config: EngineConfig,
        settings: RouterConfig,
        session: aiohttp.ClientSession,
        rank: int | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.config = config
        self.up = False
        self.prefill: float | None = None
        self.handoff: float | None = None
        self._shares: set[EngineShare] = set()
        self._headers = {} if rank is None else {_RANK_HEADER: str(rank)}
        self._settings = settings
        self._session = session
        self._suspected = asyncio.Event()
        self._deadlines: dict[asyncio.Timeout, None] = {}  # as a set, in the order in which they began
        self._missing = 0
        self._probed = False

    @property
    def requests(self) -> int:
        """Under way at it."""
        return len(self._shares)

    @property
    def waiting_tokens(self) -> int:
        """Of the prompts of its requests, those that it is yet to compute."""
        return sum(share.tokens for share in self._shares)

    def candidate(self, held_tokens: int | None) -> Candidate:
        """What the choice of engines is made by."""
        load = self.requests, self.waiting_tokens
        return Candidate(self.name, *load, held_tokens, self.prefill, self.handoff)

    @contextmanager
    def working(self, tokens: int) -> Iterator[EngineShare]:
        """Count a request whose prompt has `tokens` to compute. Mutates."""
        share = EngineShare(tokens)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.remove(share)

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Body | bytes, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """The response to a request with a JSON body, written or not, and its deadline, which can be moved.

        The connection is cut where the context is left before the response's end: vLLM then stops computing.

        Raises:
            EngineFailed: it cannot be reached, is late, is found to be down, has an error of its own, or
                breaks off: from within the context, too.
            Refused: it says that the request is wrong.
        """
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                self._deadlines[deadline] = None
                try:
                    async with self._session.request(
                        method,
                        self.config.url + path,
                        data=body if isinstance(body, bytes) else json.dumps(body).encode(),
                        headers={**headers, **self._headers, "Content-Type": "application/json"},
                        allow_redirects=False,
                    ) as response:
                        if response.status != 200:
                            raise await self._error(response)
                        yield response, deadline
                finally:
                    del self._deadlines[deadline]
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self.up = False
            self._suspected.set()
            raise EngineFailed(self, "unreachable", str(error)) from error
        except TimeoutError as error:
            raise EngineFailed(self, "timeout", "no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            self._suspected.set()
            raise EngineFailed(self, "cut", f"{type(error).__name__}: {error}") from error

    async def ask(
        self,
        method: str,
        path: str,
        body: Body | bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        read: Callable[[bytes], T],
    ) -> T:
        """What `read` makes of the whole answer to a request.

        Raises:
            EngineFailed: as `request`; also where `read` raises a ValueError.
            Refused: as `request`.
        """
        async with self.request(method, path, body, headers, timeout_s) as (response, _):
            try:
                return read(await read_body(response, MAX_ANSWER_BYTES))
            except ValueError as error:
                raise EngineFailed(self, "error", str(error)) from error

    async def _error(self, response: aiohttp.ClientResponse) -> EngineFailed | Refused:
        """What an answer of another HTTP status than 200 comes to. Without JSON it says nothing against the
        request: something else than vLLM answers there."""
        status, words = response.status, f"HTTP {response.status}"
        try:
            raw = await read_body(response, MAX_ERROR_BYTES)
            words += f": {_start(raw)}"
            answer = status, json.dumps(openai.read_object(raw)).encode()
        except ValueError as error:
            return EngineFailed(self, "error", f"{words}: {error}")
        if not 400 <= status < 600:
            return EngineFailed(self, "error", words)
        if status >= 500 or status in RETRIED:
            return EngineFailed(self, "error", words, answer)
        return Refused(*answer)

    async def watch(self) -> None:
        """Ask it for its health for ever, and at once where a request did not get through. Mutates."""
        while True:
            self._suspected.clear()
            await self.probe()
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 may lose that it was cancelled
                async with asyncio.timeout(self._settings.health_interval_s):
                    await self._suspected.wait()

    async def probe(self) -> None:
        """Ask it for its health once. What is under way at an engine that is found down fails. Mutates."""
        wrong, missing = "", MISSING_ANSWERS
        try:
            async with (
                asyncio.timeout(self._settings.health_timeout_s),
                self._session.get(self.config.url + "/health", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    wrong = f"HTTP {response.status}"
        except TimeoutError:
            wrong, missing = "no answer in time", self._missing + 1
        except (aiohttp.ClientError, OSError) as error:
            wrong = f"{type(error).__name__}: {error}"
        self._missing = missing if wrong else 0
        if wrong and not self._probed:
            log.warning("%s engine %s is not up: %s: %s", self.role, self.name, self.config.url, wrong)
        self._probed = True
        if not wrong:
            if not self.up:
                log.info("%s engine %s is up: %s", self.role, self.name, self.config.url)
            self.up = True
        elif missing >= MISSING_ANSWERS:
            if self.up or self._deadlines:
                log.warning("%s engine %s is down: %s", self.role, self.name, wrong)
            self.up = False
            now = asyncio.get_running_loop().time()
            for deadline in self._deadlines:
                if not deadline.expired():
                    deadline.reschedule(now)


async def read_body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body of a response. Raises ValueError: it is longer than that."""
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > limit_bytes:
            raise ValueError(f"the answer is longer than {limit_bytes} bytes")
    return bytes(found)


def engines_of(role: EngineRole, settings: RouterConfig, session: aiohttp.ClientSession) -> list[Engine]:
    """The engines of a role: each rank of data parallelism is one."""
    configs = settings.prefill if role == "prefill" else settings.decode
    return [
        Engine(name, role, config, settings, session, rank)
        for given, engine in configs.items()
        for name, config, rank in engine.ranks(given)
    ]


def _start(raw: bytes) -> str:
    """How a body begins, for a message."""
    return raw[:200].decode(errors="replace")


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """What an engine is asked about: a prompt's tokens, and the `model` and cache salt of its request.
    `wait_s`: how long it may wait for what is being stored. `engine_cache`: whether what vLLM's own cache
    holds counts, where that is known."""

    tokens: Sequence[int]
    model: str | None = None
    salt: str = ""
    wait_s: float = 0.0
    engine_cache: bool = False


Lookup = Callable[[Engine, LookupQuery], Awaitable[int | None]]
"""How many tokens of a prompt, from its beginning, an engine can have without computing; None: not known."""


async def ask_each(
    engines: Sequence[Engine], ask: Callable[[Engine], Awaitable[int | None]], timeout_s: float
) -> dict[str, int | None]:
    """What each engine that is up answers, by its name; None: it is not known in time."""

    async def answer(engine: Engine) -> int | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await ask(engine)
        except Exception:  # one of its own is none of the request's
            log.warning("what engine %s holds is not known", engine.name, exc_info=True)
            return None

    up = [engine for engine in engines if engine.up]
    return dict(zip((e.name for e in up), await asyncio.gather(*map(answer, up)), strict=True))


async def held_tokens(lookup: Lookup, engine: Engine, asked: ParsedRequest, ids: Sequence[int]) -> int | None:
    """How many tokens of a request's prompt an engine can have without computing: from its beginning, and of
    documents that it is told of. None: not known."""
    documents = list(openai.documents_of(asked, ids))
    texts = [(*before, *ids[start:stop]) for before, start, stop in documents]
    found = [lookup(engine, LookupQuery(ids, asked.model, asked.salt, engine_cache=True))]
    found += [lookup(engine, LookupQuery(text, asked.model, asked.salt)) for text in texts]
    exact, *tokens = await asyncio.gather(*found)
    if exact is None:
        return None
    held = exact
    for (before, start, stop), hit in zip(documents, tokens, strict=True):
        held += max(0, min(stop, start + (hit or 0) - len(before)) - max(start, exact))
    return held


class CacheLookup:
    """Asks kvkit's HTTP endpoint in an engine; one that has none, or does not answer, is not known."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._tokens: dict[str, str] = {}

    async def __call__(self, engine: Engine, query: LookupQuery) -> int | None:
        waits = {"wait_s": query.wait_s} if query.wait_s else {}
        return await self._tokens_of(engine, "/lookup", query, "hit_tokens", **waits)

    async def pin(self, engine: Engine, query: LookupQuery, seconds: float) -> int | None:
        """Have an engine's tiers evict none of these tokens for so long; how many they hold."""
        return await self._tokens_of(engine, "/pin", query, "pinned_tokens", seconds=seconds)

    async def _tokens_of(
        self, engine: Engine, path: str, query: LookupQuery, name: str, **more: float
    ) -> int | None:
        """A field of what an engine's endpoint answers."""
        if engine.config.cache is None:
            return None
        body = {"tokens": list(query.tokens), "model": query.model, "cache_salt": query.salt, **more}
        try:
            status, raw = await self._ask(engine, "POST", path, json.dumps(body).encode())
            if status == 404:  # an adapter, say, of which it has had no request yet
                log.info(_UNKNOWN + " for %.80r", engine.config.cache, engine.name, query.model)
                return None
            if status != 200:
                raise ValueError(f"HTTP {status}")
            return openai.read_hit(raw, name)
        except _NO_ANSWER as error:
            log.warning(_UNKNOWN + ": %s", engine.config.cache, engine.name, error)
            self._tokens.pop(engine.name, None)
            return None

    async def check(self, engine: Engine, timeout_s: float) -> None:
        """Say so in the log where an engine's endpoint cannot be asked."""
        if engine.config.cache is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                status, _ = await self._ask(engine, "GET", "/health")
            if status in (200, 503):  # 503: a tier is down, and the others can be asked about
                return
            wrong = f"HTTP {status}"
        except _NO_ANSWER as error:
            wrong = str(error) or "no answer in time"
        url = engine.config.cache
        log.warning("%s.%s.cache = %s cannot be asked: %s", engine.role, engine.name, url, wrong)
        self._tokens.pop(engine.name, None)

    async def _ask(
        self, engine: Engine, method: str, path: str, data: bytes | None = None
    ) -> tuple[int, bytes]:
        """HTTP status and body of an answer of an engine's endpoint; raises one of `_NO_ANSWER`."""
        url = engine.config.cache or ""
        if engine.name not in self._tokens:  # an engine that starts for the first time makes the file
            self._tokens[engine.name] = token_for(url, engine.config.token_file)
        headers = {"Authorization": f"Bearer {self._tokens[engine.name]}"}
        async with self._session.request(
            method, url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            return response.status, await read_body(response, MAX_LOOKUP_BYTES)
