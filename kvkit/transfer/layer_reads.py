"""Reads of one layer of records: byte ranges, in shares of slots or in the records' own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kvkit.format import record
from kvkit.staging import Lease, StagingError, release_all
from kvkit.tiers.base import DamagedObject, copy_ranges
from kvkit.transfer.layers import Layer
from kvkit.transfer.plan import Segment
from kvkit.transfer.read_pipeline import PlanReads, RecordRead, SegmentReads
from kvkit.transfer.sequence import Chunks
from kvkit.transfer.tier_set import TierSet
from kvkit.workers import Workers

LAYERS_AHEAD = 3
"""Layers that are read ahead while one is used."""


@dataclass(frozen=True, slots=True)
class WholeRead:
    """The read of a whole record into its own slot; `coming` is done when it ends."""

    name: str
    lease: Lease
    coming: Future[None]

    def done(self, error: BaseException | None) -> None:
        """End `coming`."""
        self.coming.set_exception(error)


@dataclass(eq=False, slots=True)
class LayeredRecord:
    """One record of a layered load, and its own slot, if it has one.

    Attributes:
        whole: True if the slot holds the whole record, or will. Otherwise its layers are read to their
            offsets in the slot one by one, for a write-back; the slot is released if others wait for one.
        coming: done when the tier has read the whole record; None if the tier reads layers.
        header: the record's header, once verified.
    """

    name: str
    tier: str
    lease: Lease | None = None
    whole: bool = False
    coming: Future[None] | None = None
    header: bytearray | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def share(self) -> Lease | None:
        """Return a share of the record's own slot; None if it has none."""
        with self._lock:
            return None if self.lease is None else self.lease.share()

    def release(self) -> bool:
        """Release the record's own slot; return whether it had one. From any thread. Mutates."""
        with self._lock:
            lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        return lease is not None


class LayersReads(PlanReads):
    """Reads of layers of the same segments, in order of need: a few layers ahead while there are slots."""

    def __init__(self, tiers: TierSet, reads: Sequence[LayerReads], segments: int) -> None:
        super().__init__(tiers, reads)
        self._ahead = (LAYERS_AHEAD + 1) * segments

    def _fill(self) -> None:
        for reads in islice(self._reads, self._ahead):
            reads.fill(reads.stop - reads.next)
            if reads.next < reads.stop:
                break


class LayerReads(SegmentReads):
    """One layer of the records of a segment: byte ranges, each verified by the thread that read it.

    Args:
        records: the sequence's records with this layer, one per chunk.
        readers: threads that read parts of records of this tier.
    """

    together = True

    def __init__(
        self,
        tiers: TierSet,
        chunks: Chunks,
        segment: Segment,
        layer: Layer,
        records: Sequence[LayeredRecord],
        readers: Workers,
    ) -> None:
        super().__init__(tiers, chunks, segment)
        self.per_chunk = 1
        self._layer = layer
        self._record_format = chunks.formats[layer.group]
        self._range = record.layer_range(self._record_format, layer.index)
        self._records = records
        self._readers = readers

    def _lease(self, count: int, wait: bool) -> Sequence[RecordRead]:
        """Lease slots for all chunks left, or if `wait`, as many as are free.

        Chunks whose records have slots of their own need none; pieces of others share slots.
        """
        (offset, size), staging = self._range, self._tiers.staging
        per_slot = staging.slot_bytes // size
        remaining = self._records[self.next : self.stop]
        slots = -(-sum(entry.lease is None for entry in remaining) // per_slot)
        leases: list[Lease] = []
        # others do not release slots for read-ahead
        if slots and (staging.free >= slots or (wait and remaining[0].lease is None)):
            timeout_s, at_least = (self._tiers.timeout_s, 1) if wait else (0.0, slots)
            leases = staging.acquire(slots, timeout_s, at_least, stopped=lambda: self._cancelled)
        free_pieces = ((lease, i * size) for lease in leases for i in range(per_slot))
        reads: list[RecordRead] = []
        for chunk, entry in enumerate(remaining, self.next):
            own_lease = entry.share()
            slot, start = next(free_pieces, (None, 0)) if own_lease is None else (own_lease, offset)
            if slot is None:
                break
            number = chunk * self._chunks.groups + self._layer.group
            reads.append(RecordRead(self, number, entry.name, own_lease or slot.share(), start, start + size))
        release_all(leases)
        return reads

    def _start(self, reads: Sequence[RecordRead]) -> None:
        self._readers.start(*(partial(self._carry_out, read) for read in reads))

    def _carry_out(self, read: RecordRead) -> None:
        """Read and verify a layer of a record, unless it was given up."""
        try:
            share = read.lease.share()  # a late read must not write into a reused slot
        except StagingError:  # given up
            return
        error: BaseException | None = None
        try:
            with share:
                self._read(read, share)
        except BaseException as caught:  # the load reports it
            error = caught
        read.done(error)

    def find_damage(self, read: RecordRead) -> None:
        """Return None: `_read` has verified the layer."""

    def _read(self, read: RecordRead, slot: Lease) -> None:
        """Fill `read.data` and verify it, with the header or trailer if not yet read.

        For a record that is `whole`, the layer is in its slot already, or arrives with the record.

        Raises:
            OSError: the layer is not available or is damaged.
        """
        record_format, layer_index = self._record_format, self._layer.index
        chunk = read.number // self._chunks.groups
        entry = self._records[chunk]
        if entry.coming is not None:
            entry.coming.result(self._tiers.timeout_s)
        data = slot.array[read.start : read.stop].data
        new, last = entry.header is None, layer_index == record_format.shape[0] - 1
        header = entry.header or bytearray(record_format.header_bytes)
        trailer = bytearray(record_format.record_bytes - record_format.layers_end)
        pieces = [((0, record_format.header_bytes), memoryview(header))] if new else []
        if not entry.whole:
            pieces.append((self._range, data))
        if last:  # adjacent to the last layer, so the tier can read both at once
            pieces.append(((record_format.layers_end, len(trailer)), memoryview(trailer)))
        ranges, buffers = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
        if entry.whole:
            copy_ranges(entry.name, slot.buffer[: slot.used], ranges, buffers)
        else:
            self._tiers.tiers[self.tier].get_ranges(entry.name, ranges, buffers)
        # even if another read has set `entry.header` meanwhile: this header is the one used
        damage = record.verify_header(record_format, header, *self._chunks.identity(chunk)) if new else None
        damage = damage or record.verify_layer(record_format, header, layer_index, data)
        damage = damage or (record.verify_trailer(record_format, trailer) if last else None)
        if damage is not None:
            raise DamagedObject(f"{entry.name}: {damage}", damage)
        entry.header = header
