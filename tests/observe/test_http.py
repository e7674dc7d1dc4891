"""The HTTP endpoint authenticates, answers and survives invalid requests on real connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from endpoints import HEAD, TOKEN, ask, call, its_endpoint, managed_cache, raw  # noqa: F401 - fixtures, too
from prometheus_client.parser import text_string_to_metric_families
from stub_cache import ManagedCache, filled_counts

from kvkit.cache import Cache
from kvkit.config import load_config, open_cache
from kvkit.lab.testbed.engine_stub import Engine, small_layout
from kvkit.lab.testbed.waiting import wait_for
from kvkit.observe import http as module
from kvkit.observe.access import read_token
from kvkit.observe.http import Server
from kvkit.settings import ConfigError
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.health import PAUSES_S
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.contract import DEADLINE_S, put, record_names
from kvkit.tiers.testing.faulty import Wrapper

ROUTES = [("GET", "/metrics"), ("GET", "/health"), ("GET", "/tiers")]
ROUTES += [("GET", "/engine"), ("POST", "/lookup"), ("POST", "/clear"), ("POST", "/pin"), ("GET", "/nothing")]


def test_a_cache_that_serves_is_seen_and_steered(tmp_path: Path) -> None:
    layout = small_layout()
    config = load_config(
        chunk_tokens=8,
        staging="64KiB",
        tiers={"memory": {"capacity": "32KiB"}, "disk": {"url": str(tmp_path)}},
        policy={"store_to": ["disk"]},
        server={"enabled": True, "port": 0, "token": TOKEN},
    )
    namespace = config.namespace(layout, model="m", dtype="float32")
    engine = Engine(layout, namespace)
    tokens = np.arange(24, dtype=np.int32)
    table = engine.table(24)
    engine.compute(tokens, table)
    body = {"tokens": tokens.tolist()}
    with open_cache(config, layout, namespace) as cache:
        server = cache.server
        assert server is not None
        cache.store(tokens, engine.places(table))
        cache.flush()
        assert cache.load(cache.lookup(tokens), engine.places(table)).by_tier == {"disk": 24}
        cache.flush()
        _, text = call(server, "GET", "/metrics")
        values = {
            (s.name, s.labels["tier"]): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if "tier" in s.labels and not s.name.endswith("_bucket")
        }
        assert values["kvkit_hit_tokens_total", "disk"] == 24
        assert values["kvkit_loaded_tokens_total", "disk"] == 24
        assert values["kvkit_loaded_bytes_total", "disk"] == cache.counts().loaded_bytes["disk"] > 0
        assert values["kvkit_stored_records_total", "disk"] == 3
        assert values["kvkit_written_back_records_total", "memory"] == 3
        assert values["kvkit_transfer_seconds_count", "disk"] > 0
        asked = cache.counts()
        assert ask(server, "POST", "/lookup", body)[1]["by_tier"] == {"memory": 24}
        answer = ask(server, "POST", "/lookup", body | {"model": "m", "cache_salt": "another tenant"})[1]
        assert (answer["hit_tokens"], answer["by_tier"]) == (0, {})
        status, answer = ask(server, "POST", "/lookup", body | {"model": "another"})
        assert (status, answer) == (404, {"error": "model = 'another': not known here; want 'm'"})
        assert cache.counts().queries == asked.queries + 2
        assert (cache.counts().lookups, cache.counts().hit_tokens) == (asked.lookups, asked.hit_tokens)
        assert ask(server, "POST", "/pin", body | {"seconds": 60})[1] == {"pinned_tokens": 24}
        assert ask(server, "POST", "/clear", {"tier": "memory"})[1] == {"removed_records": 3}
        assert ask(server, "POST", "/lookup", body)[1]["by_tier"] == {"disk": 24}
        assert ask(server, "GET", "/health")[0] == 200
        assert [tier["state"] for tier in ask(server, "GET", "/tiers")[1]] == ["ok", "ok"]


class Stuck(Wrapper):
    """`inner`, whose deleting waits for `gate`."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.begun, self.gate = threading.Event(), threading.Event()

    def delete(self, names: Sequence[str]) -> None:
        self.begun.set()
        self.gate.wait(DEADLINE_S)
        self.inner.delete(names)


