"""Permission to blend with a model: the limits, and the stored measurements of the model's weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

from kvkit.blend.plan import BlendError, Selection
from kvkit.environment import keep_verdict, verdict_path

Context = Literal["prefix", "alone"]
"""Contexts of documents: computed behind their prompt's prefix, such as a system prompt, or alone."""
_CONTEXTS: Mapping[str, Context] = {context: context for context in get_args(Context)}
MAX_KL = 0.1
"""Maximum KL divergence with which blending may be enabled, in nats per token."""
MAX_OF_NAIVE = 0.5
"""Maximum KL divergence as a share of that of naive reuse, which recomputes nothing."""


def decide(kl: float, naive_kl: float) -> dict[str, Any]:
    """Decide whether blending may be enabled.

    Args:
        kl: KL divergence of the next token's distribution with blending, in nats per token.
        naive_kl: the same for naive reuse, which recomputes nothing.

    Returns:
        passed, kl, naive_kl, of_naive, kl_limit, of_naive_limit.
    """
    of_naive = kl / naive_kl if naive_kl else math.inf
    return {
        "passed": kl <= MAX_KL and of_naive <= MAX_OF_NAIVE,
        "kl": kl,
        "naive_kl": naive_kl,
        "of_naive": of_naive,
        "kl_limit": MAX_KL,
        "of_naive_limit": MAX_OF_NAIVE,
    }


def path_of(name: str) -> Path:
    """Return the path of the measurements of these weights: below XDG_CACHE_HOME or ~/.cache."""
    return verdict_path("blend", name)


def keep(
    names: Iterable[str], selection: Selection, context: Context, measured: Mapping[str, Any]
) -> list[Path]:
    """Write a decision (`passed`) and its figures for `check`; return the paths.

    Args:
        names: names under which `check` looks for the weights; each adapter has its own.
        context: context in which documents are to be computed.
    """
    decision = {"passed": measured["passed"], "selection": asdict(selection), "context": context}
    return keep_verdict("blend", names, decision | {"measured": dict(measured)})


def check(name: str, selection: Selection, unless: str) -> Context:
    """Refuse weights that did not pass the measurement of blending with this selection.

    Weights that passed with a ratio pass with a larger one: more is recomputed.

    Args:
        unless: setting that enables blending without the check, for the message.

    Returns:
        context in which documents are to be computed.

    Raises:
        BlendError: the weights were not measured, were measured with another selection, or failed.
    """
    advice = f"run `kvkit doctor --blend MODEL`, or set {unless}"
    path: Path | str = "there is no home"
    try:
        path = path_of(name)
        verdict = json.loads(path.read_text())
        passed, measured_with = verdict["passed"], Selection(**verdict["selection"])
        context = _CONTEXTS[verdict["context"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise BlendError(f"blending has not been measured with these weights ({path}): {advice}") from None
    if selection.ratio < measured_with.ratio or selection != replace(measured_with, ratio=selection.ratio):
        raise BlendError(f"blending was measured with {measured_with}, not {selection}: {advice}")
    if passed is not True:
        raise BlendError(
            f"blending changes the output of these weights too much ({path}): use others, or set {unless}"
        )
    return context
