"""Buffer for records from peers: carries out the decisions of `kvkit.handoff.protocol.states`."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from kvkit.handoff.deadlines import Deadlines
from kvkit.handoff.protocol import messages, states
from kvkit.handoff.protocol.messages import HANDOFF, Data, TransferMessage
from kvkit.handoff.protocol.states import Buffer, Limits, Outcome, Phase, RequestRef, Unexpected
from kvkit.handoff.transport.link import Link
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import Scope

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Most ended requests for which `Receiver.status` remembers the reason."""


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a request whose records peers send.

    Attributes:
        phase: earliest phase of its transfers; None if it ended.
        records: number of records of its transfers.
        held: number of those that this node has; once committed, all but missing and deleted ones.
        reason: why it ended.
    """

    phase: Phase | None
    records: int = 0
    held: int = 0
    reason: str = ""


class Receiver:
    """Records from peers, in slots of its own arena. Thread-safe.

    Args:
        arena: slots, which only the receiver uses; `close` closes the arena.
        limits: time limits of transfers.

    Attributes:
        outcomes: counts of transfers that were done, refused, or failed after admission.
    """

    name = HANDOFF
    scope: Scope = "node"

    def __init__(self, arena: Staging, limits: Limits) -> None:
        self.arena = arena
        self._buffer = Buffer.empty(arena.slots, limits)
        self.outcomes: Counter[Outcome] = Counter()
        self._links: dict[Hashable, Link] = {}
        self._filling: dict[str, dict[int, Lease]] = {}
        self._records: dict[str, Lease] = {}
        self._unanswered: dict[tuple[int, str], list[Lease]] = {}
        self._ended: dict[str, str] = {}
        self._requests: dict[str, str] = {}  # by transfer
        # its lock is reentrant: freeing a slot may admit another transfer
        self._changed = threading.Condition()
        self._watchers: list[Callable[[object], None]] = []
        arena.when_freed(self._freed)
        self._deadlines = Deadlines("kvkit-handoff-deadlines", self._expire)

    def handle_connected(self, link: Link) -> None:
        """Register a connected sender."""
        with self._changed:
            self._links[link.number] = link

    def payload_target(self, link: Link, data: Data) -> Lease | None:
        """Return a share of the slot for a record; None if its transfer is over.

        Raises:
            Unexpected: the record is not expected, or does not fit.
        """
        with self._changed:
            lease = self._expected(link, data)
            return None if lease is None else lease.share()

    def handle_message(
        self, link: Link, message: messages.AnyMessage, elsewhere: Collection[str] = ()
    ) -> None:
        """Handle a sender's `Reserve`, `Data`, `Commit` or `Cancel`.

        Args:
            elsewhere: names of records that need no slot: other memory of this node has them.

        Raises:
            Unexpected: the message does not fit the state of its transfer.
        """
        now, peer = time.monotonic(), link.number
        with self._changed:
            match message:
                case messages.Reserve(transfer, names, wait_s, request_id, parts):
                    request = RequestRef(request_id or transfer, parts)
                    if transfer not in self._buffer.transfers:  # else the id is taken: refused below
                        self._requests[transfer] = request.id
                    if parts > 1 and request.id in self._ended:  # with its other parts
                        self._apply((self._buffer, (states.Deny(transfer, peer, self._ended[request.id]),)))
                        return
                    self._apply(
                        states.reserve(self._buffer, transfer, peer, names, elsewhere, wait_s, now, request)
                    )
                case Data(transfer, index, size):
                    lease = self._expected(link, message)
                    if lease is not None:
                        lease.used = size
                        self._buffer, _ = states.record_arrived(self._buffer, transfer, peer, index, now)
                case messages.Commit(transfer, missing):
                    self._apply(states.commit(self._buffer, transfer, peer, missing, now))
                case messages.Cancel(transfer):  # its sender no longer writes into its slots
                    self._apply(states.cancel(self._buffer, transfer, peer, now), quiet=peer)
                    release_all(self._unanswered.pop((peer, transfer), ()))
                case _:
                    raise Unexpected(f"{type(message).__name__}: an endpoint takes no such message")

    def handle_ended(self, link: Link) -> None:
        """Remove a disconnected sender, and end its transfers that are not committed."""
        with self._changed:
            self._links.pop(link.number, None)
            self._apply(states.peer_lost(self._buffer, link.number, time.monotonic()), quiet=link.number)
            for key in [key for key in self._unanswered if key[0] == link.number]:
                release_all(self._unanswered.pop(key))

    def subscribe(self, changed: Callable[[object], None]) -> None:
        """Call `changed` with the receiver after every commit, refusal and end of a transfer.

        The call may come from any thread and holds the receiver's lock: it must not block.
        """
        with self._changed:
            self._watchers.append(changed)

    def release(self, request_id: str, reason: str = "used") -> None:
        """Release a request, and its records that no other request holds. Ignores unknown requests."""
        with self._changed:
            self._apply(states.release(self._buffer, request_id, reason, time.monotonic()))

    def delete(self, names: Sequence[str]) -> None:
        """Release damaged records, also those that requests hold."""
        with self._changed:
            self._apply(states.delete(self._buffer, names))

    def status(self, request_id: str) -> Status | None:
        """Return the status of a request; None if it is unknown, or one of its transfers has not arrived.

        A request of one transfer has that transfer's id, unless the sender set another.
        """
        with self._changed:
            transfers = states.transfers_of(self._buffer, request_id)
            if not transfers:
                reason = self._ended.get(request_id)
                return None if reason is None else Status(None, reason=reason)
            if len(transfers) < transfers[0].request.parts:
                return None
            phases = (transfer.phase for transfer in transfers if transfer.phase is not Phase.COMMITTED)
            held = sum(len(transfer.elsewhere) + len(transfer.holds) for transfer in transfers)
            return Status(
                next(phases, Phase.COMMITTED), sum(len(transfer.names) for transfer in transfers), held
            )

    def wait(self, request_id: str, timeout_s: float) -> Status | None:
        """Wait at most `timeout_s` seconds until a request is committed or over, and return its status."""

        def settled() -> bool:
            status = self.status(request_id)
            return status is not None and status.phase in (None, Phase.COMMITTED)

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            return self.status(request_id)

    def match_prefix(self, names: Sequence[str]) -> int:
        """Return the number of leading `names` that are available."""
        with self._changed:
            return next((i for i, name in enumerate(names) if name not in self._records), len(names))

    def borrow(self, name: str) -> Lease | None:
        """Return a share of a record's slot; None if the record is not held."""
        with self._changed:
            lease = self._records.get(name)
            return None if lease is None else lease.share()

    def records(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of every record."""
        with self._changed:
            return [(name, lease.used) for name, lease in self._records.items()]

    def transfers(self) -> dict[str, Phase]:
        """Return the phase of every transfer that is not over."""
        with self._changed:
            return {t.id: t.phase for t in self._buffer.transfers.values()}

    def check_integrity(self) -> None:
        """Check that no slot is leaked, and that the leases agree with the state.

        Raises:
            AssertionError: a check failed, which is a defect in kvkit.
        """
        with self._changed:
            states.check_integrity(self._buffer)
            assert self._records.keys() == self._buffer.held.keys()
            receiving = {t.id: t.own for t in self._buffer.transfers.values() if t.phase is Phase.RECEIVING}
            assert {t: leases.keys() for t, leases in self._filling.items()} == receiving
            used_slots = len(self._records) + sum(map(len, self._filling.values())) + self._buffer.lent
            assert self.arena.slots - self._buffer.free == used_slots
        self.arena.check_integrity()

    def close(self, timeout_s: float) -> None:
        """Admit no more transfers, wait at most `timeout_s` for those in flight, then release everything."""
        with self._changed:
            if self._buffer.closed:
                return
            self._apply(states.close(self._buffer, time.monotonic(), at_once=False))
            self._changed.wait_for(lambda: Phase.RECEIVING not in self.transfers().values(), timeout_s)
            self._apply(states.close(self._buffer, time.monotonic(), at_once=True))
        self._deadlines.close(timeout_s)
        with self._changed:
            for link in list(self._links.values()):
                self.handle_ended(link)
        self.arena.close()

    def _expected(self, link: Link, data: Data) -> Lease | None:
        """Return the lease for a record that may arrive now; None if its transfer is over. Lock held."""
        incoming = self._buffer.transfers.get(data.transfer)
        if incoming is None:
            return None
        lease = self._filling.get(data.transfer, {}).get(data.index)
        if incoming.peer != link.number or lease is None or data.index in incoming.arrived:
            raise Unexpected(f"transfer {data.transfer}: record {data.index} is not expected")
        if data.size > self.arena.slot_bytes:
            raise Unexpected(
                f"transfer {data.transfer}: {data.size} bytes do not fit {self.arena.slot_bytes}"
            )
        return lease

    def _freed(self) -> None:
        with self._changed:
            self._apply(states.slots_freed(self._buffer, 1, time.monotonic()))

    def _apply(self, outcome: states.Transition, quiet: Hashable = None) -> None:
        """Adopt a new state and carry out its actions. The lock is held.

        `quiet`: sender that no longer writes. Other senders do not know yet that their transfers have ended,
        and may still write into shared slots.
        """
        self._buffer, actions = outcome
        for action in actions:
            if isinstance(action, states.Delete):
                release_all([self._records.pop(name) for name in action.names])
                continue
            link = self._links.get(action.peer)
            message = self._carry_out(action, link, writes_on=action.peer != quiet)
            if link is not None:
                link.queue_message(message)
        self._changed.notify_all()
        self._deadlines.changed()
        if any(isinstance(action, states.Deny | states.Complete | states.End) for action in actions):
            for watcher in self._watchers:
                watcher(self)

    def _carry_out(self, verdict: states.Verdict, link: Link | None, writes_on: bool) -> TransferMessage:
        """Carry out a decision about a transfer, and return the message to its sender."""
        transfer = verdict.transfer
        match verdict:
            case states.Grant(own=own):
                leases = self.arena.acquire(len(own), 0.0, at_least=len(own)) if own else []
                self._filling[transfer] = dict(zip(sorted(own), leases, strict=True))
                slots = dict(zip(sorted(own), (lease.slot for lease in leases), strict=True))
                return messages.Admit(transfer, tuple(slots.get(i, -1) for i in range(verdict.names)))
            case states.Deny(reason=reason):
                self.outcomes["refused"] += 1
                if transfer not in self._buffer.transfers:  # else this id is that of another transfer
                    self._remember(transfer, reason)
                return messages.Refuse(transfer, reason)
            case states.Complete(keep=keep, rest=rest):
                names = self._buffer.transfers[transfer].names
                filled = self._filling.pop(transfer)
                self._records |= {names[index]: filled[index] for index in keep}
                release_all(filled[index] for index in rest)
                self.outcomes["done"] += 1
                return messages.Done(transfer)
            case states.End(reason=reason):
                self.outcomes["failed"] += transfer in self._filling
                unfilled = list(self._filling.pop(transfer, {}).values())
                if unfilled and link is not None and link.shared and writes_on:
                    unanswered = self._unanswered.setdefault((link.number, transfer), [])
                    unanswered += [lease.share() for lease in unfilled]
                release_all(unfilled)
                release_all([self._records.pop(name) for name in verdict.names])
                self._remember(transfer, reason)
                return messages.Release(transfer, reason)
        raise AssertionError(verdict)

    def _remember(self, transfer: str, reason: str) -> None:
        request_id = self._requests.pop(transfer, transfer)
        self._ended.pop(request_id, None)
        self._ended[request_id] = reason
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _expire(self, now: float) -> float | None:
        """End transfers past their deadline, and return the next deadline."""
        with self._changed:
            self._apply(states.expire(self._buffer, now))
            return states.next_deadline(self._buffer)
