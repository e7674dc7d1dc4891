"""A cache's counts, queues and tier states for Prometheus, read from the cache whenever someone scrapes.

| metric | labels | meaning |
|---|---|---|
| kvkit_cache_info | model, rank, world | 1: what is exported here is of this rank, of so many |
| kvkit_lookups_total | | calls of lookup |
| kvkit_lookup_tokens_total | | tokens of whole chunks that were asked for |
| kvkit_queries_total | | questions of the endpoint's clients for what is held; they are no lookups |
| kvkit_hit_tokens_total | tier | tokens that a lookup found; over kvkit_lookup_tokens_total: the hit rate |
| kvkit_declined_tokens_total | tier | tokens that a lookup found and left out, as computing them is faster |
| kvkit_loaded_tokens_total | tier | tokens put into the engine, by the tier they came from |
| kvkit_loaded_bytes_total | tier | the same in bytes |
| kvkit_stored_records_total | tier | records that were put completely |
| kvkit_stored_bytes_total | tier | the same in bytes |
| kvkit_written_back_records_total | tier | those among them that a load from another tier brought |
| kvkit_evicted_records_total | tier | records evicted to make room |
| kvkit_refused_records_total | tier | records that there was no room for |
| kvkit_damaged_records_total | tier, cause | records that did not verify |
| kvkit_errors_total | tier, direction | records that a tier failed to deliver (get) or to take (put) |
| kvkit_timeouts_total | tier | answers that missed their deadline |
| kvkit_cancelled_total | | loads, stores and prefetches that were called off |
| kvkit_blend_reused_tokens_total | | tokens of blended prompts whose KV was found elsewhere and moved |
| kvkit_blend_selected_tokens_total | | those among them that were computed again |
| kvkit_blend_computed_tokens_total | | tokens of blended prompts without KV, which were computed |
| kvkit_transfer_seconds | tier, direction | histogram: time of a transfer, one call of a tier's get or put |
| kvkit_transfer_bytes_per_second | tier, direction | histogram: throughput of a transfer |
| kvkit_queue_depth | tier | reads and writes that wait for one of the tier's threads |
| kvkit_puts_under_way | | puts that a flush would wait for |
| kvkit_slots | | slots of the staging memory |
| kvkit_slots_in_use | | those that are leased, a memory tier's records among them |
| kvkit_handoff_transfers | side, phase | transfers under way, to peers (sender) or from them (receiver) |
| kvkit_handoff_ended_total | side, outcome | those that ended: done, refused, or admitted and failed |
| kvkit_handoff_slots | | slots of the buffer that peers send into |
| kvkit_handoff_slots_in_use | | those that are promised to a transfer, or hold a record that came |
| kvkit_tier_state | tier, state | 1 for the state that the tier is in (ok, slow, open, half-open), else 0 |

direction is get or put. Every tier's counters are there from the start, at 0, so that rates are complete; a
histogram appears with its first transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvkit.format.layout import Namespace
from kvkit.format.record import Damage
from kvkit.handoff.protocol.outgoing import Stage
from kvkit.handoff.protocol.states import Outcome, Phase
from kvkit.handoff.tier import HandoffTier
from kvkit.moving.counts import Counts, Histogram, Key
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.health import HealthState


class Observed(Protocol):
    """The part of a cache that is observed. Every call is quick and asks no tier outside this process."""

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """By name, in the order in which they are sought."""

    @property
    def namespace(self) -> Namespace:
        """Whose KV it is."""

    @property
    def staging(self) -> Staging:
        """Slots that records pass through."""

    def counts(self) -> Counts:
        """A copy of what was counted so far."""

    def tier_states(self) -> Mapping[str, HealthState]:
        """What the circuit of each tier shows."""

    def queue_depths(self) -> Mapping[str, int]:
        """Reads and writes that wait for a thread, by tier."""

    def puts_under_way(self) -> int:
        """Records that a flush would wait for."""


class CacheCollector(Collector):
    """The metrics of one cache, as the module's text lists them. Keeps no numbers of its own."""

    def __init__(self, cache: Observed) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Every metric as it stands now."""
        counts = self._cache.counts()
        tiers = self._cache.tiers
        yield _info(self._cache.namespace)
        yield from _totals(counts)
        for name, text, by_tier in (
            ("kvkit_hit_tokens", "Tokens that a lookup found", counts.hit_tokens),
            ("kvkit_declined_tokens", "Tokens found and left to compute", counts.declined_tokens),
            ("kvkit_loaded_tokens", "Tokens put into the engine", counts.loaded_tokens),
            ("kvkit_loaded_bytes", "Bytes put into the engine", counts.loaded_bytes),
            ("kvkit_stored_records", "Records that were put completely", counts.stored_records),
            ("kvkit_stored_bytes", "Bytes that were put completely", counts.stored_bytes),
            ("kvkit_written_back_records", "Records put after a load", counts.written_back_records),
            ("kvkit_evicted_records", "Records evicted to make room", counts.evicted_records),
            ("kvkit_refused_records", "Records that there was no room for", counts.refused),
            ("kvkit_timeouts", "Answers that missed their deadline", counts.timeouts),
        ):
            rows = {(tier,): by_tier[tier] for tier in {**tiers, **by_tier}}
            yield _counter(name, text, ("tier",), rows.items())
        damaged = {(tier, cause.value): 0 for tier in tiers for cause in Damage}
        damaged |= {(tier, cause.value): n for (tier, cause), n in counts.damaged.items()}
        yield _counter(
            "kvkit_damaged_records", "Records that did not verify", ("tier", "cause"), damaged.items()
        )
        errors = {(tier, "get"): counts.read_errors[tier] for tier in {**tiers, **counts.read_errors}}
        errors |= {(tier, "put"): counts.write_errors[tier] for tier in {**tiers, **counts.write_errors}}
        yield _counter(
            "kvkit_errors", "Records not delivered or taken", ("tier", "direction"), errors.items()
        )
        yield _histogram("kvkit_transfer_seconds", "Time of a transfer", counts.seconds)
        yield _histogram(
            "kvkit_transfer_bytes_per_second", "Throughput of a transfer", counts.bytes_per_second
        )
        yield from self._gauges()
        for tier in tiers.values():
            if isinstance(tier, HandoffTier):
                yield from _handoff(tier)

    def describe(self) -> Iterable[Metric]:
        """Nothing collected: registering does not call the cache, whose tiers may still be opening."""
        return [Metric("kvkit_cache", "A registry takes one cache", "unknown")]

    def _gauges(self) -> Iterator[Metric]:
        staging = self._cache.staging
        yield GaugeMetricFamily("kvkit_puts_under_way", "Puts to flush", self._cache.puts_under_way())
        yield GaugeMetricFamily("kvkit_slots", "Slots of the staging memory", staging.slots)
        yield GaugeMetricFamily("kvkit_slots_in_use", "Slots that are leased", staging.slots - staging.free)
        depths = GaugeMetricFamily("kvkit_queue_depth", "Reads and writes that wait", labels=("tier",))
        for tier, depth in self._cache.queue_depths().items():
            depths.add_metric((tier,), depth)
        yield depths
        states = GaugeMetricFamily("kvkit_tier_state", "1 for the tier's state", labels=("tier", "state"))
        for tier, state in self._cache.tier_states().items():
            for known in get_args(HealthState):
                states.add_metric((tier, known), float(known == state))
        yield states


def register(cache: Observed, registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """Have `registry` (None: a new one) export `cache`; returns it. One cache per registry.

    Raises:
        ValueError: the registry exports a cache already.
    """
    registry = registry or CollectorRegistry()
    registry.register(CacheCollector(cache))
    return registry


def _info(space: Namespace) -> Metric:
    info = GaugeMetricFamily("kvkit_cache_info", "1: whose cache it is", labels=("model", "rank", "world"))
    info.add_metric((space.model, str(space.rank), str(space.world)), 1)
    return info


def _totals(counts: Counts) -> Iterator[Metric]:
    yield CounterMetricFamily("kvkit_lookups", "Calls of lookup", counts.lookups)
    yield CounterMetricFamily("kvkit_lookup_tokens", "Tokens asked for", counts.lookup_tokens)
    yield CounterMetricFamily("kvkit_queries", "Questions for what is held", counts.queries)
    yield CounterMetricFamily("kvkit_cancelled", "Transfers that were called off", counts.cancelled)
    for name, text, tokens in (
        ("reused", "Tokens whose KV was found elsewhere", counts.blend_reused_tokens),
        ("selected", "Tokens found and computed again", counts.blend_selected_tokens),
        ("computed", "Tokens without KV", counts.blend_computed_tokens),
    ):
        yield CounterMetricFamily(f"kvkit_blend_{name}_tokens", text, tokens)


def _handoff(tier: HandoffTier) -> Iterator[Metric]:
    labels = ("side", "phase")
    transfers = GaugeMetricFamily("kvkit_handoff_transfers", "Transfers under way", labels=labels)
    ended: dict[tuple[str, ...], int] = {}
    if tier.sender is not None:
        stages = Counter(tier.sender.transfers().values())
        for stage in Stage:
            if stage is not Stage.ENDED:
                transfers.add_metric(("sender", stage), stages[stage])
        ended |= {("sender", outcome): tier.sender.outcomes[outcome] for outcome in get_args(Outcome)}
    if tier.receiver is not None:
        phases = Counter(tier.receiver.transfers().values())
        for phase in Phase:
            transfers.add_metric(("receiver", phase), phases[phase])
        ended |= {("receiver", outcome): tier.receiver.outcomes[outcome] for outcome in get_args(Outcome)}
        arena = tier.receiver.arena
        yield GaugeMetricFamily("kvkit_handoff_slots", "Slots of the buffer", arena.slots)
        yield GaugeMetricFamily(
            "kvkit_handoff_slots_in_use", "Those that are leased", arena.slots - arena.free
        )
    yield transfers
    yield _counter("kvkit_handoff_ended", "Transfers that ended", ("side", "outcome"), ended.items())


def _counter(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], int]]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _histogram(name: str, text: str, histograms: Mapping[Key, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=("tier", "direction"))
    for key, histogram in histograms.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family.add_metric(key, list(zip(bounds, accumulate(histogram.buckets), strict=True)), histogram.total)
    return family
