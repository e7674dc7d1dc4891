"""Every transport of handoff fulfils the contract of a channel, and its listeners accept peers."""
# ruff: noqa: F811

from __future__ import annotations

import os
import resource
import socket
import ssl
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from channels import (  # noqa: F401 - some are fixtures
    DEADLINE_S,
    SHORT_S,
    TRICKLED,
    Certificates,
    Pair,
    Raw,
    Transport,
    address,
    arena,
    certificates,
    fill,
    nowhere,
    pair,
    pattern,
    raw,
    short,
    threads,
    transport,
)

from kvkit.handoff.protocol.messages import MAX_BODY_BYTES
from kvkit.handoff.transport import nixl
from kvkit.handoff.transport.addresses import connect, listen, of_rank, parse
from kvkit.handoff.transport.channel import (
    HEADER,
    MAX_FIRST_BODY_BYTES,
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelIdle,
    ChannelTimeout,
    FrameError,
)
from kvkit.handoff.transport.tls import server_context
from kvkit.staging import PAGE_BYTES, Staging


def test_bodies_and_payloads_arrive_in_order_both_ways(pair: Pair, threads: ThreadPoolExecutor) -> None:
    sizes = [1, 100, PAGE_BYTES, 3_000_000, 17]

    def send(end: Channel, seed: int) -> None:
        for size in sizes:
            end.send(b"%d" % size, pattern(size, seed))
            end.send(b"alone")

    def receive(end: Channel, seed: int) -> None:
        for size in sizes:
            target = bytearray(size)
            assert end.receive(lambda body, to=target: memoryview(to), DEADLINE_S) == b"%d" % size
            assert target == pattern(size, seed)
            assert end.receive(nowhere, DEADLINE_S) == b"alone"

    both = [(pair.client, pair.server, 1), (pair.server, pair.client, 2)]
    jobs = [threads.submit(send, source, seed) for source, _, seed in both]
    jobs += [threads.submit(receive, target, seed) for _, target, seed in both]
    for job in jobs:
        job.result(DEADLINE_S)


def test_frames_of_several_threads_do_not_mix(pair: Pair, threads: ThreadPoolExecutor) -> None:
    jobs = [
        threads.submit(lambda n=n: [pair.client.send(b"%d" % n, pattern(200_000, n)) for _ in range(5)])
        for n in range(3)
    ]
    for _ in range(15):
        target = bytearray(200_000)
        body = pair.server.receive(lambda _, to=target: memoryview(to), DEADLINE_S)
        assert target == pattern(200_000, int(body))
    for job in jobs:
        job.result(DEADLINE_S)


def test_the_largest_body_and_no_body(pair: Pair, threads: ThreadPoolExecutor) -> None:
    largest = os.urandom(MAX_BODY_BYTES)
    job = threads.submit(pair.client.send, largest)
    assert pair.server.receive(nowhere, DEADLINE_S) == largest
    job.result(DEADLINE_S)
    with pytest.raises(ValueError, match=f"{MAX_BODY_BYTES + 1} bytes"):
        pair.client.send(largest + b"!")
    pair.client.send(b"")
    assert pair.server.receive(nowhere, DEADLINE_S) == b""


def test_a_payload_that_nobody_wants_is_dropped(pair: Pair, threads: ThreadPoolExecutor) -> None:
    job = threads.submit(pair.client.send, b"unwanted", pattern(300_001))
    assert pair.server.receive(lambda body: None, DEADLINE_S) == b"unwanted"
    job.result(DEADLINE_S)
    pair.client.send(b"next")
    assert pair.server.receive(nowhere, DEADLINE_S) == b"next"


def test_frames_that_travel_together_keep_their_order(
    pair: Pair, arena: Staging, threads: ThreadPoolExecutor
) -> None:
    """With payloads between them, an arena, and more of them than are held back."""
    bodies = [b"%d" % n for n in range(40)]

    def send() -> None:
        for n, body in enumerate(bodies):
            pair.server.send(body, pattern(5000, n) if n % 7 == 3 else None, more=n < len(bodies) - 1)
            if n == 20:
                pair.server.share(arena)

    sending = threads.submit(send)
    for n, body in enumerate(bodies):
        target = bytearray(5000)
        assert pair.client.receive(lambda _, to=target: memoryview(to), DEADLINE_S) == body
        assert target == (pattern(5000, n) if n % 7 == 3 else bytes(5000))
    sending.result(DEADLINE_S)


