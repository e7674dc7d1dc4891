"""Peers without the secret, and peers that do not read, cost an endpoint little and block nobody."""

from __future__ import annotations

import gc
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from channels import Certificates
from handoff_nodes import (
    IDENTITY,
    LONG_S,
    Node,
    Process,
    Speaker,
    assert_holds,
    fill,
    new_sender,
    raw_socket,
)

from kvkit.handoff import endpoint
from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.peer import PeerTier
from kvkit.handoff.protocol.messages import MAX_BODY_BYTES, Proof, Query, encode
from kvkit.handoff.sender import HandoffError
from kvkit.handoff.transport import acceptor
from kvkit.handoff.transport.acceptor import MAX_UNAUTHENTICATED
from kvkit.handoff.transport.channel import HEADER
from kvkit.handoff.transport.link import MAX_QUEUED_BYTES
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Staging, release_all
from kvkit.tiers.testing.contract import SLOT_BYTES, record_names

MIB = 1 << 20
STRANGERS = 300
STRANGER_BYTES = 256 << 10
"""Bytes of memory for each of `MAX_UNAUTHENTICATED`, as docs/reference/protocol.md promises."""
MAX_QUERIES = 500_000


class Cost:
    """What a process takes now: descriptors, threads, and the most memory since this was made."""

    def __init__(self, process: Process) -> None:
        self._folder = Path(f"/proc/{process.pid}")
        (self._folder / "clear_refs").write_text("5")  # the peak begins anew
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        lines = (self._folder / "status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return {
            "descriptors": len(os.listdir(self._folder / "fd")),
            "threads": int(status["Threads"]),
            "bytes": int(status["VmHWM"].split()[0]) << 10,
        }

    def rise(self) -> dict[str, int]:
        return {name: now - self._before[name] for name, now in self._now().items()}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process("receiver", tmp_path)
    yield process
    process.kill()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def hand_over(address: str, transfer: str, tls: ssl.SSLContext | None = None) -> None:
    """Send records, as a rightful peer."""
    names, sender, slots = record_names(6, "a" * 16), new_sender(tls=tls), Staging(SLOT_BYTES, 6)
    sending = sender.open(transfer, address, names, LONG_S)
    assert sending.admitted.result(LONG_S) == 6
    leases = fill(slots, names)
    sender.put(names, leases, lambda name, error: None)
    release_all(leases)
    assert sending.done.result(LONG_S) == 0
    sender.close(LONG_S)
    slots.close()


SAYS: dict[str, bytes] = {
    "nothing": b"",
    "hello": HEADER.pack(len(encode(IDENTITY.hello())), 0) + encode(IDENTITY.hello()),
    "half a hello": HEADER.pack(1024, 0) + bytes(1000),
    "a large hello": HEADER.pack(MAX_BODY_BYTES, 0) + bytes(MAX_BODY_BYTES),
}


@pytest.mark.parametrize(
    ("says", "transport"),
    [
        ("nothing", "unix"),
        ("nothing", "tcp"),
        ("hello", "unix"),
        ("half a hello", "tcp"),
        ("a large hello", "unix"),
        ("a large hello", "tcp"),
        ("hello", "tls"),
    ],
)
def test_many_strangers_cost_little_and_keep_nobody_out(tmp_path: Path, says: str, transport: str) -> None:
    flight, tls = SAYS[says], None
    if transport == "tls":
        tls = Certificates(tmp_path, "127.0.0.1").client()
        flight = first_flight(tls)
    with ExitStack() as stack:
        process = Process("receiver", tmp_path)
        stack.callback(process.kill)
        address = process.call("addresses")[transport != "unix"]
        hand_over(address, "warm", tls)
        process.call("release", "warm")
        cost = Cost(process)
        for _ in range(STRANGERS):
            stranger = stack.enter_context(raw_socket(address))
            with suppress(OSError):  # cut off before all is said
                stranger.sendall(flight)
        hand_over(address, "rightful", tls)
        rise = cost.rise()
        assert process.call("holds", record_names(6, "a" * 16))
    assert rise["descriptors"] <= MAX_UNAUTHENTICATED + 4, rise
    assert rise["threads"] <= MAX_UNAUTHENTICATED + 4, rise
    assert rise["bytes"] <= MAX_UNAUTHENTICATED * STRANGER_BYTES, rise


