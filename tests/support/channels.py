"""Ends of channels for the tests of transports, and what goes through them."""

from __future__ import annotations

import gc
import os
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import trustme

from kvkit.handoff.protocol.messages import MAX_BODY_BYTES
from kvkit.handoff.transport.addresses import connect, listen, parse
from kvkit.handoff.transport.channel import (
    Channel,
    ChannelIdle,
    Listener,
)
from kvkit.handoff.transport.tls import client_context, server_context
from kvkit.staging import PAGE_BYTES, Staging

DEADLINE_S = 60.0
SHORT_S = 0.3
SLOT_BYTES = 4 * PAGE_BYTES
TRICKLED = 32 << 20


def nowhere(body: bytes) -> memoryview | None:
    raise AssertionError(f"a payload came with {body!r}")


def fill(channel: Channel) -> None:
    """Send more than sockets hold."""
    for _ in range(100):
        channel.send(b"x" * MAX_BODY_BYTES)


def pattern(size: int, seed: int = 0) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(size))


@dataclass(frozen=True)
class Transport:
    """Where to listen, and how to encrypt."""

    address: str
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None


class Pair:
    """Both ends of a channel, and the listener between them."""

    def __init__(self, transport: Transport, timeout_s: float = DEADLINE_S) -> None:
        self.listener = listen(transport.address, timeout_s=timeout_s, tls=transport.server_tls)
        where = self.listener.address
        with ThreadPoolExecutor(1) as other:  # TLS takes both at once
            connecting = other.submit(connect, where, timeout_s=timeout_s, tls=transport.client_tls)
            self.server = self.listener.accept(DEADLINE_S)
            while not connecting.done():
                with suppress(ChannelIdle):
                    self.server.receive(nowhere, 0.01)
            self.client = connecting.result(DEADLINE_S)
        self.client.trusted = self.server.trusted = True

    def close(self) -> None:
        for end in (self.client, self.server, self.listener):
            end.close()


class Certificates:
    """An authority, and files of it and of what it signs."""

    def __init__(self, folder: Path, *names: str) -> None:
        authority = trustme.CA()
        self.ca, self.own = folder / "ca.pem", folder / "own.pem"
        authority.cert_pem.write_to_path(self.ca)
        authority.issue_cert(*names).private_key_and_cert_chain_pem.write_to_path(self.own)

    def server(self, peers: Path | None = None) -> ssl.SSLContext:
        return server_context(self.own, self.own, peers)

    def client(self, shown: Path | None = None) -> ssl.SSLContext:
        return client_context(self.ca, shown, shown)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"), "127.0.0.1")


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix://{tmp_path}/run/kvkit.sock" if request.param == "unix" else "tcp://127.0.0.1:0"


@pytest.fixture(params=["unix", "tcp", "tls", "nixl"])
def transport(request: pytest.FixtureRequest, tmp_path: Path, certificates: Certificates) -> Transport:
    if request.param == "unix":
        return Transport(f"unix://{tmp_path}/run/kvkit.sock")
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
    if request.param != "tls":
        return Transport(f"{request.param}://127.0.0.1:0")
    return Transport("tcp://127.0.0.1:0", certificates.server(), certificates.client())


@pytest.fixture
def pair(transport: Transport) -> Iterator[Pair]:
    pair = Pair(transport)
    yield pair
    pair.close()


@pytest.fixture
def short(transport: Transport) -> Iterator[Pair]:
    """A pair whose frames have to be through in no time."""
    pair = Pair(transport, SHORT_S)
    yield pair
    pair.close()


@pytest.fixture
def arena() -> Iterator[Staging]:
    arena = Staging(SLOT_BYTES, 4, shared=True)
    yield arena
    arena.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def open_descriptors() -> int:
    gc.collect()  # memory that is mapped keeps its descriptor
    return len(os.listdir("/proc/self/fd"))


class Raw:
    """A peer that sends what it likes."""

    def __init__(self, listener: Listener) -> None:
        where = parse(listener.address)
        family = socket.AF_UNIX if isinstance(where, Path) else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(where) if isinstance(where, Path) else where)
        self.channel = listener.accept(DEADLINE_S)

    def close(self) -> None:
        self.socket.close()
        self.channel.close()


@pytest.fixture
def raw(address: str) -> Iterator[Raw]:
    """A peer that is trusted, and sends bytes."""
    listener = listen(address, timeout_s=SHORT_S)
    raw = Raw(listener)
    raw.channel.trusted = True
    yield raw
    raw.close()
    listener.close()