def test_waiting_for_a_frame_ends_without_harm(pair: Pair) -> None:
    for wait_s in (0, 0.01):
        with pytest.raises(ChannelIdle):
            pair.server.receive(nowhere, wait_s)
    pair.client.send(b"late")
    assert pair.server.receive(nowhere, DEADLINE_S) == b"late"


def test_the_end_of_the_peer_is_noticed_at_once(pair: Pair, threads: ThreadPoolExecutor) -> None:
    waiting = threads.submit(pair.server.receive, nowhere, DEADLINE_S)
    pair.client.close()
    with pytest.raises(ChannelClosed, match="closed the channel or is gone"):
        waiting.result(DEADLINE_S)
    with pytest.raises(ChannelClosed):
        pair.server.send(b"?")


def test_shutdown_wakes_who_receives_at_both_ends(pair: Pair, threads: ThreadPoolExecutor) -> None:
    here = threads.submit(pair.server.receive, nowhere, DEADLINE_S)
    there = threads.submit(pair.client.receive, nowhere, DEADLINE_S)
    pair.server.shutdown()
    with pytest.raises(ChannelClosed, match="was shut down"):
        here.result(DEADLINE_S)
    with pytest.raises(ChannelClosed, match="closed the channel or is gone"):
        there.result(DEADLINE_S)


def test_shutdown_wakes_who_sends(pair: Pair, threads: ThreadPoolExecutor) -> None:
    sending = threads.submit(fill, pair.server)
    pair.client.receive(nowhere, DEADLINE_S)
    pair.server.shutdown()
    with pytest.raises(ChannelClosed, match="was shut down"):
        sending.result(DEADLINE_S)


def test_a_peer_that_stops_reading_is_given_up(short: Pair) -> None:
    with pytest.raises(ChannelTimeout, match=f"within {SHORT_S} s"):
        fill(short.client)
    with pytest.raises(ChannelClosed):
        short.client.send(b"more")


def test_a_body_that_is_too_large_is_refused_unread(raw: Raw) -> None:
    raw.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(FrameError, match=r"a body of 542393671 bytes, want at most 4194304"):
        raw.channel.receive(nowhere, DEADLINE_S)
    with pytest.raises(ChannelClosed):
        raw.channel.receive(nowhere, DEADLINE_S)


def test_a_body_may_not_be_one_byte_too_large(raw: Raw) -> None:
    raw.socket.sendall(HEADER.pack(MAX_BODY_BYTES + 1, 0))
    with pytest.raises(FrameError, match=f"a body of {MAX_BODY_BYTES + 1} bytes"):
        raw.channel.receive(nowhere, DEADLINE_S)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (HEADER.pack(MAX_FIRST_BODY_BYTES + 1, 0), "a body of 1025 bytes, want at most 1024"),
        (HEADER.pack(1, 1) + b"!!", "a payload before it was authenticated"),
    ],
)
def test_who_proved_nothing_is_heard_in_small_frames(raw: Raw, first: bytes, says: str) -> None:
    raw.channel.trusted = False
    raw.socket.sendall(HEADER.pack(MAX_FIRST_BODY_BYTES, 0) + bytes(MAX_FIRST_BODY_BYTES) + first)
    assert raw.channel.receive(nowhere, DEADLINE_S) == bytes(MAX_FIRST_BODY_BYTES)
    with pytest.raises(FrameError, match=says):
        raw.channel.receive(nowhere, DEADLINE_S)


@pytest.mark.parametrize("sent", [1, 7, 8, 9, 12, 500])
def test_a_peer_that_stops_within_a_frame(raw: Raw, sent: int) -> None:
    frame = HEADER.pack(4, 1000) + b"body" + bytes(1000)
    raw.socket.sendall(frame[:sent])
    target = memoryview(bytearray(1000))
    with pytest.raises(ChannelTimeout):
        raw.channel.receive(lambda body: target, DEADLINE_S)


