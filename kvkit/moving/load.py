"""The way in: records from tiers into an engine's pages, or just nearer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from kvkit.format import record
from kvkit.format.rope import Rotation
from kvkit.kernels.pages.api import unpack
from kvkit.moving import plan as planning
from kvkit.moving.counts import Counts
from kvkit.moving.plan import RetrievePlan
from kvkit.moving.reads import PlanReads, Prefetched
from kvkit.moving.sequence import Chunks, Hit, Loaded, SequencePages
from kvkit.moving.tier_set import TierSet
from kvkit.moving.write_backs import WriteBacks
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.workers import Stopped, Transfer

Use = Callable[[str, int, Sequence[Lease]], None]
"""Called with a tier, the first of some validated chunks that it delivered, and their records."""


def fetch(
    access: TierSet,
    shelf: Prefetched,
    chunks: Chunks,
    plan: RetrievePlan,
    use: Use,
    transfer: Transfer[Any],
    modest: bool = False,
) -> Loaded:
    """Read and verify the chunks of `plan` in order and have `use` make something of them.

    A record that turns out missing, damaged or late is a miss: it is sought in the other tiers, and if it is
    nowhere this ends before it. What was used is always a leading run, and that run is written back:
    when the last read is in, or before if slots are short. `modest`: see `PlanReads`.
    """
    used: Counter[str] = Counter()
    bad: set[tuple[str, int]] = set()
    done, stop = 0, plan.chunks
    # more than was found then is not wanted: the engine counts on `plan`
    plan = access.nearest(chunks, RetrievePlan(stop, plan.segments))
    with WriteBacks(access, chunks) as back:
        while done < stop and not transfer.stopped:
            rest = [
                planning.Segment(s.tier, max(s.start, done), s.stop) for s in plan.segments if s.stop > done
            ]
            segments = list(takewhile(lambda s: not access.passed_over(s.tier), rest))
            if not segments:  # its tier failed since the lookup
                bad.add((rest[0].tier, done))
                plan = access.find(chunks, planning.clip(plan, done), bad)
                stop = plan.chunks
                continue
            # 1. every segment's reads start, in order of need
            end = segments[-1].stop
            reads = PlanReads(access, chunks, segments, shelf, modest)
            transfer.when_stopped(reads.interrupt)
            error: BaseException | None = None
            try:
                while done < end and error is None and not transfer.stopped:
                    # 2. records that were read and verified, of one tier
                    if reads.short:
                        back.start()
                    ready = reads.take()
                    tier = reads.tier
                    try:
                        if ready:  # 3. used, 4. written back, later
                            use(tier, done, ready)
                            back.hold(tier, done, ready)
                    finally:
                        release_all(ready)
                    done += len(ready) // chunks.groups
                    used[tier] += len(ready) // chunks.groups
                    if reads.failed is not None:
                        name, error = reads.failed
                        access.ended(tier, name, error)
            finally:
                reads.abandon()
            if isinstance(error, StagingTimeout | Stopped):  # another tier would not help
                break
            # 5. what could not be had there is sought elsewhere
            if error is not None:
                bad.add((tier, done))
                plan = access.find(chunks, planning.clip(plan, done), bad)
                stop = plan.chunks
    if transfer.stopped:
        access.count(Counts.note_cancelled)
    size = chunks.chunk_tokens
    return Loaded(done * size, {tier: n * size for tier, n in used.items() if n})


def load(
    access: TierSet,
    shelf: Prefetched,
    hit: Hit,
    pages: Sequence[SequencePages],
    rotate: Rotation | None,
    transfer: Transfer[Loaded],
) -> Loaded:
    """Put the KV of `hit` into the engine's pages."""
    chunks = hit.chunks

    def use(tier: str, first: int, leases: Sequence[Lease]) -> None:
        count = len(leases) // chunks.groups
        for g, (form, group) in enumerate(zip(chunks.formats, pages, strict=True)):
            payloads = [record.payload(form, lease.array) for lease in leases[g :: chunks.groups]]
            part = None if rotate is None else Rotation(rotate.rope, rotate.delta[first : first + count])
            unpack(group.pages, payloads, **group.rows(form, first, count), rotate=part)

    loaded = fetch(access, shelf, chunks, hit.plan, use, transfer)
    count_loaded(access, chunks, loaded)
    return loaded


