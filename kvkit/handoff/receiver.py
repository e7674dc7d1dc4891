"""The buffer that peers send records into: carries out what `kvkit.handoff.protocol.states` decides."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from kvkit.handoff.deadlines import Deadlines
from kvkit.handoff.protocol import messages, states
from kvkit.handoff.protocol.messages import HANDOFF, Data, OfTransfer
from kvkit.handoff.protocol.states import Buffer, Limits, Outcome, Phase, RequestRef, Unexpected
from kvkit.handoff.transport.link import Link
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import Scope

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Transfers that ended of which is still known why."""


@dataclass(frozen=True, slots=True)
class Status:
    """Where what was sent for a request is.

    Attributes:
        phase: None when it ended.
        records: of its transfers.
        held: how many are available; all or none, but for those that its sender said are missing.
        reason: why it ended.
    """

    phase: Phase | None
    records: int = 0
    held: int = 0
    reason: str = ""


class Receiver:
    """Records that came from peers, in slots of an arena of its own. Thread-safe.

    Args:
        arena: nobody else takes slots of it. The receiver closes it.
        limits: how long transfers may stay.

    Attributes:
        outcomes: transfers so far that were done, refused, or admitted and failed.
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
        # its lock is one that a thread may take twice: a slot that comes free may admit another transfer
        self._changed = threading.Condition()
        self._watchers: list[Callable[[object], None]] = []
        arena.when_freed(self._freed)
        self._deadlines = Deadlines("kvkit-handoff-deadlines", self._expire)

    def connected(self, link: Link) -> None:
        """A sender is there."""
        with self._changed:
            self._links[link.number] = link

    def place(self, link: Link, data: Data) -> Lease | None:
        """A share of the slot that a record is for; None if the transfer is over.

        Raises:
            Unexpected: nobody reserved it, or it does not fit.
        """
        with self._changed:
            lease = self._expected(link, data)
            return None if lease is None else lease.share()

    def received(self, link: Link, message: messages.AnyMessage, elsewhere: Collection[str] = ()) -> None:
        """A sender asks for room for what is not `elsewhere`, brings a record, commits or cancels.

        Raises:
            Unexpected: that is not what may come of this transfer.
        """
        now, peer = time.monotonic(), link.number
        with self._changed:
            match message:
                case messages.Reserve(transfer, names, wait_s, request, parts):
                    of = RequestRef(request or transfer, parts)
                    if transfer not in self._buffer.transfers:  # or it is another's, and refused
                        self._requests[transfer] = of.id
                    if parts > 1 and of.id in self._ended:  # its other parts are gone
                        self._apply((self._buffer, (states.Deny(transfer, peer, self._ended[of.id]),)))
                        return
                    self._apply(
                        states.reserve(self._buffer, transfer, peer, names, elsewhere, wait_s, now, of)
                    )
                case Data(transfer, index, size):
                    lease = self._expected(link, message)
                    if lease is not None:
                        lease.used = size
                        self._buffer, _ = states.arrived(self._buffer, transfer, peer, index, now)
                case messages.Commit(transfer, missing):
                    self._apply(states.commit(self._buffer, transfer, peer, missing, now))
                case messages.Cancel(transfer):  # nothing more is written into its slots
                    self._apply(states.cancel(self._buffer, transfer, peer, now), quiet=peer)
                    release_all(self._unanswered.pop((peer, transfer), ()))
                case _:
                    raise Unexpected(f"{type(message).__name__} is nothing to say to an endpoint")

    def lost(self, link: Link) -> None:
        """A sender is gone."""
        with self._changed:
            self._links.pop(link.number, None)
            self._apply(states.lost(self._buffer, link.number, time.monotonic()), quiet=link.number)
            for key in [key for key in self._unanswered if key[0] == link.number]:
                release_all(self._unanswered.pop(key))

    def watch(self, changed: Callable[[object], None]) -> None:
        """Have `changed` called, with the receiver, when a transfer is committed or over.

        By any thread, which holds the receiver's lock: it must be quick and not wait.
        """
        with self._changed:
            self._watchers.append(changed)

    def release(self, request: str, reason: str = "used") -> None:
        """Nobody needs a request any more: its records go, unless others hold them. None is fine, too."""
        with self._changed:
            self._apply(states.release(self._buffer, request, reason, time.monotonic()))

    def delete(self, names: Sequence[str]) -> None:
        """Release records, whoever holds them: they are damaged."""
        with self._changed:
            self._apply(states.delete(self._buffer, names))

    def status(self, request: str) -> Status | None:
        """Where what is sent for a request is; None if that is not known, or of some of its parts not yet.

        A request has the name of its transfer where one brings all of it.
        """
        with self._changed:
            parts = states.parts_of(self._buffer, request)
            if not parts:
                reason = self._ended.get(request)
                return None if reason is None else Status(None, reason=reason)
            if len(parts) < parts[0].of.parts:
                return None
            phases = (part.phase for part in parts if part.phase is not Phase.COMMITTED)
            held = sum(len(part.elsewhere) + len(part.holds) for part in parts)
            return Status(next(phases, Phase.COMMITTED), sum(len(part.names) for part in parts), held)

    def wait(self, request: str, timeout_s: float) -> Status | None:
        """`status`, as soon as it is committed or over; after `timeout_s` as it is then."""

        def settled() -> bool:
            status = self.status(request)
            return status is not None and status.phase in (None, Phase.COMMITTED)

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            return self.status(request)

    def match_prefix(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, are available."""
        with self._changed:
            return next((i for i, name in enumerate(names) if name not in self._records), len(names))

    def borrow(self, name: str) -> Lease | None:
        """A share of the slot of a record."""
        with self._changed:
            lease = self._records.get(name)
            return None if lease is None else lease.share()

    def records(self) -> list[tuple[str, int]]:
        """(name, bytes) of every record."""
        with self._changed:
            return [(name, lease.used) for name, lease in self._records.items()]

    def transfers(self) -> dict[str, Phase]:
        """The phase of every transfer that is not over."""
        with self._changed:
            return {t.id: t.phase for t in self._buffer.transfers.values()}

    def check_integrity(self) -> None:
        """Prove that no slot is lost, and that what is held is what the state says.

        Raises:
            AssertionError: not so. This is a defect in kvkit.
        """
        with self._changed:
            states.check_integrity(self._buffer)
            assert self._records.keys() == self._buffer.held.keys()
            receiving = {t.id: t.own for t in self._buffer.transfers.values() if t.phase is Phase.RECEIVING}
            assert {t: leases.keys() for t, leases in self._filling.items()} == receiving
            taken = len(self._records) + sum(map(len, self._filling.values())) + self._buffer.lent
            assert self.arena.slots - self._buffer.free == taken
        self.arena.check_integrity()

    def close(self, timeout_s: float) -> None:
        """Admit nothing more, let come in what is coming for so long, then release everything."""
        with self._changed:
            if self._buffer.closed:
                return
            self._apply(states.close(self._buffer, time.monotonic(), at_once=False))
            self._changed.wait_for(lambda: Phase.RECEIVING not in self.transfers().values(), timeout_s)
            self._apply(states.close(self._buffer, time.monotonic(), at_once=True))
        self._deadlines.close(timeout_s)
        with self._changed:
            for link in list(self._links.values()):
                self.lost(link)
        self.arena.close()

    def _expected(self, link: Link, data: Data) -> Lease | None:
        """The lease of a record that may come now; None if its transfer is over. The lock is held."""
        found = self._buffer.transfers.get(data.transfer)
        if found is None:
            return None
        lease = self._filling.get(data.transfer, {}).get(data.index)
        if found.peer != link.number or lease is None or data.index in found.arrived:
            raise Unexpected(f"transfer {data.transfer}: record {data.index} is not expected")
        if data.size > self.arena.slot_bytes:
            raise Unexpected(
                f"transfer {data.transfer}: {data.size} bytes do not fit {self.arena.slot_bytes}"
            )
        return lease

    def _freed(self) -> None:
        with self._changed:
            self._apply(states.freed(self._buffer, 1, time.monotonic()))

    def _apply(self, outcome: states.Next, quiet: Hashable = None) -> None:
        """Take over a new state and carry out its actions. The lock is held.

        `quiet`: the sender that writes no more; others whose transfers end do not know yet, and may go on
        writing into shared slots.
        """
        self._buffer, actions = outcome
        for action in actions:
            if isinstance(action, states.Delete):
                release_all([self._records.pop(name) for name in action.names])
                continue
            link = self._links.get(action.peer)
            message = self._carry_out(action, link, writes_on=action.peer != quiet)
            if link is not None:
                link.say(message)
        self._changed.notify_all()
        self._deadlines.changed()
        if any(isinstance(action, states.Deny | states.Complete | states.End) for action in actions):
            for changed in self._watchers:
                changed(self)

    def _carry_out(self, verdict: states.Verdict, link: Link | None, writes_on: bool) -> OfTransfer:
        """Do what was decided about a transfer; what to tell its sender."""
        transfer = verdict.transfer
        match verdict:
            case states.Grant(own=own):
                leases = self.arena.acquire(len(own), 0.0, at_least=len(own)) if own else []
                taken = dict(zip(sorted(own), leases, strict=True))
                self._filling[transfer] = taken
                return messages.Admit(
                    transfer, tuple(taken[i].slot if i in taken else -1 for i in range(verdict.names))
                )
            case states.Deny(reason=reason):
                self.outcomes["refused"] += 1
                if transfer not in self._buffer.transfers:  # another's goes on
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
                    held = self._unanswered.setdefault((link.number, transfer), [])
                    held += [lease.share() for lease in unfilled]
                release_all(unfilled)
                release_all([self._records.pop(name) for name in verdict.names])
                self._remember(transfer, reason)
                return messages.Release(transfer, reason)
        raise AssertionError(verdict)

    def _remember(self, transfer: str, reason: str) -> None:
        request = self._requests.pop(transfer, transfer)
        self._ended.pop(request, None)
        self._ended[request] = reason
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _expire(self, now: float) -> float | None:
        """End what is past its deadline; the next deadline."""
        with self._changed:
            self._apply(states.expire(self._buffer, now))
            return states.next_deadline(self._buffer)
