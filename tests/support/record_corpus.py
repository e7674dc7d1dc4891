"""The records in tests/corpus/records, from which fuzzers start.

`python tests/support/record_corpus.py` makes them, one of every codec as kvkit writes it, and records that
a stranger who can write to a store could put there: right in every checksum, wrong in what they say of
themselves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numcodecs
import numpy as np
import numpy.typing as npt
from repository import TESTS
from xxhash import xxh3_64_intdigest

from kvkit.format import codecs
from kvkit.format import record as records
from kvkit.format.keys import chunk_keys
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.record import CODEC_LEVEL, CODECS, HEADER, RecordFormat

CORPUS = TESTS / "corpus" / "records"
HEADER_SUM, TRAILER_SUM = 176, 184


def check(record: bytes | npt.NDArray[np.uint8]) -> records.Damage | None:
    """What is wrong with a record in memory by its own checksums."""
    view = memoryview(record)
    return records.examine(lambda offset, size: view[offset : offset + size], len(view))[2]


def form_of(group: LayerGroup, chunk_tokens: int) -> RecordFormat:
    layout = KVLayout((group,))
    space = Namespace("m", layout=layout.fingerprint(), dtype=group.dtype, chunk_tokens=chunk_tokens)
    return RecordFormat.of(layout, 0, space)


FORMS = {
    "gqa": form_of(LayerGroup((0, 1), 2, 8, 8, "float32", 4), 8),
    "mla": form_of(LayerGroup((0, 1, 2), 1, 36, 0, "bfloat16", 4), 8),
    "opaque": form_of(LayerGroup((0, 1), 2, 8, 8, "bfloat16", 4, page_bytes=256), 8),
}


@dataclass(frozen=True)
class Whole:
    """A record without compression, and what it was sealed with."""

    form: RecordFormat
    data: bytes
    parent: bytes
    key: bytes
    tokens: npt.NDArray[np.int32]


def whole(kind: str) -> Whole:
    """The record of `FORMS[kind]`."""
    form = FORMS[kind]
    data = np.zeros(form.record_bytes, np.uint8)
    records.payload(form, data)[:] = np.arange(form.layers_end - form.header_bytes) // 5 % 251
    tokens = np.arange(7, 7 + form.namespace.chunk_tokens, dtype=np.int32)
    (key,) = chunk_keys(tokens, len(tokens), form.digest)
    records.seal(form, data, form.digest, key, tokens)
    return Whole(form, data.tobytes(), form.digest, key, tokens)


def packed(kind: str, codec: str) -> bytes:
    """The same, compressed."""
    if codec == "none":
        return whole(kind).data
    out = np.zeros(FORMS[kind].record_bytes + (1 << 16), np.uint8)
    return out[: codecs.compress(whole(kind).data, codec, out)].tobytes()


def forged(kind: str, codec: str, layer: bytes, layers: int | None = None) -> bytes:
    """One whose layers, compressed, are all `layer`."""
    form = FORMS[kind]
    count = form.shape[0] if layers is None else layers
    data = bytearray(packed(kind, codec)[: form.header_bytes])
    ends = [form.header_bytes + (i + 1) * len(layer) for i in range(count)]
    trailer = records.trailer_of([(end - len(layer), len(layer)) for end in ends], ends[-1])
    struct.pack_into("<QQ", data, 96, ends[-1] + len(trailer), ends[-1])
    return resealed(data + layer * count + trailer)


def changed(data: bytes, offset: int, kind: str, *values: int) -> bytes:
    """`data` with other numbers at `offset`, and right checksums."""
    found = bytearray(data)
    struct.pack_into(f"<{kind}", found, offset, *values)
    return resealed(found)


def resealed(data: bytes | bytearray) -> bytes:
    """`data` with checksums that fit, as far as it can be told what they are of."""
    found = bytearray(data)
    if len(found) < HEADER.itemsize:
        return bytes(found)
    (header_bytes, _, layers) = struct.unpack_from("<III", found, 12)
    record_bytes, layers_end = struct.unpack_from("<QQ", found, 96)
    if len(found) == record_bytes and HEADER.itemsize + 8 * layers <= min(
        header_bytes, layers_end, len(found)
    ):
        trailer = bytes(found[layers_end:])
        struct.pack_into("<Q", found, TRAILER_SUM, xxh3_64_intdigest(trailer))
        if len(trailer) >= 16 * layers + 4:
            for i, (offset, size) in enumerate(records.read_index(trailer, layers)):
                layer = xxh3_64_intdigest(bytes(found[offset : offset + size]))
                struct.pack_into("<Q", found, HEADER.itemsize + 8 * i, layer)
    total = xxh3_64_intdigest(found[:HEADER_SUM])
    total = xxh3_64_intdigest(found[TRAILER_SUM:header_bytes], total)
    struct.pack_into("<Q", found, HEADER_SUM, total)
    return bytes(found)


def zstd_of_zeros(size: int) -> bytes:
    """A Zstandard frame, 1/32768 as long, that is `size` zeros."""
    return bytes(numcodecs.Zstd(CODEC_LEVEL).encode(np.zeros(size, np.uint8)))


def zstd_without_size(blocks: int) -> bytes:
    """One that does not say how many blocks of 128 KiB it makes."""
    head, size = struct.pack("<IBB", 0xFD2FB528, 0, 0x50), 1 << 17
    last = [i == blocks - 1 for i in range(blocks)]
    return head + b"".join(struct.pack("<I", size << 3 | 2 | end)[:3] + b"\0" for end in last)


def corpus() -> dict[str, bytes]:
    """Every seed by its file's name."""
    found = {f"{kind}.{codec}": packed(kind, codec) for kind in FORMS for codec in CODECS}
    plain, zstd = packed("gqa", "none"), packed("gqa", "zstd")
    size = FORMS["gqa"].layer_bytes
    short = bytes(numcodecs.Zstd(CODEC_LEVEL).encode(np.arange(size // 2, dtype=np.uint8)))
    one = packed("gqa", "bitshuffle-zstd")
    (place, *_) = records.read_index(one, 2)
    blosc = bytearray(one[place[0] : sum(place)])
    huge = struct.pack("<4BIII", *blosc[:4], 1 << 30, 1 << 30, len(blosc))
    stored = 2  # flag of a frame that is not compressed: what follows its 16 bytes is copied
    cut = struct.pack("<4BIII", *blosc[:2], stored, 4, size, size, 16 + size)
    found |= {
        "bomb.zstd": forged("gqa", "zstd", zstd_of_zeros(1 << 30)),
        "bomb-without-size.zstd": forged("gqa", "zstd", zstd_without_size(9000)),
        "bomb-of-two-frames.zstd": forged("gqa", "zstd", zstd_of_zeros(size) + zstd_of_zeros(1 << 29)),
        "short-frame.zstd": forged("gqa", "zstd", short),
        "no-frame.zstd": forged("gqa", "zstd", b"this is no frame"),
        "no-frame.bitshuffle-zstd": forged("gqa", "bitshuffle-zstd", b"this is no frame"),
        "bomb.bitshuffle-zstd": forged("gqa", "bitshuffle-zstd", huge + blosc[16:]),
        "cut-frame.bitshuffle-zstd": forged("gqa", "bitshuffle-zstd", cut),
        "absurd-shape.none": changed(plain, 24, "III", *[2**32 - 1] * 3),
        "absurd-shape.zstd": changed(zstd, 24, "III", *[2**32 - 1] * 3),
        "no-shape.zstd": changed(zstd, 24, "III", 0, 0, 0),
        "unknown-dtype.zstd": changed(zstd, 48, "Q", 7),
        "one-layer-twice.none": resealed(
            plain[:-36] + records.shard_index([(FORMS["gqa"].header_bytes, 2 * size)] * 2)
        ),
        "long-record.none": changed(plain + bytes(4096), 96, "Q", len(plain) + 4096),
    }
    return found


if __name__ == "__main__":
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, data in corpus().items():
        (CORPUS / name).write_bytes(data)
        print(f"{name}: {len(data)} bytes")
