"""The connector reports statistics of all ranks and intervals to vLLM's logger and Prometheus."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    get_connector_metric_definitions,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvkit.adapters.vllm.connector import log_as_vllm
from kvkit.adapters.vllm.settings import NAME
from kvkit.adapters.vllm.stats import METRICS, PromMetrics, Recorder, Refusals, Stats
from kvkit.adapters.vllm.step import BlendDone
from kvkit.cache import Loaded, Stored
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.transfer.counters import Counts

FIRST = {"lookup_tokens": 64, "hit_tokens": {"disk": 32}, "loaded_bytes": {"disk": 100}}
SECOND = {"hit_tokens": {"disk": 16, "memory": 8}, "loaded_bytes": {"disk": 50}, "load_errors": 1}


def both_ranks() -> Stats:
    """Two intervals of rank 0, and one of rank 1."""
    speeds = {"load_bytes_per_second": [1e9, 3e9]}
    told = Stats({"0": FIRST | {"load_bytes_per_second": [5e9]}})
    return told.aggregate(Stats({"1": SECOND | speeds})).aggregate(Stats({"0": dict(SECOND)}))


def test_intervals_are_added_up_and_ranks_kept_apart() -> None:
    told = both_ranks().data
    assert told["0"]["hit_tokens"] == {"disk": 48, "memory": 8}
    assert told["1"]["hit_tokens"] == {"disk": 16, "memory": 8}
    assert (told["0"]["load_errors"], told["1"]["load_errors"]) == (1, 1)


def test_the_log_adds_up_bytes_over_ranks_and_takes_the_tokens_of_one() -> None:
    assert both_ranks().reduce() == {
        "lookup_tokens": 64,
        "hit_tokens": 56,
        "loaded_bytes": 200,
        "mean_load_bytes_per_second": 3e9,
        "load_errors": 2,
    }


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def recorder(counts: Counts) -> Recorder:
    """Of a cache whose chunks of 16 tokens are three records."""
    layout = KVLayout(
        tuple(LayerGroup((i,), 1, k_size=8, v_size=8, dtype="float32", block_tokens=16) for i in range(3))
    )
    namespace = Namespace("m", layout.fingerprint(), "d", chunk_tokens=16)
    cache: Any = SimpleNamespace(layout=layout, namespace=namespace, counts=lambda: counts.copy())
    return Recorder(cache)


def test_tokens_of_chunks_that_are_stored_piece_by_piece_add_up(counts: Counts, recorder: Recorder) -> None:
    """A record of one of three groups of layers is 5⅓ tokens' worth of a chunk of 16."""
    told = 0
    for _ in range(6):
        counts.stored_records["disk"] += 1
        stats = recorder.take()
        assert stats is not None
        told += stats.data["0"]["stored_tokens"]["disk"]
    assert told == 2 * 16


def exported(connector: str = NAME) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What Prometheus sees of both ranks."""
    registry = CollectorRegistry()

    def into(kind: type) -> object:
        return lambda *arguments, **options: kind(*arguments, **options, registry=registry)

    kinds = {kind: into(kind) for kind in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=connector))
    shown = PromMetrics(config, kinds, ["engine"], {0: ["0"]})
    shown.observe(both_ranks().data)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def test_prometheus_sees_each_rank() -> None:
    found = exported()

    def value(name: str, **labels: str) -> float:
        return found[f"vllm:kvkit_{name}", frozenset({**labels, "engine": "0"}.items())]

    assert value("hit_tokens_total", rank="0", tier="disk") == 48
    assert value("hit_tokens_total", rank="1", tier="disk") == 16
    assert value("load_errors_total", rank="1") == 1
    assert value("load_bytes_per_second_count", rank="1") == 2


def test_names_of_vllms_own_offloading_count_all_ranks_unless_it_is_there_itself() -> None:
    found, both = exported(), exported("MultiConnector")
    engine = ("engine", "0")
    assert found["vllm:kv_offload_load_bytes_total", frozenset({engine})] == 200
    assert found["vllm:kv_offload_tiering_read_bytes_total", frozenset({engine, ("tier", "disk")})] == 200
    assert not any(name.startswith("vllm:kv_offload_") for name, _ in both)
    assert both["vllm:kvkit_loaded_bytes_total", frozenset({engine, ("rank", "1"), ("tier", "disk")})] == 50


def test_names_of_vllms_own_offloading_have_its_labels() -> None:
    transfers = get_connector_metric_definitions()
    tiers = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [{"type": "fs"}]})
    rows = re.findall(r"^\| (vllm:kv_offload_\w+) \| ([\w, ]*)\|", METRICS, re.MULTILINE)
    assert {(name, labels.strip()) for name, labels in rows} <= {
        (name, ", ".join(definition.labelnames)) for name, definition in {**transfers, **tiers}.items()
    }


def test_the_table_lists_what_is_told(counts: Counts, recorder: Recorder) -> None:
    counts.lookup_tokens += 16
    counts.moved("disk", "get", 100, 1.0)
    counts.moved("disk", "put", 100, 1.0)
    for counter in (counts.hit_tokens, counts.approximate_tokens, counts.loaded_tokens, counts.loaded_bytes):
        counter["disk"] += 16
    for counter in (counts.stored_records, counts.stored_bytes):
        counter["disk"] += 16
    recorder.loaded(Loaded(16), 1.0, complete=False)
    recorder.stored(Stored(16, 16), 1.0)
    recorder.cancelled_saves(1)
    recorder.blended(BlendDone("a", 1, 2, 3, (), np.zeros(1, np.int32), {"rows": 1.0}))
    told, refusals = recorder.take(), Refusals()
    assert told is not None
    refusals.add()
    refused = refusals.take()
    assert refused is not None
    told.aggregate(refused)
    rows = re.findall(r"^\| vllm:kvkit_(\w+) \| ([\w, ]*) \|", METRICS, re.MULTILINE)
    by = {name: ", stage" if name == "blend_seconds" else ", tier" for name in told.data["0"]}
    only = {"load_seconds", "saved_bytes", "save_seconds", "read_seconds", "write_seconds"}
    assert dict(rows) == {
        name: "rank" + by[name] * isinstance(value, dict)
        for name, value in told.data["0"].items()
        if name not in only
    }, "those have the names of vLLM's own offloading alone"
    assert recorder.take() is None


def test_the_log_goes_where_vllms_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, root = logging.getLogger("kvkit"), logging.getLogger("vllm"), logging.getLogger()
    monkeypatch.setattr(theirs, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    log_as_vllm()
    assert ours.handlers != theirs.handlers, "the tests have configured logging"
    monkeypatch.setattr(root, "handlers", [])
    log_as_vllm()
    assert (ours.handlers, ours.level, ours.propagate) == (theirs.handlers, logging.INFO, False)


def test_refused_handoffs_are_counted_each_and_told_once() -> None:
    refusals = Refusals()
    assert refusals.take() is None
    assert [refusals.first(reason) for reason in ("a", "a", "b", "a")] == [True, False, True, False]
    refusals.add()
    told = refusals.take()
    assert told is not None
    assert told.data == {"0": {"handoffs_refused": 5}}
    assert refusals.take() is None
