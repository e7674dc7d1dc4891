"""The router between real HTTP servers, which are killed, stopped, slow and wrong on plan."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from managed import ManagedCache
from openai_engine import TOKEN, OpenAIEngine, render, text_after, tokens_after
from routers import Command, Routed, ask, fetch, stream, text_of
from servers import free_ports
from waiting import wait_for

from kvkit.observe.http import Server
from kvkit.router.engines import Engine, LookupQuery
from kvkit.tiers.testing import DEADLINE_S

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


@pytest.mark.parametrize("params", [None, {}], ids=str)
def test_decode_waits_for_nothing_where_prefill_handed_nothing_off(start: Start, params: Body | None) -> None:
    engines = start()
    engines["p0"].set(hands=False, params=params)
    with Routed(**engines.settings()) as router:
        _, answer = ask(router.url, CHAT, chat())
        assert 'kvkit_router_failures_total{cause="kept",engine="p0"} 1.0' in router.metrics()
    assert text_of(answer) == wanted(chat())
    (p,), (d,) = engines["p0"].seen(), engines["d0"].seen()
    assert (p["body"]["max_tokens"], p["body"]["max_completion_tokens"]) == (1, 1)
    assert p["body"]["kv_transfer_params"]["do_remote_decode"] is True
    assert d["body"] == chat()


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


def other_of(victim: str) -> str:
    return victim[0] + ("1" if victim[1] == "0" else "0")


def test_another_p_takes_over(start: Start) -> None:
    engines = start(prefill=2)
    with Routed(**engines.settings()) as router:
        ask(router.url, CHAT, chat())
        used = engines.served()[0]
        engines[used].set(status=500)
        _, answer = ask(router.url, CHAT, chat())
        assert f'failures_total{{cause="error",engine="{used}"}} 1.0' in router.metrics()
    assert text_of(answer) == wanted(chat())
    assert sorted(engines.served()) == sorted([used, used, other_of(used), "d0", "d0"])
    assert len(engines["d0"].seen()[1]["body"]["kv_transfer_params"]["transfer_id"]) == 32


@pytest.mark.parametrize("trouble", [{"status": 500}, {"status": 400}, {"hang": True}, None], ids=str)
def test_without_a_p_that_works_d_computes_the_prompt(start: Start, trouble: Body | None) -> None:
    engines = start()
    with Routed(**engines.settings(), prefill_timeout_s=0.3, health_interval_s=60) as router:
        if trouble is None:
            engines["p0"].kill()
        else:
            engines["p0"].set(**trouble)
        events = list(stream(router.url, CHAT, chat()))
    assert "".join(map(text_of, events)) == wanted(chat())
    (d,) = engines["d0"].seen()
    assert "kv_transfer_params" not in d["body"]


@pytest.mark.parametrize("trouble", [{"status": 500}, {"status": 429}, {"end_after": 0}, None], ids=str)
@pytest.mark.parametrize("streams", [True, False])
def test_another_d_takes_over_before_the_first_byte(
    start: Start, trouble: Body | None, streams: bool
) -> None:
    """It is P's turn again: what P computed was on its way to the D that failed."""
    engines = start(decode=2)
    body = completion(stream=streams)
    more = {name: {"handoff": f"tcp://{name}:1"} for name in ("d0", "d1")}
    with Routed(**engines.settings(**more), health_interval_s=60) as router:
        ask(router.url, COMPLETIONS, completion(user="me"))
        (victim,) = set(engines.served()) - {"p0"}
        if trouble is None:
            engines[victim].kill()
        else:
            engines[victim].set(**trouble)
        if streams:
            found = "".join(map(text_of, stream(router.url, COMPLETIONS, body | {"user": "me"})))
        else:
            found = text_of(ask(router.url, COMPLETIONS, body | {"user": "me"})[1])
    if trouble == {"end_after": 0} and not streams:
        return  # it is the stream that breaks off
    assert found == wanted(body)
    handoffs = [request["body"]["kv_transfer_params"]["handoff"] for request in engines["p0"].seen()]
    other = other_of(victim)
    assert handoffs == [f"tcp://{victim}:1", f"tcp://{victim}:1", f"tcp://{other}:1"]
    assert len(engines[other].seen()) == 1


