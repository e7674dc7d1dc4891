"""An engine's prefill speed is estimated from its recent large steps, and chooses blends that are faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.adapters.engine.speed import KEPT_STEPS, Speed, saved_tokens_per_s


def test_nothing_is_known_before_a_large_step() -> None:
    speed = Speed(256)
    speed.note_step(255, 1.0)
    speed.note_step(512, 0.0)
    assert speed.tokens_per_s is None
    speed.note_step(256, 2.0)
    assert speed.tokens_per_s == 128.0


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 1000))
def test_it_is_within_what_was_seen_last_and_follows(seen: list[int], later: int) -> None:
    speed = Speed(1)
    for tokens in seen:
        speed.note_step(tokens, 1.0)
    found = speed.tokens_per_s
    assert found is not None
    assert min(seen[-KEPT_STEPS:]) <= found <= max(seen[-KEPT_STEPS:])
    for _ in range(KEPT_STEPS):
        speed.note_step(later, 1.0)
    assert speed.tokens_per_s == later


def test_what_was_seen_long_ago_says_nothing() -> None:
    speed = Speed(1, valid_s=0.0)
    speed.note_step(10, 1.0)
    assert speed.tokens_per_s is None


@given(st.floats(1.0, 1e5), st.floats(1.0, 1e5), st.floats(0.0, 1.0), st.floats(1.0, 1e5))
def test_loading_faster_than_what_it_saves_makes_a_blend_faster_than_a_prefill(
    prefill: float, rows: float, recomputed: float, loading: float
) -> None:
    """A token of a document: loaded, and now and then computed again, or computed."""
    saved = saved_tokens_per_s(prefill, rows, recomputed)
    assert saved is not None
    blended_s, computed_s = 1 / loading + recomputed / rows, 1 / prefill
    if abs(blended_s - computed_s) > 1e-6 * computed_s:
        assert (saved > 0 and loading > saved) == (blended_s < computed_s)
    assert saved_tokens_per_s(None, rows, recomputed) is None
    assert saved_tokens_per_s(prefill, None, recomputed) == pytest.approx(prefill)
