"""The way in: records from tiers into an engine's pages, or just nearer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from kvkit.format import record
from kvkit.format.rope import Rotation
from kvkit.kernels.pages.api import unpack
from kvkit.moving import plan as planning
from kvkit.moving.counts import Counts
from kvkit.moving.plan import RetrievePlan, Segment
from kvkit.moving.prefetched import Prefetched
from kvkit.moving.puts import Puts
from kvkit.moving.reads import PlanReads
from kvkit.moving.sequence import Chunks, Hit, Loaded, SequencePages
from kvkit.moving.tier_set import TierSet
from kvkit.moving.write_backs import WriteBacks
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.workers import Stopped, Transfer


@dataclass(eq=False)
class Load:
    """The KV of a hit, on its way into the engine's pages. To be run once.

    A record that turns out missing, damaged or late is a miss: it is sought in the other tiers, and if it is
    nowhere the load ends before it. What was loaded is always a leading run.

    Args:
        pages: a layer group each.
        rotate: by how many positions keys move on the way, a chunk each.
    """

    tiers: TierSet
    puts: Puts
    prefetched: Prefetched
    hit: Hit
    pages: Sequence[SequencePages]
    rotate: Rotation | None = None
    modest: ClassVar[bool] = False
    """Whether reads leave room for others': see `PlanReads`."""

    def __post_init__(self) -> None:
        self._chunks = self.hit.chunks
        self._plan = self.hit.plan
        self._done = 0  # chunks
        self._used: Counter[str] = Counter()
        self._bad: set[tuple[str, int]] = set()

    def run(self, transfer: Transfer[Any]) -> Loaded:
        """Load what there is, until it is all there or `transfer` is stopped. Mutates the pages."""
        # 1. what lies nearer by now is taken from there; more than was found then is not wanted
        found = RetrievePlan(self._plan.chunks, self._plan.segments)
        self._plan = self.tiers.nearest(self._chunks, found)
        with WriteBacks(self.tiers, self.puts, self._chunks) as back:
            while self._done < self._plan.chunks and not transfer.stopped:
                # 2. every segment's reads start, in order of need
                segments = self._usable_segments()
                if not segments:
                    continue
                reads = PlanReads(self.tiers, self._chunks, segments, self.prefetched, self.modest)
                transfer.when_stopped(reads.interrupt)
                try:
                    while self._done < segments[-1].stop and reads.failed is None and not transfer.stopped:
                        if reads.short:
                            back.start()
                        # 3. records that were read and verified, of one tier
                        ready = reads.take()
                        try:
                            if ready:  # 4. used, 5. written back, later
                                self._use(reads.tier, self._done, ready)
                                back.hold(reads.tier, self._done, ready)
                        finally:
                            release_all(ready)
                        self._done += len(ready) // self._chunks.groups
                        self._used[reads.tier] += len(ready) // self._chunks.groups
                finally:
                    reads.abandon()
                # 6. what was not available there is sought elsewhere
                if reads.failed is not None:
                    name, error = reads.failed
                    self.tiers.ended(reads.tier, name, error)
                    if isinstance(error, StagingTimeout | Stopped):  # another tier would not help
                        break
                    self._seek_elsewhere(reads.tier)
        if transfer.stopped:
            self.tiers.count(Counts.note_cancelled)
        size = self._chunks.chunk_tokens
        loaded = Loaded(self._done * size, {tier: n * size for tier, n in self._used.items() if n})
        self._note(loaded)
        return loaded

    def _usable_segments(self) -> list[Segment]:
        """What is left of the plan, before the first tier that failed since the lookup.

        Where that is the next one, none, and what it has is sought elsewhere.
        """
        rest = [Segment(s.tier, max(s.start, self._done), s.stop) for s in self._plan.segments]
        rest = [s for s in rest if s.stop > self._done]
        usable = list(takewhile(lambda s: not self.tiers.passed_over(s.tier), rest))
        if not usable:
            self._seek_elsewhere(rest[0].tier)
        return usable

    def _seek_elsewhere(self, tier: str) -> None:
        """Plan the rest anew: `tier` does not have the next chunk."""
        self._bad.add((tier, self._done))
        self._plan = self.tiers.find(self._chunks, planning.clip(self._plan, self._done), self._bad)

    def _use(self, tier: str, first: int, leases: Sequence[Lease]) -> None:
        """Make something of validated records that `tier` delivered, chunk `first` on."""
        groups = self._chunks.groups
        count = len(leases) // groups
        rotate = self.rotate
        if rotate is not None:
            rotate = Rotation(rotate.rope, rotate.delta[first : first + count])
        for g, (form, group) in enumerate(zip(self._chunks.formats, self.pages, strict=True)):
            payloads = [record.payload(form, lease.array) for lease in leases[g::groups]]
            unpack(group.pages, payloads, **group.rows(form, first, count), rotate=rotate)

    def _note(self, loaded: Loaded) -> None:
        """Count what was made of it."""
        self.tiers.count_loaded(self._chunks, loaded)


