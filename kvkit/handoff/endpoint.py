"""Endpoint of a node: accepts peers, takes their records, answers queries, and sends what they pull."""

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
from kvkit.handoff.transport.handshake import Identity
from kvkit.handoff.transport.link import Handler, Link
from kvkit.staging import Lease
from kvkit.tiers.base import Tier

log = logging.getLogger(__name__)

MAX_PEERS = 256
"""Most authenticated connections at a time. Further peers are refused."""

MAX_PULLS = 1024
"""Most pulls of one peer at a time."""


class Endpoint(Handler):
    """Server of a node's records and receiver. Thread-safe.

    Args:
        receiver: takes the records that peers send; None if this node takes none.
        in_memory: other tiers in this host's memory; peers may query and pull from these and from `receiver`.
        listen: addresses, see `kvkit.handoff.transport.addresses`.
        timeout_s: limit for one frame, in seconds, and for the handshake if less than `HANDSHAKE_S`.
        pin_s: how long tiers in memory keep records that a sender does not send because of them, in seconds.
        tls: TLS context for connections over TCP.

    Attributes:
        addresses: addresses that it listens at, with the actual ports.

    Raises:
        ValueError: an address is invalid, or needs a secret and has none.
        OSError: the endpoint cannot listen at an address.
    """

    def __init__(
        self,
        receiver: Receiver | None,
        in_memory: Sequence[Tier],
        identity: Identity,
        listen: Sequence[str],
        *,
        timeout_s: float,
        pin_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._receiver = receiver
        self._in_memory = in_memory
        self._sources: list[Tier | Receiver] = [*in_memory, receiver] if receiver else [*in_memory]
        self._identity = identity
        self._timeout_s = timeout_s
        self._pin_s = pin_s
        self._lock = threading.Lock()
        self._links = Links()
        self._peers: set[int] = set()
        self._pulls: dict[tuple[int, str], messages.Pull] = {}
        self._acceptors: list[Acceptor] = []
        try:
            for address in listen:
                addresses.check_secret(address, bool(identity.secret))
                listener = addresses.listen(address, timeout_s=timeout_s, tls=tls)
                self._acceptors.append(Acceptor(listener, self._start_handshake))
        except BaseException:
            self.close(timeout_s)
            raise
        self.addresses = tuple(acceptor.address for acceptor in self._acceptors)

    @property
    def peers(self) -> int:
        """Number of connections of authenticated peers."""
        return len(self._peers)

    def close(self, timeout_s: float) -> None:
        """Stop listening and end every connection. The receiver must be closed before."""
        for acceptor in self._acceptors:
            acceptor.close(timeout_s)
        self._links.close(timeout_s)

    # callbacks of links

    def handle_connected(self, link: Link) -> None:
        with self._lock:
            if len(self._peers) >= MAX_PEERS:
                raise Unexpected(f"{MAX_PEERS} peers are connected, the most that this node accepts")
            self._peers.add(link.number)
        log.info("handoff: %s is connected", link)
        if self._receiver is not None:
            self._receiver.handle_connected(link)

    def handle_message(self, link: Link, message: AnyMessage) -> None:
        match message:
            case messages.Query(number, names):
                runs = (
                    TierRun(source.name, source.scope, source.match_prefix(names)) for source in self._sources
                )
                link.queue_message(Found(number, tuple(runs)))
            case messages.Pull():
                self._send(link, message)
            case messages.Release(transfer):
                with self._lock:
                    self._pulls.pop((link.number, transfer), None)
            case messages.Reserve(names=names):
                pinned = [n for n in names if any(tier.pin([n], self._pin_s) for tier in self._in_memory)]
                self._required_receiver(message).handle_message(link, message, pinned)
            case _:
                self._required_receiver(message).handle_message(link, message)

    def payload_target(self, link: Link, data: Data) -> Lease | None:
        return self._required_receiver(data).payload_target(link, data)

    def handle_ended(self, link: Link, error: BaseException) -> None:
        log.info("handoff: %s is gone: %s", link, error)
        if self._receiver is not None:
            self._receiver.handle_ended(link)
        with self._lock:
            self._peers.discard(link.number)
            self._pulls = {key: pull for key, pull in self._pulls.items() if key[0] != link.number}

    def _start_handshake(self, channel: Channel) -> Link:
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

    def _required_receiver(self, message: AnyMessage) -> Receiver:
        """Return the receiver for `message`. Raises `Unexpected` if the node has none."""
        if self._receiver is None:
            raise Unexpected(f"{type(message).__name__}: this node takes no records")
        return self._receiver

    def _send(self, link: Link, pull: messages.Pull) -> None:
        """Queue the requested records that this node has. Each slot stays leased until its record is sent."""
        key = (link.number, pull.transfer)
        with self._lock:
            if key in self._pulls:
                raise Unexpected(f"transfer {pull.transfer}: this id is in use")
            if sum(number == link.number for number, _ in self._pulls) >= MAX_PULLS:
                raise Unexpected(f"{MAX_PULLS} pulls are in flight, and none was released")
            self._pulls[key] = pull
        missing = []
        for index, name in enumerate(pull.names):
            lease = next(filter(None, (source.borrow(name) for source in self._sources)), None)
            if lease is None:
                missing.append(index)
                continue
            with lease:
                data = Data(pull.transfer, index, lease.used)
                link.queue_record(data, lease, None, lambda: self._pulls.get(key) is pull, lambda error: None)
        link.queue_message(messages.Commit(pull.transfer, tuple(missing)))
