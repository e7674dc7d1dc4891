"""Blend plans, the selection of tokens and the splitting of prompts have the stated properties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvkit.blend.methods.method import NeedsAuxiliary, NeedsDeviation, NeedsQuestion, NeedsRecompute
from kvkit.blend.methods.question_attention import by_place
from kvkit.blend.methods.registry import METHODS
from kvkit.blend.plan import (
    BlendError,
    BlendPlan,
    Selection,
    Span,
    choose,
    count_of,
    counts_by_layer,
    plan_blend,
    select_tokens,
    split,
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, list[Span], BlendPlan]:
    tokens = draw(st.integers(1, 120))
    prefix = draw(st.integers(0, tokens))
    bounds = sorted(draw(st.lists(st.integers(0, tokens), max_size=10)))
    pairs = zip(bounds[::2], bounds[1::2], strict=False)
    spans = [Span(a, b, draw(st.integers(0, 30)), draw(st.booleans())) for a, b in pairs]
    return tokens, prefix, spans, plan_blend(tokens, prefix, spans, draw(st.integers(1, 20)))


@given(plans())
def test_every_token_is_exact_reused_or_computed(case: tuple[int, int, list[Span], BlendPlan]) -> None:
    tokens, prefix, spans, plan = case
    computed = np.zeros(tokens, bool)
    computed[plan.computed] = True
    assert (plan.exact.astype(int) + plan.reused + computed == 1).all()
    for t in range(tokens - 1):
        span = next((s for s in spans if s.start <= t < s.stop), None)
        if t < prefix:
            assert plan.exact[t]
        elif span is None:
            assert computed[t]
        else:
            assert plan.exact[t] == span.exact
            assert plan.reused[t] == (not span.exact)
    assert computed[-1]


@given(plans())
def test_spans_keep_their_delta_and_lie_behind_the_prefix(
    case: tuple[int, int, list[Span], BlendPlan],
) -> None:
    tokens, prefix, spans, plan = case
    deltas = {(s.stop, s.delta) for s in spans} | {(tokens - 1, s.delta) for s in spans if s.stop == tokens}
    for span in plan.spans:
        assert prefix <= span.start < span.stop < tokens
        assert (span.stop, span.delta) in deltas


@given(plans())
def test_the_question_is_what_is_computed_last(case: tuple[int, int, list[Span], BlendPlan]) -> None:
    tokens, _, _, plan = case
    assert len(plan.question_positions)
    assert plan.question_positions[-1] == tokens - 1
    assert np.array_equal(plan.question_positions, plan.computed[-len(plan.question_positions) :])
    assert all(span.stop <= plan.question_positions[0] for span in plan.spans)


def test_a_span_cut_by_the_prefix_goes_on_where_it_was_cut() -> None:
    plan = plan_blend(100, 30, [Span(20, 60, 5)])
    assert plan.spans == (Span(30, 60, 15),)
    assert plan.spans[0].delta == 15


@pytest.mark.parametrize(
    ("tokens", "prefix", "spans", "word"),
    [
        (0, 0, [], "tokens=0"),
        (5, 6, [], "prefix=6"),
        (5, -1, [], "prefix=-1"),
        (9, 0, [Span(0, 5), Span(4, 6)], "start=4"),
        (9, 0, [Span(4, 6), Span(0, 2)], "start=0"),
        (9, 0, [Span(4, 10)], "stop=10"),
        (9, 0, [Span(5, 4)], "start=5"),
        (9, 0, [Span(5, 6, -1)], "first=-1"),
    ],
)
def test_impossible_plans_are_errors(tokens: int, prefix: int, spans: list[Span], word: str) -> None:
    with pytest.raises(BlendError, match=word):
        plan_blend(tokens, prefix, spans)


@st.composite
def choices(
    draw: st.DrawFn,
) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.int32], npt.NDArray[np.bool_], int, int]:
    tokens = draw(st.integers(1, 80))
    scores = None
    if draw(st.booleans()):
        scores = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, 1, 2]), min_size=tokens, max_size=tokens)))
        scores = scores.astype(np.float32)
    starts = np.unique(np.array(draw(st.lists(st.integers(0, tokens - 1), max_size=6)), np.int32))
    free = np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    return scores, starts, free, draw(st.integers(0, tokens + 5)), draw(st.integers(0, 10))


@given(choices())
def test_selection(
    case: tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.int32], npt.NDArray[np.bool_], int, int],
) -> None:
    scores, starts, free, count, first_n = case
    selected = select_tokens(scores, starts, free, count, first_n)
    assert selected.dtype == np.int32
    assert (np.diff(selected) > 0).all()  # ascending, each once
    assert free[selected].all()
    stops = [*starts[1:], len(free)][: len(starts)]
    must = {t for s, e in zip(starts, stops, strict=True) for t in range(s, min(e, s + first_n))}
    must = {t for t in must if free[t]}
    assert must <= set(selected.tolist())
    assert len(selected) == max(len(must), min(count, int(free.sum())))
    chosen = [t for t in selected.tolist() if t not in must]
    left = [t for t in np.flatnonzero(free).tolist() if t not in must and t not in chosen]
    if scores is not None and chosen and left:
        assert min(scores[chosen]) >= max(scores[left])


@given(choices(), st.floats(0, 1))
def test_selection_stops_when_the_scores_are_covered(
    case: tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.int32], npt.NDArray[np.bool_], int, int],
    coverage: float,
) -> None:
    scores, starts, free, count, first_n = case
    most = select_tokens(scores, starts, free, count, first_n)
    selected = select_tokens(scores, starts, free, count, first_n, coverage)
    assert set(selected.tolist()) <= set(most.tolist())
    if scores is None:
        assert selected.tolist() == most.tolist()
        return
    paid = {t: float(scores[t]) for t in np.flatnonzero(free).tolist()}
    wanted = coverage * sum(paid.values())
    if len(selected) < len(most):
        assert sum(paid[t] for t in selected) >= wanted - 1e-6
    must = set(select_tokens(scores, starts, free, 0, first_n).tolist())
    if chosen := [t for t in selected.tolist() if t not in must]:  # without the last of them it is too little
        before = sum(paid[t] for t in selected) - min(paid[t] for t in chosen)
        assert before <= wanted + 1e-6 or len(selected) == 1


def test_what_sees_nothing_has_no_coverage() -> None:
    plan, few = plan_blend(90, 0, [Span(8, 44), Span(50, 90)]), Selection("random", 0.5, 0, coverage=0.1)
    assert choose(few, plan, 4).tolist() == choose(Selection("random", 0.5, 0), plan, 4).tolist()
    seen = np.zeros((2, 90), np.float32)
    seen[:, 60] = 1
    asked = Selection(ratio=0.5, first_n=1, coverage=0.9)
    assert choose(asked, plan, 4, seen).tolist() == [8, 50, 60]


def test_without_scores_spans_are_chosen_from_their_starts() -> None:
    starts = np.array([0, 10, 30], np.int32)
    free = np.ones(50, bool)
    assert select_tokens(None, starts, free, 7).tolist() == [0, 1, 2, 10, 11, 30, 31]


def test_equal_scores_go_by_position() -> None:
    selected = select_tokens(np.ones(9, np.float32), np.zeros(1, np.int32), np.ones(9, bool), 4)
    assert selected.tolist() == [0, 1, 2, 3]


def test_scores_by_place() -> None:
    """Scores fade behind the starts of spans, and count more the further the prompt's end is."""
    scores = np.array([5, 4, 4, 4, 4, 6], np.float32)
    starts = np.array([1, 4], np.int32)
    far = np.sqrt([6, 5, 4, 3, 2, 1])
    np.testing.assert_allclose(
        by_place(scores, starts, 2), far * [0, 4, 4 / 1.5, 2, 4, 4], rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(by_place(scores, starts, 0), far * scores, rtol=1e-6)


def test_impossible_selections_are_errors() -> None:
    starts, free = np.zeros(1, np.int32), np.ones(4, bool)
    with pytest.raises(BlendError, match="count=-1"):
        select_tokens(None, starts, free, -1)
    with pytest.raises(BlendError, match="first_n=-2"):
        select_tokens(None, starts, free, 1, -2)
    with pytest.raises(BlendError, match=r"scores: \(3,\)"):
        select_tokens(np.ones(3, np.float32), starts, free, 1)
    with pytest.raises(BlendError, match="method='attention': want one of prophetkv, question_at"):
        Selection("attention")
    with pytest.raises(BlendError, match=r"ratio=1\.5"):
        Selection(ratio=1.5)
    with pytest.raises(BlendError, match=r"coverage=-0\.1: want 0 to 1"):
        Selection(coverage=-0.1)
    with pytest.raises(BlendError, match="layers=0"):
        Selection(layers=0)


@given(
    st.sampled_from(list(METHODS)),
    st.floats(0, 1),
    st.integers(1, 3000),
    st.integers(1, 400),
    st.integers(2, 80),
)
def test_choosing_and_recomputing_keep_to_the_budget(
    method: str, ratio: float, reused: int, question: int, layers: int
) -> None:
    plan = plan_blend(reused + question, 0, [Span(0, reused)])
    selection = Selection(method, ratio)
    count, looked = count_of(selection, plan, layers)
    wanted = round(ratio * reused)
    assert 0 <= count <= wanted
    needs = METHODS[method].needs
    if needs is None or wanted in (0, reused):
        assert (count, looked) == (wanted, 0)
        return
    if isinstance(needs, NeedsAuxiliary | NeedsRecompute):
        assert (count, looked) == (wanted, layers)
        return
    asks = isinstance(needs, NeedsQuestion)
    assert (
        1 <= looked <= max(1, min(selection.layers, layers - 1) if method == "question_attention" else layers)
    )
    if isinstance(needs, NeedsQuestion):
        choosing = (reused - count if needs.dense else question) * looked
    else:
        choosing = reused - count
    assert count == 0 or abs(count * layers + choosing - wanted * layers) <= layers
    if asks and looked > 1:
        assert choosing <= wanted * layers / 2
    if isinstance(needs, NeedsDeviation):
        by_layer = counts_by_layer(selection, plan, layers)
        assert sum(by_layer) == count * (layers - 1 if needs.gradual and layers > 1 else 1)
        assert by_layer == sorted(by_layer, reverse=True)
        assert max(by_layer) <= reused


def test_exact_tokens_are_no_part_of_the_budget() -> None:
    plan = plan_blend(100, 20, [Span(20, 40, 20, exact=True), Span(50, 90, 0)])
    assert count_of(Selection("first_n", 0.15), plan, 10) == (6, 0)


texts = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed))
limits = st.tuples(st.integers(1, 20), st.integers(0, 40)).map(lambda x: (x[0], 2 * x[0] + x[1]))


