"""An engine as the router sees it: whether it is up, how busy and how fast it is, and requests to it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from kvkit.observe.access import ServerError
from kvkit.observe.top import TopError, token_for
from kvkit.router import openai
from kvkit.router.routing import Candidate, MeasuredSpeed
from kvkit.router.settings import EngineConfig, RouterConfig

log = logging.getLogger(__name__)

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

Said = tuple[int, bytes]
"""An error that an engine answered: its HTTP status, 400 to 599, and its JSON object."""


class EngineFailed(RuntimeError):
    """A request to an engine came to nothing; another engine may do better.

    Attributes:
        answer: where it answered with an error of its own.
    """

    def __init__(self, engine: Engine, cause: Cause, message: str, answer: Said | None = None) -> None:
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


class EngineShare:
    """One request's share of an engine's load. `add` and `computed` mutate it and the engine."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self._tokens = 0
        self.add(tokens)

    def add(self, tokens: int) -> None:
        """So many more of its prompt are waited for."""
        self._engine.waiting_tokens += tokens
        self._tokens += tokens

    def computed(self) -> None:
        """Its prompt is no longer waited for."""
        self._engine.waiting_tokens -= self._tokens
        self._tokens = 0


class Engine:
    """One engine. Lives in one event loop.

    Attributes:
        up: whether it answered when it was last asked for its health, and no request has failed to reach it
            since.
        requests: under way at it.
        waiting_tokens: of their prompts, those that it is yet to compute.
        prefill, handoff: as in `Candidate`.
    """

    def __init__(
        self,
        name: str,
        role: EngineRole,
        config: EngineConfig,
        settings: RouterConfig,
        session: aiohttp.ClientSession,
    ) -> None:
        self.name = name
        self.role = role
        self.config = config
        self.up = False
        self.requests = 0
        self.waiting_tokens = 0
        self.prefill = MeasuredSpeed()
        self.handoff = MeasuredSpeed()
        self._settings = settings
        self._session = session
        self._suspected = asyncio.Event()
        self._deadlines: set[asyncio.Timeout] = set()
        self._missing = 0
        self._probed = False

    def candidate(self, held_tokens: int | None) -> Candidate:
        """What the choice of engines is made by."""
        return Candidate(
            self.name, self.requests, self.waiting_tokens, held_tokens, self.prefill, self.handoff
        )

    @contextmanager
    def working(self, tokens: int) -> Iterator[EngineShare]:
        """Count a request whose prompt has `tokens` to compute. Mutates."""
        share = EngineShare(self, tokens)
        self.requests += 1
        try:
            yield share
        finally:
            self.requests -= 1
            share.computed()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """The response to a request with a JSON body, and its deadline, which can be moved.

        The connection is cut where the context is left before the response's end: vLLM then stops computing.

        Raises:
            EngineFailed: it cannot be reached, is late, is found to be down, or breaks off: from within the
                context, too.
        """
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    async with self._session.request(
                        method,
                        self.config.url + path,
                        data=data,
                        headers={**headers, "Content-Type": "application/json"},
                        allow_redirects=False,
                    ) as response:
                        yield response, deadline
                finally:
                    self._deadlines.discard(deadline)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self.up = False
            self._suspected.set()
            raise EngineFailed(self, "unreachable", str(error)) from error
        except TimeoutError as error:
            raise EngineFailed(self, "timeout", "no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            self._suspected.set()
            raise EngineFailed(self, "cut", f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """`request`, where only HTTP status 200 will do.

        Raises:
            EngineFailed: also for an error of its own.
            Refused: it says that the request is wrong.
        """
        data = json.dumps(body).encode()
        async with self.request("POST", path, data, headers, timeout_s) as (response, deadline):
            await self.check(response)
            yield response, deadline

    async def read(self, response: aiohttp.ClientResponse, limit_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """The whole body of a response.

        Raises:
            EngineFailed: it is longer than that.
        """
        try:
            return await read_body(response, limit_bytes)
        except ValueError as error:
            raise EngineFailed(self, "error", str(error)) from error

    async def check(self, response: aiohttp.ClientResponse) -> None:
        """Do nothing where its HTTP status is 200.

        Raises:
            EngineFailed, Refused: as `post`.
        """
        if response.status != 200:
            raise self._error(response.status, await self.read(response, MAX_ERROR_BYTES))

    def _error(self, status: int, raw: bytes) -> EngineFailed | Refused:
        """What an answer of another HTTP status than 200 comes to. Without JSON it says nothing against the
        request: something else than vLLM answers there."""
        words = f"HTTP {status}: {_start(raw)}"
        try:
            answer = status, json.dumps(openai.read_object(raw)).encode()
        except ValueError:
            return EngineFailed(self, "error", words)
        if not 400 <= status < 600:
            return EngineFailed(self, "error", words)
        if status >= 500 or status in RETRIED:
            return EngineFailed(self, "error", words, answer)
        return Refused(*answer)

    async def tokenize(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, ...]:
        """The token ids of a prompt.

        Raises:
            EngineFailed, Refused: as `post`.
        """
        async with self.post("/tokenize", body, headers, self._settings.lookup_timeout_s) as (response, _):
            raw = await self.read(response)
        try:
            return openai.read_tokens(raw)
        except ValueError as error:
            raise EngineFailed(self, "error", f"/tokenize: {error}") from error

    async def watch(self) -> None:
        """Ask it for its health for ever, and at once where a request did not get through. Mutates."""
        while True:
            self._suspected.clear()
            await self.probe()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.health_interval_s):
                    await self._suspected.wait()

    async def probe(self) -> None:
        """Ask it for its health once. What is under way at an engine that is found down fails. Mutates."""
        try:
            async with (
                asyncio.timeout(self._settings.health_timeout_s),
                self._session.get(self.config.url + "/health", allow_redirects=False) as response,
            ):
                well, words = response.status == 200, f"HTTP {response.status}"
                self._missing = 0 if well else MISSING_ANSWERS
        except TimeoutError:
            well, words = False, "no answer in time"
            self._missing += 1
        except (aiohttp.ClientError, OSError) as error:
            well, words = False, str(error)
            self._missing = MISSING_ANSWERS
        if well and not self.up:
            log.info("%s engine %s is up: %s", self.role, self.name, self.config.url)
        if not well and not self._probed:
            log.warning("%s engine %s is not up: %s: %s", self.role, self.name, self.config.url, words)
        self._probed = True
        if not well and self._missing >= MISSING_ANSWERS:
            if self.up or self._deadlines:
                log.warning("%s engine %s is down: %s", self.role, self.name, words)
            self.up = False
            now = asyncio.get_running_loop().time()
            for deadline in self._deadlines:
                if not deadline.expired():
                    deadline.reschedule(now)
        elif well:
            self.up = True


async def read_body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body of a response.

    Raises:
        ValueError: it is longer than that.
    """
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > limit_bytes:
            raise ValueError(f"the answer is longer than {limit_bytes} bytes")
    return bytes(found)


def _start(raw: bytes) -> str:
    """How a body begins, for a message."""
    return raw[:200].decode(errors="replace")


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """What an engine is asked about: a prompt's tokens, and the `model` and cache salt of its request."""

    tokens: Sequence[int]
    model: str | None = None
    salt: str = ""


Lookup = Callable[[Engine, LookupQuery], Awaitable[int | None]]
"""How many tokens of a prompt, from its beginning, an engine can have without computing; None: not known."""


class CacheLookup:
    """Asks kvkit's HTTP endpoint in an engine; one that has none, or does not answer, is not known."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._tokens: dict[str, str] = {}

    async def __call__(self, engine: Engine, query: LookupQuery) -> int | None:
        url = engine.config.cache
        if url is None:
            return None
        body = {"tokens": list(query.tokens), "model": query.model, "cache_salt": query.salt}
        try:
            async with self._session.post(
                url + "/lookup",
                data=json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {self._token(engine)}"},
                allow_redirects=False,
            ) as response:
                if response.status == 404:  # an adapter, say, of which it has had no request yet
                    log.info("%s: what engine %s holds for %.80r is not known", url, engine.name, query.model)
                    return None
                response.raise_for_status()
                return openai.read_hit(await read_body(response, MAX_LOOKUP_BYTES))
        except (aiohttp.ClientError, OSError, ServerError, TopError, ValueError) as error:
            log.warning("%s: what engine %s holds is not known: %s", url, engine.name, error)
            self._tokens.pop(engine.name, None)
            return None

    async def check(self, engine: Engine, timeout_s: float) -> None:
        """Say so in the log where an engine's endpoint cannot be asked."""
        url = engine.config.cache
        if url is None:
            return
        try:
            headers = {"Authorization": f"Bearer {self._token(engine)}"}
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(url + "/health", headers=headers, allow_redirects=False) as response,
            ):
                words = f"HTTP {response.status}"
                if response.status in (200, 503):  # 503: a tier is down, and the others can be asked about
                    return
        except TimeoutError:
            words = "no answer in time"
        except (aiohttp.ClientError, OSError, ServerError, TopError) as error:
            words = str(error)
        log.warning("%s.%s.cache = %s cannot be asked: %s", engine.role, engine.name, url, words)
        self._tokens.pop(engine.name, None)

    def _token(self, engine: Engine) -> str:
        """Read when it is needed: an engine that starts for the first time makes the file."""
        if engine.name not in self._tokens:
            self._tokens[engine.name] = token_for(engine.config.cache or "", engine.config.token_file)
        return self._tokens[engine.name]
