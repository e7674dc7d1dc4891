"""Track which of LMCache's objects the tiers hold, as these report it: LMCache counts bytes by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache.v1.distributed.api import ObjectKey

Told = Callable[[list[ObjectKey], list[int]], None]
"""Called with objects' keys and bytes, and with locks: it must return at once and call no tier."""


@dataclass(slots=True, eq=False)
class _Object:
    key: ObjectKey
    size: int
    tiers: set[str] = field(default_factory=set)
    uses: int = 0  # stores and lookups under way


class HeldObjects:
    """Objects whose records are held or in use, by the record's name. Thread-safe.

    Args:
        on_stored: called with objects that a tier holds, and none held before.
        on_deleted: called with objects that the last tier has evicted or deleted.
    """

    def __init__(self, on_stored: Told, on_deleted: Told) -> None:
        self._on_stored, self._on_deleted = on_stored, on_deleted
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}

    def begin(self, records: Sequence[str], keys: Sequence[ObjectKey], size: int) -> None:
        """Name the objects of records before they are stored or looked up, which makes tiers report them."""
        with self._lock:
            for record, key in zip(records, keys, strict=True):
                self._objects.setdefault(record, _Object(key, size)).uses += 1

    def end(self, records: Sequence[str]) -> None:
        """End a use of records that `begin` named."""
        with self._lock:
            for record in records:
                self._objects[record].uses -= 1
                self._forget_unused(record)

    def report(self, tier: str, records: Sequence[str], held: bool) -> None:
        """Note that a tier holds records, or no longer; records without objects are passed over."""
        changed = []
        with self._lock:
            for record in records:
                if (object := self._objects.get(record)) is None:
                    continue
                before = bool(object.tiers)
                (object.tiers.add if held else object.tiers.discard)(tier)
                if bool(object.tiers) != before:
                    changed.append(object)
                self._forget_unused(record)
            if changed:  # with the lock, so that calls have the order of the reports
                tell = self._on_stored if held else self._on_deleted
                tell([object.key for object in changed], [object.size for object in changed])

    def _forget_unused(self, record: str) -> None:
        object = self._objects[record]
        if not object.tiers and not object.uses:
            del self._objects[record]
