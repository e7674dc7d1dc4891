"""Follows engines' KV events, so that what they hold is known without asking.

vLLM's publisher numbers its batches from 0 and keeps the last ones for who missed some. Where a number does
not follow on the last, the missing ones are asked for. Where they are not to be had, or an earlier number now
is another batch's, as of an engine that was started anew, all that is known of the engine is forgotten; kvkit
tells it again in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import closing

import msgspec
import zmq
import zmq.asyncio

from kvkit.router.engines import Engine, Lookup, LookupQuery
from kvkit.router.index import BlockIndex, KVEvent
from kvkit.router.settings import RouterConfig

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 64 << 20
"""The longest message; a publisher that sends a longer one is disconnected."""
_WAITING = 100_000  # messages
_END = (-1).to_bytes(8, "big", signed=True)


class KVEventBatch(msgspec.Struct, array_like=True):
    """What one step of an engine tells."""

    ts: float
    events: list[KVEvent]


class Follower:
    """Keeps the index of one engine. Lives in one event loop.

    Args:
        engine: whose `events`, and `replay` if it has one, are configured.

    Attributes:
        index: what it holds.
        current: whether the index was up to date a moment ago.
    """

    def __init__(self, engine: Engine, config: RouterConfig) -> None:
        self.index = BlockIndex()
        self.current = False
        self._engine = engine
        self._interval_s = config.health_interval_s
        self._timeout_s = config.lookup_timeout_s
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._replayed: dict[int, int] = {}  # the last ones: they come as messages, too
        self._next, self._last = 0, b""  # the next batch's number, and the batch before it

    async def run(self) -> None:
        """Follow it for ever."""
        try:
            with closing(_socket(zmq.SUB, _WAITING)) as socket:
                socket.subscribe(b"")
                socket.connect(self._engine.config.events or "")
                await self._catch_up()
                while True:
                    if not await socket.poll(int(1000 * self._interval_s)):
                        await self._catch_up()
                        continue
                    frames = await socket.recv_multipart()
                    if len(frames) == 3:
                        await self._receive(int.from_bytes(frames[1], "big"), frames[2])
        except Exception:
            log.exception("KV events of engine %s are followed no more", self._engine.name)
        finally:
            self.current = False

    def tokens(self, query: LookupQuery) -> tuple[int, bool] | None:
        """How many tokens it is known to hold, and whether it holds no more; None: nothing is known."""
        if not self.current:
            return None
        held = self.index.tokens(query.tokens, query.model, query.salt, engine_cache=query.engine_cache)
        return held, self.index.says_all(query.tokens, held)

    async def _receive(self, number: int, batch: bytes) -> None:
        if self._replayed.get(number) == hash(batch) or (self.current and self._take(number, batch)):
            return
        if self._engine.config.replay is not None:
            await self._catch_up()
        else:
            self._lose(number)
            self.current = self._take(number, batch)

    def _take(self, number: int, batch: bytes) -> bool:
        """Note a batch; False: it does not follow on the last one."""
        if (number, batch) == (self._next - 1, self._last):
            return True
        if number != self._next:
            return False
        try:
            for event in self._decoder.decode(batch).events:
                self.index.take(event)
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("KV events of engine %s are not understood: %s", self._engine.name, error)
            self.index.forget()
        self._next, self._last = number + 1, batch
        return True

    async def _catch_up(self) -> None:
        """Take what was missed, if anything was, and see that it is still the same engine."""
        if self._engine.config.replay is None:
            self.current = self.current and self._engine.up
            return
        batches = await self._replay(max(0, self._next - 1))
        if batches is not None and self._next and batches[:1] != [(self._next - 1, self._last)]:
            log.info("engine %s was started anew, or KV events of it are lost", self._engine.name)
            self._forget(0)
            batches = await self._replay(0)
        for number, batch in batches or ():
            if not self._take(number, batch):
                self._lose(number)
                self._take(number, batch)
            await asyncio.sleep(0)  # requests do not wait for all of them
        self._replayed = {number: hash(batch) for number, batch in batches or ()}
        self.current = batches is not None

    def _lose(self, number: int) -> None:
        if number:
            log.warning("KV events of engine %s before batch %d are lost", self._engine.name, number)
        self._forget(number)

    def _forget(self, number: int) -> None:
        """Know nothing of what came before a batch."""
        self.index.forget()
        self.current = False
        self._next, self._last = number, b""

    async def _replay(self, first: int) -> list[tuple[int, bytes]] | None:
        """The batches that the engine still has, from a number on; None: it does not answer."""
        found: list[tuple[int, bytes]] = []
        with closing(_socket(zmq.DEALER, 0)) as socket:
            socket.connect(self._engine.config.replay or "")
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while await socket.poll(int(1000 * self._timeout_s)):
                frames = await socket.recv_multipart()
                if len(frames) != 4:
                    continue
                if frames[2] == _END:
                    return found
                found.append((int.from_bytes(frames[2], "big"), frames[3]))
        return None


def _socket(kind: int, waiting: int) -> zmq.asyncio.Socket:
    """A socket that takes in so many messages ahead; 0: any number."""
    socket = zmq.asyncio.Context.instance().socket(kind)
    socket.set(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
    socket.set_hwm(waiting)
    socket.linger = 0
    return socket


class FollowingLookup:
    """A `Lookup` that knows of engines by their KV events, and asks those of which these do not say it all.

    Args:
        followers: by the engine's name.
        ask: None: nobody can be asked.
    """

    def __init__(self, followers: Mapping[str, Follower], ask: Lookup | None) -> None:
        self._followers = followers
        self._ask = ask

    async def __call__(self, engine: Engine, query: LookupQuery) -> int | None:
        follower = self._followers.get(engine.name)
        told = None if follower is None else follower.tokens(query)
        if told is not None and told[1] and not query.wait_s:
            return told[0]
        asked = None if self._ask is None else await self._ask(engine, query)
        return max((n for n in (asked, told and told[0]) if n is not None), default=None)
