"""What the scheduler's and the workers' sides tell each other: plain data, one message a step.

StepMetadata   scheduler to every worker: what to look up, bring near, load and save
WorkerReport   every worker to the scheduler: what was found, what failed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvkit.adapters.engine.question import LookupAnswer, Question, Sequence

Tables = tuple[list[int], ...]
"""Block ids of a request per KV cache group of vLLM; -1: the block is not there, or not to be touched."""


@dataclass(frozen=True, slots=True)
class PrefetchTask:
    """Bring near what `sequence` will hit after its first `computed` tokens, which vLLM has.

    For a request that waits for its turn in vLLM's queue.
    """

    request: str
    sequence: Sequence
    computed: int = 0


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Load tokens [start, stop) of what the answer `number` found.

    Both are multiples of the block size, but for the end of what another engine sent. `blocks` begin at the
    chunk that holds `start`, and have -1 for those before it.
    """

    request: str
    number: int
    start: int
    stop: int
    blocks: Tables


@dataclass(frozen=True, slots=True)
class SaveTask:
    """Store the whole chunks of `sequence` from chunk `first` on, where `blocks` begin.

    `last`: the request has ended, and its blocks are kept until this is done.
    """

    request: str
    sequence: Sequence
    first: int
    blocks: Tables
    last: bool = False


@dataclass(frozen=True, slots=True)
class SendTask:
    """Send a prompt's KV to the decode engine, as the transfer `transfer`, from token `first` on.

    Args:
        address: where the decode engine's rank 0 listens.
        sequence: what of the prompt is sent.
        first: a multiple of the chunk size; `blocks` begin there.
        stop: one past the last token of this piece; a multiple of the chunk size, but at the prompt's end.
        last: nothing more is sent after it.
    """

    request: str
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
        called_off: requests whose prefetch is to end: they wait no more.
        unwanted: transfers from prefill engines that nobody waits for any more.
        heard: the last step whose failed load the scheduler knew of when it made this one.
        epoch: changes when everything cached until then is to be forgotten.
        ended: requests that are over, and the tokens of their prompts.
    """

    number: int = 0
    questions: list[Question] = field(default_factory=list)
    prefetches: list[PrefetchTask] = field(default_factory=list)
    called_off: list[str] = field(default_factory=list)
    loads: list[LoadTask] = field(default_factory=list)
    saves: list[SaveTask] = field(default_factory=list)
    sends: list[SendTask] = field(default_factory=list)
    computed: int = 0
    preempted: bool = False
    idle: bool = False
    unwanted: list[str] = field(default_factory=list)
    heard: int = 0
    epoch: str = ""
    ended: dict[str, int] = field(default_factory=dict)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What happened since the last report, of one rank or of several.

    Attributes:
        failed: requests of which less was loaded than was promised.
        failed_step: the last step in which a load that the step waited for failed; 0 for none.
        stored: (request, tier, chunk) of what a tier has completely, if anyone wants to know.
    """

    answers: list[LookupAnswer] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    failed_step: int = 0
    stored: list[tuple[str, str, int]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both reports as one. Mutates neither."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.answers + other.answers,
            self.failed + other.failed,
            max(self.failed_step, other.failed_step),
            self.stored + other.stored,
        )
