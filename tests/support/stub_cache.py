"""A stand-in for a cache: real slots, tiers, counts and circuits, but what it finds is set by the test."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkit.format.layout import Namespace
from kvkit.format.record import Damage
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.health import FAILURES_TO_PAUSE, Health, HealthState
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.testing.contract import DEADLINE_S, SLOT_BYTES
from kvkit.transfer.counters import BYTES_PER_SECOND, SECONDS, Counts, Histogram
from kvkit.transfer.sequence import UnknownModel


@dataclass(frozen=True)
class Found:
    tokens: int
    by_tier: dict[str, int]


class ManagedCache:
    """Two tiers, "near" and "[far]"; of any sequence it has the first 4 tokens near and 4 more far."""

    def __init__(self) -> None:
        self.staging = Staging(SLOT_BYTES, 12)
        self.tiers: Mapping[str, Tier] = {
            name: MemoryTier(self.staging, 4 * SLOT_BYTES, name=name) for name in ("near", "[far]")
        }
        self.healths = {name: Health() for name in self.tiers}
        self.kept = Counts()
        self.now = 0.0
        self.namespace = Namespace("m", layout="l", dtype="float32")
        self.asked_about: list[Namespace] = []
        self.waited: list[float] = []
        self.pinned: list[tuple[int, float]] = []
        self.error: Exception | None = None
        self.asked = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def counts(self) -> Counts:
        return self.kept.copy()

    def tier_states(self) -> dict[str, HealthState]:
        return {name: health.state(self.now) for name, health in self.healths.items()}

    def queue_depths(self) -> dict[str, int]:
        return {"near": 0, "[far]": 7}

    def pending_writes(self) -> int:
        return 3

    def namespace_of(self, model: str | None, salt: str) -> Namespace:
        if model not in (None, "m", "adapter"):
            raise UnknownModel(f"model = {model!r}: known are m, adapter")
        return replace(self.namespace, lora="adapter" if model == "adapter" else "", salt=salt)

    def query(self, tokens: Any, namespace: Namespace, wait_s: float = 0.0) -> Found:
        self.asked.set()
        self.waited.append(wait_s)
        self.asked_about.append(namespace)
        assert self.go_on.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        near, far = min(len(tokens), 4), max(0, min(len(tokens), 8) - 4)
        return Found(near + far, {"near": near, "[far]": far})

    def clear(self, tier: str) -> int:
        if self.error is not None:
            raise self.error
        names = [name for name, _ in self.tiers[tier].scan()]
        self.tiers[tier].delete(names)
        return len(names)

    def pin(self, tokens: Any, seconds: float, namespace: Namespace) -> int:
        self.asked_about.append(namespace)
        self.pinned.append((len(tokens), seconds))
        return min(len(tokens), 8)

    def break_tier(self, name: str) -> None:
        """Open its circuit."""
        for _ in range(FAILURES_TO_PAUSE):
            self.healths[name].failed(0.0)

    def close(self) -> None:
        self.go_on.set()
        for tier in self.tiers.values():
            tier.close()
        self.staging.close()


def filled_counts(start: int = 1) -> Counts:
    """Counts in which no two numbers are equal and no field is as it was made."""
    numbers = iter(range(start, start + 1000))

    def by_tier() -> dict[str, int]:
        return {name: next(numbers) for name in ("near", "[far]")}

    totals = [
        *("lookups", "lookup_tokens", "queries", "cancelled"),
        *("blend_reused_tokens", "blend_selected_tokens", "blend_computed_tokens"),
    ]
    counts = Counts(**{name: next(numbers) for name in totals})
    for counter in (
        *(counts.hit_tokens, counts.loaded_tokens, counts.loaded_bytes, counts.stored_records),
        *(counts.stored_bytes, counts.written_back_records, counts.evicted_records, counts.refused),
        *(counts.read_errors, counts.write_errors, counts.timeouts, counts.declined_tokens),
        *(counts.approximate_tokens, counts.snapshot_records),
    ):
        counter.update(by_tier())
    counts.damaged.update({(tier, cause): next(numbers) for tier in ("near", "[far]") for cause in Damage})
    for bounds, histograms in ((SECONDS, counts.seconds), (BYTES_PER_SECOND, counts.bytes_per_second)):
        for tier in ("near", "[far]"):
            histograms[tier, "get"] = Histogram(bounds)
            histograms[tier, "put"] = Histogram(bounds)
    for histogram in (*counts.seconds.values(), *counts.bytes_per_second.values()):
        for value in (*histogram.bounds[::3], 1e-9, 1e12):
            for _ in range(next(numbers) % 7):
                histogram.add(value)
    return counts
