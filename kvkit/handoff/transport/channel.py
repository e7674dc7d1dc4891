"""Channels: frames between two endpoints over a stream socket, with payloads that go directly into slots.

A frame is a body, encoded by `kvkit.handoff.protocol.messages`, and at most one payload, a record. On the
wire: u32 body bytes, u32 payload bytes (both little endian), body, payload. `addresses` opens channels.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvkit.handoff.protocol.messages import MAX_BODY_BYTES
from kvkit.handoff.transport.stream import SHORTEST_S, Stream, set_timeout
from kvkit.staging import Lease, Staging

log = logging.getLogger(__name__)

MAX_FIRST_BODY_BYTES = 1 << 10
"""Largest body of a frame from a peer that is not authenticated yet."""

BACKLOG = 128
"""Connections that wait in the system's queue of a listener."""

HEADER = struct.Struct("<II")
SHARED = 2**32 - 1
"""Payload size of a frame that shares an arena and has no payload; each transport defines its body."""
_MAX_PAYLOAD_BYTES = SHARED - 1
_MAX_UNSENT_FRAMES = 16
_PAUSE_S = 0.1
_DROPPED_BYTES = 64 << 10

PayloadTarget = Callable[[bytes], memoryview | None]
"""Returns the memory for the payload that follows a body: a view of exactly its size, None to drop it."""


class ChannelError(OSError):
    """A channel failed. It is shut down and cannot be used any more."""


class ChannelClosed(ChannelError):
    """The peer closed the channel or cannot be reached, or this side shut the channel down."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A frame was not complete before its deadline."""


class FrameError(ChannelError):
    """The peer sent an invalid frame: too large, incomplete, or not as its body announced."""


class ChannelIdle(TimeoutError):
    """No frame began in time. The channel remains usable."""


