"""Loads and stores one layer at a time, so that an engine's layers compute while others are on their way.

    for layer in cache.load_layers(hit, pages):   # layer's KV is in its pages, the next ones are being read
        ...                                       # run that layer
    with cache.store_layers(tokens, pages) as store:
        ...                                       # run a layer
        store.layer(0)                            # its pages are packed, and may change again
    store.stored                                  # how much that was

Records are the same as everywhere: a layer is one byte range of each, and is verified alone. With its last
layer comes what follows it, so that a record passes the checks of `Cache.load`; bytes added behind it are not
read. What was loaded is written back when its last layer was returned.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvkit.format import record
from kvkit.format.record import Damage
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.moving.plan import StorePlan
from kvkit.moving.puts import Puts
from kvkit.moving.reads import keep_whole
from kvkit.moving.sequence import Chunks, Hit, Loaded, SequencePages, clear_gaps
from kvkit.moving.store import Stored
from kvkit.moving.tier_set import TierSet
from kvkit.staging import Lease, Staging, StagingTimeout, release_all
from kvkit.tiers.base import DamagedObject, copy_ranges
from kvkit.workers import Closed, Workers

log = logging.getLogger(__name__)

LAYERS_AHEAD = 3
"""Layers that are being read while one is used."""

Piece = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of the model: the group it is in, its place there, and its pages."""

    number: int
    group: int
    place: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class _Reads:
    """One layer on its way: a piece and a read per chunk, and the slots that the pieces lie in.

    Each read comes with a share of its slot: one that comes too late must not write into another's.
    """

    layer: _Layer
    leases: Sequence[Lease]
    pieces: list[Piece] = field(default_factory=list)
    reads: list[tuple[Future[None], Lease]] = field(default_factory=list)

    def end(self) -> None:
        """Give the slots back, but for those that are being read into."""
        for read, share in self.reads:
            if read.cancel():
                share.release()
        release_all(self.leases)


class _Kept:
    """Slots that records are read into layer by layer, to be written back. Thread-safe.

    A context manager: leaving it gives them back, as does who waits for slots meanwhile.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._slots: dict[tuple[int, int], Lease] = {}
        self._lock = threading.Lock()

    def keep(self, chunk: int, group: int, lease: Lease) -> None:
        """Have a record in this slot, whose lease is given up."""
        with self._lock:
            self._slots[chunk, group] = lease

    def take(self, chunk: int, group: int) -> Lease | None:
        """The slot of a record, which is not kept any longer; None if there is none."""
        with self._lock:
            return self._slots.pop((chunk, group), None)

    def share(self, group: int) -> dict[int, Lease]:
        """Shares of the slots of a group's records, by chunk."""
        with self._lock:
            return {chunk: lease.share() for (chunk, g), lease in self._slots.items() if g == group}

    def give_up(self, count: int | None = None) -> None:
        """Keep the last `count` records no longer; None: none at all."""
        with self._lock:
            most = len(self._slots)
            gone = [self._slots.popitem()[1] for _ in range(most if count is None else min(count, most))]
        release_all(gone)

    def __enter__(self) -> Self:
        self._staging.on_shortage(self.give_up)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._staging.off_shortage(self.give_up)
        self.give_up()


