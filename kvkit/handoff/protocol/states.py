"""What becomes of the transfers that a node receives: pure functions (state, event) -> (state, actions).

The state is the whole buffer, since transfers compete for its slots:

    reserve -> waiting -> receiving -> committed -> ended
                 |            |           |
                 +- refused   +-----------+- released, cancelled, peer lost, too late

A reservation is for the whole request, all or nothing, first come first served. Who was admitted needs no
more and ends by itself or by its deadline, and who waits stands in nobody's way: data, commits, cancels and
releases of others go on. So every transfer that fits the buffer is admitted or refused in finite time.
`kvkit.handoff.protocol.outgoing` is the other side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

MAX_TRANSFERS = 4096
"""Transfers that a buffer knows at a time, with those that wait."""


class Phase(StrEnum):
    """Where a transfer is. One that ended is forgotten."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    COMMITTED = "committed"


Outcome = Literal["done", "refused", "failed"]
"""How a transfer ends, for counting: failed is one that was admitted and did not arrive."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a transfer may stay in each phase, in seconds.

    Args:
        allocation_s: waiting for slots.
        transfer_s: receiving, without anything coming in.
        idle_s: committed, without being used.
    """

    allocation_s: float
    transfer_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Incoming:
    """One transfer, as its receiver knows it.

    Attributes:
        peer: whose it is; events from others do not count.
        names: of its records; what follows are indices into them.
        elsewhere: what this node has in other memory.
        shared: what the buffer held when it was admitted, from other transfers.
        own: what has a slot of its own; when committed, what came and nobody else had brought before.
        arrived: what is in, of `own`.
        deadline: when it ends by itself.
    """

    id: str
    peer: Hashable
    names: tuple[str, ...]
    phase: Phase
    deadline: float
    elsewhere: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    own: frozenset[int] = frozenset()
    arrived: frozenset[int] = frozenset()

    @property
    def holds(self) -> frozenset[int]:
        """The records of the buffer that stay as long as it does."""
        return self.shared | self.own if self.phase is Phase.COMMITTED else self.shared


