"""Simulated engines: they answer as vLLM does, or fail in all the ways that one does, and tell KV events."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from kvkit.router.events import KVEventBatch
from kvkit.router.index import ClearedBlocks, KVEvent, RemovedBlocks, StoredBlocks
from simulation.router_network import CONNECT_S, Exchange, SimulatedSocket, refused

if TYPE_CHECKING:
    from simulation.router_life import RouterLife

BLOCK = 8
END = (-1).to_bytes(8, "big", signed=True)
PLACE = {"medium": "CPU", "ownership": "memory"}
DOWN_S, STUCK_S = (7.0, 12.0, 40.0), (0.5, 6.0, 60.0)
"""A start takes longer than the router takes to see that an engine has gone, as those of vLLM do."""
WRONG = ("refuses", "status", "garbage", "hangs", "cut", "abort", "error", "ends", "refused", "kept")
GARBAGE = (b"<html>", b"[]", b'{"choices": 1}', b'{"id": 1, "choices": []}', b'{"choices": [7]}', b"\xff\xfe")
Body = dict[str, Any]


def tokens_of(body: Body) -> list[int]:
    """The prompt's tokens: a token is a letter. What another engine made is given as such."""
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if given is not None:
        return list(given)
    if "messages" in body:
        return [1, *"".join(message["content"] for message in body["messages"]).encode()]
    prompt = body["prompt"]
    return list(prompt) if isinstance(prompt, list) else list(prompt.encode())


def tokens_after(ids: Sequence[int], count: int) -> list[int]:
    """What every engine makes of a prompt; each token depends on all before it."""
    total, made = sum(ids), list[int]()
    for _ in range(count):
        made.append(97 + (total * 7 + (len(ids) + len(made)) * 5) % 26)
        total += made[-1]
    return made


class Publisher:
    """KV events of an engine, in numbered batches: some come late, twice or not at all."""

    def __init__(self, life: RouterLife, keeps: int, name: str) -> None:
        self.life, self.name = life, name
        self.subscribers: list[SimulatedSocket] = []
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self.number = 0
        self.cut_until = 0.0
        self._due = 0.0

    def tell(self, *events: KVEvent) -> None:
        """A batch more."""
        now, number = self.life.loop.time(), self.number
        data = msgspec.msgpack.encode(KVEventBatch(now, list(events)))
        self.number += 1
        self.kept.append((number, data))
        if now < self.cut_until:
            return
        for socket in self.subscribers:
            if self.life.happens(self.life.loses):
                self.life.loop.say("{} loses batch {}", self.name, number)
                continue
            self._due = max(self._due + 1e-6, now + self.life.delay())
            if self.life.happens(self.life.doubles):
                self._due = now  # before those that are late
            for _ in range(1 + self.life.happens(self.life.doubles)):
                self.life.loop.call_at(self._due, socket.put, b"", number.to_bytes(8, "big"), data)

    def again(self, socket: SimulatedSocket, first: int) -> None:
        """What is kept, from a number on."""
        for number, data in self.kept:
            if number >= first:
                socket.put(b"", b"", number.to_bytes(8, "big"), data)
        socket.put(b"", b"", END, b"")

    def start_anew(self) -> None:
        """As a process that has just begun; subscribers connect a little later."""
        self.number = 0
        self.kept.clear()
        self.cut_until = self.life.loop.time() + self.life.delay()


