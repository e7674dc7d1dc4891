"""Which of LMCache's objects the tiers hold, as these report it: LMCache counts bytes and evicts by that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache.v1.distributed.api import ObjectKey

Told = Callable[[list[ObjectKey], list[int]], None]
"""Called with objects' keys and bytes, maybe with a tier's lock: it must not call the tiers."""


@dataclass(slots=True, eq=False)
class _Object:
    key: ObjectKey
    size: int
    tiers: set[str] = field(default_factory=set)
    told: bool = False


class HeldObjects:
    """Objects whose records are held, by the record's name. Thread-safe.

    Args:
        on_stored: called with objects that a tier holds, and none held before.
        on_deleted: called with objects that the last tier has evicted or deleted.
    """

    def __init__(self, on_stored: Told, on_deleted: Told) -> None:
        self._on_stored, self._on_deleted = on_stored, on_deleted
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}

    def expect(self, records: Sequence[str], keys: Sequence[ObjectKey], size: int) -> None:
        """Name the objects of records that are about to be stored; `settle` follows."""
        with self._lock:
            for record, key in zip(records, keys, strict=True):
                self._objects.setdefault(record, _Object(key, size))

    def settle(self, records: Sequence[str]) -> None:
        """Forget the objects of those records that no tier has reported."""
        with self._lock:
            for record in records:
                if (object := self._objects.get(record)) is not None and not object.told:
                    del self._objects[record]

    def found(self, records: Sequence[str], keys: Sequence[ObjectKey], size: int) -> None:
        """Name the objects of records that some tier holds."""
        self.expect(records, keys, size)
        self._tell(records, lambda object: None)

    def report(self, tier: str, records: Sequence[str], held: bool) -> None:
        """Note that a tier holds records, or no longer; records without objects are passed over."""
        if held:
            self._tell(records, lambda object: object.tiers.add(tier))
            return
        with self._lock:
            known = [(record, self._objects[record]) for record in records if record in self._objects]
            for _, object in known:
                object.tiers.discard(tier)
            gone = [(record, object) for record, object in known if object.told and not object.tiers]
            for record, _ in gone:
                del self._objects[record]
        if gone:
            self._on_deleted([object.key for _, object in gone], [object.size for _, object in gone])

    def _tell(self, records: Sequence[str], mark: Callable[[_Object], None]) -> None:
        new = []
        with self._lock:
            for record in records:
                if (object := self._objects.get(record)) is not None:
                    mark(object)
                    if not object.told:
                        object.told = True
                        new.append(object)
        if new:
            self._on_stored([object.key for object in new], [object.size for object in new])
