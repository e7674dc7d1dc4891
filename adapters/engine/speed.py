"""How fast an engine computes prompts, as its steps show it."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median

REMEMBERED = 8


class Speed:
    """Tokens that an engine computes in a second, of late. Thread-safe.

    Args:
        least: steps of fewer tokens say little: they wait for memory, not for arithmetic.
        known_s: how long after the last step they count, so that what seemed slow is tried again.
    """

    def __init__(self, least: int, known_s: float = math.inf) -> None:
        self._least, self._known_s = least, known_s
        self._speeds: deque[float] = deque(maxlen=REMEMBERED)
        self._last = -math.inf

    def note(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens, in so many seconds."""
        if tokens >= self._least and seconds > 0:
            self._speeds.append(tokens / seconds)
            self._last = time.monotonic()

    @property
    def tokens_per_s(self) -> float | None:
        """The median of the last steps'; None before the first, and long after the last."""
        speeds = list(self._speeds)
        return median(speeds) if speeds and time.monotonic() - self._last < self._known_s else None


def saved_tokens_per_s(prefill: float | None, rows: float | None, recomputed: float) -> float | None:
    """Tokens of documents that a second of computing is saved by, if `recomputed` of each is computed again.

    Loading more slowly than that gains nothing.

    Args:
        prefill: tokens of prompts that the engine computes in a second; None: not known.
        rows: chosen tokens of documents that it computes again in a second; None: not known.

    Returns:
        None: not known; 0: computing all of a document is faster, however fast it is loaded.
    """
    if prefill is None:
        return None
    saved_s = 1 / prefill - (recomputed / rows if rows else 0.0)
    return 1 / saved_s if saved_s > 0 else 0.0