class LayerLoad:
    """An iterator over the layers of a hit, in model order; each is in its pages when it is returned.

    A record that fails, or finds no room, ends the leading run before it for all layers that follow: `loaded`
    says, once the iterator is used up, how many tokens are complete. All layers are returned whatever fails.
    Only then the policy has that run written back, as far as there were slots to spare for its records: no
    chunk is verified before its last layer is. Close it, or use it up, to give the slots back.

    Args:
        readers: threads that read parts of records, for each tier its own: one that hangs keeps them all.
    """

    def __init__(
        self,
        tiers: TierSet,
        puts: Puts,
        readers: Mapping[str, Workers],
        hit: Hit,
        pages: Sequence[SequencePages],
    ) -> None:
        self._tier_set = tiers
        self._puts = puts
        self._readers = readers
        self._chunks = hit.chunks
        self._pages = pages
        plan = tiers.nearest(hit.chunks, hit.plan)
        self._tiers = [s.tier for s in plan.segments for _ in range(s.start, s.stop)]
        self._count = plan.chunks
        self._headers: dict[tuple[int, int], bytearray] = {}
        self._lent: dict[tuple[int, int], Lease] = {}  # records that lie in slots, by chunk and group
        self._coming: dict[tuple[int, int], Future[None]] = {}  # those of them that are being read
        self._kept = _Kept(tiers.staging)
        self._layers = layers_of(pages)
        self._iterator = self._run()

    @property
    def loaded(self) -> Loaded:
        """The tokens whose layers so far are all in place, by tier."""
        size = self._chunks.chunk_tokens
        by_tier = Counter(self._tiers[: self._count])
        return Loaded(self._count * size, {tier: n * size for tier, n in by_tier.items()})

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._iterator)

    def close(self) -> None:
        """Stop; what was not returned is not loaded."""
        self._iterator.close()

    def _run(self) -> Generator[int]:
        """The layers, each after its pieces were read, verified and unpacked."""
        under_way: deque[_Reads] = deque()
        waiting = deque(self._layers)
        try:
            with self._kept:
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
                    yield done.layer.number
                self._tier_set.count_loaded(self._chunks, self.loaded)
                self._write_back()
        finally:
            for reads in under_way:
                reads.end()
            release_all(self._lent.values())
            self._lent.clear()

    def _borrow(self) -> None:
        """Hold on to the records that lie in memory, which might be evicted while earlier layers are used.

        The run ends before the first tier that failed since the lookup.
        """
        groups = self._chunks.groups
        passed_over = {tier for tier in set(self._tiers) if self._tier_set.passed_over(tier)}
        for chunk, tier in enumerate(self._tiers):
            if tier in passed_over:
                self._count = chunk
                break
            for group in range(groups):
                lease = self._tier_set.tiers[tier].borrow(self._chunks.names[chunk * groups + group])
                if lease is not None:
                    self._lent[chunk, group] = lease

    def _fetch(self) -> None:
        """Give slots to records that are read whole, or kept whole, and begin to read the former.

        A tier that cannot do less reads a record whole: once, and not once for each layer. One that will be
        written back is kept: its layers are read to their places in its slot. What has no slot to spare is
        read layer by layer into slots that the next layers use again, and is not written back.
        """
        groups, tiers = self._chunks.groups, self._tier_set.tiers
        kept = {tier for tier in set(self._tiers) if self._puts.is_written_back(tier)}
        whole = [
            (chunk, group)
            for chunk, tier in enumerate(self._tiers[: self._count])
            for group in range(groups)
            if (chunk, group) not in self._lent and (tier in kept or not tiers[tier].reads_parts)
        ]
        staging = self._tier_set.staging
        sizes = {form.layer_bytes for form in self._chunks.formats}
        by_layers = -(-self._count // (staging.slot_bytes // max(sizes)))  # slots for a layer of every chunk
        wanted = min(len(whole), staging.free // 2, staging.free - by_layers)
        if wanted < 1:
            return
        try:
            leases = staging.acquire(wanted, 0.0)
        except StagingTimeout:
            return
        batches: dict[str, tuple[list[str], list[Lease]]] = {}
        reads: dict[str, Future[None]] = {}
        for (chunk, group), lease in zip(whole, leases, strict=False):
            if tiers[self._tiers[chunk]].reads_parts:
                self._kept.keep(chunk, group, lease)
                continue
            name = self._chunks.names[chunk * groups + group]
            self._lent[chunk, group] = lease
            self._coming[chunk, group] = reads[name] = Future()
            names, slots = batches.setdefault(self._tiers[chunk], ([], []))
            names.append(name)
            slots.append(lease)

        def on_complete(name: str, error: BaseException | None) -> None:
            if error is None:
                reads[name].set_result(None)
            else:
                reads[name].set_exception(error)

        for tier, (names, slots) in batches.items():
            self._tier_set.get(tier, names, slots, on_complete)

    def _start(self, layer: _Layer, ahead: bool) -> _Reads | None:
        """Begin to read one layer of every chunk. What has room decides the run.

        None if it is not needed yet (`ahead`) and has no room now.
        """
        group = layer.group
        offset, size = record.layer_range(self._chunks.formats[group], layer.place)
        per_slot = self._tier_set.staging.slot_bytes // size
        kept = self._kept.share(group)
        far = self._far(group, kept)
        leases = self._room(-(-len(far) // per_slot), ahead=ahead or bool(kept))
        if leases is None and not ahead:  # to load all is worth more than to write some of it back
            release_all(kept.values())
            self._kept.give_up()
            kept, far = {}, self._far(group, {})
            leases = self._room(-(-len(far) // per_slot), ahead=False)
        reads = _Reads(layer, [*(leases or ()), *kept.values()])
        try:
            if leases is None:
                reads.end()
                return None
            if len(far) > len(leases) * per_slot:
                self._count = far[len(leases) * per_slot]
            room = {chunk: divmod(i, per_slot) for i, chunk in enumerate(far)}
            for chunk in range(self._count):
                lent = self._lent.get((chunk, group))
                own = lent or kept.get(chunk)
                if own is None:
                    slot, place = room[chunk]
                    self._read_later(reads, chunk, leases[slot], place * size, None)
                else:
                    self._read_later(reads, chunk, own, offset, lent)
        except BaseException:
            reads.end()
            raise
        return reads

    def _far(self, group: int, kept: Mapping[int, Lease]) -> list[int]:
        """The chunks whose records of a group lie in no slot of their own."""
        return [c for c in range(self._count) if (c, group) not in self._lent and c not in kept]

    def _room(self, wanted: int, ahead: bool) -> list[Lease] | None:
        """`wanted` slots: all at once or None if that is `ahead`; else it waits, then takes what there is."""
        staging = self._tier_set.staging
        slots = min(wanted, staging.slots)
        if not slots:
            return []
        if ahead and staging.free < slots:
            return None  # nobody gives up slots for this
        try:
            return staging.acquire(slots, 0.0 if ahead else self._tier_set.timeout_s, at_least=slots)
        except StagingTimeout as error:
            if ahead:
                return None
            log.warning("a layer is loaded in part: %s", error)
        try:
            return staging.acquire(slots, 0.0)
        except StagingTimeout:
            return []

    def _read_later(self, reads: _Reads, chunk: int, lease: Lease, start: int, lent: Lease | None) -> None:
        """Add a piece from byte `start` of a slot on, and a read that fills it, to `reads`. Mutates it."""
        layer = reads.layer
        _, size = record.layer_range(self._chunks.formats[layer.group], layer.place)
        piece = lease.array[start : start + size]
        share = lease.share()

        def read() -> None:
            with share:
                self._read(layer, chunk, piece, lent)

        try:
            future = self._readers[self._tiers[chunk]].submit(read)
        except Closed:
            share.release()
            raise
        reads.pieces.append(piece)
        reads.reads.append((future, share))

    def _read(self, layer: _Layer, chunk: int, piece: Piece, lent: Lease | None) -> None:
        """Fill `piece` with a layer of a chunk; check it, whose record it is, and at the last how that ends.

        A piece of a record that is `lent` is there already, or comes with it.

        Raises:
            OSError: it is not available.
        """
        form = self._chunks.formats[layer.group]
        name = self._chunks.names[chunk * self._chunks.groups + layer.group]
        tier = self._tier_set.tiers[self._tiers[chunk]]
        coming = self._coming.get((chunk, layer.group))
        if coming is not None:
            coming.result(self._tier_set.timeout_s)
        data = memoryview(piece.data)
        ranges, buffers = [], []
        if lent is None:
            ranges.append(record.layer_range(form, layer.place))
            buffers.append(data)
        known = self._headers.get((chunk, layer.group))
        header = bytearray(form.header_bytes) if known is None else known
        if known is None:
            ranges.insert(0, (0, form.header_bytes))
            buffers.insert(0, memoryview(header))
        last = layer.place == form.shape[0] - 1
        trailer = bytearray(form.record_bytes - form.layers_end if last else 0)
        if last:  # beside the last layer: a store reads both at once
            ranges.append((form.layers_end, len(trailer)))
            buffers.append(memoryview(trailer))
        if lent is None:
            tier.get_ranges(name, ranges, buffers)
        else:
            copy_ranges(name, lent.buffer[: lent.used], ranges, buffers)
        damage: Damage | None = None
        if known is None:  # even if another layer's read has been quicker: this is the one that is used
            damage = record.verify_header(form, header, *self._chunks.identity(chunk))
        if damage is None:
            damage = record.verify_layer(form, header, layer.place, data)
        if damage is None and last:
            damage = record.verify_trailer(form, trailer)
        if damage is not None:
            raise DamagedObject(f"{name}: {damage}", damage)
        self._headers[chunk, layer.group] = header

    def _finish(self, started: _Reads) -> None:
        """Unpack the leading run of a layer; the first chunk that failed ends it for good."""
        layer = started.layer
        for chunk, (read, _) in enumerate(started.reads[: self._count]):
            try:
                read.result(self._tier_set.timeout_s)
            except Exception as error:
                self._count = chunk
                name = self._chunks.names[chunk * self._chunks.groups + layer.group]
                log.warning("layer %d of %s: %s", layer.number, name, error or type(error).__name__)
                self._tier_set.ended(self._tiers[chunk], name, error)
                break
        for tier in set(self._tiers[: self._count]):
            self._tier_set.worked(tier)
        if self._count:
            form = self._chunks.formats[layer.group]
            rows = self._pages[layer.group].rows(form, 0, self._count)
            unpack(layer.pages, started.pieces[: self._count], **rows)

    def _write_back(self) -> None:
        """Give the run, all of it verified, to the tiers that get it; up to a record that has no slot."""
        for chunk, tier in enumerate(self._tiers[: self._count]):
            if not self._puts.is_written_back(tier):
                continue
            leases: list[Lease] = []
            try:
                for group, form in enumerate(self._chunks.formats):
                    lease = self._kept.take(chunk, group)
                    if lease is None and (chunk, group) in self._coming:
                        lease = self._lent.pop((chunk, group))
                    if lease is None:
                        return
                    leases.append(lease)
                    record.surround(form, lease.buffer, self._headers[chunk, group])
                    lease.used = form.record_bytes
                self._puts.write_back(tier, self._chunks, chunk, leases)
            finally:
                release_all(leases)


class LayerStore:
    """A store that takes the layers of an engine one after another. A context manager: leaving it finishes.

    Entering it leases the slots; chunks that find none are left out, from the end.

    Attributes:
        stored: what was stored, once the context is left.
    """

    def __init__(
        self,
        tiers: TierSet,
        puts: Puts,
        chunks: Chunks,
        pages: Sequence[SequencePages],
        targets: Sequence[str],
    ) -> None:
        self._tiers = tiers
        self._puts = puts
        self._chunks = chunks
        self._pages = pages
        self._targets = targets
        self._layers = {layer.number: layer for layer in layers_of(pages)}
        self.stored = Stored(0, 0)
        self._plan = StorePlan()
        self._packed: set[int] = set()
        self._leases: list[Lease] = []

    def layer(self, number: int) -> None:
        """Pack a layer of the model, whose KV is complete. Its pages may change when this returns.

        Raises:
            KeyError: the model has no such layer.
        """
        layer = self._layers[number]
        self._packed.add(number)
        leases = self._leases[layer.group :: self._chunks.groups]
        if leases:
            form = self._chunks.formats[layer.group]
            offset, size = record.layer_range(form, layer.place)
            pieces = [lease.array[offset : offset + size] for lease in leases]
            rows = self._pages[layer.group].rows(form, self._plan.start, len(leases))
            clear_gaps(rows, pieces)
            pack(layer.pages, pieces, **rows)

    def _finish(self) -> int:
        """Seal the records and start putting them, if no layer is missing; how many chunks."""
        chunks, leases, first = self._chunks, self._leases, self._plan.start
        self._leases = []
        stored = 0
        try:
            if len(self._packed) == len(self._layers) and leases:
                for i, lease in enumerate(leases):
                    form = chunks.formats[i % chunks.groups]
                    record.seal(form, lease.buffer, *chunks.identity(first + i // chunks.groups))
                    lease.used = form.record_bytes
                stored = len(self._puts.put(self._plan.segments, chunks, first, leases))
        finally:
            release_all(leases)
        return stored

    def __enter__(self) -> LayerStore:
        staging, groups = self._tiers.staging, self._chunks.groups
        self._packed.clear()
        self._plan = self._puts.plan(self._chunks, self._targets)
        wanted = (self._plan.stop - self._plan.start) * groups
        if wanted:
            try:
                most = min(wanted, staging.slots // groups * groups)
                self._leases = staging.acquire(most, self._tiers.timeout_s, at_least=groups)
                keep_whole(self._leases, groups)
            except StagingTimeout as error:
                log.warning("nothing is stored: %s", error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._packed.clear()  # what an engine left half computed is not stored
        size = self._chunks.chunk_tokens
        self.stored = Stored(len(self._chunks) * size, self._finish() * size)


def layers_of(pages: Sequence[SequencePages]) -> list[_Layer]:
    """Every layer of the model, in its order, with the pages of that layer alone."""
    layers = [
        _Layer(number, group, place, entry.pages.layer(place))
        for group, entry in enumerate(pages)
        for place, number in enumerate(entry.pages.group.layers)
    ]
    return sorted(layers, key=lambda layer: layer.number)
