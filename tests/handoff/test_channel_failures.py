"""A channel reports the end of the process, link or host at its other end, and leaves nothing behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from channels import DEADLINE_S, SHORT_S, SLOT_BYTES, fill, nowhere, open_descriptors, pattern
from network_namespaces import Host

from kvkit.handoff.transport import nixl, unix
from kvkit.handoff.transport.addresses import connect, listen
from kvkit.handoff.transport.channel import (
    HEADER,
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelTimeout,
    FrameError,
    Listener,
)
from kvkit.lab.testbed.waiting import wait_for
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


TIMEOUT_S = 1.0
UNUSED_PORT = 9


def is_refused(address: str) -> bool:
    """Whether the host there says that nobody listens: packets go both ways."""
    with socket.socket() as asking:
        asking.settimeout(DEADLINE_S / 2)
        return asking.connect_ex((address, UNUSED_PORT)) == errno.ECONNREFUSED


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two that are linked at 400 Mbit/s. It takes root and iproute2."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("there is no ip or no tc: apt-get install iproute2")
    try:
        pair = Host("10.0.0.1"), Host("10.0.0.2")
        other = f"/proc/{os.getpid()}/fd/{pair[1].namespace}"
        pair[0].run("ip", "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", other)
        for host in pair:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "link0")
            host.run("ip", "link", "set", "link0", "up")
            shape = ("rate", "400mbit", "burst", "256kb", "latency", "100ms")
            host.run("tc", "qdisc", "add", "dev", "link0", "root", "tbf", *shape)
        # whatever is sent before the kernel has both ends ready is lost, and sent again only after a second
        wait_for(lambda: pair[1].call(lambda: is_refused(pair[0].address)))
    except OSError as error:
        pytest.skip(f"hosts cannot be made here: {error}")
    yield pair
    for host in pair:
        host.close()


@pytest.fixture
def ends(hosts: tuple[Host, Host]) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel: of the first host, which listens, and of the second."""
    here, there = hosts
    listener: Listener = here.call(lambda: listen(f"tcp://{here.address}:0", timeout_s=TIMEOUT_S))
    client = there.call(lambda: connect(listener.address, timeout_s=TIMEOUT_S))
    server = listener.accept(DEADLINE_S)
    server.trusted = client.trusted = True
    yield server, client
    for end in (server, client, listener):
        end.close()


def test_records_over_a_slow_link(ends: tuple[Channel, Channel]) -> None:
    server, client = ends
    sizes = [1 << 20, 3_000_001, 100]
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(lambda: [client.send(b"%d" % n, pattern(n, n)) for n in sizes])
        for size in sizes:
            target = bytearray(size)
            assert server.receive(lambda _, to=target: memoryview(to), DEADLINE_S) == b"%d" % size
            assert target == pattern(size, size)
        sending.result(DEADLINE_S)


def test_a_link_that_is_cut(hosts: tuple[Host, Host], ends: tuple[Channel, Channel]) -> None:
    """Nobody says that it is: who sends hears of it at its deadline, who waits by keepalive."""
    server, client = ends
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(server.receive, nowhere, DEADLINE_S)
        hosts[1].run("ip", "link", "set", "link0", "down")
        with pytest.raises((ChannelTimeout, ChannelClosed)):
            fill(client)
        with pytest.raises(ChannelClosed, match="is gone"):
            waiting.result(DEADLINE_S)


def test_a_host_that_does_not_answer(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    here.run("ip", "link", "set", "link0", "down")
    with pytest.raises(ChannelError):
        there.call(lambda: connect(f"tcp://{here.address}:{UNUSED_PORT}", timeout_s=TIMEOUT_S))


def test_a_port_where_nobody_listens(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with pytest.raises(ChannelClosed, match=r"tcp://10.0.0.1:9 cannot be reached: Connection refused"):
        there.call(lambda: connect(f"tcp://{here.address}:{UNUSED_PORT}", timeout_s=TIMEOUT_S))
