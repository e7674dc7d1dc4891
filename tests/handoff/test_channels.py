"""Every transport of handoff fulfils the contract of a channel."""
# ruff: noqa: F811

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from channels import (  # noqa: F401 - some are fixtures
    DEADLINE_S,
    SHORT_S,
    TRICKLED,
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
from kvkit.handoff.transport.channel import (
    HEADER,
    MAX_FIRST_BODY_BYTES,
    Channel,
    ChannelClosed,
    ChannelIdle,
    ChannelTimeout,
    FrameError,
)
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
