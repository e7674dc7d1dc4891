"""A router's follower of one engine's KV events, by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from kvkit.lab.testbed.waiting import START_S
from kvkit.router.engines import Engine
from kvkit.router.events import EventLookup, EventSubscriber
from kvkit.router.lookups import LookupQuery
from kvkit.router.settings import RouterConfig, read_router_config


def addresses(folder: Path) -> dict[str, str]:
    """Where an engine publishes events, and has them replayed: the router's settings of it."""
    return {name: f"ipc://{folder}/{name}" for name in ("events", "replay")}


class Following:
    """Follows an engine whose events are in `folder`, and answers in its stead. An async context manager.

    Attributes:
        asked: how often it was asked.
        held: what it answers.
    """

    def __init__(self, folder: Path, replay: bool = True, interval_s: float = 0.05) -> None:
        where = {"url": "http://127.0.0.1:1"} | addresses(folder)
        if not replay:
            del where["replay"]
        self._config: RouterConfig = read_router_config(decode={"d": where}, health_interval_s=interval_s)
        self.asked = 0
        self.held = 0

    async def __aenter__(self) -> Following:
        self.follower = self.make_follower()
        self._lookup = EventLookup({"d": self.follower}, self._ask)
        self._task = asyncio.create_task(self.follower.run())
        return self

    def make_follower(self) -> EventSubscriber:
        """Of this engine, which is up. It follows nothing yet."""
        self._session = aiohttp.ClientSession()
        self.engine = Engine("d", "decode", self._config.decode["d"], self._config, self._session)
        self.engine.up = True
        return EventSubscriber(self.engine, self._config)

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._session.close()

    @property
    def known(self) -> int:
        """How many batches it knows of: the number of the next."""
        return self.follower._next

    async def until_current(self, batches: int | None = None) -> None:
        """Return when it is up to date, and knows of so many batches."""
        async with asyncio.timeout(START_S):
            while not (self.follower.current and batches in (None, self.known)):
                await asyncio.sleep(0.002)

    async def held_tokens(self, tokens: list[int], wait_s: float = 0.0) -> int | None:
        return await self._lookup(self.engine, LookupQuery(tokens, wait_s=wait_s))

    async def _ask(self, engine: Engine, query: LookupQuery) -> int | None:
        self.asked += 1
        return self.held