class Channel:
    """Connection to one peer. One thread may send while another receives.

    Payloads follow their bodies. Transports that write them into the peer's slots have subclasses.

    Attributes:
        peer: description of the peer, for messages.
        timeout_s: limit for one frame once it has begun, in either direction, in seconds.
        trusted: True if the peer is authenticated; set by the handshake. Until then, receiving a body of over
            `MAX_FIRST_BODY_BYTES`, a payload or an arena is a `FrameError`.
    """

    def __init__(self, stream: Stream, *, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self.timeout_s = timeout_s
        self.trusted = False
        self._stream = stream
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._writing = threading.Lock()
        self._slots: tuple[int, int] | None = None
        self._unsent: list[bytes] = []
        self._ended = False
        self._unreadable = False

    @property
    def one_sided(self) -> bool:
        """True if this side writes into the peer's slots: the peer has shared its arena."""
        return self._slots is not None

    def send(
        self, body: bytes, payload: memoryview | None = None, slot: int | None = None, *, more: bool = False
    ) -> None:
        """Send a frame. Its payload is copied or sent when this returns.

        Args:
            payload: bytes that go with the body, C-contiguous.
            slot: slot of the peer's arena for the payload. If the channel is `one_sided`, the payload is
                written there before the body is sent; otherwise it follows the body.
            more: True if another frame follows at once. This frame may then be sent with it or by `flush`,
                since each frame that is sent alone wakes the peer.

        Raises:
            ValueError: the body is larger than `MAX_BODY_BYTES`, the payload is larger than the peer's slots,
                or there is no such slot. The channel remains usable.
            ChannelError: the frame could not be sent.
        """
        if payload is not None and slot is not None and self.one_sided and self._can_write(payload):
            self._write(slot, payload)
            payload = None
        size = 0 if payload is None else payload.nbytes
        if len(body) > MAX_BODY_BYTES or size > _MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a body of {len(body)} bytes with a payload of {size}: "
                f"want at most {MAX_BODY_BYTES} and {_MAX_PAYLOAD_BYTES}"
            )
        buffers = [payload.cast("B")] if payload is not None and size else []
        with self._frame() as deadline:
            self._unsent.append(HEADER.pack(len(body), size) + body)
            if buffers or not more or len(self._unsent) >= _MAX_UNSENT_FRAMES:
                self._send_unsent(deadline, *buffers)

    def flush(self) -> None:
        """Send the frames that were kept back for a following frame.

        Raises:
            ChannelError: they could not be sent.
        """
        if self._unsent:
            with self._frame() as deadline:
                self._send_unsent(deadline)

    def receive(self, target_of: PayloadTarget, wait_s: float) -> bytes:
        """Return the body of the next frame; its payload is received into the memory that `target_of` gives.

        Raises:
            ChannelIdle: no frame began within `wait_s` seconds.
            ChannelError: no whole frame arrived. After a failed `send`, arrived frames are returned first.
        """
        idle_deadline = time.monotonic() + wait_s
        with self._receiving:
            while True:
                body = self._receive(target_of, idle_deadline)
                if body is not None:
                    return body

    def share(self, arena: Staging) -> bool:
        """Let a trusted peer write into the slots of `arena`; return whether the transport supports it.

        Call it once, on the listening side. The peer's channel is `one_sided` before its `receive` returns
        the next frame.

        Raises:
            ValueError: the transport supports it, but not for this arena.
            ChannelError: the arena could not be sent.
        """
        return False

    def borrow_slot(self, slot: int, on_return: Callable[[], None]) -> Lease | None:
        """Borrow a slot of the peer's arena; a payload may be written there within `writing`.

        Returns None if the slot is not mapped here or is borrowed already. `on_return` is called when its
        last reference is released.
        """
        return None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Allow writing into the peer's slots within the context. Keep it short: `shutdown` waits for it.

        Raises:
            ChannelClosed: the channel was shut down.
        """
        with self._writing:
            if self._ended:
                raise ChannelClosed(f"{self.peer}: the channel was shut down")
            yield

    def shutdown(self) -> None:
        """End both directions at once: on both sides, sending and receiving raise `ChannelClosed`."""
        self._ended = True
        # after all writes into the peer's arena: the end of the stream is the sign that they have ended
        with self._writing, suppress(OSError):
            self._stream.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and release the connection. Must not be called inside `target_of`."""
        self.shutdown()
        # after all calls that use the descriptor: its number may be given to another file
        with self._sending, self._receiving, self._writing:
            self._stream.socket.close()

    def _take_arena(self, body: bytes) -> tuple[int, int]:
        """Prepare to write into the arena that `body` describes; return its slots and the bytes of each.

        Raises:
            ValueError: the arena is invalid, or this channel takes none.
        """
        raise ValueError("this channel takes none")

    def _can_write(self, payload: memoryview) -> bool:
        """Return whether `payload` can be written into the peer's slots."""
        return True

    def _copy(self, slot: int, payload: memoryview) -> None:
        """Write `payload`, which fits, to the front of a slot of the peer."""
        raise NotImplementedError

    def _write(self, slot: int, payload: memoryview) -> None:
        assert self._slots is not None
        slots, slot_bytes = self._slots
        if not 0 <= slot < slots or payload.nbytes > slot_bytes:
            raise ValueError(
                f"slot {slot}, {payload.nbytes} bytes: the peer has {slots} slots of {slot_bytes}"
            )
        try:
            with self.writing():
                self._copy(slot, payload)
        except OSError as error:
            raise self._failed(error) from error

    def _send_unsent(self, deadline: float, *buffers: memoryview) -> None:
        frames = b"".join(self._unsent)
        self._unsent.clear()
        self._stream.send([frames, *buffers] if frames else buffers, deadline)

    @contextmanager
    def _frame(self) -> Iterator[float]:
        """Allow sending one frame within the context, and yield its deadline. Errors end the channel."""
        deadline = time.monotonic() + self.timeout_s
        if not self._sending.acquire(timeout=self.timeout_s):
            raise self._failed(TimeoutError())
        try:
            yield deadline
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._sending.release()

    def _receive(self, target_of: PayloadTarget, idle_deadline: float) -> bytes | None:
        """Return the body of the next frame; None if the frame shared an arena."""
        if self._unreadable:
            raise ChannelClosed(f"{self.peer}: the channel was shut down")
        begun = False
        try:
            try:
                begun = self._stream.wait(idle_deadline - time.monotonic())
            except TimeoutError as error:
                if error.errno is not None:
                    raise
                raise ChannelIdle(f"{self.peer}: no frame began in time") from None
            if not begun:
                raise EOFError
            deadline = time.monotonic() + self.timeout_s
            body_bytes, payload_bytes = HEADER.unpack(self._stream.take(HEADER.size, deadline))
            limit = MAX_BODY_BYTES if self.trusted else MAX_FIRST_BODY_BYTES
            if body_bytes > limit:
                raise FrameError(f"{self.peer}: a body of {body_bytes} bytes, want at most {limit}")
            if payload_bytes and not self.trusted:
                raise FrameError(f"{self.peer}: a payload before it was authenticated")
            body = self._stream.take(body_bytes, deadline)
            return self._complete(body, payload_bytes, target_of, deadline)
        except ChannelIdle:
            raise
        except (OSError, EOFError) as error:
            self._unreadable = True
            raise self._failed(error, within_frame=begun) from error
        except BaseException:  # raised by `target_of`
            self._unreadable = True
            self.shutdown()
            raise

    def _complete(
        self, body: bytes, payload_bytes: int, target_of: PayloadTarget, deadline: float
    ) -> bytes | None:
        """Receive the payload, or take the shared arena; return as `_receive`."""
        if payload_bytes == SHARED:
            try:
                if self.one_sided:
                    raise ValueError("want one arena for each channel, and its sizes")
                self._slots = self._take_arena(body)
            except ValueError as error:
                raise FrameError(f"{self.peer} shares an invalid arena: {error}") from error
            return None
        if payload_bytes:
            target = target_of(body)
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

    def _failed(self, error: OSError | EOFError, within_frame: bool = False) -> ChannelError:
        """Shut down, and return the ChannelError for `error`."""
        ended_here = self._ended
        self.shutdown()
        if isinstance(error, ChannelError):
            return error
        if ended_here:
            return ChannelClosed(f"{self.peer}: the channel was shut down")
        if isinstance(error, TimeoutError) and error.errno is None:
            return ChannelTimeout(f"{self.peer}: a frame was not complete within {self.timeout_s} s")
        if isinstance(error, EOFError) and within_frame:
            return FrameError(f"{self.peer} closed within a frame")
        if isinstance(error, EOFError | ConnectionError | TimeoutError):  # with an errno: the kernel's
            return ChannelClosed(f"{self.peer} closed the channel or is gone")
        return ChannelError(f"{self.peer}: {error}")


