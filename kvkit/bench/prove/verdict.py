"""What is made of a scenario's answers: whether they are those of the reference, and KV was loaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import isfinite
from typing import Literal

from kvkit.bench.prove.scenarios import AskedPrompt, Loads, Scenario

LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""By the dtype of the model: a token's log-probability may differ by so much (nats), as prompts that are
computed in other pieces, or beside others, round otherwise."""
PAGE_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Likewise an element of KV, as a share of the largest in its layer."""

ProveOutcome = Literal["proven", "differs", "not proven", "not run"]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: of each token its log-probability, and those of the tokens that were likely there."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likely: tuple[Mapping[int, float], ...] = ()
    error: str | None = None  # why there is none


@dataclass(frozen=True, slots=True)
class Compared:
    """How far a reply is from the reference's."""

    largest: float  # difference of log-probabilities, in nats
    wrong: str = ""  # what differs, in words; empty: nothing by more than is tolerated


@dataclass(frozen=True, slots=True)
class Observed:
    """What came of an act that asked prompts."""

    prompts: tuple[AskedPrompt, ...]
    loads: Loads
    compared: tuple[Compared, ...]
    loaded: int | None  # tokens of the prompts; None: nobody tells
    pages: int = 0  # blocks of layers and heads that were compared
    wrong_page: str = ""  # the first that differs
    missing: str = ""  # why it did not happen as it should


@dataclass(frozen=True, slots=True)
class ScenarioVerdict:
    """What became of a scenario, and why.

    Attributes:
        loaded: tokens.
        largest: difference of log-probabilities, in nats.
        pages: blocks of layers and heads that were compared.
        log: the last lines of the engine's log, where it failed or was gone.
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
    """How far a reply is from the expected one.

    Where another token is chosen, both must have been equally likely but for `tolerance`; what comes after it
    is not compared.
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
    """The verdict on a scenario.

    Args:
        control: of the scenario's prompts whose answers must be unlike, how far the reference's are apart.
        handed_off: whether every prompt is computed elsewhere and handed off, so that each is to be loaded.
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
        why = f"answers that must differ are only {control.largest:.2g} apart: this model does not show it"
        return verdict("not proven", why)
    for one in observed:
        if one.missing:
            return verdict("not proven", one.missing)
        wanted = one.loads == "some" or (handed_off and one.loads != "any")
        if wanted and one.loaded is None:
            return verdict("not proven", "the server does not tell how many tokens were loaded")
        if wanted and not one.loaded:
            return verdict("not proven", "nothing was loaded: all was computed")
        if one.loads == "fresh" and one.loaded and not handed_off:
            return verdict("not proven", f"{one.loaded} tokens were there before: take another --seed")
    return verdict("proven", "")


def exit_status(verdicts: Sequence[ScenarioVerdict]) -> int:
    """Choose a command's: 1 where something differs, 2 where something, or everything, is not proven."""
    outcomes = {one.outcome for one in verdicts}
    if "differs" in outcomes:
        return 1
    lacks = "not proven" in outcomes or "proven" not in outcomes or any(one.gone for one in verdicts)
    return 2 if lacks else 0


def _named(asked: AskedPrompt) -> str:
    salt = f" of tenant {asked.salt!r}" if asked.salt else ""
    return f"{asked.name!r}{salt}" + (" with the adapter" if asked.adapter else "")
