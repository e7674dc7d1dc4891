"""A chunk as bytes: one self-verifying record that is also one shard of a valid Zarr v3 array.

The records of one namespace and layer group form one sparse Zarr array of shape
(2**16, 2**46, layers of the model, heads of the model, T, C). The first 62 bits of a chunk's key are its
first two coordinates. A record is the shard of some layers and heads of one chunk, [L, H, T, C], with one
inner chunk per layer:

    [header, a multiple of 4096 bytes][layer 0]...[layer L-1][zeros][shard index][crc32c of the index]

The shard index locates the layers, so Zarr readers skip the header. The zeros pad the record to a multiple of
4096 bytes, so it can be read and written with O_DIRECT. `HEADER` below lists the header's fields. All
integers are little-endian.

A record verifies itself: the header names namespace, parent key, key and token ids, and XXH3-64 checksums
cover every byte. The header has one (over bytes 184 on, seeded with the checksum of bytes 0 to 175), each
layer has one (so a layer can be read and verified alone), and so has the trailer, everything after the
layers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

import google_crc32c
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from kvkit.format.keys import namespace_digest
from kvkit.format.layout import (
    FORMAT_VERSION,
    ITEM_BYTES,
    QUANTISABLE,
    KVLayout,
    LayerGroup,
    LayoutError,
    Namespace,
    Precision,
)
from kvkit.format.names import array_name, record_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"KVKITREC"
ALIGN = 4096
CODECS = ("none", "zstd", "bitshuffle-zstd")
CODEC_LEVEL = 1

MAX_HEADER_BYTES = 16 << 20
"""Maximum bytes of a header that is read: room for 4 million tokens."""

PIECE_BYTES = 8 << 20
"""Maximum bytes that `examine` reads at once, except for a header."""

Read = Callable[[int, int], "Buffer"]
"""Reads (offset, number of bytes) of a stored record; returns fewer bytes if the record ends before."""

Bytes = npt.NDArray[np.uint8]

HEADER = np.dtype(
    [
        ("magic", "V8"),  #          0 b"KVKITREC"
        ("version", "<u2"),  #       8 version of the format
        ("codec", "u1"),  #         10 index into CODECS
        ("key_bytes", "u1"),  #     11 bytes of a key: 16 or 32
        ("header_bytes", "<u4"),  # 12 bytes of the header with its padding
        ("group", "<u4"),  #        16 index of the layer group
        ("layers", "<u4"),  #       20 canonical shape L, H, T, C
        ("heads", "<u4"),  #        24 (opaque pages: L, 1, pages, page bytes)
        ("rows", "<u4"),  #         28
        ("channels", "<u4"),  #     32
        ("k_size", "<u4"),  #       36 K's part of C (opaque pages: 0; quantised: K's codes)
        ("chunk_tokens", "<u4"),  # 40 tokens of the chunk
        ("head_shard", "<u2"),  #   44 on the head axis: number of the shard of the model's heads
        ("layer_shard", "<u2"),  #  46 on the layer axis: number of the shard of the model's layers
        ("dtype", "S16"),  #        48 ASCII; quantised: such as "fp8 of bfloat16"
        ("namespace", "V32"),  #    64 digest, zero-padded
        ("record_bytes", "<u8"),  # 96 bytes of the record
        ("layers_end", "<u8"),  #  104 offset at which the last layer ends
        ("parent", "V32"),  #      112 parent key, zero-padded
        ("key", "V32"),  #         144 zero-padded
        ("header_sum", "<u8"),  #  176 checksum of the header
        ("trailer_sum", "<u8"),  # 184 checksum of the trailer
    ]
)
"""The fixed fields at the start of a header.

