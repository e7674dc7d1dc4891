"""Names of records: "<digest>/<group>/c.<high>.<low>.<layers>.<heads>.0.0" below any store's root.

The digest is the namespace's. The text before the last slash names a Zarr array; its zarr.json lies beside
its records. The rest holds the record's coordinates in the array: `high` and `low` are bits of its key,
`layers` and `heads` number the shard of the model's layers and heads that it holds. If a tier quantises, the
precision follows the digest: "<digest>-fp8/...".
"""

from __future__ import annotations

import re

HIGH_BITS, LOW_BITS = 16, 46
METADATA = "zarr.json"

SPACE, GROUP = "[0-9a-f]{1,64}(?:-fp8|-int8)?", "[0-9]{1,4}"
"""Patterns of namespace and group in an array's name; each is a folder if the store has folders."""

RECORD = rf"{SPACE}/{GROUP}/c\.[0-9]{{1,5}}\.[0-9]{{1,14}}\.[0-9]{{1,4}}\.[0-9]{{1,4}}\.0\.0"
"""Pattern (`re`) of a record's full name, at most 111 characters."""

_RECORD = re.compile(RECORD)
_FOLDER = re.compile(rf"{SPACE}(?:/{GROUP})?")


def is_record(name: str) -> bool:
    """Return whether `name` is the name of a record; scans skip all other objects."""
    return _RECORD.fullmatch(name) is not None


def is_folder(name: str) -> bool:
    """Return whether a folder of this name may contain records, at any depth."""
    return _FOLDER.fullmatch(name) is not None


def quantised_name(name: str, precision: str) -> str:
    """Convert the name of an exact record or array to its name at `precision`, and that name back.

    It is its own inverse, so exact and quantised records of one store stay apart. Returns names with another
    precision unchanged.
    """
    space, slash, rest = name.partition("/")
    digest, dash, marked_precision = space.partition("-")
    if dash and marked_precision != precision:
        return name
    return f"{digest}{slash}{rest}" if dash else f"{digest}-{precision}{slash}{rest}"


def exact_name(name: str, precision: str | None) -> str:
    """Return the exact name of a record or array that is quantised to `precision`."""
    return name.replace(f"-{precision}/", "/", 1)


def array_name(namespace: bytes, group: int) -> str:
    """Return the name of the array of layer group `group` in the namespace with this digest."""
    return f"{namespace[:16].hex()}/{group}"


def record_name(array: str, key: bytes, head_shard: int = 0, layer_shard: int = 0) -> str:
    """Return the name of the record of `key` in an array, at these coordinates on the head and layer axes."""
    high, low = coordinates(key)
    return f"{array}/c.{high}.{low}.{layer_shard}.{head_shard}.0.0"


def coordinates(key: bytes) -> tuple[int, int]:
    """Return the first two Zarr coordinates of `key`: its first 16 bits and the next 46, big-endian."""
    bits = int.from_bytes(key[:8], "big") >> (64 - HIGH_BITS - LOW_BITS)
    return bits >> LOW_BITS, bits & ((1 << LOW_BITS) - 1)
