"""The router between real HTTP servers, which are killed, stopped, slow and wrong on plan."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from openai_engine import OpenAIEngine, render, text_after, tokens_after
from routers import Routed, ask, fetch, stream, text_of
from servers import Process, free_ports
from waiting import wait_for

from kvkit.testing import DEADLINE_S

Body = dict[str, Any]
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


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, OpenAIEngine]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(OpenAIEngine(tmp_path_factory.mktemp(name)))
            for name in ("p0", "p1", "d0", "d1")
        }


Start = Callable[..., Engines]


@pytest.fixture
def start(processes: dict[str, OpenAIEngine]) -> Start:
    """So many engines of each role, as good as new."""

    def started(prefill: int = 1, decode: int = 1) -> Engines:
        for engine in processes.values():
            engine.reset()
        names = [*["p0", "p1"][:prefill], *["d0", "d1"][:decode]]
        return Engines({name: processes[name] for name in names})

    return started


def test_a_prompt_is_prefilled_and_then_decoded(start: Start) -> None:
    engines = start()
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1"}
    engines["p0"].set(params=params)
    engines["d0"].set(params={"remote_host": "not the client's business"})
    body = completion(user="me", min_tokens=3, logprobs=1)
    with Routed(**engines.settings(d0={"handoff": "tcp://127.0.0.1:1"})) as router:
        status, answer = ask(
            router.url, COMPLETIONS, body, Authorization="Bearer key", **{"X-Request-Id": "r1"}
        )
        metrics = router.metrics()
    assert (status, text_of(answer)) == (200, wanted(body))
    assert "kv_transfer_params" not in answer
    (p,), (d,) = engines["p0"].seen(), engines["d0"].seen()
    transfer = p["body"].pop("kv_transfer_params")
    assert re.fullmatch("[0-9a-f]{32}", transfer.pop("transfer_id"))
    assert transfer == {"do_remote_decode": True, "do_remote_prefill": False, "handoff": "tcp://127.0.0.1:1"}
    assert p["body"] == {
        "model": "toy", "prompt": LONG, "max_tokens": 1, "temperature": 0, "user": "me", "stream": False,
    }  # fmt: skip
    assert d["body"] == body | {"kv_transfer_params": params}
    for request in (p, d):
        assert request["headers"]["authorization"] == "Bearer key"
        assert request["headers"]["x-request-id"] == "r1"
    assert 'kvkit_router_requests_total{decode="d0",prefill="p0",reason="much-new"} 1.0' in metrics
    assert 'kvkit_router_answers_total{status="200"} 1.0' in metrics


def test_a_prefill_that_says_nothing_is_told_of_by_its_transfer(start: Start) -> None:
    engines = start()
    with Routed(**engines.settings()) as router:
        ask(router.url, CHAT, chat())
    (p,), (d,) = engines["p0"].seen(), engines["d0"].seen()
    assert (p["body"]["max_tokens"], p["body"]["max_completion_tokens"]) == (1, 1)
    given, got = p["body"]["kv_transfer_params"], d["body"]["kv_transfer_params"]
    assert got == {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": given["transfer_id"],
    }  # fmt: skip


@pytest.mark.parametrize("body", [completion("short"), chat("short")], ids=["completions", "chat"])
def test_a_short_prompt_goes_straight_to_decode(start: Start, body: Body) -> None:
    engines = start()
    with Routed(**engines.settings()) as router:
        _, answer = ask(router.url, COMPLETIONS if "prompt" in body else CHAT, body)
        assert 'prefill="",reason="little-new"} 1.0' in router.metrics()
    assert text_of(answer) == wanted(body)
    assert engines.order() == [("d0", body)]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"prompt": [LONG, LONG]},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"use_beam_search": True},
    ],
    ids=str,
)
def test_what_p_cannot_do_for_d_goes_straight_to_it(start: Start, fields: Body) -> None:
    engines = start()
    with Routed(**engines.settings()) as router:
        fetch(router.url, "POST", COMPLETIONS, json.dumps(completion(**fields)).encode())
        assert 'reason="unsuitable"} 1.0' in router.metrics()
    assert engines.served() == ["d0"]


def test_a_stream_is_handed_on_as_it_comes(start: Start) -> None:
    engines = start()
    engines["d0"].set(hold_after=5)
    body = chat(stream_options={"include_usage": True})
    with Routed(**engines.settings()) as router:
        events = stream(router.url, CHAT, body)
        first = [next(events) for _ in range(6)]  # while D holds the rest
        engines["d0"].set(hold_after=None)
        rest = list(events)
    assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(map(text_of, [*first, *rest])) == wanted(body)
    assert rest[-1]["usage"] == {
        "prompt_tokens": len(render(body["messages"])),
        "completion_tokens": 24,
        "total_tokens": len(render(body["messages"])) + 24,
    }
    assert len({(event["id"], event["created"]) for event in (*first, *rest)}) == 1
    assert not re.search("token_ids", json.dumps([first, rest])), "the client did not ask for them"


def test_token_ids_are_for_who_asks(start: Start) -> None:
    engines = start()
    body = completion("short", return_token_ids=True)
    with Routed(**engines.settings()) as router:
        events = list(stream(router.url, COMPLETIONS, body))
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == list(b"short")
    assert [t for choice in choices for t in choice["token_ids"]] == tokens_after(list(b"short"), 24)


CONTINUED = [
    pytest.param(COMPLETIONS, completion(), id="completions"),
    pytest.param(COMPLETIONS, completion(list(LONG.encode())), id="token ids"),
    pytest.param(COMPLETIONS, completion(return_token_ids=True), id="ids shown"),
    pytest.param(CHAT, chat(), id="chat"),
    pytest.param(CHAT, chat(max_completion_tokens=24), id="max_completion_tokens"),
]
MADE_ANEW = [
    pytest.param(COMPLETIONS, completion(stop=["never", "not this"]), id="stop"),
    pytest.param(COMPLETIONS, completion(seed=7), id="seed"),
    pytest.param(CHAT, chat(presence_penalty=0.5), id="penalty"),
]


def the_one_at_work(engines: Engines, path: str) -> str:
    """The D that has a request for an answer under way."""
    found = [
        name
        for name in ("d0", "d1")
        for request in engines[name].seen()
        if request["path"] == path and not request["done"]
    ]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(("path", "body"), [*CONTINUED, *MADE_ANEW])
def test_a_stream_whose_engine_is_killed_goes_on(start: Start, path: str, body: Body) -> None:
    engines = start(decode=2)
    engines.set(hold_after=10)
    body = body | {"stream_options": {"include_usage": True}}
    prompt = wanted_prompt(body)
    with Routed(**engines.settings()) as router:
        events = stream(router.url, path, body)
        found = [next(events) for _ in range(10)]
        victim = the_one_at_work(engines, path)
        other = "d1" if victim == "d0" else "d0"
        engines[victim].kill()
        engines[other].set(hold_after=None)
        found += events
        metrics = router.metrics()
    assert "".join(map(text_of, found)) == text_after(prompt, 24)
    assert [event["usage"] for event in found if event.get("usage")] == [
        {"prompt_tokens": len(prompt), "completion_tokens": 24, "total_tokens": len(prompt) + 24}
    ]
    assert len({(event["id"], event["created"]) for event in found}) == 1
    reasons = [choice["finish_reason"] for event in found for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]
    roles = [c for event in found for c in event["choices"] if "role" in c.get("delta", ())]
    assert len(roles) == (path == CHAT)
    if body.get("return_token_ids"):
        ids = [token for event in found for c in event["choices"] for token in c["token_ids"]]
        assert ids == tokens_after(prompt, 24)
    assert 'kvkit_router_takeovers_total{outcome="continued"} 1.0' in metrics
    assert f'kvkit_router_failures_total{{cause="cut",engine="{victim}"}} 1.0' in metrics
    assert len(engines["p0"].seen()) == 2, "the other engine has not got what the first one had"


@pytest.mark.parametrize(("path", "body"), [CONTINUED[0], CONTINUED[2], CONTINUED[3], *MADE_ANEW])
@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_a_stream_can_break_off_anywhere(start: Start, path: str, body: Body, tokens_per_event: int) -> None:
    """Within a character, too: some tokens make no text."""
    engines = start(prefill=0, decode=2)
    engines.set(tokens_per_event=tokens_per_event)
    first, other = "d0", "d1"
    prompt = wanted_prompt(body)
    with Routed(**engines.settings()) as router:
        for after in range(24 // tokens_per_event):
            wait_for(lambda: all(router.health().values()))
            engines[first].set(end_after=after)
            engines[other].set(end_after=None)
            found = list(stream(router.url, path, body | {"user": str(after)}))
            assert "".join(map(text_of, found)) == text_after(prompt, 24), after


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


def test_the_command(start: Start, tmp_path: Path) -> None:
    engines = start(decode=2)
    (tmp_path / "router.toml").write_text(f'[prefill.p0]\nurl = "{engines["p0"].url}"\n')
    options = ["--config", str(tmp_path / "router.toml")]
    for name in ("d0", "d1"):
        options += ["--decode", f"{name}={engines[name].url}/v1/"]
    with Command(tmp_path, *options) as router:
        _, answer = ask(router.url, CHAT, chat())
        status, health = ask(router.url, "/health")
        assert router.end() == 0
    assert text_of(answer) == wanted(chat())
    assert (status, [engine["name"] for engine in health["engines"]]) == (200, ["p0", "d0", "d1"])
    assert re.search("p0 -> d[01], much-new: 352 new of 352 tokens", router.log.read_text())