A checksum per layer (8 bytes each), the token ids (4 bytes each) and zeros follow. The fields before `parent`
are equal in all uncompressed records of a format."""


_OFFSETS = {name: field[1] for name, field in (HEADER.fields or {}).items()}
_HEAD_SHARD, _NAMESPACE, _PARENT = (_OFFSETS[name] for name in ("head_shard", "namespace", "parent"))
_HEADER_SUM = _OFFSETS["header_sum"]
_AFTER_HEADER_SUM = _OFFSETS["trailer_sum"]
_SUMS = HEADER.itemsize
_KEYS = struct.Struct("<32s32s")
"""Packs `parent` and `key`, as for every record: struct takes a third of the time of numpy."""
_INDEX_ENTRY = 16
_CRC_BYTES = 4


class RecordError(ValueError):
    """A buffer is too small or holds no record. The message names the fault."""


class Damage(StrEnum):
    """The reason why a record is a miss."""

    TRUNCATED = "truncated"
    OVERSIZE = "oversize"
    HEADER = "header"
    NAMESPACE = "namespace"
    FORMAT = "format"
    KEY = "key"
    PARENT = "parent"
    TOKENS = "tokens"
    LAYER = "layer"
    TRAILER = "trailer"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header, for listings of a store; loads compare bytes instead (`verify`)."""

    version: int
    codec: str
    group: int
    shape: tuple[int, int, int, int]
    head_shard: int
    layer_shard: int
    k_size: int
    chunk_tokens: int
    dtype: str
    namespace: bytes
    parent: bytes
    key: bytes
    header_bytes: int
    record_bytes: int
    layers_end: int
    trailer_sum: int
    layer_sums: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int32]

    @property
    def precision(self) -> str | None:
        """Precision of a quantised record; None: the record is exact."""
        return self.dtype.rpartition(" of ")[0] or None

    @property
    def kv_dtype(self) -> str:
        """Dtype of the KV from which the record was made."""
        return self.dtype.rpartition(" of ")[2]

    @property
    def item_bytes(self) -> int:
        """Bytes of an element: 1 for opaque pages and quantised records."""
        return ITEM_BYTES.get(self.dtype, 1) if self.k_size else 1

    @property
    def layer_bytes(self) -> int:
        """Bytes of an uncompressed layer."""
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def plain_bytes(self) -> int:
        """Bytes of the uncompressed record; a forged header may claim any number."""
        layers = self.shape[0]
        return total_bytes(self.header_bytes + layers * self.layer_bytes, layers)


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Sizes and offsets in uncompressed records of one layer group and namespace. Made by `of`."""

    namespace: Namespace
    digest: bytes  # digest of the namespace
    group: LayerGroup
    index: int  # index of the array in `KVLayout.arrays`
    array: str  # name of the Zarr array, "<namespace digest, hex>/<group index>"
    shape: tuple[int, int, int, int]  # canonical [L, H, T, C]
    header_bytes: int
    layer_bytes: int
    layers_end: int  # offset at which the last layer ends
    record_bytes: int
    fixed: bytes  # start of every header, up to `parent`
    trailer: bytes  # everything after the layers

    @staticmethod
    def of(layout: KVLayout, index: int, namespace: Namespace) -> RecordFormat:
        """Return the format of group `index` of `layout` in `namespace`.

        Raises:
            LayoutError: the namespace has another layout, or its chunks do not fit the group's blocks.
        """
        if namespace.layout != layout.fingerprint():
            raise LayoutError(
                f"namespace.layout={namespace.layout!r}: this layout is {layout.fingerprint()!r}"
            )
        group, tokens = layout.groups[index], namespace.chunk_tokens
        index = layout.arrays.index(group.first_shard)
        shape = group.record_shape(tokens)
        digest = namespace_digest(namespace)
        header_bytes = _header_bytes(shape[0], tokens)
        layer_bytes = group.layer_bytes(tokens)
        layers_end = header_bytes + shape[0] * layer_bytes
        trailer = trailer_of(even_ranges(header_bytes, layer_bytes, shape[0]), layers_end)
        record_bytes = layers_end + len(trailer)
        k_size, dtype = 0 if group.opaque else group.k_size, dtype_name(group.precision, group.dtype)
        fields = (  # as in HEADER
            *(MAGIC, FORMAT_VERSION, CODECS.index("none"), len(digest), header_bytes, index),
            *(*shape, k_size, tokens, group.head_shard, group.layer_shard, dtype, digest),
            *(record_bytes, layers_end),
            *(b"", b"", 0, 0),  # `seal` writes these
        )
        return RecordFormat(
            namespace=namespace,
            digest=digest,
            group=group,
            index=index,
            array=array_name(digest, index),
            shape=shape,
            header_bytes=header_bytes,
            layer_bytes=layer_bytes,
            layers_end=layers_end,
            record_bytes=record_bytes,
            fixed=np.array(fields, HEADER).tobytes()[:_PARENT],
            trailer=trailer,
        )

    def name(self, key: bytes) -> str:
        """Return the name of `key`'s record, relative to the store's root."""
        return record_name(self.array, key, self.group.head_shard, self.group.layer_shard)


def parent_name(record: Buffer, name: str) -> str | None:
    """Return the name of the record before `name` in its chain, from the header; None if `name` is first.

    Also return None if `record` is no record. It verifies nothing: use it only to rank records for eviction.
    """
    view = memoryview(record)
    parent = bytes(view[_PARENT : _PARENT + 32])
    if not _has_header(view) or parent == bytes(view[_NAMESPACE : _NAMESPACE + 32]):
        return None
    return record_name(name.rpartition("/")[0], parent, *struct.unpack_from("<HH", view, _HEAD_SHARD))


def is_compressed(record: Buffer) -> bool:
    """Return whether a record is compressed, from its first `HEADER.itemsize` bytes; checks nothing else."""
    view = memoryview(record)
    return _has_header(view) and view[_OFFSETS["codec"]] != CODECS.index("none")


def payload(record_format: RecordFormat, record: Bytes) -> Bytes:
    """Return the layers of an uncompressed record, uint8 [L * layer_bytes], as a view."""
    return record[record_format.header_bytes : record_format.layers_end]


def layer_range(record_format: RecordFormat, layer: int) -> tuple[int, int]:
    """Return offset and bytes of one layer, by its index in the group, in an uncompressed record.

    Raises:
        RecordError: the group has no such layer.
    """
    if not 0 <= layer < record_format.shape[0]:
        raise RecordError(f"layer={layer}: this group has {record_format.shape[0]} layers")
    return record_format.header_bytes + layer * record_format.layer_bytes, record_format.layer_bytes


def seal(
    record_format: RecordFormat,
    record: Buffer,
    parent: bytes,
    key: bytes,
    tokens: npt.NDArray[np.int32],
    sums: Sequence[int] | None = None,
) -> None:
    """Write header and trailer around the layers that `record` already holds. Mutates `record`.

    Args:
        record: uint8 [>= record_bytes], writable; bytes after `record_bytes` stay unchanged.
        tokens: int32 [chunk_tokens].
        sums: `layer_checksum` of every layer, if known already.

    Raises:
        RecordError: the buffer is too small, or a key or `tokens` has the wrong length.
    """
    view = memoryview(record)
    if len(view) < record_format.record_bytes:
        raise RecordError(f"record: {len(view)} bytes, want {record_format.record_bytes}")
    for name, digest in (("parent", parent), ("key", key)):
        if len(digest) != len(record_format.digest):
            raise RecordError(f"{name}: {len(digest)} bytes, want {len(record_format.digest)}")
    if len(tokens) != record_format.namespace.chunk_tokens:
        raise RecordError(f"tokens: {len(tokens)}, want {record_format.namespace.chunk_tokens}")
    view[record_format.layers_end : record_format.record_bytes] = record_format.trailer
    checksums = (xxh3_64_intdigest(record_format.trailer), *(sums or layer_checksums(record_format, view)))
    tail = struct.pack(f"<{1 + record_format.shape[0]}Q", *checksums) + _as_bytes(tokens)
    view[:_PARENT] = record_format.fixed
    _KEYS.pack_into(view, _PARENT, parent, key)
    view[_AFTER_HEADER_SUM : record_format.header_bytes] = tail.ljust(
        record_format.header_bytes - _AFTER_HEADER_SUM, b"\0"
    )
    struct.pack_into("<Q", view, _HEADER_SUM, _header_sum(view, record_format.header_bytes))


def write_framing(record_format: RecordFormat, record: Buffer, header: Buffer) -> None:
    """Write header and trailer around verified layers that `record` already holds. Mutates `record`.

    Args:
        record: uint8 [>= record_bytes], writable.
        header: uint8 [header_bytes], the verified header against which the layers were verified.
    """
    view = memoryview(record)
    view[: record_format.header_bytes] = memoryview(header)[: record_format.header_bytes]
    view[record_format.layers_end : record_format.record_bytes] = record_format.trailer


def verify(
    record_format: RecordFormat, record: Buffer, parent: bytes, key: bytes, tokens: npt.NDArray[np.int32]
) -> Damage | None:
    """Verify that `record`, uint8 [stored bytes], is this chunk's intact uncompressed record.

    Returns None, or the first damage found. Reads only.
    """
    view = memoryview(record)
    damage = verify_header(record_format, view, parent, key, tokens)
    if damage is None and len(view) != record_format.record_bytes:
        damage = Damage.TRUNCATED
    damage = damage or verify_trailer(record_format, view[record_format.layers_end :])
    if damage is not None:
        return damage
    stored = view[_SUMS : _SUMS + 8 * record_format.shape[0]].cast("Q").tolist()
    return None if stored == layer_checksums(record_format, view) else Damage.LAYER


def verify_header(
    record_format: RecordFormat, header: Buffer, parent: bytes, key: bytes, tokens: npt.NDArray[np.int32]
) -> Damage | None:
    """Verify the first `header_bytes` of an uncompressed record, as `verify` does; ignore later bytes."""
    view = memoryview(header)
    if len(view) < record_format.header_bytes:
        return Damage.TRUNCATED
    if not _header_is_intact(view, record_format.header_bytes):
        return Damage.HEADER
    if bytes(view[:_PARENT]) != record_format.fixed:
        return _explain(record_format, view)
    stored_parent, stored_key = _KEYS.unpack_from(view, _PARENT)
    if stored_key != key.ljust(32, b"\0"):
        return Damage.KEY
    if stored_parent != parent.ljust(32, b"\0"):
        return Damage.PARENT
    start = _SUMS + 8 * record_format.shape[0]
    if bytes(view[start : start + 4 * record_format.namespace.chunk_tokens]) != _as_bytes(tokens):
        return Damage.TOKENS
    return None


def verify_layer(record_format: RecordFormat, header: Buffer, layer: int, data: Buffer) -> Damage | None:
    """Verify that `data`, uint8 [layer_bytes], is `layer` of the record with this verified header.

    Returns None, or the damage found.

    Raises:
        RecordError: the group has no such layer.
    """
    _, size = layer_range(record_format, layer)
    if memoryview(data).nbytes != size:
        return Damage.TRUNCATED
    (stored,) = struct.unpack_from("<Q", memoryview(header), _SUMS + 8 * layer)
    return None if xxh3_64_intdigest(data) == stored else Damage.LAYER


def verify_trailer(record_format: RecordFormat, trailer: Buffer) -> Damage | None:
    """Verify the trailer of an uncompressed record of this format; return None, or the damage."""
    # memoryviews compare item by item, 20 times slower
    return None if bytes(memoryview(trailer)) == record_format.trailer else Damage.TRAILER


def layer_checksum(layer: Buffer) -> int:
    """Return the XXH3-64 of a layer's bytes."""
    return xxh3_64_intdigest(layer)


