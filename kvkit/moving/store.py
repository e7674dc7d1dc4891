"""The way back: chunks from an engine's pages into tiers, as sealed records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkit.format import record
from kvkit.kernels.pages.api import pack
from kvkit.kernels.pages.streams import CudaEvents
from kvkit.moving.plan import Segment, StorePlan
from kvkit.moving.promises import Promise
from kvkit.moving.puts import Puts
from kvkit.moving.reads import MAX_IN_FLIGHT
from kvkit.moving.sequence import Chunks, SequencePages, clear_gaps
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.workers import Stopped, Transfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store started: `tokens` are in whole chunks, of which `new_tokens` were copied for tiers."""

    tokens: int
    new_tokens: int


@dataclass(eq=False)
class Store:
    """Chunks on their way from the engine's pages into tiers, promised at once. Run it, or close `promise`.

    Args:
        pages: a layer group each.
        ready: returns when the pages hold what is to be stored.
        after: on a GPU, what must be done as well; None: see `pack`.
        on_stored, on_done: see `Promise`.
        copy_first: take every chunk for one that tiers outside this process lack, and ask them afterwards.
    """

    puts: Puts
    chunks: Chunks
    pages: Sequence[SequencePages]
    targets: Sequence[str]
    ready: Callable[[], object] = lambda: None
    on_stored: Callable[[str, int], object] | None = None
    on_done: Callable[[], object] = lambda: None
    copy_first: bool = False
    after: CudaEvents | None = None

    def __post_init__(self) -> None:
        self.tiers = self.puts.tiers
        names, groups = self.chunks.names, self.chunks.groups
        self.promise = Promise(self.puts.promises, names, groups, self.on_stored, self.on_done)

    def run(self, transfer: Transfer[Stored]) -> Stored:
        """Copy what a target lacks and start putting it, until that is all or `transfer` is stopped."""
        tiers, chunks = self.tiers, self.chunks
        stored: set[int] = set()
        try:
            # 1. the engine has computed what is stored
            self.ready()
            # 2. what each target lacks; some are asked when they get it
            later = self._asked_later() if self.copy_first else []
            lacking = self.puts.plan(chunks, [t for t in self.targets if t not in later]).segments
            unknown = [Segment(t, 0, len(chunks)) for t in later]
            plan = StorePlan((*lacking, *unknown))
            position = plan.start
            transfer.when_stopped(tiers.staging.wake)
            while position < plan.stop and not transfer.stopped:
                # 3. slots, as many as are free
                leases = self._slots(position, plan.stop, transfer)
                if not leases:
                    break
                try:
                    # 4. packed and sealed: after all that waiting the engine may want its pages back
                    with transfer.pages:
                        if transfer.stopped:
                            break
                        self._pack(position, leases)
                    # 5. put
                    stored |= self.puts.put(lacking, chunks, position, leases, self.promise)
                    stored |= self.puts.put(unknown, chunks, position, leases, self.promise, asks=True)
                finally:
                    release_all(leases)
                position += len(leases) // chunks.groups
            if transfer.stopped:
                with tiers.counting() as counts:
                    counts.cancelled += 1
            return Stored(len(chunks) * chunks.chunk_tokens, len(stored) * chunks.chunk_tokens)
        finally:
            self.promise.close()  # no more than tiers were given

    def _asked_later(self) -> list[str]:
        """The targets outside this process."""
        tiers = self.tiers
        return [t for t in self.targets if not tiers.tiers[t].near and not tiers.passed_over(t)]

    def _slots(self, first: int, stop: int, transfer: Transfer[Stored]) -> list[Lease]:
        """Slots for as many of chunks [first, stop) as there are; none if one chunk's do not come free."""
        groups = self.chunks.groups
        count = min(MAX_IN_FLIGHT, stop - first) * groups
        try:
            return self.tiers.staging.acquire(
                count, self.tiers.timeout_s, at_least=groups, stopped=lambda: transfer.stopped
            )
        except Stopped:
            return []
        except StagingTimeout as error:
            log.warning("store stopped after %d of %d chunks: %s", first, stop, error)
            return []

    def _pack(self, first: int, leases: Sequence[Lease]) -> None:
        """Fill slots with the sealed records of chunks `first` on, groups side by side."""
        chunks = self.chunks
        count = len(leases) // chunks.groups
        for g, (form, group) in enumerate(zip(chunks.formats, self.pages, strict=True)):
            payloads = [record.payload(form, lease.array) for lease in leases[g :: chunks.groups]]
            rows = group.rows(form, first, count)
            clear_gaps(rows, payloads)
            pack(group.pages, payloads, **rows, after=self.after)
        seal(chunks, first, leases)


def seal(chunks: Chunks, first: int, leases: Sequence[Lease]) -> None:
    """Make records of chunks `first` on of the payloads in slots, groups side by side. Mutates the slots."""
    for i, lease in enumerate(leases):
        chunk, group = divmod(i, chunks.groups)
        form = chunks.formats[group]
        record.seal(form, lease.buffer, *chunks.identity(first + chunk))
        lease.used = form.record_bytes
