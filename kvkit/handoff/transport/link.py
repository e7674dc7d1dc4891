"""Connection to a peer: one thread does the handshake and then reads, another writes from a queue.

No caller waits for the peer: messages are queued. A peer that does not read is disconnected when a frame
takes too long, or when too much is queued for it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from kvkit.handoff.protocol import messages
from kvkit.handoff.protocol.messages import AnyMessage, Data, Error, Hello, MessageError, decode, encode
from kvkit.handoff.protocol.states import Unexpected
from kvkit.handoff.transport.channel import Channel, ChannelClosed, ChannelError, ChannelIdle
from kvkit.handoff.transport.handshake import Identity, Side, shake_hands
from kvkit.staging import Lease, Staging

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 << 20
"""Maximum bytes queued for a peer: the bodies of messages, and `ITEM_BYTES` for each of them."""

ITEM_BYTES = 768
"""Bytes that a queued message takes besides its body."""

_IDLE_S = 60.0
OnSent = Callable[[BaseException | None], None]
_numbers = itertools.count(1)


class Handler(Protocol):
    """Callbacks for the messages of a peer. Payloads are refused unless `payload_target` is overridden.

    The link's reading thread calls them; any thread may call `handle_ended`.
    """

    def handle_connected(self, link: Link) -> None:
        """Handle a peer that has completed the handshake. Messages can be sent to it from now on."""
        return

    def handle_message(self, link: Link, message: AnyMessage) -> None:
        """Handle a message; a `Data` with a payload is handled after the payload was received.

        Raises:
            Unexpected: the peer broke the protocol; the link ends.
        """

    def payload_target(self, link: Link, data: Data) -> Lease | memoryview | None:
        """Return the target of a payload: memory, or a share of a slot that the link releases; None drops it.

        Raises:
            Unexpected: the peer broke the protocol; the link ends.
        """
        raise Unexpected("Data: this side takes none")

    def handle_ended(self, link: Link, error: BaseException) -> None:
        """Handle the end of the link, or its failure to connect; called once, as the last callback."""


@dataclass(slots=True)
class _Item:
    """A queued message, with or without a record."""

    lease: Lease | None = None
    slot: int | None = None
    wanted: Callable[[], bool] = lambda: True
    on_sent: OnSent = lambda error: None
    body: bytes = b""

    def done(self, error: BaseException | None) -> None:
        if self.lease is not None:
            self.lease.release()
        self.on_sent(error)


class Link:
    """Connection to a peer. Thread-safe; messages are queued until it is connected.

    Args:
        open_channel: returns a connected channel; called by the link's own thread.
        side: side of the handshake.
        handshake_s: longest wait for a message of the handshake, in seconds.
        arena: slots that the peer may write into, if the transport supports it.

    Raises:
        ChannelError: no thread can be started.

    Attributes:
        number: number of this link in this process.
        peer: hello of the peer; None until the handshake has verified it.
        hello: future that is done when the link is connected; returns `peer`, or raises ChannelError if the
            link ended before.
        shared: True if the peer can write into the slots of `arena`.
    """

    def __init__(
        self,
        open_channel: Callable[[], Channel],
        side: Side,
        identity: Identity,
        handler: Handler,
        *,
        handshake_s: float,
        arena: Staging | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.peer: Hello | None = None
        self.hello: Future[Hello] = Future()
        self.hello.set_running_or_notify_cancel()  # nobody can cancel it
        self.shared = False
        self._open_channel = open_channel
        self._side = side
        self._identity = identity
        self._handler = handler
        self._handshake_s = handshake_s
        self._arena = arena
        self._channel: Channel | None = None
        self._queue: deque[_Item] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._failure: Exception | None = None
        self._closing = False
        self._users = 0
        self._threads: list[threading.Thread] = []
        self._start(self._read, "in")

    def __str__(self) -> str:
        node = "a node" if self.peer is None else f"node {self.peer.node!r}"
        return node if self._channel is None else f"{node} at {self._channel.peer}"

    @property
    def alive(self) -> bool:
        """True if the link is connected or still connecting."""
        return self._error is None

    @property
    def running(self) -> bool:
        """True if one of the link's threads runs."""
        return any(thread.is_alive() for thread in self._threads)

    def queue_message(self, message: messages.Message) -> None:
        """Queue a message. It is lost if the link has ended."""
        self._enqueue(message, _Item())

    def queue_record(
        self, data: Data, lease: Lease, slot: int | None, wanted: Callable[[], bool], on_sent: OnSent
    ) -> None:
        """Queue a record. A share of its slot is kept until it is sent.

        Args:
            slot: slot of the peer to write the record into, if possible.
            wanted: called when the record is next; if it returns False, the record is skipped.
            on_sent: called once, with None if the record is in the peer's slot, sent or skipped, or an error.
        """
        self._enqueue(data, _Item(lease.share(), slot, wanted, on_sent))

    def borrow_slot(self, slot: int, on_return: Callable[[], None]) -> Lease | None:
        """As `Channel.borrow_slot`; also None while the link is not connected."""
        return None if self._channel is None else self._channel.borrow_slot(slot, on_return)

    def writing(self) -> AbstractContextManager[None]:
        """As `Channel.writing`, for a link whose peer has lent a slot."""
        assert self._channel is not None
        return self._channel.writing()

    def close(self) -> None:
        """End the link after sending what is queued. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            connected = self._channel is not None
        if not connected:
            self._end(ChannelClosed(f"{self}: the link was closed"))

    def abort(self) -> None:
        """End the link now."""
        self._end(ChannelClosed(f"{self}: the link was closed"))

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end."""
        for thread in reversed(self._threads):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _enqueue(self, message: messages.Message, item: _Item) -> None:
        """Queue an item. On an error, the link's thread ends it: callers may hold the handler's locks."""
        failure: Exception | None = None
        try:
            item.body = encode(message)
        except MessageError as error:
            failure = error
        with self._changed:
            link_error = self._error or self._failure
            if link_error is None:
                self._queued_bytes += len(item.body) + ITEM_BYTES
                if self._queued_bytes > MAX_QUEUED_BYTES:
                    failure = ChannelError(f"{self} does not read its messages")
                link_error = self._failure = failure
            if link_error is None:
                self._queue.append(item)
            self._changed.notify_all()
            channel = self._channel
        if link_error is not None:
            item.done(link_error)
        if failure is not None and channel is not None:
            channel.shutdown()

    def _start(self, work: Callable[[], None], direction: str) -> None:
        name = f"kvkit-handoff-{self.number}-{direction}"
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        with self._changed:
            self._users += 1
        try:
            thread.start()
        except RuntimeError as error:
            with self._changed:
                self._users -= 1
            raise ChannelError(f"no thread for a connection: {error}") from error
        self._threads.append(thread)

    def _run(self, work: Callable[[], None]) -> None:
        """Read or write, then end the link; the last thread closes the channel."""
        try:
            work()
            self._end(ChannelClosed(f"{self}: the link was closed"))
        except (OSError, ValueError) as error:
            self._end(error)
        except BaseException as error:
            log.exception("%s: a thread of the link failed", self)
            self._end(error)
        finally:
            with self._changed:
                self._users -= 1
                channel = self._channel if not self._users else None
            if channel is not None:
                channel.close()

    def _write(self) -> None:
        channel = self._channel
        assert channel is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing or self._error or self._failure)
                if self._error or self._failure or not self._queue:
                    return
                item = self._queue.popleft()
                self._queued_bytes -= len(item.body) + ITEM_BYTES
            try:
                if item.lease is None:
                    channel.send(item.body)
                elif item.wanted():
                    payload = item.lease.buffer[: item.lease.used]
                    channel.send(item.body, payload, item.slot, more=bool(self._queue))
                if not self._queue:
                    channel.flush()  # an earlier frame may have waited for a record that was skipped
            except (OSError, ValueError) as error:
                item.done(error)
                raise
            item.done(None)

    def _read(self) -> None:
        channel = self._open_channel()
        with self._changed:
            self._channel = channel
            if self._error is not None or self._failure is not None or self._closing:
                return
        try:
            self.peer = shake_hands(channel, self._side, self._identity, self._handshake_s)
            if self._arena is not None and self._arena.descriptor is not None:
                self.shared = channel.share(self._arena)
            self._handler.handle_connected(self)
            self._start(self._write, "out")
            with suppress(InvalidStateError):  # the link has ended meanwhile
                self.hello.set_result(self.peer)
            while self._error is None:
                with suppress(ChannelIdle):
                    self._receive_message(channel)
        except (MessageError, Unexpected) as error:
            code: messages.Code = "malformed" if isinstance(error, MessageError) else "unexpected"
            with suppress(OSError):  # the peer may not read
                channel.send(encode(Error(code, str(error)[:1024])))
            raise ChannelError(f"{self}: {error}") from error

    def _receive_message(self, channel: Channel) -> None:
        """Receive a message with its payload, and pass it to the handler."""
        payloads: list[tuple[Data, Lease | memoryview | None]] = []
        errors: list[Exception] = []

        def target_of(body: bytes) -> memoryview | None:
            try:
                message = decode(body)
                if not isinstance(message, Data):
                    raise Unexpected(f"a payload follows {type(message).__name__}")
                target = self._handler.payload_target(self, message)
            except (MessageError, Unexpected) as error:
                errors.append(error)  # raised after the payload, so that the peer gets the error
                return None
            payloads.append((message, target))
            return target.buffer[: message.size] if isinstance(target, Lease) else target

        try:
            body = channel.receive(target_of, _IDLE_S)
            if errors:
                raise errors[0]
            message = payloads[0][0] if payloads else decode(body)
            if isinstance(message, Data) and message.size and not (payloads or self.shared):
                raise Unexpected(f"transfer {message.transfer}: data without its payload")
            if isinstance(message, Error):
                raise ChannelError(f"{self}: {message.message}")
            self._handler.handle_message(self, message)
        finally:
            for _, target in payloads:
                if isinstance(target, Lease):
                    target.release()

    def _end(self, error: BaseException) -> None:
        with self._changed:
            if self._error is not None:
                return
            error = self._failure or error
            self._error = ChannelError(str(error))  # without a traceback: its frames refer to this link
            unsent, self._queue = self._queue, deque()
            self._changed.notify_all()
            channel = self._channel
        if channel is not None:
            channel.shutdown()
        for item in unsent:
            item.done(error)
        self._handler.handle_ended(self, error)
        with suppress(InvalidStateError):  # it was connected
            self.hello.set_exception(self._error)
