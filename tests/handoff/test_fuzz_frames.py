"""Parsers of handoff frames accept any bytes or raise one kind of error, in bounded memory.

The fuzzers start from tests/corpus/frames, one conversation a file, and change what is there.
"""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import get_args

import pytest
from handoff_nodes import IDENTITY, LONG_S, Node, Speaker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repository import TESTS

from kvkit.handoff.protocol.messages import (
    MAX_BODY_BYTES,
    AnyMessage,
    Data,
    MessageError,
    Proof,
    decode,
    encode,
)
from kvkit.handoff.transport.channel import HEADER, MAX_FIRST_BODY_BYTES, Channel, ChannelError
from kvkit.handoff.transport.link import Link
from kvkit.handoff.transport.stream import Stream
from kvkit.handoff.transport.unix import LocalChannel
from kvkit.lab.testbed.waiting import wait_for
from kvkit.tiers.testing.contract import SLOT_BYTES

SEEDS = {path.name: path.read_bytes() for path in sorted((TESTS / "corpus/frames").iterdir())}
FIRST_BYTES = 64 << 10
"""Memory that a channel may take for a peer that has proved nothing."""
TRUSTED_BYTES = 2 * MAX_BODY_BYTES
"""And for one frame of a peer that has: it may announce the largest, and its body is copied once."""
EXPANSION = 64
"""Memory for a message, over the bytes of its body."""
bounded = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def strange(draw: st.DrawFn) -> bytes:
    """One or two seeds with a few changes, or noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    seeds = st.sampled_from(list(SEEDS.values()))
    data = bytearray(draw(seeds) + draw(st.just(b"") | seeds))
    places = st.integers(0, min(len(data), 64)) | st.integers(0, len(data))
    for at, gone, new in draw(
        st.lists(st.tuples(places, st.integers(0, 8), st.binary(max_size=8)), max_size=4)
    ):
        data[at : at + gone] = new
    return bytes(data)


@contextmanager
def memory_of_at_most(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak <= most, f"{peak} bytes, want at most {most}"


def place(body: bytes) -> memoryview | None:
    """As an endpoint does: a slot for a record, nothing for anything else."""
    try:
        message = decode(body)
    except MessageError:
        return None
    small = isinstance(message, Data) and message.size <= SLOT_BYTES
    return memoryview(bytearray(message.size)) if small else None


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("local", [False, True])
@bounded
@given(strange())
def test_a_channel_gives_frames_or_its_error(local: bool, trusted: bool, data: bytes) -> None:
    theirs, ours = socket.socketpair()
    with theirs, memory_of_at_most(TRUSTED_BYTES if trusted else FIRST_BYTES):
        channel: Channel
        if local:
            channel = LocalChannel(ours, LONG_S, takes_arena=True)
        else:
            channel = Channel(Stream(ours), peer="a stranger", timeout_s=LONG_S)
        channel.trusted = trusted
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(ChannelError):
            while True:
                body = channel.receive(place, LONG_S)
                assert len(body) <= (MAX_BODY_BYTES if trusted else MAX_FIRST_BODY_BYTES)
        assert not channel.one_sided
        channel.close()


@bounded
@given(strange())
def test_a_body_is_a_message_or_an_error(data: bytes) -> None:
    for body in (data, data[HEADER.size :]):
        with memory_of_at_most(FIRST_BYTES + EXPANSION * len(body)), suppress(MessageError):
            message = decode(body)
            assert decode(encode(message)) == message


class NullClient:
    """What is done with a peer that must not get in."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def handle_connected(self, link: Link) -> None:
        raise AssertionError("it was let in")

    def handle_message(self, link: Link, message: AnyMessage) -> None:
        raise AssertionError(f"{message} was heard")

    def payload_target(self, link: Link, data: Data) -> None:
        raise AssertionError(f"{data} was to be placed")

    def handle_ended(self, link: Link, error: BaseException) -> None:
        assert isinstance(error, ChannelError), error
        self.over.set()


@settings(bounded, max_examples=100)
@given(strange())
def test_who_does_not_know_the_secret_does_not_get_in(data: bytes) -> None:
    theirs, ours = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        channel = Channel(Stream(ours), peer="a stranger", timeout_s=LONG_S)
        nobody = NullClient()
        link = Link(lambda: channel, "server", IDENTITY, nobody, handshake_s=LONG_S)
        assert nobody.over.wait(LONG_S)
        link.join(LONG_S)
        assert link.peer is None


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"))
    yield node
    node.close()


@settings(bounded, max_examples=100)
@given(data=strange())
def test_whatever_a_known_peer_says_no_slot_is_lost(node: Node, data: bytes) -> None:
    speaker = Speaker(node.tcp)
    assert isinstance(speaker.hello(), Proof)
    plain = speaker.socket
    with suppress(OSError):  # cut off before all is said
        plain.sendall(data)
        plain.shutdown(socket.SHUT_WR)
    speaker.hear_all()
    speaker.close()
    for transfer in node.receiver.transfers():  # what it committed stays until it is used
        node.receiver.release(transfer)
    wait_for(lambda: node.receiver.arena.free == node.receiver.arena.slots)
    node.receiver.check_integrity()


def test_the_corpus_has_every_message() -> None:
    found = set()
    for data in SEEDS.values():
        while len(data) >= HEADER.size:
            body_bytes, payload_bytes = HEADER.unpack_from(data)
            body, data = data[HEADER.size :][:body_bytes], data[HEADER.size + body_bytes + payload_bytes :]
            with suppress(MessageError):
                found.add(type(decode(body)))
    assert found == set(get_args(AnyMessage))
