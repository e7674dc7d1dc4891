"""Compressed records: each layer is compressed on its own, so any Zarr reader can open them.

A record describes itself, so neither function needs its layout. Codecs are off by default:
`docs/reference/records.md` lists the savings and costs of each on real KV.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvkit.format.record import (
    CODEC_LEVEL,
    CODECS,
    Damage,
    RecordError,
    even_ranges,
    examine,
    read_header,
    read_index,
    relabel,
    trailer_of,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


def compress(record: Buffer, codec: str, out: Buffer) -> int:
    """Compress the layers of a sealed, uncompressed record into `out`; return the bytes written.

    Mutates `out`.

    Raises:
        RecordError: the codec is unknown, `record` is no record, or the result does not fit `out` (the data
            does not compress).
        ImportError: numcodecs is not installed.
    """
    view, target = memoryview(record), memoryview(out)
    compressor = _compressor(codec)
    header = read_header(view)
    too_small = RecordError(f"codec={codec!r}: the record does not fit {len(target)} bytes")
    if len(target) < header.header_bytes:
        raise too_small
    target[: header.header_bytes] = view[: header.header_bytes]
    width = header.item_bytes
    end = header.header_bytes
    ranges: list[tuple[int, int]] = []
    sums: list[int] = []
    for offset, size in read_index(view, header.shape[0]):
        packed = compressor.encode(np.frombuffer(view[offset : offset + size], f"<u{width}"))
        if end + len(packed) > len(target):
            raise too_small
        target[end : end + len(packed)] = packed
        ranges.append((end, len(packed)))
        sums.append(xxh3_64_intdigest(packed))
        end += len(packed)
    if end + len(trailer_of(ranges, end)) > len(target):
        raise too_small
    return finish(target, codec, ranges, sums)


def decompress(record: Buffer, out: Buffer) -> Damage | int:
    """Decompress `record` into `out`; return the bytes of the result, or the damage found.

    Mutates `out`. Copies an uncompressed record. The result still has to pass `kvkit.format.record.verify`.

    Raises:
        ImportError: numcodecs is not installed.
    """
    view, target = memoryview(record), memoryview(out)
    try:
        header, packed, damage = examine(lambda offset, size: view[offset : offset + size], len(view))
    except RecordError:
        return Damage.HEADER
    if damage is not None:
        return damage
    total = header.plain_bytes
    if total > len(target):
        return Damage.OVERSIZE
    if header.codec == "none":
        target[:total] = view
        return total
    size = header.layer_bytes
    ranges = even_ranges(header.header_bytes, size, header.shape[0])
    compressor, declared = _compressor(header.codec), _DECLARED[header.codec]
    target[: header.header_bytes] = view[: header.header_bytes]
    sums: list[int] = []
    for (start, _), (offset, packed_size) in zip(ranges, packed, strict=True):
        data, layer = view[offset : offset + packed_size], target[start : start + size]
        if declared(data) != size:  # a shorter layer would leave part of `out` unwritten
            return Damage.FORMAT
        try:
            compressor.decode(data, layer)
        except (RuntimeError, ValueError):  # the checksum fits, but this codec did not write the data
            return Damage.FORMAT
        sums.append(xxh3_64_intdigest(layer))
    return finish(target, "none", ranges, sums)


def finish(target: memoryview, codec: str, ranges: Sequence[tuple[int, int]], sums: Sequence[int]) -> int:
    """Write the trailer after the layers at `ranges`, and update the header; return the record's bytes.

    Mutates `target`.
    """
    end = sum(ranges[-1])
    trailer = trailer_of(ranges, end)
    total = end + len(trailer)
    target[end:total] = trailer
    relabel(target, codec, total, end, sums, xxh3_64_intdigest(trailer))
    return total


def _zstd_bytes(frame: memoryview) -> int | None:
    """Return the content size that a Zstandard frame declares, or None. Frames of `compress` declare one.

    RFC 8878, 3.1.1.1: magic, descriptor, window (not in a single segment), dictionary, content size.
    """
    if len(frame) < 5 or bytes(frame[:4]) != b"\x28\xb5\x2f\xfd":
        return None
    flag, single, dictionary = frame[4] >> 6, bool(frame[4] & 0x20), (0, 1, 2, 4)[frame[4] & 3]
    width = (int(single), 2, 4, 8)[flag]
    start = 5 + (not single) + dictionary
    if not width or len(frame) < start + width:
        return None
    return int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0)


def _blosc_bytes(frame: memoryview) -> int | None:
    """Return the content size that a Blosc frame declares; None if its own declared length is wrong.

    c-blosc does not get the length of the frame, and would read past the end of a truncated one.
    """
    if len(frame) < 16:
        return None
    content_bytes, _, frame_bytes = struct.unpack_from("<III", frame, 4)  # between them: bytes of a block
    return int(content_bytes) if frame_bytes == len(frame) else None


_DECLARED: dict[str, Callable[[memoryview], int | None]] = {
    "zstd": _zstd_bytes,
    "bitshuffle-zstd": _blosc_bytes,
}


@functools.cache
def _compressor(codec: str) -> Any:
    import numcodecs

    if codec == "zstd":
        return numcodecs.Zstd(level=CODEC_LEVEL)
    if codec == "bitshuffle-zstd":
        return numcodecs.Blosc(cname="zstd", clevel=CODEC_LEVEL, shuffle=numcodecs.Blosc.BITSHUFFLE)
    raise RecordError(f"codec={codec!r}: want one of {', '.join(CODECS[1:])}")
