"""The router under random requests: engines are slow, die and return, answer garbage and break streams off.

    python -m benchmarks.soak.router --minutes 30 --json FILE

`kvkit router` is a process in front of two engines that prefill and three that decode
(`benchmarks/soak/stub_engine.py`), whose KV events it follows, some of which get lost. Clients ask for
completions and chats, streams or not; some leave. Every answer is the one that all engines would give, or
an error that says so; a stream that ends in an error has begun with what is right. Whenever all rests,
nothing is counted as running, the router finds every engine up, and what it knows each engine to hold is
what that one holds. The exit status is 1 if anything was wrong, or the router grew.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.folders import ROOT
from benchmarks.soak.leaks import Flat
from benchmarks.soak.phases import Phases, options, phases_of, report
from benchmarks.soak.stub_engine import CALM, prompt_of
from kvkit.lab.serve.systems import free_port
from kvkit.lab.testbed.openai_engine import Body, text_after
from kvkit.lab.testbed.servers import Process

ENGINES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}
CLIENTS = 8
WILD = {"faults": 0.15, "lost": 0.2}
"""What is wrong with engines while clients ask."""
CONVERSATIONS, TURNS = 8, 4
FIRST, MORE = (20, 120), (10, 60)
"""Words of a conversation's first message and of later ones, from and to."""
WORDS = (
    "of",
    "the",
    "sea",
    "a",
    "harbour",
    "ships",
    "rain",
    "wind",
    "日本",
    "news",
    "from",
    "far",
    "😀",
    "away",
)
LEAVING, SALTED = 0.1, 0.1
"""Shares of clients that leave, and of requests that want more than the answer."""
FATES = {"kill": 0.4, "stop": 0.4, "clear": 0.2}
FATED = {"kill": "killed", "stop": "stopped", "clear": "emptied"}
PATIENCE_S = 900.0
"""A request that has not ended after so long hangs; so does a router that has not come to rest. Others may
have nearly all of the machine."""
OWN_MISTAKE = "internal error in the router"
TROUBLE = "Traceback|internal error in the router|stopped following"
"""What its log says of it, and of other mistakes."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast all goes, in seconds; of pairs: from and to.

    Attributes:
        pause_s: between two requests of a client, on average.
        fate_s: between two engines that die, are stopped or emptied.
        away_s: how long an engine that died or was stopped is away.
        timeout_s: of an engine, for what it is asked for; three times as long, for a whole answer.
        conversations: how many there are.
        engines: those of `ENGINES` that there are; d0 among them.
        blocks: that an engine holds at most, fewer than all prompts have.
    """

    pause_s: float = 0.5
    fate_s: tuple[float, float] = (3.0, 12.0)
    away_s: tuple[float, float] = (0.2, 5.0)
    timeout_s: float = 8.0
    conversations: int = CONVERSATIONS
    engines: tuple[str, ...] = tuple(ENGINES)
    blocks: int = 600


QUICK, QUICK_REQUESTS = Pace(0.0, (1.0, 2.0), (0.1, 0.5), 1.5, 2, ("p0", "d0", "d1"), 80), 80
"""With `--quick`."""


class Serving(Process):
    """A process of this repository that serves HTTP."""

    def __init__(self, folder: Path, *words: str) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.words = words

    def command(self) -> list[str]:
        words = (word.format(port=self.port) for word in self.words)
        return ["env", f"PYTHONPATH={ROOT}", sys.executable, *words]

    def answers(self) -> bool:
        raise NotImplementedError  # it is asked by `Soak.until_up`, which goes on meanwhile


def standin(folder: Path, blocks: int, seed: int) -> Serving:
    told = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
    return Serving(folder, "-m", "benchmarks.soak.stub_engine", "{port}", *told, str(blocks), str(seed))


