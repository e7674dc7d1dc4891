"""Saves of computed chunks, on the scheduler's side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvkit.adapters.vllm.planner import (
    BlocksOf,
    EngineView,
    Planner,
    RequestState,
    Scheduled,
    SchedulerConfig,
)
from kvkit.adapters.vllm.states import align_states
from kvkit.adapters.vllm.step import AnswerTask, RetainTask, SaveTask, StepMetadata, Tables, cut
from kvkit.transfer.plan import is_snapshot_kept


def savable_tokens(config: SchedulerConfig, state: RequestState, tokens: int) -> int:
    """Return how many of a request's first `tokens` tokens may be saved: only exact KV is saved."""
    if state.policy.store_to == () or not config.stores:
        return 0
    if state.blended_from is not None:
        tokens = min(tokens, state.blended_from)
    if state.private is not None:
        tokens = min(tokens, state.private)
    return tokens if config.save_generated else min(tokens, state.request.num_prompt_tokens)


class SavePlanner(Planner):
    """The saves of one engine's requests.

    Attributes:
        last_saves: saves of ended requests that the workers have not received yet.
    """

    def __init__(self, config: SchedulerConfig, engine: EngineView) -> None:
        super().__init__(config, engine)
        self.last_saves: list[SaveTask] = []
        self._retains: list[RetainTask] = []
        self._answers: list[AnswerTask] = []

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        """Apply the request policy's eviction to records that tiers have: hits are not saved again."""
        state.saved = None
        request, policy = state.request, state.policy
        sequence = self._engine.sequence(request, request.num_tokens) if policy.retains else None
        if sequence is not None:
            self._retains.append(RetainTask(sequence, policy))

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks_of: BlocksOf) -> None:
        step.retains, self._retains = self._retains, []
        step.answers, self._answers = self._answers, []
        step.saves, self.last_saves = self.last_saves, []
        step.saves += self._saves(scheduled, blocks_of)

    def request_finished(self, state: RequestState, blocks: Tables | None) -> bool:
        """Note the answer, and plan the save of the chunk that a request's last token completes.

        With asynchronous scheduling, the step that fills a chunk does not know the chunk's last token yet. If
        that token ends the request, no later step of the request saves the chunk.
        """
        if blocks is None:
            return False
        self._note_answer(state.request)
        if state.saved is None:
            return False
        request, config, chunk, first = state.request, self._config, self._config.chunk_tokens, state.saved
        known = savable_tokens(config, state, request.num_tokens - 1)
        stop = min(request.num_computed_tokens, known) // chunk
        if stop <= first:
            return False
        end = stop * chunk
        sequence = self._engine.sequence(request, end)
        tables = self._tables(state, blocks, 0, first, stop)
        sizes = zip(tables, config.block_tokens, strict=True)
        kv_tables = [entry for index, entry in enumerate(sizes) if index not in config.states]
        tokens = end - first * chunk
        if sequence is None or any(-1 in ids or len(ids) * size < tokens for ids, size in kv_tables):
            return False  # a window has left some of the blocks
        self.last_saves.append(SaveTask(state.request_id, sequence, first, tables, state.policy, last=True))
        self._engine.expect_chunks(request, first, stop)
        return True

    def _note_answer(self, request: Any) -> None:
        """Plan to tell tiers how the answer ended, if this is known."""
        tool_call = self._engine.calls_tool(request)
        sequence = None if tool_call is None else self._engine.sequence(request, request.num_tokens)
        if tool_call is not None and sequence is not None:
            self._answers.append(AnswerTask(sequence, tool_call))

    def reset(self) -> None:
        self.last_saves = [replace(s, policy=replace(s.policy, store_to=())) for s in self.last_saves]

    def _saves(self, scheduled: Scheduled, blocks_of: BlocksOf) -> Iterator[SaveTask]:
        """Yield saves of the chunks that this step completes.

            tokens     |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |
            computed   [------ before this step -----[ this step [
            saved      [-------- before -------[--- now ---[
                                               first       stop

        Blocks that a sliding window has left may be missing (-1). The first chunk to save may lack those that
        the window had left before this step. A reader resumes at the chunk's end or later, and its window
        begins after the missing blocks, so the zeros in their place are never read. Earlier chunks may lack
        more blocks, and are not saved.
        """
        chunk = self._config.chunk_tokens
        for state, tokens in scheduled:
            request = state.request
            computed, first = request.num_computed_tokens + tokens, self._first_unsaved(state)
            stop = min(computed, savable_tokens(self._config, state, request.num_tokens)) // chunk
            state.saved = max(first, stop)
            if stop <= first:
                continue
            sequence, blocks = self._engine.sequence(request, stop * chunk), blocks_of(state.request_id)
            if sequence is not None and blocks is not None:
                self._engine.expect_chunks(request, first, stop)
                tables = self._tables(state, blocks, computed, first, stop)
                yield SaveTask(state.request_id, sequence, first, tables, state.policy)

    def _first_unsaved(self, state: RequestState) -> int:
        """Return a request's first chunk that no tier has and for which no save was planned."""
        first: int = state.request.num_computed_tokens // self._config.chunk_tokens
        if state.saved is not None:
            # after a preemption or a failed load, `first` is lower: those chunks are recomputed
            return min(first, state.saved)
        if self._config.windows:
            return first
        if state.remote_prefill is not None:
            return 0  # received KV is in no tier yet
        if state.blend is not None:
            return min(first, state.blend.exact // self._config.chunk_tokens)  # blended KV is in no tier
        return first

    def _tables(self, state: RequestState, blocks: Tables, computed: int, first: int, stop: int) -> Tables:
        """Return the blocks of chunks [first, stop), with -1 for snapshots that are not stored.

        Args:
            computed: number of tokens after which the running states are.
        """
        config, chunk = self._config, self._config.chunk_tokens
        prompt_chunks, end = (state.request.num_prompt_tokens - 1) // chunk, stop * chunk
        blocks = align_states(blocks, config.states, computed, chunk)
        tables = cut(blocks, config.block_tokens, first * chunk, end, 0, end)
        for table in config.states:
            for i in range(len(tables[table])):
                if not is_snapshot_kept(first + i + 1, config.snapshot_every, prompt_chunks):
                    tables[table][i] = -1
        return tables
