"""Messages between the scheduler's and the workers' sides: plain data, one message a step.

StepMetadata   scheduler to every worker: what to look up, prefetch, load and save
WorkerReport   every worker to the scheduler: what was found, what failed
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvkit.adapters.engine.changes import Change
from kvkit.adapters.engine.listing import ListedChunk
from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.blend.plan import Selection, Span
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

Tables = tuple[list[int], ...]
"""Block ids of a request per KV cache group of vLLM; -1: the block is missing, or must not be touched."""


def cut(tables: Tables, sizes: tuple[int, ...], first: int, last: int, start: int, stop: int) -> Tables:
    """Return the blocks of tokens [first, last), with -1 for null blocks and those outside [start, stop).

    Args:
        sizes: tokens of a block, by table.
    """
    return tuple(
        [
            block if block and start <= i * size < stop else -1
            for i, block in enumerate(table[first // size : last // size], first // size)
        ]
        for table, size in zip(tables, sizes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class PrefetchTask:
    """Prefetch what `sequence` will hit after its first `computed` tokens, which vLLM has.

    The request is waiting in vLLM's queue. `sequence` is its prompt, or a document in the prompt.
    """

    request_id: str
    sequence: Sequence
    computed: int = 0


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Load tokens [start, stop) of what lookup `number` found.

    `start` and `stop` are multiples of the block size, except at the end of what another engine sent.
    `blocks` begin at the chunk that holds `start`; blocks before `start` are -1.
    """

    request_id: str
    number: int
    start: int
    stop: int
    blocks: Tables


@dataclass(frozen=True, slots=True, eq=False)
class BlendTask:
    """Complete a prompt's KV, except for its last token, from what lookup `number` found.

    Args:
        sequence: the whole prompt; after a preemption, followed by the generated tokens.
        prefix: load of the exact tokens that vLLM does not have; None: vLLM has all of them.
        exact: leading tokens that stay as they are once `prefix` is loaded. Their KV is that of a full
            prefill, or, after a preemption, the result of this request's first blend.
        spans: spans of the lookup's documents, cut to the tokens after `exact` that all ranks found.
        selection: how to choose the tokens to recompute.
        selected: tokens chosen before a preemption, int32 ascending; None: not chosen yet.
        blocks: the request's blocks, from token 0 to the last. Blocks that a window has left are replaced by
            extra ones until the blend is over, or by -1 if no row attends to them.
    """

    request_id: str
    number: int
    sequence: Sequence
    prefix: LoadTask | None
    exact: int
    spans: tuple[Span, ...]
    selection: Selection
    selected: NDArray[np.int32] | None
    blocks: Tables


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that were loaded for a blend: by one rank, or, with `rank` -1 (to the workers), by all ranks.

    Args:
        exact: leading tokens that are exact.
        documents: leading tokens of each of the lookup's documents, the prefix it was computed with included.
    """

    request_id: str
    number: int
    rank: int
    exact: int
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlendDone:
    """Result of blending a prompt, as rank 0 reports it.

    Args:
        exact, reused, computed: tokens by kind, which add up to all tokens; selected ones count as reused.
        spans: the task's spans, cut to the tokens that every rank loaded.
        selected: recomputed positions, int32 ascending.
        seconds: by stage: load, place, choose, rows.
    """

    request_id: str
    exact: int
    reused: int
    computed: int
    spans: tuple[Span, ...]
    selected: NDArray[np.int32]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveTask:
    """Store the whole chunks of `sequence` from chunk `first` on, where `blocks` begin.

    Args:
        policy: the request policy.
        last: True if the request has ended, so that its blocks are kept until this save is done.
    """

    request_id: str
    sequence: Sequence
    first: int
    blocks: Tables
    policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    last: bool = False


@dataclass(frozen=True, slots=True)
class RetainTask:
    """Apply the request policy's eviction to the records of `sequence` that tiers hold, without a save."""

    sequence: Sequence
    policy: RequestPolicy


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """Tell tiers whose eviction learns that a request was answered, and whether the answer calls a tool."""

    sequence: Sequence
    tool_call: bool


