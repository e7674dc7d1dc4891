"""The optimal hits equal an exhaustive search, and no policy exceeds them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from short_traces import configured, traces

from kvkit.lab.simulate.model import Simulator, simulate
from kvkit.lab.simulate.optimum import most_hits
from kvkit.lab.simulate.traces import Trace
from kvkit.tiers.eviction.plugins import POLICIES


def searched(trace: Trace, room: int) -> int:
    """The most hits, leading runs, over every choice of what is held after each request."""
    best: dict[frozenset[str], int] = {frozenset(): 0}
    for request in trace.requests:
        after: dict[frozenset[str], int] = {}
        for held, hits in best.items():
            prompt = request.chunks[: request.prompt_chunks]
            run = next((i for i, name in enumerate(prompt) if name not in held), len(prompt))
            known = held.union(request.chunks)
            for count in range(min(room, len(known)) + 1):
                for kept in combinations(sorted(known), count):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits + run)
        best = after
    return max(best.values())


@settings(max_examples=100)
@given(traces(8, "abc", 2), st.integers(0, 3))
def test_it_is_what_a_search_of_everything_finds(trace: Trace, room: int) -> None:
    assert most_hits(trace, room) == searched(trace, room)


@given(traces(), st.integers(1, 8))
def test_without_a_limit_all_that_returns_is_a_hit(trace: Trace, room: int) -> None:
    seen: set[str] = set()
    returned = 0
    for request in trace.requests:
        returned += sum(name in seen for name in request.chunks[: request.prompt_chunks])
        seen.update(request.chunks)
    assert most_hits(trace, room) <= most_hits(trace, None) == returned


def test_room_is_that_of_all_tiers_of_all_nodes() -> None:
    assert Simulator(configured(4, 9, nodes=3), 10).room == 3 * 4 + 9
    assert Simulator(configured(4, None), 10).room is None


@given(
    traces(),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.integers(1, 2),
    st.sampled_from(list(POLICIES)),
)
def test_no_policy_has_more(trace: Trace, capacities: list[int], nodes: int, eviction: str) -> None:
    config = configured(*capacities, nodes=nodes, eviction=eviction)
    hit = simulate(trace, config).hit_tokens.total()
    assert hit <= most_hits(trace, Simulator(config, 10).room) * trace.block_tokens


@given(traces(), st.integers(1, 8))
def test_more_room_is_never_worse(trace: Trace, room: int) -> None:
    assert most_hits(trace, room - 1) <= most_hits(trace, room)
