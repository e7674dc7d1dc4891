"""The speed at which an engine computes prompts, measured from its steps."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median

KEPT_STEPS = 8
"""Number of last steps whose median is the speed."""


class Speed:
    """Tokens that an engine computed per second in its last steps. Thread-safe.

    Args:
        min_tokens: minimum number of tokens of a step that counts: smaller steps are bound by memory, not by
            arithmetic.
        valid_s: seconds after the last step until the speed is forgotten, so that slow work is tried again.
    """

    def __init__(self, min_tokens: int, valid_s: float = math.inf) -> None:
        self._min_tokens, self._valid_s = min_tokens, valid_s
        self._speeds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._last_step = -math.inf

    def note_step(self, tokens: int, seconds: float) -> None:
        """Note that a step computed `tokens` tokens in `seconds` seconds."""
        if tokens >= self._min_tokens and seconds > 0:
            self._speeds.append(tokens / seconds)
            self._last_step = time.monotonic()

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the last steps; None before the first step, and `valid_s` after the last."""
        speeds = list(self._speeds)
        return median(speeds) if speeds and time.monotonic() - self._last_step < self._valid_s else None


def saved_tokens_per_s(prefill: float | None, rows: float | None, recomputed_share: float) -> float | None:
    """Return how many loaded tokens of documents save one second of computing.

    A tier that loads fewer tokens per second than that gains nothing.

    Args:
        prefill: prompt tokens that the engine computes per second; None: unknown.
        rows: chosen tokens of documents that the engine recomputes per second; None: unknown.
        recomputed_share: share of the documents' tokens that is recomputed.

    Returns:
        None: unknown; 0: computing a whole document is faster, however fast it is loaded.
    """
    if prefill is None:
        return None
    saved_s = 1 / prefill - (recomputed_share / rows if rows else 0.0)
    return 1 / saved_s if saved_s > 0 else 0.0
