"""Prometheus scrapes the values that were counted, and the documented list of metrics is complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from stub_cache import ManagedCache, filled_counts

from kvkit.format.record import Damage
from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.protocol.states import Limits
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import Sender
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport.handshake import Identity
from kvkit.observe import metrics
from kvkit.staging import Staging
from kvkit.tiers.testing.contract import DEADLINE_S, SLOT_BYTES, record_names
from kvkit.transfer.counters import Histogram

TIERS = ("near", "[far]")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def cache() -> Iterator[ManagedCache]:
    cache = ManagedCache()
    yield cache
    cache.close()


def scrape(cache: ManagedCache) -> Samples:
    text = generate_latest(metrics.register(cache)).decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def take(samples: Samples, name: str, **labels: str) -> float:
    return samples.pop((name, frozenset(labels.items())))


def expect_histogram(samples: Samples, name: str, histogram: Histogram, **labels: str) -> None:
    count = 0
    for bound, size in zip((*histogram.bounds, float("inf")), histogram.buckets, strict=True):
        count += size
        label = "+Inf" if bound == float("inf") else str(bound)
        assert take(samples, f"{name}_bucket", le=label, **labels) == count
    assert take(samples, f"{name}_count", **labels) == count
    assert take(samples, f"{name}_sum", **labels) == pytest.approx(histogram.total)


def test_what_is_scraped_is_what_was_counted_and_nothing_else(cache: ManagedCache) -> None:
    cache.kept = counts = filled_counts()
    samples = scrape(cache)
    assert take(samples, "kvkit_lookups_total") == counts.lookups
    assert take(samples, "kvkit_lookup_tokens_total") == counts.lookup_tokens
    assert take(samples, "kvkit_queries_total") == counts.queries
    assert take(samples, "kvkit_cancelled_total") == counts.cancelled
    assert take(samples, "kvkit_blend_reused_tokens_total") == counts.blend_reused_tokens
    assert take(samples, "kvkit_blend_selected_tokens_total") == counts.blend_selected_tokens
    assert take(samples, "kvkit_blend_computed_tokens_total") == counts.blend_computed_tokens
    by_tier: dict[str, Mapping[str, int]] = {
        "hit_tokens": counts.hit_tokens,
        "approximate_tokens": counts.approximate_tokens,
        "declined_tokens": counts.declined_tokens,
        "loaded_tokens": counts.loaded_tokens,
        "loaded_bytes": counts.loaded_bytes,
        "stored_records": counts.stored_records,
        "stored_bytes": counts.stored_bytes,
        "written_back_records": counts.written_back_records,
        "evicted_records": counts.evicted_records,
        "refused_records": counts.refused,
        "timeouts": counts.timeouts,
    }
    for tier in TIERS:
        for name, values in by_tier.items():
            assert take(samples, f"kvkit_{name}_total", tier=tier) == values[tier] > 0
        for cause in Damage:
            found = take(samples, "kvkit_damaged_records_total", tier=tier, cause=cause.value)
            assert found == counts.damaged[tier, cause] > 0
        assert take(samples, "kvkit_errors_total", tier=tier, direction="get") == counts.read_errors[tier]
        assert take(samples, "kvkit_errors_total", tier=tier, direction="put") == counts.write_errors[tier]
    for (tier, direction), histogram in counts.seconds.items():
        expect_histogram(samples, "kvkit_transfer_seconds", histogram, tier=tier, direction=direction)
    for (tier, direction), histogram in counts.bytes_per_second.items():
        name = "kvkit_transfer_bytes_per_second"
        expect_histogram(samples, name, histogram, tier=tier, direction=direction)
    left = {name for name, _ in samples}
    assert left == {
        *(
            "kvkit_cache_info",
            "kvkit_puts_under_way",
            "kvkit_slots",
            "kvkit_slots_in_use",
            "kvkit_queue_depth",
        ),
        "kvkit_tier_state",
    }


def test_gauges_are_of_the_moment(cache: ManagedCache) -> None:
    registry = metrics.register(cache)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    leases = cache.staging.acquire(5, 1.0, at_least=5)
    cache.break_tier("[far]")
    assert value("kvkit_slots") == 12
    assert value("kvkit_slots_in_use") == 5
    assert value("kvkit_puts_under_way") == 3
    assert value("kvkit_queue_depth", tier="[far]") == 7
    states = {
        s: value("kvkit_tier_state", tier="[far]", state=s) for s in ("ok", "slow", "open", "half-open")
    }
    assert states == {"ok": 0, "slow": 0, "open": 1, "half-open": 0}
    assert value("kvkit_tier_state", tier="near", state="ok") == 1
    for lease in leases:
        lease.release()
    assert value("kvkit_slots_in_use") == 0


def test_counters_of_every_tier_begin_at_zero(cache: ManagedCache) -> None:
    samples = scrape(cache)
    for tier in TIERS:
        assert take(samples, "kvkit_hit_tokens_total", tier=tier) == 0
        assert take(samples, "kvkit_errors_total", tier=tier, direction="put") == 0
        assert take(samples, "kvkit_damaged_records_total", tier=tier, cause="truncated") == 0


def test_what_is_counted_of_a_place_that_is_no_tier_is_shown_too(cache: ManagedCache) -> None:
    cache.kept.loaded_tokens["handoff"] = 9
    assert take(scrape(cache), "kvkit_loaded_tokens_total", tier="handoff") == 9


def test_the_list_in_the_module_is_complete(cache: ManagedCache) -> None:
    cache.kept = filled_counts()
    tier = handoff_tier()
    cache.tiers = {**cache.tiers, "handoff": tier}
    rows = re.findall(r"^\| (kvkit_\w+) \|([\w, ]*)\|", metrics.METRICS, re.MULTILINE)
    documented = {name: set(labels.replace(",", " ").split()) for name, labels in rows}
    found: dict[str, set[str]] = {}
    for name, labels in scrape(cache):
        stem = re.sub(r"_(bucket|count|sum)$", "", name)
        found.setdefault(stem, set()).update(key for key, _ in labels if key != "le")
    assert documented == found
    tier.close()


def handoff_tier() -> HandoffTier:
    limits = Limits(DEADLINE_S, DEADLINE_S, DEADLINE_S)
    identity = Identity("node", namespace="n", layout="l", slot_bytes=SLOT_BYTES)
    sender = Sender(identity, timeout_s=DEADLINE_S, transfer_s=DEADLINE_S)
    return HandoffTier(Receiver(Staging(SLOT_BYTES, 4, shared=True), limits), sender)


def test_handoff_is_of_the_moment(cache: ManagedCache, tmp_path: Path) -> None:
    tier = handoff_tier()
    cache.tiers = {**cache.tiers, "handoff": tier}
    registry = metrics.register(cache)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvkit_handoff_{name}", labels)

    identity = Identity("node", namespace="n", layout="l", slot_bytes=SLOT_BYTES)
    assert tier.receiver is not None
    assert tier.sender is not None
    listen = [f"unix://{tmp_path}/sockets/x"]
    tier.endpoint = Endpoint(tier.receiver, (), identity, listen, timeout_s=DEADLINE_S, pin_s=1.0)
    transfer = tier.sender.open("a", tier.endpoint.addresses[0], record_names(3), DEADLINE_S)
    transfer.admitted.result(DEADLINE_S)
    assert (value("slots"), value("slots_in_use")) == (4, 3)
    assert value("transfers", side="sender", phase="sending") == 1
    assert value("transfers", side="receiver", phase="receiving") == 1
    assert value("transfers", side="receiver", phase="waiting") == 0
    tier.sender.finish("a")
    assert transfer.done.result(DEADLINE_S) == 3
    refused = tier.sender.open("b", tier.endpoint.addresses[0], record_names(5), DEADLINE_S)
    assert refused.admitted.exception(DEADLINE_S) is not None
    for side in ("sender", "receiver"):
        ended = {o: value("ended_total", side=side, outcome=o) for o in ("done", "refused", "failed")}
        assert ended == {"done": 1, "refused": 1, "failed": 0}
    tier.close()


@pytest.mark.parametrize(
    ("encode", "parse"),
    [(generate_latest, text_string_to_metric_families), (generate_openmetrics, parse_openmetrics)],
)
def test_both_text_formats_can_be_read(
    cache: ManagedCache, encode: Callable[[CollectorRegistry], bytes], parse: Callable[[str], Any]
) -> None:
    cache.kept = filled_counts()
    families = list(parse(encode(metrics.register(cache)).decode()))
    kinds = {family.name: family.type for family in families}
    assert kinds["kvkit_transfer_seconds"] == "histogram"
    assert kinds["kvkit_slots"] == "gauge"
    assert kinds["kvkit_lookups"] == "counter"


def test_a_registry_of_ones_own_takes_one_cache(cache: ManagedCache) -> None:
    registry = CollectorRegistry()
    assert metrics.register(cache, registry) is registry
    with pytest.raises(ValueError, match="kvkit"):
        metrics.register(cache, registry)
