"""Loads: records from tiers into an engine's pages, host memory or leases, and their write-backs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from kvkit.format import record
from kvkit.format.rope import Rotation
from kvkit.kernels.pages.streams import CudaEvents
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.transfer import plan as planning
from kvkit.transfer.lookup import find, nearest, with_states
from kvkit.transfer.plan import RetrievePlan, Segment
from kvkit.transfer.policy import for_request
from kvkit.transfer.read_pipeline import PlanReads, SegmentReads
from kvkit.transfer.sequence import Chunks, Hit, Loaded, SequencePages, pages_at, snapshot_chunks
from kvkit.transfer.shared_reads import shared_reads
from kvkit.transfer.write_pipeline import WritePipeline
from kvkit.workers import Stopped, Transfer


@dataclass(eq=False)
class Load:
    """A load of a hit's KV into the engine's pages. Run it once.

    A missing, damaged or late record is a miss: the load tries the other tiers and, if none has the record,
    ends before it. The loaded tokens are always a leading run. If the model has states, the run ends at a
    snapshot, which is loaded as well, or nothing is loaded.

    Args:
        pages: one entry per layer group, states last; empty if nothing goes to the engine.
        rotate: position change of the keys, per chunk.
        after: on a GPU, events to wait for before the pages may change; None: see `unpack`.
    """

    writes: WritePipeline
    hit: Hit
    pages: Sequence[SequencePages]
    rotate: Rotation | None = None
    after: CudaEvents | None = None
    throttled: ClassVar[bool] = False
    """True if reads leave capacity of the tiers to other requests: see `PlanReads`."""

    def __post_init__(self) -> None:
        self.tiers = self.writes.tiers
        self._chunks = self.hit.chunks
        self._plan = self.hit.plan
        self._done = 0  # chunks
        self._exact = self._plan.exact  # chunks that must be loaded exactly
        self._used = RetrievePlan(self._plan.chunks, approximate=self.tiers.approximate)
        self._states = self.pages[self._chunks.groups :]
        self._bad: set[tuple[str, int]] = set()

    def run(self, transfer: Transfer[Any]) -> Loaded:
        """Load until the plan is complete or fails, or `transfer` is stopped. Mutates the pages."""
        # 1. records that are in host memory by now are taken from there
        self._plan = nearest(self.tiers, self._chunks, self._plan)
        with WriteBacks(self.writes, self._chunks, self._write_back_to()) as back:
            while self._done < self._plan.chunks and not transfer.stopped:
                # 2. the reads of all segments start, in order of need
                segments = self._usable_segments()
                if not segments:
                    continue
                if self.tiers.copies == 1:
                    by_segment = [SegmentReads(self.tiers, self._chunks, segment) for segment in segments]
                else:
                    by_segment = shared_reads(self.tiers, self._chunks, segments)
                reads = PlanReads(self.tiers, by_segment, self.throttled)
                transfer.when_stopped(reads.cancel)
                try:
                    while self._done < segments[-1].stop and reads.failed is None and not transfer.stopped:
                        if reads.short:
                            back.start()
                        # 3. verified records of one tier
                        ready = [read.lease for read in reads.take()]
                        try:
                            if ready:  # 4. used, 5. written back, later
                                self._use(reads.tier, self._done, ready)
                                back.hold(reads.tier, self._done, ready)
                        finally:
                            release_all(ready)
                        count = len(ready) // self._chunks.groups
                        self._used = planning.extend(self._used, reads.tier, count)
                        self._done += count
                finally:
                    reads.close()
                # 6. missing records are looked up in other tiers
                if reads.failed is not None:
                    name, error = reads.failed
                    self.tiers.ended(reads.tier, name, error)
                    if isinstance(error, StagingTimeout | Stopped):  # another tier would not help
                        break
                    self._seek_elsewhere(reads.tier)
        if transfer.stopped and not self._chunks.of_states:
            with self.tiers.counting() as counts:
                counts.cancelled += 1
        # 7. states must be those after the last token, or nothing is usable
        if self._states:
            self._done = self._restore(transfer)
        loaded = Loaded.of(planning.clip(self._used, self._done), self._chunks.chunk_tokens)
        if self.pages:
            self.tiers.count_loaded(self._chunks, loaded)
        return loaded

    def _restore(self, transfer: Transfer[Any]) -> int:
        """Load the last available snapshot within the loaded run; return the chunks up to it."""
        for chunk in reversed(snapshot_chunks(self._states, self._done)):
            snapshot = self._chunks.snapshot(chunk)
            hit = Hit(snapshot, find(self.tiers, snapshot, RetrievePlan(1)))
            pages = pages_at(self._states, chunk)
            if Load(self.writes, hit, pages, None, self.after).run(transfer).tokens:
                return chunk + 1
        return 0

    def _write_back_to(self) -> Sequence[str]:
        """Return the tiers to write back to."""
        return for_request(self.tiers.policy, self._chunks.policy).write_back_to

    def _usable_segments(self) -> list[Segment]:
        """Return the rest of the plan, before the first tier with an open circuit.

        If the next tier is that one, plan the rest again and return no segments.
        """
        rest = [Segment(s.tier, max(s.start, self._done), s.stop) for s in self._plan.segments]
        rest = [s for s in rest if s.stop > self._done]
        usable = list(takewhile(lambda s: not self.tiers.circuit_open(s.tier), rest))
        if not usable:
            self._seek_elsewhere(rest[0].tier)
        return usable

    def _seek_elsewhere(self, tier: str) -> None:
        """Plan the rest again, because `tier` does not have the next chunk."""
        self._bad.add((tier, self._done))
        done = planning.clip(self._plan, self._done)
        self._plan = find(self.tiers, self._chunks, done, self._bad, exact=self._exact)

    def _use(self, tier: str, first: int, leases: Sequence[Lease]) -> None:
        """Use validated records that `tier` delivered, from chunk `first` on."""
        groups, rotate = self._chunks.groups, self.rotate
        count = len(leases) // groups
        if rotate is not None:
            rotate = Rotation(rotate.rope, rotate.delta[first : first + count])
        by_group = zip(self._chunks.formats, self.pages[:groups], strict=True)
        for g, (record_format, group) in enumerate(by_group):
            payloads = [record.payload(record_format, lease.array) for lease in leases[g::groups]]
            group.fill(record_format, first, payloads, rotate, self.after)


class WriteBacks:
    """Records that one load writes back after its last read. Thread-safe.

    Earlier writes would compete with the reads for processor and disk. A context manager that starts all
    writes on exit. Held records occupy slots, so the writes start earlier if a caller waits for slots.
    """

    def __init__(self, writes: WritePipeline, chunks: Chunks, targets: Sequence[str]) -> None:
        self._staging = writes.tiers.staging
        self._writes = writes
        self._chunks = chunks
        self._targets = targets
        self._held: deque[tuple[str, int, list[Lease]]] = deque()
        # reentrant: a tier may lease a slot for a record, which calls `_reclaim` again
        self._lock = threading.RLock()

    def hold(self, tier: str, first: int, leases: Sequence[Lease]) -> None:
        """Hold a share of validated records of `tier`, from chunk `first` on, if they are written back."""
        if not self._writes.is_written_back(tier):
            return
        with self._lock:
            self._held.append((tier, first, [lease.share() for lease in leases]))
        if self._staging.waiting:
            self.start()

    def start(self) -> None:
        """Start writing the held records."""
        with self._lock:
            while self._held:
                tier, first, leases = self._held.popleft()
                try:
                    self._writes.write_back(tier, self._chunks, first, leases, self._targets)
                finally:
                    release_all(leases)

    def __enter__(self) -> WriteBacks:
        self._staging.on_shortage(self._reclaim)
        return self

    def __exit__(self, *_: object) -> None:
        self._staging.off_shortage(self._reclaim)
        self.start()

    def _reclaim(self, _: int) -> None:
        # the lock's holder starts them itself, or is in `hold` and will see the waiting caller
        if self._lock.acquire(blocking=False):
            try:
                self.start()
            finally:
                self._lock.release()


@dataclass(eq=False, kw_only=True)
class PrefetchLoad(Load):
    """A load that keeps records in slots if `keep_in_staging`, and otherwise only writes them back.

    Approximate records are always kept in slots, because they are never written back.
    """

    keep_in_staging: bool
    throttled = True

    def _use(self, tier: str, first: int, leases: Sequence[Lease]) -> None:
        keep_in_staging = self.keep_in_staging or tier in self.tiers.approximate
        if keep_in_staging and not self.tiers.tiers[tier].in_memory:
            names = self._chunks.records(first, first + len(leases) // self._chunks.groups)
            for name, lease in zip(names, leases, strict=True):
                self.tiers.prefetched.keep(self.tiers.storage_name(tier, name), lease, self)


@dataclass(eq=False, kw_only=True)
class BorrowLoad(Load):
    """A load that appends its records' leases to `leases`; written back only to tiers that hold `before`."""

    before: Sequence[str]
    leases: list[Lease]

    def _write_back_to(self) -> Sequence[str]:
        targets, ask = super()._write_back_to(), self.tiers.ask
        if not self.before:
            return targets
        usable = [tier for tier in targets if self.tiers.usable(tier)]
        return [tier for tier in usable if ask(tier, self.before) == len(self.before)]

    def _use(self, tier: str, first: int, leases: Sequence[Lease]) -> None:
        self.leases += [lease.share() for lease in leases]


