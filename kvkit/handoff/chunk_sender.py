"""Sending of chunks: packs them from an engine's pages, for the transfers that wait for their records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkit.format.layout import KVLayout
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.sender import Sender
from kvkit.kernels.pages.streams import CudaEvents
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.transfer.read_pipeline import MAX_IN_FLIGHT
from kvkit.transfer.sequence import AllPages, Chunks, SequencePages, check_pages, pages_at, snapshot_chunks
from kvkit.transfer.store import pack_records
from kvkit.transfer.write_pipeline import Batch, WritePipeline
from kvkit.workers import Stopped, Transfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkSender:
    """Packs chunks and puts their records into a sender. Thread-safe.

    Records count as stored to the tier "handoff", and a flush of the cache waits for them.

    Args:
        layout: layout of the engine's KV.
        writes: write pipeline whose slots and counters it uses: `kvkit.cache.Cache.writes`.
    """

    sender: Sender
    layout: KVLayout
    writes: WritePipeline

    def send(
        self,
        chunks: Chunks,
        pages: AllPages,
        ready: Callable[[], object] | None = None,
        transfer: Transfer[int] | None = None,
    ) -> int:
        """Pack the chunks and snapshots that open transfers wait for, and start sending them.

        Returns when the pages may be reused; `kvkit.handoff.sender.Sending.done` reports the arrival. If no
        slots come free in time, the rest is not sent.

        Args:
            pages: pages of these chunks alone, one entry per layer group, states last. Not mutated.
            ready: returns when the pages are complete. None: they are complete after the work already queued
                on the current stream.
            transfer: its cancellation stops the packing; None: nothing stops it.

        Returns:
            The number of chunks that were put.

        Raises:
            CacheError: `pages` do not match the layout or are too short.
        """
        transfer = transfer or Transfer()
        groups = check_pages(pages, chunks, len(chunks), self.layout)
        after: CudaEvents | None = None
        if ready is not None:
            ready()
            after = ()
        sent = self._send(chunks, groups, transfer, after)
        states = groups[chunks.groups :]
        for i in snapshot_chunks(states, len(chunks)):
            self._send(chunks.snapshot(i), pages_at(states, i), transfer, after)
        if transfer.stopped:
            with self.writes.tiers.counting() as counts:
                counts.cancelled += 1
        return sent

    def awaited_chunks(self, chunks: Chunks) -> list[int]:
        """Return the indices of the chunks that have a record for which an open transfer waits."""
        unsent = self.sender.unsent(chunks.names)
        return [i for i in range(len(chunks)) if not unsent.isdisjoint(chunks.records(i, i + 1))]

    def put(self, chunks: Chunks, numbers: Sequence[int], leases: Sequence[Lease]) -> None:
        """Start sending sealed records, and count each when it is sent.

        Args:
            numbers: indices of their chunks.
            leases: their slots, for each chunk one of each group; the caller may release them.
        """
        names = [name for number in numbers for name in chunks.records(number, number + 1)]
        sizes = {name: lease.used for name, lease in zip(names, leases, strict=True)}
        tiers, outstanding = self.writes.tiers, self.writes.outstanding
        batch = Batch(self.writes, HANDOFF, chunks.formats)
        outstanding.add(batch, len(names))
        began, completed, sent_bytes = time.monotonic(), 0, 0

        def on_complete(name: str, error: BaseException | None) -> None:
            nonlocal completed, sent_bytes
            with tiers.counting() as counts:
                completed += 1
                if error is None:
                    sent_bytes += sizes[name]
                    counts.stored_records[HANDOFF] += 1
                    counts.stored_bytes[HANDOFF] += sizes[name]
                    counts.snapshot_records[HANDOFF] += chunks.of_states
                else:
                    counts.write_errors[HANDOFF] += 1
                if completed == len(names) and sent_bytes:
                    counts.moved(HANDOFF, "put", sent_bytes, time.monotonic() - began)
            if error is not None:
                log.warning("%s", error)
            outstanding.done(batch)

        self.sender.put(names, leases, on_complete)

    def _send(
        self,
        chunks: Chunks,
        pages: Sequence[SequencePages],
        transfer: Transfer[int],
        after: CudaEvents | None,
    ) -> int:
        """Pack and send the records of `chunks`, without snapshots; return how many chunks were sent."""
        staging, timeout_s = self.writes.tiers.staging, self.writes.tiers.timeout_s
        awaited = self.awaited_chunks(chunks)
        sent = 0
        transfer.when_stopped(staging.wake)
        while sent < len(awaited) and not transfer.stopped:
            count = min(MAX_IN_FLIGHT, len(awaited) - sent) * chunks.groups
            try:
                leases = staging.acquire(
                    count, timeout_s, at_least=chunks.groups, stopped=lambda: transfer.stopped
                )
            except Stopped:
                break
            except StagingTimeout as error:
                log.warning("handoff: %d chunks are not sent: %s", len(awaited) - sent, error)
                break
            numbers = awaited[sent : sent + len(leases) // chunks.groups]
            try:
                with transfer.pages:
                    if transfer.stopped:  # the engine has reclaimed its pages meanwhile
                        break
                    pack_records(chunks, pages, numbers, leases, after)
                self.put(chunks, numbers, leases)
            finally:
                release_all(leases)
            sent += len(numbers)
        return sent
