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
        self._requests: dict[str, Any] = {}
        self._lacking: int | None = 0

    def add(self, request: Any) -> None:
        """Note that a request has blocks for a load. Mutates."""
        self._requests[request.request_id] = request
        if self._lacking is not None:
            self._lacking += self._blocks(request.num_tokens - request.num_computed_tokens)

    def leave(self, request_id: str) -> None:
        """Note that a request has no blocks any more. Mutates."""
        if self._requests.pop(request_id, None) is not None:
            self._lacking = None

    def go(self, request_ids: Iterable[str]) -> None:
        """Note that a step computes something for these. Mutates."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
        self._lacking = None  # others' loads may have ended since

    def fits(self, request: Any) -> bool:
        """Whether there are blocks for all of a request and for what those lack that stand still with some.

        vLLM 0.32 reckons too little for what follows a load in a sliding window's group, and one whose load
        failed stands before the others: each would wait for blocks of the other, for good.
        """
        if not self._requests:
            return True
        if self._lacking is None:
            requests = self._requests.values()
            self._lacking = sum(self._blocks(r.num_tokens - r.num_computed_tokens) for r in requests)
        return self._blocks(request.num_tokens) + self._lacking <= self._free()

    def _blocks(self, tokens: int) -> int:
        return sum(-(-tokens // size) for size in self._sizes) + self._state_blocks