def test_tiers_that_are_not_emptied_keep_nobody_from_looking_up_and_pinning(tmp_path: Path) -> None:
    layout = small_layout()
    namespace = load_config(chunk_tokens=8, tiers={"disk": {"url": str(tmp_path)}}).namespace(
        layout, model="m", dtype="float32"
    )
    engine = Engine(layout, namespace)
    tokens = np.arange(24, dtype=np.int32)
    engine.compute(tokens, engine.table(24))
    body = {"tokens": tokens.tolist()}
    tier = Stuck(ObjectTier(str(tmp_path), name="disk"))
    staging = Staging(64 << 10, 4)
    with Cache(layout, namespace, [tier], staging=staging) as cache:
        cache.store(tokens, engine.places(engine.table(24)))
        cache.flush()
        with Server(cache, token=TOKEN, port=0) as server:
            asking = [
                threading.Thread(target=ask, args=(server, "POST", "/clear", {"tier": "disk"}))
                for _ in range(2 * module._THREADS)
            ]
            for thread in asking:
                thread.start()
            assert tier.begun.wait(DEADLINE_S)
            wait_for(lambda: server._clearing.waiting == len(asking) - 1)
            assert ask(server, "POST", "/lookup", body)[1]["hit_tokens"] == 24
            assert ask(server, "POST", "/pin", body | {"seconds": 60})[0] == 200
            tier.gate.set()
            for thread in asking:
                thread.join(DEADLINE_S)
            assert ask(server, "POST", "/lookup", body)[1]["hit_tokens"] == 0


def test_metrics_are_the_counts(server: Server, cache: ManagedCache) -> None:
    cache.kept = filled_counts()
    status, text = call(server, "GET", "/metrics")
    samples = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert (status, samples["kvkit_lookups_total"]) == (200, cache.kept.lookups)
    cache.kept.lookups += 1
    assert f"kvkit_lookups_total {float(cache.kept.lookups)}" in call(server, "GET", "/metrics")[1]


def test_health_is_503_while_a_tier_is_out(server: Server, cache: ManagedCache) -> None:
    assert ask(server, "GET", "/health") == (200, {"status": "ok", "tiers": {"near": "ok", "[far]": "ok"}})
    cache.break_tier("[far]")
    assert ask(server, "GET", "/health") == (
        503,
        {"status": "open", "tiers": {"near": "ok", "[far]": "open"}},
    )
    cache.now = PAUSES_S[0]
    assert ask(server, "GET", "/health") == (
        200,
        {"status": "half-open", "tiers": {"near": "ok", "[far]": "half-open"}},
    )
    cache.healths["[far]"].worked(cache.now)
    for seconds in [1e-3] * 20 + [1.0] * 10:
        cache.healths["[far]"].worked(0.0, seconds)
    assert ask(server, "GET", "/health") == (
        200,
        {"status": "slow", "tiers": {"near": "ok", "[far]": "slow"}},
    )


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_probes_need_no_token(server: Server, cache: ManagedCache, path: str) -> None:
    """And are told nothing but that the process serves, with a tier that is out, too."""
    for _ in range(2):
        assert call(server, "GET", path, headers={}) == (200, '{"status":"ok"}')
        cache.break_tier("[far]")
    assert call(server, "HEAD", path, headers={}) == (200, "")
    assert call(server, "POST", path, b"{}", headers={})[0] == 401
    assert call(server, "GET", f"{path}/", headers={})[0] == 401


def test_an_engine_tells_of_itself(server: Server) -> None:
    assert ask(server, "GET", "/engine") == (200, {})
    server.engine["blend_context"] = "prefix"
    assert ask(server, "GET", "/engine") == (200, {"blend_context": "prefix"})


def test_tiers_are_listed_in_order(server: Server, cache: ManagedCache) -> None:
    cache.break_tier("[far]")
    status, tiers = ask(server, "GET", "/tiers")
    assert (status, [tier["name"] for tier in tiers]) == (200, ["near", "[far]"])
    assert tiers[1] == {
        "name": "[far]",
        "scope": "node",
        "codec": "none",
        "precision": None,
        "in_memory": True,
        "near": True,
        "state": "open",
        "queue_depth": 7,
    }


