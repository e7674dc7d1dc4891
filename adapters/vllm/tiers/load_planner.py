"""Loads of what lookups found, on the scheduler's side."""

from __future__ import annotations

from collections import Counter

from kvkit.adapters.vllm.planner import BlocksOf, Planner, Scheduled
from kvkit.adapters.vllm.request_state import RequestState
from kvkit.adapters.vllm.scheduler_config import SchedulerConfig
from kvkit.adapters.vllm.states import spread
from kvkit.adapters.vllm.step import LoadTask, StepMetadata, Tables, cut


class LoadPlanner(Planner):
    """The loads of one engine's requests, without those of blends."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tasks: list[LoadTask] = []

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        if tokens and not state.will_blend:
            self._tasks.append(begin_load(self._config, state, tokens, blocks))

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks: BlocksOf) -> None:
        step.loads, self._tasks = self._tasks, []


def begin_load(config: SchedulerConfig, state: RequestState, tokens: int, blocks: Tables) -> LoadTask:
    """Return the load of `tokens` found tokens after those that vLLM has. Mutates `state`.

    After a reset between answer and blocks, there is no lookup: the load fails, and vLLM computes the tokens.
    """
    lookup, chunk = state.lookup, config.chunk_tokens
    state.admitted = None if lookup is None else lookup.common_answer(bool(config.states))
    state.start = start = state.computed
    stop = start + tokens
    blocks = spread(blocks, config.states, stop, chunk)
    table = cut(blocks, config.block_tokens, start // chunk * chunk, -(-stop // chunk) * chunk, start, stop)
    return LoadTask(state.request_id, 0 if lookup is None else lookup.number, start, stop, table)


def tier_tokens(state: RequestState, tokens: int) -> dict[str, int]:
    """Return how many of the `tokens` tokens that a request loaded last came from each tier."""
    if state.admitted is None:
        return {}
    start, stop, end = state.start, state.start + tokens, 0
    found: Counter[str] = Counter()
    for tier, size in state.admitted.segments:
        end += size
        found[tier] += max(0, min(end, stop) - max(end - size, start))
    return +found
