"""Where peers reach a node: takes what they send, tells what this node holds near, and sends that."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Sequence

from kvkit.handoff.links import Links
from kvkit.handoff.protocol import messages
from kvkit.handoff.protocol.messages import AnyMessage, Data, Found, TierRun
from kvkit.handoff.protocol.states import Unexpected
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.transport import addresses
from kvkit.handoff.transport.acceptor import HANDSHAKE_S, Acceptor
from kvkit.handoff.transport.channel import Channel
from kvkit.handoff.transport.link import Handler, Identity, Link
from kvkit.staging import Lease
from kvkit.tiers.base import Tier

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Connections at a time of those that have proved themselves; whoever comes then is turned away."""

MAX_PULLS = 1024
"""Of one peer at a time."""


class Endpoint(Handler):
    """A node's side of the protocol, for peers that connect. Thread-safe.

    Args:
        receiver: what records are sent into; None for a node that only answers.
        near: other tiers in this host's memory, of which peers may ask and pull as of what `receiver` holds.
        listen: addresses, see `kvkit.handoff.transport.addresses`.
        timeout_s: how long one frame may take; the handshake no longer than `HANDSHAKE_S` either.
        pin_s: how long a near tier keeps what a sender need not send.
        tls: for connections over TCP.

    Attributes:
        addresses: where it listens; with the ports that were found.

    Raises:
        ValueError, OSError: it cannot listen at one of the addresses, or may not for want of a secret.
    """

    def __init__(
        self,
        receiver: Receiver | None,
        near: Sequence[Tier],
        identity: Identity,
        listen: Sequence[str],
        *,
        timeout_s: float,
        pin_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._receiver = receiver
        self._near = near
        self._held: list[Tier | Receiver] = [*near, receiver] if receiver else [*near]
        self._identity = identity
        self._timeout_s = timeout_s
        self._pin_s = pin_s
        self._lock = threading.Lock()
        self._links = Links()
        self._peers: set[int] = set()
        self._pulls: dict[tuple[int, str], messages.Pull] = {}
        self._doors: list[Acceptor] = []
        try:
            for address in listen:
                addresses.check_secret(address, bool(identity.secret))
                listener = addresses.listen(address, timeout_s=timeout_s, tls=tls)
                self._doors.append(Acceptor(listener, self._welcome))
        except BaseException:
            self.close(timeout_s)
            raise
        self.addresses = tuple(door.address for door in self._doors)

    @property
    def peers(self) -> int:
        """Connections of peers that have proved themselves."""
        return len(self._peers)

    def close(self, timeout_s: float) -> None:
        """Listen no more and end every connection. The receiver is its owner's to close, before this."""
        for door in self._doors:
            door.close(timeout_s)
        self._links.close(timeout_s)

    # what links report

    def started(self, link: Link) -> None:
        with self._lock:
            if len(self._peers) >= MAX_PEERS:
                raise Unexpected(f"{MAX_PEERS} peers are connected, and there is no room for more")
            self._peers.add(link.number)
        log.info("handoff: %s is connected", link)
        if self._receiver is not None:
            self._receiver.connected(link)

    def received(self, link: Link, message: AnyMessage) -> None:
        match message:
            case messages.Query(number, names):
                runs = (TierRun(held.name, held.scope, held.match_prefix(names)) for held in self._held)
                link.say(Found(number, tuple(runs)))
            case messages.Pull():
                self._send(link, message)
            case messages.Release(transfer):
                with self._lock:
                    self._pulls.pop((link.number, transfer), None)
            case messages.Reserve(names=names):
                pinned = [n for n in names if any(tier.pin([n], self._pin_s) for tier in self._near)]
                self._receives(message).received(link, message, pinned)
            case _:
                self._receives(message).received(link, message)

    def place(self, link: Link, data: Data) -> Lease | None:
        return self._receives(data).place(link, data)

    def ended(self, link: Link, error: BaseException) -> None:
        log.info("handoff: %s is gone: %s", link, error)
        if self._receiver is not None:
            self._receiver.lost(link)
        with self._lock:
            self._peers.discard(link.number)
            self._pulls = {key: pull for key, pull in self._pulls.items() if key[0] != link.number}

    def _welcome(self, channel: Channel) -> Link:
        link = Link(
            lambda: channel,
            "server",
            self._identity,
            self,
            handshake_s=min(self._timeout_s, HANDSHAKE_S),
            arena=None if self._receiver is None else self._receiver.arena,
        )
        self._links.add(link)
        return link

    def _receives(self, message: AnyMessage) -> Receiver:
        """What `message` is for. Refuses one that a node without a receiver cannot be told."""
        if self._receiver is None:
            raise Unexpected(f"{type(message).__name__}: this node takes no records")
        return self._receiver

    def _send(self, link: Link, pull: messages.Pull) -> None:
        """Queue what is here of what is asked for. Slots stay lent until their record is sent."""
        key = (link.number, pull.transfer)
        with self._lock:
            if key in self._pulls:
                raise Unexpected(f"transfer {pull.transfer}: there is one of that name")
            if sum(number == link.number for number, _ in self._pulls) >= MAX_PULLS:
                raise Unexpected(f"{MAX_PULLS} pulls are under way, and none was released")
            self._pulls[key] = pull
        missing = []
        for index, name in enumerate(pull.names):
            lease = next(filter(None, (held.borrow(name) for held in self._held)), None)
            if lease is None:
                missing.append(index)
                continue
            with lease:
                data = Data(pull.transfer, index, lease.used)
                link.send(data, lease, None, lambda: self._pulls.get(key) is pull, lambda error: None)
        link.say(messages.Commit(pull.transfer, tuple(missing)))
