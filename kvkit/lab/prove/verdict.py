"""Verdicts on scenarios, from their answers, pages and loaded tokens. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import isfinite
from typing import Literal

from kvkit.lab.prove.scenarios import AskedPrompt, Loads, Scenario

LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest difference allowed in a token's log-probability, in nats, by dtype of the model.

Prompts computed in other pieces or batches round differently."""
PAGE_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest difference allowed in an element of KV, as a share of the largest in its layer, by dtype."""

ProveOutcome = Literal["proven", "differs", "not proven", "not run"]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: per token its log-probability, and those of the likeliest tokens at its position."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likely: tuple[Mapping[int, float], ...] = ()
    error: str | None = None  # why there is no answer


@dataclass(frozen=True, slots=True)
class Compared:
    """Difference of a reply from the reference's."""

    largest: float  # largest difference of log-probabilities, in nats
    wrong: str = ""  # what differs, in words; empty: all is within the tolerance


@dataclass(frozen=True, slots=True)
class Observed:
    """Results of an act that asked prompts, or why an act did not happen."""

    prompts: tuple[AskedPrompt, ...]
    loads: Loads
    compared: tuple[Compared, ...]
    loaded: int | None  # tokens of the prompts; None: not reported
    pages: int = 0  # pages compared, one per layer, block and head
    wrong_page: str = ""  # the first page that differs, in words; empty: none
    missing: str = ""  # why the act did not happen as intended; empty: it did


@dataclass(frozen=True, slots=True)
class ScenarioVerdict:
    """The verdict on a scenario, and the reason.

    Attributes:
        loaded: tokens loaded.
        largest: largest difference of log-probabilities, in nats.
        pages: pages compared, one per layer, block and head.
        log: last lines of the engine's log, if the engine failed or was gone.
        gone: whether the scenario could not run because the engine was gone.
    """

    scenario: str
    outcome: ProveOutcome
    why: str
    loaded: int = 0
    largest: float = 0.0
    pages: int = 0
    log: str = ""
    gone: bool = False


def compare(expected: Reply, found: Reply, tolerance: float) -> Compared:
    """Compare a reply with the expected one.

    A different token is accepted if both were equally likely within `tolerance`; later tokens are then not
    compared.
    """
    if found.error is not None:
        return Compared(0.0, f"no answer: {found.error}")
    largest = 0.0
    pairs = zip_longest(expected.tokens, found.tokens)
    for place, (one, other) in enumerate(pairs):
        if one is None or other is None:
            return Compared(largest, f"{len(found.tokens)} tokens, want {len(expected.tokens)}")
        likely = expected.likely[place]
        apart = abs(likely.get(other, float("-inf")) - found.logprobs[place])
        if one != other:
            apart = max(apart, expected.logprobs[place] - likely.get(other, float("-inf")))
        if apart > tolerance:
            token = f"token {place} is {other}, want {one}" if one != other else f"token {place}"
            if not isfinite(apart):
                return Compared(largest, f"{token}: it is not among the likeliest there")
            said = f"{token}: log-probabilities {apart:.2g} apart, {tolerance:g} is tolerated"
            return Compared(apart, said)
        largest = max(largest, apart)
        if one != other:
            break
    return Compared(largest)


def judge(
    scenario: Scenario, observed: Sequence[Observed], control: Compared | None, handed_off: bool = False
) -> ScenarioVerdict:
    """Return the verdict on a scenario.

    Args:
        observed: results of its acts.
        control: difference between the reference's answers to `scenario.unlike`; None: it has no such pair.
        handed_off: whether another engine computes and hands off every prompt, so that each must be loaded.
    """
    loaded = sum(one.loaded or 0 for one in observed)
    largest = max((each.largest for one in observed for each in one.compared), default=0.0)

    def verdict(outcome: ProveOutcome, why: str) -> ScenarioVerdict:
        pages = sum(one.pages for one in observed)
        return ScenarioVerdict(scenario.name, outcome, why, loaded, largest, pages)

    for one in observed:
        for asked, each in zip(one.prompts, one.compared, strict=True):
            if each.wrong:
                where = f"; {one.wrong_page}" if one.wrong_page else ""
                return verdict("differs", f"prompt {_named(asked)}: {each.wrong}{where}")
        if one.wrong_page:
            return verdict("differs", one.wrong_page)
        if one.loads == "none" and one.loaded and not handed_off:
            said = f"prompt {_named(one.prompts[0])}: {one.loaded} tokens of another's KV were loaded"
            return verdict("differs", said)
    if control is not None and not control.wrong:
        why = f"answers that must differ are only {control.largest:.2g} apart: a mix-up would go unnoticed"
        return verdict("not proven", why)
    for one in observed:
        if one.missing:
            return verdict("not proven", one.missing)
        wanted = one.loads == "some" or (handed_off and one.loads != "any")
        if wanted and one.loaded is None:
            return verdict("not proven", "the server does not report how many tokens were loaded")
        if wanted and not one.loaded:
            return verdict("not proven", "nothing was loaded: all was computed")
        if one.loads == "fresh" and one.loaded and not handed_off:
            return verdict("not proven", f"{one.loaded} tokens were stored before: choose another --seed")
    return verdict("proven", "")


def exit_status(verdicts: Sequence[ScenarioVerdict]) -> int:
    """Return 1 if a scenario differs, 2 if one or all are not proven or the engine was gone, else 0."""
    outcomes = {one.outcome for one in verdicts}
    if "differs" in outcomes:
        return 1
    lacks = "not proven" in outcomes or "proven" not in outcomes or any(one.gone for one in verdicts)
    return 2 if lacks else 0


def _named(asked: AskedPrompt) -> str:
    salt = f" of tenant {asked.salt!r}" if asked.salt else ""
    return f"{asked.name!r}{salt}" + (" with the adapter" if asked.adapter else "")
