"""A cache's counts, queues and tier states for Prometheus, read from the cache at every scrape.

Every tier's counters start at 0, so that Prometheus has complete rates. A histogram appears with its first
transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvkit.cache import Cache
from kvkit.format.record import Damage
from kvkit.handoff.protocol.outgoing import Stage
from kvkit.handoff.protocol.states import Outcome, Phase
from kvkit.handoff.tier import HandoffTier
from kvkit.tiers.health import HealthState
from kvkit.transfer.counters import Counts

METRICS = """\
| metric | labels | meaning |
|---|---|---|
| kvkit_cache_info | model, rank, world | always 1; world is the number of ranks |
| kvkit_lookups_total | | lookups of requests |
| kvkit_lookup_tokens_total | | tokens that requests looked up, in whole chunks |
| kvkit_queries_total | | lookups by clients of the endpoint; kvkit_lookups_total does not count them |
| kvkit_hit_tokens_total | tier | tokens found by lookups; over kvkit_lookup_tokens_total: the hit rate |
| kvkit_approximate_tokens_total | tier | tokens found by lookups in quantised records |
| kvkit_declined_tokens_total | tier | tokens found by lookups but left out, as computing them is faster |
| kvkit_loaded_tokens_total | tier | tokens loaded into the engine, by source tier |
| kvkit_loaded_bytes_total | tier | bytes loaded into the engine, by source tier |
| kvkit_stored_records_total | tier | records stored completely, write-backs included |
| kvkit_stored_bytes_total | tier | bytes of the records stored completely |
| kvkit_written_back_records_total | tier | records stored completely that a load from another tier brought |
| kvkit_evicted_records_total | tier | records evicted to make room |
| kvkit_refused_records_total | tier | records refused for lack of room |
| kvkit_damaged_records_total | tier, cause | records that failed verification |
| kvkit_errors_total | tier, direction | records that a tier failed to read (get) or to write (put) |
| kvkit_timeouts_total | tier | answers that missed their deadline |
| kvkit_cancelled_total | | cancelled loads, stores and prefetches |
| kvkit_blend_reused_tokens_total | | tokens of blended prompts with KV found elsewhere and moved |
| kvkit_blend_selected_tokens_total | | reused tokens of blended prompts that were recomputed |
| kvkit_blend_computed_tokens_total | | tokens of blended prompts that were computed for lack of KV |
| kvkit_transfer_seconds | tier, direction | histogram: time of a transfer, one call of a tier's get or put |
| kvkit_transfer_bytes_per_second | tier, direction | histogram: throughput of a transfer |
| kvkit_queue_depth | tier | reads and writes that wait for one of the tier's threads |
| kvkit_puts_under_way | | pending puts, which a flush would wait for |
| kvkit_slots | | slots of the staging memory |
| kvkit_slots_in_use | | leased slots of the staging memory, including those of a memory tier's records |
| kvkit_handoff_transfers | side, phase | transfers in flight, to peers (sender) or from peers (receiver) |
| kvkit_handoff_ended_total | side, outcome | ended transfers: done, refused, or failed after admission |
| kvkit_handoff_slots | | slots of the buffer that peers send into |
| kvkit_handoff_slots_in_use | | slots promised to a transfer, or holding a received record |
| kvkit_tier_state | tier, state | 1 for the current state of the tier (ok, slow, open, half-open), else 0 |
"""
"""The exported metrics: their names, labels and help; direction is get or put."""
_TOTALS = (
    *("lookups", "lookup_tokens", "queries", "cancelled"),
    *("blend_reused_tokens", "blend_selected_tokens", "blend_computed_tokens"),
)
_BY_TIER = (
    *("hit_tokens", "approximate_tokens", "declined_tokens", "loaded_tokens", "loaded_bytes"),
    *("stored_records", "stored_bytes", "written_back_records", "evicted_records", "timeouts"),
)
_Samples = dict[tuple[str, ...], Any]
"""The values of a metric by the values of its labels: numbers or histograms."""


class CacheCollector(Collector):
    """The metrics of one cache, as listed in `METRICS`. Keeps no numbers of its own."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        samples = _counters(self._cache.counts(), self._cache.tiers) | self._gauges()
        for tier in self._cache.tiers.values():
            if isinstance(tier, HandoffTier):
                samples |= _handoff_metrics(tier)
        for row in METRICS.splitlines()[2:]:
            name, labels, meaning = (cell.strip() for cell in row.strip("|").split("|"))
            if name in samples:
                yield _family(name, labels.split(", ") if labels else [], meaning, samples[name])

    def describe(self) -> Iterable[Metric]:
        """Return a placeholder: registering must not call the cache, as its tiers may still be opening."""
        return [Metric("kvkit_cache", "A registry takes one cache", "unknown")]

    def _gauges(self) -> dict[str, _Samples]:
        staging, namespace = self._cache.staging, self._cache.namespace
        return {
            "kvkit_cache_info": {(namespace.model, str(namespace.rank), str(namespace.world)): 1},
            "kvkit_puts_under_way": {(): self._cache.pending_writes()},
            "kvkit_slots": {(): staging.slots},
            "kvkit_slots_in_use": {(): staging.slots - staging.free},
            "kvkit_queue_depth": {(tier,): depth for tier, depth in self._cache.queue_depths().items()},
            "kvkit_tier_state": {
                (tier, label): label == state
                for tier, state in self._cache.tier_states().items()
                for label in get_args(HealthState)
            },
        }


