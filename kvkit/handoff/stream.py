"""Frames over a stream socket: what the transports for one host and for several have in common."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvkit.handoff.channel import (
    MAX_BODY_BYTES,
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelIdle,
    ChannelTimeout,
    FrameError,
    Listener,
    Place,
)
from kvkit.staging import Staging

HEADER = struct.Struct("<II")
_MAX_PAYLOAD_BYTES = 2**32 - 1
_DROPPED_BYTES = 64 << 10
SHORTEST_S = 1e-6  # the kernel takes 0 for no limit


def limit(sock: socket.socket, option: int, left_s: float) -> None:
    """Have the next call in one direction, SO_SNDTIMEO or SO_RCVTIMEO, take `left_s` seconds at most.

    Raises:
        TimeoutError: they are over.
    """
    if left_s <= 0:
        raise TimeoutError
    left_us = int(max(left_s, SHORTEST_S) * 1e6)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(left_us, 1_000_000)))


class Stream:
    """Bytes over a connected socket, with deadlines that the kernel keeps: one call moves a whole record.

    (A timeout of Python's sockets costs a poll for each piece, and is the same for both directions.)
    Deadlines are moments of `time.monotonic`. Every method raises OSError where the socket does: TimeoutError
    when the deadline passed, ConnectionError when the peer is gone.
    """

    piece_bytes = 1 << 30
    """The most to give the kernel at once: AF_UNIX starts the time anew with each of its buffers."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.socket = sock

    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all of `parts`."""
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        while left:
            piece, size = [], 0
            for part in left:
                piece.append(part[: self.piece_bytes - size])
                size += len(piece[-1])
                if size == self.piece_bytes:
                    break
            limit(self.socket, socket.SO_SNDTIMEO, deadline - time.monotonic())
            try:
                sent = self.socket.sendmsg(piece)
            except BlockingIOError:
                raise TimeoutError from None
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def receive(self, buffer: memoryview, deadline: float) -> None:
        """Fill `buffer`.

        Raises:
            EOFError: the peer closed before.
        """
        while len(buffer):
            limit(self.socket, socket.SO_RCVTIMEO, deadline - time.monotonic())
            try:
                count = self.socket.recv_into(buffer, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if count == 0:
                raise EOFError
            buffer = buffer[count:]

    def receive_first(self, buffer: memoryview, wait_s: float) -> int:
        """Some bytes of a frame, as soon as there are any; how many, 0 at the end of the stream."""
        limit(self.socket, socket.SO_RCVTIMEO, max(wait_s, SHORTEST_S))
        try:
            return self.socket.recv_into(buffer)
        except BlockingIOError:
            raise TimeoutError from None


class StreamChannel(Channel):
    """A channel over a stream. Payloads follow their bodies."""

    def __init__(self, stream: Stream, *, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self._stream = stream
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._ended = False
        self._out_of_step = False

    def send(self, body: bytes, payload: memoryview | None = None, slot: int | None = None) -> None:
        size = 0 if payload is None else payload.nbytes
        if len(body) > MAX_BODY_BYTES or size > _MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a body of {len(body)} bytes with a payload of {size}: "
                f"want at most {MAX_BODY_BYTES} and {_MAX_PAYLOAD_BYTES}"
            )
        head = HEADER.pack(len(body), size) + body
        with self._frame() as deadline:
            self._stream.send([head] if payload is None else [head, payload], deadline)

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

    def receive(self, place: Place, wait_s: float) -> bytes:
        with self._receiving:
            begun = False
            if self._out_of_step:
                raise ChannelClosed(f"{self.peer}: the channel was shut down")
            try:
                head = memoryview(bytearray(HEADER.size))
                try:
                    count = self._stream.receive_first(head, wait_s)
                except TimeoutError:
                    raise ChannelIdle(f"{self.peer}: no frame began in time") from None
                if count == 0:
                    raise EOFError
                begun = True
                deadline = time.monotonic() + self.timeout_s
                self._stream.receive(head[count:], deadline)
                body_bytes, payload_bytes = HEADER.unpack(head)
                return self._receive_rest(body_bytes, payload_bytes, place, deadline)
            except ChannelIdle:
                raise
            except (OSError, EOFError) as error:
                self._out_of_step = True
                raise self._failed(error, cut=begun) from error
            except BaseException:  # of `place`
                self._out_of_step = True
                self.shutdown()
                raise

    def _receive_rest(self, body_bytes: int, payload_bytes: int, place: Place, deadline: float) -> bytes:
        if body_bytes > MAX_BODY_BYTES:
            raise FrameError(f"{self.peer}: a body of {body_bytes} bytes, want at most {MAX_BODY_BYTES}")
        buffer = bytearray(body_bytes)
        self._stream.receive(memoryview(buffer), deadline)
        body = bytes(buffer)
        if payload_bytes:
            target = place(body)
            if target is None:
                self._drop(payload_bytes, deadline)
            elif target.nbytes == payload_bytes:
                self._stream.receive(target, deadline)
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
        here, self._ended = self._ended, True
        self.shutdown()
        if isinstance(error, ChannelError):
            return error
        if here:
            return ChannelClosed(f"{self.peer}: the channel was shut down")
        if isinstance(error, TimeoutError):
            return ChannelTimeout(f"{self.peer}: a frame was not through within {self.timeout_s} s")
        if isinstance(error, EOFError) and cut:
            return FrameError(f"{self.peer} closed within a frame")
        if isinstance(error, EOFError | ConnectionError):
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
        sock.setblocking(True)

    def accept(self, wait_s: float) -> Channel:
        with self._accepting:
            try:
                limit(self._socket, socket.SO_RCVTIMEO, max(wait_s, SHORTEST_S))
                connection, _ = self._socket.accept()  # shutdown wakes it; it does not wake a poll on AF_UNIX
            except BlockingIOError:
                raise ChannelIdle(f"{self.address}: no peer within {wait_s} s") from None
            except OSError as error:
                raise ChannelClosed(f"{self.address}: {error}") from error
        return self._channel(connection)

    def close(self) -> None:
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
