"""A record verifies as it was sealed, and every flipped, cut or swapped byte is found."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Any

import numcodecs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_corpus import check
from xxhash import xxh3_64_intdigest

from kvkit.format import codecs
from kvkit.format import record as records
from kvkit.format.keys import DIGEST_BYTES, chunk_keys
from kvkit.format.layout import ITEM_BYTES, KVLayout, LayerGroup, LayoutError, Namespace
from kvkit.format.record import HEADER, MAGIC, Damage, RecordError, RecordFormat

Bytes = npt.NDArray[np.uint8]
COMPRESSED = ("zstd", "bitshuffle-zstd")
GUARD = 64
POISON = 0xA5


def format_of(*groups: LayerGroup, index: int = 0, **namespace: Any) -> RecordFormat:
    layout = KVLayout(groups)
    fields = {"model": "m", "layout": layout.fingerprint(), "dtype": groups[0].dtype} | namespace
    return RecordFormat.of(layout, index, Namespace(**fields))


@dataclass
class Sealed:
    """A record in the middle of a larger, poisoned buffer, and what it was sealed with."""

    form: RecordFormat
    buffer: Bytes
    payload: Bytes
    parent: bytes
    key: bytes
    tokens: npt.NDArray[np.int32]

    @property
    def record(self) -> Bytes:
        return self.buffer[GUARD : GUARD + self.form.record_bytes]

    def verify(self, record: Bytes | None = None) -> Damage | None:
        record = self.record if record is None else record
        return records.verify(self.form, record, self.parent, self.key, self.tokens)

    def assert_guards_untouched(self) -> None:
        assert (self.buffer[:GUARD] == POISON).all()
        assert (self.buffer[GUARD + self.form.record_bytes :] == POISON).all()


def seal(form: RecordFormat, seed: int = 0, smooth: bool = False) -> Sealed:
    random = np.random.default_rng(seed)
    buffer = np.full(form.record_bytes + 2 * GUARD, POISON, np.uint8)
    size = form.layers_end - form.header_bytes
    payload = random.integers(0, 4 if smooth else 256, size, dtype=np.uint8)
    tokens = random.integers(-(2**31), 2**31, form.namespace.chunk_tokens).astype(np.int32)
    (key,) = chunk_keys(tokens, len(tokens), form.digest, form.namespace.hash)
    sealed = Sealed(form, buffer, payload, form.digest, key, tokens)
    # the whole slot is handed over, as staging does: seal must stop at record_bytes
    records.payload(form, buffer[GUARD:])[:] = payload
    records.seal(form, buffer[GUARD:], sealed.parent, key, tokens)
    return sealed


@st.composite
def formats(draw: st.DrawFn) -> RecordFormat:
    block_tokens = draw(st.sampled_from([1, 3, 16]))
    forms = [(8, 8), (64, 64), (132, 0), (576, 0), (3, 7)]
    k_size, v_size = draw(st.sampled_from(forms))
    layers = draw(st.integers(1, 5))
    group = LayerGroup(
        layers=tuple(range(1, layers + 1)),
        kv_heads=draw(st.integers(1, 3)),
        k_size=k_size,
        v_size=v_size,
        dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
        block_tokens=block_tokens,
        page_bytes=draw(st.none() | st.integers(1, 300)),
    )
    other = LayerGroup((0,), 1, 4, 4, "uint8", 1)
    index = draw(st.integers(0, 1))
    return format_of(
        *((other, group) if index else (group, other)),
        index=index,
        chunk_tokens=block_tokens * draw(st.sampled_from([1, 2, 5])),
        hash=draw(st.sampled_from(sorted(DIGEST_BYTES))),
        salt=draw(st.sampled_from(["", "tenant"])),
    )


TINY = format_of(LayerGroup((0, 1), 2, 3, 1, "uint8", 2), chunk_tokens=4)
FORMS = {
    "gqa": format_of(LayerGroup((0, 1, 2), 3, 16, 16, "float32", 4), chunk_tokens=16),
    "mla": format_of(LayerGroup((0, 1), 1, 576, 0, "bfloat16", 4), chunk_tokens=8),
    "132": format_of(LayerGroup((0, 1, 2, 3), 1, 132, 0, "uint8", 4), chunk_tokens=4),
    "opaque": format_of(LayerGroup((0, 1), 2, 8, 8, "bfloat16", 4, page_bytes=256), chunk_tokens=8),
    "blake3": format_of(LayerGroup((0, 1), 2, 8, 8, "float16", 4), chunk_tokens=8, hash="blake3"),
    "fp8": format_of(LayerGroup((0, 1), 2, 8, 8, "bfloat16", 4, precision="fp8"), chunk_tokens=4),
    "long": format_of(LayerGroup((0,), 1, 1, 1, "uint8"), chunk_tokens=2048),  # three header pages
}
by_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@given(formats(), st.integers(0, 2**32))
@settings(deadline=None)
def test_what_is_sealed_verifies(form: RecordFormat, seed: int) -> None:
    sealed = seal(form, seed)
    sealed.assert_guards_untouched()
    assert sealed.verify() is None
    assert check(sealed.record) is None
    assert (records.payload(form, sealed.record) == sealed.payload).all()
    assert form.header_bytes % 4096 == form.record_bytes % 4096 == 0
    assert form.layers_end - form.header_bytes == form.group.chunk_bytes(form.namespace.chunk_tokens)

    header = records.read_header(sealed.record)
    assert (header.version, header.codec, header.group) == (1, "none", form.index)
    assert (header.shape, header.chunk_tokens) == (form.shape, form.namespace.chunk_tokens)
    assert header.dtype == form.group.dtype
    assert header.k_size == (0 if form.group.opaque else form.group.k_size)
    assert (header.namespace, header.parent, header.key) == (form.digest, sealed.parent, sealed.key)
    assert (header.header_bytes, header.record_bytes) == (form.header_bytes, form.record_bytes)
    assert header.layers_end == form.layers_end
    assert header.layer_sums.tolist() == records.layer_checksums(form, sealed.record)
    assert (header.tokens == sealed.tokens).all()


@given(formats(), st.data())
@settings(deadline=None)
def test_one_flipped_bit_anywhere_is_found(form: RecordFormat, data: st.DataObject) -> None:
    sealed = seal(form)
    edges = [
        0,
        HEADER.itemsize,
        form.header_bytes - 1,
        form.header_bytes,
        form.layers_end - 1,
        form.layers_end,
    ]
    at = data.draw(st.integers(0, form.record_bytes - 1) | st.sampled_from([*edges, form.record_bytes - 1]))
    sealed.record[at] ^= 1 << data.draw(st.integers(0, 7))
    assert sealed.verify() == region(form, at)
    with_error = RecordError if at < form.header_bytes else None
    if with_error:
        with pytest.raises(with_error):
            check(sealed.record)
    else:
        assert check(sealed.record) == region(form, at)


def region(form: RecordFormat, at: int) -> Damage:
    if at < form.header_bytes:
        return Damage.HEADER
    return Damage.LAYER if at < form.layers_end else Damage.TRAILER


@by_form
def test_every_byte_of_header_and_trailer_is_under_a_checksum(form: RecordFormat) -> None:
    sealed = seal(form)
    record = sealed.record
    layers = [offset for layer in range(form.shape[0]) for offset in ends(form, layer)]
    for at in [*range(form.header_bytes), *layers, *range(form.layers_end, form.record_bytes)]:
        bit = 1 << at % 8
        record[at] ^= bit
        assert sealed.verify() == region(form, at), at
        record[at] ^= bit
    assert sealed.verify() is None


def ends(form: RecordFormat, layer: int) -> tuple[int, int]:
    """The first and the last byte of a layer."""
    offset, size = records.layer_range(form, layer)
    return offset, offset + size - 1


@by_form
def test_a_record_of_another_length_is_truncated(form: RecordFormat) -> None:
    sealed = seal(form)
    lengths = {
        0,
        1,
        len(MAGIC),
        HEADER.itemsize - 1,
        HEADER.itemsize,
        form.header_bytes - 1,
        form.header_bytes,
    }
    lengths |= {offset + 1 for layer in range(form.shape[0]) for offset in ends(form, layer)}
    lengths |= {form.layers_end, form.record_bytes - 4, form.record_bytes - 1}
    for length in lengths:
        assert sealed.verify(sealed.record[:length]) == Damage.TRUNCATED, length
        if length < form.header_bytes:
            with pytest.raises(RecordError):
                check(sealed.record[:length])
        else:
            assert check(sealed.record[:length]) == Damage.TRUNCATED
    longer = sealed.buffer[GUARD : GUARD + form.record_bytes + 1]
    assert sealed.verify(longer) == check(longer) == Damage.TRUNCATED


@by_form
def test_zeros_and_noise_are_no_record(form: RecordFormat) -> None:
    sealed = seal(form)
    noise = np.random.default_rng(1).integers(0, 256, form.record_bytes, dtype=np.uint8)
    for data in (np.zeros(form.record_bytes, np.uint8), noise):
        assert sealed.verify(data) == Damage.HEADER
        with pytest.raises(RecordError, match="not a kvkit record"):
            records.read_header(data)


@by_form
def test_another_chunk_s_record_says_what_differs(form: RecordFormat) -> None:
    sealed = seal(form)
    record, parent, key, tokens = sealed.record, sealed.parent, sealed.key, sealed.tokens
    for at in (0, len(key) - 1):
        wrong = bytearray(key)
        wrong[at] ^= 1
        assert records.verify(form, record, parent, bytes(wrong), tokens) == Damage.KEY
        assert records.verify(form, record, bytes(wrong), key, tokens) == Damage.PARENT
    assert records.verify(form, record, parent, key[:-1], tokens) == Damage.KEY
    assert records.verify(form, record, parent, b"", tokens) == Damage.KEY
    for at in (0, len(tokens) - 1):
        other = tokens.copy()
        other[at] ^= 1
        assert records.verify(form, record, parent, key, other) == Damage.TOKENS
    assert records.verify(form, record, parent, key, tokens[:-1]) == Damage.TOKENS
    assert records.verify(form, record, parent, key, tokens[:0]) == Damage.TOKENS


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"salt": "tenant"}, {"revision": "r2"}, {"rank": 1, "world": 2}, {"lora": "a"}],
)
def test_another_namespace_s_record_is_refused(change: dict[str, Any]) -> None:
    form = FORMS["gqa"]
    other = format_of(form.group, chunk_tokens=16, **change)
    sealed = seal(other)
    assert records.verify(form, sealed.record, sealed.parent, sealed.key, sealed.tokens) == Damage.NAMESPACE


def test_a_header_says_what_fewer_bits_there_are() -> None:
    """And what they were: KV of another precision, or of all its bits, is another namespace's."""
    group = FORMS["fp8"].group
    header = records.read_header(seal(FORMS["fp8"]).record)
    assert (header.dtype, header.shape, header.k_size) == ("fp8 of bfloat16", (2, 2, 4, 16 + 8), 8)
    for precision in (None, "int8"):
        other = seal(format_of(replace(group, precision=precision), chunk_tokens=4))
        found = records.verify(FORMS["fp8"], other.record, other.parent, other.key, other.tokens)
        assert found == Damage.NAMESPACE