@pytest.mark.parametrize("sent", [1, 8, 9, 12, 500])
def test_a_peer_that_ends_within_a_frame(raw: Raw, sent: int) -> None:
    frame = HEADER.pack(4, 1000) + b"body" + bytes(1000)
    raw.socket.sendall(frame[:sent])
    raw.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError, match="within a frame"):
        raw.channel.receive(lambda body: memoryview(bytearray(1000)), DEADLINE_S)


def test_a_payload_of_another_size_than_announced(raw: Raw) -> None:
    raw.socket.sendall(HEADER.pack(1, 1000) + b"!" + bytes(1000))
    with pytest.raises(FrameError, match="1000 bytes where 999"):
        raw.channel.receive(lambda body: memoryview(bytearray(999)), DEADLINE_S)


def test_an_error_in_place_ends_the_channel_and_is_passed_on(pair: Pair) -> None:
    pair.client.send(b"?", pattern(10))
    with pytest.raises(AssertionError, match="a payload came"):
        pair.server.receive(nowhere, DEADLINE_S)
    with pytest.raises(ChannelClosed):
        pair.client.receive(nowhere, DEADLINE_S)


def test_a_trickle_does_not_move_the_deadline(raw: Raw, threads: ThreadPoolExecutor) -> None:
    """Each byte comes in time; the frame does not."""
    ended = threading.Event()

    def trickle() -> None:
        raw.socket.sendall(HEADER.pack(4, TRICKLED) + b"body")
        while not ended.is_set():
            try:
                raw.socket.sendall(b"1")
            except OSError:
                return

    sending = threads.submit(trickle)
    target = memoryview(bytearray(TRICKLED))
    with pytest.raises(ChannelTimeout):
        raw.channel.receive(lambda body: target, DEADLINE_S)
    ended.set()
    sending.result(DEADLINE_S)


def test_the_agent_of_nixl_ends_with_its_last_user() -> None:
    pytest.importorskip("nixl_cu12")
    pair = Pair(Transport("nixl://127.0.0.1:0"))
    pair.listener.close()
    pair.client.close()
    assert list(nixl._agents) == [True]
    pair.close()
    assert not nixl._agents


def test_accept_waits_for_a_while_and_wakes_on_close(address: str, threads: ThreadPoolExecutor) -> None:
    listener = listen(address, timeout_s=DEADLINE_S)
    with pytest.raises(ChannelIdle):
        listener.accept(0.01)
    waiting = threads.submit(listener.accept, DEADLINE_S)
    listener.close()
    with pytest.raises(ChannelClosed):
        waiting.result(DEADLINE_S)
    with pytest.raises(ChannelError, match="cannot be reached"):
        connect(listener.address, timeout_s=DEADLINE_S)


def test_a_listener_outlives_a_shortage_of_descriptors(address: str) -> None:
    listener = listen(address, timeout_s=DEADLINE_S)
    with closing(connect(listener.address, timeout_s=DEADLINE_S)):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            with pytest.raises(ChannelIdle, match="Too many open files"):
                listener.accept(DEADLINE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        listener.accept(DEADLINE_S).close()
    listener.close()


def test_a_peer_that_leaves_at_once() -> None:
    listener = listen("tcp://127.0.0.1:0", timeout_s=DEADLINE_S)
    where = parse(listener.address)
    assert not isinstance(where, Path)
    gone = socket.create_connection(where)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()  # resets
    with pytest.raises(ChannelIdle, match="is refused or has disconnected"):
        listener.accept(DEADLINE_S)
    with closing(connect(listener.address, timeout_s=DEADLINE_S)):
        listener.accept(DEADLINE_S).close()
    listener.close()


def test_only_its_owner_reaches_a_local_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvkit.sock"
    listener = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listener.close()
    assert not path.exists()
    path.parent.chmod(0o750)
    with pytest.raises(ValueError, match=f"others may enter {path.parent} .mode 0750., want mode 0700"):
        listen(f"unix://{path}", timeout_s=DEADLINE_S)


def test_a_local_endpoint_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvkit.sock"
    path.parent.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    with pytest.raises(OSError, match=f"unix://{path} cannot be listened at: Address already in use"):
        listen(f"unix://{path}", timeout_s=DEADLINE_S)
    dead.close()
    listener = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    connect(listener.address, timeout_s=DEADLINE_S).close()
    listener.close()
    path.write_text("no socket")
    with pytest.raises(OSError, match="Address already in use"):
        listen(f"unix://{path}", timeout_s=DEADLINE_S)
    assert path.read_text() == "no socket"


def test_a_local_endpoint_leaves_the_socket_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kvkit.sock"
    first = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    path.rename(path.with_name("kept"))  # so that its number is not given to the next
    second = listen(f"unix://{path}", timeout_s=DEADLINE_S)
    first.close()
    connect(second.address, timeout_s=DEADLINE_S).close()
    second.close()


@pytest.mark.parametrize(
    "bad", ["", "unix://run/s", "tcp://h", "tcp://:1", "tcp://h:99999", "tcp://h:x", "http://h:1", "/run/s"]
)
def test_what_is_no_address(bad: str) -> None:
    with pytest.raises(ValueError, match="want unix:///<path>, tcp"):
        connect(bad, timeout_s=DEADLINE_S)


def test_a_path_that_no_socket_can_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="may have 107 bytes"):
        listen(f"unix://{tmp_path}/{'x' * 108}", timeout_s=DEADLINE_S)