def first_flight(tls: ssl.SSLContext) -> bytes:
    """What the side that connects says first."""
    says = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        tls.wrap_bio(ssl.MemoryBIO(), says, server_hostname="127.0.0.1").do_handshake()
    return says.read()


def test_who_takes_too_long_to_prove_itself_is_put_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every frame of a peer may take an hour here, and bytes come in all the while."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.2)
    node = Node(tmp_path, timeout_s=3600.0)
    with raw_socket(node.tcp) as stranger:
        stranger.sendall(HEADER.pack(1024, 0))
        stranger.setblocking(False)
        left = iter(bytes(1000))

        def is_over() -> bool:
            try:
                stranger.send(bytes([next(left)]))
                return stranger.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        wait_for(is_over)
    node.close()


def test_a_thread_that_cannot_be_started_costs_one_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = threading.Thread.start, threading.Event()

    def fail_once(thread: threading.Thread) -> None:
        if thread.name.endswith("-in") and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with raw_socket(node.tcp) as first:
        assert first.recv(1) == b""
    assert failed.is_set()
    hand_over(node.tcp, "t")
    assert_holds(node.tier, record_names(6, "a" * 16))


def test_who_has_no_thread_to_connect_hears_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, tier = new_sender(), PeerTier("D", node.tcp, IDENTITY, timeout_s=LONG_S)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(HandoffError, match="t: no thread for a connection"):
            sender.open("t", node.tcp, record_names(1), LONG_S)
        with pytest.raises(OSError, match="tier 'D': no thread for a connection"):
            tier.match_prefix(record_names(1))
    assert sender.transfers() == {}
    assert tier.match_prefix(record_names(1)) == 0
    sender.close(LONG_S)
    tier.close()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_endpoint_outlives_a_shortage_of_descriptors(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    first = socket.socket()
    where = node.tcp.removeprefix("tcp://").split(":")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # mappings of earlier tests have descriptors, too
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        first.connect((where[0], int(where[1])))
        wait_for(lambda: "a peer cannot be accepted" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    hand_over(node.tcp, "t")
    first.close()


def test_only_so_many_peers_are_connected(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_PEERS", 1)
    first, second = Speaker(node.unix), Speaker(node.unix)
    assert isinstance(first.hello(), Proof)
    wait_for(lambda: node.endpoint.peers == 1)
    second.hello()
    (error,) = second.hear_all()
    assert "the most that this node accepts" in str(error)
    first.close()
    second.close()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_who_does_not_read_costs_little(process: Process, transport: str) -> None:
    """It knows the secret, asks on and on, and is cut off when too much waits for it."""
    address = process.call("addresses")[["unix", "tcp"].index(transport)]
    hand_over(address, "warm")
    process.call("release", "warm")
    cost = Cost(process)
    speaker = Speaker(address)
    speaker.hello()
    query = encode(Query(1, tuple(record_names(1))))
    frames = (HEADER.pack(len(query), 0) + query) * MAX_QUERIES
    plain = speaker.socket.dup()
    with pytest.raises(ConnectionError):
        plain.sendall(frames)
    rise = cost.rise()
    plain.close()
    speaker.close()
    assert rise["bytes"] <= MAX_QUEUED_BYTES, rise
    hand_over(address, "after")


@pytest.mark.parametrize("scheme", ["tcp", "nixl"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_every_address_but_a_unix_one_takes_a_secret(node: Node, scheme: str, host: str) -> None:
    """Any user of this host reaches a port of it; whoever reaches it could pull KV and token ids."""
    nobody, address = replace(IDENTITY, secret=b""), f"{scheme}://{host}:0"
    uses: list[Callable[[], object]] = [
        lambda: Endpoint(node.receiver, (), nobody, [address], timeout_s=LONG_S, pin_s=1.0),
        lambda: PeerTier("D", address, nobody, timeout_s=LONG_S),
        lambda: new_sender(nobody).open("t", address, record_names(1), LONG_S),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=f"{address} has no secret.*: give secret or secret_file"):
            use()
