"""The scheduler's half of a capability, and what all halves share.

SchedulerConfig   fixed properties of an engine
EngineView        vLLM's engine, as the scheduler's side sees it
RequestState      state of one request, with its lookup (PendingLookup)
Planner           hooks that `kvkit.adapters.vllm.scheduler.Scheduler` calls
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Protocol

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.vllm.blending.requests import Blend
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.step import StepMetadata, Tables, WorkerReport
from kvkit.transfer.policy import RequestPolicy


@dataclass(frozen=True)
class SchedulerConfig:
    """Fixed properties of one engine.

    Args:
        chunk_tokens: tokens of a chunk.
        block_tokens: tokens of a block, per KV cache group of vLLM; each divides `chunk_tokens`.
        ranks: number of workers that answer lookups.
        blocking_load: True if a step waits for its loads (sync and layerwise loading).
        save_generated: True if chunks with generated tokens are saved.
        stores: True if anything is saved.
        windows: True if running requests lose blocks of K and V (those that sliding windows have left).
        states: by index of the KV cache groups of Mamba layers: True if a request has one running state there
            (`kvkit.adapters.vllm.states`).
        snapshot_every: as in `kvkit.transfer.plan.is_snapshot_kept`.
        recompute_last_block: True if a draft model's KV of a token depends on later tokens, so that the end
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
        """True if running requests lose blocks: those of windows, and earlier states."""
        return self.windows or bool(self.states)

    @cached_property
    def grain_tokens(self) -> int:
        """Unit of the lengths that hits may have, in tokens: a chunk, or a block of all groups."""
        # with windows, only at a chunk's end are all tokens within the window known to be there
        return self.chunk_tokens if self.loses_blocks else math.lcm(*self.block_tokens)

    def whole_grains(self, tokens: int) -> int:
        """Round `tokens` down to a length that hits may have."""
        return tokens // self.grain_tokens * self.grain_tokens

    def usable_tokens(self, tokens: int) -> int:
        """Return how many tokens of a hit of `tokens` tokens (whole chunks) may be loaded."""
        return self.whole_grains(tokens - 1) if self.recompute_last_block else tokens


