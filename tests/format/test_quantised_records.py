"""Quantised records have the stated bytes, load the stated values, and never pass for exact ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvkit.format.codecs import compress, finish
from kvkit.format.layout import KVLayout, LayerGroup, LayoutError, Namespace
from kvkit.format.names import is_record, quantised_name
from kvkit.format.quantised import OPAQUE_ROW, check_quantisable
from kvkit.format.record import (
    HEADER,
    Damage,
    RecordError,
    RecordFormat,
    even_ranges,
    payload,
    read_header,
    seal,
    verify,
)
from kvkit.kernels.pages import reference
from kvkit.observe.inspect import list_store
from kvkit.tiers.quantised import QuantisedStore, dequantise, exact_bytes, quantise
from kvkit.tiers.settings import tier_at
from kvkit.tiers.stores import open_store

TOKENS = np.arange(32, dtype=np.int32)
KEY, OTHER = b"k" * 16, b"o" * 16
FORMS: dict[str, dict[str, Any]] = {
    "K and V": {"k_size": 16, "v_size": 12, "dtype": "bfloat16"},
    "halves": {"k_size": 16, "v_size": 16, "dtype": "float16"},
    "floats": {"k_size": 4, "v_size": 4, "dtype": "float32"},
    "latents": {"k_size": 48, "v_size": 0, "dtype": "bfloat16"},
    "opaque": {"k_size": 16, "v_size": 0, "dtype": "bfloat16", "page_bytes": 1024},
}


class Case:
    """A sealed record of some form, and what its floats are."""

    def __init__(self, kind: str) -> None:
        self.group = LayerGroup(layers=(0, 3), kv_heads=2, block_tokens=8, **FORMS[kind])
        layout = KVLayout((self.group,))
        space = Namespace("a model", layout.fingerprint(), self.group.dtype, chunk_tokens=32)
        self.form = RecordFormat.of(layout, 0, space)
        dtype = getattr(torch, self.group.dtype)
        size = self.group.chunk_bytes(32) // self.group.item_bytes
        self.floats = torch.randn(size, generator=torch.Generator().manual_seed(5)).to(dtype)
        self.record = np.zeros(self.form.record_bytes, np.uint8)
        payload(self.form, self.record)[:] = self.floats.view(torch.uint8).numpy()
        seal(self.form, self.record, self.form.digest, KEY, TOKENS)

    def narrow(self, precision: Any) -> npt.NDArray[np.uint8]:
        out = np.zeros(2 * self.form.record_bytes, np.uint8)
        return out[: quantise(self.record, precision, out)]

    def check(self, record: npt.NDArray[np.uint8]) -> Damage | None:
        return verify(self.form, record, self.form.digest, KEY, TOKENS)

    def expected(self, precision: str) -> torch.Tensor:
        """By the kernels' reference."""
        k, v = (OPAQUE_ROW, 0) if self.group.opaque else (self.group.k_size, self.group.v_size)
        rows = reference.quantise(self.floats.view(-1, k + v), k, precision)
        return reference.dequantise(rows, k, v, precision).to(self.floats.dtype).reshape(-1)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_what_comes_back_is_what_the_kernels_make_of_it(kind: str, precision: Any) -> None:
    case = Case(kind)
    small = case.narrow(precision)
    assert read_header(small).layers_end < case.form.layers_end
    assert exact_bytes(read_header(small)) == len(case.record)
    back = np.full(len(case.record), 0xA5, np.uint8)
    assert dequantise(small, precision, back) == len(back)
    assert case.check(back) is None
    found = torch.from_numpy(payload(case.form, back)).view(case.floats.dtype)
    assert torch.equal(found, case.expected(precision))
    assert not torch.equal(found, case.floats)
    again = np.zeros(len(case.record), np.uint8)
    assert again[: quantise(back, precision, again)].tobytes() == small.tobytes()  # nothing more is lost


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_no_form_is_taken_for_another(precision: Any) -> None:
    case = Case("K and V")
    small, other = case.narrow(precision), "int8" if precision == "fp8" else "fp8"
    out = np.full(len(case.record), 0xA5, np.uint8)
    assert case.check(small) == Damage.FORMAT
    assert dequantise(small, other, out) == Damage.FORMAT
    assert dequantise(case.record, precision, out) == Damage.FORMAT
    packed = np.zeros(len(small) * 2, np.uint8)
    assert dequantise(packed[: compress(small, "zstd", packed)], precision, out) == Damage.FORMAT
    assert bool((out == 0xA5).all())
    with pytest.raises(RecordError, match="does not fit"):
        quantise(case.record, precision, np.zeros(len(small) - 1, np.uint8))
    assert dequantise(small, precision, out[:-1]) == Damage.OVERSIZE


