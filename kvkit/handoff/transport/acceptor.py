"""Where peers connect to one address: few that have proved nothing are let in at a time, and not for long."""

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
"""Connections of one address that have proved nothing; each takes a thread and a descriptor."""

HANDSHAKE_S = 10.0
"""How long one may take to prove itself."""

GRACE_S = 0.25
"""How long one is left in peace, at least, when others want its place."""

_ACCEPT_S = 60.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class UnauthenticatedPeer:
    link: Link
    source: str
    since: float


class Acceptor:
    """Lets peers in, by a thread of its own.

    Who comes when there are `MAX_STRANGERS` takes the place of the one that came first from where most of
    them are from, and waits, in the system's queue, until that one had `GRACE_S`. Nothing that a peer does,
    and no shortage of threads or descriptors, ends the thread.

    Args:
        listener: closed with the door.
        welcome: begins the handshake with one that connected. It may raise what it likes.

    Raises:
        RuntimeError: its thread cannot be started.
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
        """Let nobody in any more, and abort who has not proved itself."""
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
        """Wait until one more may come in."""
        while len(strangers := self._left()) >= MAX_STRANGERS and not self._closed.is_set():
            sources = Counter(stranger.source for stranger in strangers)
            first = max(strangers, key=lambda stranger: sources[stranger.source])  # the first of them
            grace_s = first.since + GRACE_S - time.monotonic()
            if grace_s <= 0:
                log.info("handoff: %s: %s makes room for others", self.address, first.link)
                first.link.abort()
            first.link.join(max(grace_s, _PAUSE_S))

    def _abort_late(self) -> float:
        """End who took too long; in how many seconds another may have."""
        now = time.monotonic()
        wait_s = _ACCEPT_S
        for stranger in self._left():
            left_s = stranger.since + HANDSHAKE_S - now
            if left_s > 0:
                wait_s = min(wait_s, left_s)
            else:
                stranger.link.abort()
        return wait_s

    def _left(self) -> list[UnauthenticatedPeer]:
        """Who has neither proved itself nor left altogether, in the order in which they came."""
        self._strangers = [s for s in self._strangers if s.link.peer is None and s.link.running]
        return self._strangers
