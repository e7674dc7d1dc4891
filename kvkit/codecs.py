"""Compressed records: every layer compressed on its own, so that any Zarr reader opens them.

A record describes itself, so neither direction needs to know its layout. Off by default: `docs/records.md`
has what each codec saves and costs on real KV.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvkit.layout import ITEM_BYTES
from kvkit.record import (
    CODEC_LEVEL,
    CODECS,
    Damage,
    Header,
    RecordError,
    check,
    read_header,
    read_index,
    relabel,
    trailer_of,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


def compress(record: Buffer, codec: str, out: Buffer) -> int:
    """Write the sealed, uncompressed `record` into `out`, its layers compressed; returns the bytes written.

    Mutates `out`.

    Raises:
        RecordError: unknown codec, no record, or the result does not fit `out` (data that does not compress).
        ImportError: numcodecs is not installed.
    """
    view, target = memoryview(record), memoryview(out)
    compressor = _compressor(codec)
    header = read_header(view)
    too_small = RecordError(f"codec={codec!r}: the record does not fit {len(target)} bytes")
    if len(target) < header.header_bytes:
        raise too_small
    target[: header.header_bytes] = view[: header.header_bytes]
    width = _item_bytes(header)
    end = header.header_bytes
    places: list[tuple[int, int]] = []
    sums: list[int] = []
    for offset, size in read_index(view, header.shape[0]):
        packed = compressor.encode(np.frombuffer(view[offset : offset + size], f"<u{width}"))
        if end + len(packed) > len(target):
            raise too_small
        target[end : end + len(packed)] = packed
        places.append((end, len(packed)))
        sums.append(xxh3_64_intdigest(packed))
        end += len(packed)
    trailer = trailer_of(places, end)
    total = end + len(trailer)
    if total > len(target):
        raise too_small
    target[end:total] = trailer
    relabel(target, codec, total, end, sums, xxh3_64_intdigest(trailer))
    return total


def decompress(record: Buffer, out: Buffer) -> Damage | int:
    """Restore into `out` the record that `compress` made `record` of; its bytes, or what is damaged.

    Mutates `out`. An uncompressed record is copied. The result still has to pass `kvkit.record.verify`.

    Raises:
        ImportError: numcodecs is not installed.
    """
    view, target = memoryview(record), memoryview(out)
    try:
        header = read_header(view)
        damage = check(view)
    except RecordError:
        return Damage.HEADER
    if damage is not None:
        return damage
    layers = header.shape[0]
    size = math.prod(header.shape[1:]) * _item_bytes(header)
    places = [(header.header_bytes + i * size, size) for i in range(layers)]
    end = header.header_bytes + layers * size
    trailer = trailer_of(places, end)
    total = end + len(trailer)
    if total > len(target):
        return Damage.OVERSIZE
    if header.codec == "none":
        target[: len(view)] = view
        return len(view)
    compressor = _compressor(header.codec)
    target[: header.header_bytes] = view[: header.header_bytes]
    sums: list[int] = []
    for (start, _), (offset, packed_size) in zip(places, read_index(view, layers), strict=True):
        try:
            unpacked = memoryview(compressor.decode(view[offset : offset + packed_size])).cast("B")
        except (RuntimeError, ValueError, MemoryError):  # intact, but no output of this codec
            return Damage.FORMAT
        if len(unpacked) != size:
            return Damage.FORMAT
        target[start : start + size] = unpacked
        sums.append(xxh3_64_intdigest(unpacked))
    target[end:total] = trailer
    relabel(target, "none", total, end, sums, xxh3_64_intdigest(trailer))
    return total


def restored_bytes(record: Buffer) -> int:
    """Bytes of what `decompress` makes of an intact record.

    Raises:
        RecordError: it is no record.
    """
    header = read_header(record)
    layers_end = header.header_bytes + math.prod(header.shape) * _item_bytes(header)
    return layers_end + len(trailer_of([(0, 0)] * header.shape[0], layers_end))


def _item_bytes(header: Header) -> int:
    """Bytes of an element; opaque pages, which have no K size, are bytes."""
    return ITEM_BYTES.get(header.dtype, 1) if header.k_size else 1


@functools.cache
def _compressor(codec: str) -> Any:
    import numcodecs

    if codec == "zstd":
        return numcodecs.Zstd(level=CODEC_LEVEL)
    if codec == "bitshuffle-zstd":
        return numcodecs.Blosc(cname="zstd", clevel=CODEC_LEVEL, shuffle=numcodecs.Blosc.BITSHUFFLE)
    raise RecordError(f"codec={codec!r}: want one of {', '.join(CODECS[1:])}")
