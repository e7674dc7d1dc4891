"""The router's spans reach a collector below the client's trace, and engines get the trace of their hop."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("opentelemetry.sdk")

from routers import (  # noqa: F401 - fixtures, too
    COMPLETIONS,
    Routed,
    Start,
    ask,
    completion,
    engine_processes,
    engines_as_new,
    stream,
    text_of,
    wanted,
)
from trace_collector import PARENT, PROTOCOL, TRACE, TRACEPARENT, Collector

from kvkit.router.settings import read_router_config
from kvkit.router.traces import Traces
from kvkit.settings import ConfigError

ROUTER, LOOKUP, PREFILL, DECODE = (
    "kvkit.router",
    *(f"kvkit.router.{hop}" for hop in ("lookup", "prefill", "decode")),
)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name, value in PROTOCOL.items():
        monkeypatch.setenv(name, value)
    with Collector() as made:
        yield made


@pytest.mark.parametrize("streams", [False, True])
def test_each_hop_is_a_span_below_the_clients_trace(
    start: Start, collector: Collector, streams: bool
) -> None:
    engines = start()
    engines["p0"].set(params={"do_remote_prefill": True})
    settings = engines.settings(d0={"handoff": "tcp://127.0.0.1:1"})
    body = completion()
    with Routed(**settings, otlp_traces_endpoint=collector.url) as router:
        if streams:
            assert "".join(map(text_of, stream(router.url, COMPLETIONS, body, traceparent=TRACEPARENT)))
        else:
            status, answer = ask(router.url, COMPLETIONS, body, traceparent=TRACEPARENT)
            assert (status, text_of(answer)) == (200, wanted(body))
    spans = collector.spans({ROUTER, PREFILL, DECODE})
    assert {span.trace for span in spans.values()} == {TRACE}
    whole, prefill, decode = (spans[name] for name in (ROUTER, PREFILL, DECODE))
    assert (whole.parent, prefill.parent, decode.parent) == (PARENT, whole.id, whole.id)
    assert (prefill.attributes["kvkit.engine"], decode.attributes["kvkit.engine"]) == ("p0", "d0")
    assert whole.began_ns <= prefill.began_ns <= prefill.ended_ns <= decode.began_ns <= whole.ended_ns
    for engine, hop in (("p0", prefill), ("d0", decode)):
        (seen,) = engines[engine].seen()
        assert seen["headers"]["traceparent"] == f"00-{TRACE}-{hop.id}-01"


def test_a_request_without_a_trace_begins_one(start: Start, collector: Collector) -> None:
    engines = start()
    with Routed(**engines.settings(), otlp_traces_endpoint=collector.url) as router:
        ask(router.url, COMPLETIONS, completion(max_tokens=2))
    spans = collector.spans({ROUTER, DECODE})
    assert spans[ROUTER].parent == ""
    assert spans[DECODE].trace == spans[ROUTER].trace != TRACE


def test_a_failed_hop_is_marked_and_the_next_one_is_a_span_of_its_own(
    start: Start, collector: Collector
) -> None:
    engines = start(prefill=0, decode=2)
    for name in ("d0", "d1"):
        engines[name].set(status=500)
    with Routed(**engines.settings(), otlp_traces_endpoint=collector.url) as router:
        status, _ = ask(router.url, COMPLETIONS, completion(max_tokens=2), traceparent=TRACEPARENT)
    assert status == 500
    spans = collector.spans({ROUTER, DECODE})
    assert spans[DECODE].failed
    assert spans[ROUTER].failed
    assert collector.names().count(DECODE) >= 2


def test_a_collector_that_is_gone_costs_no_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PROTOCOL.items():
        monkeypatch.setenv(name, value)
    with Collector() as gone:
        pass
    engines, body = start(), completion(max_tokens=2)
    with Routed(**engines.settings(), otlp_traces_endpoint=gone.url) as router:
        status, answer = ask(router.url, COMPLETIONS, body, traceparent=TRACEPARENT)
    assert (status, text_of(answer)) == (200, wanted(body))


def test_without_an_endpoint_headers_are_passed_on_as_they_came() -> None:
    traces = Traces(None)
    with traces.span("any", {"traceparent": TRACEPARENT, "x": "y"}) as headers:
        assert headers == {"traceparent": TRACEPARENT, "x": "y"}
    traces.close()


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [("collector:4317", "otlp_traces_endpoint"), (5, "otlp_traces_endpoint = 5")],
)
def test_an_endpoint_that_cannot_be_is_named(endpoint: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_router_config(decode={"d": {"url": "http://d"}}, otlp_traces_endpoint=endpoint)


def test_what_is_missing_for_spans_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "morse")
    with pytest.raises(ConfigError, match="= 'morse': want grpc or http/protobuf"):
        Traces("http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"is missing: pip install 'kvkit-llm\[tracing\]'"):
        Traces("http://127.0.0.1:1")
