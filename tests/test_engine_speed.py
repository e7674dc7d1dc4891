"""How fast an engine computes prompts: what its large steps show, of late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvkit.adapters.engine.speed import REMEMBERED, Speed


def test_nothing_is_known_before_a_large_step() -> None:
    speed = Speed(256)
    speed.note(255, 1.0)
    speed.note(512, 0.0)
    assert speed.tokens_per_s is None
    speed.note(256, 2.0)
    assert speed.tokens_per_s == 128.0


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 1000))
def test_it_is_within_what_was_seen_last_and_follows(seen: list[int], later: int) -> None:
    speed = Speed(1)
    for tokens in seen:
        speed.note(tokens, 1.0)
    found = speed.tokens_per_s
    assert found is not None
    assert min(seen[-REMEMBERED:]) <= found <= max(seen[-REMEMBERED:])
    for _ in range(REMEMBERED):
        speed.note(later, 1.0)
    assert speed.tokens_per_s == later
