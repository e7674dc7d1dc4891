"""Lookups and loads of one rank: KV of prompts goes from tiers and transfers into vLLM's pages."""

from __future__ import annotations

import logging
import time
from collections import Counter

from kvkit.adapters.engine.loads import PromptLoad
from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest
from kvkit.adapters.engine.lookups import Lookups
from kvkit.adapters.engine.request_stats import by_tier
from kvkit.adapters.engine.spans import Span
from kvkit.adapters.vllm.capability import Capability, FinishedRequests, WorkerContext
from kvkit.adapters.vllm.step import LoadTask, StepMetadata
from kvkit.handoff.receiver import Receiver

log = logging.getLogger(__name__)


class LoadExecutor(Capability):
    """The lookups of one rank, and the loads of what they found, except for blends.

    Args:
        receiver: receives the transfers of prefill engines; None: this engine receives none.

    Attributes:
        failed_step: last step that waited for a load that failed; 0: none.
    """

    def __init__(self, context: WorkerContext, receiver: Receiver | None) -> None:
        settings = context.settings
        self._context = context
        self._loading: dict[str, tuple[LoadTask, PromptLoad, Span]] = {}
        self._looking_up: dict[tuple[str, int], Span] = {}  # by request and number of the lookup
        self._invalid_blocks: set[int] = set()
        self.failed_step = 0
        if receiver is not None:
            receiver.subscribe(context.wakeups.notify)
        self.lookups = Lookups(
            context.cache,
            receiver,
            context.namespaces.of,
            block_tokens=context.block_tokens,
            timeout_s=settings.lookup_timeout_s,
            handoff_timeout_s=settings.handoff_timeout_s,
            tokens_per_s=lambda: settings.prefill_tokens_per_s or context.prefill_speed.tokens_per_s,
            row_speed=context.row_speed,
            wake=context.wakeups.notify,
        )

    def begin_step(self, step: StepMetadata) -> None:
        for transfer in step.released_transfers:
            self.lookups.release_transfer(transfer)
        for lookup in step.lookups:
            self._looking_up[lookup.request_id, lookup.number] = self._context.spans.begin(
                lookup.request_id, "kvkit.lookup"
            )
            self.lookups.begin_lookup(lookup)
        self.receive()

    def receive(self) -> bool:
        """Look up prompts whose transfers arrived or failed. Return whether there were any."""
        self._context.wakeups.mark_seen()
        return self.lookups.receive_transfers()

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer a lookup between steps, as `Lookups.lookup_inline` does."""
        span = self._context.spans.begin(lookup.request_id, "kvkit.lookup")
        answer = self.lookups.lookup_inline(lookup)
        if answer is not None:
            _end_lookup(span, answer)
            self._context.report_names(answer.request_id, 0, self.lookups.found_chunks(answer.request_id))
        return answer

    def start_loads(self, step: StepMetadata) -> None:
        """Start the loads of a step; with sync loading, wait until they are done."""
        context = self._context
        for task in step.loads:
            context.request_stats.begin_transfer(task.request_id)
            span = context.spans.begin(task.request_id, "kvkit.load")
            hit = self.lookups.claim(task.request_id, task.number)
            load = context.start_load(task, hit, context.settings.load)
            self._loading[task.request_id] = task, load, span
        if context.settings.load == "sync":
            self._finish_loads()

    def wait_for_layer(self, name: str) -> None:
        for _, load, _ in self._loading.values():
            for layer in load.layers or ():
                if layer == self._context.layers[name]:
                    break

    def finish_layerwise(self) -> None:
        """Finish the loads whose layers the step has waited for."""
        if self._context.settings.load == "layerwise":
            self._finish_loads()

    def finish_requests(self, request_ids: set[str], finished: FinishedRequests) -> None:
        self.finish_layerwise()  # with drafts, this comes before `start_saves` and the drafts' run
        for key in [key for key in self._looking_up if key[0] in request_ids]:
            del self._looking_up[key]
        for request_id in request_ids:
            self.lookups.finish_request(request_id)
            if request_id in self._loading:
                self._loading[request_id][1].cancel()
        done = {request_id for request_id, (_, load, _) in self._loading.items() if load.done}
        finished.received |= done
        finished.failed |= {
            request_id for request_id in done if not self._finish_load(*self._loading.pop(request_id))
        }

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks whose loads failed since the last call: their contents are invalid."""
        invalid_blocks, self._invalid_blocks = self._invalid_blocks, set()
        return invalid_blocks

    def add_to_report(self) -> None:
        self.receive()
        answers = self.lookups.take_answers()
        self._context.report.answers += answers
        for answer in answers:
            if span := self._looking_up.pop((answer.request_id, answer.number), None):
                _end_lookup(span, answer)
            self._context.report_names(answer.request_id, 0, self.lookups.found_chunks(answer.request_id))

    def drop_kv(self) -> None:
        self.lookups.drop_hits()

    def end_writes(self) -> None:
        for _, load, _ in self._loading.values():
            load.cancel()
            load.finish()

    @property
    def has_result(self) -> bool:
        return self.lookups.has_result or any(load.done for _, load, _ in self._loading.values())

    @property
    def awaits_transfer(self) -> bool:
        return self.lookups.awaits_transfer

    @property
    def busy(self) -> bool:
        return self.lookups.has_pending or bool(self._loading)

    def _finish_loads(self) -> None:
        """Wait for all loads. Notes the step's number if one of them failed."""
        for request_id in list(self._loading):
            if not self._finish_load(*self._loading.pop(request_id)):
                self.failed_step = self._context.report.failed_step = self._context.number

    def _finish_load(self, task: LoadTask, load: PromptLoad, span: Span) -> bool:
        """Wait for a load, and note its result. Return whether it loaded all tokens of its task."""
        context = self._context
        end, loaded = load.finish()
        self.lookups.release(task.request_id)
        complete = end == task.stop
        context.stats.loaded(loaded, time.monotonic() - load.began, complete)
        context.request_stats.hit(task.request_id, loaded.by_tier)
        context.request_stats.end_transfer(task.request_id)
        span.end(tokens=loaded.tokens, tiers=by_tier(loaded.by_tier), complete=int(complete))
        if not complete:
            end = max(end, task.start)
            log.warning("%s: loaded up to token %d of %d", task.request_id, end, task.stop)
            context.report.failed.append(task.request_id)
            if len(task.blocks) == 1:  # with several groups, block ids are ambiguous
                size = context.groups[0].block_tokens
                self._invalid_blocks.update(task.blocks[0][(end - load.base) // size :])
                self._invalid_blocks.discard(-1)
        return complete


def _end_lookup(span: Span, answer: LookupAnswer) -> None:
    tokens = Counter[str]()
    for tier, count in answer.segments:
        tokens[tier] += count
    span.end(tokens=answer.tokens, tiers=by_tier(tokens))
