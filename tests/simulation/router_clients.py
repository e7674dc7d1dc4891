"""Simulated clients of a router: what they ask, how they take it, and what an answer must be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvkit.router.openai import PATHS, Kind
from simulation.router_engines import tokens_after, tokens_of
from simulation.router_network import SLACK_S

if TYPE_CHECKING:
    from simulation.router_life import RouterLife

PROMPTS = (
    "where is the key?",
    "where is the key? under the mat, said she",
    "a" * 37,
    "once upon a time " * 3,
)
Body = dict[str, Any]


@dataclass(eq=False)
class SimulatedRequest:
    """One request of a client, as an aiohttp `Request`.

    Attributes:
        leaves_at, leaves_after: when it goes: at this time, or after so many writes; None: it stays.
        stalls_after: it takes no more after so many writes; None: it takes all.
        refused: an engine said that it is wrong.
        slow: it took a part of a stream, or sent its body, for longer than the router waits.
        wrote: what it got of a stream.
    """

    life: RouterLife
    id: str
    kind: Kind
    body: Body
    starts_s: float = 0.0
    leaves_s: float | None = None
    leaves_after: int | None = None
    stalls_after: int | None = None
    refused: bool = False
    slow: bool = False
    left: bool = False
    began: bool = False
    streamed: bool = False
    wrote: list[bytes] = field(default_factory=list)
    task: asyncio.Task[web.StreamResponse] | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        return {"X-Request-Id": self.id}

    async def read(self) -> bytes:
        await self._rest()
        return json.dumps(self.body).encode()

    def leave(self) -> None:
        """Go: the server cancels who was at work for it."""
        if self.task is not None and not self.task.done():
            self.life.loop.say("{} leaves", self.id)
            self.left = True
            self.task.cancel()

    # one life

    async def run(self) -> None:
        """Ask, and look at what comes."""
        life, loop = self.life, self.life.loop
        await asyncio.sleep(self.starts_s)
        began, fairly = loop.time(), loop.fair_time()
        if life.closing:
            return
        self.task = task = loop.create_task(self._serve(), name=f"serve-{self.id}")
        going = None if self.leaves_s is None else loop.call_later(self.leaves_s, self.leave)
        try:
            response = await task
        except asyncio.CancelledError:
            loop.check(self.left, "{} is cancelled, and had not left", self.id)
            response = None
        finally:
            if going is not None:
                going.cancel()
        took, most = loop.fair_time() - fairly, life.config.request_timeout_s + life.config.idle_timeout_s + 1
        loop.check(took <= most, "{} took {} s", self.id, took)
        if response is None or response.status == 499:
            leaves = self.left or self.stalls_after is not None or self.slow
            loop.check(leaves, "{} is said to have left", self.id)
            self._look_at_stream(whole=False)
        elif self.streamed:
            self._look_at_stream(whole=True)
        else:
            self._look_at(response, loop.time() - began)

    async def _serve(self) -> web.StreamResponse:
        life: Any = self.life
        self.began = True
        try:
            response: Any = await life.handlers[PATHS[self.kind]](self)
        finally:
            for engine in life.engines:
                left = [x.path for x in engine.open if x.id == self.id]
                life.loop.check(not left, "{} goes on with {} of {}", engine.name, left, self.id)
        life.loop.say("{} is answered: {}", self.id, response.status)
        if not self.streamed and b"no decode engine" in (response.body or b""):
            self.look_for_engines()
        return response

    def look_for_engines(self) -> None:
        """An error says that no D was left: each had failed, or was down."""
        for engine in self.life.routed:
            asked = self.life.by_address[engine.name].asked.get(self.id, 0)
            spared = engine.role == "decode" and engine.up and not asked
            self.life.loop.check(not spared, "{} fails, and {} was not asked", self.id, engine.name)

    async def take(self, data: bytes) -> None:
        """A part of a stream."""
        if self.left:
            raise ConnectionResetError("Cannot write to closing transport")
        if data.startswith(b'data: {"error":{"message":"no decode engine'):
            self.look_for_engines()
        if self.stalls_after is not None and len(self.wrote) >= self.stalls_after:
            await asyncio.get_running_loop().create_future()
        self.wrote.append(data)
        await self._rest()
        if self.leaves_after is not None and len(self.wrote) >= self.leaves_after:
            self.leave()
            await asyncio.sleep(0)

    async def _rest(self) -> None:
        """Take time: more than the router waits only where the clock is hastened."""
        loop, longest = self.life.loop, self.life.config.idle_timeout_s - SLACK_S
        began = loop.time()
        try:
            await asyncio.sleep(self.life.delay())
        except asyncio.CancelledError:
            self.slow = loop.time() - began >= longest
            raise

    # what must hold

    @property
    def made(self) -> list[int]:
        """The one right answer."""
        return tokens_after(tokens_of(self.body), self.body["max_tokens"])

    def _look_at(self, response: Any, took: float) -> None:
        """An answer in one piece."""
        check, status = self.life.loop.check, response.status
        reply = json.loads(response.body)
        if status != 200:
            check(not self.life.sure, "{} is answered {}: {}", self.id, status, reply)
            check(reply.get("error"), "{}: no words for status {}: {}", self.id, status, reply)
            known = status in (502, 503, 429, 500) or (status == 400 and self.refused)
            late = status == 504 and took >= self.life.config.request_timeout_s - SLACK_S
            check(known or late, "{} is answered {} after {} s", self.id, status, took)
            return
        (choice,) = reply["choices"]
        text = choice["message"]["content"] if self.kind == "chat" else choice["text"]
        check(text == bytes(self.made).decode(), "{} is answered {!r}", self.id, text)
        check("kv_transfer_params" not in reply, "{} is told what P said", self.id)
        check(choice["finish_reason"] == "length", "{} ends with {}", self.id, choice)

    def _look_at_stream(self, *, whole: bool) -> None:
        """A stream, or what a client that left has of it."""
        check = self.life.loop.check
        said = b"".join(self.wrote).split(b"\n\n")
        check(said.pop() == b"", "{}: half an event", self.id)
        done = [number for number, data in enumerate(said) if data == b"data: [DONE]"]
        if whole:
            check(done == [len(said) - 1], "{}: {} events, ends {}", self.id, len(said), done)
        events = [json.loads(data[6:]) for data in said if data != b"data: [DONE]"]
        errors = [event for event in events if "error" in event]
        events = [event for event in events if "error" not in event]
        check(len(errors) <= 1 and not (errors and self.life.sure), "{}: {}", self.id, errors)
        check(len({event["id"] for event in events}) <= 1, "{}: an answer by several ids", self.id)
        choices = [event["choices"][0] for event in events if event["choices"]]
        usages = [event["usage"] for event in events if event.get("usage")]
        parts = [choice["delta"] if self.kind == "chat" else choice for choice in choices]
        name = "content" if self.kind == "chat" else "text"
        text, made = "".join(part.get(name) or "" for part in parts), self.made
        wanted = bytes(made).decode()
        check(wanted.startswith(text), "{} gets {!r}, want {!r}", self.id, text, wanted)
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        shows = bool(self.body.get("return_token_ids"))
        check(ids == made[: len(ids)] and (shows or not ids), "{} gets tokens {}", self.id, ids)
        ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        check(len(ends) <= 1 and not (ends and text != wanted), "{}: ends {}", self.id, ends)
        if whole and not errors:
            check(text == wanted and ends, "{} gets {!r} of {!r}: {}", self.id, text, wanted, ends)
            check(not shows or ids == made, "{} gets tokens {} of {}", self.id, ids, made)
            asks = bool(self.body.get("stream_options"))
            counts = [usage["completion_tokens"] for usage in usages]
            check(counts == [len(made)] * asks, "{}: usage {}", self.id, usages)
            prompts = [usage["prompt_tokens"] for usage in usages]
            check(prompts == [len(tokens_of(self.body))] * asks, "{}: usage {}", self.id, usages)


class SimulatedStream:
    """A `web.StreamResponse`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.status = 200
        self._request: SimulatedRequest | None = None

    async def prepare(self, request: SimulatedRequest) -> None:
        request.life.loop.check(not request.streamed, "{}: two streams", request.id)
        request.streamed = True
        self._request = request

    async def write(self, data: bytes) -> None:
        if self._request is None:
            raise RuntimeError("not prepared")
        await self._request.take(data)


