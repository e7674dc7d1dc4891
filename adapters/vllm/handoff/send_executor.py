"""Sends of one prefill rank: KV of prompts goes from vLLM's pages to decode engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvkit.adapters.engine.spans import Span
from kvkit.adapters.vllm.capability import Capability, FinishedRequests, WorkerContext
from kvkit.adapters.vllm.step import StepMetadata
from kvkit.handoff.chunk_sender import ChunkSender
from kvkit.handoff.prompt import PromptPiece, Prompts
from kvkit.handoff.sender import Sender


class SendExecutor(Capability):
    """The prompts that one rank sends."""

    def __init__(self, context: WorkerContext, sender: Sender) -> None:
        cache = context.cache
        self._context = context
        self._spans: dict[str, Span] = {}
        shared = [name for name in cache.policy.retrieve_from if cache.tiers[name].scope == "shared"]
        self.prompts = Prompts(
            ChunkSender(sender, cache.layout, cache.writes),
            cache.namespace,
            count_shared=partial(cache.held_async, tiers=shared) if shared else None,
            block_tokens=context.block_tokens,
            allocation_s=context.settings.handoff_timeout_s,
            wake=context.wakeups.notify,
        )

    def end_reads(self) -> None:
        """Copy what decode engines have no room for yet, and wait for other reads."""
        self.prompts.release_pages()

    def begin_step(self, step: StepMetadata) -> None:
        """Ask decode engines for room for what the step will send."""
        for send in step.sends:
            if send.request_id not in self._spans:
                self._spans[send.request_id] = self._context.spans.begin(send.request_id, "kvkit.handoff")
            prompt, namespace = send.sequence, self._context.namespaces.of(send.sequence)
            self.prompts.begin_prompt(
                send.request_id, send.transfer, send.address, prompt.tokens, namespace, prompt.rest
            )
        # a peer's memory is not pinned, and a GPU copies faster into pinned memory
        self.prompts.begin_pieces({} if self._context.on_gpu else self._pieces(step, lambda: None))

    def layer_computed(self, name: str) -> None:
        if name in self._context.layers:
            self.prompts.pack_layer(self._context.layers[name])

    def start_saves(self, step: StepMetadata, ready: Callable[[], object]) -> None:
        pieces = self._pieces(step, ready)
        for send in step.sends:
            if send.request_id in pieces:
                self.prompts.send_piece(send.request_id, pieces[send.request_id])
            else:
                self.prompts.cancel_prompt(send.request_id, send.last)
        if self._context.settings.send == "sync" and step.sends:
            self.prompts.wait_for_arrival(self._context.settings.handoff_timeout_s)
        else:
            self.prompts.advance()

    def discard_step(self) -> None:
        self.prompts.drop_pieces()

    def finish_requests(self, request_ids: set[str], finished: FinishedRequests) -> None:
        self.prompts.advance()
        released = self.prompts.take_released(request_ids)
        for request_id in released & self._spans.keys():
            self._spans.pop(request_id).end()
        for request_id in request_ids:
            if request_id not in self.prompts:  # nothing of it was sent
                self._spans.pop(request_id, None)
        finished.released |= released

    def holds_blocks(self, request_id: str) -> bool:
        return request_id in self.prompts

    def drop_kv(self) -> None:
        self.prompts.cancel_prompts()

    def close(self) -> None:
        self.prompts.close(self._context.cache.shutdown_timeout_s)

    @property
    def awaits_transfer(self) -> bool:
        return self.prompts.in_flight

    def _pieces(self, step: StepMetadata, ready: Callable[[], object]) -> dict[str, PromptPiece]:
        """Return the pieces that a step sends, by request id, without those that lack blocks."""
        context = self._context
        return {
            send.request_id: PromptPiece(
                send.first, send.stop, partial(context.pages, send.blocks, send.first), ready, send.last
            )
            for send in step.sends
            if context.complete_tokens(send.request_id, send.blocks, send.first, send.stop)
            == send.stop - send.first
        }
