"""Whether a model may be blended: the limits, and what was measured of its weights, kept for later."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvkit.blend.plan import BlendError, Selection
from kvkit.environment import cache_folder

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


def path_of(fingerprint: str) -> Path:
    """Where what was measured of these weights is kept: below XDG_CACHE_HOME or ~/.cache."""
    return cache_folder() / "blend" / f"{fingerprint}.json"


def keep(fingerprint: str, selection: Selection, measured: Mapping[str, Any]) -> Path:
    """Write down a decision (`passed`) and its figures, for `check`; returns where."""
    path = path_of(fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"passed": measured["passed"], "selection": asdict(selection), "measured": dict(measured)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def check(fingerprint: str, selection: Selection) -> None:
    """Refuse weights that have not been found fit for blending with this selection.

    Raises:
        BlendError: they were not measured, were measured with another selection, or failed.
    """
    path = path_of(fingerprint)
    advice = "run `kvkit doctor --blend MODEL`, or pass unchecked=True"
    try:
        kept = json.loads(path.read_text())
        passed, measured_with = kept["passed"], kept["selection"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BlendError(f"blending has not been measured with these weights ({path}): {advice}") from None
    if measured_with != asdict(selection):
        raise BlendError(f"blending was measured with {measured_with}, not {asdict(selection)}: {advice}")
    if passed is not True:
        raise BlendError(f"blending changes what these weights say too much ({path}); or pass unchecked=True")
