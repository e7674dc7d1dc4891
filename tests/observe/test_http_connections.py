"""The HTTP endpoint cuts off slow clients and bounds the cost of strangers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from endpoints import HEAD, TOKEN, ask, call, its_endpoint, managed_cache, raw  # noqa: F401 - fixtures, too
from repository import SUPPORT
from stub_cache import ManagedCache

from kvkit.observe import connections
from kvkit.observe.http import Server
from kvkit.tiers.testing.contract import DEADLINE_S


@pytest.mark.parametrize("sent", [b"", b"GET /tiers HTTP/1.1\r\nHost: x\r\n", HEAD])
def test_who_sends_no_whole_head_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """And who has the token, as soon as nothing comes after an answer."""
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    assert raw(server, sent) == b""
    whole = f"GET /tiers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    parsed = urlsplit(server.url)
    with socket.create_connection((parsed.hostname, parsed.port), DEADLINE_S) as connection:
        connection.sendall(whole)
        answered = connection.recv(65536)
        assert answered.startswith(b"HTTP/1.1 200")
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass  # the rest of the answer


def test_a_long_request_is_not_cut_off(
    server: Server, cache: ManagedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    cache.go_on.clear()
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(call(server, "POST", "/lookup", {"tokens": [1]})[0]), daemon=True
    )
    asking.start()
    assert cache.asked.wait(DEADLINE_S)
    assert raw(server) == b"", "another one's time is over"
    cache.go_on.set()
    asking.join(DEADLINE_S)
    assert answers == [200]


def test_the_idle_client_gives_way_and_the_busy_one_does_not(
    server: Server, cache: ManagedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_AUTHENTICATED", 2)
    parsed = urlsplit(server.url)
    whole = f"GET /tiers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with contextlib.ExitStack() as open_ones:
        idle = [
            open_ones.enter_context(socket.create_connection((parsed.hostname, parsed.port), DEADLINE_S))
            for _ in range(2)
        ]
        for connection in idle:
            connection.sendall(whole)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert call(server, "GET", "/tiers")[0] == 200
        with contextlib.suppress(ConnectionResetError):
            while idle[0].recv(65536):
                pass
        cache.go_on.clear()
        waiting = HEAD + b"Content-Length: 15\r\n\r\n" + b'{"tokens": [1]}'
        busy = [
            open_ones.enter_context(socket.create_connection((parsed.hostname, parsed.port), DEADLINE_S))
            for _ in range(2)
        ]
        for connection in busy:
            connection.sendall(waiting)
        deadline = time.monotonic() + DEADLINE_S
        while (answer := ask(server, "GET", "/tiers"))[0] == 200:
            assert time.monotonic() < deadline
        assert answer == (503, {"error": "too many requests are in flight"})
        cache.go_on.set()
        assert [connection.recv(65536)[:12] for connection in busy] == [b"HTTP/1.1 200"] * 2
    assert call(server, "GET", "/tiers")[0] == 200


def test_strangers_write_nothing_into_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    assert raw(server, b"\x16\x03\x01\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(server, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert not caplog.records


ENDPOINT = """
import json, os, resource, sys
from stub_cache import ManagedCache
from kvkit.observe import connections
from kvkit.observe.http import Server
from kvkit.tiers.testing.contract import put, record_names
from kvkit.tiers.objects import ObjectTier

token, store = sys.argv[1:]
connections.HEAD_S = 3600.0  # so that nothing but the number of connections is under test
cache = ManagedCache()
server = Server(cache, token=token, port=0)
print(server.url, flush=True)
for line in sys.stdin:
    if line == "limit\\n":
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        descriptors = len(os.listdir("/proc/self/fd"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors + 96, hard))
    elif line == "store\\n":
        tier = ObjectTier(store)
        errors = put(tier, cache.staging, record_names(1))
        assert errors == [None], errors
        tier.close()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    rise = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmHWM", "Threads")}
    print(json.dumps(rise | {"descriptors": len(os.listdir("/proc/self/fd"))}), flush=True)
"""
UNPROVEN = [
    b"",
    b"G",
    b"POST /lookup HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\n" + b" " * 1_000_000,
    b"POST /lookup HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer nobody\r\nContent-Length: 9\r\n\r\n",
    b"GET /tiers HTTP/1.1\r\nX: " + b"x" * 1_000_000,
    b"\x16\x03\x01" * 100_000,
    b"GET /tiers HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000,
]
"""What those send who do not have the token, and then hold on."""


def test_strangers_cost_a_bounded_share_of_the_process(tmp_path: Path) -> None:
    """300 sockets that are held, in a process that may open 96 files more than it has."""
    program = [sys.executable, "-c", ENDPOINT, TOKEN, str(tmp_path / "store")]
    paths = os.pathsep.join([str(SUPPORT), *sys.path])
    with contextlib.ExitStack() as held:
        child = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        held.callback(child.wait, DEADLINE_S)
        held.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None

        def tell(what: str) -> dict[str, int]:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{what}\n")
            child.stdin.flush()
            told: dict[str, int] = json.loads(child.stdout.readline())
            return told

        endpoint = urlsplit(child.stdout.readline().strip())
        kept = http.client.HTTPConnection(endpoint.netloc, timeout=DEADLINE_S)
        held.callback(kept.close)

        def ask_as_client(connection: http.client.HTTPConnection) -> int:
            connection.request("GET", "/tiers", headers={"Authorization": f"Bearer {TOKEN}"})
            reply = connection.getresponse()
            reply.read()
            return reply.status

        assert ask_as_client(kept) == 200
        before = tell("limit")
        statuses = set()
        for i in range(300):
            stranger = socket.create_connection((endpoint.hostname, endpoint.port), DEADLINE_S)
            held.callback(stranger.close)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was cut off already
                stranger.sendall(UNPROVEN[i % len(UNPROVEN)])
            if i % 20 == 0:
                with contextlib.closing(http.client.HTTPConnection(endpoint.netloc, timeout=DEADLINE_S)) as c:
                    statuses.add(ask_as_client(c))
        after = tell("measure")
        assert statuses == {200}
        tell("store")
        assert ask_as_client(kept) == 200, "a client keeps its connection"
        assert after["Threads"] == before["Threads"]
        assert after["descriptors"] - before["descriptors"] <= connections.MAX_UNAUTHENTICATED + 8
        assert after["VmHWM"] - before["VmRSS"] <= 32 << 10, "KiB"
