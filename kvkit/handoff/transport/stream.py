"""Byte stream over a connected socket, with a deadline for each call; it carries frames."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence

_TIMEVAL = struct.Struct("@ll")
_AHEAD_BYTES = 4096
SHORTEST_S = 1e-6  # to the kernel, 0 means no limit


class Stream:
    """Byte stream over a connected socket.

    A small frame takes one system call on each side, and one call receives a record. Deadlines are times of
    `time.monotonic`. The kernel enforces those of receiving: Python's own timeouts cost a poll for each
    piece. Every method raises the OSError of its socket: TimeoutError if the deadline passed, ConnectionError
    if the peer is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.socket = sock
        self._ahead = memoryview(b"")
        self._buffer = memoryview(bytearray(_AHEAD_BYTES))
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all of `buffers`, none of them empty."""
        unsent = list(buffers)
        while unsent:
            try:
                sent = self.socket.sendmsg(unsent, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            while sent and sent >= len(unsent[0]):
                sent -= len(unsent.pop(0))
            if not unsent:
                return
            unsent[0] = memoryview(unsent[0])[sent:]
            self._wait_for_room(deadline)

    def receive(self, buffer: memoryview, deadline: float) -> None:
        """Fill `buffer`.

        Raises:
            EOFError: the peer closed the stream before.
        """
        count = min(len(buffer), len(self._ahead))
        buffer[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        while len(buffer := buffer[count:]):
            count = self.read(buffer, deadline - time.monotonic(), socket.MSG_WAITALL)
            if count == 0:
                raise EOFError

    def take(self, count: int, deadline: float) -> bytes:
        """Return the next `count` bytes; raises as `receive`."""
        if count <= len(self._ahead):
            data = bytes(self._ahead[:count])
            self._ahead = self._ahead[count:]
            return data
        buffer = bytearray(count)
        self.receive(memoryview(buffer), deadline)
        return bytes(buffer)

    def wait(self, wait_s: float) -> bool:
        """Wait until there is data; returns False at the end of the stream. Reads a little ahead."""
        if not len(self._ahead):
            self._ahead = self._buffer[: self.read(self._buffer, max(wait_s, SHORTEST_S))]
        return len(self._ahead) > 0

    def read(self, buffer: memoryview, wait_s: float, flags: int = 0) -> int:
        """Read bytes, with these recv flags, as soon as there are any; return how many, 0 at the end."""
        set_timeout(self.socket, socket.SO_RCVTIMEO, wait_s)
        try:
            return self.socket.recv_into(buffer, 0, flags)
        except BlockingIOError:
            raise TimeoutError from None

    def _wait_for_room(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not self._room.poll(remaining_s * 1000):
            raise TimeoutError


def set_timeout(sock: socket.socket, option: int, left_s: float) -> None:
    """Make the kernel end calls after `left_s` seconds. `option`: SO_SNDTIMEO or SO_RCVTIMEO.

    Raises:
        TimeoutError: no time is left.
    """
    if left_s <= 0:
        raise TimeoutError
    left_us = int(max(left_s, SHORTEST_S) * 1e6)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))