def layer_checksums(record_format: RecordFormat, record: Buffer) -> list[int]:
    """Return the XXH3-64 of every layer of an uncompressed record."""
    view, size = memoryview(record), record_format.layer_bytes
    starts = range(record_format.header_bytes, record_format.layers_end, size)
    return [layer_checksum(view[start : start + size]) for start in starts]


def read_header(record: Buffer) -> Header:
    """Parse and verify the header at the start of `record`; read nothing after it.

    Raises:
        RecordError: there is no header, or it is of another version, truncated or damaged.
    """
    view = memoryview(record)
    if not _has_header(view):
        raise RecordError("not a kvkit record")
    fields = _fields(view)
    codec, dtype, key_bytes = (fields[name] for name in ("codec", "dtype", "key_bytes"))
    header_bytes, layers, tokens = (fields[name] for name in ("header_bytes", "layers", "chunk_tokens"))
    if fields["version"] != FORMAT_VERSION:
        raise RecordError(f"record format version {fields['version']}: this kvkit reads {FORMAT_VERSION}")
    if len(view) < header_bytes or header_bytes < _SUMS + 8 * layers + 4 * tokens:
        raise RecordError("header cut short")
    if not _header_is_intact(view, header_bytes):
        raise RecordError("header checksum differs")
    is_known = codec < len(CODECS) and (not fields["k_size"] or dtype in _DTYPES)
    if not is_known or header_bytes != _header_bytes(layers, tokens):
        raise RecordError("header contradicts itself")
    header = Header(
        **{name: fields[name] for name in ("version", "group", "k_size", "chunk_tokens", "trailer_sum")},
        **{name: fields[name] for name in ("header_bytes", "record_bytes", "layers_end")},
        **{name: fields[name] for name in ("head_shard", "layer_shard")},
        **{name: fields[name][:key_bytes] for name in ("namespace", "parent", "key")},
        codec=CODECS[codec],
        shape=(layers, fields["heads"], fields["rows"], fields["channels"]),
        dtype=dtype.decode("ascii", "replace"),
        layer_sums=np.frombuffer(view, "<u8", layers, _SUMS).copy(),
        tokens=np.frombuffer(view, "<i4", tokens, _SUMS + 8 * layers).copy(),
    )
    plain_end = header_bytes + layers * header.layer_bytes
    if (
        header.layers_end < header_bytes
        or header.record_bytes != total_bytes(header.layers_end, layers)
        or (header.codec == "none" and header.layers_end != plain_end)
    ):
        raise RecordError("header contradicts itself")
    return header


