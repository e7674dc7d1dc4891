"""State machine of a receiver's buffer: pure functions (state, event) -> (state, actions).

The state holds all transfers, since they compete for slots:

    reserve -> waiting -> receiving -> committed -> ended
                 |            |           |
                 +- refused   +-----------+- released, cancelled, peer lost, too late

A request gets all its slots at once or none, in order of arrival. An admitted transfer needs no more slots
and ends by itself or by its deadline. A waiting transfer delays only the admission of others. So every
transfer that fits the buffer is admitted or refused in finite time. Several transfers may be the parts of one
request, from several ranks of another engine: they are admitted together and end together.
`kvkit.handoff.protocol.outgoing` is the sender's side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

MAX_TRANSFERS = 4096
"""Most transfers in a buffer at a time, including those that wait."""


class Phase(StrEnum):
    """Phase of a transfer. Transfers that ended are forgotten."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    COMMITTED = "committed"


Outcome = Literal["done", "refused", "failed"]
"""Outcome of a transfer, for counters. A failed transfer was admitted and did not complete."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest time of a transfer in each phase, in seconds.

    Args:
        allocation_s: waiting for slots.
        transfer_s: receiving, since its last record.
        idle_s: committed, without being used.
    """

    allocation_s: float
    transfer_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class RequestRef:
    """The request of a transfer, and the number of transfers to this node that make it up."""

    id: str
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Incoming:
    """One transfer, as its receiver knows it.

    Attributes:
        peer: its sender; events from other peers do not apply.
        names: names of its records; the sets below hold indices into them.
        request: request that it belongs to.
        elsewhere: records that this node has in other memory.
        shared: records that the buffer held from other transfers when this one was admitted.
        own: records with a slot of this transfer; once committed, only those that arrived.
        arrived: records of `own` that have arrived.
        deadline: monotonic time at which it expires.
    """

    id: str
    peer: Hashable
    names: tuple[str, ...]
    request: RequestRef
    phase: Phase
    deadline: float
    elsewhere: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    arrived: frozenset[int] = frozenset()

    @property
    def holds(self) -> frozenset[int]:
        """Records that the buffer keeps at least as long as this transfer."""
        return self.shared | self.own if self.phase is Phase.COMMITTED else self.shared


