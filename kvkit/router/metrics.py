"""Metrics of the router, for Prometheus.

| metric | labels | meaning |
|---|---|---|
| kvkit_router_requests_total | decode, prefill, reason | attempts by route; no prefill: D prefills |
| kvkit_router_answers_total | status | answers by HTTP status; 499: the client disconnected |
| kvkit_router_failures_total | engine, cause | unreachable, error, timeout, cut, aborted, kept (by P) |
| kvkit_router_takeovers_total | outcome | streams that broke off: continued by another engine, or failed |
| kvkit_router_prompt_tokens_total | | prompt tokens; an estimate where no engine was asked |
| kvkit_router_new_tokens_total | computed | prompt tokens to compute, by prefill or decode |
| kvkit_router_seconds | phase | histogram: lookup, prefill, first_event (of D), total |
| kvkit_router_first_uses_total | outcome | documents of answered prompts: computed, held, failed, left_out |
| kvkit_router_engine_up | engine, role | 1 while the engine gets requests, else 0 |
| kvkit_router_engine_requests | engine, role | requests in flight |
| kvkit_router_engine_tokens_per_second | engine, kind | measured speed: prefill (of prompts), handoff |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvkit.router.engines import Engine

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RouterMetrics:
    """The metrics of one router, in a registry of their own."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(engines))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvkit_router_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests by route", "decode", "prefill", "reason")
        self.answers = counter("answers", "Answers by status", "status")
        self.failures = counter("failures", "Requests that an engine failed", "engine", "cause")
        self.takeovers = counter("takeovers", "Streams that broke off", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.new_tokens = counter("new_tokens", "Prompt tokens to compute", "computed")
        self.first_uses = counter("first_uses", "Documents of answered prompts", "outcome")
        self.seconds = Histogram(
            "kvkit_router_seconds", "Time by phase", ("phase",), buckets=_SECONDS, registry=self.registry
        )


class _Engines(Collector):
    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvkit_router_engine_up", "1 while used", labels=("engine", "role"))
        requests = GaugeMetricFamily(
            "kvkit_router_engine_requests", "Requests in flight", labels=("engine", "role")
        )
        speeds = GaugeMetricFamily(
            "kvkit_router_engine_tokens_per_second", "Measured speed", labels=("engine", "kind")
        )
        for engine in self._engines:
            up.add_metric((engine.name, engine.role), float(engine.up))
            requests.add_metric((engine.name, engine.role), engine.requests)
            for kind, speed in (("prefill", engine.prefill_speed), ("handoff", engine.handoff_speed)):
                if speed is not None:
                    speeds.add_metric((engine.name, kind), speed)
        yield from (up, requests, speeds)
