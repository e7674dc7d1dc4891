"""Loads and stores one layer at a time, so that the engine computes while other layers move.

    for layer in cache.load_layers(hit, pages):   # the layer's pages are filled, the next are read
        ...                                       # run that layer
    with cache.store_layers(tokens, pages) as store:
        ...                                       # run a layer
        store.layer(0)                            # its pages are packed, and may change again
    store.stored                                  # how much was stored

Records are the same as elsewhere: a layer is one byte range of each record, and is verified alone. The read
of the last layer includes the trailer, so a record passes the checks of `Cache.load`, but bytes appended to
it are not read. The policy writes a run back after its last layer was returned.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvkit.format import record
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.kernels.pages.streams import marks
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.tiers.base import DamagedObject, copy_ranges
from kvkit.transfer.plan import StorePlan, clip
from kvkit.transfer.policy import for_request
from kvkit.transfer.sequence import CacheError, Chunks, Hit, Loaded, SequencePages, clear_gaps
from kvkit.transfer.store import Stored, seal
from kvkit.transfer.write_pipeline import WritePipeline
from kvkit.workers import Closed, Workers

log = logging.getLogger(__name__)

LAYERS_AHEAD = 3
"""Layers that are read ahead while one is used."""

Piece = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of the model, or some of its heads: its group, its index in the group, and its pages."""

    number: int
    group: int
    place: int
    pages: Pages
    last: bool = True  # the last entry of its layer, in the order of `layers_of`


@dataclass(eq=False, slots=True)
class _LayeredRecord:
    """One record of a load, and its own slot, if it has one.

    Attributes:
        whole: True if the slot holds the whole record, or will. Otherwise its layers are read to their places
            there one by one, for a write-back; the slot is released if others wait for one.
        coming: done when the tier has read the whole record; None if it does not.
        header: the record's header, once verified.
    """

    chunk: int
    group: int
    name: str
    tier: str
    lease: Lease | None = None
    whole: bool = False
    coming: Future[None] | None = None
    header: bytearray | None = None


@dataclass(frozen=True, slots=True)
class _Reads:
    """The reads of one layer: per chunk a piece, its read and a share of its slot; and the slots.

    Each read has its own share of the slot, so that a late one cannot write into a reused slot.
    """

    layer: _Layer
    leases: Sequence[Lease]
    pieces: list[tuple[Piece, Future[None], Lease]] = field(default_factory=list)

    def end(self) -> None:
        """Release the slots, except those still being read into."""
        for _, read, share in self.pieces:
            if read.cancel():
                share.release()
        release_all(self.leases)