class SimulatedEngine:
    """One engine.

    Attributes:
        open: requests that are under way at it.
        state: "up", "down", "stuck": it answers nothing; or "sick": its health is HTTP status 503.
        since: when its state changed, by `fair_time`.
        refuses: it refused a request, and the router has not seen it well since.
        asked: how often each request asked it for an answer.
    """

    def __init__(self, life: RouterLife, name: str, keeps: int) -> None:
        self.life, self.name = life, name
        self.loop = life.loop
        self.open: list[Exchange] = []
        self.state, self.since = "up", 0.0
        self.refuses = False
        self.asked: dict[str, int] = {}
        self.publisher = Publisher(life, keeps, name)
        self.held: set[int] = set()
        self._awake = asyncio.Event()
        self._awake.set()

    # its life

    def turn(self, state: str) -> None:
        """Be in another state from now on."""
        self.loop.say("{} is {}", self.name, state)
        before, self.state, self.since = self.state, state, self.loop.fair_time()
        if state == "stuck":
            self._awake.clear()
        else:
            self._awake.set()
        if state == "down":
            self.held.clear()
            for socket in self.publisher.subscribers:
                socket.broke()
            for exchange in list(self.open):
                lose = self.life.random.random() < 0.5
                exchange.breaks(self.life.random.choice(CUTS)(), lose)
                exchange.halt()
        if before == "down":
            self.publisher.start_anew()
            self.publisher.tell(ClearedBlocks(complete=True))

    async def trouble(self) -> None:
        """Go down, hang and come back, as long as faults last."""
        r = self.life.random
        while not self.life.quiet:
            await asyncio.sleep(r.choice((0.0, 0.3, 3.0, 30.0)))
            if self.life.quiet:
                break
            state = r.choice(("down", "stuck", "sick"))
            self.turn(state)
            await asyncio.sleep(r.choice(DOWN_S if state == "down" else STUCK_S))
            self.turn("up")
            await asyncio.sleep(r.choice((0.5, 20.0, 60.0)))

    # what it holds

    def compute(self, ids: Sequence[int]) -> None:
        """Hold the blocks of a prompt, and no longer all of the others."""
        blocks = _blocks(ids)
        for number, (block, piece) in enumerate(blocks):
            if block not in self.held:
                self.held.add(block)
                before = blocks[number - 1][0] if number else None
                self.publisher.tell(StoredBlocks([block], before, list(piece), BLOCK, **PLACE))
        r = self.life.random
        if self.held and r.random() < 0.4:
            gone = r.sample(sorted(self.held), min(len(self.held), r.choice((1, 1, 3))))
            self.held.difference_update(gone)
            self.publisher.tell(RemovedBlocks(gone, **PLACE))
        elif r.random() < 0.1:
            self.held.clear()
            self.publisher.tell(ClearedBlocks(complete=True))

    def holds(self, ids: Sequence[int]) -> int:
        """How many tokens, from the first on."""
        run = 0
        for block, _ in _blocks(ids):
            if block not in self.held:
                break
            run += BLOCK
        return run

    def tell_again(self, socket: SimulatedSocket, first: int) -> None:
        """Answer who missed batches, unless nobody is there, or is by then."""

        def answer() -> None:
            if self.state in ("up", "sick"):
                self.publisher.again(socket, first)

        if self.state in ("up", "sick") and not self.life.happens(self.life.loses):
            self.loop.call_at(self.loop.time() + self.life.delay(), answer)

    # answers

    async def serve(self, exchange: Exchange) -> None:
        """Answer a request, or fail."""
        if self.state == "down":
            await self._rest()
            exchange.breaks(refused(self.name))
            return
        wrong = self.life.fault(exchange)
        if wrong == "refuses":
            if self.life.random.random() < 0.5:
                await asyncio.sleep(CONNECT_S)
                exchange.breaks(aiohttp.ConnectionTimeoutError("Connection timeout"))
            else:
                exchange.breaks(refused(self.name))
            return
        await self._rest()
        if wrong == "hangs" and self.life.random.random() < 0.5:
            await asyncio.get_running_loop().create_future()
        if exchange.path == "/health":
            exchange.begin(503 if self.state == "sick" else 200)
            exchange.end()
        elif wrong == "status":
            self._whole(exchange, *self.life.random.choice(STATUSES))
        elif wrong == "refused":
            self._whole(exchange, 400, b'{"error": {"message": "simulated", "code": 400}}')
        elif wrong == "garbage" and not exchange.body.get("stream"):
            self._whole(exchange, 200, self.life.random.choice(GARBAGE))
        elif exchange.path == "/tokenize":
            self._whole(exchange, 200, json.dumps({"tokens": tokens_of(exchange.body)}).encode())
        elif exchange.body.get("stream"):
            await self._stream(exchange, wrong)
        else:
            await self._reply(exchange, wrong)

    async def _rest(self) -> None:
        """Take time, or for ever while nothing is answered."""
        await asyncio.sleep(self.life.delay())
        while not self._awake.is_set():
            await self._awake.wait()

    def _whole(self, exchange: Exchange, status: int, data: bytes) -> None:
        half = self.life.random.randrange(len(data))
        exchange.begin(status)
        exchange.write(data[:half])
        exchange.write(data[half:])
        exchange.end()

    async def _reply(self, exchange: Exchange, wrong: str) -> None:
        """An answer that is no stream."""
        body = exchange.body
        ids = tokens_of(body)
        self.compute(ids)
        await self._rest()
        made = tokens_after(ids, body.get("max_tokens", 16))
        ended = "abort" if wrong == "abort" else "length"
        choice: Body = {"index": 0, "finish_reason": ended}
        text = bytes(made).decode()
        choice |= {"message": {"role": "assistant", "content": text}} if _chats(exchange) else {"text": text}
        reply: Body = {"id": exchange.id, "created": 1, "choices": [choice], "usage": _usage(ids, made)}
        if exchange.prefills and wrong != "kept":
            reply["kv_transfer_params"] = {"do_remote_prefill": True, "from": self.name}
        data = json.dumps(reply).encode()
        if wrong in ("cut", "ends"):
            exchange.begin(200)
            exchange.write(data[: len(data) // 2])
            await self._rest()
            exchange.breaks(aiohttp.ClientPayloadError("not enough data"))
        else:
            self._whole(exchange, 200, data)

    async def _stream(self, exchange: Exchange, wrong: str) -> None:
        """A stream of events, in which an event may have several tokens, and a piece any part of them."""
        r, body = self.life.random, exchange.body
        ids = tokens_of(body)
        self.compute(ids)
        await self._rest()
        exchange.begin(200)
        made = tokens_after(ids, body["max_tokens"])
        at, fails_at = 0, r.randrange(len(made) + 1)
        while at < len(made):
            if at >= fails_at and wrong in ("hangs", "cut", "abort", "error", "ends", "garbage"):
                await self._fail(exchange, wrong)
                return
            part = made[at : at + r.choice((1, 1, 1, 2, 5))]
            event = self._event(exchange, ids, part, first=at == 0, last=at + len(part) == len(made))
            at += len(part)
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            cut = r.randrange(len(data))
            exchange.write(data[:cut])
            if self.life.happens(0.3):
                await self._rest()
            exchange.write(data[cut:])
            await self._rest()
        if wrong in ("cut", "garbage", "hangs", "error"):
            await self._fail(exchange, wrong)
            return
        if (body.get("stream_options") or {}).get("include_usage"):
            last = {"id": exchange.id, "created": 1, "choices": [], "usage": _usage(ids, made)}
            exchange.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        exchange.write(b"data: [DONE]\n\n")
        await self._rest()
        exchange.end()

    async def _fail(self, exchange: Exchange, wrong: str) -> None:
        """End a stream in the middle."""
        r = self.life.random
        if wrong == "hangs":
            await asyncio.get_running_loop().create_future()
        elif wrong == "cut":
            exchange.breaks(r.choice(CUTS)(), r.random() < 0.5)
            return
        elif wrong == "garbage":
            exchange.write(b"data: " + r.choice(GARBAGE) + b"\n\n")
        elif wrong == "error":
            exchange.write(b'data: {"error": {"message": "simulated", "code": 500}}\n\n')
        elif wrong == "abort":
            choice: Body = {"index": 0, "finish_reason": "abort"}
            choice |= {"delta": {}} if _chats(exchange) else {"text": ""}
            event = {"id": exchange.id, "created": 1, "choices": [choice]}
            exchange.write(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")
        if r.random() < 0.5:
            exchange.write(b"data: [DONE]\n\n")
        exchange.end()

    def _event(self, exchange: Exchange, ids: list[int], part: list[int], *, first: bool, last: bool) -> Body:
        text = bytes(part).decode()
        choice: Body = {"index": 0, "finish_reason": "length" if last else None}
        event: Body = {"id": f"{self.name}-{exchange.id}", "created": 1, "choices": [choice]}
        if _chats(exchange):
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            choice["text"] = text
        if exchange.body.get("return_token_ids"):
            choice["token_ids"] = part
            if first:
                (event if _chats(exchange) else choice)["prompt_token_ids"] = ids
        return event


STATUSES = (
    (500, b'{"error": {"message": "simulated", "code": 500}}'),
    (503, b"Service Unavailable"),
    (429, b'{"error": {"message": "busy", "code": 429}}'),
    (404, b"<html>nothing here</html>"),
    (302, b"{}"),
)
CUTS = (
    lambda: aiohttp.ClientPayloadError("Response payload is not completed"),
    lambda: aiohttp.ServerDisconnectedError(),
    lambda: ConnectionResetError(104, "Connection reset by peer"),
)


def _chats(exchange: Exchange) -> bool:
    return "chat" in exchange.path


def _usage(ids: Sequence[int], made: Sequence[int]) -> Body:
    count = {"prompt_tokens": len(ids), "completion_tokens": len(made), "total_tokens": len(ids) + len(made)}
    return {**count, "prompt_tokens_details": {"cached_tokens": 0}}


def _blocks(ids: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """A name for each whole block and all before it, and its tokens."""
    stops = range(BLOCK, len(ids) + 1, BLOCK)
    return [(zlib.crc32(bytes(ids[:stop])), ids[stop - BLOCK : stop]) for stop in stops]
