"""What becomes of a transfer that a node sends: pure functions (state, event) -> (state, what to say).

    asked -> sending -> committed -> ended
      |         |           |          ^
      +---------+-----------+----------'  refused, released by the receiver, cancelled, too late

It wants records only once it is admitted: who waits for a receiver keeps no slot of its own host, so nodes
cannot wait for each other's slots in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvkit.handoff.protocol.messages import Cancel, Commit
from kvkit.handoff.protocol.states import Unexpected


class Stage(StrEnum):
    """Where a transfer is."""

    ASKED = "asked"
    SENDING = "sending"
    COMMITTED = "committed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a record, `names[index]`, to a slot."""

    index: int
    slot: int


Instruction = Send | Commit | Cancel


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One transfer.

    Attributes:
        names: of its records.
        places: where each goes, by name; what the receiver has already is not in it. Empty until it admits.
        unsent: what it still waits for, of these.
        deadline: when it ends by itself.
        error: why it ended, None if the receiver has everything.
        missing: how many records never came.
    """

    id: str
    names: tuple[str, ...]
    stage: Stage
    deadline: float
    transfer_s: float
    places: Mapping[str, Send] = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()
    error: str | None = None
    missing: int = 0

    @staticmethod
    def asked(
        transfer: str, names: Sequence[str], deadline_s: float, transfer_s: float, now: float
    ) -> Outgoing:
        """A transfer whose `Reserve` was just sent; `transfer_s` limits every wait after that."""
        return Outgoing(transfer, tuple(names), Stage.ASKED, now + deadline_s, transfer_s)


Sent = tuple[Outgoing, tuple[Instruction, ...]]


def admitted(out: Outgoing, slots: Sequence[int], now: float) -> Sent:
    """The receiver has room; -1 for what it has already.

    Raises:
        Unexpected: nobody asked, or it is not a slot for each name.
    """
    if out.stage is not Stage.ASKED:
        return _unasked(out)
    if len(slots) != len(out.names):
        raise Unexpected(f"transfer {out.id}: {len(slots)} slots for {len(out.names)} records")
    places = {out.names[i]: Send(i, slot) for i, slot in enumerate(slots) if slot >= 0}
    sending = replace(
        out, stage=Stage.SENDING, places=places, unsent=frozenset(places), deadline=now + out.transfer_s
    )
    return (sending, ()) if places else _commit(sending, now)


def put(out: Outgoing, name: str, now: float) -> Sent:
    """A record is there to be sent; the last one is followed by the commit."""
    if out.stage is not Stage.SENDING or name not in out.unsent:
        return out, ()
    sending = replace(out, unsent=out.unsent - {name}, deadline=now + out.transfer_s)
    if sending.unsent:
        return sending, (out.places[name],)
    committed, steps = _commit(sending, now)
    return committed, (out.places[name], *steps)


def finish(out: Outgoing, now: float) -> Sent:
    """No more records will be put: the receiver gets what there is."""
    if out.stage is Stage.ASKED:
        return cancelled(out, "it was finished before it was admitted")
    return _commit(out, now) if out.stage is Stage.SENDING else (out, ())


def done(out: Outgoing) -> Sent:
    """The receiver has everything.

    Raises:
        Unexpected: nothing was committed.
    """
    if out.stage is not Stage.COMMITTED:
        return _unasked(out)
    return _over(out, None), ()


def refused(out: Outgoing, reason: str) -> Sent:
    """The receiver has no room, or is gone."""
    return (out, ()) if out.stage is Stage.ENDED else (_over(out, reason), ())


def released(out: Outgoing, reason: str) -> Sent:
    """The receiver released it: say that nothing more is written, whatever this transfer's stage is."""
    return refused(out, reason)[0], (Cancel(out.id),)


def cancelled(out: Outgoing, reason: str) -> Sent:
    """The sender cancels."""
    return (out, ()) if out.stage is Stage.ENDED else (_over(out, reason), (Cancel(out.id),))


def overdue(out: Outgoing, now: float) -> Sent:
    """End it if it is past its deadline."""
    reasons = {
        Stage.ASKED: "the receiver did not answer in time",
        Stage.SENDING: "no record was put for too long",
        Stage.COMMITTED: "the receiver did not confirm in time",
    }
    return (out, ()) if now < out.deadline or out.stage is Stage.ENDED else cancelled(out, reasons[out.stage])


def _commit(out: Outgoing, now: float) -> Sent:
    missing = tuple(i for i, name in enumerate(out.names) if name in out.unsent)
    deadline = now + out.transfer_s
    committed = replace(
        out, stage=Stage.COMMITTED, unsent=frozenset(), missing=len(missing), deadline=deadline
    )
    return committed, (Commit(out.id, missing),)


def _over(out: Outgoing, error: str | None) -> Outgoing:
    return replace(out, stage=Stage.ENDED, unsent=frozenset(), error=error)


def _unasked(out: Outgoing) -> Sent:
    """What may cross a cancel on its way is passed over; anything else is an error."""
    if out.stage is Stage.ENDED:
        return out, ()
    raise Unexpected(f"transfer {out.id}: this answer does not go with one that is {out.stage}")