def settings(engines: dict[str, Serving], timeout_s: float) -> str:
    """The router's, in TOML."""
    lines = [f"{name}_timeout_s = {timeout_s}" for name in ("prefill", "first_token", "idle")]
    lines += [f"request_timeout_s = {3 * timeout_s}", "connect_timeout_s = 2", "lookup_timeout_s = 2"]
    lines += ["health_timeout_s = 1", "health_interval_s = 0.3", "max_slowdown = 1000"]
    for name, engine in engines.items():
        lines += [f"[{ENGINES[name]}.{name}]", f'url = "{engine.url}"']
        lines += [f'{kind} = "ipc://{engine.folder}/{kind}"' for kind in ("events", "replay")]
        lines += [f'handoff = "unix://{engine.folder}/handoff"'] if ENGINES[name] == "decode" else []
    return "\n".join(lines) + "\n"


def conversations(count: int) -> list[list[str]]:
    """What users say in so many: the same every time."""
    chance = random.Random(0)
    return [
        [
            " ".join(chance.choices(WORDS, k=chance.randint(*(MORE if turn else FIRST))))
            for turn in range(TURNS)
        ]
        for _ in range(count)
    ]


def request_of(chance: random.Random, said: list[list[str]]) -> tuple[str, Body]:
    """Path and body of a request, at random."""
    talk = chance.choice(said)
    turns = talk[: chance.randint(1, len(talk))]
    body: Body = {"model": "toy", "max_tokens": chance.randint(1, 24), "temperature": 0}
    if chance.random() < SALTED:
        body |= chance.choice(
            [{"seed": 7}, {"stop": ["never", "not this"]}, {"stream_options": {"include_usage": True}}]
        )
    body["stream"] = chance.random() < 0.6
    if not body["stream"]:
        body.pop("stream_options", None)
    kind = chance.choice(["text", "ids", "chat", "chat"])
    if kind == "chat":
        roles = [{"role": "user", "content": text} for text in turns]
        return "/v1/chat/completions", body | {"messages": roles}
    text = "\n".join(turns)
    return "/v1/completions", body | {"prompt": text if kind == "text" else list(text.encode())}


def text_of(answer: Body) -> str:
    """The text in an event or an answer."""
    for choice in answer.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        return str(part.get("text") or part.get("content") or "")
    return ""


def finish_of(answer: Body) -> str | None:
    return next((c["finish_reason"] for c in answer.get("choices") or () if c.get("finish_reason")), None)