@dataclass(frozen=True, slots=True)
class SendTask:
    """Send tokens [first, stop) of a prompt's KV to the decode engine, as the transfer `transfer`.

    Args:
        address: address of the decode engine's ranks.
        sequence: all that is sent of the prompt, in one or more pieces.
        first: first token of this piece and of `blocks`; a multiple of the chunk size.
        stop: one past the last token of this piece; a multiple of the chunk size, except at the prompt's end.
        last: True if this is the last piece.
    """

    request_id: str
    transfer: str
    address: str
    sequence: Sequence
    first: int
    stop: int
    blocks: Tables
    last: bool


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Work of one engine step besides computing.

    Attributes:
        number: number of the step.
        cancelled_prefetches: ids of requests that have left the queue; their prefetches are cancelled.
        arrivals: blends that every rank can continue, in this order.
        computed: number of tokens that the step computes.
        preempted: True if requests have lost their blocks.
        idle: True if the step computes nothing, so that there is time to wait for lookups and loads.
        released_transfers: ids of prefill engines' transfers that no request waits for any more.
        acked_failure_step: last step with a failed load that the scheduler knew of when it planned this one.
        epoch: name of the epoch. When it changes, workers forget all earlier KV.
        ended: number of prompt tokens of each ended request, by request id.
        traces: headers of the trace of each new request that came with one, by request id.
    """

    number: int = 0
    lookups: list[LookupRequest] = field(default_factory=list)
    prefetches: list[PrefetchTask] = field(default_factory=list)
    cancelled_prefetches: list[str] = field(default_factory=list)
    loads: list[LoadTask] = field(default_factory=list)
    blends: list[BlendTask] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    saves: list[SaveTask] = field(default_factory=list)
    retains: list[RetainTask] = field(default_factory=list)
    answers: list[AnswerTask] = field(default_factory=list)
    sends: list[SendTask] = field(default_factory=list)
    computed: int = 0
    preempted: bool = False
    idle: bool = False
    released_transfers: list[str] = field(default_factory=list)
    acked_failure_step: int = 0
    epoch: str = ""
    ended: dict[str, int] = field(default_factory=dict)
    traces: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedChunks:
    """Names of a rank's records of a request's chunks from `first` on, one tuple per chunk.

    `epoch`: epoch of the step in which the rank reported them.
    """

    rank: int
    epoch: str
    request_id: str
    first: int
    names: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Chunks that a rank's tiers held at its start. `is_complete`: no other chunks can be hit."""

    rank: int
    epoch: str
    chunks: list[ListedChunk]
    is_complete: bool


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Events since the last report, of one rank or several.

    Attributes:
        failed: requests for which less was loaded than the lookup found.
        failed_step: last step that waited for a load that failed; 0: none.
        named: names of records that are saved or were found, if the workers report the records in tiers.
        changes: changes to the records in each rank's tiers, on the same condition.
        watches: None: earlier reports of the records in tiers stay valid. Otherwise they are void, and new
            reports are complete (True), or incomplete until all records in tiers were `listed` (False).
        new_weights: epoch in which the model's weights changed; None: they did not.
    """

    answers: list[LookupAnswer] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    failed_step: int = 0
    named: list[NamedChunks] = field(default_factory=list)
    changes: list[tuple[int, Change]] = field(default_factory=list)
    watches: bool | None = None
    listed: list[Listed] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    blended: list[BlendDone] = field(default_factory=list)
    new_weights: str | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return both reports as one. Mutates neither."""
        assert isinstance(other, WorkerReport)
        watches = [reported for reported in (self.watches, other.watches) if reported is not None]
        return WorkerReport(
            self.answers + other.answers,
            self.failed + other.failed,
            max(self.failed_step, other.failed_step),
            self.named + other.named,
            self.changes + other.changes,
            all(watches) if watches else None,
            self.listed + other.listed,
            self.arrivals + other.arrivals,
            self.blended + other.blended,
            other.new_weights if self.new_weights is None else self.new_weights,
        )