@dataclass(frozen=True, slots=True)
class Buffer:
    """The state. Every slot is free, filling (`own` of a receiving transfer), a held record, or lent.

    Attributes:
        slots: of the buffer.
        free: those that a transfer may have.
        lent: those that transfers have released and that somebody still reads or writes.
        transfers: by id, in the order of arrival.
        held: by name of a record, the number of transfers that hold it.
        closed: whether nothing more is admitted.
    """

    slots: int
    limits: Limits
    free: int
    lent: int = 0
    transfers: Mapping[str, Incoming] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    closed: bool = False

    @staticmethod
    def empty(slots: int, limits: Limits) -> Buffer:
        """A buffer of so many slots."""
        return Buffer(slots, limits, free=slots)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is done about a transfer, and its sender is told."""

    transfer: str
    peer: Hashable


@dataclass(frozen=True, slots=True)
class Grant(Verdict):
    """Take a slot for each of `own`."""

    names: int
    own: frozenset[int]


@dataclass(frozen=True, slots=True)
class Deny(Verdict):
    """There will be no slots."""

    reason: str


@dataclass(frozen=True, slots=True)
class Complete(Verdict):
    """The records of `keep` are available from now on; release the slots of `rest`."""

    keep: frozenset[int]
    rest: frozenset[int]


@dataclass(frozen=True, slots=True)
class End(Verdict):
    """The transfer is over: release the slots of `filling`, and the records `names`."""

    reason: str
    filling: frozenset[int]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """Release these records."""

    names: tuple[str, ...]


Action = Verdict | Delete
Next = tuple[Buffer, tuple[Action, ...]]


class Unexpected(ValueError):
    """An event does not go with the state of its transfer: the peer broke the protocol."""


def reserve(
    buffer: Buffer,
    transfer: str,
    peer: Hashable,
    names: Sequence[str],
    elsewhere: Collection[str],
    deadline_s: float,
    now: float,
) -> Next:
    """A sender asks for slots for distinct `names`, but for those that this node has `elsewhere`."""
    outside = frozenset(i for i, name in enumerate(names) if name in elsewhere)
    reason = None
    if buffer.closed:
        reason = "the receiver is closing"
    elif transfer in buffer.transfers:
        reason = f"there is a transfer {transfer} already"
    elif len(buffer.transfers) >= MAX_TRANSFERS:
        reason = f"{MAX_TRANSFERS} transfers are under way"
    elif len(names) - len(outside) > buffer.slots:
        reason = f"{len(names) - len(outside)} records do not fit the buffer's {buffer.slots} slots"
    if reason is not None:
        return buffer, (Deny(transfer, peer, reason),)
    deadline = now + min(deadline_s, buffer.limits.allocation_s)
    waiting = Incoming(transfer, peer, tuple(names), Phase.WAITING, deadline, elsewhere=outside)
    return _admit(_put(buffer, waiting), now)


def arrived(buffer: Buffer, transfer: str, peer: Hashable, index: int, now: float) -> Next:
    """A record is in its slot. Nothing happens if the transfer is over.

    Raises:
        Unexpected: it has no slot, or is in already.
    """
    found = _receiving(buffer, transfer, peer)
    if found is None:
        return buffer, ()
    if index not in found.own or index in found.arrived:
        raise Unexpected(f"transfer {transfer}: record {index} is not expected")
    deadline = now + buffer.limits.transfer_s
    return _put(buffer, replace(found, arrived=found.arrived | {index}, deadline=deadline)), ()


def commit(buffer: Buffer, transfer: str, peer: Hashable, missing: Collection[int], now: float) -> Next:
    """All that comes is in, but for `missing`. Nothing happens if the transfer is over.

    Raises:
        Unexpected: something else is missing, or `missing` is not.
    """
    found = _receiving(buffer, transfer, peer)
    if found is None:
        return buffer, ()
    absent = found.own - found.arrived
    if absent != frozenset(missing):
        raise Unexpected(f"transfer {transfer}: {len(absent)} records are missing, not {len(missing)}")
    keep = {index for index in found.arrived if found.names[index] not in buffer.held}
    held = Counter(buffer.held)
    held.update(found.names[index] for index in found.arrived)
    rest = found.own - keep
    deadline = now + buffer.limits.idle_s
    done = replace(found, phase=Phase.COMMITTED, own=found.arrived, deadline=deadline)
    changed = replace(_put(buffer, done), held=held, lent=buffer.lent + len(rest))
    changed, admitted = _admit(changed, now)  # who waits for the same records needs fewer slots now
    return changed, (Complete(transfer, peer, frozenset(keep), rest), *admitted)


def cancel(buffer: Buffer, transfer: str, peer: Hashable, now: float) -> Next:
    """The sender cancels. Nothing happens to what is committed, or over."""
    found = buffer.transfers.get(transfer)
    if found is None or found.peer != peer or found.phase is Phase.COMMITTED:
        return buffer, ()
    return _end(buffer, [found], "cancelled by its sender", now)


def release(buffer: Buffer, transfer: str, reason: str, now: float) -> Next:
    """Nobody here needs the transfer any more. Nothing happens if it is over."""
    found = buffer.transfers.get(transfer)
    return (buffer, ()) if found is None else _end(buffer, [found], reason, now)


def delete(buffer: Buffer, names: Collection[str]) -> Next:
    """These records are damaged: no transfer holds them any longer."""
    gone = tuple(name for name in names if name in buffer.held)
    if not gone:
        return buffer, ()
    transfers = {}
    for transfer in buffer.transfers.values():
        kept = frozenset(i for i in transfer.holds if transfer.names[i] not in gone)
        own = transfer.own & kept if transfer.phase is Phase.COMMITTED else transfer.own
        transfers[transfer.id] = replace(
            transfer, shared=transfer.shared & kept, own=own, arrived=transfer.arrived & own
        )
    held = {name: count for name, count in buffer.held.items() if name not in gone}
    changed = replace(buffer, transfers=transfers, held=held, lent=buffer.lent + len(gone))
    return changed, (Delete(gone),)


def lost(buffer: Buffer, peer: Hashable, now: float) -> Next:
    """A sender is gone. What it committed stays."""
    gone = [t for t in buffer.transfers.values() if t.peer == peer and t.phase is not Phase.COMMITTED]
    return _end(buffer, gone, "its sender is gone", now)


def freed(buffer: Buffer, count: int, now: float) -> Next:
    """So many slots that were lent are nobody's any more."""
    assert count <= buffer.lent, f"{count} slots came back, {buffer.lent} were away"
    return _admit(replace(buffer, lent=buffer.lent - count, free=buffer.free + count), now)