@pytest.mark.parametrize("streams", [True, False])
def test_the_only_d_computes_what_it_cannot_take(start: Start, streams: bool) -> None:
    engines = start()
    engines["d0"].set(takes=False)
    with Routed(**engines.settings()) as router:
        if streams:
            found = "".join(map(text_of, stream(router.url, COMPLETIONS, completion())))
        else:
            found = text_of(ask(router.url, COMPLETIONS, completion())[1])
    assert found == wanted(completion())
    assert engines.served() == ["p0", "d0", "d0"]


def test_what_the_last_d_says_is_passed_on(start: Start) -> None:
    engines = start(decode=2)
    engines["d0"].set(status=503)
    engines["d1"].set(status=503)
    with Routed(**engines.settings()) as router:
        for body in (completion("a"), completion("a", stream=True)):
            assert ask(router.url, COMPLETIONS, body) == (503, {"error": {"message": "as told"}})
    assert engines.served() == ["d0", "d0", "d1", "d1"]


def test_a_wrong_request_is_asked_about_once(start: Start) -> None:
    engines = start(decode=2)
    engines.set(status=422)
    with Routed(**engines.settings()) as router:
        assert ask(router.url, COMPLETIONS, completion()) == (422, {"error": {"message": "as told"}})
        assert router.health() == {"p0": True, "d0": True, "d1": True}
    assert len(engines.served()) == 2  # P, and the D that tells the client


@pytest.mark.parametrize("end", ["abort", "error", "garbled"])
def test_an_engine_that_gives_up_is_replaced(start: Start, end: str) -> None:
    """As vLLM does when it is told to end, and when its core has died; or it sends nonsense."""
    engines = start(decode=2)
    body = chat("short")
    with Routed(**engines.settings()) as router:
        ask(router.url, CHAT, body)
        (victim,) = engines.served()
        engines[victim].set(end=end, end_after=7)
        found = "".join(map(text_of, stream(router.url, CHAT, body)))
        assert router.health()[victim], "it is the request that failed, not the engine"
    assert found == wanted(body)
    assert engines.served().count(other_of(victim)) == 1


@pytest.mark.parametrize("after", [0, 6])
def test_a_stopped_d_is_waited_for_no_longer_than_said(start: Start, after: int) -> None:
    engines = start(decode=2)
    engines.set(hold_after=after)
    limits = {"first_token_timeout_s": 1.0, "idle_timeout_s": 1.0, "health_interval_s": 60}
    with Routed(**engines.settings(), **limits) as router:
        events = stream(router.url, COMPLETIONS, completion("short"))
        if after:
            found = [next(events) for _ in range(after)]
            victim = the_one_at_work(engines, COMPLETIONS)
            engines[victim].stop()
            engines[other_of(victim)].set(hold_after=None)
        else:
            found, victim = [], "d0"
            engines["d0"].stop()
            engines["d1"].set(hold_after=None)
        found += events
        engines[victim].resume()
    assert "".join(map(text_of, found)) == text_after(list(b"short"), 24)


def test_a_d_that_is_found_down_loses_its_requests(start: Start) -> None:
    """One that hangs: no answer of its own would ever come, and this one is no stream."""
    engines = start(decode=2)
    with Routed(**engines.settings(), health_timeout_s=0.3, health_interval_s=0.05) as router:
        ask(router.url, COMPLETIONS, completion("short", user="me"))
        (victim,) = set(engines.served())
        engines[victim].set(hang=True)
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, router.url, COMPLETIONS, completion("short", user="me"))
            wait_for(lambda: len(engines[victim].seen()) == 2)
            engines[victim].stop()
            assert text_of(answer.result()[1]) == text_after(list(b"short"), 24)
        assert router.health()[victim] is False
        engines[victim].resume()
        wait_for(lambda: router.health()[victim])


