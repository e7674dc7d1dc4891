"""Execution of blends on one rank: load KV, then complete the prompt in step with all ranks.

begin     starts the loads, of documents into the request's blocks, at their places in the prompt
Arrival   reports what was loaded, once all loads ended; a single rank passes it to its own `go`
go        takes what every rank has, in the same step on all ranks, so that all run the same rows
step      runs rows until the KV is complete, then reports the request as received
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import numpy as np

from kvkit.adapters.engine.loads import NOTHING, PromptHit, PromptLoad, result_of
from kvkit.adapters.engine.speed import Speed
from kvkit.adapters.vllm.blending.blender import BlendedPrompt, Blender
from kvkit.adapters.vllm.blending.placing import Placing
from kvkit.adapters.vllm.blending.rows import lora_request
from kvkit.adapters.vllm.step import Arrival, BlendDone, BlendTask, Tables
from kvkit.blend.plan import Span, plan_blend
from kvkit.cache import Cache, Loaded
from kvkit.transfer.sequence import Hit, SequencePages
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

KNOWN_S = 60.0
"""Time for which the speed of the last blend decides whether other blends are worthwhile."""


@dataclass(eq=False, slots=True)
class ActiveBlend:
    """The blend of one request.

    Attributes:
        began: monotonic time of its start.
        prefix: load of the exact KV; None: nothing to load.
        documents: per span, the number of leading tokens that its load skips, and the load; None: no load.
        place_s: seconds that putting parts of documents in place took.
        load_s: seconds from its start to the end of all loads.
        told: what this rank has loaded; None: loads are in flight.
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
    told: Arrival | None = None
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


