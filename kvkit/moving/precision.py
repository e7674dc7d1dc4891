"""Whether a model's KV may be held in fewer bits: the limits, and what was measured of its weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvkit.environment import keep_verdict, verdict_path
from kvkit.format.layout import Precision
from kvkit.settings import ConfigError

MAX_KL = 0.02
"""Fewer bits are refused above this KL divergence from full precision, in nats a token, ..."""
MIN_TOP1 = 0.95
"""... or below this share of tokens whose most likely one stays the same."""


def decide(kl: float, top1: float) -> dict[str, Any]:
    """Whether fewer bits may be used: passed, and the figures that say so with their limits.

    Args:
        kl: divergence of the next token's distribution from that over KV of full precision, in nats a token.
        top1: share of tokens where the most likely one is the same.
    """
    passed = kl <= MAX_KL and top1 >= MIN_TOP1
    return {"passed": passed, "kl": kl, "kl_limit": MAX_KL, "top1": top1, "top1_limit": MIN_TOP1}


def is_sure(kl: tuple[float, float], top1: tuple[float, float]) -> bool:
    """Whether `decide` says the same of all figures within these intervals, (low, high)."""
    return decide(kl[1], top1[0])["passed"] or kl[0] > MAX_KL or top1[1] < MIN_TOP1


def keep(names: Iterable[str], precision: Precision, measured: Mapping[str, Any]) -> list[Path]:
    """Write down a decision (`passed`) and its figures, for `check`; returns where.

    Args:
        names: what those call the weights who will ask: each adapter has a name of its own for them.
    """
    return keep_verdict(f"precision/{precision}", names, measured)


def check(name: str, precision: Precision, unless: str) -> None:
    """Refuse weights whose KV has not been found fit for records of this precision.

    Args:
        unless: the setting that has them used all the same, for the message.

    Raises:
        ConfigError: they were not measured, or failed.
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
            f"precision = {precision!r} changes too much of what these weights say ({path}): want none, "
            f"or set {unless}"
        )
