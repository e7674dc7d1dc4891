"""Another engine continues for one that is killed, stopped or wrong; the client sees one answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from routers import (  # noqa: F401 - fixtures, too
    CHAT,
    COMPLETIONS,
    LONG,
    Body,
    Engines,
    Routed,
    Start,
    ask,
    chat,
    completion,
    engine_processes,
    engines_as_new,
    fetch,
    stream,
    text_of,
    wanted,
    wanted_prompt,
)

from kvkit.lab.testbed.openai_engine import text_after, tokens_after
from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for
from kvkit.router.clients import Client
from kvkit.router.engines import Engine
from kvkit.router.settings import EngineConfig, RouterConfig

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
    with Routed(**engines.settings(), health_timeout_s=2.0, health_interval_s=0.05) as router:
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
        assert fetch(router.url, "GET", "/readyz")[0] == 503
        assert fetch(router.url, "GET", "/livez")[0] == 200, "the router itself lives"
        status, answer = ask(router.url, COMPLETIONS, completion("short"))
        assert (status, answer["error"]["code"]) == (503, 503)
        assert "no decode engine is left: none is up" in answer["error"]["message"]
        engines["d0"].start()
        wait_for(lambda: router.health()["d0"])
        assert fetch(router.url, "GET", "/readyz")[0] == 200
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


def cut_off(engines: Engines, events: Iterator[Body], **other: Any) -> list[Body]:
    """The events of a stream whose engine is killed after ten; `other` is set for the one that goes on."""
    found = [next(events) for _ in range(10)]
    victim = the_one_at_work(engines, COMPLETIONS)
    engines[other_of(victim)].set(hold_after=None, **other)
    engines[victim].kill()
    return [*found, *events]


def test_a_takeover_counts_where_its_engine_fails_after_the_end(start: Start) -> None:
    engines = start(decode=2)
    engines.set(hold_after=10)
    body = completion("short", stream_options={"include_usage": True})
    with Routed(**engines.settings()) as router:
        found = cut_off(engines, stream(router.url, COMPLETIONS, body), closes=False)
        metrics = router.metrics()
    assert "".join(map(text_of, found)) == text_after(list(b"short"), 24)
    assert found[-1]["usage"]["completion_tokens"] == 24
    assert 'takeovers_total{outcome="continued"} 1.0' in metrics
    assert 'takeovers_total{outcome="failed"}' not in metrics


def test_a_takeover_that_is_refused_counts_as_failed(start: Start) -> None:
    engines = start(decode=2)
    engines.set(hold_after=10)
    with Routed(**engines.settings()) as router:
        found = cut_off(engines, stream(router.url, COMPLETIONS, completion("short")), status=422)
        metrics = router.metrics()
    assert "422" in found[-1]["error"]["message"]
    assert 'takeovers_total{outcome="failed"} 1.0' in metrics


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


def test_nothing_follows_the_end_of_a_stream() -> None:
    """The time of a request may be over while its client takes the last events."""

    async def answer(request: web.Request) -> web.StreamResponse:
        client = Client(request, 60.0)
        await client.send(b"data: 1\n\n")
        await client.end_stream(b"data: 2\n\n")
        return await client.send_error(504, "no answer within 100 s")

    async def ask() -> bytes:
        app = web.Application()
        app.router.add_get("/", answer)
        async with TestServer(app) as server, TestClient(server) as asking:
            return await (await asking.get("/")).read()

    assert asyncio.run(ask()) == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("steps", range(8))
def test_a_watch_ends_when_a_request_fails_meanwhile(steps: int) -> None:
    """Or a router that is closed at that moment waits for it for ever."""

    async def close() -> bool:
        config = EngineConfig(url=f"http://127.0.0.1:{free_ports(1)[0]}")
        settings = RouterConfig(decode={"d0": config}, health_interval_s=60.0)
        async with aiohttp.ClientSession() as session:
            engine = Engine("d0", "decode", config, settings, session)
            watch = asyncio.create_task(engine.monitor())
            while not engine._probed:
                await asyncio.sleep(0)
            engine._suspected.set()
            for _ in range(steps):
                await asyncio.sleep(0)
            watch.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            ended = watch.done()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            return ended

    assert asyncio.run(close())
