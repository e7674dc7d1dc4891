"""The way back: chunks from an engine's pages into tiers, as sealed records."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkit.format import record
from kvkit.kernels.pages.api import pack
from kvkit.moving import plan as planning
from kvkit.moving.counts import Counts
from kvkit.moving.plan import Segment, StorePlan
from kvkit.moving.policy import Policy
from kvkit.moving.promises import Promise
from kvkit.moving.reads import MAX_IN_FLIGHT, keep_whole
from kvkit.moving.sequence import Chunks, SequencePages, clear_gaps
from kvkit.moving.tier_set import OnPut, TierSet
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.workers import Stopped, Transfer

log = logging.getLogger(__name__)

OnStored = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store started: `tokens` are in whole chunks, of which `new_tokens` were copied for tiers."""

    tokens: int
    new_tokens: int


def store(
    access: TierSet,
    chunks: Chunks,
    pages: Sequence[SequencePages],
    targets: Sequence[str],
    on_stored: OnStored | None,
    copy_first: bool,
    promise: Promise,
    transfer: Transfer[Stored],
) -> Stored:
    """Pack and seal the chunks that a target lacks, and start putting them.

    Args:
        on_stored: called with a tier and a chunk when the tier has all of its records, from any thread.
        copy_first: take every chunk for one that tiers outside this process lack, and ask them afterwards.
        promise: of all records of `chunks`; one attempt at each is given up in the end.
    """
    try:
        on_put = None if on_stored is None else _whole_chunks(chunks, on_stored)
        groups = chunks.groups
        later = [t for t in targets if copy_first and not access.tiers[t].near and not access.passed_over(t)]
        plan = plan_missing(access, chunks, [t for t in targets if t not in later])
        copied = StorePlan((*plan.segments, *(Segment(t, 0, len(chunks)) for t in later)))
        position = copied.start
        stored: set[int] = set()
        transfer.when_stopped(access.staging.wake)
        while position < copied.stop and not transfer.stopped:
            count = min(MAX_IN_FLIGHT, copied.stop - position)
            try:
                leases = access.staging.acquire(
                    count * groups, access.timeout_s, at_least=groups, stopped=lambda: transfer.stopped
                )
            except Stopped:
                break
            except StagingTimeout as error:
                log.warning("store stopped after %d of %d chunks: %s", position, copied.stop, error)
                break
            count = keep_whole(leases, groups)
            try:
                with transfer.pages:  # after all that waiting the engine may want its pages back
                    if transfer.stopped:
                        break
                    _pack(chunks, pages, position, leases)
                stored |= access.put(plan.segments, chunks, position, leases, on_put=on_put, promise=promise)
                for tier in later:
                    stored |= access.offer(tier, chunks, position, leases, on_put, promise)
            finally:
                release_all(leases)
            position += count
        if transfer.stopped:
            access.count(Counts.note_cancelled)
        return Stored(len(chunks) * chunks.chunk_tokens, len(stored) * chunks.chunk_tokens)
    finally:
        promise.give_up(chunks.names)


def plan_missing(access: TierSet, chunks: Chunks, targets: Sequence[str]) -> StorePlan:
    """What each of `targets` lacks, but for those that are passed over; has them describe its arrays."""
    resident = {
        t: access.ask(t, chunks.names, to_put=True) // chunks.groups for t in targets if access.usable(t)
    }
    plan = planning.plan_store(len(chunks), Policy((), tuple(resident)), resident)
    for segment in plan.segments:
        access.describe(segment.tier, chunks.formats)
    return plan


def _whole_chunks(chunks: Chunks, on_stored: OnStored) -> OnPut:
    """What calls `on_stored` when the last record of a chunk was put into a tier."""
    numbers = {name: i // chunks.groups for i, name in enumerate(chunks.names)}
    counts: Counter[tuple[str, int]] = Counter()
    lock = threading.Lock()

    def on_put(tier: str, name: str) -> None:
        chunk = numbers[name]
        with lock:
            counts[tier, chunk] += 1
            complete = counts[tier, chunk] == chunks.groups
        if complete:
            on_stored(tier, chunk)

    return on_put


def _pack(chunks: Chunks, pages: Sequence[SequencePages], first: int, leases: Sequence[Lease]) -> None:
    """Fill slots with the sealed records of chunks `first` on, groups side by side."""
    groups = chunks.groups
    count = len(leases) // groups
    for g, (form, group) in enumerate(zip(chunks.formats, pages, strict=True)):
        mine = leases[g::groups]
        payloads = [record.payload(form, lease.array) for lease in mine]
        rows = group.rows(form, first, count)
        clear_gaps(rows, payloads)
        pack(group.pages, payloads, **rows)
        for i, lease in enumerate(mine):
            record.seal(form, lease.buffer, *chunks.identity(first + i))
            lease.used = form.record_bytes
