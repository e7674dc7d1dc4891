"""Acceptor of connections at one address; it limits unauthenticated peers in number and time."""

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

MAX_STRANGERS = 32
"""Most unauthenticated connections at one address; each takes a thread and a descriptor."""

HANDSHAKE_S = 10.0
"""Seconds that a peer may take to authenticate."""

GRACE_S = 0.25
"""Shortest time that an unauthenticated peer keeps its place when others wait for it."""

_ACCEPT_S = 60.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class UnauthenticatedPeer:
    link: Link
    source: str
    since: float


class Acceptor:
    """Accepts peers, in a thread of its own.

    If there are `MAX_STRANGERS` unauthenticated peers, a new one takes the place of the oldest one from the
    source that has most of them. It waits in the system's queue until that one has had `GRACE_S`. Nothing
    that a peer does, and no shortage of threads or descriptors, ends the thread.

    Args:
        listener: listening socket; closed with the acceptor.
        welcome: starts the handshake with a peer that connected. It may raise any exception.

    Raises:
        RuntimeError: the thread cannot be started.
    """

    def __init__(self, listener: Listener, welcome: Callable[[Channel], Link]) -> None:
        self.address = listener.address
        self._listener = listener
        self._welcome = welcome
        self._strangers: list[UnauthenticatedPeer] = []
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
        for stranger in self._left():
            stranger.link.abort()
            stranger.link.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                channel = self._listener.accept(self._abort_late())
            except ChannelIdle:
                continue
            except ChannelClosed:
                break
            except Exception:
                log.exception("handoff: %s: a peer cannot be let in", self.address)
                self._closed.wait(_PAUSE_S)
                continue
            self._let_in(channel)

    def _let_in(self, channel: Channel) -> None:
        self._make_room()
        try:
            link = self._welcome(channel)
        except Exception as error:
            channel.close()
            if not self._closed.is_set():
                log.warning("handoff: %s: %s is not let in: %s", self.address, channel.peer, error)
                self._closed.wait(_PAUSE_S)
            return
        self._strangers.append(UnauthenticatedPeer(link, channel.peer.rpartition(":")[0], time.monotonic()))

    def _make_room(self) -> None:
        """Wait until there is room for one more peer."""
        while len(strangers := self._left()) >= MAX_STRANGERS and not self._closed.is_set():
            sources = Counter(stranger.source for stranger in strangers)
            evicted = max(strangers, key=lambda stranger: sources[stranger.source])  # the oldest one
            grace_s = evicted.since + GRACE_S - time.monotonic()
            if grace_s <= 0:
                log.info("handoff: %s: %s makes room for others", self.address, evicted.link)
                evicted.link.abort()
            evicted.link.join(max(grace_s, _PAUSE_S))

    def _abort_late(self) -> float:
        """Abort peers that took too long; return the seconds until the next one may be late."""
        now = time.monotonic()
        wait_s = _ACCEPT_S
        for stranger in self._left():
            remaining_s = stranger.since + HANDSHAKE_S - now
            if remaining_s > 0:
                wait_s = min(wait_s, remaining_s)
            else:
                stranger.link.abort()
        return wait_s

    def _left(self) -> list[UnauthenticatedPeer]:
        """Return the unauthenticated peers that are still connected, the oldest first."""
        self._strangers = [s for s in self._strangers if s.link.peer is None and s.link.running]
        return self._strangers
