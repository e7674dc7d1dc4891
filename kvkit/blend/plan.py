"""Plans of blending: the spans of a prompt to reuse, and the tokens to recompute, as plain functions.

Blending reuses KV that was computed after another prefix (CacheBlend, https://arxiv.org/abs/2405.16444). The
tokens of a prompt are then of three kinds:

    exact      their KV is equal to a full prefill's: the true prefix, or a span at its own position after the
               same tokens
    reused     their KV was computed elsewhere: keys are rotated to the new position, but the tokens have not
               seen the tokens before their span in this prompt
    computed   no KV was found (gaps), or they are the question: their rows run through every layer

Selection picks the few reused tokens to recompute as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvkit.blend.methods.method import NeedsDeviation, NeedsQuestion, View, offsets
from kvkit.blend.methods.registry import method_named
from kvkit.format.keys import Tokens, as_tokens

QUESTION_TOKENS = 64
"""The maximum length of a question, which is the last computed tokens of a prompt."""
_HASHED_TOKENS = 8
_ODD = 0x9E3779B97F4A7C15


class BlendError(ValueError):
    """Impossible blending. The message names the argument, its value and the values expected."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a prompt, `start` to `stop`, with KV that was computed elsewhere."""

    start: int
    stop: int
    first: int = 0  # position at which token `start` was computed
    exact: bool = False  # computed after the same tokens: the KV is equal to a full prefill's

    @property
    def delta(self) -> int:
        """Number of positions by which the keys move."""
        return self.start - self.first

    def found(self, tokens: int, after: int = 0) -> Span:
        """Return the part of the span that was found, from position `after` on.

        Args:
            tokens: number of leading tokens found of the text in which the span was computed, including
                tokens before the span.
        """
        start = min(max(self.start, after), self.stop)
        stop = max(start, min(self.stop, self.start + tokens - self.first))
        return Span(start, stop, self.first + start - self.start, self.exact)


@dataclass(frozen=True, slots=True, eq=False)
class BlendPlan:
    """The available and the missing KV of a prompt of N tokens. Made by `plan_blend`."""

    spans: tuple[Span, ...]  # with KV, ascending; the true prefix is not among them
    exact: NDArray[np.bool_]  # [N], True: the token's KV is equal to a full prefill's
    computed: NDArray[np.int32]  # positions without KV, ascending; the last token is always one
    question_positions: NDArray[np.int32]  # of the tokens after the documents, the last of `computed`

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.exact)

    @property
    def reused(self) -> NDArray[np.bool_]:
        """Tokens with KV that was computed after another prefix, bool [N]; these can be selected."""
        reused = ~self.exact
        reused[self.computed] = False
        return reused

    @property
    def starts(self) -> NDArray[np.int32]:
        """Starts of the spans with reused tokens."""
        return np.array([span.start for span in self.spans if not span.exact], np.int32)


@dataclass(frozen=True, slots=True)
class Selection:
    """Method and limits for the choice of the tokens to recompute.

    Args:
        method: one of `kvkit.blend.methods.registry.METHODS`, each of which names its paper, or the
            "package.module:name" of another `BlendMethod`. `prophetkv`: the tokens that the question attends
            to most, over all layers (ProphetKV); `question_attention`: the same over the first layers, by the
            head that attends most; `k_deviation`, `v_deviation`: the tokens with the largest change of K or V
            in layer 1 when layer 0 is computed in full (CacheBlend); `first_n`: the first of every span
            (EPIC).
        ratio: budget of recomputation, 0 to 1: share of the reused tokens' rows through all layers. It
            includes the cost of choosing, so somewhat fewer tokens are chosen.
        first_n: number of tokens at the start of every span that are always recomputed. They lost most: each
            span was computed as the start of a text, and its first tokens draw attention to themselves.
        layers: for `question_attention`: number of layers in which attention is measured before the choice;
            fewer if these would take more than half of the budget.
        value_norm: for `question_attention`: weight attention by the norm of the value. Like `layers`, it
            applies to other methods too, unless their `NeedsQuestion` sets it.
        fade: for `question_attention`: a score counts half at this many tokens after its span's start, a
            third at twice as many, and so on. Later tokens saw more of their own span, so their KV differs
            less from a full prefill's. 0: scores do not fade.
        drift: share of V's estimated change (half of it for K, before RoPE) that is added to reused tokens
            that are not recomputed, layer by layer: see `kvkit.blend.drift`. 0: they stay as found.
        coverage: share of the sum of all scores: tokens with the highest scores are chosen until they reach
            it, and `ratio` is the most that recomputation may cost. Methods without input choose as many
            tokens as `ratio` has room for, as with 1.

    Raises:
        BlendError: a field is out of range, or the method is not available.
    """

    method: str = "prophetkv"
    ratio: float = 0.15
    first_n: int = 8
    layers: int = 8
    value_norm: bool = True
    fade: int = 64
    drift: float = 0.5
    coverage: float = 1.0

    def __post_init__(self) -> None:
        try:
            method_named(self.method)
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
    tokens: int, prefix: int = 0, spans: Sequence[Span] = (), question_tokens: int = QUESTION_TOKENS
) -> BlendPlan:
    """Plan the blending of a prompt of `tokens` tokens.

    Args:
        prefix: number of leading tokens with exact KV. Spans over them are ignored.
        spans: other KV that was found, ascending and without overlap.
        question_tokens: maximum length of the question, in tokens after the last span.

    Raises:
        BlendError: the prompt is empty, or spans lie outside it, overlap or are out of order.
    """
    if tokens < 1:
        raise BlendError(f"tokens={tokens}: want at least 1")
    if not 0 <= prefix <= tokens or question_tokens < 1:
        raise BlendError(
            f"prefix={prefix}, question_tokens={question_tokens}: want 0 to {tokens}, and at least 1"
        )
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
    found[-1] = exact[-1] = False  # its logits are needed
    computed = np.flatnonzero(~found).astype(np.int32)
    after = kept[-1].stop if kept else min(prefix, tokens - 1)
    return BlendPlan(tuple(kept), exact, computed, computed[computed >= after][-question_tokens:])


