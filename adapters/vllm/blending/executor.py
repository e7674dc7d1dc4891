"""Execution of blends on one rank: load KV, then complete the prompt in step with all ranks.

start_loads   starts to load documents into the request's blocks, at their positions in the prompt
Arrival       reports the loaded tokens when all loads have ended; a single rank completes from its own report
complete      starts from the tokens that every rank has, in the same step, so that all run the same rows
finish_requests  runs rows until the KV is complete, then reports the request as received
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkit.adapters.engine.loads import NOTHING, PromptHit, PromptLoad, result_of
from kvkit.adapters.engine.lookups import Lookups
from kvkit.adapters.vllm.blending.blender import BlendedPrompt, Blender
from kvkit.adapters.vllm.blending.placing import Placing
from kvkit.adapters.vllm.blending.rows import lora_request
from kvkit.adapters.vllm.capability import Capability, FinishedRequests, WorkerContext
from kvkit.adapters.vllm.step import Arrival, BlendDone, BlendTask, StepMetadata
from kvkit.blend.plan import Span, plan_blend
from kvkit.cache import Loaded
from kvkit.transfer.sequence import Hit
from kvkit.workers import Transfer

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ActiveBlend:
    """The blend of one request.

    Attributes:
        began: monotonic time of its start.
        prefix: load of the exact KV; None: nothing to load.
        documents: per span, the number of leading tokens that its load skips, and the load; None: no load.
        place_s: seconds spent on moving parts of documents to their positions.
        load_s: seconds from its start to the end of all loads.
        arrival: what this rank has loaded; None: loads are in flight.
        spans: the parts of documents that every rank has.
        completion: None until every rank has reported.
        cancelled: True if it ends as soon as its loads do.
    """

    task: BlendTask
    began: float
    prefix: PromptLoad | None
    documents: list[tuple[int, Transfer[Loaded] | None]] = field(default_factory=list)
    place_s: list[float] = field(default_factory=list)
    load_s: float = 0.0
    arrival: Arrival | None = None
    spans: tuple[Span, ...] = ()
    completion: BlendedPrompt | None = None
    cancelled: bool = False

    @property
    def loaded(self) -> bool:
        """True if no load is in flight."""
        documents = [load is None or load.done() for _, load in self.documents]
        return (self.prefix is None or self.prefix.done) and all(documents)

    @property
    def over(self) -> bool:
        """True if nothing touches its blocks any more."""
        if self.cancelled:
            return self.loaded
        return self.completion is not None and self.completion.over

    def cancel(self) -> None:
        """Cancel the blend and its loads; its blocks may be in use until it is `over`."""
        self.cancelled = True
        if self.prefix is not None:
            self.prefix.cancel()
        for _, load in self.documents:
            if load is not None:
                load.cancel()


class BlendExecutor(Capability):
    """Executor of one rank's blends. Used only by the thread that runs steps.

    Args:
        lookups: lookups whose hits blends load.

    Attributes:
        last: the blend that completed last.
    """

    def __init__(self, context: WorkerContext, lookups: Lookups, blender: Blender, placing: Placing) -> None:
        self._context = context
        self._lookups = lookups
        self._blender = blender
        self._placing = placing
        self.last: BlendDone | None = None
        self._blends: dict[str, ActiveBlend] = {}
        self._ready: dict[str, ActiveBlend] = {}  # in the same order on all ranks
        self._arrived: list[Arrival] = []

    def begin_step(self, step: StepMetadata) -> None:
        for agreed in step.arrivals:
            self.complete(agreed)

    def start_loads(self, step: StepMetadata) -> None:
        for task in step.blends:
            self._context.request_stats.begin_transfer(task.request_id)
            self._start(task, self._lookups.claim(task.request_id, task.number))

    def _start(self, task: BlendTask, prompt_hit: PromptHit | None) -> None:
        """Start the loads of a blend. Tokens that `prompt_hit` lacks will be computed."""
        prefix = task.prefix
        load = None if prefix is None else self._context.start_load(prefix, prompt_hit, "async")
        blend = self._blends[task.request_id] = ActiveBlend(task, time.monotonic(), load)
        hits = () if prompt_hit is None else prompt_hit.documents
        for index, span in enumerate(task.spans):
            hit = hits[index] if index < len(hits) else None
            blend.documents.append((0, None) if hit is None else self._load(blend, span, hit))

    def complete(self, agreed: Arrival) -> None:
        """Start to complete a prompt from what every rank has loaded of it."""
        blend = self._blends.get(agreed.request_id)
        if blend is None or blend.cancelled or blend.task.number != agreed.number:
            return
        task = blend.task
        blend.spans = tuple(span.found(n) for span, n in zip(task.spans, agreed.documents, strict=True))
        blend.completion = BlendedPrompt(
            task.sequence.tokens,
            plan_blend(len(task.sequence.tokens), agreed.exact, blend.spans),
            task.selection,
            task.blocks,
            lora=lora_request(task.sequence.lora),
            selected=task.selected,
        )
        self._blender.begin(blend.completion)
        self._ready[task.request_id] = blend

    def cancel(self, request_id: str) -> bool:
        """Cancel a request's blend; return whether there is one."""
        blend = self._blends.get(request_id)
        if blend is not None:
            blend.cancel()
            self._ready.pop(request_id, None)
        return blend is not None

    def end_writes(self) -> None:
        """Cancel all blends, and wait until none of them touches its blocks."""
        for request_id in list(self._blends):
            self.cancel(request_id)
        wait([load for blend in self._blends.values() for _, load in blend.documents if load is not None])
        for blend in self._blends.values():
            if blend.prefix is not None:
                blend.prefix.finish()

    def finish_requests(self, request_ids: set[str], finished: FinishedRequests) -> None:
        """Cancel the blends of ended requests, advance the others, and report those that are over."""
        for request_id in request_ids:
            self.cancel(request_id)
        for blend in self._blends.values():
            if blend.arrival is None and blend.loaded and not blend.cancelled:
                blend.arrival = self._arrival(blend)
                if self._context.namespace.world == 1:
                    self.complete(blend.arrival)
                else:
                    self._arrived.append(blend.arrival)
        self._blender.step([blend.completion for blend in self._ready.values() if blend.completion])
        over = {request_id for request_id, blend in self._blends.items() if blend.over}
        for request_id in over:
            self._ready.pop(request_id, None)
            self._end(self._blends.pop(request_id))
        finished.received |= over

    def add_to_report(self) -> None:
        """Report what was loaded here; the scheduler combines it with what other ranks loaded."""
        self._context.report.arrivals += self._arrived
        self._arrived = []

    @property
    def busy(self) -> bool:
        """True if there is any blend."""
        return bool(self._blends)

    @property
    def has_result(self) -> bool:
        """True if `finish_requests` has something to do."""
        waiting = (blend for blend in self._blends.values() if blend.cancelled or not blend.arrival)
        return bool(self._ready) or any(blend.loaded for blend in waiting)

    def _load(self, blend: ActiveBlend, span: Span, hit: Hit) -> tuple[int, Transfer[Loaded] | None]:
        """Start to load a document's missing tokens; return the number of tokens skipped, and the load."""
        task, context = blend.task, self._context
        chunk = context.namespace.chunk_tokens
        start, stop = span.start, min(span.stop, len(task.sequence.tokens) - 1)
        if start >= stop:
            return span.stop - span.delta, None
        first, last = span.first // chunk, -(-(stop - span.delta) // chunk)
        needed_hit = hit.part(min(first, hit.plan.chunks), last)
        positions = np.arange(first * chunk, last * chunk) + span.delta
        positions[(positions < start) | (positions >= stop)] = -1
        pages = self._placing.places(task.blocks, positions, span.delta, blend.place_s.append)
        load = context.cache.load_async(needed_hit, pages)
        load.add_done_callback(context.wakeups.notify)
        return first * chunk, load

    def _arrival(self, blend: ActiveBlend) -> Arrival:
        """Return the result of a blend's loads, and count it."""
        context, task, by_tier, complete = self._context, blend.task, Counter[str](), True
        exact = task.exact
        if blend.prefix is not None and task.prefix is not None:
            end, loaded = blend.prefix.finish()
            by_tier.update(loaded.by_tier)
            if end < task.prefix.stop:
                exact, complete = max(end, task.prefix.start), False
        documents = []
        for span, (skipped, load) in zip(task.spans, blend.documents, strict=True):
            loaded = (load and result_of(load)) or NOTHING
            by_tier.update(loaded.by_tier)
            expected = span.stop - span.delta
            documents.append(min(skipped + loaded.tokens, expected))
            complete = complete and documents[-1] == expected
        blend.load_s = time.monotonic() - blend.began
        self._lookups.release(task.request_id)
        context.stats.loaded(Loaded(by_tier.total(), by_tier), blend.load_s, complete)
        context.request_stats.hit(task.request_id, by_tier)
        if not complete:
            log.warning("%s: part of its prefix or documents was not loaded; it is computed", task.request_id)
        return Arrival(task.request_id, task.number, context.namespace.rank, exact, tuple(documents))

    def _end(self, blend: ActiveBlend) -> None:
        """Count a blend that is over, and report it unless it was cancelled: rank 0 to the scheduler."""
        context, completion = self._context, blend.completion
        if blend.arrival is None:  # it was cancelled before its loads ended
            self._lookups.release(blend.task.request_id)
        if not (blend.cancelled or completion is None or completion.selected is None):
            self.last = self._blend_done(blend, completion, completion.selected)
            context.stats.blended(self.last)
            if context.namespace.rank == 0:
                context.report.blended.append(self.last)
        context.request_stats.end_transfer(blend.task.request_id)

    def _blend_done(
        self, blend: ActiveBlend, completion: BlendedPrompt, selected: NDArray[np.int32]
    ) -> BlendDone:
        """Return the result of a completed blend; note its tokens and its speed."""
        plan, seconds = completion.plan, completion.seconds
        reused, computed = int(plan.reused.sum()), len(plan.computed)
        with self._context.cache.tier_set.counting() as counts:
            counts.blended(reused, len(selected), computed)
        if self.last is not None:  # the first one includes the engine's warm-up
            self._context.row_speed.note_step(computed + len(selected), sum(seconds.values()))
        return BlendDone(
            blend.task.request_id,
            exact=int(plan.exact.sum()),
            reused=reused,
            computed=computed,
            spans=blend.spans,
            selected=selected,
            seconds={"load": blend.load_s, "place": sum(blend.place_s), **seconds},
        )
