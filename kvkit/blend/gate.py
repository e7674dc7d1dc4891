"""Whether a model may be blended: the limits, and what was measured of its weights, kept for later."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvkit.blend.plan import BlendError, Selection
from kvkit.environment import keep_verdict, verdict_path

MAX_KL = 0.1
"""Blending is not enabled above this KL divergence, in nats a token, ..."""
MAX_OF_NAIVE = 0.5
"""... or above this share of the KL divergence of reuse without recomputing anything."""


def decide(kl: float, naive_kl: float) -> dict[str, Any]:
    """Whether blending may be enabled, and by which figures.

    Args:
        kl: divergence of what blending makes of the next token's distribution, in nats a token.
        naive_kl: of reuse without recomputing anything.

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
    """Where what was measured of these weights is kept: below XDG_CACHE_HOME or ~/.cache."""
    return verdict_path("blend", name)


def keep(names: Iterable[str], selection: Selection, measured: Mapping[str, Any]) -> list[Path]:
    """Write down a decision (`passed`) and its figures, for `check`; returns where.

    Args:
        names: what those call the weights who will ask: each adapter has a name of its own for them.
    """
    content = {"passed": measured["passed"], "selection": asdict(selection), "measured": dict(measured)}
    return keep_verdict("blend", names, content)


def check(name: str, selection: Selection, unless: str) -> None:
    """Refuse weights that have not been found fit for blending with this selection.

    What passed with a ratio passes with a larger one: more is computed again.

    Args:
        unless: the setting that has them blended all the same, for the message.

    Raises:
        BlendError: they were not measured, were measured with another selection, or failed.
    """
    advice = f"run `kvkit doctor --blend MODEL`, or set {unless}"
    path: Path | str = "there is no home"
    try:
        path = path_of(name)
        kept = json.loads(path.read_text())
        passed, measured_with = kept["passed"], Selection(**kept["selection"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise BlendError(f"blending has not been measured with these weights ({path}): {advice}") from None
    if selection.ratio < measured_with.ratio or selection != replace(measured_with, ratio=selection.ratio):
        raise BlendError(f"blending was measured with {measured_with}, not {selection}: {advice}")
    if passed is not True:
        raise BlendError(f"blending changes too much of what these weights say ({path}); or set {unless}")
