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
    """Results of an act that sent prompts, or the reason that an act did not happen."""

    prompts: tuple[AskedPrompt, ...]
    loads: Loads
    compared: tuple[Compared, ...]
    loaded: int | None  # prompt tokens that were loaded; None: not reported
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
    for position, (expected_token, found_token) in enumerate(pairs):
        if expected_token is None or found_token is None:
            return Compared(largest, f"{len(found.tokens)} tokens, want {len(expected.tokens)}")
        likely = expected.likely[position]
        difference = abs(likely.get(found_token, float("-inf")) - found.logprobs[position])
        if expected_token != found_token:
            difference = max(difference, expected.logprobs[position] - likely.get(found_token, float("-inf")))
        if difference > tolerance:
            token = (
                f"token {position} is {found_token}, want {expected_token}"
                if expected_token != found_token
                else f"token {position}"
            )
            if not isfinite(difference):
                return Compared(largest, f"{token}: it is not among the likeliest there")
            message = f"{token}: log-probabilities {difference:.2g} apart, {tolerance:g} is tolerated"
            return Compared(difference, message)
        largest = max(largest, difference)
        if expected_token != found_token:
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
    loaded = sum(observation.loaded or 0 for observation in observed)
    largest = max(
        (comparison.largest for observation in observed for comparison in observation.compared), default=0.0
    )

    def verdict(outcome: ProveOutcome, why: str) -> ScenarioVerdict:
        pages = sum(observation.pages for observation in observed)
        return ScenarioVerdict(scenario.name, outcome, why, loaded, largest, pages)

    for observation in observed:
        for prompt, comparison in zip(observation.prompts, observation.compared, strict=True):
            if comparison.wrong:
                page_text = f"; {observation.wrong_page}" if observation.wrong_page else ""
                return verdict("differs", f"prompt {_named(prompt)}: {comparison.wrong}{page_text}")
        if observation.wrong_page:
            return verdict("differs", observation.wrong_page)
        if observation.loads == "none" and observation.loaded and not handed_off:
            message = (
                f"prompt {_named(observation.prompts[0])}: "
                f"{observation.loaded} tokens of another's KV were loaded"
            )
            return verdict("differs", message)
    if control is not None and not control.wrong:
        why = f"answers that must differ are only {control.largest:.2g} apart: a mix-up would go unnoticed"
        return verdict("not proven", why)
    for observation in observed:
        if observation.missing:
            return verdict("not proven", observation.missing)
        must_load = observation.loads == "some" or (handed_off and observation.loads != "any")
        if must_load and observation.loaded is None:
            return verdict("not proven", "the server does not report how many tokens were loaded")
        if must_load and not observation.loaded:
            return verdict("not proven", "nothing was loaded: all was computed")
        if observation.loads == "fresh" and observation.loaded and not handed_off:
            return verdict(
                "not proven", f"{observation.loaded} tokens were stored before: choose another --seed"
            )
    return verdict("proven", "")


def exit_status(verdicts: Sequence[ScenarioVerdict]) -> int:
    """Return 1 if a scenario differs, 2 if one or all are not proven or the engine was gone, else 0."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if "differs" in outcomes:
        return 1
    unproven = (
        "not proven" in outcomes or "proven" not in outcomes or any(verdict.gone for verdict in verdicts)
    )
    return 2 if unproven else 0


def _named(prompt: AskedPrompt) -> str:
    salt = f" of tenant {prompt.salt!r}" if prompt.salt else ""
    return f"{prompt.name!r}{salt}" + (" with the adapter" if prompt.adapter else "")
