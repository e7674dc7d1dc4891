"""A router in a thread, or as the command, its engines and its clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from kvkit.lab.testbed.openai_engine import OpenAIEngine, render, text_after
from kvkit.lab.testbed.servers import Process, free_ports
from kvkit.observe.access import listen
from kvkit.router.app import Router
from kvkit.router.connections import BoundedSite
from kvkit.router.lookups import Lookup
from kvkit.router.settings import read_router_config
from kvkit.tiers.testing.contract import DEADLINE_S

Body = dict[str, Any]


class Routed:
    """The server of a router; a context manager. `settings` are the router's."""

    def __init__(self, lookup: Lookup | None = None, connections: int = 1000, **settings: Any) -> None:
        self._connections = connections
        quick = {"health_interval_s": 0.1, "health_timeout_s": DEADLINE_S, "lookup_timeout_s": DEADLINE_S}
        self._config = read_router_config(**(quick | settings))
        self._lookup = lookup
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        router = Router(self._config, self._lookup)
        runner = router.runner(0.1)
        await runner.setup()
        listening, self.url = listen("127.0.0.1", 0)
        await BoundedSite(runner, listening, router.busy, self._connections).start()
        self._started.set()
        await self._closing.wait()
        await runner.cleanup()

    def health(self) -> dict[str, bool]:
        """Whether each engine is up."""
        _, found = ask(self.url, "/health")
        return {engine["name"]: engine["up"] for engine in found["engines"]}

    def metrics(self) -> str:
        return fetch(self.url, "GET", "/metrics")[1].decode()


class Command(Process):
    """`kvkit router`."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._options = options

    def command(self) -> list[str]:
        start = [sys.executable, "-c", "from kvkit.cli import main; main()", "router"]
        return [*start, "--port", str(self.port), *self._options]

    def answers(self) -> bool:
        return fetch(self.url, "GET", "/health")[0] == 200

    def end(self) -> int:
        """Its exit status after SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)
        assert self._process is not None
        return self._process.wait(DEADLINE_S)


def fetch(
    url: str, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body of one request."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=DEADLINE_S)) as connection:
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.read()


def ask(url: str, path: str, body: Body | None = None, **headers: str) -> tuple[int, Body]:
    """Status and JSON of one request."""
    data = None if body is None else json.dumps(body).encode()
    status, raw = fetch(url, "GET" if body is None else "POST", path, data, headers)
    return status, json.loads(raw)


def stream(url: str, path: str, body: Body, timeout_s: float = DEADLINE_S, **headers: str) -> Iterator[Body]:
    """The events of a stream as they come. It must end as streams do."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=timeout_s)) as connection:
        connection.request(
            "POST",
            path,
            json.dumps({**body, "stream": True}),
            {"Content-Type": "application/json", **headers},
        )
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        for line in reply:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                assert reply.read().strip() == b""
                return
            if data:
                yield json.loads(data)
    raise AssertionError("the stream broke off")


def text_of(event: Body) -> str:
    """The text in an event or an answer."""
    for choice in event.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        return str(part.get("text") or part.get("content") or "")
    return ""


LONG = "a long prompt " * 100
"""More new tokens than a D computes itself."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(prompt: Any = LONG, count: int = 24, **fields: Any) -> Body:
    return {"model": "toy", "prompt": prompt, "max_tokens": count, "temperature": 0, **fields}


def chat(text: str = LONG, count: int = 24, **fields: Any) -> Body:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    return {"model": "toy", "messages": messages, "max_tokens": count, "temperature": 0, **fields}


def wanted_prompt(body: Body) -> list[int]:
    """Its token ids."""
    if "messages" in body:
        return render(body["messages"])
    return list(body["prompt"].encode() if isinstance(body["prompt"], str) else body["prompt"])


def wanted(body: Body) -> str:
    """What any engine answers."""
    return text_after(wanted_prompt(body), body["max_tokens"])


class Engines:
    """Engines by name: p0, p1 prefill, d0, d1 decode."""

    def __init__(self, engines: dict[str, OpenAIEngine]) -> None:
        self._all = engines

    def __getitem__(self, name: str) -> OpenAIEngine:
        return self._all[name]

    def set(self, **settings: Any) -> None:
        for engine in self._all.values():
            engine.set(**settings)

    def settings(self, **more: Body) -> Body:
        """The router's. `more`: settings of one engine."""
        found: Body = {"prefill": {}, "decode": {}}
        for name, engine in self._all.items():
            found["prefill" if name[0] == "p" else "decode"][name] = {"url": engine.url} | more.get(name, {})
        return found

    def order(self) -> list[tuple[str, Body]]:
        """(engine, body) of the completions so far; those of one engine in order."""
        return [(name, request["body"]) for name, e in self._all.items() for request in e.seen()]

    def served(self) -> list[str]:
        return [name for name, _ in self.order()]


@pytest.fixture(name="processes", scope="module")
def engine_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, OpenAIEngine]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(OpenAIEngine(tmp_path_factory.mktemp(name)))
            for name in ("p0", "p1", "d0", "d1")
        }


Start = Callable[..., Engines]


@pytest.fixture(name="start")
def engines_as_new(processes: dict[str, OpenAIEngine]) -> Start:
    """So many engines of each role, as good as new."""

    def started(prefill: int = 1, decode: int = 1) -> Engines:
        for engine in processes.values():
            engine.reset()
        names = [*["p0", "p1"][:prefill], *["d0", "d1"][:decode]]
        return Engines({name: processes[name] for name in names})

    return started
