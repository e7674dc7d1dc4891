"""Loads and stores one layer at a time, so that an engine's layers compute while others are on their way.

    for layer in cache.load_layers(hit, place):   # layer's KV is in its pages, the next ones are being read
        ...                                       # run that layer
    with cache.store_layers(tokens, place) as store:
        ...                                       # run a layer
        store.layer(0)                            # its pages are packed, and may change again
    store.stored                                  # how much that was

Records are the same as everywhere: a layer is one byte range of each, and is verified alone.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvkit import plan as planning
from kvkit import record
from kvkit.access import Access
from kvkit.kernels import launch
from kvkit.kernels.launch import Pages
from kvkit.policy import Policy
from kvkit.reads import keep_whole
from kvkit.record import Damage
from kvkit.sequence import Chunks, Hit, Loaded, Place, clear_gaps
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.stores import Stored
from kvkit.threads import Workers
from kvkit.tiers.base import DamagedObject, copy_ranges

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


class LayerLoad:
    """An iterator over the layers of a hit, in model order; each is in its pages when it is returned.

    A record that fails ends the leading run before it for all layers that follow: `loaded` says, once the
    iterator is used up, how many tokens are complete. Nothing is written back (prefetch does that). Close it,
    or use it up, to give the slots back.
    """

    def __init__(self, access: Access, readers: Workers, hit: Hit, places: Sequence[Place]) -> None:
        self._access = access
        self._readers = readers
        self._chunks = hit.chunks
        self._places = places
        self._plan = hit.plan
        self._tiers = [s.tier for s in hit.plan.segments for _ in range(s.start, s.stop)]
        self._count = hit.plan.chunks
        self._headers: dict[tuple[int, int], bytearray] = {}
        self._lent: dict[tuple[int, int], Lease] = {}  # records that lie in slots already, by chunk and group
        self._layers = layers_of(places)
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
        self._borrow()
        under_way: deque[tuple[_Layer, list[Lease], list[Piece], list[Future[None]]]] = deque()
        waiting = deque(self._layers)
        try:
            while waiting or under_way:
                while waiting and len(under_way) <= LAYERS_AHEAD:
                    started = self._start(waiting[0], wait_s=0.0 if under_way else self._access.timeout_s)
                    if started is None:
                        break
                    under_way.append((waiting.popleft(), *started))
                if not under_way:
                    self._count = 0  # not a single layer found room
                    return
                layer, leases, pieces, reads = under_way[0]
                try:
                    self._finish(layer, pieces, reads)
                finally:
                    under_way.popleft()
                    release_all(leases)
                yield layer.number
        finally:
            for _, leases, _, _ in under_way:
                release_all(leases)
            release_all(self._lent.values())
            self._lent.clear()

    def _borrow(self) -> None:
        """Hold on to the records that lie in memory, which might be let go while earlier layers are used."""
        groups = self._chunks.groups
        for chunk, tier in enumerate(self._tiers):
            for group in range(groups):
                lease = self._access.tiers[tier].borrow(self._chunks.names[chunk * groups + group])
                if lease is not None:
                    self._lent[chunk, group] = lease

    def _start(
        self, layer: _Layer, wait_s: float
    ) -> tuple[list[Lease], list[Piece], list[Future[None]]] | None:
        """Begin to read one layer of every chunk; None if there is no room. What has room decides the run."""
        form = self._chunks.formats[layer.group]
        offset, size = record.layer_range(form, layer.place)
        per_slot = self._access.staging.slot_bytes // size
        far = [c for c in range(self._count) if (c, layer.group) not in self._lent]
        slots = min(-(-len(far) // per_slot), self._access.staging.slots)
        if len(far) > slots * per_slot:
            self._count = far[slots * per_slot]
            far = far[: slots * per_slot]
        leases: list[Lease] = []
        if slots:
            try:
                leases = self._access.staging.acquire(slots, wait_s, at_least=slots)
            except StagingTimeout as error:
                if wait_s:
                    log.warning("load ended early: %s", error)
                return None
        room = {chunk: divmod(i, per_slot) for i, chunk in enumerate(far)}
        pieces, reads = [], []
        for chunk in range(self._count):
            if chunk in room:
                slot, place = room[chunk]
                lease = leases[slot]
                piece = lease.array[place * size : (place + 1) * size]
            else:
                lease = self._lent[chunk, layer.group]
                piece = lease.array[offset : offset + size]
            pieces.append(piece)
            reads.append(self._readers.submit(partial(self._read_held, lease.share(), layer, chunk, piece)))
        return leases, pieces, reads

    def _read_held(self, lease: Lease, layer: _Layer, chunk: int, piece: Piece) -> None:
        """`_read`, with a share of the slot: one that comes too late must not write into another's."""
        with lease:
            self._read(layer, chunk, piece)

    def _read(self, layer: _Layer, chunk: int, piece: Piece) -> None:
        """Fill `piece` with a layer of a chunk, and, the first time, check whose record it is.

        Raises:
            OSError: it is not to be had.
        """
        form = self._chunks.formats[layer.group]
        name = self._chunks.names[chunk * self._chunks.groups + layer.group]
        tier = self._access.tiers[self._tiers[chunk]]
        header = self._headers.get((chunk, layer.group))
        ranges = [record.layer_range(form, layer.place)]
        data = memoryview(piece.data)
        buffers = [data]
        if header is None:
            header = bytearray(form.header_bytes)
            ranges.insert(0, (0, form.header_bytes))
            buffers.insert(0, memoryview(header))
        lent = self._lent.get((chunk, layer.group))
        if lent is None:
            tier.get_ranges(name, ranges, buffers)
        elif len(ranges) > 1:
            copy_ranges(name, lent.buffer[: lent.used], ranges[:1], buffers[:1])
        damage: Damage | None = None
        if (chunk, layer.group) not in self._headers:
            damage = record.verify_header(form, header, *self._chunks.identity(chunk))
        if damage is None:
            damage = record.verify_layer(form, header, layer.place, data)
        if damage is not None:
            raise DamagedObject(f"{name}: {damage}", damage)
        self._headers[chunk, layer.group] = header

    def _finish(self, layer: _Layer, pieces: Sequence[Piece], reads: Sequence[Future[None]]) -> None:
        """Unpack the leading run of a layer; the first chunk that failed ends it for good."""
        for chunk, read in enumerate(reads[: self._count]):
            try:
                read.result(self._access.timeout_s)
            except Exception as error:
                self._count = chunk
                name = self._chunks.names[chunk * self._chunks.groups + layer.group]
                log.warning("layer %d of %s: %s", layer.number, name, error or type(error).__name__)
                self._access.ended(self._tiers[chunk], name, error)
                break
        if self._count:
            form = self._chunks.formats[layer.group]
            rows = self._places[layer.group].rows(form, 0, self._count)
            launch.unpack(layer.pages, pieces[: self._count], **rows)


