"""What the scheduler's side knows of its engine: fixed properties, and what it asks about requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.transfer.policy import RequestPolicy


@dataclass(frozen=True)
class SchedulerConfig:
    """Fixed properties of one engine.

    Args:
        chunk_tokens: tokens of a chunk.
        block_tokens: tokens of a block, per KV cache group of vLLM; each divides `chunk_tokens`.
        ranks: number of workers that answer lookups.
        blocking_load: whether a step waits for its loads (sync and layerwise loading).
        save_generated: whether chunks with generated tokens are saved.
        stores: whether anything is saved.
        windows: whether running requests lose blocks of K and V (those that sliding windows have left).
        states: numbers of the tables of states, and whether these run (`kvkit.adapters.vllm.states`).
        snapshot_every: as in `kvkit.transfer.plan.is_snapshot_kept`.
        recompute_last_block: whether a draft model's KV of a token depends on later tokens, so that the end
            of a hit is computed again.
        approximate: tiers with fewer bits. Tokens computed behind KV from these tiers are not saved.
    """

    chunk_tokens: int
    block_tokens: tuple[int, ...]
    ranks: int = 1
    blocking_load: bool = False
    save_generated: bool = True
    stores: bool = True
    windows: bool = False
    states: Mapping[int, bool] = field(default_factory=dict)
    snapshot_every: int = 1
    recompute_last_block: bool = False
    approximate: frozenset[str] = frozenset()

    @property
    def loses_blocks(self) -> bool:
        """Whether running requests lose blocks: those of windows, and earlier states."""
        return self.windows or bool(self.states)

    @cached_property
    def grain_tokens(self) -> int:
        """Unit of the lengths that hits may have: a chunk, or a block of all groups."""
        # with windows, only at a chunk's end are all tokens within the window known to be there
        return self.chunk_tokens if self.loses_blocks else math.lcm(*self.block_tokens)

    def whole_grains(self, tokens: int) -> int:
        """Round `tokens` down to a length that hits may have."""
        return tokens // self.grain_tokens * self.grain_tokens

    def usable_tokens(self, tokens: int) -> int:
        """Return up to which token a hit of `tokens` tokens (whole chunks) may be loaded."""
        return self.whole_grains(tokens - 1) if self.recompute_last_block else tokens


class EngineView(Protocol):
    """One engine, as the scheduler's side sees it. Nothing here blocks; requests are vLLM's `Request`."""

    def now(self) -> float:
        """Return the time of a monotonic clock, in seconds."""

    def sequence(self, request: Any, tokens: int) -> Sequence | None:
        """Return the first `tokens` tokens of a request, as keys see them; None if it cannot be cached."""

    def cached_tokens(self, request: Any) -> int:
        """Return the number of leading tokens of a request in vLLM's own prefix cache."""

    def free_blocks(self) -> int:
        """Return the number of vLLM's free blocks."""

    def handoff_of(self, request: Any) -> RemoteDecode | RemotePrefill | None:
        """Return the handoff that a request asks for."""

    def policy_of(self, request: Any) -> RequestPolicy:
        """Return a request's policy."""

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer a handoff's lookup at once; None if the workers have to."""

    def expect_chunks(self, request: Any, first: int, stop: int) -> None:
        """Note that chunks [first, stop) of a request were found or will be saved."""


def whole_sequence(engine: EngineView, request: Any) -> Sequence:
    """Return all tokens of a request that can be cached."""
    sequence = engine.sequence(request, request.num_tokens)
    assert sequence is not None  # else it would not have been looked up
    return sequence
