"""What a store holds: its namespaces, chunks, tokens and bytes, and which records are damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec

from kvkit import record
from kvkit.record import Damage, RecordError
from kvkit.tiers.urls import shown

_RECORD = re.compile(r"c(\.[0-9]+){6}")


@dataclass(slots=True)
class ArrayListing:
    """The records of one namespace and layer group.

    Attributes:
        array: "<namespace digest, hex>/<group index>".
        namespace: the fields that its zarr.json shows; empty without one.
        chunk_tokens: tokens per chunk, as the records say; 0 if none can be read.
        chunks, bytes: records found, and their bytes.
        damaged: object name and what is wrong with it.
    """

    array: str
    namespace: dict[str, Any]
    chunk_tokens: int = 0
    chunks: int = 0
    bytes: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens in undamaged chunks."""
        return (self.chunks - len(self.damaged)) * self.chunk_tokens


def list_store(url: str) -> Iterator[tuple[ArrayListing, bool]]:
    """Read and verify every record below `url` (any fsspec URL); changes nothing.

    Yields (listing so far, whether its array is done) after every record, so that progress can be shown.

    Raises:
        FileNotFoundError: there is nothing at `url`.
        ValueError: fsspec does not know the URL's protocol.
    """
    fs, root = fsspec.core.url_to_fs(url)
    if not fs.exists(root):
        raise FileNotFoundError(f"{shown(url)}: no such store")
    arrays: dict[str, list[str]] = {}
    for path in sorted(fs.find(root)):
        name = path[len(root) :].lstrip("/")
        array, _, base = name.rpartition("/")
        if _RECORD.fullmatch(base):
            arrays.setdefault(array, []).append(name)
    for array, names in arrays.items():
        listing = ArrayListing(array, _namespace(fs, f"{root}/{array}/zarr.json"))
        for name in names:
            try:
                data = fs.cat_file(f"{root}/{name}")
            except FileNotFoundError:  # the store is in use: a record was let go since it was found
                continue
            _add(listing, name, f"{root}/{name}", data)
            yield listing, False
        yield listing, True


def _add(listing: ArrayListing, name: str, path: str, data: bytes) -> None:
    listing.chunks += 1
    listing.bytes += len(data)
    try:
        header = record.read_header(data)
        damage = record.check(data)
    except RecordError as error:
        listing.damaged.append((name, str(error)))
        return
    listing.chunk_tokens = header.chunk_tokens
    high, low = record.coordinates(header.key)
    if damage is None and not path.endswith(f"/c.{high}.{low}.0.0.0.0"):
        damage = Damage.KEY
    array, _, _ = path.rpartition("/")
    if damage is None and not array.endswith(f"/{header.namespace[:16].hex()}/{header.group}"):
        damage = Damage.NAMESPACE
    if damage is not None:
        listing.damaged.append((name, damage.value))


def _namespace(fs: Any, path: str) -> dict[str, Any]:
    try:
        found = json.loads(fs.cat_file(path))["attributes"]["kvkit"]["namespace"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
