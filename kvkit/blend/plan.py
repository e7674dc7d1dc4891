"""What blending reuses and recomputes: spans of a prompt, and the choice of tokens, as plain functions.

Blending reuses KV that was computed after another prefix (CacheBlend, https://arxiv.org/abs/2405.16444). The
tokens of a prompt are then of three kinds:

    exact      their KV is what a full prefill computes: the true prefix, or a span at its own position after
               the same tokens
    reused     their KV was computed elsewhere: keys are rotated to the new position, but no token of such a
               span has seen what stands before the span in this prompt
    computed   no KV was found (gaps), or they are the question: their rows run through every layer

Selection picks the few reused tokens whose rows are recomputed too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import NeedsDeviation, NeedsQuestion, View, offsets
from kvkit.blend.methods.registry import named
from kvkit.format.keys import Tokens, as_tokens

QUESTION_TOKENS = 64
"""The last computed tokens of a prompt, at most so many, are its question."""
_HASHED_TOKENS = 8
_ODD = 0x9E3779B97F4A7C15


class BlendError(ValueError):
    """Blending is impossible. Names the argument, its value and what is wanted."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a prompt, `start` to `stop`, whose KV was computed elsewhere."""

    start: int
    stop: int
    first: int = 0  # position at which token `start` was computed
    exact: bool = False  # the tokens before it were the same there: the KV is that of a full prefill

    @property
    def delta(self) -> int:
        """By how many positions the keys move."""
        return self.start - self.first

    def found(self, tokens: int, after: int = 0) -> Span:
        """What of it is not before position `after`, where `tokens` tokens were found.

        They are the leading ones of what the span was computed in, those before the span among them.
        """
        start = min(max(self.start, after), self.stop)
        stop = max(start, min(self.stop, self.start + tokens - self.first))
        return Span(start, stop, self.first + start - self.start, self.exact)


@dataclass(frozen=True, slots=True, eq=False)
class BlendPlan:
    """Which KV of a prompt of N tokens is there, and which is not. Make it with `plan_blend`."""

    spans: tuple[Span, ...]  # where KV was found, ascending; the true prefix is not among them
    exact: NDArray[np.bool_]  # [N], tokens whose KV is that of a full prefill
    computed: NDArray[np.int32]  # positions without KV, ascending; the last token is always one
    question: NDArray[np.int32]  # those of `computed` that are the question

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.exact)

    @property
    def reused(self) -> NDArray[np.bool_]:
        """bool [N]: tokens whose KV was computed after another prefix; these can be selected."""
        reused = ~self.exact
        reused[self.computed] = False
        return reused

    @property
    def starts(self) -> NDArray[np.int32]:
        """Where the spans with reused tokens begin."""
        return np.array([span.start for span in self.spans if not span.exact], np.int32)


@dataclass(frozen=True, slots=True)
class Selection:
    """How the tokens to recompute are chosen.

    Args:
        method: one of `kvkit.blend.methods.registry.METHODS`, each of which names its paper, or the
            "package.module:name" of another `BlendMethod`. `question_attention`: those that the question
            attends to most; `k_deviation`, `v_deviation`: those whose K or V of layer 1 changes most when
            layer 0 is computed in full (CacheBlend); `first_n`: the first of every span (EPIC).
        ratio: what recomputing may cost, 0 to 1: this share of the reused tokens' rows through all layers.
            What choosing costs is part of it, so somewhat fewer tokens are chosen.
        first_n: the first so many tokens of every span are always among them. They lost most: each span was
            computed as the start of a text, whose first tokens draw attention to themselves.
        layers: of `question_attention`: in how many layers the question looks before the choice is made, or
            fewer where that would take more than half of the budget.
        value_norm: of `question_attention`: weigh attention by the norm of the value that is attended to.
            As `layers`, of other methods too, if their `NeedsQuestion` does not say.
        fade: of `question_attention`: a score counts half so many tokens after its span's start, a third at
            twice as many, and so on: the KV of later tokens, which saw more of their own span, differs less
            from what a full prefill computes. 0: scores do not fade.
        drift: this share of what V, and half of it of what K before its rope is estimated to have lost, by
            the tokens that are computed again, is added to the other reused tokens, layer by layer: see
            `kvkit.blend.drift`. 0: they stay as they were found.
        coverage: the tokens with the highest scores are chosen until they have this share of all the scores,
            so `ratio` is the most that recomputing may cost. Methods that see nothing choose as with 1: as
            many as `ratio` has room for.

    Raises:
        BlendError: a field is out of range, or the method cannot be had.
    """

    method: str = "question_attention"
    ratio: float = 0.15
    first_n: int = 8
    layers: int = 8
    value_norm: bool = True
    fade: int = 64
    drift: float = 0.0
    coverage: float = 1.0

    def __post_init__(self) -> None:
        try:
            named(self.method)
        except ValueError as error:
            raise BlendError(str(error)) from error
        for share in ("ratio", "drift", "coverage"):
            if not 0 <= getattr(self, share) <= 1:
                raise BlendError(f"{share}={getattr(self, share)}: want 0 to 1")
        if self.first_n < 0 or self.layers < 1 or self.fade < 0:
            raise BlendError(
                f"first_n={self.first_n}, layers={self.layers}, fade={self.fade}: want at least 0, 1 and 0"
            )


