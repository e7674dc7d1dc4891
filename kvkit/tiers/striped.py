"""Several disks as one store, with each object striped over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from kvkit.format.record import ALIGN, Damage
from kvkit.tiers.base import DamagedObject, ObjectStore, Ranges, too_large


class StripedStore:
    """A store for `ObjectTier` that cuts objects into equal parts of whole pages, one per store.

    Thread-safe. The first part is written last: an object exists if its first part does. An object with an
    unreadable part is a miss, and one that lacks a part is damaged. One thread moves the parts of an object
    one after another, so a tier needs threads for every store. Zarr readers see parts, not records.
    """

    def __init__(self, stores: Sequence[ObjectStore]) -> None:
        self._stores = tuple(stores)

    def size(self, name: str) -> int | None:
        first = self._stores[0].size(name)
        return None if first is None else first + sum(store.size(name) or 0 for store in self._stores[1:])

    def read(self, name: str, buffer: memoryview) -> int:
        total = self._total(name)
        if total > len(buffer):
            raise too_large(name, total, len(buffer))
        part_ranges = parts(total, len(self._stores))
        with self._translate_missing_part(name):
            return sum(
                store.read(name, buffer[start:stop])
                for store, (start, stop) in zip(self._stores, part_ranges, strict=True)
            )

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        part_ranges = parts(self._total(name), len(self._stores))
        if any(offset + size > part_ranges[-1][1] for offset, size in ranges):
            raise DamagedObject(f"{name} ends at {part_ranges[-1][1]}, before {ranges}", Damage.TRUNCATED)
        for store, (start, stop) in zip(self._stores, part_ranges, strict=True):
            store_ranges: list[tuple[int, int]] = []
            targets: list[memoryview] = []
            for (offset, size), buffer in zip(ranges, buffers, strict=True):
                low, high = max(offset, start), min(offset + size, stop)
                if low < high:
                    store_ranges.append((low - start, high - low))
                    targets.append(buffer[low - offset : high - offset])
            if store_ranges:
                with self._translate_missing_part(name):
                    store.read_ranges(name, store_ranges, targets)

    def write(self, name: str, data: memoryview) -> None:
        moves = list(zip(self._stores, parts(len(data), len(self._stores)), strict=True))
        try:
            for store, (start, stop) in reversed(moves):
                store.write(name, data[start:stop])
        except BaseException:
            for store, _ in moves:
                with suppress(OSError):
                    store.delete(name)
            raise

    def delete(self, name: str) -> None:
        with ExitStack() as deletions:  # an error does not stop the other deletions
            for store in reversed(self._stores):
                deletions.callback(store.delete, name)

    def scan(self) -> Iterator[tuple[str, int]]:
        other_sizes = [dict(store.scan()) for store in self._stores[1:]]
        for name, size in self._stores[0].scan():
            yield name, size + sum(sizes.get(name, 0) for sizes in other_sizes)

    @contextmanager
    def _translate_missing_part(self, name: str) -> Iterator[None]:
        """Raise DamagedObject for an object that lacks a part, so that the cache deletes the rest of it.

        Raises:
            DamagedObject: the object lacks a part.
            FileNotFoundError: the whole object is missing.
        """
        try:
            yield
        except FileNotFoundError as error:
            if self._stores[0].size(name) is None:
                raise
            raise DamagedObject(f"{name}: a part of it is missing", Damage.TRUNCATED) from error

    def _total(self, name: str) -> int:
        """Return the bytes of all parts of an object.

        Raises:
            FileNotFoundError: the object is missing.
        """
        total = self.size(name)
        if total is None:
            raise FileNotFoundError(f"{name} is missing")
        return total


def parts(size: int, count: int) -> list[tuple[int, int]]:
    """Return (start, end) of each of `count` parts of an object: equal whole pages, except the last parts."""
    step = -(-size // (count * ALIGN)) * ALIGN
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(count)]
