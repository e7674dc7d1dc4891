"""Pending stores: a lookup can wait for records that are being stored and no tier holds yet."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

log = logging.getLogger(__name__)


class PendingStores:
    """The records of all pending stores. Thread-safe.

    Attributes:
        changed: lock of this and of every `PendingStore`; notified when records are no longer pending.
        stores_of: number of pending stores of each record.
        copying: stores that may still start attempts.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stores_of: Counter[str] = Counter()
        self.copying: set[PendingStore] = set()

    def uncopied(self) -> int:
        """Count the records of pending stores that were not passed to any tier yet."""
        with self.changed:
            return sum(attempts == 1 for store in self.copying for attempts in store.attempts.values())

    def among(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that are pending."""
        with self.changed:
            return {name for name in names if name in self.stores_of}

    def wait(self, names: Collection[str], timeout_s: float) -> bool:
        """Wait until none of `names` is pending; return False after `timeout_s` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: not any(n in self.stores_of for n in names), timeout_s)


class PendingStore:
    """The records of one store, each pending until a tier has it or its last attempt failed. Thread-safe.

    The store itself counts as one attempt at each record, until `close`. Callbacks run in any thread; their
    errors are only logged.

    Args:
        pending_stores: where lookups find the records.
        names: record names, chunk by chunk, `groups` records each.
        on_stored: called with a tier and a chunk when the tier has stored the chunk's last record.
        on_done: called once, when every attempt has ended, which may be after a tier has the records.
        by_other_ranks: those of `names` that other ranks with equal KV store. The ends of these stores are
            not reported here, so the records stay pending until this store's last attempt ends.

    Attributes:
        attempts: unended attempts at each pending record; guarded by `PendingStores.changed`.
    """

    def __init__(
        self,
        pending_stores: PendingStores,
        names: Sequence[str],
        groups: int = 1,
        on_stored: Callable[[str, int], object] | None = None,
        on_done: Callable[[], object] | None = None,
        by_other_ranks: Iterable[str] = (),
    ) -> None:
        self._pending_stores = pending_stores
        self._names = names
        self._groups = groups
        self._in_flight = len(names)
        self.attempts = {**dict.fromkeys(names, 1), **dict.fromkeys(by_other_ranks, 2)}
        self._chunks = {} if on_stored is None else {name: i // groups for i, name in enumerate(names)}
        self._stored: Counter[tuple[str, int]] = Counter()  # records, by tier and chunk
        self._on_stored = on_stored
        self._on_done = on_done
        with pending_stores.changed:
            pending_stores.stores_of.update(names)
            pending_stores.copying.add(self)

    def begin_attempts(self, names: Collection[str]) -> None:
        """Note that `names` will be passed to a tier; call `end_attempt` once for each."""
        with self._pending_stores.changed:
            self._in_flight += len(names)
            for name in names:
                if name in self.attempts:
                    self.attempts[name] += 1

    def end_attempt(self, tier: str, name: str, error: BaseException | None) -> None:
        """Note that a tier stored a record, already had it (FileExistsError), or failed."""
        if error is None and self._on_stored is not None:
            chunk = self._chunks[name]
            with self._pending_stores.changed:
                self._stored[tier, chunk] += 1
                complete = self._stored[tier, chunk] == self._groups
            if complete:
                _call_back(self._on_stored, tier, chunk)
        self._end_attempts([name], kept=error is None or isinstance(error, FileExistsError))

    def close(self) -> None:
        """Note that no more attempts will start. Call once."""
        with self._pending_stores.changed:
            self._pending_stores.copying.discard(self)
        self._end_attempts(self._names, kept=False)

    def _end_attempts(self, names: Collection[str], *, kept: bool) -> None:
        """End one attempt at each of `names`; those `kept` by a tier are no longer pending."""
        changed, stores_of = self._pending_stores.changed, self._pending_stores.stores_of
        with changed:
            finished = []
            for name in names:
                if name in self.attempts:
                    self.attempts[name] -= 1
                    if kept or not self.attempts[name]:
                        del self.attempts[name]
                        finished.append(name)
            self._in_flight -= len(names)
            last = not self._in_flight
            if last:
                finished += self.attempts
                self.attempts = {}
            for name in finished:
                stores_of[name] -= 1
                if not stores_of[name]:
                    del stores_of[name]
            changed.notify_all()
        if last and self._on_done is not None:
            _call_back(self._on_done)


def _call_back(callback: Callable[..., object], *args: object) -> None:
    """Call `callback` and log its errors, which must not keep a flush waiting."""
    try:
        callback(*args)
    except Exception:
        log.exception("a callback of a store failed")