class Soak:
    """All of it; one event loop."""

    def __init__(self, phases: Phases, folder: Path, pace: Pace) -> None:
        self.phases = phases
        self.folder = folder
        self.pace = pace
        self.engines = {
            name: standin(folder / name, pace.blocks, seed) for seed, name in enumerate(pace.engines)
        }
        config = folder / "router.toml"
        config.write_text(settings(self.engines, pace.timeout_s))
        words = (
            "-c",
            "from kvkit.cli import main; main()",
            "router",
            "--port",
            "{port}",
            "--config",
            str(config),
        )
        self.router = Serving(folder / "router", *words)
        self.chance = random.Random(1)
        self.said = conversations(pace.conversations)
        self.outcomes: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()  # those that engines spoiled
        self.fated: Counter[str] = Counter()
        self.compared = 0
        self.wrong: list[str] = []

    async def run(self) -> dict[str, Any]:
        """What was done, and what was wrong."""
        seconds = 0.0
        with ExitStack() as stack:
            for process in (*self.engines.values(), self.router):
                stack.callback(process.kill)
                process.launch()
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.session:
                await self.until_all_are_up()
                flat = Flat(self.router.pid)
                for number in self.phases:
                    began = time.monotonic()
                    try:
                        await self.work(number)
                        seconds += time.monotonic() - began
                        await self.rest()
                    except TimeoutError as error:
                        self.wrong.append(str(error))
                        break
                    flat.rest()
                ways = await self.ways()
        log = (self.router.folder / "log").read_text(errors="replace")
        self.wrong += re.findall(f"^.*(?:{TROUBLE}).*$", log, re.MULTILINE)
        return {
            "seconds": round(seconds, 1),
            "done": {
                "requests": self.outcomes.total(),
                "right": self.outcomes["right"],
                "errors": self.outcomes["error"],
                "clients that left": self.outcomes["left"],
                "compared": self.compared,
            },
            "ways": ways,
            "spoiled": dict(sorted(self.answers.items())),
            "faults": {"answers": self.answers.total()} | {f"engines {w}": n for w, n in self.fated.items()},
            "wrong": self.wrong,
            "flat": {"router": flat.result()},
        }

    async def work(self, phase: int) -> None:
        """A phase: clients ask, while engines fail."""
        for name in self.engines:
            await self.behave(name, **WILD)
        over = asyncio.Event()
        fates = asyncio.create_task(self.fates(over))
        await asyncio.gather(*(self.client(f"{phase}-{number}") for number in range(CLIENTS)))
        over.set()
        await fates

    async def client(self, name: str) -> None:
        """One request after another."""
        chance, number = random.Random(name), 0
        while self.phases.goes_on(self.outcomes.total()):
            path, body = request_of(chance, self.said)
            number += 1
            try:
                self.outcomes[await self.ask(path, body, f"{name}-{number}", chance)] += 1
            except (aiohttp.ClientError, TimeoutError, ValueError, AssertionError) as error:
                self.outcomes["wrong"] += 1
                self.wrong.append(f"request {name}-{number}: {type(error).__name__}: {error}")
            await asyncio.sleep(chance.uniform(0, 2 * self.pace.pause_s))

    async def ask(self, path: str, body: Body, name: str, chance: random.Random) -> str:
        """What became of a request: right, error, or left.
        Raises one of what `client` catches: it is wrong."""
        right = text_after(prompt_of(path, body), body["max_tokens"])
        leaves = chance.randrange(6) if chance.random() < LEAVING else None
        headers = {"X-Request-Id": name}
        async with self.session.post(self.router.url + path, json=body, headers=headers) as reply:
            if leaves is not None and not (body["stream"] and leaves):
                return "left"
            if reply.status != 200 or not body["stream"]:
                answer = json.loads(await reply.read())
                if reply.status != 200:
                    return told(answer)
                assert text_of(answer) == right, f"{text_of(answer)!r}, want {right!r}"
                assert finish_of(answer) == "length"
                return "right"
            found, finish, events = "", None, 0
            async for line in reply.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    assert (found, finish) == (right, "length"), f"{found!r} ({finish}), want {right!r}"
                    return "right"
                if not data:
                    continue
                event = json.loads(data)
                if event.get("error") is not None:
                    assert right.startswith(found), f"{found!r}, want {right!r}"
                    return told(event)
                found += text_of(event)
                finish = finish_of(event) or finish
                events += 1
                if events == leaves:
                    return "left"
            raise AssertionError("the stream broke off")

    async def fates(self, over: asyncio.Event) -> None:
        """Kill, stop and empty engines in turn."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self.chance.uniform(*self.pace.fate_s))
            if over.is_set():
                return
            name = self.chance.choice(self.pace.engines)
            (outcome,) = self.chance.choices([*FATES], [*FATES.values()])
            self.fated[FATED[outcome]] += 1
            engine, away_s = self.engines[name], self.chance.uniform(*self.pace.away_s)
            if outcome == "clear":
                await self.behave(name, clear=True)
                continue
            if outcome == "stop":
                engine.stop()
            else:
                engine.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), away_s)
            if outcome == "stop":
                engine.resume()
            else:
                engine.launch()
                await self.until(partial(self.is_up, engine), f"{name} does not start")
                await self.behave(name, **WILD)

    async def rest(self) -> None:
        """Nothing is asked: what is counted and known must be true."""
        for name in self.engines:
            await self.behave(name, **CALM)
        await self.until_all_are_up()
        await self.until(self.is_idle, "requests are counted as running")
        for role in ("decode", "prefill"):
            for name in (name for name in self.engines if ENGINES[name] == role):
                await self.compare(name)
        await self.health(set(self.engines))
        await self.until(self.is_idle, "requests are counted as running")

    async def compare(self, name: str) -> None:
        """Whether the router knows what an engine holds: each prompt, computed there alone, shows it."""
        others = {name} if ENGINES[name] == "decode" else {name, "d0"}
        await self.health(others)
        if ENGINES[name] == "prefill":  # what d0 held it would not be asked for
            await self.behave("d0", clear=True)
        for talk in self.said:
            text = "\n".join(talk)
            body = {"model": "toy", "prompt": text, "max_tokens": 1}
            tokens = list(text.encode())
            held = (await self.post(self.engines[name].url + "/held", {"tokens": tokens}))["held"]
            words = (
                f"{name} is asked to compute more or less than {len(tokens) - held} of {len(tokens)} tokens"
            )
            await self.until(partial(self.computes, ENGINES[name], body, len(tokens) - held), words)
            self.compared += 1

    async def computes(self, role: str, body: Body, count: int) -> bool:
        """Whether an engine of a role is to compute so many tokens of a prompt."""
        before = await self.new_tokens()
        await self.post(self.router.url + "/v1/completions", body)
        return (await self.new_tokens())[role] - before[role] == count

    async def health(self, up: set[str]) -> None:
        """Have the router find these engines up, and no others."""
        for name in self.engines:
            await self.behave(name, health=200 if name in up else 503, keeps=up == set(self.engines))

        async def seen() -> bool:
            return {e["name"] for e in await self.states() if e["up"]} == up

        await self.until(seen, f"it does not find that {sorted(up)} are up")

    async def behave(self, name: str, **ways: Any) -> None:
        failed = await self.post(self.engines[name].url + "/behave", ways)
        self.answers.update(failed)

    async def states(self) -> list[Body]:
        async with self.session.get(self.router.url + "/health") as reply:
            found: list[Body] = json.loads(await reply.read())["engines"]
            return found

    async def until_all_are_up(self) -> None:
        for name, engine in self.engines.items():
            await self.until(partial(self.is_up, engine), f"{name} does not serve")
        await self.until(self.finds_all_up, "it does not find all engines up")

    async def finds_all_up(self) -> bool:
        return all(engine["up"] for engine in await self.states())

    async def is_up(self, engine: Serving) -> bool:
        async with self.session.get(engine.url + "/health") as reply:
            return reply.status == 200

    async def is_idle(self) -> bool:
        found = re.findall(r"^kvkit_router_engine_requests\{.*\} (.*)$", await self.metrics(), re.MULTILINE)
        assert len(found) == len(self.engines)
        return not any(map(float, found))

    async def new_tokens(self) -> dict[str, int]:
        """Tokens that engines of each role were to compute so far."""
        pattern = r'^kvkit_router_new_tokens_total\{computed="(\w+)"\} (.*)$'
        found = re.findall(pattern, await self.metrics(), re.MULTILINE)
        return {"prefill": 0, "decode": 0} | {role: int(float(count)) for role, count in found}

    async def ways(self) -> dict[str, int]:
        """What the router counted of its way with requests: takeovers by outcome and failures by cause."""
        pattern = r'^kvkit_router_(takeovers|failures)_total\{.*(?:outcome|cause)="(\w+)".*\} (.*)$'
        found: Counter[str] = Counter()
        for kind, what, count in re.findall(pattern, await self.metrics(), re.MULTILINE):
            found[f"{kind}: {what}"] += int(float(count))
        return dict(sorted(found.items()))

    async def metrics(self) -> str:
        async with self.session.get(self.router.url + "/metrics") as reply:
            return await reply.text()

    async def post(self, url: str, body: Body) -> Body:
        async with self.session.post(url, json=body) as reply:
            found: Body = json.loads(await reply.read())
            return found

    async def until(self, holds: Callable[[], Awaitable[bool]], words: str) -> None:
        """Return when `holds` says so; else `words` say what is wrong.

        Raises:
            TimeoutError: it is not within `PATIENCE_S`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(aiohttp.ClientError):
                if await holds():
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(words)
            await asyncio.sleep(0.05)


def told(answer: Body) -> str:
    """ "error", where an answer is one that says what is wrong with the engines."""
    message = (answer.get("error") or {}).get("message")
    assert message, f"an error that says nothing: {answer}"
    assert OWN_MISTAKE not in message, message
    return "error"


def main() -> int:
    given = options(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="kvkit-soak-") as folder:
        soak = Soak(phases_of(given, QUICK_REQUESTS), Path(folder), QUICK if given.quick else Pace())
        return report(given, "soak.router", asyncio.run(soak.run()))


if __name__ == "__main__":
    sys.exit(main())