def count_loaded(access: TierSet, chunks: Chunks, loaded: Loaded) -> None:
    """Count what a load put into the engine."""

    def note(counts: Counts) -> None:
        chunk_bytes = sum(form.record_bytes for form in chunks.formats)
        for tier, tokens in loaded.by_tier.items():
            counts.loaded_tokens[tier] += tokens
            counts.loaded_bytes[tier] += tokens // chunks.chunk_tokens * chunk_bytes

    access.count(note)


def prefetch(access: TierSet, shelf: Prefetched, chunks: Chunks, transfer: Transfer[Hit]) -> Hit:
    """Bring what tiers further away hold into the tiers that the policy writes back to, or onto the shelf.

    What lies near before that, or behind it, is left as it is.
    """
    found = access.find(chunks, RetrievePlan(len(chunks)), frozenset())
    near = [name for name, tier in access.tiers.items() if tier.near]
    far = [segment for segment in found.segments if segment.tier not in near]
    if not far:
        return Hit(chunks, found)
    first, stop = far[0].start, far[-1].stop
    shelve = not set(near) & set(access.policy.write_back_to)
    if shelve and not access.policy.write_back_to:  # more than the shelf holds would be read for nothing
        stop = min(stop, first + shelf.slots // chunks.groups)
    wanted = chunks.part(first, stop)

    def use(tier: str, start: int, leases: Sequence[Lease]) -> None:
        if shelve and tier not in near:
            names = wanted.records(start, start + len(leases) // chunks.groups)
            for name, lease in zip(names, leases, strict=True):
                shelf.keep(name, lease, transfer)

    plan = planning.cut(found, first, stop)
    reached = fetch(access, shelf, wanted, plan, use, transfer, modest=True).tokens // chunks.chunk_tokens
    if reached < len(wanted):
        found = planning.clip(found, first + reached)
    if shelve:  # a lookup does not see the shelf: the hit stays where the records are
        return Hit(chunks, found)
    return Hit(chunks, access.find(chunks, RetrievePlan(found.chunks), frozenset()))


def get(
    access: TierSet, shelf: Prefetched, chunks: Chunks, chunk: int, transfer: Transfer[list[Lease]]
) -> list[Lease]:
    """The verified records of one chunk, a lease per layer group; empty if no tier has them.

    They are written back as those of a load are, to a tier that holds the chunk before them.
    """
    for tier in access.policy.retrieve_from:
        if transfer.stopped:
            break
        if not access.usable(tier) or access.ask(tier, chunks.records(chunk, chunk + 1)) < chunks.groups:
            continue
        segment = planning.Segment(tier, chunk, chunk + 1)
        reads = PlanReads(access, chunks, [segment], shelf)
        transfer.when_stopped(reads.interrupt)
        leases: list[Lease] = []
        try:
            leases = reads.take()
            if reads.failed is not None:
                access.ended(tier, *reads.failed)
            if leases:
                access.write_back(tier, chunks, chunk, leases, _continued(access, chunks, chunk))
                found, leases = leases, []
                return found
        finally:
            reads.abandon()
            release_all(leases)
    return []


def _continued(access: TierSet, chunks: Chunks, chunk: int) -> list[str]:
    """The tiers to write back to that hold the chunk before this one."""
    if chunk == 0:
        return list(access.policy.write_back_to)
    before = chunks.records(chunk - 1, chunk)
    usable = [tier for tier in access.policy.write_back_to if access.usable(tier)]
    return [tier for tier in usable if access.ask(tier, before) == len(before)]
