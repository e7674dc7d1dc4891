"""A record's header gives its name, sizes and codec, and invalid headers are rejected."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from test_record import Bytes, Sealed, format_of, resealed, seal

from kvkit.format import codecs
from kvkit.format import record as records
from kvkit.format.layout import FORMAT_VERSION, LayerGroup
from kvkit.format.names import record_name
from kvkit.format.record import ALIGN, CODECS, HEADER, MAX_HEADER_BYTES, Damage, RecordError

MLA = format_of(LayerGroup((0, 1, 2), 1, 576, 0, "bfloat16", 4), chunk_tokens=8)
FP8 = format_of(LayerGroup((0, 1), 2, 8, 8, "bfloat16", 4, precision="fp8"), chunk_tokens=4)
OPAQUE = format_of(LayerGroup((0, 1), 2, 8, 8, "bfloat16", 4, page_bytes=256), chunk_tokens=8)
FULL = format_of(LayerGroup(tuple(range(480)), 1, 1, 1, "uint8", 16), chunk_tokens=16)
"""Its header fills the first 4096 bytes to the last."""


def changed(sealed: Sealed, at: int, kind: str, *values: int | bytes) -> Bytes:
    """The record with another field, under a right checksum."""
    struct.pack_into("<" + kind, sealed.record, at, *values)
    return resealed(sealed.record)


def packed(codec: str = "zstd") -> Sealed:
    """A compressed record."""
    sealed = seal(MLA, smooth=True)
    out = np.zeros(2 * MLA.record_bytes, np.uint8)
    size = codecs.compress(sealed.record, codec, out)
    return replace(sealed, form=replace(MLA, record_bytes=size), buffer=np.pad(out[:size], 64))


def test_a_header_says_in_what_form_its_kv_is() -> None:
    header = records.read_header(seal(FP8).record)
    assert (header.precision, header.kv_dtype) == ("fp8", "bfloat16")
    header = records.read_header(seal(MLA).record)
    assert (header.precision, header.kv_dtype) == (None, "bfloat16")


@pytest.mark.parametrize("form", [MLA, FP8, OPAQUE, FULL], ids=["mla", "fp8", "opaque", "full"])
def test_the_size_without_compression_is_told(form: records.RecordFormat) -> None:
    assert records.read_header(seal(form).record).plain_bytes == form.record_bytes


def test_a_header_may_be_full() -> None:
    sealed = seal(FULL)
    assert FULL.header_bytes == ALIGN
    assert sealed.verify() is None
    assert records.read_header(sealed.record).layer_sums.shape == (480,)
    more = format_of(LayerGroup(tuple(range(481)), 1, 1, 1, "uint8", 16), chunk_tokens=16)
    assert more.header_bytes == 2 * ALIGN
    assert seal(more).verify() is None


def test_what_follows_the_layers_begins_where_it_fits() -> None:
    assert records.total_bytes(ALIGN - 20, 1) == ALIGN
    assert records.total_bytes(ALIGN - 16, 1) == 2 * ALIGN


def test_a_record_is_named_by_its_array_key_and_places() -> None:
    group = LayerGroup((2, 3), 1, 3, 1, "uint8", 2, first_head=1, model_heads=2, model_layers=(0, 1, 2, 3))
    form = format_of(group, chunk_tokens=4)
    assert (group.head_shard, group.layer_shard) == (1, 1)
    part = format_of(replace(group, layers=(0, 1)), chunk_tokens=4)
    assert form.array == f"{form.digest[:16].hex()}/0"
    key = bytes(range(16))
    assert form.name(key) == record_name(form.array, key, 1, 1)
    assert part.name(key) == record_name(part.array, key, 1, 0)


def test_a_header_names_the_record_before_it() -> None:
    sealed = seal(MLA)
    name = MLA.name(sealed.key)
    assert records.parent_name(sealed.record, name) is None  # it begins a chain
    parent = bytes(range(1, 17))
    records.seal(MLA, sealed.record, parent, sealed.key, sealed.tokens)
    assert records.parent_name(sealed.record, name) == MLA.name(parent)
    struct.pack_into("<HH", sealed.record, 44, 40_000, 50_000)
    assert records.parent_name(sealed.record, name) == record_name(MLA.array, parent, 40_000, 50_000)
    assert records.parent_name(sealed.record[: HEADER.itemsize - 1], name) is None
    assert records.parent_name(np.zeros(4096, np.uint8), name) is None


def test_a_compressed_record_is_told_by_how_it_begins() -> None:
    head = HEADER.itemsize
    assert records.is_compressed(packed().record[:head]) is True
    assert records.is_compressed(seal(MLA).record[:head]) is False
    assert records.is_compressed(packed().record[: head - 1]) is False
    assert records.is_compressed(np.full(4096, 1, np.uint8)) is False


def test_layers_in_their_places_are_made_a_record() -> None:
    sealed = seal(MLA)
    buffer = np.full(MLA.record_bytes + 64, 0xA5, np.uint8)
    records.payload(MLA, buffer)[:] = sealed.payload
    records.write_framing(MLA, buffer, sealed.record[: MLA.header_bytes + 7])
    assert buffer[: MLA.record_bytes].tobytes() == sealed.record.tobytes()
    assert (buffer[MLA.record_bytes :] == 0xA5).all()


def test_a_layer_that_is_not_there_is_named_with_how_many_there_are() -> None:
    with pytest.raises(RecordError, match=r"^layer=3: this group has 3 layers$"):
        records.layer_range(MLA, 3)


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "<i4"])
def test_tokens_are_compared_by_their_values(dtype: str) -> None:
    sealed = seal(MLA)
    sealed.tokens = sealed.tokens.astype(dtype)
    assert sealed.verify() is None
    records.seal(MLA, sealed.record, sealed.parent, sealed.key, sealed.tokens)
    assert sealed.verify() is None


def cut_short(sealed: Sealed) -> Bytes:
    return sealed.record[: MLA.header_bytes - 1]


def damaged(sealed: Sealed) -> Bytes:
    sealed.record[300] ^= 1
    return sealed.record


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda sealed: sealed.record[:191], "not a kvkit record"),
        (
            lambda sealed: changed(sealed, 8, "H", 99),
            f"record format version 99: this kvkit reads {FORMAT_VERSION}",
        ),
        (cut_short, "header cut short"),
        (damaged, "header checksum differs"),
        (lambda sealed: changed(sealed, 10, "B", len(CODECS)), "header contradicts itself"),
        (lambda sealed: changed(sealed, 48, "16s", b"float17"), "header contradicts itself"),
        (lambda sealed: changed(sealed, 104, "Q", MLA.layers_end - 1), "header contradicts itself"),
        (lambda sealed: changed(sealed, 20, "I", 490), "header cut short"),  # of checksums
        (lambda sealed: changed(sealed, 40, "I", 4096), "header cut short"),  # of tokens
    ],
)
def test_what_is_no_header_is_refused_and_says_why(make: Callable[[Sealed], Bytes], words: str) -> None:
    with pytest.raises(RecordError) as refused:
        records.read_header(make(seal(MLA)))
    assert str(refused.value) == words


def test_a_full_header_with_one_layer_too_many_is_cut_short() -> None:
    with pytest.raises(RecordError, match=r"^header cut short$"):
        records.read_header(changed(seal(FULL), 20, "I", 481))


@pytest.mark.parametrize(
    ("record_bytes", "layers_end"),
    [(MLA.record_bytes, MLA.header_bytes - 1), (ALIGN, ALIGN - 100), (3 * ALIGN, 2 * ALIGN - 100)],
)
def test_a_compressed_record_lies_within_its_bounds(record_bytes: int, layers_end: int) -> None:
    with pytest.raises(RecordError, match=r"^header contradicts itself$"):
        records.read_header(changed(packed(), 96, "QQ", record_bytes, layers_end))


def test_compressed_layers_may_take_no_bytes_as_far_as_a_header_knows() -> None:
    found = records.read_header(changed(packed(), 96, "QQ", 2 * ALIGN, ALIGN))
    assert found.layers_end == found.header_bytes


def test_what_opaque_pages_hold_may_be_called_anything() -> None:
    header = records.read_header(changed(seal(OPAQUE), 48, "16s", b"\xffbits"))
    assert header.dtype == "\ufffdbits"


@pytest.mark.parametrize(("header_bytes", "asked"), [(MAX_HEADER_BYTES, 2), (MAX_HEADER_BYTES + 1, 1)])
def test_a_header_that_says_it_is_too_long_is_not_read(header_bytes: int, asked: int) -> None:
    record, parts = changed(seal(MLA), 12, "I", header_bytes), []

    def read(offset: int, size: int) -> memoryview:
        parts.append(size)
        return memoryview(record)[offset : offset + size]

    with pytest.raises(RecordError):
        records.examine(read, 2 * MAX_HEADER_BYTES)
    assert parts == [HEADER.itemsize, MAX_HEADER_BYTES][:asked]


def test_no_more_is_read_than_there_is() -> None:
    record = seal(MLA).record

    def read(offset: int, size: int) -> memoryview:
        assert offset + size <= len(record)
        return memoryview(record)[offset : offset + size]

    header, places, damage = records.examine(read, len(record))
    assert damage is None
    assert places == records.even_ranges(header.header_bytes, header.layer_bytes, 3)


@pytest.mark.parametrize("off", [(0, 0, 0, 0, 0, -1), (0, 1, 0, 0, 0, 0)])
def test_layers_that_do_not_lie_side_by_side_are_not_read(off: tuple[int, ...]) -> None:
    sealed = seal(MLA)
    flat = np.array(records.even_ranges(MLA.header_bytes, MLA.layer_bytes, 3)).ravel() + off
    trailer = records.trailer_of([tuple(pair) for pair in flat.reshape(3, 2).tolist()], MLA.layers_end)
    sealed.record[MLA.layers_end :] = np.frombuffer(trailer, np.uint8)
    record = changed(sealed, 184, "Q", records.layer_checksum(trailer))

    def read(offset: int, size: int) -> memoryview:
        return memoryview(record)[offset : offset + size]

    assert records.examine(read, len(record))[1:] == ([], Damage.TRAILER)
