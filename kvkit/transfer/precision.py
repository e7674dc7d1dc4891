"""The gate for quantised KV: quality limits, and the measured verdicts per model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvkit.environment import keep_verdict, verdict_path
from kvkit.format.layout import Precision
from kvkit.settings import ConfigError

MAX_KL = 0.02
"""Maximum KL divergence from full precision, in nats per token."""
MIN_TOP1 = 0.95
"""Minimum share of tokens for which the most likely token stays the same."""


def decide(kl: float, top1: float) -> dict[str, Any]:
    """Return whether the model passes the limits for quantised KV, with the figures and limits.

    Args:
        kl: divergence of the next-token distribution from that with full-precision KV, in nats per token.
        top1: share of tokens for which the most likely token is the same.
    """
    passed = kl <= MAX_KL and top1 >= MIN_TOP1
    return {"passed": passed, "kl": kl, "kl_limit": MAX_KL, "top1": top1, "top1_limit": MIN_TOP1}


def is_sure(kl: tuple[float, float], top1: tuple[float, float]) -> bool:
    """Return whether `decide` gives the same result for all figures in these intervals, (low, high)."""
    return decide(kl[1], top1[0])["passed"] or kl[0] > MAX_KL or top1[1] < MIN_TOP1


def keep(names: Iterable[str], precision: Precision, measured: Mapping[str, Any]) -> list[Path]:
    """Write a decision (`passed`) and its figures, for `check`; return the paths.

    Args:
        names: the adapters' names for the weights, for later calls of `check`.
    """
    return keep_verdict(f"precision/{precision}", names, measured)


def check(name: str, precision: Precision, unless: str) -> None:
    """Refuse weights that have not passed the limits for records of this precision.

    Args:
        name: the adapter's name for the weights.
        unless: setting that overrides the check, for the message.

    Raises:
        ConfigError: the weights were not measured, or failed.
    """
    path: Path | str = "there is no home"
    try:
        path = verdict_path(f"precision/{precision}", name)
        passed = json.loads(path.read_text())["passed"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError(
            f"precision = {precision!r} has not been measured with these weights ({path}): run "
            f"`kvkit doctor --precision {precision} MODEL`, or set {unless}"
        ) from None
    if passed is not True:
        raise ConfigError(
            f"precision = {precision!r} changes too much of these weights' output ({path}): want none, "
            f"or set {unless}"
        )