def expire(buffer: Buffer, now: float) -> Next:
    """End what is past its deadline."""
    reasons = {
        Phase.WAITING: "no slots came free in time",
        Phase.RECEIVING: "nothing came in for too long",
        Phase.COMMITTED: "nobody used it in time",
    }
    actions: list[Action] = []
    for phase, reason in reasons.items():
        late = [t for t in buffer.transfers.values() if t.phase is phase and t.deadline <= now]
        buffer, more = _end(buffer, late, reason, now)
        actions += more
    return buffer, tuple(actions)


def close(buffer: Buffer, now: float, *, at_once: bool) -> Next:
    """Admit nothing more, and end what waits; `at_once`, everything."""
    buffer = replace(buffer, closed=True)
    gone = [t for t in buffer.transfers.values() if at_once or t.phase is Phase.WAITING]
    return _end(buffer, gone, "the receiver is closing", now)


def next_deadline(buffer: Buffer) -> float | None:
    """When `expire` has something to do, unless something happens before."""
    return min((t.deadline for t in buffer.transfers.values()), default=None)


def check_integrity(buffer: Buffer) -> None:
    """Prove that every slot is accounted for once, and every record held by as many as hold it.

    Raises:
        AssertionError: not so. This is a defect in kvkit.
    """
    filling = sum(len(t.own) for t in buffer.transfers.values() if t.phase is Phase.RECEIVING)
    assert min(buffer.free, buffer.lent) >= 0, buffer
    assert buffer.free + buffer.lent + filling + len(buffer.held) == buffer.slots, buffer
    holders: Counter[str] = Counter()
    for transfer in buffer.transfers.values():
        assert not transfer.shared & transfer.own, transfer
        assert transfer.arrived <= transfer.own, transfer
        holders.update(transfer.names[index] for index in transfer.holds)
    assert holders == buffer.held, buffer


def _receiving(buffer: Buffer, transfer: str, peer: Hashable) -> Incoming | None:
    """The transfer that something came for; None if it is over, which its sender may not know yet."""
    found = buffer.transfers.get(transfer)
    if found is not None and (found.peer != peer or found.phase is not Phase.RECEIVING):
        raise Unexpected(f"transfer {transfer}: this peer has none of the name that receives")
    return found


def _put(buffer: Buffer, transfer: Incoming) -> Buffer:
    return replace(buffer, transfers={**buffer.transfers, transfer.id: transfer})


def _admit(buffer: Buffer, now: float) -> Next:
    """Admit those who wait, in order, while the first of them fits."""
    actions: list[Action] = []
    for transfer in [t for t in buffer.transfers.values() if t.phase is Phase.WAITING]:
        inside = [i for i in range(len(transfer.names)) if i not in transfer.elsewhere]
        shared = frozenset(i for i in inside if transfer.names[i] in buffer.held)
        own = frozenset(inside) - shared
        if len(own) > buffer.free:
            break
        held = Counter(buffer.held)
        held.update(transfer.names[index] for index in shared)
        deadline = now + buffer.limits.transfer_s
        admitted = replace(transfer, phase=Phase.RECEIVING, shared=shared, own=own, deadline=deadline)
        buffer = replace(_put(buffer, admitted), held=held, free=buffer.free - len(own))
        actions.append(Grant(transfer.id, transfer.peer, len(transfer.names), own))
    return buffer, tuple(actions)


def _end(buffer: Buffer, ending: Sequence[Incoming], reason: str, now: float) -> Next:
    """End transfers; who waited after them may come in."""
    if not ending:
        return buffer, ()
    transfers, held, lent = dict(buffer.transfers), Counter(buffer.held), buffer.lent
    actions: list[Action] = []
    for transfer in ending:
        del transfers[transfer.id]
        if transfer.phase is Phase.WAITING:
            actions.append(Deny(transfer.id, transfer.peer, reason))
            continue
        holds = [transfer.names[index] for index in sorted(transfer.holds)]
        held.subtract(holds)
        names = tuple(name for name in holds if not held[name])
        for name in names:
            del held[name]
        filling = transfer.own if transfer.phase is Phase.RECEIVING else frozenset()
        lent += len(filling) + len(names)
        actions.append(End(transfer.id, transfer.peer, reason, filling, names))
    changed, admitted = _admit(replace(buffer, transfers=transfers, held=held, lent=lent), now)
    return changed, (*actions, *admitted)
