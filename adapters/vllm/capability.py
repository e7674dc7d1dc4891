"""The worker's half of a capability: its hooks in a step, and the context that all halves of a rank share."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvkit.adapters.engine.loads import LoadMode, PromptHit, PromptLoad
from kvkit.adapters.engine.request_stats import RequestStats
from kvkit.adapters.engine.spans import RequestSpans
from kvkit.adapters.engine.speed import Speed
from kvkit.adapters.vllm.namespaces import Namespaces
from kvkit.adapters.vllm.pages import GroupPages, complete_tokens
from kvkit.adapters.vllm.settings import Settings
from kvkit.adapters.vllm.stats import Recorder
from kvkit.adapters.vllm.step import LoadTask, NamedChunks, StepMetadata, Tables, WorkerReport
from kvkit.cache import Cache
from kvkit.format.layout import Namespace
from kvkit.transfer.sequence import Chunks, SequencePages

log = logging.getLogger(__name__)

BLEND_SPEED_S = 60.0
"""Seconds for which the speed of the last blend decides whether other blends are worthwhile."""


class Wakeups:
    """Wake-ups of the thread that runs steps. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._seen = 0

    def notify(self, _: object = None) -> None:
        """Wake the thread, or keep it from waiting until it calls `mark_seen`."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def mark_seen(self) -> None:
        """Note that the thread handles all earlier wake-ups now."""
        self._seen = self._count

    @property
    def unseen(self) -> bool:
        """True if there was a wake-up since `mark_seen`."""
        return self._count != self._seen

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for `condition`, which is evaluated after each wake-up."""
        with self._changed:
            self._changed.wait_for(condition, timeout_s)


@dataclass(eq=False)
class WorkerContext:
    """State that the capabilities of one rank share. For the thread that runs steps.

    Args:
        groups: pages of the KV cache, an entry per group of the layout.
        reports_tiers: True if the worker reports what tiers hold.

    Attributes:
        prefill_speed: prompt tokens that the engine computes per second.
        row_speed: rows of blends per second, including the choice of tokens.
        on_gpu: True if the pages are on a GPU.
        block_tokens: least common multiple of the groups' block sizes.
        layers: number of each layer in the layout, by vLLM's name.
        number: number of the step.
        epoch: name of the epoch.
        report: events since the last report to the scheduler.
    """

    cache: Cache
    settings: Settings
    groups: list[GroupPages]
    namespaces: Namespaces
    reports_tiers: bool
    number: int = field(default=0, init=False)
    epoch: str = field(default="", init=False)
    report: WorkerReport = field(default_factory=WorkerReport, init=False)
    wakeups: Wakeups = field(default_factory=Wakeups, init=False)

    def __post_init__(self) -> None:
        self.stats = Recorder(self.cache)
        self.request_stats = RequestStats(logs=self.namespace.rank == 0)
        self.spans = RequestSpans(self.namespace.rank)
        self.prefill_speed = Speed(self.namespace.chunk_tokens)
        self.row_speed = Speed(1, BLEND_SPEED_S)
        self.on_gpu = self.groups[0].pages.device.type == "cuda"
        self.block_tokens = math.lcm(*(group.block_tokens for group in self.groups))
        self.layers = {
            name: layer
            for group in self.groups
            for name, layer in zip(group.names, group.pages.group.layers, strict=True)
        }

    @property
    def namespace(self) -> Namespace:
        """Namespace of the present epoch, without LoRA and salt."""
        return self.namespaces.current

    def pages(self, blocks: Tables, base: int, start: int, stop: int) -> list[SequencePages]:
        """Return the pages of tokens [start, stop), per layer group; `blocks` begin with token `base`."""
        return [
            group.sequence_pages(blocks[group.table][(start - base) // group.block_tokens :], stop - start)
            for group in self.groups
        ]

    def start_load(self, task: LoadTask, hit: PromptHit | None, mode: LoadMode) -> PromptLoad:
        """Start the load of a task from a hit; with "sync", wait for it as `PromptLoad` does."""
        pages_of = partial(self.pages, task.blocks, task.start - task.start % self.namespace.chunk_tokens)
        return PromptLoad(self.cache, hit, task.start, task.stop, pages_of, mode, self.wakeups.notify)

    def complete_tokens(self, request_id: str, blocks: Tables, first: int, stop: int) -> int:
        """Return how many leading tokens of [first, stop) have all of their blocks; log if not all have."""
        count = complete_tokens(self.groups, blocks, self.namespace.chunk_tokens, first, stop)
        if count < stop - first:
            log.warning("%s: tokens from %d on lack blocks, and are not stored", request_id, first + count)
        return count

    def report_names(self, request_id: str, first: int, chunks: Chunks | None) -> None:
        """Report the names of a request's records from chunk `first` on, unless `reports_tiers` is false."""
        if not self.reports_tiers or chunks is None:
            return
        if chunks.formats[0].namespace.revision == self.namespace.revision:  # not from before a reset
            names = [tuple(chunks.records(i, i + 1)) for i in range(len(chunks))]
            self.report.named.append(NamedChunks(self.namespace.rank, self.epoch, request_id, first, names))


@dataclass(eq=False, slots=True)
class FinishedRequests:
    """Ids of requests that capabilities report to vLLM at the end of a step.

    Attributes:
        received: requests whose loads or blends are over.
        failed: requests whose loads returned less than the lookup found.
        released: requests with a last save or a transfer that is over.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)


class Capability:
    """The worker's half of a capability. A step calls its methods in the order of their definitions here.

    By default they do nothing. Only `end_reads`, `wait_for_layer`, `end_writes` and `close` may wait; and,
    with "sync" loading or sending, `start_loads` and `start_saves`. With drafts, vLLM calls
    `finish_requests` before `start_saves`.
    """

    def end_reads(self) -> None:
        """End all reads of the pages, before anything may write to them."""

    def begin_epoch(self) -> None:
        """Forget all KV of earlier epochs. `drop_kv` follows."""

    def begin_step(self, step: StepMetadata) -> None:
        """Start the work of a step that needs no pages."""

    def start_loads(self, step: StepMetadata) -> None:
        """Start to fill pages."""

    def wait_for_layer(self, name: str) -> None:
        """Wait until the layer `name` is loaded."""

    def layer_computed(self, name: str) -> None:
        """Note that the step has computed the layer `name`."""

    def start_saves(self, step: StepMetadata, ready: Callable[[], object]) -> None:
        """Start to read pages, until `end_reads`; `ready` waits until they hold what the step computes."""

    def discard_step(self) -> None:
        """Save nothing, in place of `start_saves`: the step may depend on tokens that were not loaded."""

    def finish_requests(self, request_ids: set[str], finished: FinishedRequests) -> None:
        """Forget requests that vLLM ended. Adds to `finished` those whose work is over here."""

    def holds_blocks(self, request_id: str) -> bool:
        """Return whether a request's blocks may still be read after it ended."""
        return False

    def add_to_report(self) -> None:
        """Add what happened since the last report to the context's report."""

    def drop_kv(self) -> None:
        """Drop all KV that was found or computed: the weights changed, or the pages lose their memory."""

    def end_writes(self) -> None:
        """End all writes to the pages, and wait for those in flight."""

    def close(self) -> None:
        """End what is in flight; the cache is closed next."""

    @property
    def has_result(self) -> bool:
        """True if the next step has something to finish or to report."""
        return False

    @property
    def awaits_transfer(self) -> bool:
        """True if a transfer between engines is awaited."""
        return False

    @property
    def busy(self) -> bool:
        """True if anything is in flight that will have a result."""
        return False
