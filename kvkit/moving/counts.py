"""What a cache counts: plain data, added to under the cache's lock and copied out for whoever asks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from kvkit.format.record import Damage

Direction = Literal["get", "put"]

SECONDS = tuple(float(f"{step}e{power}") for power in range(-5, 2) for step in (1, 2, 5))
"""Upper bounds of the buckets of a time: 10 µs to 50 s."""

BYTES_PER_SECOND = tuple(float(f"{step}e{power}") for power in range(6, 11) for step in (1, 2, 5))
"""Upper bounds of the buckets of a throughput: 1 MB/s to 50 GB/s."""


@dataclass(slots=True)
class Histogram:
    """How often values fell between fixed bounds.

    Attributes:
        bounds: ascending; a value belongs to the first bound that is not below it.
        buckets: values per bound, and at the end those above the last.
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
        """Values so far."""
        return sum(self.buckets)

    def quantile(self, share: float) -> float | None:
        """The value that `share` (0 to 1) of the values do not exceed; None of no values.

        As Prometheus reckons it: evenly spread within a bucket, and the last bound for what lies above it.
        """
        rank, below, lower = share * self.count, 0, 0.0
        for count, bound in zip(self.buckets, self.bounds, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * (rank - below) / count
            below, lower = below + count, bound
        return self.bounds[-1] if self.count else None

    def copy(self) -> Histogram:
        """One that does not change with this."""
        return Histogram(self.bounds, self.buckets.copy(), self.total)


Key = tuple[str, Direction]


@dataclass(slots=True)
class Counts:
    """What happened since the cache was opened. No locks: whoever owns it has one.

    Attributes:
        lookups, lookup_tokens: calls of lookup, and the tokens of whole chunks that were asked for.
        queries: questions for what is held by who loads nothing; no lookups.
        hit_tokens: tokens that a lookup found, by tier.
        approximate_tokens: those of them that are kept with fewer bits, by tier.
        declined_tokens: tokens that a lookup found and left out, as computing them is faster, by tier.
        loaded_tokens, loaded_bytes: what was put into the engine, verified, by the tier it came from.
        stored_records, stored_bytes: what was put completely, by tier; written-back records are among them.
        snapshot_records: those of stored_records that are of states, by tier.
        written_back_records: records that were put completely after a load from another tier, by tier.
        evicted_records: records that a tier evicted, by tier.
        refused: records that a tier had no room for, whatever it evicted, or had no slots for while its puts
            hung, by tier.
        damaged: records that did not verify, by (tier, cause).
        read_errors, write_errors: records that a tier failed to deliver or to take, by tier.
        timeouts: answers that missed their deadline, by tier.
        cancelled: loads, stores and prefetches that the caller called off.
        blend_reused_tokens, blend_selected_tokens, blend_computed_tokens: of prompts that were blended,
            tokens whose KV was found elsewhere, those among them that were recomputed, and tokens without KV.
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
        """Note a transfer: `size` bytes of one call of the tier's get or put. Mutates.

        `seconds` are from the call to its last completion; a transfer that takes no time has no throughput.
        """
        key = (tier, direction)
        times = self.seconds.get(key)
        if times is None:
            times = self.seconds[key] = Histogram(SECONDS)
            self.bytes_per_second[key] = Histogram(BYTES_PER_SECOND)
        times.add(seconds)
        if seconds > 0:
            self.bytes_per_second[key].add(size / seconds)

    def copy(self) -> Counts:
        """One that does not change with this: some 30 µs, to be taken under the owner's lock."""
        return Counts(**{f.name: _copy(getattr(self, f.name)) for f in fields(self)})


def _copy(value: Any) -> Any:
    if isinstance(value, Counter):
        return value.copy()
    if isinstance(value, dict):
        return {key: histogram.copy() for key, histogram in value.items()}
    return value
