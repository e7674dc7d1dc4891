"""The contents of a store: its namespaces, chunks, tokens, bytes and damaged records.

Stores are read as tiers read them, so every store that a cache can use can be listed. Records are read
in pieces, so memory stays bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvkit.format import arrays, record
from kvkit.format.arrays import MAX_METADATA_BYTES, MetadataError
from kvkit.format.names import METADATA, array_name, exact_name, record_name
from kvkit.format.record import ALIGN, PIECE_BYTES, Damage, RecordError
from kvkit.format.urls import shown
from kvkit.observe.progress import Report
from kvkit.staging import Staging
from kvkit.tiers.base import DamagedObject, ObjectStore, Ranges, TierError
from kvkit.tiers.folder import Folder
from kvkit.tiers.registry import TIERS, kind_of
from kvkit.tiers.settings import TierConfig, open_tier, tier_at
from kvkit.tiers.shm.file import capacity_at, pool_path
from kvkit.tiers.stores import open_store
from kvkit.tiers.striped import StripedStore


@dataclass(slots=True)
class ArrayListing:
    """The records of one namespace and layer group.

    Attributes:
        array: "<namespace digest, hex>/<group index>".
        namespace: fields in its zarr.json, which are not verified; empty without a zarr.json.
        chunk_tokens: tokens per chunk according to the records; 0 if none can be read.
        chunks, bytes: number of chunks with records, and bytes of all records.
        damaged: object name and damage of each damaged record.
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
        return (self.chunks - len({_chunk(name) for name, _ in self.damaged})) * self.chunk_tokens


def listing_json(listing: ArrayListing) -> dict[str, Any]:
    """Describe a listing in plain numbers and texts, for JSON."""
    digest, _, group = listing.array.rpartition("/")
    return {
        "namespace": digest,
        "group": group,
        "fields": listing.namespace,
        "chunk_tokens": listing.chunk_tokens,
        "chunks": listing.chunks,
        "tokens": listing.tokens,
        "bytes": listing.bytes,
        "damaged": [{"record": name, "reason": reason} for name, reason in listing.damaged],
    }


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as a store lists it; `written` in seconds since 1970, None if the store does not report it."""

    name: str
    bytes: int
    written: float | None

    @property
    def array(self) -> str:
        """Name of its array, as in `ArrayListing`."""
        return self.name.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Access to objects in their stored form, compressed or not."""

    scan: Callable[[], Iterator[tuple[str, int]]]
    size: Callable[[str], int | None]
    read: Callable[[str, Ranges, Sequence[memoryview]], None]
    folder: str | None = None  # in which each object is a file of its name


def list_store(url: str, report: Report = lambda text: None) -> Iterator[tuple[ArrayListing, bool]]:
    """List the store at `url`, which may be any `url` of a tier, as `list_tier` does."""
    return list_tier(shown(url), tier_of(url), report)


def tier_of(url: str) -> TierConfig:
    """Return the settings with which the store at `url` can be read."""
    if kind_of(url) is TIERS["shm"]:
        return TierConfig.model_validate({"url": url, "capacity": capacity_at(pool_path(url))})
    return tier_at(url)


def list_records(name: str, config: TierConfig) -> Iterator[StoredRecord]:
    """Yield the records of a tier without reading them. Raises what `list_tier` raises."""
    with _opened(name, config) as stores:
        for store in stores:
            for object_name, size in store.scan():
                written = None
                if store.folder is not None:
                    with suppress(OSError):  # it was removed in the meantime
                        written = os.stat(os.path.join(store.folder, object_name)).st_mtime
                yield StoredRecord(object_name, size, written)


def list_tier(
    name: str, config: TierConfig, report: Report = lambda text: None
) -> Iterator[tuple[ArrayListing, bool]]:
    """Read and verify every record of a tier, on all of its paths; change nothing.

    Args:
        report: function that takes a line for every record found, before the first is read.

    Yields:
        The listing so far, and whether its array is done: after every record, to show progress.

    Raises:
        FileNotFoundError: the tier's folder or pool does not exist.
        OSError: the store cannot be read.
        ValueError: a setting is invalid, a package is missing, or the tier is in a process's memory.
    """
    with _opened(name, config) as stores:
        arrays_found: dict[str, list[tuple[str, int, _Stored]]] = {}
        for store in stores:
            for object_name, size in store.scan():
                arrays_found.setdefault(object_name.rpartition("/")[0], []).append((object_name, size, store))
                report(f"listing {object_name}")
        for array, records in sorted(arrays_found.items()):
            records.sort(key=lambda entry: entry[0])
            listing = ArrayListing(array, _read_namespace(records[0][2], f"{array}/{METADATA}"))
            last = ""
            for object_name, size, store in records:
                if _add_record(listing, object_name, size, store):
                    listing.chunks += last != _chunk(object_name)
                    last = _chunk(object_name)
                    yield listing, False
            yield listing, True


