"""A client gets another engine's answer or a well-formed error, whatever an engine answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, count, repeat
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest

pytest.importorskip("aiohttp")

from garbage_http_server import Garbage, chunk, http, streamed
from routers import Command, Routed, ask, fetch, stream, text_of

from kvkit.lab.testbed.openai_engine import TOKEN, OpenAIEngine, pieces_of, text_after
from kvkit.lab.testbed.waiting import wait_for
from kvkit.router import answers, engines, openai
from kvkit.router.routing import Candidate, RoutingLimits, choose_decode
from kvkit.tiers.testing.contract import DEADLINE_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT, COUNT = "short", 8
LONG = "a long prompt " * 100
WANTED = text_after(list(PROMPT.encode()), COUNT)
Body = dict[str, Any]


def completion(**fields: Any) -> Body:
    return {"model": "toy", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, **fields}


GOOD: Body = {
    "id": "g",
    "created": 1,
    "model": "toy",
    "choices": [{"index": 0, "text": "garbage", "finish_reason": "stop", "token_ids": [103, 97]}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}
"""An answer, or an event of one. None of the tests wants its text."""


def changed(*path: str | int, to: Any) -> bytes:
    """`GOOD` with another value there."""
    found = json.loads(json.dumps(GOOD))
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return json.dumps(found).encode()


DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
NOT_SAID = {
    "nothing": b"",
    "a space": b" ",
    "HTML": b"<html><body>502 Bad Gateway</body></html>",
    "half of it": json.dumps(GOOD).encode()[:40],
    "more behind it": json.dumps(GOOD).encode() + b"}",
    "not UTF-8": b'{"choices": [{"text": "\xff\xfe"}]}',
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "null": b"null",
    "a number": b"7",
    "a string": b'"choices"',
    "a list": b"[1]",
    "nothing in it": b"{}",
    "deep": DEEP,
    "deep lists": b'{"choices": ' + b"[" * 990 + b"]" * 990 + b"}",
    "NaN": changed("usage", to=float("nan")),
    "infinity": b'{"choices": [{"index": 0, "text": "", "logprobs": 1e999}]}',
    "a long number": b'{"choices": ' + b"9" * 5000 + b"}",
    "an error": b'{"error": {"message": "out of memory", "code": 500}}',
    "an error that is a string": b'{"error": "out of memory"}',
    "an error, and choices": changed("error", to={"message": "out of memory"}),
    "choices: null": changed("choices", to=None),
    "choices: a string": changed("choices", to="abc"),
    "choices: an object": changed("choices", to={"0": {}}),
    "choices: numbers": changed("choices", to=[7]),
    "choices: nulls": changed("choices", to=[None]),
    "choices: lists": changed("choices", to=[[]]),
    "choices: too many": changed("choices", to=GOOD["choices"] * 2),
    "index: too many": changed("choices", 0, "index", to=1),
    "index: a string": changed("choices", 0, "index", to="0"),
    "index: negative": changed("choices", 0, "index", to=-1),
    "text: a number": changed("choices", 0, "text", to=7),
    "text: a list": changed("choices", 0, "text", to=["a"]),
    "finish_reason: a number": changed("choices", 0, "finish_reason", to=1),
    "finish_reason: a list": changed("choices", 0, "finish_reason", to=["stop"]),
    "token_ids: a string": changed("choices", 0, "token_ids", to="abc"),
    "token_ids: strings": changed("choices", 0, "token_ids", to=["a"]),
    "token_ids: bools": changed("choices", 0, "token_ids", to=[True]),
    "token_ids: an object": changed("choices", 0, "token_ids", to={"0": 1}),
    "prompt_token_ids: a number": changed("choices", 0, "prompt_token_ids", to=7),
    "prompt_token_ids: strings": changed("prompt_token_ids", to=["a"]),
    "usage: a list": changed("usage", to=[]),
    "usage: a string": changed("usage", to="many"),
    "prompt_tokens: a string": changed("usage", "prompt_tokens", to="5"),
    "prompt_tokens: half": changed("usage", "prompt_tokens", to=1.5),
    "prompt_tokens: enormous": changed("usage", "prompt_tokens", to=10**400),
    "completion_tokens: a list": changed("usage", "completion_tokens", to=[]),
    "completion_tokens: negative": changed("usage", "completion_tokens", to=-1),
    "id: an object": changed("id", to={}),
    "created: a string": changed("created", to="now"),
    "given up": changed("choices", 0, "finish_reason", to="abort"),
}
"""What is no answer, and no event of one."""
GOOD_RAW = json.dumps(GOOD).encode()
NO_HTTP = {
    "closed": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a long line": b"HTTP/1.1 200 " + b"O" * (1 << 20),
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"X-Header: x\r\n" * 100_000,
    "a header without end": b"HTTP/1.1 200 OK\r\nX-Header: " + b"x" * (1 << 20),
    "a header without colon": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "bytes in a header": b"HTTP/1.1 200 OK\r\nX\xff: \x00\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "no length": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "a chunk of no size": streamed(end=b"zz\r\n"),
    "a chunk of negative size": streamed(end=b"-5\r\nhello\r\n"),
    "packed": http(gzip.compress(GOOD_RAW), kind="application/json\r\nContent-Encoding: gzip"),
    "status 000": http(GOOD_RAW, "000 what"),
    "status 999": http(GOOD_RAW, "999 what"),
    "status 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "status 302": http(GOOD_RAW, "302 Found"),
    "status 304": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "status 101": b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "status 100 and no more": b"HTTP/1.1 100 Continue\r\n\r\n",
    "HTML of status 404": http(NOT_SAID["HTML"], "404 Not Found", "text/html"),
    "HTML of status 200": http(NOT_SAID["HTML"], kind="text/html; charset=nonsense"),
    "HTML of status 503": http(NOT_SAID["HTML"], "503 Unavailable", "text/html"),
    "status 400 and half its body": http(b'{"error": {}}', "400 Bad", length=100),
}
"""What is no answer, whatever was asked for."""
WHOLE = {name: http(raw) for name, raw in NOT_SAID.items()} | {
    "less than it says": http(GOOD_RAW, length=10_000),
    "no choices in it": http(changed("choices", to=[])),
    "says nothing": http(changed("choices", 0, "text", to=None)),
    "events": streamed(GOOD_RAW, b"[DONE]"),
}
BROKEN = streamed(GOOD_RAW, end=b"")[:-40]
STREAMED = {name: streamed(raw, b"[DONE]") for name, raw in NOT_SAID.items()} | {
    "at once done": streamed(b"[DONE]"),
    "no events": streamed(),
    "only comments": streamed(end=b"a\r\n: comment\n\r\n0\r\n\r\n"),
    "an event without end": streamed(end=b"5\r\ndata:\r\n0\r\n\r\n"),
    "no stream but an answer": http(GOOD_RAW),
    "no stream but an error": http(NOT_SAID["an error"]),
    "done before its end": streamed(changed("choices", to=[]), b"[DONE]"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIEngine]:
    with OpenAIEngine(tmp_path_factory.mktemp("d0")) as engine:
        yield engine


QUICK = {"idle_timeout_s": 2.0}
"""aiohttp does not say that a chunk of a stream has no size: that engine is late."""


class Ring:
    """A router before an engine that answers garbage and one that is right."""

    def __init__(self, router: Routed, garbage: Garbage) -> None:
        self.router = router
        self.garbage = garbage
        self._users = map(str, count())

    def user(self) -> str:
        """A new client, whose conversation goes to the garbage first."""
        wait_for(lambda: all(self.router.health().values()))
        return next(user for user in self._users if _chosen(user) == "g")


def _chosen(user: str) -> str:
    body = json.dumps(completion(user=user)).encode()
    session = openai.session_of(openai.parse("completions", body), None)
    return choose_decode(
        [Candidate("g"), Candidate("d0")], session=session, last_decode=None, limits=RoutingLimits()
    ).name


@pytest.fixture(scope="module")
def ring(good: OpenAIEngine) -> Iterator[Ring]:
    with ExitStack() as stack:
        garbage = stack.enter_context(Garbage())
        decode = {"g": {"url": garbage.url}, "d0": {"url": good.url}}
        router = stack.enter_context(Routed(decode=decode, health_interval_s=0.02, **QUICK))
        yield Ring(router, garbage)


@pytest.mark.parametrize("name", WHOLE | NO_HTTP)
def test_instead_of_garbage_comes_another_engines_answer(ring: Ring, name: str) -> None:
    ring.garbage.answers = {COMPLETIONS: [(WHOLE | NO_HTTP)[name]]}
    body, asked = completion(user=ring.user()), len(ring.garbage.asked)
    status, answer = ask(ring.router.url, COMPLETIONS, body)
    assert (status, text_of(answer)) == (200, WANTED)
    assert len(ring.garbage.asked) == asked + 1


@pytest.mark.parametrize("name", STREAMED | NO_HTTP)
def test_instead_of_a_stream_of_garbage_comes_another_engines(ring: Ring, name: str) -> None:
    ring.garbage.answers = {COMPLETIONS: [(STREAMED | NO_HTTP)[name]]}
    body, asked = completion(user=ring.user()), len(ring.garbage.asked)
    found = list(stream(ring.router.url, COMPLETIONS, body))
    assert "".join(map(text_of, found)) == WANTED
    assert len(ring.garbage.asked) == asked + 1


def begun(after: int) -> list[bytes]:
    """The first events of what the good engine would stream."""
    prompt = list(PROMPT.encode())
    pieces, _ = pieces_of(prompt, COUNT, {}, {"other": "", "tokens_per_event": 1})
    found = []
    for number, (text, ids) in enumerate(pieces[:after]):
        choice: Body = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None}
        choice |= {"prompt_token_ids": prompt} if number == 0 else {}
        found.append(json.dumps({"id": "g", "created": 1, "choices": [choice]}).encode())
    return found


BROKEN_OFF = {
    "closed": b"",
    "done": b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    "a chunk of no size": b"zz\r\n",
    "ended": b"0\r\n\r\n",
    "trailers without end": b"0\r\n" + b"X-Trailer: x\r\n" * 100_000,
}


@pytest.mark.parametrize("name", NOT_SAID | BROKEN_OFF)
@pytest.mark.parametrize("others", [1, 0])
def test_a_stream_that_turns_to_garbage_ends_well_formed(ring: Ring, name: str, others: int) -> None:
    """Another engine goes on with it; without one, an event with an error is its last."""
    after, seen = 3, Event()
    end = BROKEN_OFF[name] if name in BROKEN_OFF else chunk(NOT_SAID[name]) + chunk(b"[DONE]")

    def answer() -> Iterator[bytes]:
        yield streamed(*begun(after), end=b"")
        seen.wait(DEADLINE_S)
        yield end

    ring.garbage.answers = {COMPLETIONS: answer()}
    with ExitStack() as stack:
        url = ring.router.url
        if not others:
            alone = Routed(decode={"g": {"url": ring.garbage.url}}, health_interval_s=60, **QUICK)
            url = stack.enter_context(alone).url
        events = stream(url, COMPLETIONS, completion(user=ring.user()))
        found = [next(events) for _ in range(after)]
        seen.set()
        found += events
    if others:
        assert "".join(map(text_of, found)) == WANTED
    else:
        assert "no decode engine is left" in found.pop()["error"]["message"]
        assert "".join(map(text_of, found)) == text_after(list(PROMPT.encode()), after)


@pytest.mark.parametrize("name", ["a chunk of no size", "HTML", "deep", "choices: numbers", "an error"])
def test_the_last_engines_garbage_is_an_error_in_json(name: str) -> None:
    with Garbage() as garbage, Routed(decode={"g": {"url": garbage.url}}) as router:
        garbage.answers = {COMPLETIONS: [(WHOLE | NO_HTTP)[name]]}
        status, answer = ask(router.url, COMPLETIONS, completion())
    assert status == 502
    assert "no decode engine is left: decode engine g: " in answer["error"]["message"]


HANDED = {"do_remote_prefill": True, "transfer_id": "0" * 32}


@pytest.mark.parametrize(
    "name",
    [
        *WHOLE,
        *NO_HTTP,
        "transfer params: a list",
        "transfer params: a string",
        "cached tokens: a string",
        "cached tokens: enormous",
    ],
)
def test_a_prefill_engines_garbage_costs_its_part_alone(good: OpenAIEngine, name: str) -> None:
    odd = {
        "transfer params: a list": changed("kv_transfer_params", to=[HANDED]),
        "transfer params: a string": changed("kv_transfer_params", to="abc"),
        "cached tokens: enormous": changed(
            "usage", "prompt_tokens_details", to={"cached_tokens": -(10**400)}
        ),
        "cached tokens: a string": changed("usage", "prompt_tokens_details", to={"cached_tokens": "many"}),
    }
    raw = http(odd[name]) if name in odd else (WHOLE | NO_HTTP)[name]
    body = completion(prompt=LONG)
    good.reset()
    engines = {"prefill": {"g": {"url": ""}}, "decode": {"d0": {"url": good.url}}}
    with Garbage() as garbage:
        garbage.answers = {COMPLETIONS: [raw]}
        engines["prefill"]["g"]["url"] = garbage.url
        with Routed(**engines) as router:
            status, answer = ask(router.url, COMPLETIONS, body)
        assert garbage.asked == [COMPLETIONS]
    assert (status, text_of(answer)) == (200, text_after(list(LONG.encode()), COUNT))


def test_decode_is_not_told_of_what_prefill_gave_up(good: OpenAIEngine) -> None:
    good.reset()
    given_up = json.loads(NOT_SAID["given up"]) | {"kv_transfer_params": HANDED}
    with Garbage() as garbage:
        garbage.answers = {COMPLETIONS: [http(json.dumps(given_up).encode())]}
        with Routed(prefill={"g": {"url": garbage.url}}, decode={"d0": {"url": good.url}}) as router:
            status, answer = ask(router.url, COMPLETIONS, completion(prompt=LONG))
            assert 'failures_total{cause="aborted",engine="g"} 1.0' in router.metrics()
    assert (status, text_of(answer)) == (200, text_after(list(LONG.encode()), COUNT))
    (request,) = good.seen()
    assert "kv_transfer_params" not in request["body"]


def test_a_chats_piece_with_ids_of_another_type_is_garbage() -> None:
    asked = openai.ParsedRequest("chat", {"messages": [], "stream": True})
    event = {"choices": [{"index": 0, "delta": {"token_ids": "abc"}, "finish_reason": None}]}
    with pytest.raises(ValueError, match="token_ids = 'abc': want list"):
        openai.read_event(asked, json.dumps(event).encode())


def test_little_of_a_long_error_is_quoted() -> None:
    error = json.dumps({"error": {"message": "x" * (1 << 20), "code": 500}}).encode()
    with Garbage() as garbage, Routed(decode={"g": {"url": garbage.url}}) as router:
        garbage.answers = {COMPLETIONS: [streamed(error)]}
        _, answer = ask(router.url, COMPLETIONS, completion(stream=True))
    assert 100 < len(answer["error"]["message"]) < 1000


@pytest.mark.parametrize("status", ["500 no", "429 later"])
def test_what_one_d_fails_to_answer_another_does(good: OpenAIEngine, status: str) -> None:
    """Without another, the client hears what that one said."""
    own = json.dumps({"error": {"message": "too much to do"}}).encode()
    with Garbage() as garbage:
        garbage.answers = {"/v1/models": [http(own, status)]}
        both = {"g": {"url": garbage.url}, "d0": {"url": good.url}}
        with Routed(decode=both) as router:
            assert ask(router.url, "/v1/models")[1]["data"] == [{"id": "toy"}]
        with Routed(decode={"g": both["g"]}) as router:
            found = ask(router.url, "/v1/models")
        assert garbage.asked == ["/v1/models"] * 2
    assert found == (int(status[:3]), json.loads(own))


def tokens_of(raw: bytes) -> bytes:
    return b'{"tokens": %s}' % raw


@pytest.mark.parametrize("path", ["/tokenize", "/lookup"])
@pytest.mark.parametrize(
    "raw",
    [
        *(http(NOT_SAID[name]) for name in ("nothing", "HTML", "null", "not UTF-8", "deep")),
        *(http(tokens_of(raw)) for raw in (b'"abc"', b"7", b"null", b'["a"]', b"[true]", b"[1.5]", b"{}")),
        *(http(b'{"hit_tokens": %s}' % raw) for raw in (b'"7"', b"1e999", b"[]", b"-1", b"null", b"true")),
        http(tokens_of(b"[1, 2]"), kind="application/json; charset=nonsense"),
        http(tokens_of(b"[1, 2]"), "500 no"),
        b"",
        NO_HTTP["headers without end"],
    ],
    ids=lambda raw: repr(raw[-40:]),
)
def test_who_answers_garbage_when_asked_is_served_as_unknown(
    good: OpenAIEngine, tmp_path: Path, path: str, raw: bytes
) -> None:
    """The request itself goes the way that it does where nobody was asked."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    good.reset()
    with Garbage() as garbage:
        tokens = [http(b'{"tokens": [1, 2, 3]}')] if path == "/lookup" else [raw]
        answer = streamed(*begun(COUNT)[:-1], changed("choices", 0, "text", to=""), b"[DONE]")
        garbage.answers = {"/tokenize": tokens, "/lookup": [raw], COMPLETIONS: [answer]}
        asked = {"url": garbage.url, "cache": garbage.url, "token_file": str(tmp_path / "token")}
        with Routed(decode={"g": asked}) as router:
            assert list(stream(router.url, COMPLETIONS, completion()))
        assert path in garbage.asked


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize"])
@pytest.mark.parametrize("name", ["HTML", "nothing", "a list", "deep", "status 304", "closed", "status 999"])
def test_what_any_d_answers_is_passed_on_where_it_is_json(path: str, name: str) -> None:
    raw = NO_HTTP[name] if name in NO_HTTP else http(NOT_SAID[name])
    with Garbage() as garbage, Routed(decode={"g": {"url": garbage.url}}) as router:
        garbage.answers = {path: [raw]}
        status, answer = ask(router.url, path, None if path == "/v1/models" else {"prompt": "a"})
    assert status == 503
    assert "no decode engine answers: decode engine g: " in answer["error"]["message"]


