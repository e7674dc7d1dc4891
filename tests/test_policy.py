"""Policies name tiers that exist; what does not is refused with the choices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvkit.moving.policy import Policy, PolicyError, check, for_role

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
    with pytest.raises(PolicyError, match=r"='memory'.*none"):
        check(policy, ())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tier_named_twice_names_the_setting(setting: str) -> None:
    policy = replace(Policy.default(TIERS), **{setting: ("disk", "disk")})
    with pytest.raises(PolicyError, match=rf"{setting}=\('disk', 'disk'\).*twice"):
        check(policy, TIERS)


def test_decode_looks_first_at_what_it_was_sent_and_sends_nothing_itself() -> None:
    prefill, decode = (for_role(role, TIERS, "handoff", ("peer",)) for role in ("prefill", "decode"))
    assert decode == Policy(("handoff", *TIERS, "peer"), TIERS, ("memory",))
    assert prefill == Policy((*TIERS, "peer"), ("handoff", *TIERS), ("memory",))
    assert for_role("both", TIERS, "handoff", ()) == Policy(
        ("handoff", *TIERS), ("handoff", *TIERS), ("memory",)
    )