def register(cache: Cache, registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """Make `registry` (None: a new one) export `cache`, and return it. A registry takes one cache.
    Raises ValueError if the registry exports a cache already."""
    registry = registry or CollectorRegistry()
    registry.register(CacheCollector(cache))
    return registry


def _family(name: str, labels: list[str], meaning: str, samples: _Samples) -> Metric:
    """Build a metric, of the kind that its name and meaning state."""
    if meaning.startswith("histogram"):
        histograms = HistogramMetricFamily(name, meaning, labels=labels)
        for key, histogram in samples.items():
            bounds = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.buckets), strict=True))
            histograms.add_metric(key, buckets, histogram.total)
        return histograms
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    numbers = kind(name, meaning, labels=labels)
    for key, number in samples.items():
        numbers.add_metric(key, float(number))
    return numbers


def _counters(counts: Counts, tiers: Iterable[str]) -> dict[str, _Samples]:
    """Return the counters. Sources that are not tiers are included once they have counts."""

    def by_tier(counter: Mapping[str, int], *labels: str) -> _Samples:
        return {(tier, *labels): counter.get(tier, 0) for tier in (*tiers, *counter)}

    damaged = {(tier, cause): 0 for tier in tiers for cause in Damage} | counts.damaged
    return {
        **{f"kvkit_{name}_total": {(): getattr(counts, name)} for name in _TOTALS},
        **{f"kvkit_{name}_total": by_tier(getattr(counts, name)) for name in _BY_TIER},
        "kvkit_refused_records_total": by_tier(counts.refused),
        "kvkit_damaged_records_total": {(tier, cause.value): n for (tier, cause), n in damaged.items()},
        "kvkit_errors_total": by_tier(counts.read_errors, "get") | by_tier(counts.write_errors, "put"),
        **{f"kvkit_transfer_{name}": getattr(counts, name) for name in ("seconds", "bytes_per_second")},
    }


def _handoff_metrics(tier: HandoffTier) -> dict[str, _Samples]:
    """Return the metrics of transfers to peers (sender) and from peers (receiver)."""
    slots: dict[str, _Samples] = {}
    transfers: _Samples = {}
    ended: _Samples = {}
    for side, engine, phases in (("sender", tier.sender, Stage), ("receiver", tier.receiver, Phase)):
        if engine is not None:
            in_flight = Counter(engine.transfers().values())
            transfers |= {(side, phase): in_flight[phase] for phase in phases if phase != Stage.ENDED}
            ended |= {(side, outcome): engine.outcomes[outcome] for outcome in get_args(Outcome)}
    if tier.receiver is not None:
        arena = tier.receiver.arena
        slots["kvkit_handoff_slots"] = {(): arena.slots}
        slots["kvkit_handoff_slots_in_use"] = {(): arena.slots - arena.free}
    return slots | {"kvkit_handoff_transfers": transfers, "kvkit_handoff_ended_total": ended}
