"""Several disks as one store, each object striped over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from kvkit.format.record import ALIGN, Damage
from kvkit.tiers.base import DamagedObject, ObjectStore, Ranges, too_large


class StripedStore:
    """Objects cut into equal parts, whole pages each, one per store; a store for `ObjectTier`. Thread-safe.

    The first part is written last: an object is there when that one is. A part that cannot be read makes the
    object a miss, and one that is missing makes it damaged. One thread moves the parts of an object in turn,
    so a tier needs threads for every store. Zarr readers see parts, not records.
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
        places = parts(total, len(self._stores))
        with self._blaming(name):
            return sum(
                store.read(name, buffer[start:stop])
                for store, (start, stop) in zip(self._stores, places, strict=True)
            )

    def read_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        places = parts(self._total(name), len(self._stores))
        if any(offset + size > places[-1][1] for offset, size in ranges):
            raise DamagedObject(f"{name} ends at {places[-1][1]}, before {ranges}", Damage.TRUNCATED)
        for store, (start, stop) in zip(self._stores, places, strict=True):
            mine: list[tuple[int, int]] = []
            targets: list[memoryview] = []
            for (offset, size), buffer in zip(ranges, buffers, strict=True):
                low, high = max(offset, start), min(offset + size, stop)
                if low < high:
                    mine.append((low - start, high - low))
                    targets.append(buffer[low - offset : high - offset])
            if mine:
                with self._blaming(name):
                    store.read_ranges(name, mine, targets)

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
        with ExitStack() as others:  # one that fails does not keep the others from it
            for store in reversed(self._stores):
                others.callback(store.delete, name)

    def scan(self) -> Iterator[tuple[str, int]]:
        others = [dict(store.scan()) for store in self._stores[1:]]
        for name, size in self._stores[0].scan():
            yield name, size + sum(other.get(name, 0) for other in others)

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Tell an object that lacks a part, which would be held for good, from one that is gone.

        Raises:
            DamagedObject: it lacks a part.
        """
        try:
            yield
        except FileNotFoundError as error:
            if self._stores[0].size(name) is None:
                raise
            raise DamagedObject(f"{name}: a part of it is missing", Damage.TRUNCATED) from error

    def _total(self, name: str) -> int:
        total = self.size(name)
        if total is None:
            raise FileNotFoundError(f"{name} is missing")
        return total


def parts(size: int, count: int) -> list[tuple[int, int]]:
    """Where each part of an object begins and ends: equal ones, whole pages but for the last."""
    step = -(-size // (count * ALIGN)) * ALIGN
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(count)]
