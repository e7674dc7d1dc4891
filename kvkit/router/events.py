"""Subscriptions to engines' KV events, so that lookups need not ask the engines.

vLLM's publisher numbers its batches from 0 and keeps the last ones for subscribers that missed some. If a
number does not follow the last one, the missing batches are replayed. If they are no longer kept, or a number
now belongs to another batch (the engine was restarted), the engine's index is cleared; kvkit's connector
later reports its contents again. A broken connection needs the same check, because the numbers of a restarted
engine may continue those from before; without `replay`, the index is cleared.

Memory stays bounded whatever an engine sends, and requests are served while events are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain
from typing import Annotated, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kvkit.router.engines import Engine
from kvkit.router.index import BlockIndex, KVEvent
from kvkit.router.lookups import Lookup, LookupQuery
from kvkit.router.settings import RouterConfig

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 16 << 20
"""Maximum length of a message; a publisher that sends a longer one is disconnected."""
MAX_EVENTS = 1 << 16
"""Maximum number of events in a batch; a larger batch cannot be decoded."""
MAX_REPLAY_S = 30.0
"""Maximum time of a replay, in seconds; the next replay continues where it stopped."""
_MAX_QUEUED = 8
"""Maximum number of messages that wait here, per socket. vLLM's publisher keeps 100,000 more."""
_MAX_DIGESTS = 10_000
"""Last batches that are remembered, to detect another batch of the same number after a restart."""
_STEP_WORK = 1024
"""Blocks and events to process before requests may run."""
_NUMBER_BYTES = 8
_END_NUMBER = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
T = TypeVar("T")


class KVEventBatch(msgspec.Struct, Generic[T], array_like=True):
    """KV events of one step of an engine."""

    ts: float
    events: Annotated[list[T], msgspec.Meta(max_length=MAX_EVENTS)]


_batches = msgspec.msgpack.Decoder(KVEventBatch[msgspec.Raw])
_events = msgspec.msgpack.Decoder(KVEvent)


