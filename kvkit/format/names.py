"""What records are called: "<digest>/<group>/c.<high>.<low>.<layers>.<heads>.0.0" below any store's root.

The digest is the namespace's. The part before the last slash names a Zarr array, whose zarr.json lies beside
its records; `high` and `low` are the first two coordinates in it, and bits of the record's key; `layers` and
`heads` are those on the axes of these: which part of the model's layers and heads the record holds. Where a
tier keeps fewer bits, the digest is followed by which: "<digest>-fp8/...".
"""

from __future__ import annotations

import re

HIGH_BITS, LOW_BITS = 16, 46
METADATA = "zarr.json"

SPACE, GROUP = "[0-9a-f]{1,64}(?:-fp8|-int8)?", "[0-9]{1,4}"
"""The parts of an array's name: each is a folder where a store has folders."""

RECORD = rf"{SPACE}/{GROUP}/c\.[0-9]{{1,5}}\.[0-9]{{1,14}}\.[0-9]{{1,4}}\.[0-9]{{1,4}}\.0\.0"
"""A whole name, in the syntax of `re`; 111 characters at most."""

_RECORD = re.compile(RECORD)
_FOLDER = re.compile(rf"{SPACE}(?:/{GROUP})?")


def is_record(name: str) -> bool:
    """Whether `name` is a record's: a scan passes over what is not kvkit's."""
    return _RECORD.fullmatch(name) is not None


def is_folder(name: str) -> bool:
    """Tell whether a folder of this name may have records in it, at any depth."""
    return _FOLDER.fullmatch(name) is not None


def narrowed_name(name: str, precision: str) -> str:
    """Of a record or an array, what it is called with `precision`'s fewer bits; and of that, the name again.

    Its own inverse, so that it tells what a store holds in either form apart.
    """
    space, slash, rest = name.partition("/")
    digest, marked, other = space.partition("-")
    if marked and other != precision:
        return name
    return f"{digest}{slash}{rest}" if marked else f"{digest}-{precision}{slash}{rest}"


def exact_name(name: str, precision: str | None) -> str:
    """What a record or an array that is narrowed to this precision is called where it is not."""
    return name.replace(f"-{precision}/", "/", 1)


def array_name(namespace: bytes, group: int) -> str:
    """The array of a layer group, by its index, in the namespace of this digest."""
    return f"{namespace[:16].hex()}/{group}"


def record_name(array: str, key: bytes, place: int = 0, layer_place: int = 0) -> str:
    """The record of `key` in an array, at this place on the head axis, and on the layer axis."""
    high, low = coordinates(key)
    return f"{array}/c.{high}.{low}.{layer_place}.{place}.0.0"


def coordinates(key: bytes) -> tuple[int, int]:
    """The first two Zarr coordinates of `key`: its first 16 bits and the next 46, big-endian."""
    bits = int.from_bytes(key[:8], "big") >> (64 - HIGH_BITS - LOW_BITS)
    return bits >> LOW_BITS, bits & ((1 << LOW_BITS) - 1)
