"""Replays send a trace's chunks to a real server, at its times, both made smaller alike."""

from __future__ import annotations

import pytest

from benchmarks.micro.bench_simulate import distinct
from benchmarks.report.computed import replayed
from benchmarks.serving.replay import REPLAYS
from kvkit.lab.serve.replay import prompts_alone
from kvkit.lab.simulate.traces import trace_of


@pytest.mark.parametrize("name", REPLAYS)
def test_a_smaller_trace_has_the_same_chunks(name: str) -> None:
    replay = REPLAYS[name]
    whole = prompts_alone(trace_of(replay.trace, replay.requests), replay.requests)
    sent = replay.prompts()
    assert len(sent.requests) == replay.requests
    assert sent.block_tokens == (replay.chunk_tokens or whole.block_tokens)
    assert distinct(sent) == distinct(whole)
    first = whole.requests[0].timestamp_ms
    for ours, theirs in zip(sent.requests, whole.requests, strict=True):
        assert (ours.session, ours.chunks) == (theirs.session, theirs.chunks)
        assert ours.input_tokens // sent.block_tokens == theirs.prompt_chunks == ours.prompt_chunks
        assert ours.timestamp_ms * (replay.speed or 1.0) == pytest.approx(theirs.timestamp_ms - first)


def test_policies_close_a_share_of_the_gap_to_the_optimum() -> None:
    lru = {"policy": "lru", "share": 0.1, "hits": 0.2, "simulated_hits": 0.3, "most_hits": 0.5}
    other = lru | {"policy": "other", "hits": 0.35, "simulated_hits": 0.35}
    more = lru | {"share": 0.05, "hits": 0.1}
    rows = list(replayed({"rows": [lru, other, more]}))
    assert [(row["share"], row["policy"]) for row in rows] == [(0.05, "lru"), (0.1, "lru"), (0.1, "other")]
    assert [row["closed"] for row in rows] == pytest.approx([0, 0, 0.5])
    assert [row["simulated_closed"] for row in rows] == pytest.approx([0, 0, 0.25])