def examine(read: Read, size: int) -> tuple[Header, list[tuple[int, int]], Damage | None]:
    """Verify a stored record of `size` bytes and any codec against its own checksums.

    It needs no tokens or keys. It reads in pieces, so a forged header cannot exhaust memory.

    Returns:
        header; offset and bytes of every layer, empty if the record is damaged; and the damage or None.

    Raises:
        RecordError: the header is not readable (see `read_header`).
    """
    head = memoryview(read(0, min(size, HEADER.itemsize)))
    if _has_header(head):
        header_bytes = _fields(head)["header_bytes"]
        if header_bytes <= MAX_HEADER_BYTES:
            head = memoryview(read(0, min(size, header_bytes)))
    header = read_header(head)
    if size != header.record_bytes:
        return header, [], Damage.TRUNCATED
    trailer = memoryview(read(header.layers_end, size - header.layers_end))
    if len(trailer) < size - header.layers_end or xxh3_64_intdigest(trailer) != header.trailer_sum:
        return header, [], Damage.TRAILER
    ranges = read_index(trailer, header.shape[0])
    if not _are_neighbours(ranges, header.header_bytes, header.layers_end):
        return header, [], Damage.TRAILER
    for stored, (offset, count) in zip(header.layer_sums, ranges, strict=True):
        digest = xxh3_64()
        for start in range(offset, offset + count, PIECE_BYTES):
            digest.update(read(start, min(PIECE_BYTES, offset + count - start)))
        if digest.intdigest() != stored:
            return header, [], Damage.LAYER
    return header, ranges, None


