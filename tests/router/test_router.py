"""The router forwards requests between real HTTP servers, refuses invalid ones, and runs as a command."""

from __future__ import annotations

import gzip
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from routers import (  # noqa: F401 - fixtures, too
    CHAT,
    COMPLETIONS,
    LONG,
    Body,
    Command,
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
from stub_cache import ManagedCache

from kvkit.lab.testbed.openai_engine import TOKEN, render, tokens_after
from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for
from kvkit.observe.http import Server
from kvkit.router.engines import Engine
from kvkit.router.lookups import LookupQuery
from kvkit.tiers.testing.contract import DEADLINE_S


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


@pytest.mark.parametrize("trouble", [{"hands": False}, {"status": 422}], ids=["kept", "refused"])
def test_what_d_computes_after_all_is_waited_for(start: Start, trouble: Body) -> None:
    engines, known = start(), dict[str, Engine]()
    engines["p0"].set(**trouble)
    engines["d0"].set(hold_after=0)

    async def a_little(engine: Engine, query: LookupQuery) -> int | None:
        known[engine.name] = engine
        return 100

    with Routed(a_little, **engines.settings()) as router:
        events = stream(router.url, COMPLETIONS, completion())
        with ThreadPoolExecutor() as pool:
            first = pool.submit(next, events)
            wait_for(lambda: engines["d0"].seen() != [])
            assert known["d0"].waiting_tokens == len(LONG) - 100
            assert known["p0"].waiting_tokens == 0
            engines["d0"].set(hold_after=None)
            first.result()
        assert known["d0"].waiting_tokens == 0
        assert "".join(map(text_of, [first.result(), *events])) == wanted(completion())


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


def test_what_a_request_wants_of_the_cache_is_passed_on_within_limits(start: Start) -> None:
    engines = start()
    wish = {"store": False, "load_from": ["pool"]}
    with Routed(**engines.settings(), requests={"load_from": ["pool"]}) as router:
        status, answer = ask(router.url, COMPLETIONS, completion(kv_transfer_params={"kv_cache": wish}))
        too_long = {"kv_cache": {"keep_s": 60}}
        refused, error = ask(router.url, COMPLETIONS, completion(kv_transfer_params=too_long))
    assert (status, text_of(answer)) == (200, wanted(completion()))
    assert refused == 400
    words = "kv_transfer_params.kv_cache.keep_s = 60.0: want at most requests.max_keep_s = 0.0"
    assert error["error"]["message"] == words
    (p,), (d,) = engines["p0"].seen(), engines["d0"].seen()
    for request in (p, d):
        assert request["body"]["kv_transfer_params"]["kv_cache"] == wish


@pytest.mark.parametrize(
    ("path", "raw", "words"),
    [
        (COMPLETIONS, b"{", "the body is not JSON"),
        (COMPLETIONS, b"[1]", r"the body is \[1\], want an object"),
        (COMPLETIONS, b"{}", "prompt = None: want a string or a list"),
        (CHAT, b'{"messages": ["hi"]}', r"messages = \['hi'\]: want a list of objects"),
        (CHAT, b'{"messages": [], "stream": 1}', "stream = 1: want bool"),
        (CHAT, b'{"messages": [], "max_tokens": true}', "max_tokens = True: want int"),
        (CHAT, b'{"messages": [], "kv_transfer_params": 1}', "want an object of blend, kv_cache"),
        (
            CHAT,
            b'{"messages": [], "kv_transfer_params": {"handoff": "tcp://me"}}',
            r"^kv_transfer_params\.handoff: not for clients",
        ),
        (CHAT, b'{"messages": [], "ec_transfer_params": {}}', "^ec_transfer_params: not for clients"),
        (
            CHAT,
            b'{"messages": [], "kv_cache": {"store": false}}',
            "^kv_cache: want it in kv_transfer_params$",
        ),
        (CHAT, b'{"messages": [], "blend": true}', "^blend: want it in kv_transfer_params$"),
        (
            CHAT,
            b'{"messages": [], "kv_transfer_params": {"kv_cache": {}}}',
            r"^kv_transfer_params\.kv_cache: .* have no table \[requests\]",
        ),
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
        (PACKED, b"not packed", 400, "the body is not encoded as gzip, or is cut off"),
        (PACKED, gzip.compress(b" " * (65 << 20)), 413, "the body is longer than 67108864 bytes"),
        (
            PACKED,
            gzip.compress(b'{"prompt": [' + b"[]," * (20 << 20) + b"1]}"),
            413,
            "over 2097152 lists, obj",
        ),
        ({"Content-Encoding": "rot13"}, b"{}", 415, "Content-Encoding: want one of identity, gzip, deflate"),
        ({}, b'{"prompt": "\\ud800"}', 400, "the body has half of a surrogate pair"),
        ({}, b'{"prompt": "a", "user": "\\udfff"}', 400, "the body has half of a surrogate pair"),
        ({}, b'{"prompt": "a", "x": [{"\\uDc00": 1}]}', 400, "the body has half of a surrogate pair"),
        ({}, b'{"prompt": "\xff"}', 400, "the body is not JSON: .*utf-8"),
        ({}, '{"prompt": "a"}'.encode("utf-16"), 400, "the body is not JSON: .*utf-8"),
        ({}, b'{"prompt": "a", "x": ' + DEEP + b"}", 400, "the body is not JSON: it is nested over 100 deep"),
        ({}, b'{"prompt": "a", "x": ' + b"[" * 101 + b"]" * 101 + b"}", 400, "nested over 100 deep"),
        ({}, b'{"prompt": "a", "temperature": NaN}', 400, "NaN is not a finite number"),
        ({}, b'{"prompt": "a", "temperature": 1e999}', 400, "1e999 is not a finite number"),
        ({}, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "the body is not JSON: Exceeds"),
        ({}, b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}", 400, "want at most 9007199254740991"),
        ({}, b'{"prompt": "a", "n": "2"}', 400, "n = '2': want int"),
        ({}, b'{"prompt": 7}', 400, "prompt = 7: want a string or a list"),
        *(
            ({}, b'{"prompt": "a", "%s": {"x": 1}}' % name, 400, rf"^{name.decode()}.*: not for clients")
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


def test_the_router_needs_no_tensors() -> None:
    """It runs where there is neither an engine nor a GPU, and starts at once."""
    loaded = "import sys, kvkit.router.app; print(*{'torch', 'numba', 'vllm', 'jax'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True).split() == []


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