class EngineView(Protocol):
    """vLLM's engine, as the scheduler's side sees it. Nothing here blocks; `request` is vLLM's `Request`."""

    def now(self) -> float:
        """Return the time of a monotonic clock, in seconds."""

    def sequence(self, request: Any, tokens: int) -> Sequence | None:
        """Return the first `tokens` tokens of a request, as in keys; None if their KV cannot be cached."""

    def cached_tokens(self, request: Any) -> int:
        """Return the number of leading tokens of a request in vLLM's own prefix cache."""

    def free_blocks(self) -> int:
        """Return the number of vLLM's free blocks."""

    def handoff_of(self, request: Any) -> RemoteDecode | RemotePrefill | None:
        """Return the handoff that a request asks for."""

    def policy_of(self, request: Any) -> RequestPolicy:
        """Return a request's policy."""

    def trace_of(self, request: Any) -> dict[str, str]:
        """Return the headers of the trace that a request came with; empty: none."""

    def calls_tool(self, request: Any) -> bool | None:
        """Return whether the answer of a request that ended calls a tool; None: that is not known."""

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer a lookup at once; return None if only the workers can answer it."""

    def expect_chunks(self, request: Any, first: int, stop: int) -> None:
        """Note that chunks [first, stop) of a request were found or will be saved."""


def whole_sequence(engine: EngineView, request: Any) -> Sequence:
    """Return all tokens of a request that can be cached."""
    sequence = engine.sequence(request, request.num_tokens)
    assert sequence is not None  # else it would not have been looked up
    return sequence


@dataclass(slots=True)
class PendingLookup:
    """A lookup of a request, and the ranks' answers so far.

    Attributes:
        number: number of the lookup.
        chunks: number of chunks to look up.
        answers: answers by rank.
        answered_at: time of the last rank's answer; infinite until every rank has answered.
    """

    number: int
    chunks: int
    answers: dict[int, LookupAnswer] = field(default_factory=dict)
    answered_at: float = math.inf

    @property
    def is_answered(self) -> bool:
        """True if every rank has answered."""
        return self.answered_at < math.inf

    def common_answer(self, same_length: bool) -> LookupAnswer:
        """Return an answer with the tokens that every rank can load.

        Args:
            same_length: True if nothing can be loaded unless all ranks found equally many tokens.
        """
        answers = self.answers.values()
        minimum = min(answers, key=lambda answer: (answer.tokens, answer.rank))
        if same_length and any(answer.tokens != minimum.tokens for answer in answers):
            minimum = replace(minimum, tokens=0, segments=())  # not all have a snapshot there
        documents = zip(*(answer.documents for answer in answers), strict=True)
        return replace(minimum, documents=tuple(map(min, documents)))

    def exact_tokens(self, approximate: Container[str]) -> int:
        """Return how many leading tokens every rank can load from tiers other than `approximate`."""
        return min(
            sum(tokens for _, tokens in takewhile(lambda s: s[0] not in approximate, answer.segments))
            for answer in self.answers.values()
        )


@dataclass(slots=True)
class RequestState:
    """The scheduler's state of a request.

    Attributes:
        request: vLLM's `Request`.
        policy: the request policy.
        handoff: the handoff that the request asks for; None: none.
        sent: prompt tokens that the workers were asked to send; None before the first.
        lookup: the lookup since the last admission; None: none.
        admitted: answer to the lookup of the last admission; None: nothing was loaded.
        start: first token of the last load.
        saved: chunks up to which saves were planned; None from an admission until the first step after it.
        no_external_kv: True if the request loads nothing for the rest of its life.
        no_prefetch: True if there is nothing to prefetch until the request is admitted.
        blend: the request's blend, planned or done; None: the request is never blended.
        private: first token whose KV is, or will be, approximate because a tier keeps fewer bits; None: none.
        epoch: the scheduler's epoch when the request last had no blocks; its KV may be from that epoch.
        computed: tokens of the request in vLLM's own prefix cache at that time.
    """

    request: Any
    policy: RequestPolicy
    handoff: RemoteDecode | RemotePrefill | None = None
    sent: int | None = None
    lookup: PendingLookup | None = None
    admitted: LookupAnswer | None = None
    start: int = 0
    saved: int | None = None
    no_external_kv: bool = False
    no_prefetch: bool = False
    blend: Blend | None = None
    private: int | None = None
    epoch: str = ""
    computed: int = 0

    @property
    def request_id(self) -> str:
        """Id of the request."""
        request_id: str = self.request.request_id
        return request_id

    @property
    def remote_prefill(self) -> RemotePrefill | None:
        """The transfer from a prefill engine; None: none."""
        return self.handoff if isinstance(self.handoff, RemotePrefill) else None

    @property
    def remote_decode(self) -> RemoteDecode | None:
        """The transfer to a decode engine; None: none."""
        return self.handoff if isinstance(self.handoff, RemoteDecode) else None

    @property
    def blended_from(self) -> int | None:
        """First token whose KV is approximate because it was blended; None: none."""
        return None if self.blend is None else self.blend.private

    @property
    def will_blend(self) -> bool:
        """True if the next load is that of a blend; no longer after a reset between lookup and blocks."""
        return self.blend is not None and self.blend.plan is not None and self.lookup is not None

    def tier_tokens(self, tokens: int) -> dict[str, int]:
        """Return how many of the `tokens` tokens that the request loaded last came from each tier."""
        if self.admitted is None:
            return {}
        stop, segment_stop = self.start + tokens, 0
        by_tier: Counter[str] = Counter()
        for tier, size in self.admitted.segments:
            segment_start, segment_stop = segment_stop, segment_stop + size
            by_tier[tier] += max(0, min(segment_stop, stop) - max(segment_start, self.start))
        return +by_tier


Scheduled = list[tuple[RequestState, int]]
"""Requests that a step computes, each with its number of tokens."""
BlocksOf = Callable[[str], Tables | None]
"""Function that returns a request's block tables, by the request's id."""


class Planner:
    """The half of a capability that plans its tasks in each step's message to the workers.

    `Scheduler` calls each hook of all planners in turn. A hook mutates the planner and the request's state,
    and does nothing unless the capability overrides it.
    """

    def __init__(self, config: SchedulerConfig, engine: EngineView) -> None:
        self._config, self._engine = config, engine

    def on_new_request(self, state: RequestState) -> None:
        """Begin a request."""

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        """Note that a request got `blocks`, and that `tokens` tokens are to be loaded into them."""

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks_of: BlocksOf) -> None:
        """Add this capability's tasks to the message of a step.

        Args:
            scheduled: the step's requests, without those whose KV may be older than the current epoch.
        """

    def update_from_workers(self, report: WorkerReport, requests: Mapping[str, RequestState]) -> None:
        """Apply the workers' report."""

    def request_finished(self, state: RequestState, blocks: Tables | None) -> bool:
        """Forget a request. Return whether a worker will report when its blocks may be freed.

        Args:
            blocks: None: nothing of the request is saved.
        """
        return False

    def reset(self) -> None:
        """Begin an epoch: nothing that was planned before it is stored."""
