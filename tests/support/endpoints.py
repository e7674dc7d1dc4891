"""A cache's HTTP endpoint, and its clients."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from stub_cache import ManagedCache

from kvkit.cache import CacheServer
from kvkit.observe.http import Server
from kvkit.tiers.testing.contract import DEADLINE_S

TOKEN = "correct-horse-battery-staple"
HEAD = f"POST /lookup HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


@pytest.fixture(name="cache")
def managed_cache() -> Iterator[ManagedCache]:
    cache = ManagedCache()
    yield cache
    cache.close()


@pytest.fixture(name="server")
def its_endpoint(cache: ManagedCache) -> Iterator[Server]:
    server = Server(cache, token=TOKEN, port=0)
    yield server
    cache.go_on.set()
    assert server.close()


def call(
    server: CacheServer,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Status and text of the answer."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=DEADLINE_S)
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    shown = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
    try:
        connection.request(method, path, content, shown)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def ask(
    server: CacheServer, method: str, path: str, body: bytes | dict[str, Any] | None = None
) -> tuple[int, Any]:
    status, text = call(server, method, path, body)
    return status, json.loads(text)


def raw(server: CacheServer, *parts: bytes) -> bytes:
    """What comes back for these bytes, up to the end of the connection or of the first answer's head."""
    parsed = urlsplit(server.url)
    with socket.create_connection((parsed.hostname, parsed.port), DEADLINE_S) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has heard enough
        reply = b""
        try:
            while b"\r\n\r\n" not in reply and (more := connection.recv(65536)):
                reply += more
        except ConnectionResetError:
            pass
    return reply