def relabel(
    record: memoryview,
    codec: str,
    record_bytes: int,
    layers_end: int,
    layer_sums: Sequence[int],
    trailer_sum: int,
) -> None:
    """Rewrite codec, sizes and checksums in the header of a readable record. Mutates `record`."""
    header = np.frombuffer(record, HEADER, 1)[0]
    header["codec"] = CODECS.index(codec)
    header["record_bytes"], header["layers_end"] = record_bytes, layers_end
    header["trailer_sum"] = trailer_sum
    struct.pack_into(f"<{len(layer_sums)}Q", record, _SUMS, *layer_sums)
    header["header_sum"] = _header_sum(record, int(header["header_bytes"]))


def read_index(record: Buffer, layers: int) -> list[tuple[int, int]]:
    """Return offset and bytes of every layer, from the shard index that ends a record or its trailer."""
    view = memoryview(record)
    start = len(view) - _INDEX_ENTRY * layers - _CRC_BYTES
    entries = np.frombuffer(view, "<u8", 2 * layers, start).reshape(layers, 2)
    return [(int(offset), int(size)) for offset, size in entries]


def even_ranges(start: int, layer_bytes: int, layers: int) -> list[tuple[int, int]]:
    """Return offset and bytes of every uncompressed layer, with the first at `start`."""
    return [(start + i * layer_bytes, layer_bytes) for i in range(layers)]


