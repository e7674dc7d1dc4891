"""Lives of a router: clients that come and go, engines that fail in every way, and what must hold.

All of the router runs but its HTTP server: requests come to its application's handlers, and what stands for
aiohttp's session and ZeroMQ's sockets leads to simulated engines. It has one thread; who goes on in it is
drawn among tasks (`simulation.router_loop`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvkit.router.app import Router
from kvkit.router.engines import MAX_PROBE_TIMEOUTS, Engine, open_engines
from kvkit.router.events import EventSubscriber
from kvkit.router.index import RemovedBlocks
from kvkit.router.settings import RouterConfig
from simulation.router_clients import PROMPTS, draw_request, instead_of_web
from simulation.router_engines import WRONG, SimulatedEngine
from simulation.router_loop import SimulatedLoop
from simulation.router_network import (
    CONNECT_S,
    Exchange,
    SimulatedSocket,
    instead_of_aiohttp,
    instead_of_zmq,
)
from simulation.world import World

SETTLED_S = 24.0
"""By then the router has seen that every engine is well, and heard of all that they tell."""
CALM_S = (0.0, 0.001)
"""What anything takes where all is well."""
LIMITS: dict[str, float] = {
    "connect_timeout_s": CONNECT_S,
    "lookup_timeout_s": 1.5,
    "prefill_timeout_s": 10.0,
    "first_token_timeout_s": 40.0,
    "idle_timeout_s": 8.0,
    "request_timeout_s": 100.0,
    "health_interval_s": 2.0,
    "health_timeout_s": 3.0,
}


class RouterLife:
    """The router, its engines and clients, and what goes wrong.

    Attributes:
        calm: nothing goes wrong, nobody leaves: all is answered.
        quiet: nothing goes wrong any more.
        sure: requests that begin now are answered.
        closing: the router ends.
        handlers: those of the router's application, by path.
        routed: the engines, as the router knows them.
        followers: of the engines' KV events, by the engine's name.
    """

    def __init__(self, world: World) -> None:
        self.scheduler, self.random = world.scheduler, world.random
        r, self.scheduler.fine = world.random, False
        self.calm = self.quiet = r.random() < 0.25
        self.sure = self.calm
        self.closing = False
        haste = 0.0 if self.calm else r.choice((0.0, 0.0, 0.0, 0.02))
        self.loop = SimulatedLoop(world.scheduler, r.choice((0.0, 0.1, 0.5, 1.0)), haste)
        self.delays = CALM_S if self.calm else r.choice(((0.0, 0.001), (0.0, 0.02, 1.0), (0.3, 4.0)))
        self.wrongs = 0.0 if self.calm else r.choice((0.0, 0.1, 0.4, 0.9))
        self.kinds = r.sample(WRONG, r.randint(1, len(WRONG)))
        self.loses = 0.0 if self.calm else r.choice((0.0, 0.0, 0.1, 0.4))
        self.doubles = 0.0 if self.calm else r.choice((0.0, 0.0, 0.2))
        self.troubles = not self.calm and r.random() < 0.6
        self.closes_at = r.choice((0.1, 3.0, 20.0)) if not self.calm and r.random() < 0.15 else None
        self.events = r.choice(("", "", "events", "replay", "replay"))
        self.keeps = 10_000 if self.calm else r.choice((2, 10_000, 10_000))
        names = [f"d{i}" for i in range(r.choice((1, 2, 2, 3)))]
        names += [f"p{i}" for i in range(r.choice((0, 1, 2)))]
        self.engines = [SimulatedEngine(self, name, self.keeps) for name in names]
        self.by_address = {engine.name: engine for engine in self.engines}
        self.requests = [draw_request(self, r, i) for i in range(r.choice((1, 2, 4, 7)))]
        self.by_id = {request.id: request for request in self.requests}
        self.prefilled: set[str] = set()
        self.sockets: list[SimulatedSocket] = []
        self.config = RouterConfig(
            decode={n: self._settings(n, handoff=True) for n in names if n[0] == "d"},
            prefill={n: self._settings(n) for n in names if n[0] == "p"},
            direct_tokens=r.choice((0, 0, 20, 256)),
            direct_share=0.0,
            spread=r.choice((0, 4)),
            **LIMITS,
        )
        self.app = Router(self.config).app()
        self.handlers = {route.resource.canonical: route.handler for route in self.app.router.routes()}
        self.routed: list[Engine] = []
        self.followers: dict[str, EventSubscriber] = {}
        world.instead |= {
            ("kvkit.router.app", "open_engines"): self._open_engines,
            ("kvkit.router.app", "EventSubscriber"): self._follow,
            ("kvkit.router.app", "aiohttp"): instead_of_aiohttp(self),
            ("kvkit.router.events", "zmq"): instead_of_zmq(self),
            ("kvkit.router.clients", "web"): instead_of_web(),
        }

    def _settings(self, name: str, *, handoff: bool = False) -> Any:
        told = {"events": f"tcp://events-{name}:1"} if self.events else {}
        if self.events == "replay":
            told["replay"] = f"tcp://replay-{name}:2"
        return {"url": f"http://{name}", **told, **({"handoff": name} if handoff else {})}

    def _open_engines(self, *arguments: Any) -> list[Engine]:
        opened = open_engines(*arguments)
        self.routed += opened
        return opened

    def _follow(self, engine: Engine, config: RouterConfig) -> EventSubscriber:
        self.followers[engine.name] = follower = EventSubscriber(engine, config)
        return follower

    # what goes wrong

    def happens(self, share: float) -> bool:
        return share > 0 and not self.quiet and self.random.random() < share

    def delay(self) -> float:
        """What anything takes."""
        return self.random.choice(self.delays if self.calm or not self.quiet else CALM_S)

    def fault(self, exchange: Exchange) -> str:
        """What goes wrong with a request, if anything does."""
        if exchange.path == "/health" or not self.happens(self.wrongs):
            return ""
        wrong = self.random.choice(self.kinds)
        if wrong == "refused" and exchange.id in self.by_id and exchange.path != "/tokenize":
            self.by_id[exchange.id].refused = True
        self.loop.say("{} of {}: {}", exchange.path, exchange.id, wrong)
        return wrong

    # what must hold of requests to engines

    def longest(self, exchange: Exchange, began: float) -> float:
        """Return how long an engine may be waited for. Times are of `fair_time`."""
        config, engine = self.config, exchange.engine
        if exchange.path == "/health":
            return config.health_timeout_s
        if exchange.path == "/tokenize":
            limit = config.lookup_timeout_s
        elif exchange.prefills:
            limit = config.prefill_timeout_s
        elif exchange.body.get("stream"):
            limit = config.idle_timeout_s if exchange.began else config.first_token_timeout_s
        else:
            limit = config.request_timeout_s
        if engine.state == "stuck":
            question = config.health_interval_s + config.health_timeout_s
            known = max(engine.since + MAX_PROBE_TIMEOUTS * question, exchange.opened + question)
            limit = min(limit, known + question - began)
        return limit

    def asked(self, exchange: Exchange) -> None:
        """The router asks an engine for something."""
        engine, check = exchange.engine, self.loop.check
        if exchange.path == "/health":
            return
        words = "{} refused a connection, and is asked for {} by {} before its health is seen"
        stays = exchange.answers and exchange.id in self.prefilled  # it was chosen before that
        check(not engine.refuses or stays, words, engine.name, exchange.path, exchange.id)
        if exchange.prefills:
            self.prefilled.add(exchange.id)
        elif exchange.answers:
            self.prefilled.discard(exchange.id)
            engine.asked[exchange.id] = times = engine.asked.get(exchange.id, 0) + 1
            check(times <= 2, "{} is asked {} times by {}", engine.name, times, exchange.id)
        self.loop.say("asks {}{}", engine.name, exchange.path)

    def answered(self, exchange: Exchange, error: BaseException | None) -> None:
        """It has the response's beginning, or nothing further."""
        engine = exchange.engine
        if exchange.path == "/health":
            if error is None and exchange.status == 200:
                engine.refuses = False
        elif isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            engine.refuses = True

    # the whole of it

    def run(self) -> None:
        """As the first thread."""
        try:
            self.loop.run_until_complete(self.loop.create_task(self.live(), name="main"))
        finally:
            self.loop.unwind()
            self.loop.close()

    async def live(self) -> None:
        loop = self.loop
        (run_engines,) = self.app.cleanup_ctx
        opened = aiter(run_engines(self.app))
        self.scheduler.say("the router begins")
        troubles = [loop.create_task(e.trouble(), name=e.name) for e in self.engines if self.troubles]
        await anext(opened)
        clients = [loop.create_task(request.run(), name=request.id) for request in self.requests]
        if self.closes_at is not None:
            await asyncio.sleep(self.closes_at)
            self.close()
        await asyncio.gather(*clients)
        await self._count_answers()
        self.quiet, loop.haste = True, 0.0
        for trouble in troubles:
            trouble.cancel()
        await asyncio.gather(*troubles, return_exceptions=True)
        for engine in self.engines:
            if engine.state != "up":
                engine.turn("up")
        if self.closes_at is None:
            await self._settle()
        async for _ in opened:
            loop.check(False, "the router ends twice")
        await asyncio.sleep(1.0)
        self._ended()

    def close(self) -> None:
        """Have the server cut all requests, as it does when it ends."""
        self.closing = True
        for request in self.requests:
            request.leave()

    async def _count_answers(self) -> None:
        asked: Any = SimpleNamespace(headers={})
        told: Any = await self.handlers["/metrics"](asked)
        families = text_string_to_metric_families(told.body.decode())
        (answers,) = (family for family in families if family.name == "kvkit_router_answers")
        counted = sum(sample.value for sample in answers.samples if sample.name.endswith("_total"))
        began = sum(request.began for request in self.requests)
        self.loop.check(counted == began, "{} answers are counted of {}", counted, began)

    async def _settle(self) -> None:
        """All is well again, and is seen to be."""
        for _ in range(2):
            await asyncio.sleep(SETTLED_S / 2)
            for engine in self.engines:
                engine.publisher.tell(RemovedBlocks([]))
        await asyncio.sleep(1.0)
        self._idle()
        self._index()
        last = [draw_request(self, self.random, 100 + number) for number in range(2)]
        self.sure = True
        for request in last:
            request.leaves_s = request.leaves_after = request.stalls_after = None
            await request.run()
        self._idle()

    def _idle(self) -> None:
        """Nothing is under way any more, and every engine is used."""
        check = self.loop.check
        for engine in self.routed:
            check(engine.up, "{} is well, and not up", engine.name)
            check(not engine.requests, "{} has {} requests", engine.name, engine.requests)
            check(not engine._deadlines, "{} has deadlines left", engine.name)
        for simulated in self.engines:
            left = [x.path for x in simulated.open if x.path != "/health"]
            check(not left, "{} is at work on {}", simulated.name, left)

    def _index(self) -> None:
        """What is known of an engine is what it told."""
        check = self.loop.check
        exact = self.calm or (self.events == "replay" and self.keeps > 1000)
        for name, follower in self.followers.items():
            check(follower.current, "KV events of {} are not followed", name)
            for prompt in PROMPTS:
                ids = list(prompt.encode())
                known = follower.index.held_tokens(ids, "m", "", engine_cache=True)
                holds = self.by_address[name].holds(ids)
                agrees = known == holds if exact else known <= holds
                check(agrees, "{} holds {} tokens of {!r}, the router knows {}", name, holds, prompt, known)

    def _ended(self) -> None:
        """Tasks, requests and sockets are gone."""
        left = [task.get_name() for task in self.loop.left.values() if task is not asyncio.current_task()]
        self.loop.check(not left, "tasks are left: {}", ", ".join(left))
        self.loop.check(not self.sockets, "{} sockets are left", len(self.sockets))
        for engine in self.engines:
            self.loop.check(not engine.open, "{} is at work on {}", engine.name, len(engine.open))


def router_life(world: World) -> Callable[[], None]:
    """What the first thread of a simulation is to do."""
    return RouterLife(world).run