class LayerStore:
    """A store that takes the layers of an engine one after another. A context manager: leaving it finishes.

    Chunks that find no slots are left out, from the end.

    Attributes:
        stored: what was stored, once the context is left.
    """

    def __init__(
        self, access: Access, chunks: Chunks, places: Sequence[Place], targets: Sequence[str]
    ) -> None:
        self._access = access
        self._chunks = chunks
        self._places = places
        self._layers = layers_of(places)
        groups = chunks.groups
        resident = {t: access.ask(t, chunks.names) // groups for t in targets if access.usable(t)}
        self._plan = planning.plan_store(len(chunks), Policy((), tuple(resident)), resident)
        self._first = self._plan.start
        self.stored = Stored(0, 0)
        self._packed: set[int] = set()
        self._leases: list[Lease] = []
        wanted = (self._plan.stop - self._first) * groups
        if wanted:
            try:
                most = min(wanted, access.staging.slots // groups * groups)
                self._leases = access.staging.acquire(most, access.timeout_s, at_least=groups)
                keep_whole(self._leases, groups)
            except StagingTimeout as error:
                log.warning("nothing is stored: %s", error)

    def layer(self, number: int) -> None:
        """Pack a layer of the model, whose KV is complete. Its pages may change when this returns.

        Raises:
            KeyError: the model has no such layer.
        """
        layer = {entry.number: entry for entry in self._layers}[number]
        self._packed.add(number)
        leases = self._leases[layer.group :: self._chunks.groups]
        if leases:
            form = self._chunks.formats[layer.group]
            offset, size = record.layer_range(form, layer.place)
            pieces = [lease.array[offset : offset + size] for lease in leases]
            rows = self._places[layer.group].rows(form, self._first, len(leases))
            clear_gaps(rows, pieces)
            launch.pack(layer.pages, pieces, **rows)

    def _finish(self) -> int:
        """Seal the records and start putting them, if no layer is missing; how many chunks."""
        chunks, leases = self._chunks, self._leases
        self._leases = []
        stored = 0
        try:
            if len(self._packed) == len(self._layers) and leases:
                for i, lease in enumerate(leases):
                    form = chunks.formats[i % chunks.groups]
                    record.seal(form, lease.buffer, *chunks.identity(self._first + i // chunks.groups))
                    lease.used = form.record_bytes
                for segment in self._plan.segments:
                    self._access.describe(segment.tier, chunks.formats)
                self._access.put(self._plan.segments, chunks, self._first, leases)
                stored = len(leases) // chunks.groups
        finally:
            release_all(leases)
        return stored

    def __enter__(self) -> LayerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._packed.clear()  # what an engine left half computed is not stored
        size = self._chunks.chunk_tokens
        self.stored = Stored(len(self._chunks) * size, self._finish() * size)


def layers_of(places: Sequence[Place]) -> list[_Layer]:
    """Every layer of the model, in its order, with the pages of that layer alone."""
    layers = [
        _Layer(number, group, place, entry.pages.layer(place))
        for group, entry in enumerate(places)
        for place, number in enumerate(entry.pages.group.layers)
    ]
    return sorted(layers, key=lambda layer: layer.number)