def test_lookup_says_how_much_is_where(server: Server) -> None:
    body = {"tokens": list(range(10))}
    reason = "the cache does not see which blocks the engine itself keeps"
    assert ask(server, "POST", "/lookup", body) == (
        200,
        {
            "tokens": 10,
            "hit_tokens": 8,
            "by_tier": {"near": 4, "[far]": 4},
            "engine": {"hit_tokens": None, "reason": reason},
        },
    )
    assert ask(server, "POST", "/lookup", {"tokens": []})[1]["hit_tokens"] == 0


def test_a_question_is_about_what_its_model_and_salt_would_find(server: Server, cache: ManagedCache) -> None:
    body = {"tokens": [1, 2, 3], "seconds": 1.5}
    asked = {"model": "adapter", "cache_salt": "tenant"}
    assert ask(server, "POST", "/pin", body | asked)[0] == 200
    del body["seconds"]
    assert ask(server, "POST", "/lookup", body | asked)[0] == 200
    assert ask(server, "POST", "/lookup", body | {"model": None})[0] == 200
    found = [(space.lora, space.salt) for space in cache.asked_about]
    assert found == [("adapter", "tenant"), ("adapter", "tenant"), ("", "")]
    for path, more in (("/lookup", {}), ("/pin", {"seconds": 1})):
        status, answer = ask(server, "POST", path, body | {"model": "x"} | more)
        assert (status, answer) == (404, {"error": "model = 'x': known are m, adapter"})


def test_clear_empties_one_tier(server: Server, cache: ManagedCache) -> None:
    names = record_names(3)
    assert put(cache.tiers["near"], cache.staging, names) == [None] * 3
    assert put(cache.tiers["[far]"], cache.staging, names[:2]) == [None] * 2
    assert ask(server, "POST", "/clear", {"tier": "near"}) == (200, {"removed_records": 3})
    assert [len(list(tier.scan())) for tier in cache.tiers.values()] == [0, 2]


def test_clear_says_when_it_took_too_long(server: Server, cache: ManagedCache) -> None:
    cache.error = TimeoutError("tier 'near': not empty after 30 s; 7 records are deleted")
    assert ask(server, "POST", "/clear", {"tier": "near"}) == (504, {"error": str(cache.error)})


def test_pin_keeps_a_sequence_for_a_while(server: Server, cache: ManagedCache) -> None:
    body = {"tokens": [1, 2, 3], "seconds": 1.5}
    assert ask(server, "POST", "/pin", body) == (200, {"pinned_tokens": 3})
    assert cache.pinned == [(3, 1.5)]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN.upper()}"},
    ],
)
def test_without_the_token_nothing_is_told(
    server: Server, cache: ManagedCache, headers: dict[str, str]
) -> None:
    for method, path in ROUTES:
        status, text = call(server, method, path, b'{"tokens": [1]}', headers)
        assert status == 401, path
        assert json.loads(text) == {"error": "want Authorization: Bearer and the token"}
    assert not cache.asked.is_set()


def test_two_tokens_are_none(server: Server) -> None:
    line = f"Authorization: Bearer {TOKEN}\r\n".encode()
    assert b" 200 " in raw(server, b"GET /tiers HTTP/1.1\r\nHost: x\r\n", line, b"\r\n")
    assert b" 401 " in raw(server, b"GET /tiers HTTP/1.1\r\nHost: x\r\n", line, line, b"\r\n")


def test_the_scheme_is_not_case_sensitive(server: Server) -> None:
    assert call(server, "GET", "/tiers", headers={"Authorization": f"bearer {TOKEN}"})[0] == 200


