"""The tier of objects in stores: folders, buckets, or other stores that `kvkit.tiers.stores` opens."""

from __future__ import annotations

import logging
import mmap
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from kvkit.format import arrays
from kvkit.format.codecs import compress, decompress
from kvkit.format.layout import LayoutError
from kvkit.format.names import METADATA
from kvkit.format.record import (
    HEADER,
    Damage,
    RecordError,
    is_compressed,
    parent_name,
    read_header,
)
from kvkit.format.urls import shown
from kvkit.staging import Lease, Staging
from kvkit.tiers.base import (
    DamagedObject,
    HeldListener,
    ObjectStore,
    Ranges,
    ThreadedTier,
    TierError,
    UnreadableObject,
    copy_ranges,
    default_threads,
)
from kvkit.tiers.folder import Access, Folder
from kvkit.tiers.quantised import QuantisedStore, dequantise, exact_bytes, quantise
from kvkit.tiers.settings import TierConfig, tier_at
from kvkit.tiers.store_index import StoreIndex
from kvkit.tiers.stores import open_store
from kvkit.tiers.striped import StripedStore
from kvkit.workers import Closed

log = logging.getLogger(__name__)

_PARALLEL_REQUESTS = 16
"""Default threads per remote store: they wait for the network, not for a disk."""


