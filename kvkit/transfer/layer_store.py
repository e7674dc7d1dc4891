"""Stores one layer at a time, so that the engine computes while earlier layers move.

with cache.store_layers(tokens, pages) as store:
    ...                                       # run a layer
    store.layer(0)                            # its pages are packed, and may change again
store.stored                                  # how much was stored
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from kvkit.format import record
from kvkit.kernels.pages.api import pack
from kvkit.staging import Lease, StagingTimeout, release_all
from kvkit.transfer.layers import Layer, layers_of
from kvkit.transfer.plan import StorePlan
from kvkit.transfer.sequence import Chunks, SequencePages, clear_gaps
from kvkit.transfer.store import Stored, seal
from kvkit.transfer.write_pipeline import WritePipeline

log = logging.getLogger(__name__)


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
        self._layers: dict[int, list[Layer]] = {}
        for layer in layers_of(pages):
            self._layers.setdefault(layer.number, []).append(layer)
        self.left = list(self._layers)
        record_formats = itertools.cycle(chunks.formats)
        self._sums = [[0] * f.shape[0] for _, f in zip(leases, record_formats, strict=False)]

    def layer(self, number: int) -> None:
        """Pack a layer of the model with complete KV. Its pages may change when this returns.

        Raises:
            KeyError: the model has no such layer.
        """
        layers, groups = self._layers[number], self.chunks.groups
        for layer in layers if self.leases else ():
            leases = self.leases[layer.group :: groups]
            record_format = self.chunks.formats[layer.group]
            offset, size = record.layer_range(record_format, layer.index)
            pieces = [lease.array[offset : offset + size] for lease in leases]
            rows = self._pages[layer.group].rows_of(record_format, self.numbers)
            clear_gaps(rows, pieces)
            pack(layer.pages, pieces, **rows)
            for sums, piece in zip(self._sums[layer.group :: groups], pieces, strict=True):
                sums[layer.index] = record.layer_checksum(piece.data)  # while in the CPU's cache
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
        self, writes: WritePipeline, chunks: Chunks, pages: Sequence[SequencePages], targets: Sequence[str]
    ) -> None:
        self._writes = writes
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
        tiers, groups = self._writes.tiers, self._chunks.groups
        self._plan = plan = self._writes.plan(self._chunks, self._targets)
        limit = min((plan.stop - plan.start) * groups, tiers.staging.slots // groups * groups)
        leases: Sequence[Lease] = ()
        try:
            if limit:
                leases = tiers.staging.acquire(limit, tiers.timeout_s, at_least=groups)
        except StagingTimeout as error:
            log.warning("layer store: nothing is stored: %s", error)
        numbers = range(plan.start, plan.start + len(leases) // groups)
        self._packer = LayerPacker(self._chunks, self._pages, numbers, leases)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Seal the records and start putting them if all layers are packed."""
        packer, stored = self._packer, 0
        try:
            if error_type is None and packer.leases and not packer.left:
                packer.seal()
                segments = self._plan.segments
                stored = len(self._writes.start(segments, self._chunks, packer.numbers, packer.leases))
        finally:
            release_all(packer.leases)
            packer.leases = ()
        size = self._chunks.chunk_tokens
        self.stored = Stored(len(self._chunks) * size, stored * size)
