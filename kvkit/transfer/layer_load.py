"""Loads one layer at a time, so that the engine computes while later layers move.

    for layer in cache.load_layers(hit, pages):   # the layer's pages are filled, the next are read
        ...                                       # run that layer

Records are the same as elsewhere: a layer is one byte range of each record, and is verified alone. The read
of the last layer includes the trailer, so a record passes the checks of `Cache.load`, but bytes appended to
it are not read. A run is written back, if the policy says so, after its last layer was returned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from kvkit.format import record
from kvkit.kernels.pages.api import unpack
from kvkit.kernels.pages.streams import marks
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.transfer.layer_reads import LayeredRecord, LayerReads, LayersReads, WholeRead
from kvkit.transfer.layers import Layer, layers_of
from kvkit.transfer.lookup import nearest
from kvkit.transfer.plan import clip
from kvkit.transfer.policy import for_request
from kvkit.transfer.sequence import Hit, Loaded, SequencePages
from kvkit.transfer.write_pipeline import WritePipeline
from kvkit.workers import Workers

log = logging.getLogger(__name__)


class LayerLoad:
    """An iterator over the layers of a hit, in model order. A returned layer's pages hold its KV.

    A record that fails, or finds no slot in time, ends the leading run before it, for all later layers; all
    layers are returned nevertheless. When the iterator is exhausted, `loaded` has the complete tokens. Then
    the run's records are written back as the policy says, up to the first without a slot of its own; not
    earlier, because a chunk is verified only with its last layer. Close or exhaust the iterator to release
    its slots.

    Args:
        readers: threads that read parts of records, separate for each tier, since a hanging tier blocks them
            all.
    """

    def __init__(
        self,
        writes: WritePipeline,
        readers: Mapping[str, Workers],
        hit: Hit,
        pages: Sequence[SequencePages],
    ) -> None:
        self._writes = writes
        self._tier_set = tiers = writes.tiers
        self._staging = tiers.staging
        self._chunks = chunks = hit.chunks
        self._pages = pages
        self._after = marks(group.pages.device for group in pages)  # not for layers computed later
        self._plan = plan = nearest(tiers, chunks, hit.plan)
        self._count = plan.chunks
        self._records = [
            LayeredRecord(name, segment.tier)
            for segment in plan.segments
            for name in chunks.records(segment.start, segment.stop)
        ]
        self._layers = layers_of(pages)
        by_group = [self._records[group :: chunks.groups] for group in range(chunks.groups)]
        reads = [
            LayerReads(tiers, chunks, segment, layer, by_group[layer.group], readers[segment.tier])
            for layer in self._layers
            for segment in plan.segments
        ]
        self._reads = LayersReads(tiers, reads, len(plan.segments))
        self._iterator = self._run()

    @property
    def loaded(self) -> Loaded:
        """The tokens with all layers in place so far, by tier."""
        return Loaded.of(clip(self._plan, self._count), self._chunks.chunk_tokens)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._iterator)

    def close(self) -> None:
        """Stop the load and release its slots; layers not yet returned are not loaded."""
        self._iterator.close()

    def _run(self) -> Generator[int]:
        """Yield the layers, each after its parts were read, verified and unpacked."""
        self._staging.on_shortage(self._release)
        try:
            self._borrow()
            self._fetch()
            for layer in self._layers:
                self._load(layer)
                if layer.last:
                    yield layer.number
            self._tier_set.count_loaded(self._chunks, self.loaded)
            self._write_back()
        finally:
            self._staging.off_shortage(self._release)
            self._reads.close()
            for entry in self._records:
                entry.release()

    def _load(self, layer: Layer) -> None:
        """Unpack the leading run of a layer; the first failed chunk ends the run for later layers, too."""
        done, record_format, pages = 0, self._chunks.formats[layer.group], self._pages[layer.group]
        while done < self._count:
            ready = self._reads.take()
            tier, failed = self._reads.tier, self._reads.failed
            try:
                if failed is not None:
                    name, error = failed
                    log.warning("layer %d: %s", layer.number, str(error) or type(error).__name__)
                    self._count = done + len(ready)
                    self._reads.clip(self._count)
                    self._tier_set.ended(tier, name, error)
                if ready:
                    self._tier_set.health[tier].worked(time.monotonic())
                    rows = pages.rows_of(record_format, range(done, done + len(ready)))
                    unpack(layer.pages, [read.data for read in ready], **rows, after=self._after)
            finally:
                release_all(read.lease for read in ready)
            done += len(ready)

    def _entries(self, start: int, stop: int) -> Sequence[LayeredRecord]:
        """Return the records of chunks [start, stop)."""
        return self._records[start * self._chunks.groups : stop * self._chunks.groups]

    def _borrow(self) -> None:
        """Lease the records in host memory, which could be evicted while earlier layers are used.

        Ends the run before the first chunk whose tier has an open circuit.
        """
        blocked_starts = (s.start for s in self._plan.segments if self._tier_set.circuit_open(s.tier))
        self._count = next(blocked_starts, self._count)
        self._reads.clip(self._count)
        for entry in self._entries(0, self._count):
            lease = self._tier_set.tiers[entry.tier].borrow(entry.name)
            if lease is not None:
                entry.whole, entry.lease = True, lease

    def _fetch(self) -> None:
        """Lease slots for records that are read or kept whole, and start reading the former.

        A tier that cannot read parts reads a record whole, once and not once per layer. Records to be written
        back are kept: their layers are read to their offsets in the slot. Records without a slot are read
        layer by layer into slots that later layers reuse, and are not written back.
        """
        staging, tiers = self._staging, self._tier_set.tiers
        kept_tiers = {s.tier for s in self._plan.segments if self._writes.is_written_back(s.tier)}
        without_slot = [
            entry
            for entry in self._entries(0, self._count)
            if entry.lease is None and (entry.tier in kept_tiers or not tiers[entry.tier].reads_ranges)
        ]
        largest = max(record_format.layer_bytes for record_format in self._chunks.formats)
        # for a layer of every chunk
        slots_for_layers = -(-self._count // (staging.slot_bytes // largest))
        slots = min(len(without_slot), staging.free // 2, staging.free - slots_for_layers)
        leases: list[Lease] = []
        if slots > 0:
            with suppress(StagingTimeout):
                leases = staging.acquire(slots, 0.0)
        reads: dict[str, list[WholeRead]] = {}
        for entry, lease in zip(without_slot, leases, strict=False):
            if not tiers[entry.tier].reads_ranges:
                entry.whole = True
                entry.coming = Future()
                reads.setdefault(entry.tier, []).append(WholeRead(entry.name, lease, entry.coming))
            entry.lease = lease
        for tier, jobs in reads.items():
            self._tier_set.get(tier, jobs)

    def _write_back(self) -> None:
        """Put the verified run into the write-back tiers, up to the first record without a slot."""
        targets = for_request(self._tier_set.policy, self._chunks.policy).write_back_to
        for chunk in range(self._count):
            entries = self._entries(chunk, chunk + 1)
            tier = entries[0].tier
            if not self._writes.is_written_back(tier):
                continue
            shares = [entry.share() for entry in entries if entry.coming or not entry.whole]
            leases = [lease for lease in shares if lease is not None]
            try:
                if len(leases) < self._chunks.groups:
                    return
                for entry, record_format, lease in zip(entries, self._chunks.formats, leases, strict=True):
                    assert entry.header is not None
                    record.write_framing(record_format, lease.buffer, entry.header)
                    lease.used = record_format.record_bytes
                self._writes.write_back(tier, self._chunks, chunk, leases, targets)
            finally:
                release_all(leases)

    def _release(self, count: int) -> None:
        """Release up to `count` slots kept for write-backs, from the last record on; from any thread."""
        for entry in reversed(self._records):
            if count > 0 and not entry.whole and entry.release():
                count -= 1