def test_the_token_is_never_logged(cache: ManagedCache, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Server(cache, token=TOKEN, port=0) as server:
        for method, path in ROUTES:
            call(server, method, path)
        cache.error = OSError("gone")
        assert call(server, "POST", "/lookup", {"tokens": [1]})[0] == 500
        assert TOKEN not in repr(server)
    assert caplog.records
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/lookup", b"", 422, ["body", "tokens"]),
        ("POST", "/lookup", b"\xff\xfe", 422, ["body"]),
        ("POST", "/lookup", b"[" * 100_000, 422, ["body"]),
        ("POST", "/lookup", b'{"tokens": [1', 422, ["body"]),
        ("POST", "/lookup", b"[1, 2]", 422, ["body"]),
        ("POST", "/lookup", {}, 422, ["tokens", "required"]),
        ("POST", "/lookup", {"tokens": "1"}, 422, ["tokens"]),
        ("POST", "/lookup", {"tokens": [1, -1]}, 422, ["tokens.1", "greater than or equal to 0"]),
        ("POST", "/lookup", {"tokens": [2**31]}, 422, ["tokens.0", "less than 2147483648"]),
        ("POST", "/lookup", {"tokens": [True]}, 422, ["tokens.0", "integer"]),
        ("POST", "/lookup", {"tokens": [1.5]}, 422, ["tokens.0", "integer"]),
        ("POST", "/lookup", {"tokens": [1], "salt": "x"}, 422, ["salt", "are tokens, model, cache_salt"]),
        ("POST", "/lookup", {"tokens": [1], "cache_salt": 7}, 422, ["cache_salt", "string"]),
        ("POST", "/pin", {"tokens": [1], "seconds": 0}, 422, ["seconds", "greater than 0"]),
        ("POST", "/pin", {"tokens": [1], "seconds": 86401}, 422, ["seconds", "86400"]),
        ("POST", "/pin", b'{"tokens": [1], "seconds": NaN}', 422, ["seconds"]),
        ("POST", "/pin", {"tokens": [1]}, 422, ["seconds", "required"]),
        ("POST", "/clear", {"tier": "disk"}, 404, ["'disk'", "near, [far]"]),
        ("GET", "/lookup", None, 405, ["Method"]),
        ("POST", "/tiers", {}, 405, ["Method"]),
        ("GET", "/nothing", None, 404, ["Not Found"]),
    ],
)
def test_a_bad_request_is_explained(
    server: Server,
    cache: ManagedCache,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None,
    status: int,
    words: list[str],
) -> None:
    found, answer = ask(server, method, path, body)
    assert found == status
    for word in words:
        assert word in answer["error"]
    assert not cache.asked.is_set()
    assert not cache.pinned
    assert call(server, "GET", "/tiers")[0] == 200


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"\x16\x03\x01\x02\x00garbage\r\n\r\n"], b"400"),
        ([b"GET /tiers HTTP/1.1\r\nX: ", b"x" * 200_000, b"\r\n\r\n"], b"400"),
        ([HEAD, f"Content-Length: {module.MAX_BODY_BYTES + 1}\r\n\r\n".encode()], b"413"),
        (
            [HEAD, b"Transfer-Encoding: chunked\r\n\r\n"]
            + [b"100000\r\n" + b" " * 0x100000 + b"\r\n"] * (module.MAX_BODY_BYTES // 0x100000 + 1),
            b"413",
        ),
        ([HEAD, b"Content-Length: -1\r\n\r\n"], b"400"),
    ],
)
def test_bytes_that_are_no_request_are_refused(
    server: Server, cache: ManagedCache, parts: list[bytes], status: bytes
) -> None:
    reply = raw(server, *parts)
    assert reply.startswith(b"HTTP/1.1 " + status), reply[:200]
    assert not cache.asked.is_set()
    assert call(server, "GET", "/tiers")[0] == 200


