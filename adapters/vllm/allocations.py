"""Requests of vLLM that have blocks for a load and compute nothing yet: what they lack, so that none waits
for another's blocks for good."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any


class PendingAllocations:
    """Those requests. What they lack together is reckoned once a step, however many are asked about in it.

    Args:
        block_tokens: tokens of a block, per KV cache group of vLLM.
        states: which of these groups keep states, two blocks at a time.
        free: how many of vLLM's blocks nobody holds.
    """

    def __init__(
        self, block_tokens: tuple[int, ...], states: Container[int], free: Callable[[], int]
    ) -> None:
        self._sizes = [size for table, size in enumerate(block_tokens) if table not in states]
        self._state_blocks = 2 * (len(block_tokens) - len(self._sizes))
        self._free = free
        self._views: dict[str, Any] = {}
        self._lacking: int | None = 0

    def add(self, view: Any) -> None:
        """Note that a request has blocks for a load. Mutates."""
        self._views[view.request_id] = view
        if self._lacking is not None:
            self._lacking += self._blocks(view.num_tokens - view.num_computed_tokens)

    def leave(self, name: str) -> None:
        """Note that a request has no blocks any more. Mutates."""
        if self._views.pop(name, None) is not None:
            self._lacking = None

    def go(self, names: Iterable[str]) -> None:
        """Note that a step computes something for these. Mutates."""
        for name in names:
            self._views.pop(name, None)
        self._lacking = None  # others' loads may have ended since

    def fits(self, view: Any) -> bool:
        """Whether there are blocks for all of a request and for what those lack that stand still with some.

        vLLM 0.32 reckons too little for what follows a load in a sliding window's group, and one whose load
        failed stands before the others: each would wait for blocks of the other, for good.
        """
        if not self._views:
            return True
        if self._lacking is None:
            views = self._views.values()
            self._lacking = sum(self._blocks(v.num_tokens - v.num_computed_tokens) for v in views)
        return self._blocks(view.num_tokens) + self._lacking <= self._free()

    def _blocks(self, tokens: int) -> int:
        return sum(-(-tokens // size) for size in self._sizes) + self._state_blocks
