"""What records are called: "<namespace digest>/<group>/c.<high>.<low>.0.0.0.0" below the root of any store.

The part before the last slash names a Zarr array, whose zarr.json lies beside its records; `high` and `low`
are the first two coordinates in it, and bits of the record's key.
"""

from __future__ import annotations

import re

HIGH_BITS, LOW_BITS = 16, 46
METADATA = "zarr.json"

SPACE, GROUP = "[0-9a-f]{1,64}", "[0-9]{1,4}"
"""The parts of an array's name: each is a folder where a store has folders."""

RECORD = rf"{SPACE}/{GROUP}/c\.[0-9]{{1,5}}\.[0-9]{{1,14}}\.0\.0\.0\.0"
"""A whole name, in the syntax of `re`; 100 characters at most."""

_RECORD = re.compile(RECORD)


def is_record(name: str) -> bool:
    """Whether `name` is a record's: a scan passes over what is not kvkit's."""
    return _RECORD.fullmatch(name) is not None


def array_name(namespace: bytes, group: int) -> str:
    """The array of a layer group, by its index, in the namespace of this digest."""
    return f"{namespace[:16].hex()}/{group}"


def record_name(array: str, key: bytes) -> str:
    """The record of `key` in an array."""
    high, low = coordinates(key)
    return f"{array}/c.{high}.{low}.0.0.0.0"


def coordinates(key: bytes) -> tuple[int, int]:
    """The first two Zarr coordinates of `key`: its first 16 bits and the next 46, big-endian."""
    bits = int.from_bytes(key[:8], "big") >> (64 - HIGH_BITS - LOW_BITS)
    return bits >> LOW_BITS, bits & ((1 << LOW_BITS) - 1)