@contextmanager
def _opened(name: str, config: TierConfig) -> Iterator[list[_Stored]]:
    """Open the stores of a tier as the configuration does, but clean nothing."""
    if config.in_memory:
        raise ValueError(f"tier {name!r} keeps its records in the memory of its process")
    if config.in_stores:
        stores, urls = [_store(name, url, config) for url in config.urls], list(map(shown, config.urls))
        if config.spread == "stripe":
            stores, urls = [StripedStore(stores)], [", ".join(urls)]
        roots = [str(store.root) if isinstance(store, Folder) else None for store in stores]
        yield [
            _Stored(partial(_scan, url, store), store.size, store.read_ranges, root)
            for url, store, root in zip(urls, stores, roots, strict=True)
        ]
        return
    for url in config.urls:
        if kind_of(url) is TIERS["shm"] and not os.path.exists(pool_path(url)):
            raise FileNotFoundError(f"{url}: no such pool")
    with closing(Staging(ALIGN, 1)) as staging, closing(open_tier(name, config, staging)) as tier:
        yield [_Stored(tier.scan, tier.size, tier.get_ranges)]


def _store(name: str, url: str, config: TierConfig) -> ObjectStore:
    store = open_store(name, url, config)
    if isinstance(store, Folder) and not os.path.isdir(store.root):
        raise FileNotFoundError(f"{shown(url)}: no such store")
    return store


def _scan(url: str, store: ObjectStore) -> Iterator[tuple[str, int]]:
    """Yield the records of the store at `url`; errors name the URL."""
    try:
        yield from store.scan()
    except OSError as error:
        raise TierError(f"{url} cannot be listed: {error}") from error


class _RecordReader:
    """A reader of one record in pieces, for `record.examine`. Keeps the last piece."""

    def __init__(self, store: _Stored, name: str, size: int) -> None:
        self._store, self._name, self._size = store, name, size
        self._start, self._piece = 0, memoryview(b"")

    def read(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes of the record from `offset` on."""
        if offset < self._start or offset + size > self._start + len(self._piece):
            self._start = offset
            self._piece = memoryview(bytearray(min(max(size, PIECE_BYTES), self._size - offset)))
            self._store.read(self._name, [(offset, len(self._piece))], [self._piece])
        return self._piece[offset - self._start :][:size]


def _add_record(listing: ArrayListing, name: str, size: int, store: _Stored) -> bool:
    """Count and verify a record; return False if it was removed meanwhile, as the store is in use."""
    reason: object = ""
    try:
        header, _, damage = record.examine(_RecordReader(store, name, size).read, size)
    except FileNotFoundError:
        return False
    except DamagedObject as error:
        reason = error.damage
    except RecordError as error:
        reason = error
    else:
        listing.chunk_tokens = header.chunk_tokens
        if damage is not None:
            reason = damage
        elif name != record_name(listing.array, header.key, header.head_shard, header.layer_shard):
            reason = Damage.KEY
        elif exact_name(listing.array, header.precision) != array_name(header.namespace, header.group):
            reason = Damage.NAMESPACE
    listing.bytes += size
    if reason:
        listing.damaged.append((name, str(reason)))
    return True


def _chunk(name: str) -> str:
    """Return the part of a record's name that all records of its chunk share."""
    return name.rsplit(".", 4)[0]


def _read_namespace(store: _Stored, name: str) -> dict[str, Any]:
    try:
        size = store.size(name)
        if size is None or not 0 < size <= MAX_METADATA_BYTES:
            return {}
        raw = bytearray(size)
        store.read(name, [(0, size)], [memoryview(raw)])
        namespace = arrays.read(bytes(raw))["attributes"]["kvkit"]["namespace"]
    except (OSError, MetadataError, KeyError, TypeError):
        return {}
    return namespace if isinstance(namespace, dict) else {}