def prefetch(writes: WritePipeline, chunks: Chunks, transfer: Transfer[Any]) -> Hit:
    """Copy records of `chunks` from other tiers to the in-memory tiers that are written back to.

    Without such a tier, records stay in slots (`Prefetched`). Only the chunks from the first to the last
    outside host memory are read.

    Returns:
        The hit that is available when all is in host memory or `transfer` is stopped.
    """
    hit = _prefetch_records(writes, chunks, transfer)
    plan = with_states(writes.tiers, chunks, hit.plan, 0.0)
    if chunks.states and plan.chunks:
        _prefetch_records(writes, chunks.snapshot(plan.chunks - 1), transfer)
    return Hit(chunks, plan)


def _prefetch_records(writes: WritePipeline, chunks: Chunks, transfer: Transfer[Any]) -> Hit:
    """Run `prefetch` for the records of the chunks themselves, or for a snapshot."""
    tiers = writes.tiers
    # 1. the segments outside host memory
    found = with_states(tiers, chunks, find(tiers, chunks, RetrievePlan(len(chunks))), 0.0)
    in_memory = [name for name, tier in tiers.tiers.items() if tier.in_memory]
    remote = [segment for segment in found.segments if segment.tier not in in_memory]
    if not remote:
        return Hit(chunks, found)
    first, stop = remote[0].start, remote[-1].stop
    keep_in_staging = not set(in_memory) & set(tiers.policy.write_back_to)
    # records that are not written back stay in slots: reading more than fit would be wasted
    slot_chunks = tiers.prefetched.slots // chunks.groups
    first_unwritten = first if keep_in_staging and not tiers.policy.write_back_to else max(first, found.exact)
    stop = min(stop, first_unwritten + slot_chunks)
    # 2. are read as for a load
    remote_hit = Hit(chunks.part(first, stop), planning.cut(found, first, stop))
    loaded = PrefetchLoad(writes, remote_hit, (), keep_in_staging=keep_in_staging).run(transfer)
    # 3. the hit ends where the load ended
    if loaded.tokens < remote_hit.tokens:
        found = planning.clip(found, first + loaded.tokens // chunks.chunk_tokens)
    if keep_in_staging:  # lookups do not see the slots: the hit keeps naming the records' tiers
        return Hit(chunks, found)
    return Hit(chunks, find(tiers, chunks, RetrievePlan(found.chunks)))


def read_chunk(writes: WritePipeline, chunks: Chunks, chunk: int, transfer: Transfer[Any]) -> list[Lease]:
    """Read and verify the records of one chunk: a lease per layer group, for the caller to release.

    Empty if no tier holds the chunk exactly. The records are written back as those of a load are, to tiers
    that hold the chunk before them.
    """
    one_chunk, leases = chunks.part(chunk, chunk + 1), list[Lease]()
    hit = Hit(one_chunk, find(writes.tiers, one_chunk, RetrievePlan(1), exact=1))
    before = chunks.records(chunk - 1, chunk) if chunk else []
    try:
        BorrowLoad(writes, hit, (), before=before, leases=leases).run(transfer)
    except BaseException:
        release_all(leases)
        raise
    return leases
