"""The contract of a transport: frames between two endpoints, and payloads that go straight into slots.

A frame is a body, which `kvkit.handoff.protocol.messages` encodes, and at most one payload, a record. On the
wire: u32 body bytes, u32 payload bytes (both little endian), body, payload. `addresses` opens channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kvkit.staging import Staging

MAX_FIRST_BODY_BYTES = 1 << 10
"""The largest body of a frame from a peer that has not proved itself."""

Sink = Callable[[bytes], memoryview | None]
"""Where the payload that follows this body goes: a view of just its size, or None to drop it."""


class ChannelError(OSError):
    """A channel failed. It is shut down and of no further use."""


class ChannelClosed(ChannelError):
    """The peer closed the channel or is gone, or this side shut it down."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A frame was not through before its deadline."""


class FrameError(ChannelError):
    """The peer sent what is no frame: too large, cut short, or not what its body says."""


class ChannelIdle(TimeoutError):
    """No frame began. Nothing is lost: the channel can be used on."""


class Channel(ABC):
    """A connection to one peer. One thread may send while another receives.

    Attributes:
        peer: the other side, for messages.
        timeout_s: how long one frame may take, once it has begun, in either direction.
        one_sided: whether this side can write into the peer's slots, for it shared its arena and the
            transport can do so. Payloads then do not follow their bodies.
        trusted: whether the peer has proved itself; set by who checked that. Until then a frame with a body
            of over `MAX_FIRST_BODY_BYTES`, a payload or an arena is a `FrameError`.
    """

    peer: str
    timeout_s: float
    one_sided: bool = False
    trusted: bool = False

    @abstractmethod
    def send(
        self, body: bytes, payload: memoryview | None = None, slot: int | None = None, *, more: bool = False
    ) -> None:
        """Send a frame; a payload is copied or sent when this returns.

        Args:
            payload: bytes to go with the body, C-contiguous.
            slot: the slot of the peer's arena that is meant for the payload. It is written there before the
                body is sent, where the channel is `one_sided`; elsewhere it follows the body.
            more: another frame comes at once, so that this one may wait for it, or for `flush`: each frame
                that travels alone wakes the peer.

        Raises:
            ValueError: the body is larger than `MAX_BODY_BYTES`, the payload than the peer's slots, or
                there is no such slot. The channel can be used on.
            ChannelError: the frame could not be sent.
        """

    @abstractmethod
    def flush(self) -> None:
        """Send what waits for more.

        Raises:
            ChannelError: it could not be sent.
        """

    @abstractmethod
    def receive(self, place: Sink, wait_s: float) -> bytes:
        """The body of the next frame, its payload received into what `place` says.

        Raises:
            ChannelIdle: no frame began within `wait_s` seconds.
            ChannelError: no whole frame came. (Frames that came before a failed `send` are still received.)
        """

    @abstractmethod
    def share(self, arena: Staging) -> bool:
        """Let a peer that is trusted write into the slots of `arena`; once. Whether the transport can do so.

        For the side that listens: the other takes an arena, and its channel is `one_sided` before its
        `receive` returns the next frame.

        Raises:
            ValueError: the transport can write into slots, but not into these.
            ChannelError: it could not be sent.
        """

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor that is readable when a frame has come."""

    @abstractmethod
    def shutdown(self) -> None:
        """End both directions at once: who sends or receives, here and there, gets `ChannelClosed`."""

    @abstractmethod
    def close(self) -> None:
        """Shut down and release the connection. Not to be called inside `place`."""


class Listener(ABC):
    """A place where peers connect.

    Attributes:
        address: what peers connect to; with the port that was found, if 0 was asked for.
    """

    address: str

    @abstractmethod
    def accept(self, wait_s: float) -> Channel:
        """The channel of the next peer that connects. Nothing has been read from it.

        Raises:
            ChannelIdle: none came within `wait_s` seconds.
            ChannelClosed: `close` was called.
        """

    @abstractmethod
    def close(self) -> None:
        """Refuse further peers and wake `accept`; channels stay."""
