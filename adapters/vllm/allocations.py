"""Requests that have blocks for a load and compute nothing yet, and the number of blocks that they lack.

The scheduler keeps that many blocks free, so that no two requests wait for each other's blocks forever.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any


class PendingAllocations:
    """The requests of vLLM that have blocks for a load and compute nothing yet.

    The number of blocks that they lack is kept between calls of `fits`, until a step or a request changes it.

    Args:
        block_tokens: tokens per block, for each KV cache group of vLLM.
        states: indices of the groups of Mamba layers, which keep two blocks per request.
        free_blocks: returns the number of free blocks of vLLM.
    """

    def __init__(
        self, block_tokens: tuple[int, ...], states: Container[int], free_blocks: Callable[[], int]
    ) -> None:
        self._block_tokens = [size for table, size in enumerate(block_tokens) if table not in states]
        self._state_blocks = 2 * (len(block_tokens) - len(self._block_tokens))
        self._free_blocks = free_blocks
        self._requests: dict[str, Any] = {}
        self._missing_blocks: int | None = 0

    def add(self, request: Any) -> None:
        """Add a request that has blocks for a load. Mutates."""
        self._requests[request.request_id] = request
        if self._missing_blocks is not None:
            self._missing_blocks += self._blocks(request.num_tokens - request.num_computed_tokens)

    def remove(self, request_id: str) -> None:
        """Remove a request that has no blocks any more. Mutates."""
        if self._requests.pop(request_id, None) is not None:
            self._missing_blocks = None

    def remove_scheduled(self, request_ids: Iterable[str]) -> None:
        """Remove requests that a step computes tokens for. Mutates."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
        self._missing_blocks = None  # loads of other requests may have ended since

    def fits(self, request: Any) -> bool:
        """Return whether blocks are free for a whole request and for all that the pending ones lack.

        vLLM 0.32 reserves too few blocks for the tokens after a load in a sliding window's group, and it
        queues a request with a failed load before the others. Without this check, two such requests could
        wait for each other's blocks forever.
        """
        if not self._requests:
            return True
        if self._missing_blocks is None:
            requests = self._requests.values()
            self._missing_blocks = sum(self._blocks(r.num_tokens - r.num_computed_tokens) for r in requests)
        return self._blocks(request.num_tokens) + self._missing_blocks <= self._free_blocks()

    def _blocks(self, tokens: int) -> int:
        return sum(-(-tokens // size) for size in self._block_tokens) + self._state_blocks
