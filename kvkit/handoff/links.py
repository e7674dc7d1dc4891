"""The links of one owner: opened on demand, closed together."""

from __future__ import annotations

import ssl
import threading
from concurrent.futures import Future

from kvkit.handoff.protocol.messages import Hello
from kvkit.handoff.transport import addresses
from kvkit.handoff.transport.channel import ChannelClosed
from kvkit.handoff.transport.link import Handler, Identity, Link


class Links:
    """Links with running threads, even if ended: they may still be releasing slots. Thread-safe."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._closed = False
        self._lock = threading.RLock()

    def add(self, link: Link) -> None:
        """Take ownership of a link; aborts it if the links are closed."""
        with self._lock:
            if self._closed:
                link.abort()
            self._links = [other for other in self._links if other.running] + [link]

    def close(self, timeout_s: float) -> None:
        """Send what is queued, end every link, and wait at most `timeout_s` seconds for each thread."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            link.join(timeout_s)
            link.abort()
            link.join(timeout_s)


class Connections(Links):
    """Links to the endpoints of peers, one for each address.

    Args:
        handler: handler of the peers' messages.
        timeout_s: limit for connecting and for one frame, in seconds.
        tls: TLS context for connections over TCP.
    """

    def __init__(
        self, handler: Handler, identity: Identity, *, timeout_s: float, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__()
        self._handler = handler
        self._identity = identity
        self._timeout_s = timeout_s
        self._tls = tls
        self._by_address: dict[str, Link] = {}
        self._awaiting_hello: list[tuple[Link, Future[Hello]]] = []

    def to(self, address: str) -> Link:
        """Return the link to `address`; opens a new one if there is none or the last one ended.

        Raises:
            ChannelError: the links are closed, or no thread can be started.
        """
        with self._lock:
            link = self._by_address.get(address)
            if link is None or not link.alive:
                if self._closed:
                    raise ChannelClosed(f"{address}: this side is closed")
                link = Link(
                    lambda: addresses.connect(address, timeout_s=self._timeout_s, tls=self._tls),
                    "client",
                    self._identity,
                    self._handler,
                    handshake_s=self._timeout_s,
                )
                self.add(link)
                self._by_address = {a: other for a, other in self._by_address.items() if other.alive}
                self._by_address[address] = link
            return link

    def hello(self, address: str) -> Future[Hello]:
        """Connect to `address`; the future returns the peer's hello, or raises the failure given to `settle`.

        Raises:
            ChannelError: as for `to`.
        """
        future: Future[Hello] = Future()
        future.set_running_or_notify_cancel()  # its holder cannot cancel it
        with self._lock:
            link = self.to(address)
            if link.peer is None:
                self._awaiting_hello.append((link, future))
                return future
        future.set_result(link.peer)
        return future

    def settle(self, link: Link, failure: Exception | None) -> None:
        """Complete the futures of `hello` that wait for this link. `failure`: None if it is connected."""
        with self._lock:
            settled = [future for awaited_link, future in self._awaiting_hello if awaited_link is link]
            self._awaiting_hello = [entry for entry in self._awaiting_hello if entry[0] is not link]
        for future in settled:  # without the lock: their callbacks may call the owner
            if failure is not None:
                future.set_exception(failure)
            elif link.peer is not None:
                future.set_result(link.peer)