class ObjectTier(ThreadedTier):
    """Records in a folder or an object store, which other processes may use at the same time.

    An index of the records is built by one scan at the start. A lookup then asks the store for names that the
    index lacks. A tier on a store that cannot be listed or written still opens: reads are tried, and puts
    complete with the error.

    Args:
        config: settings, or the URL alone. With several URLs, each record is striped over all of them
            (`kvkit.tiers.striped`), and the smallest capacity applies to each.

    Raises:
        ValueError: a setting is invalid; the message names the choices.
    """

    reports_evictions = True

    def __init__(self, config: TierConfig | str, name: str = "disk") -> None:
        if isinstance(config, str):
            config = tier_at(config)
        stores = [open_store(name, url, config) for url in config.urls]
        for folder in stores:
            if isinstance(folder, Folder):
                _clean(name, folder, config.access)
        store: ObjectStore = stores[0] if len(stores) == 1 else StripedStore(stores)
        self._store = store if config.precision is None else QuantisedStore(store, config.precision)
        is_local = isinstance(stores[0], Folder)
        threads = config.threads or (default_threads() if is_local else _PARALLEL_REQUESTS) * len(stores)
        self._parallel_lookups = 1 if is_local else threads
        super().__init__(name, threads)
        self.scope = config.scope
        self.codec, self.precision = config.codec, config.precision
        self.reads_ranges = self.codec == "none" and self.precision is None  # objects equal their slots
        self._buffers = threading.local()
        capacities = [capacity for capacity in config.capacities if capacity is not None]
        capacity = min(capacities) * len(stores) if capacities else None
        self._index = StoreIndex(name, self._store, capacity, config.eviction, config.quota)
        try:
            self._index.note(self._store.scan())
        except OSError as error:
            log.warning("tier %r: %s cannot be listed: %s", name, ", ".join(map(shown, config.urls)), error)

    @property
    def evicted(self) -> int:  # type: ignore[override]
        """Number of records evicted so far."""
        return self._index.evicted

    @classmethod
    def open(cls, name: str, config: TierConfig, staging: Staging) -> ObjectTier:
        return cls(config, name)

    def match_prefix(self, names: Sequence[str]) -> int:
        count, batch_size = 0, 1
        while True:
            count = self._index.extend_run(names, count)
            # a lookup in a remote store costs a round trip: after the first hit, several run in parallel
            batch = names[count : count + batch_size]
            sizes = self._sizes(batch, first=count == 0)
            held = next((i for i, size in enumerate(sizes) if size is None), len(sizes))
            self._index.note((name, size or 0) for name, size in zip(batch[:held], sizes, strict=False))
            count += held
            if not batch or held < len(batch):
                break
            batch_size = self._parallel_lookups
        return self._index.use_run(names[:count])

    def subscribe(self, held_listener: HeldListener) -> bool:
        self._index.subscribe(held_listener)
        if self.scope != "node":
            return False
        self._index.report_all()
        return True

    def _sizes(self, names: Sequence[str], first: bool) -> list[int | None]:
        """Return `_size_or_none` of each object, with parallel requests."""
        size_of = partial(self._size_or_none, first)
        if len(names) < 2:
            return [size_of(name) for name in names]
        try:
            futures = [self._workers.submit(partial(size_of, name), urgent=True) for name in names]
        except Closed as error:
            raise TierError(f"tier {self.name!r} is closed") from error
        return [future.result() for future in futures]

    def _size_or_none(self, first: bool, name: str) -> int | None:
        """Return the bytes of an object; None if it is missing, or damaged and so may be replaced.

        Args:
            first: True if a lookup begins with this name, so that its result depends on the answer alone.

        Raises:
            UnreadableObject: with `first`, the object cannot be read.
        """
        try:
            return self._store.size(name)
        except DamagedObject as error:
            if first and isinstance(error, UnreadableObject):
                raise
            log.debug("tier %r: %s", self.name, error)
            return None

    def read(self, name: str, buffer: memoryview) -> int:
        with self._index.forget_if_missing(name):
            return self._store.read(name, buffer)

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        if self.reads_ranges and name not in self._index.compressed:
            try:
                with self._index.forget_if_missing(name):
                    self._store.read_ranges(name, ranges, buffers)
            except DamagedObject as error:
                if error.damage is not Damage.TRUNCATED or not self._is_stored_compressed(name):
                    raise
            else:
                heads = [b[:size] for (offset, size), b in zip(ranges, buffers, strict=True) if offset == 0]
                if not any(is_compressed(head) for head in heads):
                    return
            self._index.compressed.add(name)  # the tier had a codec when it was written
        with self._index.forget_if_missing(name):
            size = self._store.size(name)
            if size is None:
                raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
        if size > _packed_bytes(self.largest):
            raise DamagedObject(f"{name}: {size} bytes exceed a record of {self.largest}", Damage.OVERSIZE)
        packed = self._scratch(size)[:size]
        packed = packed[: self.read(name, packed)]
        copy_ranges(name, self._restored(name, packed), ranges, buffers)

    def _is_stored_compressed(self, name: str) -> bool:
        head = memoryview(bytearray(HEADER.itemsize))
        try:
            self._store.read_ranges(name, [(0, len(head))], [head])
        except OSError:
            return False
        return is_compressed(head)

    def _restored(self, name: str, packed: memoryview) -> memoryview:
        """Return the record that `packed` was compressed or quantised from.

        Raises:
            DamagedObject: `packed` is damaged.
        """
        try:
            header = read_header(packed)
            size = header.plain_bytes if self.precision is None else exact_bytes(header)
        except (RecordError, LayoutError):
            size = 0
        record = memoryview(bytearray(min(size, self.largest)))
        self._unpack(name, packed, record)
        return record

    def _unpack(self, name: str, packed: memoryview, target: memoryview) -> int:
        """Decompress and dequantise `packed` into `target`; return the record's bytes. Mutates `target`.

        Raises:
            DamagedObject: `packed` is damaged.
        """
        restored: Damage | int = Damage.FORMAT
        if self.precision is None:
            restored = decompress(packed, target)
        elif not is_compressed(packed):
            restored = dequantise(packed, self.precision, target)
        else:
            quantised = self._scratch(len(target), "quantised")
            restored = decompress(packed, quantised)
            if not isinstance(restored, Damage):
                restored = dequantise(quantised[:restored], self.precision, target)
        if isinstance(restored, Damage):
            raise DamagedObject(f"tier {self.name!r}: {name} is damaged ({restored})", restored)
        return restored

    def write(self, name: str, record: memoryview) -> None:
        size = self._size_or_none(False, name)
        if size is not None:
            self._index.note([(name, size)])
            return
        with self._index.reserved(name, len(record), parent_name(record, name), self.largest):
            self._store.write(name, record)

    def delete(self, names: Sequence[str]) -> None:
        with ExitStack() as deletions:  # an error does not stop the other deletions
            for name in reversed(names):
                deletions.callback(self._delete, name)

    def _delete(self, name: str) -> None:
        with self._index.missing_of((name,)) as missing:
            self._store.delete(name)
            self._index.forget(missing)

    def _put_one(self, name: str, lease: Lease) -> None:
        if self.reads_ranges or self._size_or_none(False, name) is not None:
            super()._put_one(name, lease)
            return
        record = lease.buffer[: lease.used]
        if self.precision is not None:
            quantised = self._scratch(len(lease.buffer), "quantised")
            record = quantised[: quantise(record, self.precision, quantised)]
        if self.codec != "none":
            packed = self._scratch(len(lease.buffer))
            record = packed[: compress(record, self.codec, packed)]
        self.write(name, record)

    def _get_one(self, name: str, lease: Lease) -> None:
        if self.reads_ranges:
            super()._get_one(name, lease)
            if not is_compressed(lease.buffer[: lease.used]):
                return
            packed = self._scratch(lease.used)[: lease.used]  # the tier had a codec when it was written
            packed[:] = lease.buffer[: lease.used]
        else:
            scratch = self._scratch(len(lease.buffer))
            packed = scratch[: self.read(name, scratch)]
        lease.used = self._unpack(name, packed, lease.buffer)

    def _scratch(self, size: int, purpose: str = "packed") -> memoryview:
        """Return this thread's buffer for `purpose`, which fits a record of `size` bytes, packed or not."""
        needed = _packed_bytes(size)
        buffer: memoryview | None = getattr(self._buffers, purpose, None)
        if buffer is None or len(buffer) < needed:
            buffer = memoryview(mmap.mmap(-1, needed))  # page-aligned, for O_DIRECT
            setattr(self._buffers, purpose, buffer)
        return buffer

    def size(self, name: str) -> int | None:
        return self._store.size(name)

    def scan(self) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every record; at the end, forget records that other processes deleted."""
        with self._index.missing_of(self._index.names()) as missing:
            for name, size in self._store.scan():
                missing.discard(name)
                yield name, size
            self._index.forget(missing)

    def describe(self, array: str, metadata: bytes) -> None:
        """Store `metadata` as the zarr.json of `array`, unless there is a valid one.

        A valid one stays, with a warning if it differs; a damaged one is replaced.
        """
        name = f"{array}/{METADATA}"
        try:
            stored = self._metadata(name)
            differs = stored is not None and stored != metadata
            if differs and (fields := arrays.differences(stored or b"", metadata)):
                log.warning(
                    "tier %r: %s differs in %s from the metadata of the records that this cache stores: Zarr "
                    "readers will misread either these or the older ones",
                    *(self.name, name, ", ".join(fields)),
                )
        except (DamagedObject, arrays.MetadataError) as error:
            log.warning("tier %r: %s is damaged, replacing it: %s", self.name, name, error)
            self._store.delete(name)
            stored = None
        if stored is None:
            self._store.write(name, memoryview(metadata))

    def _metadata(self, name: str) -> bytes | None:
        """Return the zarr.json at `name`; None if it is missing."""
        size = self._store.size(name)
        if size is None:
            return None
        buffer = bytearray(min(size, arrays.MAX_METADATA_BYTES))
        return bytes(buffer[: self._store.read(name, memoryview(buffer))])

    def pin(self, names: Sequence[str], seconds: float) -> int:
        return self._index.pin(names, seconds)

    def prioritise(self, names: Sequence[str], priority: int) -> None:
        self._index.prioritise(names, priority)

    @property
    def learns(self) -> bool:  # type: ignore[override]
        """True if its eviction policy learns from requests."""
        return self._index.policy.learns

    def note_request(self, names: Sequence[str]) -> None:
        self._index.note_request(names)

    def note_answer(self, names: Sequence[str], tool_call: bool) -> None:
        self._index.note_answer(names, tool_call)


def _packed_bytes(size: int) -> int:
    """Return the maximum bytes of a compressed record of `size`: incompressible data grows a little."""
    return size + size // 8 + (1 << 20)


def _clean(tier: str, folder: Folder, access: Access) -> None:
    """Remove files that killed writers left in a folder, and warn if it is open to too many users."""
    folder.clean()
    too_open = folder.too_open_namespaces()
    if too_open:
        log.warning(
            "tier %r: %s: %d of its namespaces, such as %s, are open to more users than access=%r permits; "
            "to close them: chmod -R %s= %s",
            *(tier, folder.root, len(too_open), too_open[0], access),
            *("go" if access == "user" else "o", shlex.quote(folder.root)),
        )