def test_a_client_that_stops_in_the_middle_is_given_up(
    server: Server, cache: ManagedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BODY_S", 0.1)
    reply = raw(server, HEAD, b"Content-Length: 100\r\n\r\n{")
    assert reply.startswith(b"HTTP/1.1 408")
    parsed = urlsplit(server.url)
    with socket.create_connection((parsed.hostname, parsed.port), DEADLINE_S) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert call(server, "GET", "/tiers")[0] == 200
    assert not cache.asked.is_set()


def test_a_long_prompt_fits(server: Server) -> None:
    tokens = [2**31 - 1] * 1_000_000
    body = json.dumps({"tokens": tokens}).encode()
    assert ask(server, "POST", "/lookup", body)[1]["hit_tokens"] == 8


def test_what_a_cache_throws_is_not_shown(
    server: Server, cache: ManagedCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.error = OSError("redis://user:sesame@host refused")
    status, answer = ask(server, "POST", "/lookup", {"tokens": [1]})
    assert status == 500
    assert answer == {"error": "/lookup failed: OSError; see the log"}
    assert "refused" in caplog.text
    cache.error = TimeoutError("a tier is late")
    assert ask(server, "POST", "/lookup", {"tokens": [1]})[1] == {
        "error": "/lookup failed: TimeoutError; see the log"
    }


def test_a_cache_that_hangs_costs_its_deadline_and_no_more(cache: ManagedCache) -> None:
    cache.go_on.clear()
    with Server(cache, token=TOKEN, port=0, timeout_s=0.2) as server:
        for _ in range(6):  # more than it has threads
            status, answer = ask(server, "POST", "/lookup", {"tokens": [1]})
            assert (status, answer["error"]) == (504, "no answer within 0.2 s")
        assert call(server, "GET", "/metrics")[0] == 200
        assert call(server, "GET", "/health")[0] == 200
        cache.go_on.set()
        assert call(server, "POST", "/lookup", {"tokens": [1]})[0] == 200, "its threads are back"


def test_closing_does_not_wait_for_a_request_that_hangs(cache: ManagedCache) -> None:
    cache.go_on.clear()
    server = Server(cache, token=TOKEN, port=0, timeout_s=10 * DEADLINE_S)
    ended = threading.Event()

    def client() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            call(server, "POST", "/lookup", {"tokens": [1]})
        ended.set()

    threading.Thread(target=client, daemon=True).start()
    assert cache.asked.wait(DEADLINE_S)
    assert server.close(DEADLINE_S)
    assert ended.wait(DEADLINE_S), "the client is told, too"
    with pytest.raises(ConnectionRefusedError):
        call(server, "GET", "/tiers")
    assert server.close(), "closing twice is closing once"


def test_many_clients_at_once(server: Server) -> None:
    answers: list[int] = []

    def client() -> None:
        answers.extend(ask(server, "POST", "/lookup", {"tokens": [1] * n})[1]["hit_tokens"] for n in range(8))

    threads = [threading.Thread(target=client, daemon=True) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(answers) == sorted([*range(8)] * 16)


def test_impossible_settings_are_named(cache: ManagedCache) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.host='127\.0\.0\.1', server\.port={port}: .*in use"):
            Server(cache, token=TOKEN, port=port)
    with pytest.raises(ConfigError, match=r"server\.port=70000"):
        Server(cache, token=TOKEN, port=70000)
    with pytest.raises(ConfigError, match=r"server\.host='192\.0\.2\.1'"):
        Server(cache, token=TOKEN, host="192.0.2.1", port=0)
    for token in ("", "short", "x" * 15, "with space" * 3, "ünïcödé" * 3, "new\nline" * 3):
        with pytest.raises(ConfigError, match=r"server\.token: want at least 16") as caught:
            Server(cache, token=token, port=0)
        assert not token or token not in str(caught.value)


def test_beyond_loopback_there_is_a_warning(cache: ManagedCache, caplog: pytest.LogCaptureFixture) -> None:
    with Server(cache, token=TOKEN, port=0):
        assert "plain text" not in caplog.text
    with Server(cache, token=TOKEN, host="0.0.0.0", port=0):
        assert "server.host='0.0.0.0': other hosts can reach it" in caplog.text


def test_a_configuration_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache, and closes it with the cache."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    layout = small_layout()

    def opened(**settings: Any) -> Cache:
        tiers = {"disk": {"url": str(tmp_path / "store")}}
        config = load_config(chunk_tokens=8, staging="64KiB", tiers=tiers, server=settings)
        return open_cache(config, layout, config.namespace(layout, model="m", dtype="float32"))

    with opened() as cache:
        assert cache.server is None, "off by default"
    with opened(enabled=True, port=0) as cache:
        assert cache.server is not None
        header = {"Authorization": f"Bearer {read_token(tmp_path / 'kvkit' / 'token')}"}
        assert call(cache.server, "GET", "/tiers", headers=header)[0] == 200
        port = urlsplit(cache.server.url).port
        with pytest.raises(ConfigError, match=rf"server\.port={port}"):
            opened(enabled=True, port=port)
    with pytest.raises(ConnectionRefusedError):
        call(cache.server, "GET", "/tiers", headers=header)
    with opened(enabled=True, port=port, token=TOKEN) as cache:
        assert cache.server is not None
        assert call(cache.server, "GET", "/tiers")[0] == 200
    monkeypatch.delitem(sys.modules, "kvkit.observe.http")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"uvicorn is missing: pip install 'kvkit-llm\[server\]'"):
        opened(enabled=True, port=0)
