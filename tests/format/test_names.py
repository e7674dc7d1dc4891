"""Record names follow from keys, and nothing else is recognised as a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.format.names import METADATA, array_name, coordinates, is_record, record_name

digests = st.binary(min_size=16, max_size=32)


@given(digests)
def test_coordinates_are_the_key_s_first_62_bits(key: bytes) -> None:
    high, low = coordinates(key)
    bits = "".join(f"{byte:08b}" for byte in key)
    assert f"{high:016b}{low:046b}" == bits[:62]


numbers = st.integers(0, 9999)


@given(digests, numbers, digests, numbers, numbers)
def test_every_name_is_recognised(namespace: bytes, group: int, key: bytes, heads: int, layers: int) -> None:
    high, low = coordinates(key)
    name = record_name(array_name(namespace, group), key, heads, layers)
    assert name == f"{namespace.hex()[:32]}/{group}/c.{high}.{low}.{layers}.{heads}.0.0"
    assert is_record(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        f"ab/0/{METADATA}",
        "ab/0/c.1.2.0.0.0",
        "ab/0/c.1.2.0.0.0.0.0",
        "ab/0/c.1.2.0.0.0.1",
        "ab/0/c.1.2.0.0.1.0",
        "ab/0/c.1.2.0.10000.0.0",
        "ab/0/c.1.2.10000.0.0.0",
        "ab/0/c.1.2.0.0.0.0\n",
        "ab/0/c.-1.2.0.0.0.0",
        "ab/0/c.100000.2.0.0.0.0",
        "AB/0/c.1.2.0.0.0.0",
        "../0/c.1.2.0.0.0.0",
        "ab/0/../0/c.1.2.0.0.0.0",
        f"{'a' * 65}/0/c.1.2.0.0.0.0",
        "ab/0/c.1.2.0.0.0.0/x",
        "ab/0/c.\u0661.2.0.0.0.0",
    ],
)
def test_nothing_else_is_a_record(name: str) -> None:
    assert not is_record(name)