@dataclass(eq=False, slots=True)
class BlendExecutor:
    """Executor of one rank's blends. Used only by the thread that runs steps.

    Args:
        pages: function that returns the pages of tokens, as `PromptLoad` calls it, with two more arguments in
            front: blocks, and the token at which they begin.
        world: number of ranks that have to agree.
        wake: called from any thread when a load, or a part of it, ended.
        on_loaded: called with a request id, what was loaded, the seconds it took, and whether that is all
            that was promised.
        on_done: called with each blend that completed without being cancelled.

    Attributes:
        speed: rows per second, including the choice of tokens.
        last: the blend that completed last.
    """

    cache: Cache
    blender: Blender
    placing: Placing
    _: KW_ONLY
    pages: Callable[[Tables, int, int, int], list[SequencePages]]
    world: int
    wake: Callable[[object], object]
    on_loaded: Callable[[str, Loaded, float, bool], object]
    on_done: Callable[[BlendDone], object]
    speed: Speed = field(default_factory=lambda: Speed(1, KNOWN_S), init=False)
    last: BlendDone | None = field(default=None, init=False)
    _blends: dict[str, ActiveBlend] = field(default_factory=dict, init=False)
    _ready: dict[str, ActiveBlend] = field(default_factory=dict, init=False)  # in the same order on all ranks
    _arrived: list[Arrival] = field(default_factory=list, init=False)

    def begin(self, task: BlendTask, found: PromptHit | None) -> None:
        """Start the loads of a blend. Tokens that `found` lacks will be computed."""
        prefix, chunk = task.prefix, self.cache.namespace.chunk_tokens
        load = None
        if prefix is not None:
            base = prefix.start - prefix.start % chunk
            where = partial(self.pages, prefix.blocks, base)
            load = PromptLoad(self.cache, found, prefix.start, prefix.stop, where, "async", self.wake)
        blend = self._blends[task.request_id] = ActiveBlend(task, time.monotonic(), load)
        hits = () if found is None else found.documents
        for number, span in enumerate(task.spans):
            hit = hits[number] if number < len(hits) else None
            blend.documents.append((0, None) if hit is None else self._load(blend, span, hit))

    def go(self, agreed: Arrival) -> None:
        """Start completing a prompt from what every rank has loaded of it."""
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
        self.blender.begin(blend.completion)
        self._ready[task.request_id] = blend

    def cancel(self, request_id: str) -> bool:
        """Cancel a request's blend; return whether there is one."""
        blend = self._blends.get(request_id)
        if blend is not None:
            blend.cancel()
            self._ready.pop(request_id, None)
        return blend is not None

    def cancel_all(self) -> None:
        """Cancel all blends, and wait until none of them touches its blocks."""
        for request_id in list(self._blends):
            self.cancel(request_id)
        wait([load for blend in self._blends.values() for _, load in blend.documents if load is not None])
        for blend in self._blends.values():
            if blend.prefix is not None:
                blend.prefix.finish()

    def step(self) -> set[str]:
        """Advance all blends; return the ids of requests with blends that are over."""
        for blend in self._blends.values():
            if blend.told is None and blend.loaded and not blend.cancelled:
                blend.told = self._arrival(blend)
                if self.world == 1:
                    self.go(blend.told)
                else:
                    self._arrived.append(blend.told)
        self.blender.step([blend.completion for blend in self._ready.values() if blend.completion])
        over = {request_id for request_id, blend in self._blends.items() if blend.over}
        for request_id in over:
            self._ready.pop(request_id, None)
            self._done(self._blends.pop(request_id))
        return over

    def arrivals(self) -> list[Arrival]:
        """Return the arrivals since the last call. The scheduler combines those of all ranks."""
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def busy(self) -> bool:
        """True if there is any blend."""
        return bool(self._blends)

    @property
    def can_go_on(self) -> bool:
        """True if `step` has something to do."""
        waiting = (blend for blend in self._blends.values() if blend.cancelled or not blend.told)
        return bool(self._ready) or any(blend.loaded for blend in waiting)

    def _load(self, blend: ActiveBlend, span: Span, hit: Hit) -> tuple[int, Transfer[Loaded] | None]:
        """Start loading what the prompt lacks of a document; return the tokens it skips, and the load."""
        task, chunk = blend.task, self.cache.namespace.chunk_tokens
        start, stop = span.start, min(span.stop, len(task.sequence.tokens) - 1)
        if start >= stop:
            return span.stop - span.delta, None
        first, last = span.first // chunk, -(-(stop - span.delta) // chunk)
        part = hit.part(min(first, hit.plan.chunks), last)
        positions = np.arange(first * chunk, last * chunk) + span.delta
        positions[(positions < start) | (positions >= stop)] = -1
        places = self.placing.places(task.blocks, positions, span.delta, blend.place_s.append)
        load = self.cache.load_async(part, places)
        load.add_done_callback(self.wake)
        return first * chunk, load

    def _arrival(self, blend: ActiveBlend) -> Arrival:
        """Return the result of a blend's loads, and report it to `on_loaded`."""
        task, by_tier, kept = blend.task, Counter[str](), True
        exact = task.exact
        if blend.prefix is not None and task.prefix is not None:
            end, loaded = blend.prefix.finish()
            by_tier.update(loaded.by_tier)
            if end < task.prefix.stop:
                exact, kept = max(end, task.prefix.start), False
        documents = []
        for span, (before, load) in zip(task.spans, blend.documents, strict=True):
            loaded = (load and result_of(load)) or NOTHING
            by_tier.update(loaded.by_tier)
            promised = span.stop - span.delta
            documents.append(min(before + loaded.tokens, promised))
            kept = kept and documents[-1] == promised
        blend.load_s = time.monotonic() - blend.began
        self.on_loaded(task.request_id, Loaded(by_tier.total(), by_tier), blend.load_s, kept)
        if not kept:
            log.warning("%s: part of its prefix or documents was not loaded; it is computed", task.request_id)
        return Arrival(task.request_id, task.number, self.cache.namespace.rank, exact, tuple(documents))

    def _done(self, blend: ActiveBlend) -> None:
        """Count a blend that is over, unless it was cancelled, and pass it to `on_done`."""
        completion = blend.completion
        if blend.cancelled or completion is None or completion.selected is None:
            return
        plan, selected, spent = completion.plan, completion.selected, completion.seconds
        self.cache.note_blend(int(plan.reused.sum()), len(selected), len(plan.computed))
        if self.last is not None:  # the first one includes the engine's warm-up
            self.speed.note(len(plan.computed) + len(selected), sum(spent.values()))
        self.last = BlendDone(
            blend.task.request_id,
            exact=int(plan.exact.sum()),
            reused=int(plan.reused.sum()),
            computed=len(plan.computed),
            spans=blend.spans,
            selected=selected,
            seconds={"load": blend.load_s, "place": sum(blend.place_s), **spent},
        )
        self.on_done(self.last)
