"""Parsers of stores, given bytes that a stranger wrote, raise documented errors only and stay in memory.

Each fuzzer runs in a process of little memory, starts from tests/corpus/records and changes what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pytest
from fuzz_mutations import change
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_limits import Measured
from record_corpus import CORPUS, FORMS, Whole, check, resealed, whole

from kvkit.format import codecs
from kvkit.format import record as records
from kvkit.format.record import CODECS, MAGIC, Damage, RecordError

ROOM_BYTES = 512 << 20
"""Address space for a fuzzer, threads of the codecs and all; the bombs of the corpus are larger."""

SLOT_BYTES = 16384
bounded = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def seeds() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(CORPUS.iterdir())}


@cache
def hostile() -> list[str]:
    """The seeds that are wrong in spite of their checksums."""
    sound = {f"{kind}.{codec}" for kind in FORMS for codec in CODECS}
    return sorted(set(seeds()) - sound)


@dataclass(frozen=True)
class Strange:
    """A seed with a few changes, where `forged` with checksums that fit them; or noise.

    Attributes:
        changes: as `fuzz_mutations.change` takes them.
    """

    seed: str
    changes: tuple[tuple[str, int, bytes], ...] = ()
    forged: bool = False
    noise: bytes = b""

    @property
    def honest(self) -> bool:
        """Whether its checksums are those of another record, or of none: then no change may be believed."""
        spliced = any(how == "splice" for how, _, _ in self.changes)
        return not self.forged and not spliced and self.seed not in hostile()

    @cached_property
    def data(self) -> bytes:
        data = bytearray(seeds().get(self.seed, b"") + self.noise)
        for how, where, value in self.changes:
            change(data, how, where, value, list(seeds().values()))
        return resealed(data) if self.forged else bytes(data)


NUMBERS = st.sampled_from([0, 1, 2, 127, 128, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
VALUES = st.binary(min_size=1, max_size=8) | st.tuples(NUMBERS, st.sampled_from([1, 2, 4, 8])).map(
    lambda drawn: drawn[0].to_bytes(8, "little")[: drawn[1]]
)
PLACES = st.integers(0, 255) | st.integers(0, 80_000) | st.integers(-80, -1)
WAYS = st.sampled_from(["write", "write", "write", "insert", "drop", "cut", "grow", "splice"])
NOISE = st.builds(
    Strange, st.just(""), noise=st.binary(max_size=300) | st.binary(max_size=300).map(MAGIC.__add__)
)


def strange() -> st.SearchStrategy[Strange]:
    changes = st.lists(st.tuples(WAYS, PLACES, VALUES), max_size=4).map(tuple)
    return st.builds(Strange, st.sampled_from(sorted(seeds())), changes, st.booleans()) | NOISE


@given(strange())
@bounded
def headers(strange: Strange) -> None:
    data = strange.data
    try:
        header = records.read_header(data)
    except RecordError:
        pass
    else:
        assert header.header_bytes <= len(data)
        assert header.plain_bytes >= header.header_bytes
    for kind in FORMS:
        one = whole(kind)
        damage = records.verify_header(one.form, data, *identity(one))
        same = data[: one.form.header_bytes] == one.data[: one.form.header_bytes]
        assert damage is None if same else damage is not None or not strange.honest
    records.parent_name(data, "ab/0/c.1.2.0.0.0.0")


@given(strange())
@bounded
def whole_records(strange: Strange) -> None:
    data = strange.data
    try:
        damage = check(data)
    except RecordError:
        damage = Damage.HEADER
    asked: list[tuple[int, int]] = []

    def read(offset: int, size: int) -> memoryview:
        asked.append((offset, size))
        return memoryview(data)[offset : offset + size]

    try:
        _, _, found = records.examine(read, len(data))
    except RecordError:
        found = Damage.HEADER
    assert found == damage
    assert sum(size for _, size in asked) <= 2 * len(data) + records.HEADER.itemsize, (
        "a part is read again and again"
    )
    for kind in FORMS:
        one = whole(kind)
        damage = records.verify(one.form, data, *identity(one))
        assert damage is None if data == one.data else damage is not None or not strange.honest


@given(strange(), st.integers(0, 2))
@bounded
def layers(strange: Strange, layer: int) -> None:
    data = strange.data
    for kind in FORMS:
        one = whole(kind)
        if layer < one.form.shape[0]:
            offset, size = records.layer_range(one.form, layer)
            piece, right = data[offset : offset + size], one.data[offset : offset + size]
            found = records.verify_layer(one.form, one.data, layer, piece)
            assert (found is None) == (piece == right)
        end = data[one.form.layers_end :]
        assert (records.verify_trailer(one.form, end) is None) == (end == one.form.trailer)


@given(strange(), st.sampled_from([SLOT_BYTES, 8192, 4096, 100]))
@bounded
def compressed(strange: Strange, slot_bytes: int) -> None:
    data = strange.data
    results = []
    for poison in (0x00, 0xA5):
        slot = np.full(slot_bytes + 64, poison, np.uint8)
        restored = codecs.decompress(data, slot[:slot_bytes])
        assert (slot[slot_bytes:] == poison).all(), "written behind the slot"
        if isinstance(restored, Damage):
            results.append((restored, b""))
            continue
        assert restored <= slot_bytes
        assert (slot[restored:] == poison).all(), "written behind the record"
        results.append((restored, slot[:restored].tobytes()))
    assert results[0] == results[1], "what lay in the slot before became a part of the record"
    for kind in FORMS:
        one = whole(kind)
        damage = records.verify(one.form, results[0][1], *identity(one))
        assert damage is None if results[0][1] == one.data else damage is not None or not strange.honest


def identity(one: Whole) -> tuple[bytes, bytes, np.ndarray]:
    return one.parent, one.key, one.tokens


FUZZERS: dict[str, Callable[[], None]] = {
    "headers": headers,
    "whole records": whole_records,
    "layers": layers,
    "compressed": compressed,
}


def fuzz(name: str) -> None:
    FUZZERS[name]()


@pytest.mark.parametrize("name", FUZZERS)
def test_strange_bytes_are_refused_as_documented_and_in_little_memory(name: str) -> None:
    with Measured() as process:
        process.limit(ROOM_BYTES, fuzz, name)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", FORMS)
def test_the_records_in_the_corpus_are_those_that_kvkit_reads(kind: str, codec: str) -> None:
    stored = (CORPUS / f"{kind}.{codec}").read_bytes()
    slot = np.zeros(SLOT_BYTES, np.uint8)
    assert codecs.decompress(stored, slot) == FORMS[kind].record_bytes
    assert slot[: FORMS[kind].record_bytes].tobytes() == whole(kind).data


@pytest.mark.parametrize("name", hostile())
def test_what_is_wrong_in_spite_of_its_checksums_is_damage(name: str) -> None:
    assert codecs.decompress((CORPUS / name).read_bytes(), bytearray(SLOT_BYTES)) in tuple(Damage)


def restore(name: str) -> None:
    for _ in range(3):
        codecs.decompress((CORPUS / name).read_bytes(), bytearray(SLOT_BYTES))


def warm_up(name: str) -> None:
    restore("gqa.zstd")
    restore("gqa.bitshuffle-zstd")


def test_a_bomb_takes_no_more_than_its_slot() -> None:
    bombs = [name for name in hostile() if name.startswith("bomb")]
    with Measured() as process:
        peaks = {name: process.peak_bytes(restore, name, prepare=warm_up) for name in bombs}
    assert len(peaks) == 4
    assert max(peaks.values()) < 4 << 20, peaks