def test_every_byte_is_under_a_checksum() -> None:
    case = Case("opaque")
    small, out = case.narrow("int8"), np.zeros(len(case.record), np.uint8)
    for place in range(0, len(small), 97):
        harmed = small.copy()
        harmed[place] ^= 1
        assert dequantise(harmed, "int8", out) in tuple(Damage)
    for size in (0, 100, 4096, len(small) - 1):
        assert dequantise(small[:size], "int8", out) in tuple(Damage)


def test_a_forged_shape_is_damage() -> None:
    """Everything fits its checksums, but the channels are none that K and V have."""
    case = Case("K and V")
    for channels in (16, 17, 23):
        forged = case.narrow("fp8").copy()
        fields = np.frombuffer(forged, HEADER, 1)[0]
        size = 2 * 32 * channels
        fields["channels"] = channels
        header = int(fields["header_bytes"])
        places = even_ranges(header, size, 2)
        sums = [xxh3_64_intdigest(memoryview(forged)[a : a + n]) for a, n in places]
        room = np.zeros(len(case.record), np.uint8)
        room[: len(forged)] = forged
        stored = room[: finish(memoryview(room), "none", places, sums)]
        read_header(stored)
        assert dequantise(stored, "fp8", np.zeros(len(case.record), np.uint8)) == Damage.FORMAT


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "int8"}, "hold int8; want float32, float16, bfloat16"),
        ({"precision": "fp8"}, "hold fp8; want float32, float16, bfloat16"),
        ({"k_size": 2, "v_size": 2}, ": quantised, 4 bfloat16 channels take no less"),
        ({"page_bytes": 192}, "hold pages of 192 bytes; want a multiple of 128"),
    ],
)
def test_what_cannot_be_narrowed_is_refused(change: dict[str, Any], told: str) -> None:
    fields = {"layers": (2, 5), "kv_heads": 1, "k_size": 16, "v_size": 16, "dtype": "bfloat16"} | change
    with pytest.raises(LayoutError) as caught:
        check_quantisable(KVLayout((LayerGroup(**fields),)), {"near": None, "far": "int8"})
    assert str(caught.value).startswith("tier 'far': precision='int8': layers 2-5")
    assert told in str(caught.value)


def test_a_narrowed_name_is_a_record_s_and_its_own_inverse() -> None:
    exact = "ab12/0/c.1.2.0.0.0.0"
    assert quantised_name(exact, "fp8") == "ab12-fp8/0/c.1.2.0.0.0.0"
    for name in (exact, "ab12-fp8/0/c.1.2.0.0.0.0", "ab12-int8/0/c.1.2.0.0.0.0"):
        assert is_record(name)
        assert quantised_name(quantised_name(name, "fp8"), "fp8") == name
    assert not is_record("ab12-fp4/0/c.1.2.0.0.0.0")


def test_a_store_shows_narrowed_records_under_their_own_names(tmp_path: Path) -> None:
    case, url = Case("K and V"), str(tmp_path)
    store = open_store("a tier", url, tier_at(url))
    name, narrowed = case.form.name(KEY), quantised_name(case.form.name(KEY), "fp8")
    small = case.narrow("fp8")
    QuantisedStore(store, "fp8").write(name, memoryview(small))
    assert (store.size(name), store.size(narrowed)) == (None, len(small))
    assert dict(QuantisedStore(store, "fp8").scan()) == {name: len(small)}
    assert dict(QuantisedStore(store, "int8").scan()) == {narrowed: len(small)}
    store.write(name, memoryview(case.record))
    assert set(dict(QuantisedStore(store, "fp8").scan())) == {name, narrowed}
    store.write(quantised_name(case.form.name(OTHER), "int8"), memoryview(small))
    listed = {listing.array: listing for listing, done in list_store(url) if done}
    sound = [listing.array for listing in listed.values() if not listing.damaged]
    assert set(sound) == {case.form.array, quantised_name(case.form.array, "fp8")}
    assert len(listed) == 3