def plan_blend(
    tokens: int, prefix: int = 0, spans: Sequence[Span] = (), question: int = QUESTION_TOKENS
) -> BlendPlan:
    """The plan of a prompt of `tokens` tokens.

    Args:
        prefix: leading tokens whose KV is exact. What spans say about them is ignored.
        spans: what else was found, ascending and apart from one another.
        question: at most so many tokens after the last span are the question.

    Raises:
        BlendError: the prompt is empty, or spans lie outside it, overlap or are out of order.
    """
    if tokens < 1:
        raise BlendError(f"tokens={tokens}: want at least 1")
    if not 0 <= prefix <= tokens or question < 1:
        raise BlendError(f"prefix={prefix}, question={question}: want 0 to {tokens}, and at least 1")
    exact, found = np.zeros(tokens, bool), np.zeros(tokens, bool)
    exact[:prefix] = found[:prefix] = True
    kept, end = [], 0
    for span in spans:
        if not (end <= span.start <= span.stop <= tokens) or span.first < 0:
            raise BlendError(f"{span}: want spans in order, apart and within {tokens} tokens")
        end = span.stop
        start, stop = max(span.start, prefix), min(span.stop, tokens - 1)
        if start < stop:
            kept.append(Span(start, stop, span.first + start - span.start, span.exact))
            found[start:stop] = True
            exact[start:stop] = span.exact
    found[-1] = exact[-1] = False  # its logits are wanted
    computed = np.flatnonzero(~found).astype(np.int32)
    after = kept[-1].stop if kept else min(prefix, tokens - 1)
    return BlendPlan(tuple(kept), exact, computed, computed[computed >= after][-question:])


def select_tokens(
    scores: NDArray[np.floating] | None,
    starts: NDArray[np.int32],
    free: NDArray[np.bool_],
    count: int,
    first_n: int = 0,
    coverage: float = 1.0,
) -> NDArray[np.int32]:
    """The positions to recompute, ascending: the first of every span, then those with the highest scores.

    Args:
        scores: float [N]; equal ones go by position, and those of -inf are not chosen. None: a token scores
            the higher, the nearer it is to its span's start.
        starts: int [spans], ascending, where spans begin.
        free: bool [N], tokens that may be chosen.
        count: how many are wanted. More are returned only where the first of every span are more, fewer
            only where fewer can be chosen.
        first_n: of every span, so many tokens are chosen whatever their scores.
        coverage: as in `Selection`; a score below 0 counts as 0.

    Raises:
        BlendError: lengths do not fit, or `count` or `first_n` is negative.
    """
    if count < 0 or first_n < 0:
        raise BlendError(f"count={count}, first_n={first_n}: want at least 0")
    if scores is not None and scores.shape != free.shape:
        raise BlendError(f"scores: {scores.shape}, want {free.shape} as free")
    positions, offset = np.arange(len(free)), offsets(starts, len(free))
    ranked = -offset if scores is None else scores
    free = free & ((ranked > -np.inf) | (offset < first_n))
    order = np.lexsort((positions, -ranked, offset >= first_n))  # the first of every span, then by score
    order = order[free[order]]
    must = int((offset[free] < first_n).sum())
    if coverage < 1 and scores is not None and len(order):
        paid = np.maximum(scores[order], 0).cumsum(dtype=np.float64)
        count = min(count, int(np.searchsorted(paid, coverage * paid[-1])) + 1)
    return np.sort(order[: max(count, must)]).astype(np.int32)


def count_of(selection: Selection, plan: BlendPlan, layers: int) -> tuple[int, int]:
    """How many tokens a selection chooses in a model of `layers` layers, and in how many of them it looks.

    `selection.ratio` of the reused tokens is a budget of rows through layers, out of which choosing is paid
    too, so that methods can be compared at equal cost: the question's attention takes the computed rows
    through the layers that it looks into, deviations take every row through layer 0. Where the number of
    tokens differs by layer, it is the mean. What other models or full recompute see (`NeedsAuxiliary`,
    `NeedsRecompute`) is not paid for.
    """
    rows = round(selection.ratio * int(plan.reused.sum()))
    needs = named(selection.method).needs
    if needs is None or not 0 < rows < int(plan.reused.sum()):
        return rows, 0
    budget = rows * layers
    if isinstance(needs, NeedsDeviation):
        every = int((~plan.exact).sum()) - len(plan.computed)
        return max(0, round((budget - every) / max(1, layers - 1))), 1
    if not isinstance(needs, NeedsQuestion):
        return rows, layers
    wanted = min(selection.layers, layers - 1) if needs.depth is None else round(needs.depth * layers)
    affordable = budget // (2 * len(plan.computed))  # at least half of it is for what is chosen
    looked = max(1, min(wanted, affordable))
    return max(0, round((budget - looked * len(plan.computed)) / layers)), looked


