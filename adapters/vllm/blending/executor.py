"""Execution of blends on one rank: load documents to their positions, then complete the prompt's KV.

start_loads        starts to load documents into the request's blocks, keys rotated to their positions
Arrival            reports the loaded tokens when all loads have ended; a single rank needs no other's report
start_completion   starts from the tokens that every rank has, in the same step, so that all run the same rows
finish_requests    runs rows until the KV is complete, then reports the request as received
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkit.adapters.engine.loads import NOTHING, PromptLoad, result_of
from kvkit.adapters.engine.lookups import Lookups
from kvkit.adapters.vllm.blending.blender import BlendedPrompt, Blender
from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.adapters.vllm.blending.page_order import PageOrder
from kvkit.adapters.vllm.blending.rows import lora_request
from kvkit.adapters.vllm.capability import Capability, FinishedRequests, WorkerContext
from kvkit.adapters.vllm.pages import GroupPages
from kvkit.adapters.vllm.step import Arrival, BlendDone, BlendTask, StepMetadata, Tables
from kvkit.blend.plan import Span, plan_blend
from kvkit.cache import Loaded
from kvkit.format.record import RecordFormat
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages.api import Pages, unpack
from kvkit.kernels.pages.streams import CudaEvents
from kvkit.transfer.sequence import Hit, SequencePages
from kvkit.workers import Transfer

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ActiveBlend:
    """The blend of one request.

    Attributes:
        began: monotonic time of its start.
        prefix: load of the exact KV; None: nothing to load.
        documents: per span, the number of leading tokens that its load skips, and the load; None: no load.
        place_s: seconds of each unpacking of document records, with the rotation of their keys.
        load_s: seconds from its start to the end of all loads.
        arrival: this rank's loaded tokens; None: loads are in flight.
        spans: spans of documents that every rank has loaded.
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
    def is_loaded(self) -> bool:
        """True if no load is in flight."""
        documents = [load is None or load.done() for _, load in self.documents]
        return (self.prefix is None or self.prefix.done) and all(documents)

    @property
    def is_over(self) -> bool:
        """True if nothing touches its blocks any more."""
        if self.cancelled:
            return self.is_loaded
        return self.completion is not None and self.completion.is_complete

    def cancel(self) -> None:
        """Cancel the blend and its loads; its blocks may be in use until `is_over`."""
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
        blender: completion of prompts with vLLM's model.
        pages: this rank's pages for documents.

    Attributes:
        last: the blend that completed last.
    """

    def __init__(
        self, context: WorkerContext, lookups: Lookups, blender: Blender, pages: DocumentPages
    ) -> None:
        self._context = context
        self._lookups = lookups
        self._blender = blender
        self._pages = pages
        self.last: BlendDone | None = None
        self._blends: dict[str, ActiveBlend] = {}
        self._completing: dict[str, ActiveBlend] = {}  # in the same order on all ranks
        self._unreported: list[Arrival] = []

    def begin_step(self, step: StepMetadata) -> None:
        for agreed in step.arrivals:
            self.start_completion(agreed)

    def start_loads(self, step: StepMetadata) -> None:
        for task in step.blends:
            self._context.request_stats.begin_transfer(task.request_id)
            prompt_hit = self._lookups.claim(task.request_id, task.number)
            prefix = task.prefix
            load = None if prefix is None else self._context.start_load(prefix, prompt_hit, "async")
            blend = self._blends[task.request_id] = ActiveBlend(task, time.monotonic(), load)
            hits = () if prompt_hit is None else prompt_hit.documents  # missing tokens are computed
            for index, span in enumerate(task.spans):
                hit = hits[index] if index < len(hits) else None
                blend.documents.append((0, None) if hit is None else self._load_document(blend, span, hit))

    def start_completion(self, agreed: Arrival) -> None:
        """Start to complete a prompt from the tokens that every rank has loaded."""
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
        self._blender.begin_prompt(blend.completion)
        self._completing[task.request_id] = blend

    def cancel(self, request_id: str) -> bool:
        """Cancel a request's blend; return whether there is one."""
        blend = self._blends.get(request_id)
        if blend is not None:
            blend.cancel()
            self._completing.pop(request_id, None)
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
            if blend.arrival is None and blend.is_loaded and not blend.cancelled:
                blend.arrival = self._end_loads(blend)
                if self._context.namespace.world == 1:
                    self.start_completion(blend.arrival)
                else:
                    self._unreported.append(blend.arrival)
        self._blender.advance([blend.completion for blend in self._completing.values() if blend.completion])
        over = {request_id for request_id, blend in self._blends.items() if blend.is_over}
        for request_id in over:
            self._completing.pop(request_id, None)
            self._end_blend(self._blends.pop(request_id))
        finished.received |= over

    def add_to_report(self) -> None:
        """Report the tokens loaded here; the scheduler combines them with those of other ranks."""
        self._context.report.arrivals += self._unreported
        self._unreported = []

    @property
    def busy(self) -> bool:
        """True if there is any blend."""
        return bool(self._blends)

    @property
    def has_result(self) -> bool:
        """True if `finish_requests` has something to do."""
        waiting = (blend for blend in self._blends.values() if blend.cancelled or not blend.arrival)
        return bool(self._completing) or any(blend.is_loaded for blend in waiting)

    def _load_document(self, blend: ActiveBlend, span: Span, hit: Hit) -> tuple[int, Transfer[Loaded] | None]:
        """Start to load a document into its span; return the number of tokens skipped, and the load."""
        task, context = blend.task, self._context
        chunk = context.namespace.chunk_tokens
        start, stop = span.start, min(span.stop, len(task.sequence.tokens) - 1)
        if start >= stop:
            return span.stop - span.delta, None
        first, last = span.first // chunk, -(-(stop - span.delta) // chunk)
        needed_hit = hit.part(min(first, hit.plan.chunks), last)
        positions = np.arange(first * chunk, last * chunk) + span.delta
        positions[(positions < start) | (positions >= stop)] = -1
        pages = self._pages.pages_at(task.blocks, positions, span.delta, blend.place_s.append)
        load = context.cache.load_async(needed_hit, pages)
        load.add_done_callback(context.wakeups.notify)
        return first * chunk, load

    def _end_loads(self, blend: ActiveBlend) -> Arrival:
        """Return the tokens that a blend's loads have loaded, and count them."""
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

    def _end_blend(self, blend: ActiveBlend) -> None:
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