class Listener(ABC):
    """Listening socket where peers connect.

    Attributes:
        address: address that peers connect to, with the actual port if 0 was requested.
    """

    def __init__(self, sock: socket.socket, address: str, timeout_s: float) -> None:
        self.address = address
        self._socket = sock
        self._timeout_s = timeout_s
        self._accepting = threading.Lock()
        self._closed = threading.Event()
        sock.setblocking(True)

    def accept(self, wait_s: float) -> Channel:
        """Return the channel of the next peer that connects. Reads nothing from it.

        Raises:
            ChannelIdle: no peer connected within `wait_s` seconds, or one that connected was refused.
            ChannelClosed: `close` was called.
        """
        with self._accepting:
            try:
                set_timeout(self._socket, socket.SO_RCVTIMEO, max(wait_s, SHORTEST_S))
                connection, _ = self._socket.accept()  # on AF_UNIX, shutdown wakes accept but not poll
            except BlockingIOError:
                raise ChannelIdle(f"{self.address}: no peer within {wait_s} s") from None
            except OSError as error:
                if self._closed.wait(_PAUSE_S):
                    raise ChannelClosed(f"{self.address}: the listener is closed") from error
                log.warning("%s: a peer cannot be accepted: %s", self.address, error)  # often: no descriptors
                raise ChannelIdle(f"{self.address}: {error}") from error
        try:
            return self._channel(connection)
        except OSError as error:
            connection.close()
            raise ChannelIdle(f"{self.address}: the peer is refused or has disconnected: {error}") from error

    def close(self) -> None:
        """Stop listening and wake `accept`. Open channels stay open."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._accepting:
            self._socket.close()

    @abstractmethod
    def _channel(self, connection: socket.socket) -> Channel:
        """Return the channel of a peer that connected."""


@contextmanager
def connecting(address: str) -> Iterator[None]:
    """Convert errors of a connection attempt to ChannelErrors that name the address."""
    try:
        yield
    except ChannelError:
        raise
    except TimeoutError as error:
        raise ChannelTimeout(f"{address} did not answer in time") from error
    except OSError as error:
        raise ChannelClosed(f"{address} cannot be reached: {error.strerror or error}") from error
