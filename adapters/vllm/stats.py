"""Statistics that the connector reports to vLLM's logger and Prometheus endpoint (see `METRICS`).

Each rank has its share of a token's KV: add up the ranks' bytes, but not their tokens. Tokens are the same
for all ranks unless one of them lost records.
"""

from __future__ import annotations

import threading
from collections import Counter
from itertools import chain
from statistics import fmean
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvkit.adapters.vllm.settings import NAME
from kvkit.adapters.vllm.step import BlendDone
from kvkit.cache import Cache, Loaded, Stored
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.transfer.counters import BYTES_PER_SECOND, Counts
from kvkit.transfer.sequence import formats_of

METRICS = """\
| metric | labels | meaning |
|---|---|---|
| vllm:kvkit_lookup_tokens | rank | tokens of whole chunks that were looked up |
| vllm:kvkit_hit_tokens | rank, tier | tokens that lookups found |
| vllm:kvkit_approximate_tokens | rank, tier | tokens that lookups found in records with fewer bits |
| vllm:kvkit_loaded_tokens | rank, tier | tokens loaded into vLLM's pages, by the tier they came from |
| vllm:kvkit_stored_tokens | rank, tier | tokens of complete puts, write-backs included, handoffs excluded |
| vllm:kvkit_loaded_bytes | rank, tier | bytes loaded into vLLM's pages |
| vllm:kvkit_stored_bytes | rank, tier | bytes of complete puts |
| vllm:kvkit_load_errors | rank | loads that returned less than was promised |
| vllm:kvkit_handoffs_refused | rank | requests whose `do_remote_decode` or `…_prefill` was ignored |
| vllm:kvkit_saves_called_off | rank | saves that a step called off because slots were short |
| vllm:kvkit_blend_exact_tokens | rank | tokens of blended prompts with the KV of a full prefill |
| vllm:kvkit_blend_reused_tokens | rank | tokens with KV found elsewhere and moved, selected ones included |
| vllm:kvkit_blend_selected_tokens | rank | reused tokens that were recomputed |
| vllm:kvkit_blend_computed_tokens | rank | tokens of blended prompts without KV, which were computed |
| vllm:kvkit_blend_seconds | rank, stage | seconds by stage: load, place (a part of load), choose, rows |
| vllm:kvkit_load_bytes_per_second | rank | histogram: throughput of a request's load |
| vllm:kvkit_store_bytes_per_second | rank | histogram: throughput of a save from vLLM's pages |
| vllm:kv_offload_load_bytes | | bytes loaded into vLLM's pages, all ranks |
| vllm:kv_offload_load_time | | seconds of these loads |
| vllm:kv_offload_store_bytes | | bytes saved from vLLM's pages, all ranks |
| vllm:kv_offload_store_time | | seconds of these saves |
| vllm:kv_offload_tiering_read_bytes | tier | bytes loaded into vLLM's pages, all ranks |
| vllm:kv_offload_tiering_read_time | tier | seconds of a tier's reads |
| vllm:kv_offload_tiering_write_bytes | tier | bytes of complete puts, all ranks |
| vllm:kv_offload_tiering_write_time | tier | seconds of a tier's puts |
"""
"""Table of the metrics. vLLM's own labels (model_name, engine) come before these labels.

Those named `kv_offload` have the names and labels of vLLM's own offloading, for dashboards that show either.
"""

_OFFLOADING = {
    "loaded_bytes": ("kv_offload_load_bytes", "kv_offload_tiering_read_bytes"),
    "load_seconds": ("kv_offload_load_time",),
    "saved_bytes": ("kv_offload_store_bytes",),
    "save_seconds": ("kv_offload_store_time",),
    "read_seconds": ("kv_offload_tiering_read_time",),
    "stored_bytes": ("kv_offload_tiering_write_bytes",),
    "write_seconds": ("kv_offload_tiering_write_time",),
}
"""Names of vLLM's own offloading for counts, which are summed over ranks."""


class Stats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Counts of an interval, by rank and metric: numbers, numbers by tier, and lists of observations."""

    data: dict[str, dict[str, Any]]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Add the counts of `other`. Mutates and returns this object."""
        for rank, counted in other.data.items():
            totals = self.data.setdefault(rank, {})
            for name, value in counted.items():
                totals[name] = _add(totals[name], value) if name in totals else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number per metric: the sum; of tokens, the highest rank's; of observations, the mean."""
        reduced: dict[str, int | float] = {}
        for name in dict.fromkeys(name for counted in self.data.values() for name in counted):
            values = [counted[name] for counted in self.data.values() if name in counted]
            if isinstance(values[0], list):
                reduced[f"mean_{name}"] = fmean(chain(*values))
                continue
            totals = [sum(value.values()) if isinstance(value, dict) else value for value in values]
            reduced[name] = max(totals) if name.endswith("_tokens") else sum(totals)
        return reduced

    def is_empty(self) -> bool:
        return not self.data


