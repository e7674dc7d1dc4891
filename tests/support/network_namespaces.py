"""Network namespaces as hosts, and a slow link to one: root and iproute2; OSError says what lacks."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address, IPv4Network
from typing import TypeVar

from kvkit.tiers.testing.contract import DEADLINE_S

T = TypeVar("T")
NEW_NETWORK = 0x40000000
_TUN, _SET_INTERFACE, _RAW_IP = "/dev/net/tun", 0x400454CA, 0x1001


class Host:
    """A network namespace, which ends with its last socket; what is called in it runs in one thread.

    Attributes:
        network: the namespace's file.
        within: what begins a command that is to run there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._thread = ThreadPoolExecutor(1)
        self.namespace = self.call(_leave)
        self.network = f"/proc/{os.getpid()}/fd/{self.namespace}"
        self.within = ("nsenter", f"--net={self.network}")
        self.run("ip", "link", "set", "lo", "up")

    def call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result(DEADLINE_S)

    def run(self, *command: str) -> None:
        self.call(lambda: _run(*command))

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self.namespace)


class Link:
    """A link between this host and another, carried by a thread, as few kernels have netem.

    Every 200th packet is lost; the others take 5 ms at 200 Mbit/s, either way. Its devices end with it.

    Args:
        address: of its near end; the far one's is the host's.
    """

    BYTES_PER_S = 25e6
    DELAY_S = 0.005
    LOST = 200
    QUEUE_S = 0.05
    """What would wait longer than this to get on its way is lost, too."""

    def __init__(self, address: str, host: Host) -> None:
        self.lost = 0
        self._opened: list[int] = []
        try:
            self._add_end(_run, lambda function: function(), address, host.address)
            self._add_end(host.run, host.call, host.address, address)
        except BaseException:
            self._close_all()
            raise
        self._stopped, self._stop = os.pipe()
        self._opened += [self._stopped]
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop)
        self._thread.join()
        self._close_all()

    def _add_end(
        self, run: Callable[..., None], call: Callable[[Callable[[], str]], str], address: str, peer: str
    ) -> None:
        name = call(self._open)
        run("ip", "address", "add", address, "peer", peer, "dev", name)
        run("ip", "link", "set", name, "up")

    def _open(self) -> str:
        """A new device of the calling thread's host; its name."""
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        self._opened.append(device)
        told = fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", b"kvkit%d", _RAW_IP))
        return told[:16].rstrip(b"\0").decode()

    def _close_all(self) -> None:
        for end in self._opened:
            os.close(end)

    def _carry(self) -> None:
        near, far, _ = self._opened
        beyond, free = {near: far, far: near}, {near: 0.0, far: 0.0}
        in_flight: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count(1)
        poll = select.poll()
        for end in self._opened:
            poll.register(end, select.POLLIN)
        while True:
            now = time.monotonic()
            wait_ms = max(0.0, in_flight[0][0] - now) * 1000 if in_flight else None
            for end, _ in poll.poll(wait_ms):
                if end == self._stopped:
                    return
                packet, number = os.read(end, 65536), next(numbers)
                start = max(time.monotonic(), free[end])
                if number % self.LOST == 0 or start - time.monotonic() > self.QUEUE_S:
                    self.lost += 1
                    continue
                free[end] = start + len(packet) / self.BYTES_PER_S
                heapq.heappush(in_flight, (free[end] + self.DELAY_S, number, beyond[end], packet))
            while in_flight and in_flight[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(in_flight)
                with suppress(OSError):  # the device's queue is full: it is lost
                    os.write(end, packet)


@contextmanager
def far_host() -> Iterator[tuple[Host, Link]]:
    """A host behind a slow link.

    Raises:
        OSError: none can be made here.
    """
    # of those that are set aside for tests of networks (RFC 2544), by process
    near, far = IPv4Network((int(IPv4Address("198.18.0.0")) + 4 * (os.getpid() % (1 << 15)), 30)).hosts()
    with ExitStack() as stack:
        host = Host(str(far))
        stack.callback(host.close)
        link = Link(str(near), host)
        stack.callback(link.close)
        yield host, link


def _leave() -> int:
    """Take the calling thread into a new namespace; its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network namespace")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