def test_another_format_s_record_is_refused() -> None:
    form = FORMS["gqa"]
    compressed = np.zeros(2 * form.record_bytes, np.uint8)
    sealed = seal(form)
    size = codecs.compress(sealed.record, "zstd", compressed)
    assert sealed.verify(compressed[:size]) == Damage.FORMAT
    two_groups = (replace(form.group, layers=(0, 1, 2)), replace(form.group, layers=(3, 4, 5)))
    first, second = (format_of(*two_groups, index=i, chunk_tokens=16) for i in (0, 1))
    sealed = seal(second)
    assert records.verify(first, sealed.record, sealed.parent, sealed.key, sealed.tokens) == Damage.FORMAT


def resealed(record: Bytes) -> Bytes:
    """`record` with a header checksum that fits its header: what a faulty or hostile writer could make."""
    (header_bytes,) = struct.unpack_from("<I", record, 12)
    view = memoryview(record)
    total = xxh3_64_intdigest(view[184:header_bytes], xxh3_64_intdigest(view[:176]))
    struct.pack_into("<Q", record, 176, total)
    return record


FIELDS = {
    "magic": (0, "8s"),
    "version": (8, "H"),
    "codec": (10, "B"),
    "key_bytes": (11, "B"),
    "header_bytes": (12, "I"),
    "group": (16, "I"),
    "layers": (20, "I"),
    "heads": (24, "I"),
    "rows": (28, "I"),
    "channels": (32, "I"),
    "k_size": (36, "I"),
    "chunk_tokens": (40, "I"),
    "head_shard": (44, "H"),
    "layer_shard": (46, "H"),
    "dtype": (48, "16s"),
    "namespace": (64, "32s"),
    "record_bytes": (96, "Q"),
    "layers_end": (104, "Q"),
    "parent": (112, "32s"),
    "key": (144, "32s"),
    "header_sum": (176, "Q"),
    "trailer_sum": (184, "Q"),
}


