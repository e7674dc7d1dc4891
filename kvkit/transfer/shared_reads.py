"""Reads shared by ranks with equal KV: each reads every nth chunk, and takes the others' from host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkit.staging import Lease
from kvkit.transfer.plan import Segment
from kvkit.transfer.policy import for_request
from kvkit.transfer.read_pipeline import RecordRead, SegmentReads
from kvkit.transfer.sequence import Chunks
from kvkit.transfer.tier_set import TierSet

POLL_S = 0.002
"""Seconds between a load's checks for records that other ranks have read."""
EXCHANGE_WAIT_S = 0.1
"""Minimum seconds, from the start of a read, to wait for another rank before reading the record here."""


def shared_reads(tiers: TierSet, chunks: Chunks, segments: Sequence[Segment]) -> list[SegmentReads]:
    """Return the reads of each segment, shared with other ranks where there is an `exchange_tier`."""
    exchanges = [(segment, exchange_tier(tiers, segment.tier, chunks)) for segment in segments]
    return [
        SegmentReads(tiers, chunks, segment) if tier is None else SharedReads(tiers, chunks, segment, tier)
        for segment, tier in exchanges
    ]


def exchange_tier(tiers: TierSet, tier: str, chunks: Chunks) -> str | None:
    """Return the tier where ranks with equal KV share their reads of `tier`; None: each reads everything.

    It is in host memory, common to the ranks, exact, and written back to anyway.
    """
    source = tiers.tiers[tier]
    if source.in_memory or not source.shared_by_ranks or tier in tiers.approximate:
        return None
    targets = for_request(tiers.policy, chunks.policy).write_back_to
    exact = [t for t in targets if t not in tiers.approximate]
    common = (t for t in exact if tiers.tiers[t].in_memory and tiers.tiers[t].shared_by_ranks)
    return next((t for t in common if not tiers.circuit_open(t)), None)


@dataclass(frozen=True, slots=True)
class ExchangedRecord:
    """A record that is put into the exchange tier for other ranks; nobody waits for it."""

    name: str
    lease: Lease

    def done(self, error: BaseException | None) -> None:
        """Ignore the report: the other ranks read the record themselves if it does not come."""


class SharedReads(SegmentReads):
    """Reads of a segment: this rank puts its own into the `exchange` tier, and takes the others' from there.

    If the other ranks are late, this rank reads their chunks and all later ones itself.
    """

    def __init__(self, tiers: TierSet, chunks: Chunks, segment: Segment, exchange: str) -> None:
        super().__init__(tiers, chunks, segment)
        self._exchange: str | None = exchange  # None once the other ranks were late
        self._exchanged: set[RecordRead] = set()  # put into the exchange tier, or taken from it

    def _lease(self, count: int, wait: bool) -> Sequence[RecordRead]:
        reads = super()._lease(count, wait)
        for read in reads:
            owned = self._tiers.owned_by_rank(self.tier, self._chunks, read.number // self.per_chunk)
            read.awaited = self._exchange is not None and not read.lent and not owned
        return reads

    def _wait_until(self, finished: Callable[[], bool], deadline: float) -> None:
        complete = False
        while self._exchange is not None and not complete and time.monotonic() < deadline:
            self._swap(self._exchange)
            with self.changed:
                complete = self.changed.wait_for(finished, min(deadline - time.monotonic(), POLL_S))
        if complete and self._exchange is not None:
            self._put_unshared(self._exchange)  # what ended since, before it is taken
        super()._wait_until(finished, deadline)

    def _swap(self, exchange: str) -> None:
        """Put records read here into the exchange tier, take those of others, and read late ones here."""
        self._put_unshared(exchange)
        awaited = [read for read in self.in_flight if read.awaited]
        damaged = self._take_exchanged(exchange, awaited)
        late = [read for read in awaited if read.awaited and read not in damaged]
        patience_s = max(EXCHANGE_WAIT_S, 2 * self.slowest_s)
        if late and not self.unread and time.monotonic() > late[0].began + patience_s:
            self._exchange = None
            damaged += late
        for read in damaged:
            read.awaited = False
        if damaged:
            self._start(damaged)

    def _put_unshared(self, exchange: str) -> None:
        """Put records that were read here into the exchange tier."""
        unshared = [
            r for r in self.in_flight if r.ended and not (r.error or r.lent) and r not in self._exchanged
        ]
        self._exchanged.update(unshared)
        if unshared:
            self._tiers.put(exchange, [ExchangedRecord(read.name, read.lease) for read in unshared])

    def _take_exchanged(self, exchange: str, awaited: Sequence[RecordRead]) -> list[RecordRead]:
        """Take `awaited` records that other ranks put; return the damaged ones."""
        tier, damaged = self._tiers.tiers[exchange], list[RecordRead]()
        try:
            run = tier.match_prefix([read.name for read in awaited])
        except OSError:  # the exchange tier fails: the wait for other ranks times out
            return []
        for read in awaited[:run]:
            lease = tier.borrow(read.name)
            if lease is None:
                break
            own_lease, read.lease = read.lease, lease
            if (damage := self.find_damage(read)) is None:
                read.awaited, read.ended = False, True
                self._exchanged.add(read)
                own_lease.release()
            else:
                read.lease = own_lease
                lease.release()
                self._tiers.drop(exchange, read.name, damage.damage)
                damaged.append(read)
        return damaged