class LayerLoad:
    """An iterator over the layers of a hit, in model order. A returned layer's pages hold its KV.

    A record that fails or finds no slot ends the leading run before it, for all later layers; all layers are
    returned nevertheless. When the iterator is exhausted, `loaded` has the complete tokens. The policy then
    writes back the run's records, up to the first without a slot of its own: a chunk is verified only with
    its last layer. Close or exhaust the iterator to release its slots.

    Args:
        readers: threads that read parts of records, separate for each tier, since a hanging tier blocks them
            all.
    """

    def __init__(
        self, puts: WritePipeline, readers: Mapping[str, Workers], hit: Hit, pages: Sequence[SequencePages]
    ) -> None:
        self._puts = puts
        self._tier_set = puts.tiers
        self._staging = puts.tiers.staging
        self._readers = readers
        self._chunks = hit.chunks
        self._pages = pages
        self._after = marks(group.pages.device for group in pages)  # excludes the layers computed meanwhile
        plan = puts.tiers.nearest(hit.chunks, hit.plan)
        self._plan = plan
        self._tiers = [s.tier for s in plan.segments for _ in range(s.start, s.stop)]
        self._count = plan.chunks
        places = itertools.product(range(plan.chunks), range(hit.chunks.groups))
        self._records = [
            _LayeredRecord(chunk, group, name, self._tiers[chunk])
            for (chunk, group), name in zip(places, hit.chunks.names, strict=False)
        ]
        self._lock = threading.Lock()  # guards the leases released on a shortage
        self._layers = layers_of(pages)
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
        """Yield the layers, each after its pieces were read, verified and unpacked."""
        under_way: deque[_Reads] = deque()
        waiting = deque(self._layers)
        self._staging.on_shortage(self._release)
        try:
            self._borrow()
            self._fetch()
            while waiting or under_way:
                while waiting and len(under_way) <= LAYERS_AHEAD:
                    started = self._start(waiting[0], ahead=bool(under_way))
                    if started is None:
                        break
                    waiting.popleft()
                    under_way.append(started)
                try:
                    self._finish(under_way[0])
                finally:
                    done = under_way.popleft()
                    done.end()
                if done.layer.last:
                    yield done.layer.number
            self._tier_set.count_loaded(self._chunks, self.loaded)
            self._write_back()
        finally:
            self._staging.off_shortage(self._release)
            for reads in under_way:
                reads.end()
            self._release(len(self._records))
            release_all(entry.lease for entry in self._records if entry.lease is not None)

    def _borrow(self) -> None:
        """Lease the records in host memory, which could be evicted while earlier layers are used.

        Ends the run before the first tier with an open circuit.
        """
        passed_over = {tier for tier in set(self._tiers) if self._tier_set.passed_over(tier)}
        self._count = next((i for i, tier in enumerate(self._tiers) if tier in passed_over), self._count)
        for entry in self._records[: self._count * self._chunks.groups]:
            lease = self._tier_set.tiers[entry.tier].borrow(entry.name)
            if lease is not None:
                entry.whole, entry.lease = True, lease

    def _fetch(self) -> None:
        """Lease slots for records that are read or kept whole, and start reading the former.

        A tier that cannot read parts reads a record whole, once and not once per layer. Records to be written
        back are kept: their layers are read to their places in the slot. Records without a slot are read
        layer by layer into slots that later layers reuse, and are not written back.
        """
        staging, tiers = self._staging, self._tier_set.tiers
        kept = {tier for tier in set(self._tiers) if self._puts.is_written_back(tier)}
        wanted = [
            entry
            for entry in self._records[: self._count * self._chunks.groups]
            if entry.lease is None and (entry.tier in kept or not tiers[entry.tier].reads_parts)
        ]
        biggest = max(form.layer_bytes for form in self._chunks.formats)
        by_layers = -(-self._count // (staging.slot_bytes // biggest))  # slots for a layer of every chunk
        slots = min(len(wanted), staging.free // 2, staging.free - by_layers)
        if slots < 1:
            return
        try:
            leases = staging.acquire(slots, 0.0)
        except StagingTimeout:
            return
        reads: dict[str, Future[None]] = {}
        batches: dict[str, dict[str, Lease]] = {}
        for entry, lease in zip(wanted, leases, strict=False):
            if not tiers[entry.tier].reads_parts:
                entry.whole = True
                entry.coming = reads[entry.name] = Future()
                batches.setdefault(entry.tier, {})[entry.name] = lease
            entry.lease = lease

        def on_complete(name: str, error: BaseException | None) -> None:
            if error is None:
                reads[name].set_result(None)
            else:
                reads[name].set_exception(error)

        for tier, batch in batches.items():
            self._tier_set.get(tier, list(batch), list(batch.values()), on_complete)

    def _start(self, layer: _Layer, ahead: bool) -> _Reads | None:
        """Start reading one layer of every chunk; shorten the run if the slots do not suffice.

        Returns None if the layer is not needed yet (`ahead`) and there are no slots now.
        """
        offset, size = record.layer_range(self._chunks.formats[layer.group], layer.place)
        per_slot = self._staging.slot_bytes // size
        entries = self._records[layer.group :: self._chunks.groups][: self._count]
        with self._lock:
            kept = {e.chunk: e.lease.share() for e in entries if e.lease is not None and not e.whole}
        far = [entry.chunk for entry in entries if not entry.whole and entry.chunk not in kept]
        leases = self._room(-(-len(far) // per_slot), ahead=ahead or bool(kept))
        reads = _Reads(layer, [*(leases or ()), *kept.values()])
        try:
            if leases is None:
                reads.end()
                if ahead:
                    return None
                self._release(len(self._records))  # loading all chunks is worth more than writing some back
                return self._start(layer, ahead)
            if len(far) > len(leases) * per_slot:
                self._count = far[len(leases) * per_slot]
            room = {chunk: divmod(i, per_slot) for i, chunk in enumerate(far)}
            for entry in entries[: self._count]:
                own = entry.lease if entry.whole else kept.get(entry.chunk)
                if own is None:
                    slot, place = room[entry.chunk]
                    self._read_later(reads, entry, leases[slot], place * size)
                else:
                    self._read_later(reads, entry, own, offset)
        except BaseException:
            reads.end()
            raise
        return reads

    def _room(self, wanted: int, ahead: bool) -> list[Lease] | None:
        """Lease `wanted` slots. If `ahead`, all at once or None; else wait, then take the free ones."""
        slots = min(wanted, self._staging.slots)
        if not slots:
            return []
        if ahead and self._staging.free < slots:
            return None  # others do not release slots for read-ahead
        try:
            timeout_s = 0.0 if ahead else self._tier_set.timeout_s
            return self._staging.acquire(slots, timeout_s, at_least=slots)
        except StagingTimeout as error:
            if ahead:
                return None
            log.warning("a layer is loaded for fewer chunks: %s", error)
        with suppress(StagingTimeout):
            return self._staging.acquire(slots, 0.0)
        return []

    def _read_later(self, reads: _Reads, entry: _LayeredRecord, lease: Lease, start: int) -> None:
        """Start a read of a piece at byte `start` of a slot, and add it to `reads`. Mutates `reads`."""
        layer = reads.layer
        _, size = record.layer_range(self._chunks.formats[layer.group], layer.place)
        piece = lease.array[start : start + size]
        share = lease.share()

        def read() -> None:
            with share:
                self._read(layer.place, entry, piece, share)

        try:
            future = self._readers[entry.tier].submit(read)
        except Closed:
            share.release()
            raise
        reads.pieces.append((piece, future, share))

    def _read(self, place: int, entry: _LayeredRecord, piece: Piece, slot: Lease) -> None:
        """Fill `piece` with a layer of a record and verify it, with the header or trailer if not yet read.

        For a record that is `whole`, the piece is in its slot already, or arrives with the record.

        Raises:
            OSError: the layer is not available or is damaged.
        """
        form = self._chunks.formats[entry.group]
        if entry.coming is not None:
            entry.coming.result(self._tier_set.timeout_s)
        data = memoryview(piece.data)
        new = entry.header is None
        header = entry.header or bytearray(form.header_bytes)
        last = place == form.shape[0] - 1
        trailer = bytearray(form.record_bytes - form.layers_end if last else 0)
        parts = [((0, form.header_bytes), memoryview(header))] if new else []
        if not entry.whole:
            parts.append((record.layer_range(form, place), data))
        if last:  # adjacent to the last layer, so the tier can read both at once
            parts.append(((form.layers_end, len(trailer)), memoryview(trailer)))
        ranges, buffers = [part[0] for part in parts], [part[1] for part in parts]
        if entry.whole:
            copy_ranges(entry.name, slot.buffer[: slot.used], ranges, buffers)
        else:
            self._tier_set.tiers[entry.tier].get_ranges(entry.name, ranges, buffers)
        # even if another read has set `entry.header` meanwhile: this header is the one used
        damage = record.verify_header(form, header, *self._chunks.identity(entry.chunk)) if new else None
        damage = damage or record.verify_layer(form, header, place, data)
        if last:
            damage = damage or record.verify_trailer(form, trailer)
        if damage is not None:
            raise DamagedObject(f"{entry.name}: {damage}", damage)
        entry.header = header

    def _finish(self, started: _Reads) -> None:
        """Unpack the leading run of a layer; the first failed chunk ends the run for later layers, too."""
        layer = started.layer
        for chunk, (_, read, _) in enumerate(started.pieces[: self._count]):
            try:
                read.result(self._tier_set.timeout_s)
            except Exception as error:
                self._count = chunk
                name = self._chunks.names[chunk * self._chunks.groups + layer.group]
                log.warning("layer %d of %s: %s", layer.number, name, str(error) or type(error).__name__)
                self._tier_set.ended(self._tiers[chunk], name, error)
                break
        for tier in set(self._tiers[: self._count]):
            self._tier_set.health[tier].worked(time.monotonic())
        if self._count:
            form = self._chunks.formats[layer.group]
            rows = self._pages[layer.group].rows(form, 0, self._count)
            pieces = [piece for piece, _, _ in started.pieces[: self._count]]
            unpack(layer.pages, pieces, **rows, after=self._after)

    def _write_back(self) -> None:
        """Put the verified run into the write-back tiers, up to the first record without a slot."""
        groups = self._chunks.groups
        targets = for_request(self._tier_set.policy, self._chunks.policy).write_back_to
        for chunk, tier in enumerate(self._tiers[: self._count]):
            if not self._puts.is_written_back(tier):
                continue
            entries = self._records[chunk * groups : (chunk + 1) * groups]
            with self._lock:
                leases = [
                    entry.lease.share()
                    for entry in entries
                    if entry.lease is not None and (entry.coming or not entry.whole)
                ]
            try:
                if len(leases) < groups:
                    return
                for entry, form, lease in zip(entries, self._chunks.formats, leases, strict=True):
                    assert entry.header is not None
                    record.write_framing(form, lease.buffer, entry.header)
                    lease.used = form.record_bytes
                self._puts.write_back(tier, self._chunks, chunk, leases, targets)
            finally:
                release_all(leases)

    def _release(self, count: int) -> None:
        """Release up to `count` slots kept for write-backs, from the last record on; from any thread."""
        gone: list[Lease] = []
        with self._lock:
            for entry in reversed(self._records):
                if len(gone) < count and entry.lease is not None and not entry.whole:
                    gone.append(entry.lease)
                    entry.lease = None
        release_all(gone)


class LayerPacker:
    """Packs chunks into slots one layer after another, and seals the records.

    Args:
        pages: pages of `chunks`, one entry per layer group.
        numbers: chunks to pack, ascending.
        leases: their slots, groups side by side.

    Attributes:
        left: layers still to be packed, in model order.

    Raises:
        CacheError: a group has states.
    """

    def __init__(
        self,
        chunks: Chunks,
        pages: Sequence[SequencePages],
        numbers: Sequence[int],
        leases: Sequence[Lease],
    ) -> None:
        self.chunks = chunks
        self.numbers = numbers
        self.leases = leases
        self._pages = pages
        self._layers: dict[int, list[_Layer]] = {}
        for layer in layers_of(pages):
            self._layers.setdefault(layer.number, []).append(layer)
        self.left = list(self._layers)
        forms = itertools.cycle(chunks.formats)
        self._sums = [[0] * form.shape[0] for _, form in zip(leases, forms, strict=False)]

    def layer(self, number: int) -> None:
        """Pack a layer of the model with complete KV. Its pages may change when this returns.

        Raises:
            KeyError: the model has no such layer.
        """
        layers, groups = self._layers[number], self.chunks.groups
        for layer in layers if self.leases else ():
            leases = self.leases[layer.group :: groups]
            form = self.chunks.formats[layer.group]
            offset, size = record.layer_range(form, layer.place)
            pieces = [lease.array[offset : offset + size] for lease in leases]
            rows = self._pages[layer.group].rows_of(form, self.numbers)
            clear_gaps(rows, pieces)
            pack(layer.pages, pieces, **rows)
            for sums, piece in zip(self._sums[layer.group :: groups], pieces, strict=True):
                sums[layer.place] = record.layer_checksum(piece.data)  # while in the CPU's cache
        if number in self.left:
            self.left.remove(number)

    def seal(self) -> None:
        """Seal the records, once all layers are packed."""
        seal(self.chunks, self.numbers, self.leases, self._sums)


class LayerStore:
    """A store that packs layers one after another. A context manager that finishes the store.

    Entering leases the slots; the last chunks are left out if there are too few.

    Attributes:
        stored: what was stored, set when the context ends.
    """

    def __init__(
        self, puts: WritePipeline, chunks: Chunks, pages: Sequence[SequencePages], targets: Sequence[str]
    ) -> None:
        self._puts = puts
        self._chunks = chunks
        self._pages = pages
        self._targets = targets
        self.stored = Stored(0, 0)
        self._plan = StorePlan()
        self._packer = LayerPacker(chunks, pages, (), ())

    @property
    def left(self) -> Sequence[int]:
        """Layers still to be packed, in model order."""
        return self._packer.left

    def layer(self, number: int) -> None:
        """Pack a layer of the model, as `LayerPacker.layer`."""
        self._packer.layer(number)

    def __enter__(self) -> LayerStore:
        tiers, groups = self._puts.tiers, self._chunks.groups
        self._plan = plan = self._puts.plan(self._chunks, self._targets)
        most = min((plan.stop - plan.start) * groups, tiers.staging.slots // groups * groups)
        leases: Sequence[Lease] = ()
        try:
            if most:
                leases = tiers.staging.acquire(most, tiers.timeout_s, at_least=groups)
        except StagingTimeout as error:
            log.warning("layer store: nothing is stored: %s", error)
        numbers = range(plan.start, plan.start + len(leases) // groups)
        self._packer = LayerPacker(self._chunks, self._pages, numbers, leases)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Seal the records and start putting them if all layers are packed."""
        packer, stored = self._packer, 0
        try:
            if kind is None and packer.leases and not packer.left:
                packer.seal()
                segments = self._plan.segments
                stored = len(self._puts.put(segments, self._chunks, packer.numbers, packer.leases))
        finally:
            release_all(packer.leases)
            packer.leases = ()
        size = self._chunks.chunk_tokens
        self.stored = Stored(len(self._chunks) * size, stored * size)


def layers_of(pages: Sequence[SequencePages]) -> list[_Layer]:
    """Return the model's layers in order, each with its own pages; one entry per group of heads.

    Raises:
        CacheError: a group has states, which are moved as whole snapshots only.
    """
    if any(entry.pages.group.state for entry in pages):
        raise CacheError("pages: layers with states cannot be moved one at a time; want `load` and `store`")
    layers = [
        _Layer(number, group, place, entry.pages.layer(place))
        for group, entry in enumerate(pages)
        for place, number in enumerate(entry.pages.group.layers)
    ]
    layers.sort(key=lambda layer: layer.number)
    last = {layer.number: layer.group for layer in layers}
    return [replace(layer, last=layer.group == last[layer.number]) for layer in layers]