def test_the_header_s_fields_lie_where_they_lay() -> None:
    assert HEADER.fields is not None
    laid = {name: (at, kind.itemsize) for name, (kind, at, *_) in HEADER.fields.items()}
    assert laid == {name: (at, struct.calcsize("<" + kind)) for name, (at, kind) in FIELDS.items()}
    assert HEADER.itemsize == 192


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in ("header_sum", "trailer_sum")])
@given(noise=st.binary(min_size=32, max_size=32))
@settings(deadline=None, max_examples=30)
def test_a_header_with_a_wrong_field_and_a_right_checksum_is_refused(field: str, noise: bytes) -> None:
    """Nothing is believed for its checksum's sake, and nothing raises but RecordError."""
    sealed = seal(TINY)
    at, kind = FIELDS[field]
    size = struct.calcsize(kind)
    if sealed.record[at : at + size].tobytes() == noise[:size]:
        return
    sealed.record[at : at + size] = np.frombuffer(noise[:size], np.uint8)
    damage = sealed.verify(resealed(sealed.record))
    assert damage is not None
    if field in ("key", "parent", "namespace"):
        assert damage == Damage(field)
    try:
        records.read_header(sealed.record)
        check(sealed.record)
    except RecordError:
        pass
    out = np.zeros(TINY.record_bytes, np.uint8)
    assert codecs.decompress(sealed.record, out) in (*Damage, TINY.record_bytes)


