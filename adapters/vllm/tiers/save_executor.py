"""Saves of one rank: KV that requests computed goes from vLLM's pages to tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait

from kvkit.adapters.engine.loads import result_of
from kvkit.adapters.vllm.capability import Capability, FinishedRequests, WorkerContext
from kvkit.adapters.vllm.step import SaveTask, StepMetadata
from kvkit.cache import Stored
from kvkit.workers import Transfer

SAVE_WAIT_S = 0.25
"""Seconds that a step waits for the last step's saves while slots are short, before it cancels them."""


class SaveExecutor(Capability):
    """The saves of one rank, to all tiers except a handoff's."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._tiers = context.cache.policy.store_to
        self._saving: list[Transfer[Stored]] = []
        self._wait_s = SAVE_WAIT_S
        self._last_saves: set[str] = set()  # requests whose last save still needs their blocks
        self._released: set[str] = set()  # those whose last save is over, until `finish_requests`
        self._prompt_tokens: dict[str, int] = {}  # of ended requests, until their last save is over

    def end_reads(self) -> None:
        """Wait until saves have copied the pages, and for the forward pass that the copies depend on.

        Saves that get no slots in time are cancelled: a tier may not free its slots.
        """
        cache = self._context.cache
        until = time.monotonic() + cache.timeout_s
        while wait(self._saving, self._wait_s).not_done:
            if cache.staging.waiting or time.monotonic() >= until:
                break
        late = [transfer for transfer in self._saving if not transfer.done()]
        for transfer in late:
            transfer.release_pages()
        self._context.stats.cancelled_saves(len(late))
        if self._saving:  # a slow tier must not delay every step as long
            self._wait_s = max(self._wait_s / 2, SAVE_WAIT_S / 32) if late else SAVE_WAIT_S
        self._saving.clear()
        for request_id in self._last_saves:
            self._end_stats(request_id)
        self._released |= self._last_saves
        self._last_saves.clear()

    def begin_step(self, step: StepMetadata) -> None:
        self._prompt_tokens.update(step.ended)
        # with drafts, vLLM calls `finish_requests` before `start_saves`
        self._last_saves.update(save.request_id for save in step.saves if save.last)
        for task in step.retains:
            if namespace := self._context.namespaces.of(task.sequence):
                self._context.cache.retain(task.sequence.tokens, task.policy, namespace)
        for answer in step.answers:
            if namespace := self._context.namespaces.of(answer.sequence):
                self._context.cache.note_answer(answer.sequence.tokens, answer.tool_call, namespace)

    def start_saves(self, step: StepMetadata, ready: Callable[[], object]) -> None:
        for task in step.saves:
            self._save(task, ready)

    def finish_requests(self, request_ids: set[str], finished: FinishedRequests) -> None:
        for request_id in request_ids - self._last_saves:  # nothing more will begin for it
            self._end_stats(request_id)
        finished.released |= self._released
        self._released.clear()

    def holds_blocks(self, request_id: str) -> bool:
        return request_id in self._last_saves

    def _save(self, task: SaveTask, ready: Callable[[], object]) -> None:
        """Store chunks that a request computed."""
        context, request_id, sequence = self._context, task.request_id, task.sequence
        began, namespace, size = (
            time.monotonic(),
            context.namespaces.of(sequence),
            context.namespace.chunk_tokens,
        )
        first = task.first * size  # tokens
        stop = first + context.complete_tokens(request_id, task.blocks, first, len(sequence.tokens))
        tiers = self._tiers if task.policy.store_to is None else task.policy.store_to
        if not tiers or namespace is None or stop == first:
            return
        stats, span = context.request_stats, context.spans.begin(request_id, "kvkit.store")
        stats.begin_transfer(request_id)

        def done() -> None:
            stats.end_transfer(request_id)
            span.end(tokens=stop - first, tiers=", ".join(tiers))

        chunks = context.cache.chunks(sequence.tokens[:stop], namespace, task.policy)
        chunks = chunks.part(task.first, len(chunks))
        context.report_names(request_id, task.first, chunks)
        transfer = context.cache.store_chunks(
            chunks,
            context.pages(task.blocks, first, first, stop),
            to=tiers,
            ready=ready,
            on_stored=lambda tier, _: stats.stored(request_id, tier, size),
            on_done=done,
            copy_first=True,
        )
        transfer.add_done_callback(
            lambda done: context.stats.stored(result_of(done), time.monotonic() - began)
        )
        self._saving.append(transfer)

    def _end_stats(self, request_id: str) -> None:
        """Complete an ended request's stats: nothing more will begin for it."""
        if request_id in self._prompt_tokens:
            self._context.request_stats.end_request(request_id, self._prompt_tokens.pop(request_id))
