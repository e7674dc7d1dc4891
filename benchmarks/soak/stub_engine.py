"""An engine for the soak of the router, in a process of its own: the toy engine, which fails at random.

    python -m benchmarks.soak.stub_engine PORT EVENTS REPLAY BLOCKS SEED

It holds the last blocks of the prompts that it was asked, and tells of them as vLLM does: numbered batches of
KV events, the last of which can be had again, while some get lost. To `/behave` it takes what differs from
`CALM`; `/held` says how many of some tokens it holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from kvkit.lab.testbed.openai_engine import Body, Toy, render
from kvkit.router.events import KVEventBatch
from kvkit.router.index import BlockHash, ClearedBlocks, KVEvent, RemovedBlocks, StoredBlocks

BLOCK = 16
"""Tokens of a block."""
KEPT = 10_000
"""Batches that can be had again."""
PLACE, TIER = "CPU", "memory"
LONGEST_PAUSE_S = 1.0

CALM: Body = {"faults": 0.0, "lost": 0.0, "health": 200, "keeps": True}
"""How it behaves when nobody says more: shares of requests that fail and of batches that get lost, what
`/health` answers, and whether prompts are kept."""

_END = (-1).to_bytes(8, "big", signed=True)
STREAMED: dict[str, Callable[[random.Random], Body]] = {
    "slow": lambda chance: {"hold_after": chance.randrange(8)},
    "hang": lambda _: {"hang": True},
    "status": lambda chance: {"status": chance.choice((408, 429, 500, 503))},
    **{
        end: lambda chance, end=end: {"end_after": chance.randrange(8), "end": end}  # type: ignore[misc]
        for end in ("cut", "abort", "error", "garbled")
    },
    "unclosed": lambda _: {"closes": False},
    "takes nothing": lambda _: {"takes": False},
}
"""What goes wrong with a request that is a stream, as the toy is told of it."""
WHOLE = ("slow", "hang", "status", "takes nothing")
"""What of it goes wrong with others, too."""
HANDING: dict[str, Body] = {
    "hands off nothing": {"hands": False},
    "hands off nonsense": {"params": [7]},
}
GARBLED = {
    "no JSON": (200, b"<html>It works!</html>"),
    "no object": (200, b"[1, 2]"),
    "no choices": (200, b'{"choices": []}'),
    "half an answer": (200, b'{"choices": [{"index": 0, "te'),
    "an error of a proxy": (502, b"<html>Bad Gateway</html>"),
}
"""Answers that are none: HTTP status and body."""


class Told:
    """Publishes batches of KV events and those that were missed."""

    def __init__(self, events: str, replay: str) -> None:
        context = zmq.asyncio.Context.instance()
        self._pub, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.set_hwm(10 * KEPT)
        self._replay.set_hwm(0)
        self._pub.bind(events)
        self._replay.bind(replay)
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)

    async def tell(self, *events: KVEvent, lost: bool = False) -> None:
        number = self._next.to_bytes(8, "big")
        batch = msgspec.msgpack.encode(KVEventBatch(time.time(), list(events)))
        self._next += 1
        self._kept.append((number, batch))
        if not lost:
            await self._pub.send_multipart((b"", number, batch))

    async def serve(self) -> None:
        """Answer who asks for what was missed, for ever."""
        while True:
            client, _, first = await self._replay.recv_multipart()
            for number, batch in [*self._kept]:
                if number >= first:
                    await self._replay.send_multipart((client, b"", b"", number, batch))
            await self._replay.send_multipart((client, b"", b"", _END, b""))


class Blocks:
    """The blocks that were used last: so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[int, None] = OrderedDict()

    def keep(self, tokens: list[int]) -> list[KVEvent]:
        """Hold the blocks of a prompt; what is to be told of that. Mutates."""
        hashes = hashes_of(tokens)
        first = self.run(hashes)
        for block in reversed(hashes):  # of a run the end goes first
            self._held[block] = None
            self._held.move_to_end(block)
        events: list[KVEvent] = []
        if first < len(hashes):
            last = hashes[first - 1] if first else None
            ids = tokens[first * BLOCK : len(hashes) * BLOCK]
            new: list[BlockHash] = [*hashes[first:]]
            events.append(StoredBlocks(new, last, ids, BLOCK, PLACE, ownership=TIER))
        gone: list[BlockHash] = [
            self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._most)
        ]
        if gone:
            events.append(RemovedBlocks(gone, PLACE, ownership=TIER))
        return events

    def run(self, hashes: list[int]) -> int:
        """How many are held, from the first on."""
        return next((i for i, block in enumerate(hashes) if block not in self._held), len(hashes))

    def clear(self) -> None:
        self._held.clear()


