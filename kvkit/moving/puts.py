"""Puts under way: a flush waits for them, and a tier that hangs keeps a bounded part of the slots."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkit.staging import Lease, release_all
from kvkit.tiers.base import OnComplete, TierFull

PATIENCE_S = 1.0
"""A tier that completed none of its puts for so long, in seconds, is stuck."""

Start = Callable[[Sequence[str], Sequence[Lease], OnComplete], None]


@dataclass(frozen=True, slots=True)
class _Puts:
    """Records that wait to be put, and shares of their slots."""

    names: deque[str]
    leases: deque[Lease]
    on_complete: OnComplete
    start: Start


class PutQueue:
    """The puts of one tier, of which so many are under way at a time. Thread-safe.

    The others wait, and keep their slots, until they are given up. A tier that is stuck takes none that would
    have to wait: then no more than the `limit` slots of what it may be writing are kept from others.

    Args:
        tier: its name.
        limit: puts under way at a time.
        start: starts puts, and has each report once; `put` may name another way.
    """

    def __init__(self, tier: str, limit: int, start: Start) -> None:
        self.tier = tier
        self.limit = limit
        self._start = start
        self._under_way = 0
        self._progress_s = 0.0  # when one completed, or the first was started
        self._waiting: deque[_Puts] = deque()
        self._starting = False
        self._lock = threading.Lock()

    def put(
        self,
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
        start: Start | None = None,
    ) -> int:
        """Have records put, the first ones at once; how many, from the first on, were taken.

        `on_complete` gets one report per name: TierFull for what was not taken, or is given up later.
        """
        with self._lock:
            taken = max(0, self.limit - self._under_way) if self._stuck() else len(names)
            if taken:
                shares = deque(lease.share() for lease in leases[:taken])
                self._waiting.append(_Puts(deque(names[:taken]), shares, on_complete, start or self._start))
        self._go_on()
        self._refuse(names[taken:], on_complete)
        return min(taken, len(names))

    @property
    def stuck(self) -> bool:
        """Whether puts are under way, and none has completed for a while."""
        with self._lock:
            return self._stuck()

    def give_up(self) -> None:
        """Let go of the slots of what waits."""
        with self._lock:
            gone = list(self._waiting)
            self._waiting.clear()
        for puts in gone:
            release_all(puts.leases)
            self._refuse(puts.names, puts.on_complete)

    def _stuck(self) -> bool:
        return self._under_way > 0 and time.monotonic() - self._progress_s > PATIENCE_S

    def _refuse(self, names: Sequence[str], on_complete: OnComplete) -> None:
        for name in names:
            on_complete(name, TierFull(f"tier {self.tier!r}: {name} is left out, for earlier puts hang"))

    def _go_on(self) -> None:
        """Start what waits, as far as the limit allows."""
        with self._lock:
            if self._starting:  # by a call further up, or another thread, which looks again before it ends
                return
            self._starting = True
        while True:
            with self._lock:
                count = min(self.limit - self._under_way, len(self._waiting[0].names) if self._waiting else 0)
                if not count:
                    self._starting = False
                    return
                puts = self._waiting[0]
                names = [puts.names.popleft() for _ in range(count)]
                leases = [puts.leases.popleft() for _ in range(count)]
                if not puts.names:
                    self._waiting.popleft()
                if not self._under_way:
                    self._progress_s = time.monotonic()
                self._under_way += count
            puts.start(names, leases, self._completes(puts.on_complete))
            release_all(leases)

    def _completes(self, on_complete: OnComplete) -> OnComplete:
        def completed(name: str, error: BaseException | None) -> None:
            with self._lock:
                self._under_way -= 1
                self._progress_s = time.monotonic()
            try:
                on_complete(name, error)
            finally:
                self._go_on()

        return completed


class Outstanding:
    """Counts what was started and not yet reported. Thread-safe."""

    def __init__(self) -> None:
        self._started = 0
        self._left: dict[int, int] = {}  # by the number of their start, in its order
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """How many are left."""
        with self._changed:
            return sum(self._left.values())

    def add(self, count: int) -> int:
        """Note that `count` were started; the number that `done` takes for each of them."""
        with self._changed:
            self._started += 1
            if count:
                self._left[self._started] = count
            return self._started

    def done(self, start: int) -> None:
        """Note that one of those was reported."""
        with self._changed:
            self._left[start] -= 1
            if not self._left[start]:
                del self._left[start]
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> int:
        """Wait for all that were started before this call; how many are left at the deadline."""
        with self._changed:
            last = self._started
            self._changed.wait_for(lambda: next(iter(self._left), last + 1) > last, timeout_s)
            return sum(left for start, left in self._left.items() if start <= last)
