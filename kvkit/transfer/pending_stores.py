"""Pending stores: a lookup can wait for records that are being stored and no tier holds yet."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

log = logging.getLogger(__name__)


class PendingStores:
    """Names of the records in pending stores. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._makers: Counter[str] = Counter()
        self._open: set[PendingStore] = set()

    def begin(self, pending: PendingStore, names: Iterable[str]) -> None:
        """Add a pending store of these records."""
        with self._changed:
            self._makers.update(names)
            self._open.add(pending)

    def closed(self, pending: PendingStore) -> None:
        """Note that a pending store will start no more attempts."""
        with self._changed:
            self._open.discard(pending)

    def uncopied(self) -> int:
        """Count the records of pending stores that were not passed to any tier yet."""
        with self._changed:
            pending_stores = list(self._open)
        return sum(pending.unattempted for pending in pending_stores)

    def among(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that are pending."""
        with self._changed:
            return {name for name in names if name in self._makers}

    def wait(self, names: Collection[str], timeout_s: float) -> bool:
        """Wait until none of `names` is pending; return False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(n in self._makers for n in names), timeout_s)

    def end(self, names: Collection[str]) -> None:
        """Remove one pending store of each of `names`."""
        with self._changed:
            for name in names:
                self._makers[name] -= 1
                if not self._makers[name]:
                    del self._makers[name]
            self._changed.notify_all()


class PendingStore:
    """The records of one store, each pending until a tier has it or its last attempt failed. Thread-safe.

    The store itself counts as one attempt at each record, until `close`. Callbacks run in any thread; their
    errors are only logged.

    Args:
        names: record names, chunk by chunk, `groups` records each.
        on_stored: called with a tier and a chunk when the tier has stored the chunk's last record.
        on_done: called once, when every attempt has ended, which may be after a tier has the records.
        others: names that ranks with equal KV store meanwhile. Their end is not reported, so they end with
            the last attempt here.
    """

    def __init__(
        self,
        pending_stores: PendingStores,
        names: Sequence[str],
        groups: int = 1,
        on_stored: Callable[[str, int], object] | None = None,
        on_done: Callable[[], object] = lambda: None,
        others: Iterable[str] = (),
    ) -> None:
        self._pending_stores = pending_stores
        self._names = names
        self._groups = groups
        self._attempts = dict.fromkeys(names, 1)
        self._in_flight = len(self._attempts)
        self._attempts.update(dict.fromkeys(others, 2))
        self._chunks = {} if on_stored is None else {name: i // groups for i, name in enumerate(names)}
        self._stored: Counter[tuple[str, int]] = Counter()  # records, by tier and chunk
        self._on_stored = on_stored
        self._on_done = on_done
        self._lock = threading.Lock()
        pending_stores.begin(self, names)

    @property
    def unattempted(self) -> int:
        """Number of records with no attempt besides the store itself."""
        with self._lock:
            return sum(attempts == 1 for attempts in self._attempts.values())

    def attempt(self, names: Iterable[str]) -> None:
        """Note that a tier is about to be given `names`; call `ended` once for each."""
        with self._lock:
            for name in names:
                self._in_flight += 1
                if name in self._attempts:
                    self._attempts[name] += 1

    def ended(self, tier: str, name: str, error: BaseException | None) -> None:
        """Note that a tier stored a record, already had it (FileExistsError), or failed."""
        if error is None and self._on_stored is not None:
            chunk = self._chunks[name]
            with self._lock:
                self._stored[tier, chunk] += 1
                complete = self._stored[tier, chunk] == self._groups
            if complete:
                _tell(self._on_stored, tier, chunk)
        self._end([name], kept=error is None or isinstance(error, FileExistsError))

    def close(self) -> None:
        """Note that no more attempts will start. Call once."""
        self._pending_stores.closed(self)
        self._end(self._names, kept=False)

    def _end(self, names: Collection[str], *, kept: bool) -> None:
        """End one attempt at each of `names`; those `kept` by a tier are no longer pending."""
        with self._lock:
            self._in_flight -= len(names)
            last = not self._in_flight
            finished = []
            for name in names:
                if name in self._attempts:
                    self._attempts[name] -= 1
                    if kept or not self._attempts[name]:
                        del self._attempts[name]
                        finished.append(name)
            if last:
                finished += self._attempts
                self._attempts = {}
        self._pending_stores.end(finished)
        if last:
            _tell(self._on_done)


def _tell(callback: Callable[..., object], *args: object) -> None:
    """Call back and log errors: they are the caller's, and must not keep a flush waiting."""
    try:
        callback(*args)
    except Exception:
        log.exception("a callback of a store failed")
