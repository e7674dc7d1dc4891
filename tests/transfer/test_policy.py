"""Policies name tiers that exist, and others are refused with the choices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvkit.tiers.eviction.policies import NORMAL
from kvkit.transfer.policy import (
    DEFAULT_REQUEST_POLICY,
    Policy,
    PolicyError,
    RequestPolicy,
    Retention,
    check,
    for_request,
    for_role,
    in_effect,
)

TIERS = ("memory", "disk", "nfs")
SETTINGS = ("retrieve_from", "store_to", "write_back_to")


def test_the_default_names_every_tier_in_order() -> None:
    assert Policy.default(iter(TIERS)) == Policy(TIERS, TIERS, ("memory",))
    assert Policy.default([]) == Policy((), (), ())


@pytest.mark.parametrize("tiers", [TIERS, set(TIERS), dict.fromkeys(TIERS)])
def test_a_policy_of_tiers_that_exist_passes(tiers: tuple[str, ...]) -> None:
    policy = Policy.default(TIERS)
    assert check(policy, tiers) is policy
    assert check(Policy((), ()), tiers) == Policy((), (), ())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_missing_tier_names_setting_value_and_choices(setting: str) -> None:
    policy = replace(Policy.default(TIERS), **{setting: ("memory", "dsk")})
    with pytest.raises(PolicyError, match=rf"{setting}='dsk'.*memory, disk, nfs"):
        check(policy, TIERS)
    with pytest.raises(PolicyError, match=r"='memory': no such tier; the tiers are none$"):
        check(policy, ())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tier_named_twice_names_the_setting(setting: str) -> None:
    policy = replace(Policy.default(TIERS), **{setting: ("disk", "disk")})
    with pytest.raises(PolicyError, match=rf"{setting}=\('disk', 'disk'\).*twice"):
        check(policy, TIERS)


def test_decode_looks_first_at_what_it_was_sent_and_sends_nothing_itself() -> None:
    prefill, decode = (for_role(role, TIERS, "handoff", ("peer",)) for role in ("prefill", "decode"))
    assert decode == Policy(("handoff", *TIERS, "peer"), TIERS, ("memory",))
    assert prefill == Policy((*TIERS, "peer"), TIERS, ("memory",))
    assert for_role("both", TIERS, "handoff", ()) == Policy(("handoff", *TIERS), TIERS, ("memory",))


def test_a_request_names_the_tiers_of_its_own() -> None:
    policy = Policy.default(TIERS)
    assert for_request(policy, DEFAULT_REQUEST_POLICY) is policy
    assert for_request(policy, RequestPolicy(load_from=("nfs",))) == replace(policy, retrieve_from=("nfs",))
    stored = for_request(policy, RequestPolicy(store_to=("disk",)))
    assert stored == Policy(TIERS, ("disk",), ()), "nor is anything written back to the others"
    assert for_request(policy, RequestPolicy(store_to=())) == Policy(TIERS, ())


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"max_load_tokens": -1}, "max_load_tokens=-1: want at least 0"),
        ({"keep_s": -0.5}, "keep_s=-0.5: want seconds, at least 0"),
        ({"keep_s": float("nan")}, "keep_s=nan"),
        ({"keep_s": float("inf")}, "keep_s=inf"),
        ({"priority": 101}, "priority=101: want 0 to 100"),
        ({"priority": -1}, "priority=-1: want 0 to 100"),
    ],
)
def test_an_impossible_wish_is_named(wish: dict[str, float], told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        RequestPolicy(**wish)  # type: ignore[arg-type]


def test_the_ends_of_every_range_are_possible_wishes() -> None:
    for priority in (0, 100):
        assert RequestPolicy(max_load_tokens=0, keep_s=0.0, priority=priority).retains
    assert RequestPolicy(keep_s=0.5).retains
    assert not RequestPolicy(max_load_tokens=8, store_to=()).retains


def test_a_prefix_is_retained_up_to_its_end() -> None:
    wish = RequestPolicy(
        keep_s=5, prefixes=(Retention(20, keep_s=60, priority=50), Retention(30, priority=40), Retention(9))
    )
    assert wish.retains
    kept = [(0, 60, 50), (19, 60, 50), (20, 5, 40), (29, 5, 40), (30, 5, NORMAL)]
    assert [(token, *_retention(wish.at(token))) for token, _, _ in kept] == kept
    low = RequestPolicy(priority=0, prefixes=(Retention(20, keep_s=60),))
    assert [_retention(low.at(token)) for token in (0, 20)] == [(60, 0), (0, 0)]
    assert RequestPolicy(keep_s=5).at(7) == RequestPolicy(keep_s=5)


def _retention(policy: RequestPolicy) -> tuple[float, int]:
    assert not policy.prefixes
    return policy.keep_s, policy.priority


def test_memory_that_is_only_passed_through_is_no_tier() -> None:
    policy = Policy.default(TIERS)
    assert in_effect(policy, ("memory",)) == policy
    passing = replace(policy, staging_only=True)
    far = ("disk", "nfs")
    assert in_effect(passing, ("memory",)) == Policy(far, far, (), staging_only=True)


def test_nothing_is_stored_to_what_can_only_be_read() -> None:
    policy = Policy(("handoff", *TIERS), ("handoff", *TIERS), ("handoff", "memory"))
    assert in_effect(policy, ("memory",), ("handoff",)) == Policy(policy.retrieve_from, TIERS, ("memory",))
    passing = in_effect(replace(policy, staging_only=True), ("memory",), ("handoff",))
    assert passing == Policy(("handoff", "disk", "nfs"), ("disk", "nfs"), (), staging_only=True)
