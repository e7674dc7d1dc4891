"""Frames over a stream socket: what the transports for one host and for several have in common."""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvkit.handoff.protocol.messages import MAX_BODY_BYTES
from kvkit.handoff.transport.channel import (
    MAX_FIRST_BODY_BYTES,
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelIdle,
    ChannelTimeout,
    FrameError,
    Listener,
    Sink,
)
from kvkit.staging import Staging

log = logging.getLogger(__name__)

HEADER = struct.Struct("<II")
_TIMEVAL = struct.Struct("@ll")
_AHEAD_BYTES = 4096
SHARED = 2**32 - 1
"""Instead of a payload's size: the frame shares an arena, in the way of its transport."""
_MAX_PAYLOAD_BYTES = SHARED - 1
_HELD_FRAMES = 16
_PAUSE_S = 0.1
_DROPPED_BYTES = 64 << 10
SHORTEST_S = 1e-6  # the kernel takes 0 for no limit


class Stream:
    """Bytes over a connected socket: a small frame costs one call each way, and one call receives a record.

    Deadlines are moments of `time.monotonic`. When receiving, the kernel keeps them: Python's own timeouts
    cost a poll for each piece. Every method raises OSError where the socket does: TimeoutError when the
    deadline passed, ConnectionError when the peer is gone.
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
        left = list(buffers)
        while left:
            try:
                sent = self.socket.sendmsg(left, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            while sent and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if not left:
                return
            left[0] = memoryview(left[0])[sent:]
            self._wait_for_room(deadline)

    def receive(self, buffer: memoryview, deadline: float) -> None:
        """Fill `buffer`.

        Raises:
            EOFError: the peer closed before.
        """
        buffer = self.take_ahead(buffer)
        while len(buffer):
            self.limit(deadline - time.monotonic())
            try:
                count = self.socket.recv_into(buffer, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if count == 0:
                raise EOFError
            buffer = buffer[count:]

    def take(self, count: int, deadline: float) -> bytes:
        """The next `count` bytes; raises as `receive`."""
        if count <= len(self._ahead):
            taken = bytes(self._ahead[:count])
            self._ahead = self._ahead[count:]
            return taken
        buffer = bytearray(count)
        self.receive(memoryview(buffer), deadline)
        return bytes(buffer)

    def wait(self, wait_s: float) -> bool:
        """Wait until there is something to receive; False at the end of the stream. Reads a little ahead."""
        if not len(self._ahead):
            self._ahead = self._buffer[: self.read_ahead(self._buffer, max(wait_s, SHORTEST_S))]
        return len(self._ahead) > 0

    def read_ahead(self, buffer: memoryview, wait_s: float) -> int:
        """Some bytes, as soon as there are any; how many, 0 at the end."""
        self.limit(wait_s)
        try:
            return self.socket.recv_into(buffer)
        except BlockingIOError:
            raise TimeoutError from None

    def take_ahead(self, buffer: memoryview) -> memoryview:
        """Fill the front of `buffer` with what was read ahead; the rest of it."""
        count = min(len(buffer), len(self._ahead))
        buffer[:count], self._ahead = self._ahead[:count], self._ahead[count:]
        return buffer[count:]

    def limit(self, left_s: float) -> None:
        """Have the next call that receives take so many seconds at most."""
        set_timeout(self.socket, socket.SO_RCVTIMEO, left_s)

    def _wait_for_room(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not self._room.poll(left_s * 1000):
            raise TimeoutError


def set_timeout(sock: socket.socket, option: int, left_s: float) -> None:
    """Have the kernel end calls after so many seconds; `option` says which: SO_SNDTIMEO or SO_RCVTIMEO.

    Raises:
        TimeoutError: they are over.
    """
    if left_s <= 0:
        raise TimeoutError
    left_us = int(max(left_s, SHORTEST_S) * 1e6)
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))


class StreamChannel(Channel):
    """A channel over a stream. Payloads follow their bodies."""

    def __init__(self, stream: Stream, *, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self._stream = stream
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._held: list[bytes] = []
        self._ended = False
        self._out_of_step = False

    def send(
        self, body: bytes, payload: memoryview | None = None, slot: int | None = None, *, more: bool = False
    ) -> None:
        size = 0 if payload is None else payload.nbytes
        if len(body) > MAX_BODY_BYTES or size > _MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a body of {len(body)} bytes with a payload of {size}: "
                f"want at most {MAX_BODY_BYTES} and {_MAX_PAYLOAD_BYTES}"
            )
        buffers = [payload.cast("B")] if payload is not None and size else []
        with self._frame() as deadline:
            self._held.append(HEADER.pack(len(body), size) + body)
            if buffers or not more or len(self._held) >= _HELD_FRAMES:
                self._send_held(deadline, *buffers)

    def flush(self) -> None:
        if self._held:
            with self._frame() as deadline:
                self._send_held(deadline)

    def _send_held(self, deadline: float, *buffers: memoryview) -> None:
        held = b"".join(self._held)
        self._held.clear()
        self._stream.send([held, *buffers] if held else buffers, deadline)

    @contextmanager
    def _frame(self) -> Iterator[float]:
        """The right to send one frame, and its deadline; what goes wrong ends the channel."""
        deadline = time.monotonic() + self.timeout_s
        if not self._sending.acquire(timeout=self.timeout_s):
            raise self._failed(TimeoutError())
        try:
            yield deadline
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._sending.release()

    def receive(self, place: Sink, wait_s: float) -> bytes:
        until = time.monotonic() + wait_s
        with self._receiving:
            while True:
                body = self._receive(place, until)
                if body is not None:
                    return body

    def _receive(self, place: Sink, until: float) -> bytes | None:
        """The body of the next frame; None if it is not for the protocol."""
        if self._out_of_step:
            raise ChannelClosed(f"{self.peer}: the channel was shut down")
        begun = False
        try:
            try:
                begun = self._stream.wait(until - time.monotonic())
            except TimeoutError as error:
                if error.errno is not None:
                    raise
                raise ChannelIdle(f"{self.peer}: no frame began in time") from None
            if not begun:
                raise EOFError
            deadline = time.monotonic() + self.timeout_s
            body_bytes, payload_bytes = HEADER.unpack(self._stream.take(HEADER.size, deadline))
            most = MAX_BODY_BYTES if self.trusted else MAX_FIRST_BODY_BYTES
            if body_bytes > most:
                raise FrameError(f"{self.peer}: a body of {body_bytes} bytes, want at most {most}")
            if payload_bytes and not self.trusted:
                raise FrameError(f"{self.peer}: a payload before it proved itself")
            body = self._stream.take(body_bytes, deadline)
            return self._complete(body, payload_bytes, place, deadline)
        except ChannelIdle:
            raise
        except (OSError, EOFError) as error:
            self._out_of_step = True
            raise self._failed(error, cut=begun) from error
        except BaseException:  # of `place`
            self._out_of_step = True
            self.shutdown()
            raise

    def _complete(self, body: bytes, payload_bytes: int, place: Sink, deadline: float) -> bytes | None:
        """Receive the payload."""
        if payload_bytes:
            target = place(body)
            if target is None:
                self._drop(payload_bytes, deadline)
            elif target.nbytes == payload_bytes:
                self._stream.receive(target.cast("B"), deadline)
            else:
                raise FrameError(
                    f"{self.peer}: a payload of {payload_bytes} bytes where {target.nbytes} were announced"
                )
        return body

    def _drop(self, size: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(size, _DROPPED_BYTES)))
        while size:
            piece = scratch[:size]
            self._stream.receive(piece, deadline)
            size -= len(piece)

    def _failed(self, error: OSError | EOFError, cut: bool = False) -> ChannelError:
        """Shut down, and say what happened."""
        here = self._ended
        self.shutdown()
        if isinstance(error, ChannelError):
            return error
        if here:
            return ChannelClosed(f"{self.peer}: the channel was shut down")
        if isinstance(error, TimeoutError) and error.errno is None:
            return ChannelTimeout(f"{self.peer}: a frame was not through within {self.timeout_s} s")
        if isinstance(error, EOFError) and cut:
            return FrameError(f"{self.peer} closed within a frame")
        if isinstance(error, EOFError | ConnectionError | TimeoutError):  # with a number: the kernel's
            return ChannelClosed(f"{self.peer} closed the channel or is gone")
        return ChannelError(f"{self.peer}: {error}")

    def share(self, arena: Staging) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.socket.fileno()

    def shutdown(self) -> None:
        self._ended = True
        with suppress(OSError):  # the peer was faster
            self._stream.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        with self._sending, self._receiving:  # a descriptor in use must not become another file's
            self._stream.socket.close()


class StreamListener(Listener):
    """A listening socket."""

    def __init__(self, sock: socket.socket, address: str, timeout_s: float) -> None:
        self.address = address
        self._socket = sock
        self._timeout_s = timeout_s
        self._accepting = threading.Lock()
        self._closed = threading.Event()
        sock.setblocking(True)

    def accept(self, wait_s: float) -> Channel:
        with self._accepting:
            try:
                set_timeout(self._socket, socket.SO_RCVTIMEO, max(wait_s, SHORTEST_S))
                connection, _ = self._socket.accept()  # shutdown wakes it; it does not wake a poll on AF_UNIX
            except BlockingIOError:
                raise ChannelIdle(f"{self.address}: no peer within {wait_s} s") from None
            except OSError as error:
                if self._closed.wait(_PAUSE_S):
                    raise ChannelClosed(f"{self.address}: no longer listened at") from error
                log.warning("%s: a peer cannot be let in: %s", self.address, error)  # no descriptors, mostly
                raise ChannelIdle(f"{self.address}: {error}") from error
        try:
            return self._channel(connection)
        except OSError as error:
            connection.close()
            raise ChannelIdle(f"{self.address}: the peer is not let in, or left at once: {error}") from error

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._accepting:
            self._socket.close()

    def _channel(self, connection: socket.socket) -> Channel:
        """The channel of one that connected."""
        raise NotImplementedError


@contextmanager
def connecting(address: str) -> Iterator[None]:
    """Say which address it is that cannot be reached."""
    try:
        yield
    except ChannelError:
        raise
    except TimeoutError as error:
        raise ChannelTimeout(f"{address} did not answer in time") from error
    except OSError as error:
        raise ChannelClosed(f"{address} cannot be reached: {error.strerror or error}") from error
