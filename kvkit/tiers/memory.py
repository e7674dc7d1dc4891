"""The memory tier, which keeps records without a copy, in the staging slots they were packed or read into."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from kvkit.format.record import parent_name
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import (
    HeldListener,
    OnComplete,
    Tier,
    TierError,
    TierFull,
    complete,
    get_by_copy,
    owner_of,
)
from kvkit.tiers.eviction import state as eviction
from kvkit.tiers.settings import TierConfig


class MemoryTier(Tier):
    """Records in slots of `staging`, evicted as `kvkit.tiers.eviction` decides.

    A put keeps a share of the slot, and `borrow` returns another. A record counts as a whole slot. A borrowed
    slot may be evicted, but is free only when its last share is released. So `capacity_bytes` must be below
    the arena's size, or no slot may be left to read into.

    Args:
        policy: name in `kvkit.tiers.eviction.plugins.POLICIES`, or "package.module:Class".
        quota_bytes: limit for one namespace; None for no limit.
        keep_s: seconds for which a new record is pinned; puts that find no room meanwhile fail.

    Raises:
        ValueError: the capacity is below one slot, or leaves no slot for staging.
    """

    in_memory = True
    reports_evictions = True

    def __init__(
        self,
        staging: Staging,
        capacity_bytes: int,
        name: str = "memory",
        *,
        policy: str = "lru",
        quota_bytes: int | None = None,
        keep_s: float = 0.0,
    ) -> None:
        slots = capacity_bytes // staging.slot_bytes
        if not 1 <= slots < staging.slots:
            raise ValueError(
                f"tier {name!r}: capacity_bytes={capacity_bytes} is {slots} slots of {staging.slot_bytes} "
                f"bytes; want at least 1 and fewer than the {staging.slots} of the staging arena"
            )
        self.name = name
        self.slots = slots
        self._slot_bytes = staging.slot_bytes
        self._state = eviction.EvictionState(capacity_bytes, policy, quota_bytes)
        self._keep_s = keep_s
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, name: str, config: TierConfig, staging: Staging) -> MemoryTier:
        """Open a tier in slots of `staging`."""
        return cls(
            staging,
            config.capacities[0] or 0,
            name=name,
            policy=config.eviction,
            quota_bytes=config.quota,
            keep_s=config.keep_s,
        )

    def match_prefix(self, names: Sequence[str]) -> int:
        with self._lock:
            run = eviction.use_run(self._state, names, time.monotonic())
            self._held_listener(names[:run], True)
            return run

    def subscribe(self, held_listener: HeldListener) -> bool:
        super().subscribe(held_listener)
        with self._lock:
            held_listener(list(self._leases), True)
        return True

    def pin(self, names: Sequence[str], seconds: float) -> int:
        with self._lock:
            return eviction.pin(self._state, names, time.monotonic() + seconds)

    def prioritise(self, names: Sequence[str], priority: int) -> None:
        with self._lock:
            eviction.prioritise(self._state, names, priority)

    @property
    def learns(self) -> bool:  # type: ignore[override]
        """True if its eviction policy learns from requests."""
        return self._state.policy.learns

    def note_request(self, names: Sequence[str]) -> None:
        with self._lock:
            eviction.note_request(self._state, names, time.monotonic())

    def note_answer(self, names: Sequence[str], tool_call: bool) -> None:
        with self._lock:
            eviction.note_answer(self._state, names, tool_call)

    def borrow(self, name: str) -> Lease | None:
        with self._lock:
            lease = self._leases.get(name)
            return None if lease is None else lease.share()

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        get_by_copy(self, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        for name, lease in zip(names, leases, strict=True):
            complete(on_complete, name, lease.share(), self._put_one(name, lease))

    def delete(self, names: Sequence[str]) -> None:
        with self._lock:
            removed = [self._leases.pop(name) for name in names if eviction.remove(self._state, name)]
            self._held_listener(names, False)
        release_all(removed)

    def size(self, name: str) -> int | None:
        with self._lock:
            lease = self._leases.get(name)
            return None if lease is None else lease.used

    def scan(self) -> Iterator[tuple[str, int]]:
        with self._lock:
            return iter([(name, lease.used) for name, lease in self._leases.items()])

    def check_integrity(self) -> None:
        """Raise `AssertionError` if slots and entries differ, or are too many: a defect in kvkit."""
        with self._lock:
            assert self._leases.keys() == self._state.entries.keys()
            assert len(self._leases) <= self.slots

    def close(self) -> None:
        with self._lock:
            self._closed = True
            leases = list(self._leases.values())
            self._leases.clear()
            self._state = eviction.EvictionState(0)
        release_all(leases)

    def _put_one(self, name: str, lease: Lease) -> TierError | None:
        """Keep a share of a record's slot; return the error if the record does not fit."""
        with self._lock:
            if self._closed:
                return TierError(f"tier {self.name!r} is closed")
            now = time.monotonic()
            added, victims = eviction.add_run(
                self._state,
                (name,),
                self._slot_bytes,
                parent=parent_name(lease.buffer, name),
                owner=owner_of(name),
                now=now,
            )
            if not added:
                return TierFull(f"tier {self.name!r}: {name} does not fit")
            if self._keep_s:
                eviction.pin(self._state, [name], now + self._keep_s)
            released = [self._leases.pop(victim) for victim in victims]
            self.evicted += len(released)
            if name not in self._leases:
                self._leases[name] = lease.share()
            self._held_listener(victims, False)
            self._held_listener((name,), True)
        release_all(released)
        return None
