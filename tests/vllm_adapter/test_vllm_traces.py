"""Lookups, loads, stores and handoffs of a real vLLM engine are spans below the trace of their request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm")
pytest.importorskip("opentelemetry.sdk")

from small_models import QWEN, VOCABULARY, save
from trace_collector import PARENT, PROTOCOL, TRACE, TRACEPARENT, Collector
from vllm_engine import BLOCK, Engine, connector, on_disk
from vllm_engine import prompt as prompt_of

LOOKUP, LOAD, STORE, HANDOFF = (f"kvkit.{name}" for name in ("lookup", "load", "store", "handoff"))


def seeded_ids() -> set[str]:
    """Ids that OpenTelemetry would take from vLLM's seed, in every engine the same."""
    seeded = Random(0)
    return {f"{seeded.getrandbits(64):016x}" for _ in range(200)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(QWEN, tmp_path_factory.mktemp("model"))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_what_a_request_waits_for_is_in_its_trace(
    model: Path, collector: Collector, tmp_path: Path, tier: str
) -> None:
    """A lookup in memory may be over before a worker knows of the request's trace."""
    settings = {"tiers": {"memory": {"capacity": "64MiB"}}} if tier == "memory" else on_disk(tmp_path)
    prompt = prompt_of(3 * BLOCK + 5, 1, VOCABULARY)
    with Engine(**PROTOCOL) as engine:
        traced = {"otlp_traces_endpoint": collector.url}
        engine.open(connector(settings), model, skip_tokenizer_init=True, **traced)
        assert engine.do("advised", prompt, None, [], TRACEPARENT) == 0
        cold = collector.spans({LOOKUP, STORE})
        assert engine.do("advised", prompt, None, [], TRACEPARENT) == 3 * BLOCK
        assert engine.do("advised", prompt, None, []) == 3 * BLOCK, "without a trace there are no spans"
    hit = collector.spans({LOAD})[LOAD]
    assert {(span.trace, span.parent) for span in (*cold.values(), hit)} == {(TRACE, PARENT)}
    looked_up, stored = cold[LOOKUP].attributes, cold[STORE].attributes
    assert (looked_up["kvkit.tokens"], looked_up["kvkit.tiers"]) == (0, "none")
    assert (stored["kvkit.tokens"], stored["kvkit.tiers"]) == (3 * BLOCK, tier)
    assert (hit.attributes["kvkit.tokens"], hit.attributes["kvkit.complete"]) == (3 * BLOCK, 1)
    assert hit.attributes["kvkit.tiers"] == f"{3 * BLOCK} ({tier})"
    assert all(span.began_ns <= span.ended_ns for span in (*cold.values(), hit))
    assert cold[LOOKUP].ended_ns <= cold[STORE].began_ns
    assert {span.id for span in (*cold.values(), hit)}.isdisjoint(seeded_ids())
    assert collector.names().count(LOAD) == 1
    assert collector.names().count(LOOKUP) == 2


def test_a_handoff_is_in_the_trace_of_its_prompt(model: Path, collector: Collector, tmp_path: Path) -> None:
    prompt = prompt_of(2 * BLOCK + 5, 2, VOCABULARY)
    address = f"unix://{tmp_path}/decode"
    tiers = {"tiers": {"memory": {"capacity": "64MiB"}}}
    with Engine(**PROTOCOL) as prefill, Engine(**PROTOCOL) as decode:
        for engine, role, handoff in (
            (decode, "kv_consumer", {"role": "decode", "listen": [address], "buffer": "64MiB"}),
            (prefill, "kv_producer", {"role": "prefill", "peers": {"d": address}}),
        ):
            settings = connector(tiers | {"handoff": handoff}, role=role)
            engine.open(settings, model, skip_tokenizer_init=True, otlp_traces_endpoint=collector.url)
        sent = {"do_remote_decode": True, "transfer_id": "t1"}
        prefill.do("advised", prompt, None, [], TRACEPARENT, sent)
        span = collector.spans({HANDOFF})[HANDOFF]
        received = {"do_remote_prefill": True, "transfer_id": "t1"}
        assert decode.do("advised", prompt, None, [], TRACEPARENT, received) >= 2 * BLOCK
        load = collector.spans({LOAD})[LOAD]
    assert (span.trace, span.parent) == (load.trace, load.parent) == (TRACE, PARENT)
    assert "(handoff)" in load.attributes["kvkit.tiers"]