@pytest.mark.parametrize(
    ("record_bytes", "layers", "layers_end"), [(4096, 400, 4096), (8192, 2, 8192), (8192, 2, 64), (0, 2, 0)]
)
def test_a_header_that_contradicts_itself_is_refused(record_bytes: int, layers: int, layers_end: int) -> None:
    sealed = seal(TINY)
    struct.pack_into("<I", sealed.record, 20, layers)
    struct.pack_into("<QQ", sealed.record, 96, record_bytes, layers_end)
    record = resealed(sealed.record)[: max(record_bytes, 4096)]
    with pytest.raises(RecordError, match="contradicts itself"):
        check(record)


@by_form
def test_one_layer_verifies_alone(form: RecordFormat) -> None:
    sealed = seal(form)
    header = sealed.record[: form.header_bytes].copy()
    assert records.verify_header(form, header, sealed.parent, sealed.key, sealed.tokens) is None
    assert records.verify_header(form, sealed.record, sealed.parent, sealed.key, sealed.tokens) is None
    cut = header[:-1]
    assert records.verify_header(form, cut, sealed.parent, sealed.key, sealed.tokens) == Damage.TRUNCATED
    for layer in range(form.shape[0]):
        offset, size = records.layer_range(form, layer)
        assert offset == form.header_bytes + layer * size
        data = sealed.record[offset : offset + size].copy()
        assert (data == sealed.payload[layer * size : (layer + 1) * size]).all()
        assert records.verify_layer(form, header, layer, data) is None
        assert records.verify_layer(form, header, (layer + 1) % form.shape[0], data) in (
            {Damage.LAYER} if form.shape[0] > 1 else {None}
        )
        assert records.verify_layer(form, header, layer, data[:-1]) == Damage.TRUNCATED
        for at in (0, size // 2, size - 1):
            data[at] ^= 0x80
            assert records.verify_layer(form, header, layer, data) == Damage.LAYER
            data[at] ^= 0x80


@pytest.mark.parametrize("layer", [-1, 2, 1000])
def test_a_layer_that_is_not_there_is_named(layer: int) -> None:
    sealed = seal(TINY)
    with pytest.raises(RecordError, match=f"layer={layer}: .* 2 layers"):
        records.layer_range(TINY, layer)
    with pytest.raises(RecordError, match=f"layer={layer}: .* 2 layers"):
        records.verify_layer(TINY, sealed.record, layer, sealed.record[: TINY.layer_bytes])


def test_seal_refuses_a_small_buffer_and_wrong_tokens() -> None:
    sealed = seal(TINY)
    with pytest.raises(RecordError, match=f"{TINY.record_bytes - 1} bytes, want {TINY.record_bytes}"):
        records.seal(TINY, sealed.record[:-1].copy(), sealed.parent, sealed.key, sealed.tokens)
    with pytest.raises(RecordError, match="tokens: 3, want 4"):
        records.seal(TINY, sealed.record.copy(), sealed.parent, sealed.key, sealed.tokens[:3])
    for size in (0, 33):
        with pytest.raises(RecordError, match=f"key: {size} bytes, want 16"):
            records.seal(TINY, sealed.record.copy(), sealed.parent, bytes(size), sealed.tokens)
        with pytest.raises(RecordError, match=f"parent: {size} bytes, want 16"):
            records.seal(TINY, sealed.record.copy(), bytes(size), sealed.key, sealed.tokens)


def test_verify_reads_only() -> None:
    sealed = seal(TINY)
    sealed.record.flags.writeable = False
    readonly = memoryview(sealed.record).toreadonly()
    assert records.verify(TINY, readonly, sealed.parent, sealed.key, sealed.tokens) is None
    assert records.verify(TINY, bytes(readonly), sealed.parent, sealed.key, sealed.tokens) is None
    assert check(bytes(readonly)) is None


@by_form
@pytest.mark.parametrize("codec", COMPRESSED)
def test_compression_is_exact(form: RecordFormat, codec: str) -> None:
    sealed = seal(form, smooth=True)
    packed = np.full(2 * form.record_bytes + 4096, POISON, np.uint8)
    size = codecs.compress(sealed.record, codec, packed)
    assert size % 4096 == 0
    assert (packed[size:] == POISON).all()
    assert check(packed[:size]) is None
    header = records.read_header(packed[:size])
    assert (header.codec, header.record_bytes, header.key) == (codec, size, sealed.key)

    back = np.full(form.record_bytes + GUARD, POISON, np.uint8)
    assert codecs.decompress(packed[:size], back) == form.record_bytes
    assert (back[: form.record_bytes] == sealed.record).all()
    assert (back[form.record_bytes :] == POISON).all()
    assert sealed.verify(back[: form.record_bytes]) is None


@pytest.mark.parametrize("codec", COMPRESSED)
@given(formats(), st.booleans())
@settings(deadline=None, max_examples=30)
def test_compression_is_exact_for_any_layout(codec: str, form: RecordFormat, smooth: bool) -> None:
    sealed = seal(form, smooth=smooth)
    packed = np.zeros(2 * form.record_bytes + 4096, np.uint8)
    size = codecs.compress(sealed.record, codec, packed)
    back = np.empty(form.record_bytes, np.uint8)
    assert codecs.decompress(packed[:size], back) == form.record_bytes
    assert sealed.verify(back) is None
    assert (back == sealed.record).all()


@pytest.mark.parametrize("codec", COMPRESSED)
def test_compression_makes_smooth_data_smaller(codec: str) -> None:
    form = format_of(LayerGroup((0, 1), 2, 64, 64, "float32", 4), chunk_tokens=64)
    sealed = seal(form, smooth=True)
    packed = np.zeros(form.record_bytes, np.uint8)
    size = codecs.compress(sealed.record, codec, packed)
    assert size < form.record_bytes // 2
    with pytest.raises(RecordError, match=f"does not fit {size - 1} bytes"):  # the layers would fit
        codecs.compress(sealed.record, codec, packed[: size - 1])
    assert codecs.compress(sealed.record, codec, packed[:size]) == size


@pytest.mark.parametrize("codec", COMPRESSED)
def test_damage_in_a_compressed_record_is_found(codec: str) -> None:
    form = FORMS["gqa"]
    sealed = seal(form, smooth=True)
    packed = np.zeros(2 * form.record_bytes, np.uint8)
    size = codecs.compress(sealed.record, codec, packed)
    record = packed[:size]
    header = records.read_header(record)
    out = np.empty(form.record_bytes, np.uint8)
    for at in range(size):
        record[at] ^= 1 << at % 8
        expected = Damage.HEADER
        if at >= header.header_bytes:
            expected = Damage.LAYER if at < header.layers_end else Damage.TRAILER
        assert codecs.decompress(record, out) == expected, at
        record[at] ^= 1 << at % 8
    for length in (0, 1, 191, 192, 4095, 4096, header.layers_end, size - 1):
        expected = Damage.HEADER if length < header.header_bytes else Damage.TRUNCATED
        assert codecs.decompress(record[:length], out) == expected, length
    assert codecs.decompress(packed[: size + 1], out) == Damage.TRUNCATED
    assert codecs.decompress(record, out) == form.record_bytes


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_compressed_record_of_another_format_does_not_verify(codec: str) -> None:
    form = FORMS["gqa"]
    out, packed = (np.empty(2 * form.record_bytes, np.uint8) for _ in range(2))
    other_codec = next(name for name in COMPRESSED if name != codec)
    size = codecs.compress(seal(form).record, other_codec, packed)
    assert codecs.decompress(packed[:size], out) == form.record_bytes, "a record says itself what it is"
    assert seal(form).verify(out[: form.record_bytes]) is None
    out[:] = POISON
    assert codecs.decompress(seal(form).record, out) == form.record_bytes
    assert seal(form).verify(out[: form.record_bytes]) is None
    foreign = format_of(form.group, chunk_tokens=16, model="other")
    size = codecs.compress(seal(foreign).record, codec, packed)
    assert codecs.decompress(packed[:size], out) == foreign.record_bytes
    assert seal(form).verify(out[: foreign.record_bytes]) == Damage.NAMESPACE
    form16 = format_of(replace(form.group, dtype="float16", k_size=32, v_size=32), chunk_tokens=16)
    size = codecs.compress(seal(form16).record, codec, packed)
    assert codecs.decompress(packed[:size], out) == form16.record_bytes
    assert seal(form).verify(out[: form16.record_bytes]) is not None
    assert codecs.decompress(packed[:size], out[: form16.record_bytes - 1]) == Damage.OVERSIZE


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_compressed_layer_of_another_length_is_refused(codec: str) -> None:
    """Its checksums hold, but what it holds is not a layer: only a faulty writer makes such a record."""
    form = FORMS["gqa"]
    compressor = (
        numcodecs.Zstd() if codec == "zstd" else numcodecs.Blosc("zstd", shuffle=numcodecs.Blosc.BITSHUFFLE)
    )
    for items in (form.layer_bytes // 4 - 1, form.layer_bytes // 4 + 1, 1):
        packed = bytes(compressor.encode(np.zeros(items, "<u4")))
        record = forge(form, codec, packed)
        assert check(record) is None
        out = np.full(form.record_bytes, POISON, np.uint8)
        assert codecs.decompress(record, out) == Damage.FORMAT
    record = forge(form, codec, b"this is no frame")
    assert codecs.decompress(record, out) == Damage.FORMAT


def forge(form: RecordFormat, codec: str, layer: bytes) -> Bytes:
    """A compressed record, right in every checksum, each of whose layers is `layer`."""
    sealed = seal(form)
    packed = np.zeros(2 * form.record_bytes, np.uint8)
    codecs.compress(sealed.record, codec, packed)
    count, start = form.shape[0], form.header_bytes
    index = records.shard_index([(start + i * len(layer), len(layer)) for i in range(count)])
    end = start + count * len(layer)
    total = -(-(end + len(index)) // 4096) * 4096
    trailer = bytes(total - end - len(index)) + index
    packed[start:total] = np.frombuffer(layer * count + trailer, np.uint8)
    struct.pack_into("<QQ", packed, 96, total, end)
    struct.pack_into("<Q", packed, 184, xxh3_64_intdigest(trailer))
    struct.pack_into(f"<{count}Q", packed, 192, *[xxh3_64_intdigest(layer)] * count)
    return resealed(packed[:total])


@pytest.mark.parametrize("codec", COMPRESSED)
def test_what_does_not_compress_does_not_overrun(codec: str) -> None:
    form = format_of(LayerGroup((0, 1), 2, 64, 64, "float32", 4), chunk_tokens=64)
    sealed = seal(form)
    for room in (form.record_bytes - 4096, form.header_bytes, 0):
        slot = np.full(form.record_bytes, POISON, np.uint8)
        with pytest.raises(RecordError, match=f"codec='{codec}': .*does not fit {room} bytes"):
            codecs.compress(sealed.record, codec, slot[:room])
        assert (slot[room:] == POISON).all()


def test_an_unknown_codec_names_the_choices() -> None:
    sealed = seal(TINY)
    out = np.zeros(2 * TINY.record_bytes, np.uint8)
    for codec in ("gzip", "none"):
        with pytest.raises(RecordError, match=f"codec='{codec}'.*zstd, bitshuffle-zstd"):
            codecs.compress(sealed.record, codec, out)


def test_a_format_needs_its_own_layout() -> None:
    layout = KVLayout((TINY.group,))
    with pytest.raises(LayoutError, match=r"namespace\.layout='other'"):
        RecordFormat.of(layout, 0, replace(TINY.namespace, layout="other"))
    with pytest.raises(LayoutError, match="chunk_tokens=3"):
        RecordFormat.of(layout, 0, replace(TINY.namespace, chunk_tokens=3))


GOLDEN_SHA256 = "cbc5740bab5ae809bbbcb752a48fb051f850c1927168521a5e1cc7f7f12b98e1"


def test_a_record_s_bytes_stay_what_they_were() -> None:
    """A change here needs a new FORMAT_VERSION: stored records no longer verify."""
    record = np.zeros(TINY.record_bytes, np.uint8)
    records.payload(TINY, record)[:] = np.arange(64)
    tokens = np.array([1, -2, 300_000, 4], np.int32)
    (key,) = chunk_keys(tokens, 4, TINY.digest)
    records.seal(TINY, record, TINY.digest, key, tokens)
    assert TINY.name(key) == "0dcc6c5876ce13843859adfa5be99306/0/c.43995.68574166751628.0.0.0.0"
    assert record[:8].tobytes() == MAGIC
    assert struct.unpack_from("<HBBIIIIIIIII", record, 8) == (1, 0, 16, 4096, 0, 2, 2, 4, 4, 3, 4, 0)
    assert record[48:64].tobytes() == b"uint8".ljust(16, b"\0")
    assert record[64:96].tobytes() == TINY.digest.ljust(32, b"\0")
    assert struct.unpack_from("<QQ", record, 96) == (8192, 4096 + 64)
    assert record[144:176].tobytes() == key.ljust(32, b"\0")
    assert record[208:224].tobytes() == tokens.tobytes()
    assert not record[224:4096].any()
    assert struct.unpack_from("<4Q", record, 8192 - 36) == (4096, 32, 4128, 32)
    assert hashlib.sha256(record).hexdigest() == GOLDEN_SHA256