MIB = 1 << 20
ENDLESS = {
    "an answer": (False, COMPLETIONS, http(b"", length=1 << 40)),
    "an error": (False, COMPLETIONS, http(b"", "500 no", length=1 << 40)),
    "an event": (True, COMPLETIONS, b"HTTP/1.1 200 OK\r\n\r\ndata: "),
    "a comment": (True, COMPLETIONS, b"HTTP/1.1 200 OK\r\n\r\n: "),
    "a list of tokens": (False, "/tokenize", http(b"", length=1 << 40)),
    "what it holds": (False, "/lookup", http(b"", length=1 << 40)),
    "a list of models": (False, "/v1/models", http(b"", length=1 << 40)),
}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, Garbage]]:
    """A router in a process of its own, before garbage alone."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    with Garbage() as garbage:
        asked = f'url = "{garbage.url}"\ncache = "{garbage.url}"\ntoken_file = "{folder}/token"\n'
        (folder / "router.toml").write_text(f"[decode.g]\n{asked}")
        with Command(folder, "--config", str(folder / "router.toml")) as router:
            yield router, garbage


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_end_takes_no_more_than_its_limit(
    command: tuple[Command, Garbage], name: str
) -> None:
    """The router's memory grows by two copies of the longest answer at most."""
    router, garbage = command
    streams, path, head = ENDLESS[name]
    tokens = [http(b'{"tokens": [1, 2, 3]}')]
    garbage.answers = {"/tokenize": tokens, path: chain([head], repeat(b" " * MIB, 1024))}
    wait_for(lambda: fetch(router.url, "GET", "/health")[0] == 200)
    sent, before = garbage.sent, psutil.Process(router.pid).memory_info().rss
    Path(f"/proc/{router.pid}/clear_refs").write_text("5")  # its peak is that of now
    if path == "/v1/models":
        status, _ = fetch(router.url, "GET", path)
    else:
        body = json.dumps(completion(stream=streams)).encode()
        status, _ = fetch(router.url, "POST", COMPLETIONS, body)
    assert path in garbage.asked
    assert status in (502, 503)
    assert garbage.sent - sent < engines.MAX_ANSWER_BYTES + 32 * MIB, "it was cut off"
    assert peak(router.pid) - before < 2 * engines.MAX_ANSWER_BYTES


def peak(pid: int) -> int:
    """The most memory that a process had, in bytes."""
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_a_stream_is_kept_up_to_a_limit(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_KEPT", 20)
    endless = begun(1)[0].replace(b'"finish_reason": null', b'"finish_reason": null, "pad": 1')
    ring.garbage.answers = {COMPLETIONS: [streamed(*[endless.replace(b"prompt_token_ids", b"x")] * 100)]}
    *_, last = stream(ring.router.url, COMPLETIONS, completion(user=ring.user()))
    assert "longer than 20 characters and tokens" in last["error"]["message"]