def instead_of_web() -> SimpleNamespace:
    """For `kvkit.router.clients`."""
    return SimpleNamespace(
        StreamResponse=SimulatedStream,
        json_response=web.json_response,
        HTTPRequestEntityTooLarge=web.HTTPRequestEntityTooLarge,
        RequestPayloadError=web.RequestPayloadError,
    )


def draw_request(life: RouterLife, r: Random, number: int) -> SimulatedRequest:
    """What one client does."""
    kind: Kind = r.choice(("completions", "completions", "chat"))
    prompt = r.choice(PROMPTS)
    body: Body = {"model": "m", "max_tokens": r.choice((1, 4, 12, 24))}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = list(prompt.encode()) if r.random() < 0.5 else prompt
    if r.random() < 0.75:
        body["stream"] = True
        if r.random() < 0.4:
            body["stream_options"] = {"include_usage": True}
        if r.random() < 0.2:
            body["return_token_ids"] = True
    if r.random() < 0.15:
        body["seed"] = 7
    request = SimulatedRequest(life, f"r{number}", kind, body, r.choice((0.0, 0.0, 0.5, 6.0)))
    if not life.calm and r.random() < 0.3:
        way = r.randrange(3)
        if way == 0:
            request.leaves_s = r.choice((0.0, 0.05, 1.0, 10.0))
        elif way == 1:
            request.leaves_after = r.choice((1, 2, 5))
        else:
            request.stalls_after = r.choice((0, 1, 3))
    return request
