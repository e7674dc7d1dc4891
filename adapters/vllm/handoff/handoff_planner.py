"""Handoffs between a prefill and a decode engine, on the scheduler's side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvkit.adapters.vllm import params
from kvkit.adapters.vllm.planner import (
    BlocksOf,
    EngineView,
    Planner,
    RequestState,
    Scheduled,
    SchedulerConfig,
)
from kvkit.adapters.vllm.states import align_states
from kvkit.adapters.vllm.step import SendTask, StepMetadata, Tables, cut


def handed_off_tokens(config: SchedulerConfig, tokens: int) -> int:
    """Return how many tokens of a prompt of `tokens` tokens are handed off.

    The receiver always computes the last token. If that token is alone in its block, it is not sent.
    """
    grains = config.whole_grains(tokens - 1)
    return grains if config.loses_blocks or grains == tokens - 1 else tokens


class HandoffPlanner(Planner):
    """The sends of one engine to decode engines, and the releases of transfers from prefill engines."""

    def __init__(self, config: SchedulerConfig, engine: EngineView) -> None:
        super().__init__(config, engine)
        self._released: list[str] = []

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        if not tokens:
            self._release(state)

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks_of: BlocksOf) -> None:
        step.released_transfers, self._released = self._released, []
        step.sends += self._sends(scheduled, blocks_of)

    def request_finished(self, state: RequestState, blocks: Tables | None) -> bool:
        self._release(state)
        return state.sent is not None

    def answer(self, state: RequestState) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` for the decode engine's request; None: nothing was sent."""
        remote = state.remote_decode
        return None if remote is None or state.sent is None else params.answer(remote, state.sent)

    def _release(self, state: RequestState) -> None:
        """Release a transfer that the request does not wait for any more."""
        if state.remote_prefill is not None:
            self._released.append(state.remote_prefill.transfer)

    def _sends(self, scheduled: Scheduled, blocks_of: BlocksOf) -> Iterator[SendTask]:
        """Yield sends of the whole chunks that this step completes, and of the rest at a prompt's end.

        tokens     |  chunk 0  |  chunk 1  |  chunk 2  |       | the prompt's end
        computed   [------ before this step -----[- this step -[
        sent       [-------- before -------[------- now -------[
                                           first               stop
        """
        chunk = self._config.chunk_tokens
        for state, tokens in scheduled:
            request, remote = state.request, state.remote_decode
            if remote is None:
                continue
            total = handed_off_tokens(self._config, request.num_prompt_tokens)
            computed, first = request.num_computed_tokens + tokens, state.sent or 0
            stop = total if computed >= request.num_prompt_tokens else computed // chunk * chunk
            if stop <= first:
                continue
            sequence, tables = self._engine.sequence(request, total), blocks_of(state.request_id)
            if sequence is None or tables is None:
                continue
            state.sent = stop
            tables = align_states(tables, self._config.states, computed, chunk)
            tables = cut(tables, self._config.block_tokens, first, -(-stop // chunk) * chunk, 0, stop)
            yield SendTask(
                state.request_id,
                remote.transfer,
                remote.address,
                sequence,
                first,
                stop,
                tables,
                last=stop == total,
            )
