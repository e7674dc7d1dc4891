"""State machine of a transfer at its sender: pure functions (state, event) -> (state, instructions).

    asked -> sending -> committed -> ended
      |         |           |          ^
      +---------+-----------+----------'  refused, released by the receiver, cancelled, too late

A transfer takes records only once it is admitted. While it waits for its receiver it holds no slots of its
own node, so nodes cannot deadlock on each other's slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvkit.handoff.protocol.messages import Cancel, Commit
from kvkit.handoff.protocol.states import Unexpected


class Stage(StrEnum):
    """Stage of a transfer."""

    ASKED = "asked"
    SENDING = "sending"
    COMMITTED = "committed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the record `names[index]` to a slot."""

    index: int
    slot: int


Instruction = Send | Commit | Cancel


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One transfer, as its sender knows it.

    Attributes:
        names: names of its records.
        sends: by name, the instruction for each record that the receiver lacks. Empty until it is admitted.
        unsent: names in `sends` that were not put yet.
        deadline: monotonic time at which it is cancelled.
        error: why it failed; None if the receiver has everything.
        missing: number of records that were never put.
    """

    id: str
    names: tuple[str, ...]
    stage: Stage
    deadline: float
    transfer_s: float
    sends: Mapping[str, Send] = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()
    error: str | None = None
    missing: int = 0

    @staticmethod
    def opened(
        transfer: str, names: Sequence[str], deadline_s: float, transfer_s: float, now: float
    ) -> Outgoing:
        """Return a transfer that has asked for slots; `transfer_s` limits each later stage, in seconds."""
        return Outgoing(transfer, tuple(names), Stage.ASKED, now + deadline_s, transfer_s)


Transition = tuple[Outgoing, tuple[Instruction, ...]]


def admitted(out: Outgoing, slots: Sequence[int], now: float) -> Transition:
    """Start sending: the receiver admits the transfer.

    Args:
        slots: slot of each record, -1 for records that the receiver has already.

    Raises:
        Unexpected: the transfer is admitted already, or there is not one slot for each name.
    """
    if out.stage is not Stage.ASKED:
        return _unexpected_answer(out)
    if len(slots) != len(out.names):
        raise Unexpected(f"transfer {out.id}: {len(slots)} slots for {len(out.names)} records")
    sends = {out.names[i]: Send(i, slot) for i, slot in enumerate(slots) if slot >= 0}
    sending = replace(
        out, stage=Stage.SENDING, sends=sends, unsent=frozenset(sends), deadline=now + out.transfer_s
    )
    return (sending, ()) if sends else _commit(sending, now)


def put(out: Outgoing, name: str, now: float) -> Transition:
    """Send a record, and the commit after the last one. Does nothing if the record is not expected."""
    if out.stage is not Stage.SENDING or name not in out.unsent:
        return out, ()
    sending = replace(out, unsent=out.unsent - {name}, deadline=now + out.transfer_s)
    if sending.unsent:
        return sending, (out.sends[name],)
    committed, instructions = _commit(sending, now)
    return committed, (out.sends[name], *instructions)


def finish(out: Outgoing, now: float) -> Transition:
    """Commit what was put; no more records follow. A transfer that is not admitted is cancelled."""
    if out.stage is Stage.ASKED:
        return cancelled(out, "it was finished before it was admitted")
    return _commit(out, now) if out.stage is Stage.SENDING else (out, ())


def done(out: Outgoing) -> Transition:
    """End the transfer: the receiver has everything.

    Raises:
        Unexpected: the transfer is not committed.
    """
    if out.stage is not Stage.COMMITTED:
        return _unexpected_answer(out)
    return _ended(out, None), ()


def refused(out: Outgoing, reason: str) -> Transition:
    """End the transfer: the receiver has too few slots or has disconnected."""
    return (out, ()) if out.stage is Stage.ENDED else (_ended(out, reason), ())


def released(out: Outgoing, reason: str) -> Transition:
    """End the transfer that its receiver released. Confirms at any stage that nothing more is written."""
    return refused(out, reason)[0], (Cancel(out.id),)


def cancelled(out: Outgoing, reason: str) -> Transition:
    """Cancel the transfer."""
    return (out, ()) if out.stage is Stage.ENDED else (_ended(out, reason), (Cancel(out.id),))


def overdue(out: Outgoing, now: float) -> Transition:
    """Cancel the transfer if it is past its deadline."""
    reasons = {
        Stage.ASKED: "the receiver did not answer in time",
        Stage.SENDING: "no record was put for too long",
        Stage.COMMITTED: "the receiver did not confirm in time",
    }
    return (out, ()) if now < out.deadline or out.stage is Stage.ENDED else cancelled(out, reasons[out.stage])


def _commit(out: Outgoing, now: float) -> Transition:
    missing = tuple(i for i, name in enumerate(out.names) if name in out.unsent)
    deadline = now + out.transfer_s
    committed = replace(
        out, stage=Stage.COMMITTED, unsent=frozenset(), missing=len(missing), deadline=deadline
    )
    return committed, (Commit(out.id, missing),)


def _ended(out: Outgoing, error: str | None) -> Outgoing:
    return replace(out, stage=Stage.ENDED, unsent=frozenset(), error=error)


def _unexpected_answer(out: Outgoing) -> Transition:
    """Ignore an answer to an ended transfer, sent before its end. Raises Unexpected for any other."""
    if out.stage is Stage.ENDED:
        return out, ()
    raise Unexpected(f"transfer {out.id} is {out.stage}: this answer is not expected")