def select_tokens(
    scores: NDArray[np.floating] | None,
    starts: NDArray[np.int32],
    free: NDArray[np.bool_],
    count: int,
    first_n: int = 0,
    coverage: float = 1.0,
) -> NDArray[np.int32]:
    """Choose the positions to recompute: the first of every span, then those with the highest scores.

    Args:
        scores: float [N]; equal scores go by position, and tokens with -inf are not chosen. None: a token
            scores higher the nearer it is to its span's start.
        starts: int [spans], starts of the spans, ascending.
        free: bool [N], tokens that may be chosen.
        count: number of tokens to choose. More are returned only if the first of all spans are more, fewer if
            fewer can be chosen or `coverage` is reached.
        first_n: number of tokens at the start of every span that are chosen whatever their scores.
        coverage: as in `Selection`; a score below 0 counts as 0.

    Returns:
        Positions, int32, ascending.

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
    minimum = int((offset[free] < first_n).sum())
    if coverage < 1 and scores is not None and len(order):
        cumulative = np.maximum(scores[order], 0).cumsum(dtype=np.float64)
        count = min(count, int(np.searchsorted(cumulative, coverage * cumulative[-1])) + 1)
    return np.sort(order[: max(count, minimum)]).astype(np.int32)


def count_of(selection: Selection, plan: BlendPlan, layers: int) -> tuple[int, int]:
    """Return the number of tokens that a selection chooses, and the number of layers run to choose them.

    `selection.ratio` of the reused tokens is a budget of rows through layers. The cost of choosing is taken
    from it, so that methods can be compared at equal cost: the question's attention takes the computed rows
    through the layers in which it is measured (every row, if these are dense), deviations take every row
    through layer 0. If the number of
    tokens differs by layer, the mean is returned. The work of other models and of a full recompute
    (`NeedsAuxiliary`, `NeedsRecompute`) is not counted.
    """
    rows = round(selection.ratio * int(plan.reused.sum()))
    needs = method_named(selection.method).needs
    if needs is None or not 0 < rows < int(plan.reused.sum()):
        return rows, 0
    budget = rows * layers
    if isinstance(needs, NeedsDeviation):
        reused_rows = int((~plan.exact).sum()) - len(plan.computed)
        return max(0, round((budget - reused_rows) / max(1, layers - 1))), 1
    if not isinstance(needs, NeedsQuestion):
        return rows, layers
    wanted_layers = min(selection.layers, layers - 1) if needs.depth is None else round(needs.depth * layers)
    cost = int(plan.reused.sum()) if needs.dense else len(plan.computed)  # of a layer
    observed = max(1, min(wanted_layers, budget // (2 * cost)))  # at least half is for the chosen tokens
    run_layers = layers - observed if needs.dense else layers
    return max(0, round((budget - observed * cost) / max(1, run_layers))), observed


def observed_layers(selection: Selection, plan: BlendPlan, layers: int) -> int:
    """Return the number of layers to run before tokens are chosen; 0: scores would change nothing."""
    count, observed = count_of(selection, plan, layers)
    first = select_tokens(None, plan.starts, plan.reused, 0, selection.first_n)
    return observed if len(first) < count else 0


def question_needs(selection: Selection) -> NeedsQuestion:
    """Return the method's needs of the question's attention, with the selection's defaults filled in.

    Raises:
        BlendError: the method does not use the question's attention.
    """
    needs = method_named(selection.method).needs
    if not isinstance(needs, NeedsQuestion):
        raise BlendError(f"method={selection.method!r}: does not use the question's attention")
    return needs if needs.value_norm is not None else replace(needs, value_norm=selection.value_norm)


def counts_by_layer(selection: Selection, plan: BlendPlan, layers: int) -> list[int]:
    """Return the number of tokens that a selection by deviation chooses in each layer from 1 on.

    A selection that is not gradual chooses in layer 1 only. A gradual one has numbers on a straight line from
    a third more than the mean to a third fewer, never more than in the layer before.
    """
    count, _ = count_of(selection, plan, layers)
    needs = method_named(selection.method).needs
    if not (isinstance(needs, NeedsDeviation) and needs.gradual):
        return [count]
    spread = min(1 / 3, int(plan.reused.sum()) / max(1, count) - 1)
    line = count * np.linspace(1 + spread, 1 - spread, layers - 1) if layers > 2 else np.full(1, count)
    counts = np.diff(np.round(np.cumsum(line)), prepend=0)
    return [int(number) for number in sorted(counts, reverse=True)]


def choose(
    selection: Selection,
    plan: BlendPlan,
    layers: int,
    seen: NDArray[np.float32] | None = None,
    among: tuple[NDArray[np.bool_], int] | None = None,
) -> NDArray[np.int32]:
    """Choose the reused tokens to recompute, int32 ascending, in a model of `layers` layers.

    Args:
        seen: input that the selection's method needs, see `kvkit.blend.methods.method`; None if
            `observed_layers` is 0.
        among: bool [N], tokens that may be chosen, and their number to choose; None: the reused tokens, and
            the number from `count_of`.

    Raises:
        BlendError: the method's scores are not [N].
    """
    free, count = among or (plan.reused, count_of(selection, plan, layers)[0])
    method, scores = method_named(selection.method), None
    if seen is not None or method.needs is None:
        no_input = np.zeros((0, plan.tokens), np.float32)
        view = View(plan.starts, free, no_input if seen is None else seen, selection.fade)
        scores = method.scores(view)
    coverage = 1.0 if seen is None else selection.coverage
    return select_tokens(scores, plan.starts, free, count, selection.first_n, coverage)


def split(tokens: Tokens, minimum: int = 64, maximum: int = 512) -> NDArray[np.int64]:
    """Cut a text into documents by its content, so that equal text gets equal cuts wherever it stands.

    Each token has a hash of the 8 tokens before it. A cut is made before a token if its hash is smaller than
    the hashes of the `minimum` tokens on either side: local minima, as in Bjørner et al., "Content-dependent
    chunking for differential compression" (2010). A cut depends only on tokens at most `minimum` + 8 away.
    Pieces have 2 * `minimum` + 1 tokens on average; a piece longer than `maximum` (repetitive text) is cut
    into equal parts.

    Returns:
        int64 [pieces + 1]: 0, the cuts, T. Every piece has `minimum` to `maximum` tokens, but a text shorter
        than `minimum` is one piece.

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
        windows = np.lib.stride_tricks.sliding_window_view(hashes, 2 * minimum + 1)
        lowest = windows.min(axis=1)
        unique = (windows == lowest[:, None]).sum(axis=1) == 1
        middle = hashes[minimum : total - minimum]
        cuts += (np.flatnonzero((middle == lowest) & unique) + minimum).tolist()
    cuts.append(total)
    pieces = [0]
    for start, stop in itertools.pairwise(cuts):
        count = -(-(stop - start) // maximum)
        pieces += [start + (stop - start) * (i + 1) // count for i in range(count)]
    return np.array(pieces, np.int64)


def _window_hashes(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Hash the tokens before each token, at most 8 of them: uint64 [T]."""
    mixed = _mix(ids.astype(np.uint64) + np.uint64(1))
    hashes = np.zeros(len(ids), np.uint64)
    for distance in range(1, _HASHED_TOKENS + 1):
        hashes[distance:] += mixed[:-distance] * np.uint64(_ODD**distance % 2**64)
    return _mix(hashes)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (https://doi.org/10.1145/2714064.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