@dataclass(eq=False, kw_only=True)
class _Nearer(Load):
    """A load that ends in slots, which `shelve` has kept; without, it is only written back."""

    shelve: bool
    modest = True

    def _use(self, tier: str, first: int, leases: Sequence[Lease]) -> None:
        if self.shelve and not self.tiers.tiers[tier].near:
            names = self._chunks.records(first, first + len(leases) // self._chunks.groups)
            for name, lease in zip(names, leases, strict=True):
                self.prefetched.keep(name, lease, self)

    def _note(self, loaded: Loaded) -> None:
        pass


@dataclass(eq=False)
class Prefetch:
    """What tiers further away hold of `chunks`, on its way into the tiers that the policy writes back to.

    Without any in memory, it is left in slots (`Prefetched`). What lies near before that, or after it, stays
    as it is.
    """

    tiers: TierSet
    puts: Puts
    prefetched: Prefetched
    chunks: Chunks

    def run(self, transfer: Transfer[Any]) -> Hit:
        """Bring it nearer, until all is or `transfer` is stopped; what is available then."""
        tiers, chunks = self.tiers, self.chunks
        # 1. what lies far away
        found = tiers.find(chunks, RetrievePlan(len(chunks)), frozenset())
        near = [name for name, tier in tiers.tiers.items() if tier.near]
        far = [segment for segment in found.segments if segment.tier not in near]
        if not far:
            return Hit(chunks, found)
        first, stop = far[0].start, far[-1].stop
        shelve = not set(near) & set(tiers.policy.write_back_to)
        if shelve and not tiers.policy.write_back_to:  # more than the slots hold would be read for nothing
            stop = min(stop, first + self.prefetched.slots // chunks.groups)
        # 2. is read as for a load
        wanted = Hit(chunks.part(first, stop), planning.cut(found, first, stop))
        loaded = _Nearer(tiers, self.puts, self.prefetched, wanted, (), shelve=shelve).run(transfer)
        # 3. what of it came ends the hit
        if loaded.tokens < wanted.tokens:
            found = planning.clip(found, first + loaded.tokens // chunks.chunk_tokens)
        if shelve:  # a lookup does not see the slots: the hit stays where the records are
            return Hit(chunks, found)
        return Hit(chunks, tiers.find(chunks, RetrievePlan(found.chunks), frozenset()))


@dataclass(eq=False)
class ChunkRead:
    """The verified records of one chunk, on their way into slots.

    They are written back as those of a load are, to a tier that holds the chunk before them.
    """

    tiers: TierSet
    puts: Puts
    prefetched: Prefetched
    chunks: Chunks
    chunk: int

    def run(self, transfer: Transfer[Any]) -> list[Lease]:
        """A lease per layer group, for the caller to release; empty if no tier has them."""
        tiers, chunks, chunk = self.tiers, self.chunks, self.chunk
        for tier in tiers.policy.retrieve_from:
            if transfer.stopped:
                break
            if not tiers.usable(tier) or tiers.ask(tier, chunks.records(chunk, chunk + 1)) < chunks.groups:
                continue
            segment = Segment(tier, chunk, chunk + 1)
            reads = PlanReads(tiers, chunks, [segment], self.prefetched)
            transfer.when_stopped(reads.interrupt)
            leases: list[Lease] = []
            try:
                leases = reads.take()
                if reads.failed is not None:
                    tiers.ended(tier, *reads.failed)
                if leases:
                    self.puts.write_back(tier, chunks, chunk, leases, self._continued())
                    found, leases = leases, []
                    return found
            finally:
                reads.abandon()
                release_all(leases)
        return []

    def _continued(self) -> list[str]:
        """The tiers to write back to that hold the chunk before this one."""
        targets = self.tiers.policy.write_back_to
        if self.chunk == 0:
            return list(targets)
        before = self.chunks.records(self.chunk - 1, self.chunk)
        usable = [tier for tier in targets if self.tiers.usable(tier)]
        return [tier for tier in usable if self.tiers.ask(tier, before) == len(before)]