@dataclass(frozen=True, slots=True)
class Buffer:
    """State of the buffer. A slot is free, filling (in `own` while receiving), a held record, or lent.

    Attributes:
        slots: number of slots in the buffer.
        free: number of slots that a transfer can get.
        lent: number of slots that transfers have released but that are still read or written.
        transfers: transfers by id, in order of arrival.
        requests: ids of the transfers of each request, in order of arrival; without the requests that are a
            single transfer with the same id.
        held: number of transfers that hold a record, by its name.
        closed: True if no more transfers are admitted.
    """

    slots: int
    limits: Limits
    free: int
    lent: int = 0
    transfers: Mapping[str, Incoming] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    closed: bool = False
    requests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def empty(slots: int, limits: Limits) -> Buffer:
        """Return an empty buffer."""
        return Buffer(slots, limits, free=slots)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision about a transfer, which is reported to its sender."""

    transfer: str
    peer: Hashable


@dataclass(frozen=True, slots=True)
class Grant(Verdict):
    """Admit the transfer: take a slot for each record of `own`."""

    names: int
    own: frozenset[int]


@dataclass(frozen=True, slots=True)
class Deny(Verdict):
    """Refuse the transfer: it gets no slots."""

    reason: str


@dataclass(frozen=True, slots=True)
class Complete(Verdict):
    """Make the records of `keep` available, and release the slots of `rest`."""

    keep: frozenset[int]
    rest: frozenset[int]


@dataclass(frozen=True, slots=True)
class End(Verdict):
    """End the transfer: release the slots of `filling` and the records `names`."""

    reason: str
    filling: frozenset[int]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """Release these records."""

    names: tuple[str, ...]


Action = Verdict | Delete
Transition = tuple[Buffer, tuple[Action, ...]]


class Unexpected(ValueError):
    """An event is not allowed in the state of its transfer: the peer broke the protocol."""


def reserve(
    buffer: Buffer,
    transfer: str,
    peer: Hashable,
    names: Sequence[str],
    elsewhere: Collection[str],
    deadline_s: float,
    now: float,
    request: RequestRef | None = None,
) -> Transition:
    """Ask for slots for distinct `names`, except for those that this node has `elsewhere`.

    `request`: request of the transfer; None if the transfer is the whole request.
    """
    elsewhere_indices = frozenset(i for i, name in enumerate(names) if name in elsewhere)
    request = request or RequestRef(transfer)
    others = [] if request.id == transfer else transfers_of(buffer, request.id)
    required_slots = (
        len(names) - len(elsewhere_indices) + sum(len(part.names) - len(part.elsewhere) for part in others)
    )
    reason = None
    if buffer.closed:
        reason = "the receiver is closing"
    elif transfer in buffer.transfers or transfer in buffer.requests:
        reason = f"there is a transfer {transfer} already"
    elif others and (others[0].request != request or len(others) == request.parts):
        reason = f"request {request.id} has {len(others)} of {others[0].request.parts} transfers already"
    elif len(buffer.transfers) >= MAX_TRANSFERS:
        reason = f"{MAX_TRANSFERS} transfers are in flight"
    if reason is not None:
        return buffer, (Deny(transfer, peer, reason),)
    deadline = now + min(deadline_s, buffer.limits.allocation_s)
    waiting = Incoming(
        transfer, peer, tuple(names), request, Phase.WAITING, deadline, elsewhere=elsewhere_indices
    )
    buffer = _put(buffer, waiting)
    if request.id != transfer:
        transfer_ids = (*buffer.requests.get(request.id, ()), transfer)
        buffer = replace(buffer, requests={**buffer.requests, request.id: transfer_ids})
    if required_slots > buffer.slots:
        reason = f"{required_slots} records do not fit the buffer's {buffer.slots} slots"
        return _end(buffer, [waiting], reason, now)
    return _admit(buffer, now)


def record_arrived(buffer: Buffer, transfer: str, peer: Hashable, index: int, now: float) -> Transition:
    """Note that a record is in its slot. Does nothing if the transfer is over.

    Raises:
        Unexpected: the record has no slot, or has arrived already.
    """
    incoming = _receiving(buffer, transfer, peer)
    if incoming is None:
        return buffer, ()
    if index not in incoming.own or index in incoming.arrived:
        raise Unexpected(f"transfer {transfer}: record {index} is not expected")
    deadline = now + buffer.limits.transfer_s
    return _put(buffer, replace(incoming, arrived=incoming.arrived | {index}, deadline=deadline)), ()


def commit(buffer: Buffer, transfer: str, peer: Hashable, missing: Collection[int], now: float) -> Transition:
    """Commit a transfer: all its records but `missing` have arrived. Does nothing if it is over.

    Raises:
        Unexpected: `missing` are not exactly the records that have not arrived.
    """
    incoming = _receiving(buffer, transfer, peer)
    if incoming is None:
        return buffer, ()
    absent = incoming.own - incoming.arrived
    if absent != frozenset(missing):
        raise Unexpected(f"transfer {transfer}: {len(absent)} records are missing, not {len(missing)}")
    keep = {index for index in incoming.arrived if incoming.names[index] not in buffer.held}
    held = Counter(buffer.held)
    held.update(incoming.names[index] for index in incoming.arrived)
    rest = incoming.own - keep
    committed = replace(incoming, phase=Phase.COMMITTED, own=incoming.arrived)
    changed = replace(_put(buffer, committed), held=held, lent=buffer.lent + len(rest))
    parts = transfers_of(changed, incoming.request.id)
    # no deadline while it waits for the other parts to be committed
    incomplete = any(part.phase is not Phase.COMMITTED for part in parts)
    for part in [committed] if incomplete else parts:
        changed = _put(
            changed, replace(part, deadline=math.inf if incomplete else now + buffer.limits.idle_s)
        )
    changed, admitted = _admit(changed, now)  # transfers that wait for the same records need fewer slots now
    return changed, (Complete(transfer, peer, frozenset(keep), rest), *admitted)


def cancel(buffer: Buffer, transfer: str, peer: Hashable, now: float) -> Transition:
    """End a transfer that its sender cancelled. Does nothing if it is committed or over."""
    incoming = buffer.transfers.get(transfer)
    if incoming is None or incoming.peer != peer or incoming.phase is Phase.COMMITTED:
        return buffer, ()
    return _end(buffer, [incoming], "cancelled by its sender", now)


def release(buffer: Buffer, request_id: str, reason: str, now: float) -> Transition:
    """End a request that this node no longer needs. Does nothing if it is over."""
    return _end(buffer, transfers_of(buffer, request_id), reason, now)


def transfers_of(buffer: Buffer, request_id: str) -> list[Incoming]:
    """Return the transfers of a request that have arrived and are not over."""
    transfer_ids = buffer.requests.get(request_id, (request_id,))
    return [buffer.transfers[transfer] for transfer in transfer_ids if transfer in buffer.transfers]


def delete(buffer: Buffer, names: Collection[str]) -> Transition:
    """Remove damaged records from the buffer and from the transfers that hold them."""
    deleted = tuple(name for name in names if name in buffer.held)
    if not deleted:
        return buffer, ()
    transfers = {}
    for transfer in buffer.transfers.values():
        kept = frozenset(i for i in transfer.holds if transfer.names[i] not in deleted)
        own = transfer.own & kept if transfer.phase is Phase.COMMITTED else transfer.own
        transfers[transfer.id] = replace(
            transfer, shared=transfer.shared & kept, own=own, arrived=transfer.arrived & own
        )
    held = {name: count for name, count in buffer.held.items() if name not in deleted}
    changed = replace(buffer, transfers=transfers, held=held, lent=buffer.lent + len(deleted))
    return changed, (Delete(deleted),)


def peer_lost(buffer: Buffer, peer: Hashable, now: float) -> Transition:
    """End the transfers of a disconnected sender that are not committed."""
    ending = [t for t in buffer.transfers.values() if t.peer == peer and t.phase is not Phase.COMMITTED]
    return _end(buffer, ending, "its sender is gone", now)


def slots_freed(buffer: Buffer, count: int, now: float) -> Transition:
    """Free `count` of the lent slots: nothing reads or writes them any more."""
    assert count <= buffer.lent, f"{count} slots are freed, {buffer.lent} were lent"
    return _admit(replace(buffer, lent=buffer.lent - count, free=buffer.free + count), now)


def expire(buffer: Buffer, now: float) -> Transition:
    """End transfers that are past their deadline."""
    reasons = {
        Phase.WAITING: "no slots came free in time",
        Phase.RECEIVING: "nothing came in for too long",
        Phase.COMMITTED: "nobody used it in time",
    }
    actions: list[Action] = []
    for phase, reason in reasons.items():
        late = [t for t in buffer.transfers.values() if t.phase is phase and t.deadline <= now]
        buffer, new_actions = _end(buffer, late, reason, now)
        actions += new_actions
    return buffer, tuple(actions)


def close(buffer: Buffer, now: float, *, at_once: bool) -> Transition:
    """Admit no more transfers, and end those that wait; if `at_once`, end all."""
    buffer = replace(buffer, closed=True)
    ending = [t for t in buffer.transfers.values() if at_once or t.phase is Phase.WAITING]
    return _end(buffer, ending, "the receiver is closing", now)


def next_deadline(buffer: Buffer) -> float | None:
    """Return the earliest deadline, None if there is none."""
    return min((t.deadline for t in buffer.transfers.values()), default=None)


def check_integrity(buffer: Buffer) -> None:
    """Check that every slot is counted once, and that the number of holders of every record is right.

    Raises:
        AssertionError: a count is wrong, which is a defect in kvkit.
    """
    filling = sum(len(t.own) for t in buffer.transfers.values() if t.phase is Phase.RECEIVING)
    assert min(buffer.free, buffer.lent) >= 0, buffer
    assert buffer.free + buffer.lent + filling + len(buffer.held) == buffer.slots, buffer
    holders: Counter[str] = Counter()
    assert (
        buffer.requests.keys() == {t.request.id for t in buffer.transfers.values()} - buffer.transfers.keys()
    )
    for request_id in buffer.requests:
        parts = transfers_of(buffer, request_id)
        waiting = [part for part in parts if part.phase is Phase.WAITING]
        assert {part.request for part in parts} == {parts[0].request}, buffer
        assert waiting == parts or (not waiting and len(parts) == parts[0].request.parts), buffer
    for transfer in buffer.transfers.values():
        assert not transfer.shared & transfer.own, transfer
        assert transfer.arrived <= transfer.own, transfer
        holders.update(transfer.names[index] for index in transfer.holds)
    assert holders == buffer.held, buffer


def _receiving(buffer: Buffer, transfer: str, peer: Hashable) -> Incoming | None:
    """Return a transfer that must be receiving; None if it is over, which its sender may not know yet."""
    incoming = buffer.transfers.get(transfer)
    if incoming is not None and (incoming.peer != peer or incoming.phase is not Phase.RECEIVING):
        raise Unexpected(f"transfer {transfer}: this peer has no receiving transfer of this id")
    return incoming


def _put(buffer: Buffer, transfer: Incoming) -> Buffer:
    return replace(buffer, transfers={**buffer.transfers, transfer.id: transfer})


def _admit(buffer: Buffer, now: float) -> Transition:
    """Admit waiting requests, in the order in which their last parts arrived, until one does not fit."""
    actions: list[Action] = []
    for last in [t for t in buffer.transfers.values() if t.phase is Phase.WAITING]:
        parts = transfers_of(buffer, last.request.id)
        if len(parts) < last.request.parts or parts[-1] is not last:
            continue
        admitted = []
        for part in parts:
            needed = [i for i in range(len(part.names)) if i not in part.elsewhere]
            shared = frozenset(i for i in needed if part.names[i] in buffer.held)
            own, deadline = frozenset(needed) - shared, now + buffer.limits.transfer_s
            admitted.append(replace(part, phase=Phase.RECEIVING, shared=shared, own=own, deadline=deadline))
        required_slots = sum(len(part.own) for part in admitted)
        if required_slots > buffer.free:
            break
        held = Counter(buffer.held)
        for part in admitted:
            held.update(part.names[index] for index in part.shared)
            buffer = _put(buffer, part)
            actions.append(Grant(part.id, part.peer, len(part.names), part.own))
        buffer = replace(buffer, held=held, free=buffer.free - required_slots)
    return buffer, tuple(actions)


def _end(buffer: Buffer, ending: Sequence[Incoming], reason: str, now: float) -> Transition:
    """End transfers and the other parts of their requests, then admit waiting requests that fit now."""
    if not ending:
        return buffer, ()
    transfers, held, lent = dict(buffer.transfers), Counter(buffer.held), buffer.lent
    requests = dict(buffer.requests)
    reasons = {transfer.id: reason for transfer in ending}
    for transfer in ending:
        for part in transfers_of(buffer, transfer.request.id):
            reasons.setdefault(part.id, f"another part of it: {reason}")
        requests.pop(transfer.request.id, None)
    actions: list[Action] = []
    for name, part_reason in reasons.items():
        transfer = transfers.pop(name)
        if transfer.phase is Phase.WAITING:
            actions.append(Deny(transfer.id, transfer.peer, part_reason))
            continue
        holds = [transfer.names[index] for index in sorted(transfer.holds)]
        held.subtract(holds)
        names = tuple(name for name in holds if not held[name])
        for name in names:
            del held[name]
        filling = transfer.own if transfer.phase is Phase.RECEIVING else frozenset()
        lent += len(filling) + len(names)
        actions.append(End(transfer.id, transfer.peer, part_reason, filling, names))
    changed = replace(buffer, transfers=transfers, held=held, lent=lent, requests=requests)
    changed, admitted = _admit(changed, now)
    return changed, (*actions, *admitted)
