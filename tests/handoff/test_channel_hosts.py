"""TCP channels between two hosts work over a slow link and report a cut one (network namespaces)."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from channels import DEADLINE_S, fill, nowhere, pattern
from network_namespaces import Host

from kvkit.handoff.transport.addresses import connect, listen
from kvkit.handoff.transport.channel import Channel, ChannelClosed, ChannelError, ChannelTimeout, Listener
from kvkit.lab.testbed.waiting import wait_for

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
