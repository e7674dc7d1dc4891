"""Counters of a cache: plain data, updated and copied under the cache's lock."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvkit.format.record import Damage

Direction = Literal["get", "put"]

SECONDS = tuple(float(f"{step}e{power}") for power in range(-5, 2) for step in (1, 2, 5))
"""Upper bounds of the buckets for durations: 10 µs to 50 s."""

BYTES_PER_SECOND = tuple(float(f"{step}e{power}") for power in range(6, 11) for step in (1, 2, 5))
"""Upper bounds of the buckets for throughput: 1 MB/s to 50 GB/s."""


@dataclass(slots=True)
class Histogram:
    """Counts of values between fixed bounds.

    Attributes:
        bounds: ascending upper bounds, inclusive.
        buckets: values per bound, then those above the last bound.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    buckets: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = self.buckets or [0] * (len(self.bounds) + 1)
        if len(self.buckets) != len(self.bounds) + 1:
            raise ValueError(f"{len(self.buckets)} buckets, want one more than the {len(self.bounds)} bounds")

    def add(self, value: float) -> None:
        """Count `value`. Mutates."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.buckets)

    def quantile(self, share: float) -> float | None:
        """Return the value that `share` (0 to 1) of the values do not exceed; None without values.

        Interpolates as Prometheus does: linearly within a bucket; above the last bound, it returns that
        bound.
        """
        rank, below, lower = share * self.count, 0, 0.0
        for count, bound in zip(self.buckets, self.bounds, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * (rank - below) / count
            below, lower = below + count, bound
        return self.bounds[-1] if self.count else None

    def copy(self) -> Histogram:
        """Return an independent copy."""
        return Histogram(self.bounds, self.buckets.copy(), self.total)


Key = tuple[str, Direction]


@dataclass(slots=True)
class Counts:
    """Counters since the cache was opened. Not thread-safe: the owner locks.

    Attributes:
        lookups, lookup_tokens: lookups, and the tokens of whole chunks in them.
        queries: lookups without a load; not in `lookups`.
        hit_tokens: tokens found by lookups, by tier.
        approximate_tokens: those of `hit_tokens` stored in fewer bits, by tier.
        declined_tokens: tokens found but left out of the hit, because computing them is faster, by tier.
        loaded_tokens, loaded_bytes: verified tokens and bytes loaded into the engine, by source tier.
        stored_records, stored_bytes: records put completely, write-backs included, and their bytes, by tier.
        snapshot_records: those of `stored_records` that hold states, by tier.
        written_back_records: records put completely after a load from another tier, by tier.
        evicted_records: records evicted, by tier.
        refused: records refused because the tier had no room even after eviction, or no slots while its puts
            hung, by tier.
        damaged: records that failed verification, by (tier, cause).
        read_errors, write_errors: records that a tier failed to read or write, by tier.
        timeouts: answers that missed their deadline, by tier.
        cancelled: loads, stores and prefetches cancelled by the caller.
        blend_reused_tokens, blend_selected_tokens, blend_computed_tokens: tokens of blended prompts: with
            reused KV, those of them that were recomputed, and without KV.
        seconds, bytes_per_second: time and throughput of transfers, by (tier, direction); see `moved`.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    queries: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    approximate_tokens: Counter[str] = field(default_factory=Counter)
    declined_tokens: Counter[str] = field(default_factory=Counter)
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    stored_records: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[str] = field(default_factory=Counter)
    snapshot_records: Counter[str] = field(default_factory=Counter)
    written_back_records: Counter[str] = field(default_factory=Counter)
    evicted_records: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    damaged: Counter[tuple[str, Damage]] = field(default_factory=Counter)
    read_errors: Counter[str] = field(default_factory=Counter)
    write_errors: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    blend_reused_tokens: int = 0
    blend_selected_tokens: int = 0
    blend_computed_tokens: int = 0
    seconds: dict[Key, Histogram] = field(default_factory=dict)
    bytes_per_second: dict[Key, Histogram] = field(default_factory=dict)

    def moved(self, tier: str, direction: Direction, size: int, seconds: float) -> None:
        """Count a transfer: `size` bytes moved by one call of the tier's get or put. Mutates.

        `seconds` last from the call to its last completion; a transfer of 0 s counts no throughput.
        """
        key = (tier, direction)
        times = self.seconds.get(key)
        if times is None:
            times = self.seconds[key] = Histogram(SECONDS)
            self.bytes_per_second[key] = Histogram(BYTES_PER_SECOND)
        times.add(seconds)
        if seconds > 0:
            self.bytes_per_second[key].add(size / seconds)

    def blended(self, reused: int, selected: int, computed: int) -> None:
        """Count the tokens of a blended prompt: reused, selected among those, and computed. Mutates."""
        self.blend_reused_tokens += reused
        self.blend_selected_tokens += selected
        self.blend_computed_tokens += computed

    def copy(self) -> Counts:
        """Return an independent copy (about 30 µs); call under the owner's lock."""
        return Counts(**{f.name: _copy(getattr(self, f.name)) for f in fields(self)})


def _copy(value: Any) -> Any:
    if isinstance(value, Counter):
        return value.copy()
    if isinstance(value, dict):
        return {key: histogram.copy() for key, histogram in value.items()}
    return value