@dataclass(frozen=True, slots=True)
class DocumentPages:
    """One rank's pages into which documents are loaded, and the ropes that rotate their keys.

    Args:
        groups: groups of the layout.
        orders: page order of each group; None: its pages are not opaque.
        ropes: rope of each layer by the layer's name; None: its keys are not rotated.
    """

    groups: Sequence[GroupPages]
    orders: Sequence[PageOrder | None]
    ropes: Mapping[str, Rope | None]

    @staticmethod
    def of(groups: Sequence[GroupPages], pages: LayerPages, ropes: Sequence[Rope | None]) -> DocumentPages:
        """Describe a rank's groups, given the rope of each layer of `pages`."""
        names = [layer.name for layer in pages.layers]
        order_of, rope_of = dict(zip(names, pages.orders, strict=True)), dict(zip(names, ropes, strict=True))
        group_orders = []
        for group in groups:
            heads, order = group.pages.group, order_of[group.names[0]]
            first = min(g.pages.group.first_head for g in groups if g.names == group.names)
            if order is not None:
                order = order.of_heads(heads.first_head - first, heads.kv_heads) if heads.opaque else None
            group_orders.append(order)
        return DocumentPages(groups, group_orders, rope_of)

    def warm_up(self, formats: Sequence[RecordFormat]) -> None:
        """Compile the kernels that rotate keys, so that no request waits for it. Mutates no pages.

        Args:
            formats: record format of each group.
        """
        no_positions = np.full(formats[0].namespace.chunk_tokens, -1)
        no_blocks: Tables = tuple([] for _ in range(1 + max(group.table for group in self.groups)))
        moved_pages = self.pages_at(no_blocks, no_positions, 1, lambda _: None)
        for pages, form in zip(moved_pages, formats, strict=True):
            pages.fill(form, 0, [np.zeros(form.shape[0] * form.layer_bytes, np.uint8)], None, ())

    def pages_at(
        self,
        blocks: Tables,
        positions: NDArray[np.int64],
        delta: int,
        on_unpacked: Callable[[float], object],
    ) -> list[SequencePages]:
        """Return the pages of each group for the tokens of a document.

        Args:
            blocks: block tables of the request, from token 0 on.
            positions: int64 [tokens of the record], positions in the prompt; < 0: the token is left out.
            delta: number of positions that keys move.
            on_unpacked: called from any thread with the seconds that each unpacking of records took.
        """
        moved_pages: list[SequencePages] = []
        for group, order in zip(self.groups, self.orders, strict=True):
            table = np.append(np.array(blocks[group.table], np.int64), -1)
            size = group.block_tokens
            token_blocks = table[np.where(positions < 0, -1, positions // size)]
            slots = np.where(token_blocks < 0, -1, token_blocks * size + positions % size)
            moved_pages.append(
                MovedPages(
                    group.pages,
                    slots=slots,
                    ropes=tuple(self.ropes[name] for name in group.names),
                    order=None if order is None else (order.k.numpy(), order.v.numpy()),
                    delta=delta,
                    on_unpacked=on_unpacked,
                )
            )
        return moved_pages


@dataclass(frozen=True, slots=True)
class MovedPages(SequencePages):
    """Pages for a document's tokens; a load rotates their keys by `delta` positions.

    Args:
        ropes: rope of each layer of the group; None: its keys are not rotated.
        order: order of K and V in opaque pages, as `unpack_ordered` takes it; None: pages are not opaque.
        delta: distance from the position at which tokens were computed to their new position.
        on_unpacked: called with the seconds that each call of `fill` took.
    """

    ropes: tuple[Rope | None, ...] = ()
    order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    delta: int = 0
    on_unpacked: Callable[[float], object] = lambda seconds: None

    def fill(
        self,
        form: RecordFormat,
        first: int,
        payloads: Sequence[NDArray[np.uint8]],
        rotate: Rotation | None,
        after: CudaEvents | None,
    ) -> None:
        """Unpack payloads of records and rotate their keys by `delta`; ignore `rotate`. Mutates the pages."""
        began, slots = time.perf_counter(), self.rows_of(form, range(first, first + len(payloads)))["slots"]
        if self.order is not None:
            from kvkit.kernels.pages.ordered import unpack_ordered  # numba stays out of vLLM's start

            unpack_ordered(self.pages, payloads, slots, self.order, self.ropes, self.delta)
        elif len(set(self.ropes)) == 1:
            self._unpack(self.pages, self.ropes[0], payloads, slots, after)
        else:
            for i, rope in enumerate(self.ropes):
                span = slice(i * form.layer_bytes, (i + 1) * form.layer_bytes)
                self._unpack(self.pages.layer(i), rope, [payload[span] for payload in payloads], slots, after)
        self.on_unpacked(time.perf_counter() - began)

    def _unpack(
        self,
        pages: Pages,
        rope: Rope | None,
        payloads: Sequence[NDArray[np.uint8]],
        slots: NDArray[np.int64],
        after: CudaEvents | None,
    ) -> None:
        deltas = np.full(len(payloads), self.delta, np.int64)
        rotate = Rotation(rope, deltas) if rope is not None and self.delta else None
        unpack(pages, payloads, slots=slots, rotate=rotate, after=after)
