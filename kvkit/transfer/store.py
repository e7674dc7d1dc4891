"""Stores: chunks from an engine's pages into tiers, as sealed records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkit.format import record
from kvkit.kernels.pages.api import pack
from kvkit.kernels.pages.streams import CudaEvents
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.transfer.pending_stores import PendingStore
from kvkit.transfer.plan import Segment
from kvkit.transfer.read_pipeline import MAX_IN_FLIGHT
from kvkit.transfer.sequence import Chunks, SequencePages, clear_gaps, pages_at, snapshot_chunks
from kvkit.transfer.write_pipeline import WritePipeline
from kvkit.workers import Stopped, Transfer, Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """Result of a store: `tokens` tokens in whole chunks, `new_tokens` of them copied for tiers."""

    tokens: int
    new_tokens: int


@dataclass(eq=False)
class Store:
    """A store of chunks from the engine's pages, pending from its creation. Call `run` or `abort`.

    Args:
        pages: one entry per layer group, states last.
        ready: returns when the pages are complete; None: they are complete already.
        after: on a GPU, events to wait for as well; None: see `pack`.
        on_stored, on_done: see `PendingStore`.
        copy_first: copy all chunks before asking tiers outside this process what they lack.
    """

    writes: WritePipeline
    chunks: Chunks
    pages: Sequence[SequencePages]
    targets: Sequence[str]
    ready: Callable[[], object] | None = None
    on_stored: Callable[[str, int], object] | None = None
    on_done: Callable[[], object] | None = None
    copy_first: bool = False
    after: CudaEvents | None = None

    def __post_init__(self) -> None:
        self.tiers = self.writes.tiers
        chunks, owns = self.chunks, self.tiers.owned_by_rank
        unowned = [i for i in range(len(chunks)) if not all(owns(t, chunks, i) for t in self.targets)]
        self.pending = PendingStore(
            self.tiers.pending_stores,
            chunks.names,
            chunks.groups,
            self.on_stored,
            self.on_done,
            by_other_ranks=[name for i in unowned for name in chunks.records(i, i + 1)],
        )
        state_pages = self.pages[chunks.groups :]
        self._snapshots = [
            Store(
                self.writes,
                chunks.snapshot(i),
                pages_at(state_pages, i),
                self.targets,
                copy_first=self.copy_first,
                after=self.after,
            )
            for i in snapshot_chunks(state_pages, len(chunks))
        ]

    def start(self, workers: Workers) -> Transfer[Stored]:
        """Run the store in a thread of `workers`."""
        try:
            transfer = Transfer.start(workers, self.run)
        except BaseException:
            self.abort()
            raise
        transfer.add_done_callback(lambda done: self.abort() if done.cancelled() else None)
        return transfer

    def abort(self) -> None:
        """End the pending store. Only for a store that is not run."""
        self.pending.close()
        for snapshot in self._snapshots:
            snapshot.abort()

    def run(self, transfer: Transfer[Stored]) -> Stored:
        """Copy and write the chunks that a target lacks, until done or `transfer` is stopped."""
        chunks = self.chunks
        try:
            new_chunks = self._store(transfer)
            # 6. the snapshots at the ends of chunks
            while self._snapshots:
                self._snapshots.pop(0).run(transfer)
        finally:
            for snapshot in self._snapshots:
                snapshot.abort()
        if transfer.stopped and not chunks.of_states:
            with self.tiers.counting() as counts:
                counts.cancelled += 1
        return Stored(len(chunks) * chunks.chunk_tokens, new_chunks * chunks.chunk_tokens)

    def _store(self, transfer: Transfer[Stored]) -> int:
        """Copy and write the chunks themselves; return how many a tier accepted."""
        tiers, chunks, groups = self.tiers, self.chunks, self.chunks.groups
        stored: set[int] = set()
        try:
            # 1. wait until the engine has computed the chunks
            if self.ready is not None:
                self.ready()
            # 2. ask targets what they lack; with `copy_first`, remote ones are asked after step 4
            remote = [t for t in self.targets if not tiers.tiers[t].in_memory] if self.copy_first else []
            asked_later = [t for t in remote if not tiers.circuit_open(t)]
            lacking = self.writes.plan(chunks, [t for t in self.targets if t not in asked_later]).segments
            segments = [*lacking, *(Segment(t, 0, len(chunks)) for t in asked_later)]
            uncopied = self.writes.owned(segments, chunks, range(len(chunks)))
            transfer.when_stopped(tiers.staging.wake)
            while uncopied and not transfer.stopped:
                # 3. lease slots for as many chunks as are free
                slots = min(MAX_IN_FLIGHT, len(uncopied)) * groups
                try:
                    leases = tiers.staging.acquire(
                        slots, tiers.timeout_s, at_least=groups, stopped=lambda: transfer.stopped
                    )
                except Stopped:
                    break
                except StagingTimeout as error:
                    unstored = f"{len(uncopied)} of {len(chunks)} chunks"
                    log.warning("store ended early, %s not stored: %s", unstored, error)
                    break
                numbers, uncopied = uncopied[: len(leases) // groups], uncopied[len(leases) // groups :]
                try:
                    # 4. pack and seal, unless the engine reclaimed its pages meanwhile
                    with transfer.pages:
                        if transfer.stopped:
                            break
                        pack_records(chunks, self.pages, numbers, leases, self.after)
                    # 5. write
                    stored |= self.writes.start(
                        segments, chunks, numbers, leases, self.pending, ask_first=asked_later
                    )
                finally:
                    release_all(leases)
            return len(stored)
        finally:
            self.pending.close()  # no more attempts will start


def pack_records(
    chunks: Chunks,
    pages: Sequence[SequencePages],
    numbers: Sequence[int],
    leases: Sequence[Lease],
    after: CudaEvents | None = None,
) -> None:
    """Pack chunks into slots, groups side by side, and seal the records. Mutates the slots.

    Args:
        pages: one entry per layer group; more are ignored.
        after: on a GPU, events to wait for; None: see `pack`.
    """
    groups = chunks.groups
    for g, (record_format, group) in enumerate(zip(chunks.formats, pages[:groups], strict=True)):
        payloads = [record.payload(record_format, lease.array) for lease in leases[g::groups]]
        rows = group.rows_of(record_format, numbers)
        clear_gaps(rows, payloads)
        pack(group.pages, payloads, **rows, after=after)
    seal(chunks, numbers, leases)


def seal(
    chunks: Chunks,
    numbers: Sequence[int],
    leases: Sequence[Lease],
    sums: Sequence[Sequence[int]] | None = None,
) -> None:
    """Seal the payloads of chunks in slots, groups side by side. Mutates the slots.

    Args:
        sums: checksums of each record's layers, if known.
    """
    groups = chunks.groups
    for i, lease in enumerate(leases):
        chunk, group = divmod(i, groups)
        record_format = chunks.formats[group]
        record.seal(record_format, lease.buffer, *chunks.identity(numbers[chunk]), sums[i] if sums else None)
        lease.used = record_format.record_bytes