def hashes_of(tokens: list[int]) -> list[int]:
    """Of each whole block, with all before it."""
    found, before = [], b""
    for stop in range(BLOCK, len(tokens) + 1, BLOCK):
        before = hashlib.blake2b(before + repr(tokens[stop - BLOCK : stop]).encode(), digest_size=8).digest()
        found.append(int.from_bytes(before, "big") >> 1)
    return found


class StandIn:
    """The engine."""

    def __init__(self, events: str, replay: str, blocks: int, seed: str) -> None:
        self._chance = random.Random(seed)
        self._told = Told(events, replay)
        self._blocks = Blocks(blocks)
        self._way = dict(CALM)
        self._failed: Counter[str] = Counter()

    def app(self) -> web.Application:
        toy, app = Toy(), web.Application()
        app.cleanup_ctx.append(self._telling)
        for method, path, answer in (
            ("POST", "/behave", self._behave),
            ("POST", "/held", self._hold),
            ("GET", "/health", self._health),
            ("GET", "/v1/models", toy.models),
            ("POST", "/tokenize", toy.tokenize),
            ("POST", "/v1/completions", self._complete),
            ("POST", "/v1/chat/completions", self._complete),
        ):
            app.router.add_route(method, path, answer)
        return app

    async def _telling(self, _: web.Application) -> AsyncIterator[None]:
        await self._told.tell(ClearedBlocks(complete=True))
        serving = asyncio.create_task(self._told.serve())
        yield
        serving.cancel()

    async def _behave(self, request: web.Request) -> web.Response:
        """Change its ways; the faults so far, which are forgotten."""
        asked = await request.json()
        if asked.pop("clear", False):
            self._blocks.clear()
            await self._told.tell(ClearedBlocks(complete=True))
        self._way |= asked
        said, self._failed = dict(self._failed), Counter()
        return web.json_response(said)

    async def _hold(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        return web.json_response({"held": BLOCK * self._blocks.run(hashes_of(tokens))})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self._way["health"])

    async def _complete(self, request: web.Request) -> Any:
        """An answer by a toy of its own, with what goes wrong with it."""
        body = await request.json()
        toy = Toy()
        fault = self._chance.random() < self._way["faults"]
        kinds = [*STREAMED, *GARBLED] if body.get("stream") else [*WHOLE, *GARBLED]
        transfer = body.get("kv_transfer_params") or {}
        if transfer.get("do_remote_decode"):
            kinds += HANDING
        kind = self._chance.choice(kinds) if fault else ""
        if fault:
            self._failed[kind] += 1
        if kind in GARBLED:
            status, answer = GARBLED[kind]
            return web.Response(status=status, body=answer, content_type="application/json")
        toy.settings |= HANDING.get(kind, {})
        toy.settings |= STREAMED[kind](self._chance) if kind in STREAMED else {}
        if self._way["keeps"]:
            events = self._blocks.keep(prompt_of(request.path, body))
            if events:
                await self._told.tell(*events, lost=self._chance.random() < self._way["lost"])
        if kind == "slow":
            pause = self._chance.uniform(0, LONGEST_PAUSE_S)
            if not body.get("stream"):
                await asyncio.sleep(pause)
            going_on = asyncio.get_running_loop().call_later(pause, go_on, toy)
            try:
                return await toy.complete(request)
            finally:
                going_on.cancel()
        return await toy.complete(request)


def go_on(toy: Toy) -> None:
    """Have a stream that pauses do so no more."""
    toy.settings["hold_after"] = None
    toy.changed.set()


def prompt_of(path: str, body: Body) -> list[int]:
    """The tokens of a request's prompt."""
    if path.startswith("/v1/chat"):
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        return given or render(body["messages"])
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) else list(prompt.encode())


def main() -> None:
    port, events, replay, blocks, seed = sys.argv[1:]
    app = StandIn(events, replay, int(blocks), seed).app()
    web.run_app(app, host="127.0.0.1", port=int(port), handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
