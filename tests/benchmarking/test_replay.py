"""Replays send a trace's chunks to a real server, at its times, both made smaller alike."""

from __future__ import annotations

import pytest

from benchmarks.micro.bench_simulate import distinct
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
