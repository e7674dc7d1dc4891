"""Acceptor of connections at one address. It limits unauthenticated peers in number and time."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvkit.handoff.transport.channel import Channel, ChannelClosed, ChannelIdle, Listener
from kvkit.handoff.transport.link import Link

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 32
"""Maximum unauthenticated connections at one address; each takes a thread and a descriptor."""

HANDSHAKE_S = 10.0
"""Seconds that a peer may take to authenticate."""

GRACE_S = 0.25
"""Shortest time before an unauthenticated peer is disconnected in favour of a new one, in seconds."""

_ACCEPT_S = 60.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class UnauthenticatedPeer:
    link: Link
    source: str
    since: float


class Acceptor:
    """Accepts peers, in a thread of its own.

    If `MAX_UNAUTHENTICATED` unauthenticated peers are connected, a new peer replaces one of them: the oldest
    of the host that has the most, once it has been connected for `GRACE_S` seconds. Until then, the new peer
    waits.
    Neither a peer nor a shortage of threads or descriptors can end the acceptor's thread.

    Args:
        listener: listening socket; closed with the acceptor.
        start_handshake: starts the handshake with a peer that connected. It may raise any exception.

    Raises:
        RuntimeError: the thread cannot be started.
    """

    def __init__(self, listener: Listener, start_handshake: Callable[[Channel], Link]) -> None:
        self.address = listener.address
        self._listener = listener
        self._start_handshake = start_handshake
        self._peers: list[UnauthenticatedPeer] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkit-handoff-accept", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            listener.close()
            raise

    def close(self, timeout_s: float) -> None:
        """Accept no more peers, and abort unauthenticated ones."""
        self._closed.set()
        self._listener.close()
        self._thread.join(timeout_s)
        for peer in self._unauthenticated():
            peer.link.abort()
            peer.link.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                channel = self._listener.accept(self._abort_late())
            except ChannelIdle:
                continue
            except ChannelClosed:
                break
            except Exception:
                log.exception("handoff: %s: a peer cannot be accepted", self.address)
                self._closed.wait(_PAUSE_S)
                continue
            self._welcome(channel)

    def _welcome(self, channel: Channel) -> None:
        """Start the handshake with a peer, in place of an older one if there are too many."""
        self._make_room()
        try:
            link = self._start_handshake(channel)
        except Exception as error:
            channel.close()
            if not self._closed.is_set():
                log.warning("handoff: %s: %s is not accepted: %s", self.address, channel.peer, error)
                self._closed.wait(_PAUSE_S)
            return
        self._peers.append(UnauthenticatedPeer(link, channel.peer.rpartition(":")[0], time.monotonic()))

    def _make_room(self) -> None:
        """Disconnect peers until fewer than `MAX_UNAUTHENTICATED` unauthenticated ones are connected."""
        while len(peers := self._unauthenticated()) >= MAX_UNAUTHENTICATED and not self._closed.is_set():
            sources = Counter(peer.source for peer in peers)
            evicted = max(peers, key=lambda peer: sources[peer.source])  # the oldest one
            grace_s = evicted.since + GRACE_S - time.monotonic()
            if grace_s <= 0:
                log.info("handoff: %s: %s is disconnected for a newer peer", self.address, evicted.link)
                evicted.link.abort()
            evicted.link.join(max(grace_s, _PAUSE_S))

    def _abort_late(self) -> float:
        """Abort peers that did not authenticate in time; return the seconds until the next may be late."""
        now = time.monotonic()
        wait_s = _ACCEPT_S
        for peer in self._unauthenticated():
            remaining_s = peer.since + HANDSHAKE_S - now
            if remaining_s > 0:
                wait_s = min(wait_s, remaining_s)
            else:
                peer.link.abort()
        return wait_s

    def _unauthenticated(self) -> list[UnauthenticatedPeer]:
        """Return the unauthenticated peers that are still connected, the oldest first."""
        self._peers = [p for p in self._peers if p.link.peer is None and p.link.running]
        return self._peers