def _add(total: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {tier: total.get(tier, 0) + value.get(tier, 0) for tier in {**total, **value}}
    return total + value


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics, as listed in `METRICS`.

    The names of vLLM's own offloading are left to it where kvkit is one connector of several.
    """

    def __init__(self, vllm_config: Any, *arguments: Any) -> None:
        super().__init__(vllm_config, *arguments)
        self._metrics: dict[str, Any] = {}
        alone = vllm_config.kv_transfer_config.kv_connector == NAME
        for row in METRICS.splitlines()[2:]:
            name, labels, meaning = (cell.strip() for cell in row.strip("|").split("|"))
            if name.startswith("vllm:kv_offload_") and not alone:
                continue
            description = name, meaning, [*self._labelnames, *filter(None, labels.split(", "))]
            self._metrics[name.removeprefix("vllm:").removeprefix("kvkit_")] = (
                self._histogram_cls(*description, buckets=BYTES_PER_SECOND)
                if meaning.startswith("histogram")
                else self._counter_cls(*description)
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        engine = self.per_engine_labelvalues[engine_idx]
        for rank, counted in transfer_stats_data.items():
            for name, value in counted.items():
                self._add(name, [*engine, rank], value)
                for offloading_name in _OFFLOADING.get(name, ()):
                    by_tier = "tiering" in offloading_name or not isinstance(value, dict)
                    self._add(offloading_name, engine, value if by_tier else sum(value.values()))

    def _add(self, name: str, labels: list[Any], value: Any) -> None:
        """Add a count: a number, numbers by tier, or a list of observations; other names are ignored."""
        metric = self._metrics.get(name)
        if metric is None:
            return
        if isinstance(value, dict):
            for tier, amount in value.items():
                metric.labels(*labels, tier).inc(amount)
        elif isinstance(value, list):
            for observed in value:
                metric.labels(*labels).observe(observed)
        else:
            metric.labels(*labels).inc(value)


class Refusals:
    """Number of handoffs that the scheduler refused since the last `take`. For the scheduler's thread."""

    def __init__(self) -> None:
        self._count = 0
        self._reasons: set[str] = set()

    def add(self) -> None:
        """Count a refusal."""
        self._count += 1

    def first(self, reason: str) -> bool:
        """Count a refusal. Return whether it is the first for this reason."""
        self.add()
        known = reason in self._reasons
        self._reasons.add(reason)
        return not known

    def take(self) -> Stats | None:
        """Return the count since the last call, as rank 0's, or None if it is 0."""
        count, self._count = self._count, 0
        return Stats({"0": {"handoffs_refused": count}}) if count else None


class Recorder:
    """Statistics of one rank's cache since the last `take`. Thread-safe."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._rank = str(cache.namespace.rank)
        formats = formats_of(cache.layout, cache.namespace)[: cache.layout.token_groups]
        self._tokens_per_record = cache.namespace.chunk_tokens / len(formats)
        self._bytes_per_token = (
            sum(record_format.record_bytes for record_format in formats) / cache.namespace.chunk_tokens
        )
        self._lock = threading.Lock()
        self._stats = Stats()
        self._before = Counts()

    def loaded(self, loaded: Loaded, seconds: float, complete: bool) -> None:
        """Note a load. `complete`: True if it loaded all tokens that the lookup found."""
        if loaded.tokens:
            rate = loaded.tokens * self._bytes_per_token / seconds
            self._note(load_bytes_per_second=[rate], load_seconds=seconds)
        if not complete:
            self._note(load_errors=1)

    def cancelled_saves(self, saves: int) -> None:
        """Note saves that did not end in time and were cancelled."""
        if saves:
            self._note(saves_called_off=saves)

    def blended(self, done: BlendDone) -> None:
        """Note a blend."""
        self._note(
            blend_exact_tokens=done.exact,
            blend_reused_tokens=done.reused,
            blend_selected_tokens=len(done.selected),
            blend_computed_tokens=done.computed,
            blend_seconds=done.seconds,
        )

    def stored(self, stored: Stored | None, seconds: float) -> None:
        """Note a save."""
        if stored is not None and stored.new_tokens:
            size = stored.new_tokens * self._bytes_per_token
            self._note(store_bytes_per_second=[size / seconds], saved_bytes=size, save_seconds=seconds)

    def take(self) -> Stats | None:
        """Return the counts since the last call, or None if there are none."""
        now, before = self._cache.counts(), self._before
        self._before = now
        increases: dict[str, Any] = {"lookup_tokens": now.lookup_tokens - before.lookup_tokens}
        for name in ("hit_tokens", "approximate_tokens", "loaded_tokens", "loaded_bytes", "stored_bytes"):
            increases[name] = dict(getattr(now, name) - getattr(before, name))
        for name, direction in (("read_seconds", "get"), ("write_seconds", "put")):
            increases[name] = dict(_seconds(now, direction) - _seconds(before, direction))
        increases["stored_tokens"] = dict(self._stored_tokens(now) - self._stored_tokens(before))
        self._note(**{name: value for name, value in increases.items() if value})
        with self._lock:
            stats, self._stats = self._stats, Stats()
        return None if stats.is_empty() else stats

    def _note(self, **counted: Any) -> None:
        if counted:
            with self._lock:
                self._stats.aggregate(Stats({self._rank: counted}))

    def _stored_tokens(self, counts: Counts) -> Counter[str]:
        """Return tokens by tier from all records so far: rounding per interval would lose parts of chunks."""
        tokens, records = self._tokens_per_record, counts.stored_records - counts.snapshot_records
        return Counter({tier: round(n * tokens) for tier, n in records.items() if tier != HANDOFF})


def _seconds(counts: Counts, direction: str) -> Counter[str]:
    """Return the seconds of a direction's transfers, by tier."""
    return Counter({tier: times.total for (tier, way), times in counts.seconds.items() if way == direction})
