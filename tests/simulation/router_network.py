"""What stands for aiohttp's session and ZeroMQ's sockets between a router and simulated engines."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

if TYPE_CHECKING:
    from simulation.router_engines import SimulatedEngine
    from simulation.router_loop import SimulatedLoop

CONNECT_S = 2.0
SLACK_S = 0.01


class Fleet(Protocol):
    """The engines, by the URL that they have."""

    loop: SimulatedLoop
    by_address: dict[str, SimulatedEngine]
    sockets: list[SimulatedSocket]

    def longest(self, exchange: Exchange, began: float) -> float: ...

    def asked(self, exchange: Exchange) -> None: ...

    def answered(self, exchange: Exchange, error: BaseException | None) -> None: ...


class Exchange:
    """A request to an engine and its response, as aiohttp's context and `ClientResponse`.

    Attributes:
        began: whether an event of its stream was taken.
    """

    def __init__(self, fleet: Fleet, url: str, data: bytes, headers: Mapping[str, str]) -> None:
        host, _, path = url.partition("://")[2].partition("/")
        self.fleet, self.engine, self.path = fleet, fleet.by_address[host], f"/{path}"
        self.body = json.loads(data) if data else {}
        self.id = headers.get("X-Request-Id", "")
        self.loop = fleet.loop
        self.opened = self.loop.fair_time()
        self.status = 0
        self.began = False
        self.closed = False
        self.content = self
        self._pieces: deque[bytes] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def prefills(self) -> bool:
        return bool((self.body.get("kv_transfer_params") or {}).get("do_remote_decode"))

    @property
    def answers(self) -> bool:
        """Whether it is for an answer, by a D."""
        return self.path.endswith("completions") and not self.prefills

    async def __aenter__(self) -> Exchange:
        try:
            self.fleet.asked(self)
            self.engine.open.append(self)
            self._task = self.loop.create_task(self.engine.serve(self), name=f"{self.engine.name}{self.path}")
            while not self.status:
                await self._wait()
        except BaseException as error:
            self._close(error)
            raise
        self.fleet.answered(self, None)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)

    def __aiter__(self) -> Exchange:
        return self

    def iter_any(self) -> Exchange:
        return self

    async def __anext__(self) -> bytes:
        while True:
            if self._pieces:
                piece = self._pieces.popleft()
                self.began = self.began or b"\n\n" in piece
                return piece
            if self._ended:
                raise StopAsyncIteration
            await self._wait()

    async def _wait(self) -> None:
        """For something of the engine's. Raises what the connection ended with."""
        began = self.loop.fair_time()
        try:
            if self._error is None:
                self._news.clear()
                await self._news.wait()
            if self._error is not None and not self._pieces:
                raise self._error
        finally:
            took, limit = self.loop.fair_time() - began, self.fleet.longest(self, began)
            words = "{} was waited for {} s, at most {} s"
            self.loop.check(took <= limit + SLACK_S, words, self.engine.name + self.path, took, limit)

    def _close(self, error: BaseException | None) -> None:
        if self.closed:
            return
        self.closed = True
        if self in self.engine.open:
            self.engine.open.remove(self)
        if self._task is not None:
            self._task.cancel()
        if error is not None:
            self.fleet.answered(self, error)

    # the engine's side

    def begin(self, status: int) -> None:
        self.status = status
        self._news.set()

    def write(self, data: bytes) -> None:
        self._pieces.append(data)
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def breaks(self, error: BaseException, lose: bool = False) -> None:
        """The connection breaks; what was under way may be lost."""
        if lose:
            self._pieces.clear()
        self._error = error
        self._news.set()

    def halt(self) -> None:
        """End the work on it, as that of a process that has died."""
        if self._task is not None:
            self._task.cancel()


def refused(address: str) -> BaseException:
    """What aiohttp raises where nobody listens."""
    key: Any = SimpleNamespace(host=address, port=80, ssl=True, is_ssl=False)
    return aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "Connection refused"))


class SimulatedSession:
    """An `aiohttp.ClientSession`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __aenter__(self) -> SimulatedSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def request(
        self,
        method: str,
        url: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        **_: object,
    ) -> Exchange:
        return Exchange(self._fleet, url, data, headers or {})

    def get(self, url: str, **_: object) -> Exchange:
        return Exchange(self._fleet, url, b"", {})


class SimulatedSocket:
    """A socket of `zmq.asyncio`: SUB gets what an engine publishes, DEALER what it tells again."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._loop = fleet, fleet.loop
        self._engine: SimulatedEngine | None = None
        self._queue: deque[tuple[bytes, ...]] = deque()
        self._news = asyncio.Event()
        self._monitor: SimulatedSocket | None = None
        self.linger = 0
        self.closed = False
        fleet.sockets.append(self)

    def set(self, option: int, value: int) -> None:
        """Limits: none is reached."""

    def set_hwm(self, waiting: int) -> None:
        """As above."""

    def get_monitor_socket(self, events: int) -> SimulatedSocket:
        self._monitor = SimulatedSocket(self._fleet)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def broke(self) -> None:
        """Have the monitor told that the connection broke."""
        if self._monitor is not None:
            self._monitor.put(b"", b"")

    def subscribe(self, topic: bytes) -> None:
        """To all there is."""

    def connect(self, address: str) -> None:
        kind, _, name = address.removeprefix("tcp://").partition("-")
        self._engine = self._fleet.by_address[name.partition(":")[0]]
        if kind == "events":
            self._engine.publisher.subscribers.append(self)

    def close(self) -> None:
        self.closed = True
        self._fleet.sockets.remove(self)
        if self._engine is not None and self in self._engine.publisher.subscribers:
            self._engine.publisher.subscribers.remove(self)

    async def poll(self, milliseconds: int) -> int:
        if not self._queue:
            self._news.clear()
            try:
                async with asyncio.timeout(milliseconds / 1000):
                    await self._news.wait()
            except TimeoutError:
                return 0
        return 1

    async def recv_multipart(self) -> tuple[bytes, ...]:
        self._loop.check(self._queue, "nothing is to be received")
        return self._queue.popleft()

    async def send_multipart(self, frames: tuple[bytes, bytes]) -> None:
        if self._engine is None:
            raise RuntimeError("not connected")
        self._engine.tell_again(self, int.from_bytes(frames[1], "big"))

    def put(self, *frames: bytes) -> None:
        if not self.closed:
            self._queue.append(frames)
            self._news.set()


def instead_of_aiohttp(fleet: Fleet) -> SimpleNamespace:
    """For `kvkit.router.app`."""
    return SimpleNamespace(
        TCPConnector=lambda **_: None,
        ClientTimeout=lambda **_: None,
        DummyCookieJar=lambda: None,
        ClientSession=lambda **_: SimulatedSession(fleet),
    )


def instead_of_zmq(fleet: Fleet) -> SimpleNamespace:
    """For `kvkit.router.events`."""
    make: Callable[[int], SimulatedSocket] = lambda kind: SimulatedSocket(fleet)  # noqa: E731
    context = SimpleNamespace(instance=lambda: SimpleNamespace(socket=make))
    return SimpleNamespace(
        SUB=2, DEALER=5, MAXMSGSIZE=22, EVENT_DISCONNECTED=512, asyncio=SimpleNamespace(Context=context)
    )