def attempt(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, str]:
    """What both sides say when their first frames cannot be exchanged."""
    listener = listen("tcp://127.0.0.1:0", timeout_s=DEADLINE_S, tls=server)

    def call() -> None:
        channel = connect(listener.address, timeout_s=DEADLINE_S, tls=client)
        try:
            channel.receive(nowhere, DEADLINE_S)
        finally:
            channel.close()

    with ThreadPoolExecutor(1) as other:
        calling = other.submit(call)
        channel = listener.accept(DEADLINE_S)
        with pytest.raises(ChannelError) as here:
            channel.receive(nowhere, DEADLINE_S)
        channel.close()
        listener.close()
        with pytest.raises(ChannelError) as there:
            calling.result(DEADLINE_S)
    return str(here.value), str(there.value)


def test_only_a_certificate_of_the_authority_and_for_the_address_is_accepted(
    certificates: Certificates, tmp_path: Path
) -> None:
    others = Certificates(tmp_path, "127.0.0.1")
    here, there = attempt(others.server(), certificates.client())
    assert "CERTIFICATE_VERIFY_FAILED" in there
    assert "UNKNOWN_CA" in here
    elsewhere = Certificates(tmp_path, "10.0.0.1")
    _, there = attempt(elsewhere.server(), elsewhere.client())
    assert "IP address mismatch" in there


def test_peers_may_be_asked_for_a_certificate(certificates: Certificates) -> None:
    here, there = attempt(certificates.server(peers=certificates.ca), certificates.client())
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in here
    assert "CERTIFICATE_REQUIRED" in there
    transport = Transport(
        "tcp://127.0.0.1:0",
        certificates.server(peers=certificates.ca),
        certificates.client(shown=certificates.own),
    )
    pair = Pair(transport)
    pair.client.send(b"known")
    assert pair.server.receive(nowhere, DEADLINE_S) == b"known"
    pair.close()


def test_garbage_instead_of_tls(certificates: Certificates) -> None:
    listener = listen("tcp://127.0.0.1:0", timeout_s=DEADLINE_S, tls=certificates.server())
    raw = Raw(listener)
    raw.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ChannelError, match="HTTP_REQUEST"):
        raw.channel.receive(nowhere, DEADLINE_S)
    raw.close()
    listener.close()


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    with pytest.raises(ValueError, match=f"certificate={missing}, key={missing}, ca=None: .*No such file"):
        server_context(missing, missing)


def test_every_rank_has_an_address() -> None:
    assert of_rank("unix:///run/kvkit/d-{rank}.sock", 1) == "unix:///run/kvkit/d-1.sock"
    assert of_rank("tcp://[::1]:700{rank}", 0) == "tcp://[::1]:7000"
    assert of_rank("tcp://[::1]:7000", 3) == "tcp://[::1]:7000"