def looks(selection: Selection, plan: BlendPlan, layers: int) -> int:
    """In how many of a model's `layers` to look before tokens are chosen; 0: scores would change nothing."""
    count, looked = count_of(selection, plan, layers)
    first = select_tokens(None, plan.starts, plan.reused, 0, selection.first_n)
    return looked if len(first) < count else 0


def question_of(selection: Selection) -> NeedsQuestion:
    """What the selection's method needs to see of the question's attention, all of it said.

    Raises:
        BlendError: it does not go by that.
    """
    needs = named(selection.method).needs
    if not isinstance(needs, NeedsQuestion):
        raise BlendError(f"method={selection.method!r}: does not go by the question's attention")
    return needs if needs.value_norm is not None else replace(needs, value_norm=selection.value_norm)


def filtered(selection: Selection, plan: BlendPlan, layers: int) -> list[int]:
    """How many tokens a selection by deviation chooses in layer 1 and, where it is gradual, in each after it.

    On a straight line from a third more than the mean to a third fewer, never more than in the layer before.
    """
    count, _ = count_of(selection, plan, layers)
    needs = named(selection.method).needs
    if not (isinstance(needs, NeedsDeviation) and needs.gradual):
        return [count]
    spread = min(1 / 3, int(plan.reused.sum()) / max(1, count) - 1)
    line = count * np.linspace(1 + spread, 1 - spread, layers - 1) if layers > 2 else np.full(1, count)
    parts = np.diff(np.round(np.cumsum(line)), prepend=0)
    return [int(part) for part in sorted(parts, reverse=True)]


def choose(
    selection: Selection,
    plan: BlendPlan,
    layers: int,
    seen: NDArray[np.float32] | None = None,
    among: tuple[NDArray[np.bool_], int] | None = None,
) -> NDArray[np.int32]:
    """The reused tokens to compute again, int32 ascending, in a model of `layers` layers.

    Args:
        seen: what the selection's method needs, see `kvkit.blend.methods.method`. None where `looks` is 0.
        among: bool [N] and a number: of these so many are chosen; None: of the reused as `count_of` says.

    Raises:
        BlendError: the method's scores are not [N].
    """
    free, count = among or (plan.reused, count_of(selection, plan, layers)[0])
    method, scores = named(selection.method), None
    if seen is not None or method.needs is None:
        nothing = np.zeros((0, plan.tokens), np.float32)
        view = View(plan.starts, free, nothing if seen is None else seen, selection.fade)
        scores = method.scores(view)
    coverage = 1.0 if seen is None else selection.coverage
    return select_tokens(scores, plan.starts, free, count, selection.first_n, coverage)


def split(tokens: Tokens, minimum: int = 64, maximum: int = 512) -> NDArray[np.int64]:
    """Cut a text into documents by its content, so that equal text gets equal cuts wherever it stands.

    A cut is made before a token whose hash (of the 8 tokens before it) is smaller than those of the `minimum`
    tokens on either side: local minima, as in Bjørner et al., "Content-dependent chunking for differential
    compression" (2010). It depends on tokens at most `minimum` + 8 away and on nothing else. Pieces have
    2 * `minimum` + 1 tokens on average; one longer than `maximum` (repetitive text) is cut into equal parts.

    Returns:
        int64 [pieces + 1]: 0, the cuts, T. Every piece has `minimum` to `maximum` tokens, except that a text
        shorter than `minimum` is one piece.

    Raises:
        BlendError: `minimum` is below 1 or more than half of `maximum`.
    """
    if not 1 <= minimum <= maximum // 2:
        raise BlendError(f"minimum={minimum}, maximum={maximum}: want 1 <= minimum <= maximum / 2")
    ids = as_tokens(tokens)
    total = len(ids)
    cuts = [0]
    if total > 2 * minimum:
        hashes = _window_hashes(ids)  # of cuts 0 .. T - 1
        around = np.lib.stride_tricks.sliding_window_view(hashes, 2 * minimum + 1)
        lowest = around.min(axis=1)
        alone = (around == lowest[:, None]).sum(axis=1) == 1
        middle = hashes[minimum : total - minimum]
        cuts += (np.flatnonzero((middle == lowest) & alone) + minimum).tolist()
    cuts.append(total)
    pieces = [0]
    for start, stop in itertools.pairwise(cuts):
        parts = -(-(stop - start) // maximum)
        pieces += [start + (stop - start) * (i + 1) // parts for i in range(parts)]
    return np.array(pieces, np.int64)


def _window_hashes(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """uint64 [T]: a hash of the tokens before each token, at most 8 of them."""
    mixed = _mix(ids.astype(np.uint64) + np.uint64(1))
    hashes = np.zeros(len(ids), np.uint64)
    for back in range(1, _HASHED_TOKENS + 1):
        hashes[back:] += mixed[:-back] * np.uint64(_ODD**back % 2**64)
    return _mix(hashes)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (https://doi.org/10.1145/2714064.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
