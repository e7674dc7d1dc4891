"""Byte stream over a connected socket, with a deadline for each call. A channel's frames go through it."""

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
    `time.monotonic`. The kernel enforces those of receiving, since Python's own timeouts add a poll to each
    call. Every method raises the OSError of its socket: TimeoutError if the deadline passed, ConnectionError
    if the peer is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.socket = sock
        self._read_ahead = memoryview(b"")
        self._buffer = memoryview(bytearray(_AHEAD_BYTES))
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all of `buffers`, none of which is empty."""
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
            EOFError: the stream ended before `buffer` was full.
        """
        count = min(len(buffer), len(self._read_ahead))
        buffer[:count], self._read_ahead = self._read_ahead[:count], self._read_ahead[count:]
        while len(buffer := buffer[count:]):
            count = self.read(buffer, deadline - time.monotonic(), socket.MSG_WAITALL)
            if count == 0:
                raise EOFError

    def take(self, count: int, deadline: float) -> bytes:
        """Return the next `count` bytes; raises as `receive`."""
        if count <= len(self._read_ahead):
            data = bytes(self._read_ahead[:count])
            self._read_ahead = self._read_ahead[count:]
            return data
        buffer = bytearray(count)
        self.receive(memoryview(buffer), deadline)
        return bytes(buffer)

    def wait(self, wait_s: float) -> bool:
        """Wait until data arrives, and read a little ahead; return False at the end of the stream."""
        if not len(self._read_ahead):
            self._read_ahead = self._buffer[: self.read(self._buffer, max(wait_s, SHORTEST_S))]
        return len(self._read_ahead) > 0

    def read(self, buffer: memoryview, wait_s: float, flags: int = 0) -> int:
        """Wait for bytes and read them, with these recv flags; return their number, 0 at the end."""
        set_timeout(self.socket, socket.SO_RCVTIMEO, wait_s)
        try:
            return self.socket.recv_into(buffer, 0, flags)
        except BlockingIOError:
            raise TimeoutError from None

    def _wait_for_room(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not self._writable.poll(remaining_s * 1000):
            raise TimeoutError


def set_timeout(sock: socket.socket, option: int, timeout_s: float) -> None:
    """Limit the socket's calls to `timeout_s` seconds. `option`: SO_SNDTIMEO or SO_RCVTIMEO.

    Raises:
        TimeoutError: `timeout_s` is not above 0.
    """
    if timeout_s <= 0:
        raise TimeoutError
    timeout_us = int(max(timeout_s, SHORTEST_S) * 1e6)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(timeout_us, 1_000_000)))