@given(texts, st.integers(0, 600), limits, st.sampled_from([2, 50_000]))
def test_pieces_keep_their_limits(
    rng: np.random.Generator, length: int, limit: tuple[int, int], vocabulary: int
) -> None:
    minimum, maximum = limit
    cuts = split(rng.integers(0, vocabulary, length, np.int32), minimum, maximum)
    assert cuts[0] == 0
    assert cuts[-1] == length
    pieces = np.diff(cuts)
    assert (pieces <= maximum).all()
    if length >= minimum:
        assert (pieces >= minimum).all()
    elif length:
        assert pieces.tolist() == [length]


@given(texts, st.integers(0, 100), st.integers(0, 100), st.integers(1, 12))
def test_cuts_do_not_depend_on_what_stands_around(
    rng: np.random.Generator, before: int, after: int, minimum: int
) -> None:
    text = rng.integers(0, 50_000, 300, np.int32)
    around = [rng.integers(0, 50_000, n, np.int32) for n in (before, after)]
    maximum = 10**6  # no forced cuts
    alone = split(text, minimum, maximum)
    inside = split(np.concatenate([around[0], text, around[1]]), minimum, maximum) - before
    reach = minimum + 8

    def middle(cuts: npt.NDArray[np.int64]) -> list[int]:
        return [c for c in cuts.tolist() if reach <= c < len(text) - reach]

    assert middle(alone) == middle(inside)
    assume(minimum < 10)
    assert middle(alone)  # there is something to compare


def test_pieces_have_the_length_that_is_promised() -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 60_000, np.int32)
    pieces = np.diff(split(tokens, 32, 10**6))
    assert 55 < pieces.mean() < 75


def test_repetitive_text_is_cut_evenly() -> None:
    assert split(np.ones(1000, np.int32), 10, 300).tolist() == [0, 250, 500, 750, 1000]


def test_impossible_limits_are_errors() -> None:
    with pytest.raises(BlendError, match="minimum=0"):
        split([1, 2], 0, 10)
    with pytest.raises(BlendError, match="maximum=10"):
        split([1, 2], 6, 10)
