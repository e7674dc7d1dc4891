"""Quarantine: records that cannot be used or removed count as misses for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

QUARANTINE_S = 600.0
"""Seconds in quarantine. After that, reads and removal are tried again."""

MAX_QUARANTINED = 4096
"""Maximum over all tiers. Beyond that, the oldest are forgotten, which costs a load that ends early."""


class Quarantine:
    """Names of quarantined records by tier. Thread-safe; `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, tier: str, name: str, now: float) -> None:
        """Quarantine a record. Mutates."""
        with self._lock:
            self._until[tier, name] = now + QUARANTINE_S
            self._until.move_to_end((tier, name))
            if len(self._until) > MAX_QUARANTINED:
                self._until.popitem(last=False)

    def forget(self, tier: str, but: Collection[str] = ()) -> None:
        """End the quarantine of a tier's records, except those in `but`. Mutates."""
        with self._lock:
            for forgotten in [key for key in self._until if key[0] == tier and key[1] not in but]:
                del self._until[forgotten]

    def before(self, tier: str, names: Sequence[str], now: float) -> int:
        """Count the `names` before the first one in quarantine."""
        with self._lock:
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            if not self._until:
                return len(names)
            return next((i for i, name in enumerate(names) if (tier, name) in self._until), len(names))