def trailer_of(ranges: Sequence[tuple[int, int]], layers_end: int) -> bytes:
    """Return the trailer after layers at `ranges`: zeros that align its end, then the shard index."""
    index = shard_index(ranges)
    return bytes(-(layers_end + len(index)) % ALIGN) + index


def shard_index(ranges: Sequence[tuple[int, int]]) -> bytes:
    """Return a Zarr shard index: (offset, bytes) of each inner chunk as uint64, then their crc32c."""
    index = np.asarray(ranges, "<u8").tobytes()
    return index + struct.pack("<I", google_crc32c.value(index))


def dtype_name(precision: str | None, dtype: str) -> str:
    """Return the name of a record's element type, as headers hold it."""
    return f"{precision} of {dtype}" if precision else dtype


_DTYPES = {
    dtype_name(precision, dtype).encode("ascii")
    for precision, dtype in (*product([None], ITEM_BYTES), *product(get_args(Precision), QUANTISABLE))
}
"""All names of element types that a header may have."""


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _header_bytes(layers: int, tokens: int) -> int:
    return _round_up(_SUMS + 8 * layers + 4 * tokens, ALIGN)


def total_bytes(layers_end: int, layers: int) -> int:
    """Return the bytes of a record, trailer included, from the end of its last layer."""
    return _round_up(layers_end + _INDEX_ENTRY * layers + _CRC_BYTES, ALIGN)


def _are_neighbours(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether layers fill `start` to `stop` side by side, so that each byte is read once."""
    ends = [start, *(offset + size for offset, size in ranges)]
    return [offset for offset, _ in ranges] == ends[:-1] and ends[-1] == stop


def _has_header(view: memoryview) -> bool:
    return len(view) >= HEADER.itemsize and bytes(view[: len(MAGIC)]) == MAGIC


def _fields(view: memoryview) -> dict[str, Any]:
    """Return the fields of `HEADER` as Python ints and bytes."""
    return dict(zip(HEADER.names or (), np.frombuffer(view, HEADER, 1)[0].item(), strict=True))


def _header_sum(view: memoryview, header_bytes: int) -> int:
    return xxh3_64_intdigest(view[_AFTER_HEADER_SUM:header_bytes], xxh3_64_intdigest(view[:_HEADER_SUM]))


def _header_is_intact(view: memoryview, header_bytes: int) -> bool:
    return struct.unpack_from("<Q", view, _HEADER_SUM) == (_header_sum(view, header_bytes),)


def _explain(record_format: RecordFormat, view: memoryview) -> Damage:
    """Return the damage that an intact header of another format means."""
    try:
        header = read_header(view)
    except RecordError:
        return Damage.HEADER
    return Damage.FORMAT if header.namespace == record_format.digest else Damage.NAMESPACE


def _as_bytes(tokens: npt.NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, "<i4").tobytes()
