"""What the scheduler's and the workers' sides tell each other: plain data, one message a step.

StepMetadata   scheduler to every worker: what to look up, bring near, load and save
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
from kvkit.moving.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

Tables = tuple[list[int], ...]
"""Block ids of a request per KV cache group of vLLM; -1: the block is not there, or not to be touched."""


def cut(tables: Tables, sizes: tuple[int, ...], first: int, last: int, start: int, stop: int) -> Tables:
    """The blocks of tokens [first, last), of `sizes` tokens; -1: vLLM's null block, and what is outside of
    [start, stop)."""
    return tuple(
        [
            block if block and start <= i * size < stop else -1
            for i, block in enumerate(table[first // size : last // size], first // size)
        ]
        for table, size in zip(tables, sizes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class PrefetchTask:
    """Bring near what `sequence` will hit after its first `computed` tokens, which vLLM has.

    For a request that waits for its turn in vLLM's queue: its prompt, or a document in it.
    """

    request_id: str
    sequence: Sequence
    computed: int = 0


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Load tokens [start, stop) of what the answer `number` found.

    Both are multiples of the block size, but for the end of what another engine sent. `blocks` begin at the
    chunk that holds `start`, and have -1 for those before it.
    """

    request_id: str
    number: int
    start: int
    stop: int
    blocks: Tables


@dataclass(frozen=True, slots=True, eq=False)
class BlendTask:
    """Complete a prompt's KV but for its last token's, of what the answer `number` found.

    Args:
        sequence: the whole prompt; after a preemption with what was generated.
        prefix: the load of what is exact, from what vLLM has on; None: vLLM has all of that.
        exact: leading tokens that are left as they are, once `prefix` is loaded: their KV is that of a full
            prefill, or, after a preemption, what this request's first blend made of it.
        spans: where the lookup's documents stand, as far as every rank found them and behind `exact`.
        selection: how tokens to recompute are chosen.
        selected: what was chosen before a preemption, int32 ascending; None: it is to be chosen.
        blocks: the request's, from token 0 to the last; where it has none (a window has left them out), some
            that are its own until the blend is over; -1 where no row looks.
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
    """What of a blend was loaded: by one rank, or (`rank` -1, to the workers) by all of them.

    Args:
        exact: leading tokens that are exact.
        documents: leading tokens of each of the lookup's documents, what it was computed behind among them.
    """

    request_id: str
    number: int
    rank: int
    exact: int
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlendDone:
    """What blending a prompt took, as rank 0 tells it.

    Args:
        exact, reused, computed: tokens by kind, together all of them; reused ones include the selected.
        spans: the task's, as far as they were placed.
        selected: int32, positions that were recomputed, ascending.
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
        policy: what the request wants.
        last: it has ended, and its blocks are kept until this is done.
    """

    request_id: str
    sequence: Sequence
    first: int
    blocks: Tables
    policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    last: bool = False


@dataclass(frozen=True, slots=True)
class RetainTask:
    """Have what tiers hold of `sequence` evicted as its request wants, although nothing of it is saved."""

    sequence: Sequence
    policy: RequestPolicy


@dataclass(frozen=True, slots=True)
class SendTask:
    """Send a prompt's KV to the decode engine, as the transfer `transfer`, from token `first` on.

    Args:
        address: where the decode engine's ranks listen.
        sequence: what of the prompt is sent.
        first: a multiple of the chunk size; `blocks` begin there.
        stop: one past the last token of this piece; a multiple of the chunk size, but at the prompt's end.
        last: nothing more is sent after it.
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
    """What one step of the engine is to do besides computing.

    Attributes:
        computed: tokens that are computed.
        preempted: requests lost their blocks.
        idle: nothing is computed, so that there is time to wait for lookups and loads.
        arrivals: blends that every rank can go on with, in this order.
        cancelled_prefetches: requests whose prefetch is to end: they wait no more.
        released_transfers: transfers from prefill engines that nobody waits for any more.
        acked_failure_step: the last step whose failed load the scheduler knew of when it made this one.
        epoch: changes when everything cached until then is to be forgotten.
        ended: requests that are over, and the tokens of their prompts.
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
    sends: list[SendTask] = field(default_factory=list)
    computed: int = 0
    preempted: bool = False
    idle: bool = False
    released_transfers: list[str] = field(default_factory=list)
    acked_failure_step: int = 0
    epoch: str = ""
    ended: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NamedChunks:
    """The records that a rank has of chunks `first` and so on of a request, a tuple for each chunk.

    `epoch`: that of the step in which it named them.
    """

    rank: int
    epoch: str
    request_id: str
    first: int
    names: list[tuple[str, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Chunks that a rank's tiers held when it was started; `is_all`: there is no more that could be hit."""

    rank: int
    epoch: str
    chunks: list[ListedChunk]
    is_all: bool


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What happened since the last report, of one rank or of several.

    Attributes:
        failed: requests of which less was loaded than was promised.
        failed_step: the last step in which a load that the step waited for failed; 0 for none.
        named, changes: what is saved or was found, and what a rank's tiers hold since, if anyone wants to
            know.
        watches: None: what tiers were told to hold stays. Otherwise that is void, and all of it is told from
            now on (True), or they may hold what is not (False), until all of it was `listed`.
        new_weights: the epoch in which the model's weights changed; None: they did not.
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
        """Both reports as one. Mutates neither."""
        assert isinstance(other, WorkerReport)
        watches = [one for one in (self.watches, other.watches) if one is not None]
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