class EventSubscriber:
    """Subscriber that keeps the index of one engine. Lives in one event loop.

    Args:
        engine: engine with `events` configured, and `replay` if it has one.

    Attributes:
        index: blocks that the engine holds.
        current: True if the index was up to date at the last check.
    """

    def __init__(self, engine: Engine, config: RouterConfig) -> None:
        self.index = BlockIndex()
        self.current = False
        self._engine = engine
        self._interval_s = config.health_interval_s
        self._timeout_s = config.lookup_timeout_s
        self._next = 0  # number of the next batch
        self._applied: OrderedDict[int, int] = OrderedDict()  # digests of the last batches, by number

    async def run(self) -> None:
        """Receive and apply the engine's events forever."""
        try:
            with closing(_socket(zmq.SUB)) as socket, _monitored(socket) as breaks:
                socket.subscribe(b"")
                socket.connect(self._engine.config.events or "")
                await self._catch_up()
                while True:
                    if not await socket.poll(int(1000 * self._interval_s)):
                        await self._catch_up()
                        continue
                    frames = await socket.recv_multipart()
                    while await breaks.poll(0):
                        await breaks.recv_multipart()
                        self.current = False
                    if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
                        await self._receive(int.from_bytes(frames[1], "big"), frames[2])
        except Exception:
            log.exception("stopped following the KV events of engine %s", self._engine.name)
        finally:
            self.current = False

    def held_tokens(self, query: LookupQuery) -> tuple[int, bool] | None:
        """Return how many tokens the engine is known to hold, and whether these are all; None: not known."""
        if not self.current:
            return None
        held = self.index.held_tokens(query.tokens, query.model, query.salt, engine_cache=query.engine_cache)
        return held, self.index.holds_no_more(query.tokens, held)

    async def _receive(self, number: int, batch: bytes) -> None:
        if self._is_applied(number, batch) or (self.current and await self._apply(number, batch)):
            return
        if self._engine.config.replay is not None:
            await self._catch_up()
        else:
            self._lose_batches(number)
            self.current = await self._apply(number, batch)

    def _is_applied(self, number: int, batch: bytes) -> bool:
        return self._applied.get(number) == hash(batch)

    async def _apply(self, number: int, batch: bytes) -> bool:
        """Apply a batch; return False if it does not follow the last one."""
        if number != self._next:
            return False
        try:
            await self._apply_events(batch)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.warning("cannot read KV events of engine %s: %s", self._engine.name, error)
            self.index.clear()
        self._next = number + 1
        self._applied[number] = hash(batch)
        if len(self._applied) > _MAX_DIGESTS:
            self._applied.popitem(last=False)
        return True

    async def _apply_events(self, batch: bytes) -> None:
        """Apply the events of a batch in steps, so that requests do not wait for all of them."""
        applied = 0
        for raw in _batches.decode(batch).events:
            for blocks in chain((1,), self.index.steps(_events.decode(raw))):
                applied += blocks
                if applied >= _STEP_WORK:
                    applied = 0
                    await asyncio.sleep(0)

    async def _catch_up(self) -> None:
        """Replay missed batches, and check that the engine was not restarted."""
        if self._engine.config.replay is None:
            self.current = self.current and self._engine.up
            return
        deadline = asyncio.get_running_loop().time() + MAX_REPLAY_S
        needs_replay: bool | None = True
        while needs_replay:
            needs_replay = await self._replay(deadline)
        self.current = needs_replay is not None

    def _lose_batches(self, number: int) -> None:
        if number:
            log.warning("KV events of engine %s before batch %d are lost", self._engine.name, number)
        self._clear_index(number)

    def _clear_index(self, number: int) -> None:
        """Clear the index; batch `number` is the next one."""
        self.index.clear()
        self.current = False
        self._next = number
        self._applied.clear()

    async def _replay(self, deadline: float) -> bool | None:
        """Apply the batches that the engine still has, from the last known one on.

        Returns:
            True: another replay is needed, because the engine was restarted, or was faster than this reader
            and left some out. False: the index is up to date. None: the replay did not end in time.
        """
        first, verified, advanced = max(0, self._next - 1), not self._next, False
        with closing(_socket(zmq.DEALER)) as socket:
            socket.connect(self._engine.config.replay or "")
            await socket.send_multipart((b"", first.to_bytes(_NUMBER_BYTES, "big")))
            while await socket.poll(int(1000 * self._timeout_s)):
                frames = await socket.recv_multipart()
                if len(frames) == 4 and len(frames[2]) == _NUMBER_BYTES:
                    number, batch = int.from_bytes(frames[2], "big"), frames[3]
                    if not verified and not self._is_applied(number, batch):
                        log.info("engine %s was restarted, or lost KV events", self._engine.name)
                        self._clear_index(0)
                        return True
                    verified = True
                    if frames[2] == _END_NUMBER:
                        return False
                    if not self._is_applied(number, batch):
                        if number != self._next:
                            if advanced:
                                return True
                            self._lose_batches(number)
                        advanced = await self._apply(number, batch)
                if asyncio.get_running_loop().time() > deadline:
                    break
        return None


def _socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.set(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
    socket.set_hwm(_MAX_QUEUED)
    socket.linger = 0
    return socket


@contextmanager
def _monitored(socket: zmq.asyncio.Socket) -> Iterator[zmq.asyncio.Socket]:
    """Yield a socket that gets a message each time a connection of `socket` breaks."""
    breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        yield breaks
    finally:
        socket.disable_monitor()
        breaks.close()


class EventLookup:
    """A `Lookup` in the engines' KV events; if these are incomplete, the engine is asked.

    Args:
        subscribers: subscribers by engine name.
        fallback: lookup that asks the engine; None: engines cannot be asked.
    """

    def __init__(self, subscribers: Mapping[str, EventSubscriber], fallback: Lookup | None) -> None:
        self._subscribers = subscribers
        self._fallback = fallback

    async def __call__(self, engine: Engine, query: LookupQuery) -> int | None:
        subscriber = self._subscribers.get(engine.name)
        known = None if subscriber is None else subscriber.held_tokens(query)
        if known is not None and known[1] and not query.wait_s:
            return known[0]
        reported = None if self._fallback is None else await self._fallback(engine, query)
        return max((n for n in (reported, known and known[0]) if n is not None), default=None)
