"""Links of one owner, which are closed together; those to other nodes are opened on demand."""

from __future__ import annotations

import ssl
import threading

from kvkit.handoff.transport import addresses
from kvkit.handoff.transport.channel import ChannelClosed
from kvkit.handoff.transport.handshake import Identity
from kvkit.handoff.transport.link import Handler, Link


class Links:
    """Links whose threads run; a link that has ended may still hold slots. Thread-safe."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._closed = False
        self._lock = threading.RLock()

    def add(self, link: Link) -> None:
        """Take ownership of a link, and abort it if this object is closed."""
        with self._lock:
            if self._closed:
                link.abort()
            self._links = [other for other in self._links if other.running] + [link]

    def close(self, timeout_s: float) -> None:
        """Send what is queued, end all links, and wait at most `timeout_s` seconds for each thread."""
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
    """Links to the endpoints of other nodes, one for each address.

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

    def link_to(self, address: str) -> Link:
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
