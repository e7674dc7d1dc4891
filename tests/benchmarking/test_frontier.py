"""Ideas for eviction are simulated as policies are, and none has more hits than the optimum."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from short_traces import configured, traces

from benchmarks.research import frontier
from kvkit.lab.simulate.model import simulate
from kvkit.lab.simulate.optimum import most_hits
from kvkit.lab.simulate.traces import Trace


@given(traces(30), st.integers(3, 8))
def test_ideas_are_simulated_as_policies_are(trace: Trace, room: int) -> None:
    """Without an idea it is LRU; and none has more than can be had."""
    told = frontier.returning(trace)
    assert frontier.hits_of(trace, room, frontier.Idea(room, told)) == frontier.hits_of_policy(
        trace, room, "lru"
    )
    assert (
        frontier.hits_of_policy(trace, room, "lru")
        == simulate(trace, configured(room)).hit_tokens.total() // 10
    )
    for idea in frontier.IDEAS.values():
        assert frontier.hits_of(trace, room, idea(room, told)) <= most_hits(trace, room)