def test_an_engine_that_is_down_gets_nothing_until_it_is_back(start: Start) -> None:
    engines = start(decode=1)
    with Routed(**engines.settings()) as router:
        engines["d0"].kill()
        wait_for(lambda: not router.health()["d0"])
        assert fetch(router.url, "GET", "/health")[0] == 503
        status, answer = ask(router.url, COMPLETIONS, completion("short"))
        assert (status, answer["error"]["code"]) == (503, 503)
        assert "no decode engine is left: none is up" in answer["error"]["message"]
        engines["d0"].start()
        wait_for(lambda: router.health()["d0"])
        assert ask(router.url, COMPLETIONS, completion("short"))[0] == 200
        engines["d0"].set(health=503)
        wait_for(lambda: not router.health()["d0"])
        assert 'kvkit_router_engine_up{engine="d0",role="decode"} 0.0' in router.metrics()


def test_a_stream_that_nobody_can_continue_says_so(start: Start) -> None:
    engines = start(decode=1)
    engines["d0"].set(end_after=5)
    with Routed(**engines.settings()) as router:
        events = list(stream(router.url, COMPLETIONS, completion("short")))
    assert "no decode engine is left" in events[-1]["error"]["message"]
    assert "".join(map(text_of, events)) == text_after(list(b"short"), 5)


@pytest.mark.parametrize("fields", [{"stop": ["never"]}, {"seed": 1}, {}], ids=str)
def test_an_answer_that_would_not_fit_is_not_glued_on(start: Start, fields: Body) -> None:
    """The other D makes something else, as one does that samples; without ids, it can only begin anew."""
    engines = start(decode=2)
    engines.set(hold_after=12, ids=bool(fields))
    with Routed(**engines.settings()) as router:
        events = stream(router.url, COMPLETIONS, completion("short", **fields))
        found = [next(events) for _ in range(12)]
        victim = the_one_at_work(engines, COMPLETIONS)
        engines[other_of(victim)].set(hold_after=None, other="another model")
        engines[victim].kill()
        found += events
        assert 'takeovers_total{outcome="failed"} 1.0' in router.metrics()
    assert "another answer than the client has" in found[-1]["error"]["message"]
    assert text_after(list(b"short"), 24).startswith("".join(map(text_of, found)))


def test_engines_that_tell_no_tokens_are_followed_by_text(start: Start) -> None:
    engines = start(decode=2)
    engines.set(hold_after=12, ids=False)
    with Routed(**engines.settings()) as router:
        events = stream(router.url, CHAT, chat())
        found = [next(events) for _ in range(12)]
        victim = the_one_at_work(engines, CHAT)
        engines[other_of(victim)].set(hold_after=None)
        engines[victim].kill()
        found += events
    assert "".join(map(text_of, found)) == wanted(chat())


def test_many_streams_survive_one_engine(start: Start) -> None:
    engines = start(prefill=2, decode=2)
    engines.set(hold_after=5)
    bodies = [chat(f"{i} {LONG}", 12) for i in range(16)]
    with Routed(**engines.settings(), spread=1) as router, ThreadPoolExecutor(16) as pool:
        texts = [
            pool.submit(lambda body: "".join(map(text_of, stream(router.url, CHAT, body))), body)
            for body in bodies
        ]
        wait_for(lambda: sum(len(engines[name].seen()) for name in ("d0", "d1")) == 16)
        assert [len(engines[name].seen()) for name in ("d0", "d1")] == [8, 8]
        engines["d0"].kill()
        engines["d1"].set(hold_after=None)
        assert [text.result() for text in texts] == [wanted(body) for body in bodies]
        wait_for(lambda: len(re.findall(r"engine_requests{.*} 0.0", router.metrics())) == 4)


