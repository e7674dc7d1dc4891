"""The buffer that peers send records into: carries out what `kvkit.handoff.protocol.states` decides."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvkit.handoff.deadlines import Deadlines
from kvkit.handoff.protocol import states
from kvkit.handoff.protocol.messages import Admit, Done, Message, Refuse, Release
from kvkit.handoff.protocol.states import Buffer, Limits, Outcome, Phase, Unexpected
from kvkit.staging import Lease, Staging, release_all

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Transfers that ended of which is still known why."""


@dataclass(frozen=True, slots=True)
class Status:
    """Where a transfer is.

    Attributes:
        phase: None when it ended.
        records: of the transfer.
        held: how many are available; all or none, but for those that its sender said are missing.
        reason: why it ended.
    """

    phase: Phase | None
    records: int = 0
    held: int = 0
    reason: str = ""


class Source(Protocol):
    """A link to a sender, as the receiver uses it: `kvkit.handoff.transport.link.Link`."""

    number: int
    shared: bool

    def say(self, message: Message) -> None: ...


class Receiver:
    """Records that came from peers, in slots of an arena of its own. Thread-safe.

    Args:
        arena: nobody else takes slots of it. The receiver closes it.
        limits: how long transfers may stay.

    Attributes:
        outcomes: transfers so far that were done, refused, or admitted and failed.
    """

    def __init__(self, arena: Staging, limits: Limits) -> None:
        self.arena = arena
        self._buffer = Buffer.empty(arena.slots, limits)
        self.outcomes: Counter[Outcome] = Counter()
        self._sources: dict[int, Source] = {}
        self._filling: dict[str, dict[int, Lease]] = {}
        self._records: dict[str, Lease] = {}
        self._unanswered: dict[tuple[int, str], list[Lease]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.RLock()  # a slot that comes free while it is held may admit another transfer
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._watchers: list[Callable[[object], None]] = []
        arena.when_freed(self._freed)
        self._deadlines = Deadlines("kvkit-handoff-deadlines", self._expire)

    def connected(self, source: Source) -> None:
        """A sender is there."""
        with self._lock:
            self._sources[source.number] = source

    def reserve(
        self,
        source: Source,
        transfer: str,
        names: Sequence[str],
        elsewhere: Collection[str],
        deadline_s: float,
    ) -> None:
        """A sender asks for room; it is told sooner or later."""
        with self._lock:
            now = time.monotonic()
            self._apply(
                states.reserve(self._buffer, transfer, source.number, names, elsewhere, deadline_s, now)
            )

    def filling(self, source: Source, transfer: str, index: int, size: int) -> Lease | None:
        """A share of the slot that a record of `size` bytes is for; None if the transfer is over.

        Raises:
            Unexpected: nobody reserved it, or it does not fit.
        """
        with self._lock:
            lease = self._expected(source, transfer, index, size)
            return None if lease is None else lease.share()

    def arrived(self, source: Source, transfer: str, index: int, size: int) -> None:
        """A record is in its slot.

        Raises:
            Unexpected: as `filling`.
        """
        with self._lock:
            lease = self._expected(source, transfer, index, size)
            if lease is not None:
                lease.used = size
                now = time.monotonic()
                self._buffer, _ = states.arrived(self._buffer, transfer, source.number, index, now)

    def commit(self, source: Source, transfer: str, missing: Collection[int]) -> None:
        """All that comes of a transfer is in.

        Raises:
            Unexpected: it is not.
        """
        with self._lock:
            self._apply(states.commit(self._buffer, transfer, source.number, missing, time.monotonic()))

    def cancelled(self, source: Source, transfer: str) -> None:
        """A sender writes no more into the slots of a transfer, and will not commit it."""
        with self._lock:
            self._apply(
                states.cancel(self._buffer, transfer, source.number, time.monotonic()), writes_on=False
            )
            release_all(self._unanswered.pop((source.number, transfer), ()))

    def lost(self, source: Source) -> None:
        """A sender is gone."""
        with self._lock:
            self._sources.pop(source.number, None)
            self._apply(states.lost(self._buffer, source.number, time.monotonic()), writes_on=False)
            for key in [key for key in self._unanswered if key[0] == source.number]:
                release_all(self._unanswered.pop(key))

    def watch(self, changed: Callable[[object], None]) -> None:
        """Have `changed` called, with the receiver, when a transfer is committed or over.

        By any thread, which holds the receiver's lock: it must be quick and not wait.
        """
        with self._lock:
            self._watchers.append(changed)

    def release(self, transfer: str, reason: str = "used") -> None:
        """Nobody needs a transfer any more: its records go, unless others hold them. None is fine, too."""
        with self._lock:
            self._apply(states.release(self._buffer, transfer, reason, time.monotonic()))

    def delete(self, names: Sequence[str]) -> None:
        """Release records, whoever holds them: they are damaged."""
        with self._lock:
            self._apply(states.delete(self._buffer, names))

    def status(self, transfer: str) -> Status | None:
        """Where a transfer is; None if it is not known, or no longer."""
        with self._lock:
            found = self._buffer.transfers.get(transfer)
            if found is not None:
                held = len(found.elsewhere) + len(found.holds)
                return Status(found.phase, len(found.names), held)
            reason = self._ended.get(transfer)
            return None if reason is None else Status(None, reason=reason)

    def wait(self, transfer: str, timeout_s: float) -> Status | None:
        """`status`, as soon as it is committed or over; after `timeout_s` as it is then."""

        def settled() -> bool:
            status = self.status(transfer)
            return status is not None and status.phase in (None, Phase.COMMITTED)

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            return self.status(transfer)

    def count_leading(self, names: Sequence[str]) -> int:
        """How many of `names`, from the first on, are available."""
        with self._lock:
            return next((i for i, name in enumerate(names) if name not in self._records), len(names))

    def borrow(self, name: str) -> Lease | None:
        """A share of the slot of a record."""
        with self._lock:
            lease = self._records.get(name)
            return None if lease is None else lease.share()

    def size(self, name: str) -> int | None:
        """Bytes of a record, None if it is not here."""
        with self._lock:
            lease = self._records.get(name)
            return None if lease is None else lease.used

    def records(self) -> list[tuple[str, int]]:
        """(name, bytes) of every record."""
        with self._lock:
            return [(name, lease.used) for name, lease in self._records.items()]

    def transfers(self) -> dict[str, Phase]:
        """The phase of every transfer that is not over."""
        with self._lock:
            return {t.id: t.phase for t in self._buffer.transfers.values()}

    def check_integrity(self) -> None:
        """Prove that no slot is lost, and that what is held is what the state says.

        Raises:
            AssertionError: not so. This is a defect in kvkit.
        """
        with self._lock:
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
            if self._closed:
                return
            self._apply(states.close(self._buffer, time.monotonic(), at_once=False))
            self._changed.wait_for(
                lambda: all(p is not Phase.RECEIVING for p in self.transfers().values()), timeout_s
            )
            self._apply(states.close(self._buffer, time.monotonic(), at_once=True))
            self._closed = True
        self._deadlines.close(timeout_s)
        with self._lock:
            for source in list(self._sources.values()):
                self.lost(source)
        self.arena.close()

    def _expected(self, source: Source, transfer: str, index: int, size: int) -> Lease | None:
        """The lease of a record that may come now; None if its transfer is over. The lock is held."""
        found = self._buffer.transfers.get(transfer)
        if found is None:
            return None
        lease = self._filling.get(transfer, {}).get(index)
        if found.peer != source.number or lease is None or index in found.arrived:
            raise Unexpected(f"transfer {transfer}: record {index} is not expected")
        if size > self.arena.slot_bytes:
            raise Unexpected(f"transfer {transfer}: {size} bytes do not fit {self.arena.slot_bytes}")
        return lease

    def _freed(self) -> None:
        with self._lock:
            self._apply(states.freed(self._buffer, 1, time.monotonic()))

    def _apply(self, outcome: states.Next, writes_on: bool = True) -> None:
        """Take over a new state and carry out its actions. The lock is held.

        `writes_on`: senders of transfers that end do not know yet, and may go on writing into shared slots.
        """
        self._buffer, actions = outcome
        for action in actions:
            if isinstance(action, states.Forget):
                for name in action.names:
                    self._records.pop(name).release()
                continue
            source = self._sources.get(action.peer) if isinstance(action.peer, int) else None
            for message in self._carry_out(action, source, writes_on):
                if source is not None:
                    source.say(message)
        self._changed.notify_all()
        self._deadlines.changed()
        if any(not isinstance(action, states.Grant | states.Forget) for action in actions):
            for changed in self._watchers:
                changed(self)

    def _carry_out(
        self,
        action: states.Grant | states.Deny | states.Complete | states.End,
        source: Source | None,
        writes_on: bool,
    ) -> Iterator[Message]:
        """Do what an action says; what to tell the sender."""
        transfer = action.transfer
        if isinstance(action, states.Grant):
            count = len(action.own)
            leases = self.arena.acquire(count, 0.0, at_least=count) if count else []
            taken = dict(zip(sorted(action.own), leases, strict=True))
            self._filling[transfer] = taken
            slots = (taken[i].slot if i in taken else -1 for i in range(action.names))
            yield Admit(transfer, tuple(slots))
        elif isinstance(action, states.Deny):
            self.outcomes["refused"] += 1
            self._remember(transfer, action.reason)
            yield Refuse(transfer, action.reason)
        elif isinstance(action, states.Complete):
            names = self._buffer.transfers[transfer].names
            leases_by_index = self._filling.pop(transfer)
            for index in action.keep:
                self._records[names[index]] = leases_by_index[index]
            release_all(leases_by_index[index] for index in action.drop)
            self.outcomes["done"] += 1
            yield Done(transfer)
        else:
            self.outcomes["failed"] += transfer in self._filling
            dropped = list(self._filling.pop(transfer, {}).values())
            if dropped and source is not None and source.shared and writes_on:
                held = self._unanswered.setdefault((source.number, transfer), [])
                held += [lease.share() for lease in dropped]
            release_all(dropped)
            release_all([self._records.pop(name) for name in action.forget])
            self._remember(transfer, action.reason)
            yield Release(transfer, action.reason)

    def _remember(self, transfer: str, reason: str) -> None:
        self._ended[transfer] = reason
        self._ended.move_to_end(transfer)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _expire(self, now: float) -> float | None:
        """End what is past its deadline; the next deadline."""
        with self._lock:
            self._apply(states.expire(self._buffer, now))
            return states.next_deadline(self._buffer)
