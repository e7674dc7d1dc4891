"""Quantisation of records that enter a tier, and dequantisation of those that leave it.

`kvkit.format.quantised` describes quantised records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from kvkit.format.codecs import finish
from kvkit.format.layout import LayerGroup, LayoutError, Precision
from kvkit.format.names import quantised_name
from kvkit.format.quantised import Shape, exact_shape, float_rows, quantised_shape
from kvkit.format.record import (
    HEADER,
    Bytes,
    Damage,
    Header,
    RecordError,
    dtype_name,
    even_ranges,
    examine,
    read_header,
    total_bytes,
)
from kvkit.tiers.base import ObjectStore, Ranges

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvkit.kernels.pages.api import Pages

_BLOCK = np.zeros((1, 1), np.int64)
"""Block table of a record's floats, which are pages of one block."""


def quantise(record: Buffer, precision: Precision, out: Buffer) -> int:
    """Quantise the sealed, exact, uncompressed `record` into `out`; return the number of bytes written.

    Mutates `out`. The result is the same on every machine.

    Raises:
        RecordError: `record` is not such a record, or the result does not fit `out`.
        LayoutError: the record cannot be quantised, see `kvkit.format.quantised.check_quantisable`.
    """
    from kvkit.kernels.pages.api import pack  # importing PyTorch takes a second; most stores do not quantise

    view, target = memoryview(record), memoryview(out)
    header = read_header(view)
    group = float_rows(header, precision)
    shape = quantised_shape(header.shape, header.k_size, group.dtype)
    layer_bytes = shape[1] * shape[2] * shape[3]
    if total_bytes(header.header_bytes + shape[0] * layer_bytes, shape[0]) > len(target):
        raise RecordError(f"precision={precision!r}: the record does not fit {len(target)} bytes")
    codes = _layers(target, header, layer_bytes)
    pack(_pages(group, view, header), [codes], blocks=_BLOCK, threads=1)
    return _seal(view, target, header, shape, dtype_name(precision, group.dtype), layer_bytes)


def dequantise(record: Buffer, precision: Precision, out: Buffer) -> Damage | int:
    """Dequantise the uncompressed `record`, made by `quantise`, into `out` with its original dtype.

    Mutates `out`, but only after the checksums of `record` were verified. The values are approximate. The
    result names the same chunk and must still pass `kvkit.format.record.verify`.

    Returns:
        number of bytes written, or the damage; `Damage.FORMAT` for an intact record of another precision.
    """
    from kvkit.kernels.pages.api import unpack

    view, target = memoryview(record), memoryview(out)
    try:
        header, _, damage = examine(lambda offset, size: view[offset : offset + size], len(view))
    except RecordError:
        return Damage.HEADER
    if damage is not None:
        return damage
    try:
        group, shape = float_rows(header, precision), exact_shape(header)
    except LayoutError:
        return Damage.FORMAT
    shape_matches = quantised_shape(shape, header.k_size, group.dtype) == header.shape
    if header.precision != precision or header.codec != "none" or not shape_matches:
        return Damage.FORMAT
    layer_bytes = group.block_bytes
    if total_bytes(header.header_bytes + shape[0] * layer_bytes, shape[0]) > len(target):
        return Damage.OVERSIZE
    codes = _layers(view, header, header.layer_bytes)
    unpack(_pages(group, target, header), [codes], blocks=_BLOCK, threads=1)
    return _seal(view, target, header, shape, group.dtype, layer_bytes)


def exact_bytes(header: Header) -> int:
    """Return the bytes of a quantised record once dequantised. Unbounded, as `Header.plain_bytes` is.

    Raises:
        LayoutError: it is not a quantised record.
    """
    layers = header.shape[0]
    return total_bytes(header.header_bytes + layers * float_rows(header).block_bytes, layers)


def _pages(group: LayerGroup, record: memoryview, header: Header) -> Pages:
    """Return the floats of an exact record as pages of one block."""
    import torch

    from kvkit.kernels.pages.api import Pages

    floats = torch.from_numpy(_layers(record, header, group.block_bytes))
    shape = len(group.layers), 1, group.kv_heads, group.block_tokens, group.channels
    return Pages.of(group, list(floats.view(getattr(torch, group.dtype)).view(shape)))


def _layers(record: memoryview, header: Header, layer_bytes: int) -> Bytes:
    """Return uint8 [layers * layer_bytes], a view of the layers of a record."""
    count = header.shape[0] * layer_bytes
    return np.frombuffer(record, np.uint8, count, header.header_bytes)


def _seal(
    record: memoryview, target: memoryview, header: Header, shape: Shape, dtype: str, layer_bytes: int
) -> int:
    """Write the header of `record`, with a new shape and dtype, and the checksums into `target`.

    Returns:
        number of bytes of the record in `target`.
    """
    target[: header.header_bytes] = record[: header.header_bytes]
    fields = np.frombuffer(target, HEADER, 1)[0]
    fields["channels"], fields["dtype"] = shape[3], dtype.encode("ascii")
    ranges = even_ranges(header.header_bytes, layer_bytes, shape[0])
    checksums = [xxh3_64_intdigest(target[offset : offset + size]) for offset, size in ranges]
    return finish(target, "none", ranges, checksums)


class QuantisedStore:
    """A store that swaps the names of exact and quantised objects in `store`.

    A tier on it never takes an exact object for a quantised one, but still counts and evicts objects stored
    under another setting of `precision`.
    """

    def __init__(self, store: ObjectStore, precision: Precision) -> None:
        self._store = store
        self._name = partial(quantised_name, precision=precision)

    def size(self, name: str) -> int | None:
        return self._store.size(self._name(name))

    def read(self, name: str, buffer: memoryview) -> int:
        return self._store.read(self._name(name), buffer)

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        self._store.read_ranges(self._name(name), ranges, buffers)

    def write(self, name: str, data: memoryview) -> None:
        self._store.write(self._name(name), data)

    def delete(self, name: str) -> None:
        self._store.delete(self._name(name))

    def scan(self) -> Iterator[tuple[str, int]]:
        return ((self._name(name), size) for name, size in self._store.scan())
