"""Engines as the router sees them: health, load, speed and requests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import aiohttp

from kvkit.router import openai
from kvkit.router.openai import Body
from kvkit.router.routing import Candidate
from kvkit.router.settings import EngineConfig, RouterConfig

log = logging.getLogger(__name__)
T = TypeVar("T")

EngineRole = Literal["prefill", "decode"]
FailureCause = Literal["unreachable", "error", "timeout", "cut", "aborted"]
RETRIED_STATUSES = (408, 429)
"""HTTP statuses below 500 that do not mean a wrong request: another engine may take it."""
MAX_PROBE_TIMEOUTS = 3
"""Number of health checks that time out in a row before an engine counts as down."""
MAX_ANSWER_BYTES = 64 << 20
"""Maximum length of an answer that is not a stream."""
MAX_ERROR_BYTES = 1 << 20
"""Maximum length of an answer with an HTTP status other than 200."""
MAX_MESSAGE_CHARS = 500
"""Maximum length of an engine's error in the log and in messages to clients; it may quote the engine."""
IDENTITY_ENCODING = {"Accept-Encoding": "identity"}
"""Headers of all requests: the length of a compressed answer cannot be checked against a limit."""

_RANK_HEADER = "X-data-parallel-rank"
EngineAnswer = tuple[int, bytes]
"""An engine's error response: HTTP status, 400 to 599, and JSON object."""


class EngineFailed(RuntimeError):
    """An engine failed a request; another engine may succeed.

    Attributes:
        answer: the engine's error response, if it sent one.
    """

    def __init__(
        self, engine: Engine, cause: FailureCause, message: str, answer: EngineAnswer | None = None
    ) -> None:
        super().__init__(f"{engine.role} engine {engine.name}: {message[:MAX_MESSAGE_CHARS]}")
        self.engine = engine
        self.cause = cause
        self.answer = answer


class RequestRefused(RuntimeError):
    """An engine rejected a request as wrong; every other engine would, too."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {_excerpt(body)}")
        self.status = status
        self.answer = status, body


@dataclass(eq=False, slots=True)
class EngineShare:
    """One request's share of an engine's load.

    Attributes:
        tokens: prompt tokens that the engine has yet to compute.
    """

    tokens: int


class Engine:
    """An engine, or one of its data parallel ranks. Lives in one event loop.

    Args:
        rank: data parallel rank; None: there is only one.

    Attributes:
        up: True from a successful health check until the engine is found down or a request cannot reach it.
        prefill_speed, handoff_speed: as in `Candidate`.
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
        self.prefill_speed: float | None = None
        self.handoff_speed: float | None = None
        self._shares: set[EngineShare] = set()
        self._headers = {} if rank is None else {_RANK_HEADER: str(rank)}
        self._settings = settings
        self._session = session
        self._suspected = asyncio.Event()
        self._deadlines: dict[asyncio.Timeout, None] = {}  # an ordered set, oldest first
        self._probe_timeouts = 0
        self._probed = False

    @property
    def requests(self) -> int:
        """Number of requests in flight."""
        return len(self._shares)

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens that the engine has yet to compute."""
        return sum(share.tokens for share in self._shares)

    def candidate(self, held_tokens: int | None) -> Candidate:
        """Return the engine as a candidate for a request."""
        load = self.requests, self.waiting_tokens
        return Candidate(self.name, *load, held_tokens, self.prefill_speed, self.handoff_speed)

    @contextmanager
    def counted_request(self, tokens: int) -> Iterator[EngineShare]:
        """Count a request with `tokens` of its prompt to compute, inside the context. Mutates."""
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
        """Send a request with a JSON body; yield the response, and its deadline, which can be moved.

        Leaving the context before the response's end cuts the connection: vLLM then stops computing.

        Args:
            body: an object to encode, or encoded JSON.

        Raises:
            EngineFailed: the engine cannot be reached, is late, is found down, answers with an error of its
                own, or breaks off; also raised from within the context.
            RequestRefused: the engine rejected the request as wrong.
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
                            raise await self._error_of(response)
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
        """Send a request; return what `read` makes of the whole answer.

        Raises:
            EngineFailed: as `request`; also if the answer is too long or `read` raises ValueError.
            RequestRefused: as `request`.
        """
        async with self.request(method, path, body, headers, timeout_s) as (response, _):
            try:
                return read(await read_body(response, MAX_ANSWER_BYTES))
            except ValueError as error:
                raise EngineFailed(self, "error", str(error)) from error

    async def _error_of(self, response: aiohttp.ClientResponse) -> EngineFailed | RequestRefused:
        """Return the error for an answer with an HTTP status other than 200.
        An answer without JSON does not mean a wrong request, because it is not from vLLM."""
        status, message = response.status, f"HTTP {response.status}"
        try:
            raw = await read_body(response, MAX_ERROR_BYTES)
            message += f": {_excerpt(raw)}"
            answer = status, json.dumps(openai.read_object(raw)).encode()
        except ValueError as error:
            return EngineFailed(self, "error", f"{message}: {error}")
        if not 400 <= status < 600:
            return EngineFailed(self, "error", message)
        if status >= 500 or status in RETRIED_STATUSES:
            return EngineFailed(self, "error", message, answer)
        return RequestRefused(*answer)

    async def monitor(self) -> None:
        """Check the engine's health forever, and at once after a request could not reach it. Mutates."""
        while True:
            self._suspected.clear()
            await self.probe()
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 may lose a cancellation
                async with asyncio.timeout(self._settings.health_interval_s):
                    await self._suspected.wait()

    async def probe(self) -> None:
        """Check the engine's health once; if it is down, fail its requests in flight. Mutates."""
        problem, timeouts = "", MAX_PROBE_TIMEOUTS
        try:
            async with (
                asyncio.timeout(self._settings.health_timeout_s),
                self._session.get(self.config.url + "/health", allow_redirects=False) as response,
            ):
                if response.status != 200:
                    problem = f"HTTP {response.status}"
        except TimeoutError:
            problem, timeouts = "no answer in time", self._probe_timeouts + 1
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._probe_timeouts = timeouts if problem else 0
        if problem and not self._probed:
            log.warning("%s engine %s is not up: %s: %s", self.role, self.name, self.config.url, problem)
        self._probed = True
        if not problem:
            if not self.up:
                log.info("%s engine %s is up: %s", self.role, self.name, self.config.url)
            self.up = True
        elif timeouts >= MAX_PROBE_TIMEOUTS:
            if self.up or self._deadlines:
                log.warning("%s engine %s is down: %s", self.role, self.name, problem)
            self.up = False
            now = asyncio.get_running_loop().time()
            for deadline in self._deadlines:
                if not deadline.expired():
                    deadline.reschedule(now)


async def read_body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Return the whole body of a response. Raises ValueError if it is longer than `limit_bytes`."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit_bytes:
            raise ValueError(f"the answer is longer than {limit_bytes} bytes")
    return bytes(body)


def open_engines(role: EngineRole, settings: RouterConfig, session: aiohttp.ClientSession) -> list[Engine]:
    """Return the engines of a role; each data parallel rank is one."""
    configs = settings.prefill if role == "prefill" else settings.decode
    return [
        Engine(name, role, config, settings, session, rank)
        for base_name, engine in configs.items()
        for name, config, rank in engine.ranks(base_name)
    ]


def _excerpt(raw: bytes) -> str:
    """Return the beginning of a body, for a message."""
    return raw[:200].decode(errors="replace")