@contextmanager
def sent(url: str, body: Body) -> Iterator[socket.socket]:
    """A client that has sent a request, and leaves with the context."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), DEADLINE_S) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        yield client


@pytest.mark.parametrize("at", ["p0", "d0"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_the_work(start: Start, at: str, streams: bool) -> None:
    engines = start()
    engines["p0"].set(hang=at == "p0")
    engines["d0"].set(hold_after=3, hang=not streams)
    with Routed(**engines.settings()) as router:
        with sent(router.url, completion(stream=streams)) as client:
            if at == "d0" and streams:
                assert client.recv(1) == b"H"
            wait_for(lambda: len(engines[at].seen()) == 1)
        wait_for(lambda: engines[at].seen()[0]["left"])
        wait_for(lambda: 'answers_total{status="499"} 1.0' in router.metrics())
        wait_for(lambda: len(re.findall(r"engine_requests{.*} 0.0", router.metrics())) == 2)
    assert len(engines["d0"].seen()) == (at == "d0")


def test_no_request_takes_longer_than_said(start: Start) -> None:
    engines = start()
    engines["d0"].set(hang=True)
    with Routed(**engines.settings(), request_timeout_s=0.3) as router:
        status, answer = ask(router.url, COMPLETIONS, completion("short"))
        assert (status, answer["error"]["message"]) == (504, "no answer within 0.3 s")
        engines["d0"].set(hang=False, hold_after=2)
        *_, last = stream(router.url, COMPLETIONS, completion("short"))
        assert last["error"]["message"] == "no answer within 0.3 s"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "body",
    [completion(), completion(list(LONG.encode())), chat()],
    ids=["completions", "token ids", "chat"],
)
def test_what_a_d_holds_is_asked_and_not_computed_again(start: Start, body: Body, token_file: Path) -> None:
    engines = start(decode=2)
    path = COMPLETIONS if "prompt" in body else CHAT
    caches = {n: {"cache": engines[n].url, "token_file": str(token_file)} for n in ("p0", "d0", "d1")}
    with Routed(**engines.settings(**caches)) as router:
        ask(router.url, path, body)  # nobody answers a lookup
        assert engines.served().count("p0") == 1
        for engine in ("p0", "d0", "d1"):
            engines[engine].set(held=0)
        ask(router.url, path, body)
        assert engines.served().count("p0") == 2
        engines["d0"].set(held=1350)
        before = len(engines["d0"].seen())
        _, answer = ask(router.url, path, body)
        assert engines.served().count("p0") == 2
        assert len(engines["d0"].seen()) == before + 1
        tokens = len(wanted_prompt(body))
        assert f'kvkit_router_new_tokens_total{{computed="decode"}} {tokens - 1350}.0' in router.metrics()
        assert text_of(answer) == wanted(body)


def test_kvkits_endpoint_is_understood(start: Start, token_file: Path) -> None:
    engines = start()
    cache = ManagedCache()  # it has 8 tokens of anything
    asked = [
        ("m", 10, {}, 0),
        ("m", 11, {}, 1),
        ("adapter", 10, {"cache_salt": "tenant"}, 1),
        ("no request had it yet", 10, {}, 2),
    ]
    with (
        Server(cache, token=TOKEN, port=0) as server,
        Routed(
            **engines.settings(d0={"cache": server.url, "token_file": str(token_file)}), direct_tokens=2
        ) as router,
    ):
        for model, tokens, more, prefilled in asked:
            ask(router.url, COMPLETIONS, completion([97] * tokens) | {"model": model} | more)
            assert engines.served().count("p0") == prefilled
    found = [(space.lora, space.salt) for space in cache.asked_about]
    assert found == [("", ""), ("", ""), ("adapter", "tenant")]


def test_who_holds_what_can_be_asked_of_something_else(start: Start) -> None:
    engines = start()

    async def everything(engine: Engine, query: LookupQuery) -> int | None:
        return len(query.tokens)

    with Routed(everything, **engines.settings()) as router:
        ask(router.url, COMPLETIONS, completion())
    assert engines.served() == ["d0"]


def test_a_conversation_stays_and_load_spreads(start: Start) -> None:
    engines = start(prefill=0, decode=2)
    engines.set(hold_after=1)
    with Routed(**engines.settings(), spread=1) as router, ExitStack() as stack:
        found = []
        for _ in range(4):
            events = stack.enter_context(closing(stream(router.url, CHAT, chat("hello", 3))))
            next(events)
            found.append(events)
        counts = [len(engines[name].seen()) for name in ("d0", "d1")]
        assert sorted(counts) == [2, 2], "a D has over one more than the other"
        engines.set(hold_after=None)
        for events in found:
            list(events)
        before = engines.served()
        for turn in range(3):
            for user in ("one", "two", "three"):
                ask(router.url, CHAT, chat(f"turn {turn}", 3, user=user))
    last = engines.order()
    for user in ("one", "two", "three"):
        assert len({name for name, body in last if body.get("user") == user}) == 1
    assert len(before) == 4


@pytest.mark.parametrize(
    ("path", "raw", "words"),
    [
        (COMPLETIONS, b"{", "the body is no JSON"),
        (COMPLETIONS, b"[1]", r"the body is \[1\], want an object"),
        (COMPLETIONS, b"{}", "prompt = None: want a string or a list"),
        (CHAT, b'{"messages": ["hi"]}', r"messages = \['hi'\]: want a list of objects"),
        (CHAT, b'{"messages": [], "stream": 1}', "stream = 1: want bool"),
        (CHAT, b'{"messages": [], "max_tokens": true}', "max_tokens = True: want int"),
        (CHAT, b'{"messages": [], "kv_transfer_params": {}}', "^kv_transfer_params: not for clients"),
        (CHAT, b'{"messages": [], "ec_transfer_params": {}}', "^ec_transfer_params: not for clients"),
    ],
)
def test_wrong_requests(start: Start, path: str, raw: bytes, words: str) -> None:
    engines = start()
    with Routed(**engines.settings()) as router:
        status, answer = fetch(router.url, "POST", path, raw)
    assert status == 400
    assert re.search(words, json.loads(answer)["error"]["message"])
    assert engines.served() == []


DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
PACKED = {"Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    ("headers", "raw", "status", "words"),
    [
        ({"X-Session-ID": b"\xff\xfe"}, b"{}", 400, "X-Session-ID: want printable text in UTF-8"),
        ({"X-Request-Id": b"\xc3("}, b"{}", 400, "X-Request-Id: want printable text"),
        ({"Authorization": b"Bearer \xff"}, b"{}", 400, "Authorization: want printable text"),
        (PACKED, b"not packed", 400, "the body is not packed with gzip, or is cut off"),
        (PACKED, gzip.compress(b" " * (65 << 20)), 413, "the body is longer than 67108864 bytes"),
        ({"Content-Encoding": "rot13"}, b"{}", 415, "Content-Encoding: want one of identity, gzip, deflate"),
        ({}, b'{"prompt": "\\ud800"}', 400, "the body has half a character in it"),
        ({}, b'{"prompt": "a", "user": "\\udfff"}', 400, "the body has half a character in it"),
        ({}, b'{"prompt": "a", "x": [{"\\uDc00": 1}]}', 400, "the body has half a character in it"),
        ({}, b'{"prompt": "\xff"}', 400, "the body is no JSON: .*utf-8"),
        ({}, '{"prompt": "a"}'.encode("utf-16"), 400, "the body is no JSON: .*utf-8"),
        ({}, b'{"prompt": "a", "x": ' + DEEP + b"}", 400, "the body is no JSON: it is nested over 100 deep"),
        ({}, b'{"prompt": "a", "x": ' + b"[" * 101 + b"]" * 101 + b"}", 400, "nested over 100 deep"),
        ({}, b'{"prompt": "a", "temperature": NaN}', 400, "NaN is no number"),
        ({}, b'{"prompt": "a", "temperature": 1e999}', 400, "1e999 is no number"),
        ({}, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "the body is no JSON: Exceeds"),
        ({}, b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}", 400, "want at most 9007199254740991"),
        ({}, b'{"prompt": "a", "n": "2"}', 400, "n = '2': want int"),
        ({}, b'{"prompt": 7}', 400, "prompt = 7: want a string or a list"),
        *(
            ({}, b'{"prompt": "a", "%s": {"x": 1}}' % name, 400, rf"^{name.decode()}: not for clients")
            for name in (b"kv_transfer_params", b"ec_transfer_params")
        ),
        *(
            (
                {},
                b'{"prompt": "a", "vllm_xargs": {"%s": "x"}}' % name,
                400,
                rf"^vllm_xargs.{name.decode()}: not",
            )
            for name in (b"kv_transfer_params", b"ec_transfer_params")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_client_sends_is_refused_with_words(
    start: Start, headers: dict[str, Any], raw: bytes, status: int, words: str
) -> None:
    engines = start()
    with Routed(**engines.settings()) as router:
        found, answer = fetch(router.url, "POST", COMPLETIONS, raw, headers)
        assert router.health() == {"p0": True, "d0": True}
    error = json.loads(answer)["error"]
    assert (found, error["code"], error["type"]) == (status, status, "BadRequestError")
    assert re.search(words, error["message"])
    assert engines.served() == []


@pytest.mark.parametrize("headers", [{"X-Session-ID": b"\xff"}, PACKED], ids=str)
def test_what_is_passed_on_is_refused_with_words(start: Start, headers: dict[str, Any]) -> None:
    with Routed(**start().settings()) as router:
        status, answer = fetch(router.url, "POST", "/tokenize", b"not packed", headers)
    assert (status, json.loads(answer)["error"]["code"]) == (400, 400)


def test_a_salt_and_extra_arguments_go_to_the_engines(start: Start) -> None:
    engines = start()
    own = {"cache_salt": "mine", "vllm_xargs": {"top_n_sigma": 1.5}, "session_id": "J\u00fcrgen \U0001f600"}
    with Routed(**engines.settings()) as router:
        ask(router.url, COMPLETIONS, completion(**own))
    for _, body in engines.order():
        assert own.items() <= body.items()


def test_models_and_tokens_are_a_ds_to_tell(start: Start) -> None:
    engines = start(decode=2)
    with Routed(**engines.settings(), health_interval_s=60) as router:
        assert ask(router.url, "/v1/models")[1]["data"] == [{"id": "toy"}]
        engines["d0"].kill()
        assert ask(router.url, "/tokenize", {"prompt": "ab"})[1]["tokens"] == [97, 98]
        engines["d1"].kill()
        status, answer = ask(router.url, "/v1/models")
        assert (status, "no decode engine answers" in answer["error"]["message"]) == (503, True)


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


def test_the_command_takes_addresses_and_says_what_cannot_work(
    start: Start, tmp_path: Path, token_file: Path
) -> None:
    engines = start(decode=2)
    (port,) = free_ports(1)
    engines["d0"].set(held=0)
    decode = (
        f"d0={engines['d0'].url},handoff=unix:///d0.sock,cache={engines['d0'].url},token_file={token_file}"
    )
    options = ["--prefill", f"p0={engines['p0'].url},cache=http://127.0.0.1:{port},token_file={token_file}"]
    options += ["--decode", decode, "--decode", f"d1=http://127.0.0.1:{port}"]
    with Command(tmp_path, *options) as router:
        _, answer = ask(router.url, CHAT, chat())
        log = router.log.read_text()
    assert text_of(answer) == wanted(chat())
    (p,) = engines["p0"].seen()
    assert p["body"]["kv_transfer_params"]["handoff"] == "unix:///d0.sock"
    said = [line.partition(" WARNING ")[2] for line in log.splitlines() if " WARNING " in line]
    for start_, end in (
        ("decode.d1.handoff is not given: ", f"want --decode d1=http://127.0.0.1:{port},handoff=ADDRESS"),
        (f"decode engine d1 is not up: http://127.0.0.1:{port}: ", ""),
        (f"prefill.p0.cache = http://127.0.0.1:{port} cannot be asked: ", ""),
    ):
        assert [line for line in said if line.startswith(start_) and line.endswith(end)], said
    assert not [line for line in said if "d0" in line]
