"""Plans load a leading run without gaps, store missing records, and write back validated ones alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.transfer.plan import (
    RetrievePlan,
    Segment,
    StorePlan,
    cheapest,
    clip,
    cut,
    exact_first,
    extend,
    plan_store,
    plan_write_back,
    write_limit,
)
from kvkit.transfer.policy import Policy

NAMES = ("memory", "disk", "nfs", "s3")
tiers = st.sampled_from(NAMES)
subsets = st.lists(tiers, unique=True).map(tuple)
runs = st.lists(st.tuples(tiers, st.integers(-2, 6)))
policies = st.builds(Policy, retrieve_from=subsets, store_to=subsets, write_back_to=subsets)


def sources(plan: RetrievePlan) -> list[str]:
    """The tier of every chunk of the run."""
    return [s.tier for s in plan.segments for _ in range(s.start, s.stop)]


def build(wanted: int, found: list[tuple[str, int]]) -> RetrievePlan:
    plan = RetrievePlan(wanted)
    for tier, run in found:
        plan = extend(plan, tier, run)
    return plan


plans = st.builds(build, st.integers(0, 20), runs)


@given(st.integers(0, 20), runs)
def test_a_retrieve_plan_is_the_leading_run(wanted: int, found: list[tuple[str, int]]) -> None:
    plan = build(wanted, found)
    expected = [tier for tier, run in found for _ in range(run)][:wanted]
    assert sources(plan) == expected
    assert plan.chunks == len(expected)
    assert plan.complete == (len(expected) == wanted)
    assert plan.by_tier() == {tier: expected.count(tier) for tier in dict.fromkeys(expected)}
    assert list(plan.by_tier()) == list(dict.fromkeys(expected))
    assert_consecutive(plan)


def assert_consecutive(plan: RetrievePlan) -> None:
    stop = 0
    for i, segment in enumerate(plan.segments):
        assert segment.start == stop < segment.stop <= plan.wanted
        assert i == 0 or segment.tier != plan.segments[i - 1].tier
        stop = segment.stop


speeds = st.dictionaries(tiers, st.integers(0, 40).map(lambda n: n / 8))


def assert_cheapest(plan: RetrievePlan, load_s: dict[str, float], compute_s: float) -> None:
    """Of all ends, the longest of the best."""

    def seconds(stop: int) -> float:
        taken = {tier: n * load_s.get(tier, 0.0) for tier, n in clip(plan, stop).by_tier().items()}
        return max(taken.values(), default=0.0) + (plan.chunks - stop) * compute_s

    chosen = cheapest(plan, load_s, compute_s)
    assert sources(chosen) == sources(plan)[: chosen.chunks]
    assert chosen.chunks == min(range(plan.chunks + 1), key=lambda stop: (seconds(stop), -stop))
    assert_consecutive(chosen)


@given(plans, speeds, st.integers(0, 40).map(lambda n: n / 8))
def test_cheapest_is_the_best_of_all_ends(
    plan: RetrievePlan, load_s: dict[str, float], compute_s: float
) -> None:
    assert_cheapest(plan, load_s, compute_s)


@pytest.mark.parametrize("compute_s", [0.125, 0.5, 2.0])
@pytest.mark.parametrize(
    "load_s", [{}, {"disk": 0.25}, {"disk": 0.75, "s3": 1.25}, {"disk": 4.0, "s3": 0.25}]
)
def test_cheapest_is_the_best_of_few_chunks(load_s: dict[str, float], compute_s: float) -> None:
    for first, second, third in product(range(4), range(5), range(3)):
        plan = build(12, [("disk", first), ("s3", second), ("disk", third)])
        assert_cheapest(plan, load_s, compute_s)


def test_cheapest_leaves_a_slow_tier_out_and_hides_what_it_can_behind_another() -> None:
    plan = build(30, [("disk", 10), ("s3", 10), ("nfs", 10)])
    assert cheapest(plan, {"disk": 1.0, "s3": 2.0, "nfs": 9.0}, 0.8).by_tier() == {"disk": 10, "s3": 5}
    assert cheapest(plan, {"disk": 1.0, "s3": 0.5, "nfs": 9.0}, 1.5).by_tier() == {
        "disk": 10,
        "s3": 10,
        "nfs": 1,
    }
    assert cheapest(plan, {"disk": 2.0}, 1.5).by_tier() == {"disk": 10, "s3": 10, "nfs": 10}
    assert cheapest(plan, {"disk": 9.0, "s3": 9.0, "nfs": 9.0}, 1.5).chunks == 0


@given(plans, st.integers(-1, 25))
def test_clip_keeps_the_part_before(plan: RetrievePlan, chunks: int) -> None:
    clipped = clip(plan, chunks)
    assert sources(clipped) == sources(plan)[: max(chunks, 0)]
    assert clipped.wanted == plan.wanted
    assert_consecutive(clipped)
    assert clip(clipped, chunks) == clipped


def test_what_is_cut_out_is_a_plan_of_its_own() -> None:
    plan = build(9, [("disk", 2), ("s3", 3), ("disk", 1)])
    for start, stop in combinations(range(9), 2):
        part = cut(plan, start, stop)
        assert sources(part) == sources(plan)[start:stop]
        assert part.wanted == stop - start
        assert_consecutive(part)


def test_the_exact_part_ends_where_an_approximate_tier_begins() -> None:
    found = [("disk", 2), ("fp8", 3), ("nfs", 1)]
    plan = replace(build(9, found), approximate=frozenset({"fp8", "int4"}))
    assert plan.exact == 2
    assert replace(plan, approximate=frozenset({"int4"})).exact == 6
    assert replace(plan, segments=()).exact == 0
    assert exact_first(["fp8", "s3", "int4", "disk"], {"fp8", "int4"}) == ["s3", "disk", "fp8", "int4"]


@pytest.mark.parametrize(
    ("slots", "tiers", "groups", "limit"), [(12, 1, 2, 6), (13, 2, 2, 4), (12, 3, 5, 5), (4, 3, 1, 1)]
)
def test_puts_leave_loads_as_much_as_each_tier_has(slots: int, tiers: int, groups: int, limit: int) -> None:
    assert repr(write_limit(slots, tiers, groups)) == str(limit), "a number of whole slots"


def puts(plan: StorePlan) -> list[tuple[str, int]]:
    """Every (tier, chunk) of the plan, in its own order; each at most once."""
    found = [(s.tier, chunk) for s in plan.segments for chunk in range(s.start, s.stop)]
    assert len(set(found)) == len(found)
    assert all(s.start < s.stop for s in plan.segments)
    assert plan.start == min((chunk for _, chunk in found), default=0)
    assert plan.stop == max((chunk + 1 for _, chunk in found), default=0)
    return found


@given(st.integers(0, 12), st.dictionaries(tiers, st.integers(0, 15)))
def test_a_store_plan_covers_what_is_missing(chunks: int, resident: dict[str, int]) -> None:
    plan = plan_store(chunks, resident)
    assert puts(plan) == [(tier, chunk) for tier, run in resident.items() for chunk in range(run, chunks)]


@given(plans, st.integers(-1, 22), policies, st.sets(tiers))
def test_write_back_takes_validated_chunks_of_far_tiers_to_others(
    plan: RetrievePlan, validated: int, policy: Policy, near: set[str]
) -> None:
    copies = set(puts(plan_write_back(plan, validated, policy, near)))
    for target, chunk in copies:
        source = sources(plan)[chunk]
        assert chunk < validated
        assert source != target
        assert source not in near
        assert target in policy.write_back_to
    assert copies == {
        (target, chunk)
        for target in policy.write_back_to
        for chunk, source in enumerate(sources(plan))
        if chunk < validated and source != target and source not in near
    }


def test_empty_plans_want_nothing() -> None:
    assert RetrievePlan(0).complete
    assert not RetrievePlan(1).complete
    assert (StorePlan().start, StorePlan().stop) == (0, 0)
    assert extend(RetrievePlan(4, (Segment("disk", 0, 4),)), "nfs", 3).by_tier() == {"disk": 4}
