"""How fast an engine computes prompts, as its steps show it."""

from __future__ import annotations

from collections import deque
from statistics import median

REMEMBERED = 8


class Speed:
    """Tokens that an engine computes in a second, of late. Thread-safe.

    Args:
        least: steps of fewer tokens say little: they wait for memory, not for arithmetic.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._speeds: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens, in so many seconds."""
        if tokens >= self._least and seconds > 0:
            self._speeds.append(tokens / seconds)

    @property
    def tokens_per_s(self) -> float | None:
        """The median of the last steps'; None before the first."""
        speeds = list(self._speeds)
        return median(speeds) if speeds else None
