"""A channel reports the death or stop of the process at its other end, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from channels import DEADLINE_S, SHORT_S, SLOT_BYTES, fill, nowhere, open_descriptors, pattern

from kvkit.handoff.transport import nixl, unix
from kvkit.handoff.transport.addresses import connect, listen
from kvkit.handoff.transport.channel import HEADER, ChannelClosed, ChannelTimeout, FrameError
from kvkit.staging import Staging

SPAWN = multiprocessing.get_context("spawn")
WRITTEN = 3


@pytest.fixture(params=["unix", "tcp", "nixl"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "unix":
        return f"unix://{tmp_path}/run/kvkit.sock"
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
    return f"{request.param}://127.0.0.1:0"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No descriptor, and no mapping of an arena."""

    def held() -> tuple[int, int]:
        descriptors = open_descriptors()
        return descriptors, Path("/proc/self/maps").read_text().count("kvkit-staging")

    resource_tracker.ensure_running()  # a process of multiprocessing, which stays
    before = held()
    yield
    after = held()
    assert all(now <= then for now, then in zip(after, before, strict=True)), f"{before} became {after}"


class Child:
    """A process, and a pipe to it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=function, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    def close(self) -> None:
        self.kill()
        self.process.close()
        self.pipe.close()


def produce(pipe: Connection, address: str) -> None:
    """Write some records, then half of one."""
    channel = connect(address, timeout_s=DEADLINE_S)
    channel.trusted = True
    assert channel.receive(nowhere, DEADLINE_S) == b"welcome"
    source = Staging(SLOT_BYTES, WRITTEN)
    for slot in range(WRITTEN):
        source.buffers[slot][:] = pattern(SLOT_BYTES, slot)
        channel.send(b"%d" % slot, source.buffers[slot], slot)
    os.write(channel._stream.socket.fileno(), HEADER.pack(4, SLOT_BYTES) + b"half" + bytes(10))
    signal.pause()


def test_a_producer_that_is_killed(address: str) -> None:
    """What came whole stays; the rest is an error at once."""
    listener = listen(address, timeout_s=DEADLINE_S)
    child = Child(produce, listener.address)
    channel = listener.accept(DEADLINE_S)
    channel.trusted = True
    arena = Staging(SLOT_BYTES, WRITTEN + 1, shared=True)
    channel.share(arena)
    channel.send(b"welcome")

    def place(body: bytes) -> memoryview:
        if body == b"half":
            child.kill()
            return arena.buffers[WRITTEN]
        assert not isinstance(channel, unix.LocalChannel | nixl.NixlChannel)
        return arena.buffers[int(body)]

    for slot in range(WRITTEN):
        assert channel.receive(place, DEADLINE_S) == b"%d" % slot
    with pytest.raises(FrameError, match="closed within a frame"):
        channel.receive(place, DEADLINE_S)
    for slot in range(WRITTEN):
        assert arena.buffers[slot] == pattern(SLOT_BYTES, slot)
    for thing in (channel, listener, arena, child):
        thing.close()


def consume(pipe: Connection, address: str) -> None:
    """Offer an arena, then receive one frame and no more."""
    listener = listen(address, timeout_s=DEADLINE_S)
    pipe.send(listener.address)
    channel = listener.accept(DEADLINE_S)
    channel.trusted = True
    arena = Staging(SLOT_BYTES, 2, shared=True)
    channel.share(arena)
    channel.send(b"welcome")
    channel.receive(lambda body: arena.buffers[0], DEADLINE_S)
    pipe.send(bytes(arena.buffers[0]))
    signal.pause()


def test_a_consumer_that_is_killed(address: str) -> None:
    """Both who sends and who waits for its answer hear of it; the memory that is mapped stays."""
    child = Child(consume, address)
    where = child.pipe.recv()
    channel = connect(where, timeout_s=DEADLINE_S)
    channel.trusted = True
    assert channel.receive(nowhere, DEADLINE_S) == b"welcome"
    source = Staging(SLOT_BYTES, 1)
    source.buffers[0][:] = pattern(SLOT_BYTES)
    channel.send(b"first", source.buffers[0], 0)
    assert child.pipe.recv() == pattern(SLOT_BYTES)
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(channel.receive, nowhere, DEADLINE_S)
        child.kill()
        with pytest.raises(ChannelClosed, match="closed the channel or is gone"):
            answer.result(DEADLINE_S)
    with pytest.raises(ChannelClosed):
        channel.send(b"second", source.buffers[0], 1)
    channel.close()
    source.close()
    listen(where, timeout_s=DEADLINE_S).close()  # in its place
    child.close()


def test_a_consumer_that_hangs(address: str) -> None:
    child = Child(consume, address)
    channel = connect(child.pipe.recv(), timeout_s=SHORT_S)
    channel.trusted = True
    assert channel.receive(nowhere, DEADLINE_S) == b"welcome"
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(ChannelTimeout, match=f"within {SHORT_S} s"):
        fill(channel)
    channel.close()
    child.close()
