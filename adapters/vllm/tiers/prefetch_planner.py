"""Prefetches for requests that vLLM has not admitted yet, on the scheduler's side.

The workers prefetch the hits of the first few queued requests, until a request is admitted or ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvkit.adapters.vllm.planner import (
    BlocksOf,
    EngineView,
    Planner,
    RequestState,
    Scheduled,
    SchedulerConfig,
    whole_sequence,
)
from kvkit.adapters.vllm.step import PrefetchTask, StepMetadata, Tables
from kvkit.adapters.vllm.tiers.load_planner import lookup_limits

MAX_REQUESTS = 8
"""Number of queued requests to prefetch for at a time. The workers limit the bytes."""


class PrefetchPlanner(Planner):
    """The queue of one engine, in order of arrival, and the prefetches for its first requests."""

    def __init__(self, config: SchedulerConfig, engine: EngineView) -> None:
        super().__init__(config, engine)
        self._queue: dict[str, RequestState] = {}
        self._prefetching: set[str] = set()
        self._cancelled: list[str] = []

    def enqueue(self, state: RequestState) -> None:
        """Queue a request, unless it is queued or there is nothing to prefetch for it."""
        if not state.no_prefetch:
            self._queue.setdefault(state.request_id, state)

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        state.no_prefetch = False
        self._remove(state)

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks_of: BlocksOf) -> None:
        step.cancelled_prefetches, self._cancelled = self._cancelled, []
        for state in list(islice(self._queue.values(), MAX_REQUESTS)):
            awaits_answers = state.lookup is not None and not state.lookup.is_answered
            if state.request_id in self._prefetching or awaits_answers:
                continue  # it may be admitted as soon as its lookup is answered
            tasks = list(self._tasks(state))
            if tasks:
                self._prefetching.add(state.request_id)
                step.prefetches += tasks
            else:  # it is not examined again in each step
                state.no_prefetch = True
                del self._queue[state.request_id]

    def request_finished(self, state: RequestState, blocks: Tables | None) -> bool:
        self._remove(state)
        return False

    def reset(self) -> None:
        self._prefetching.clear()  # the workers end their prefetches too, and get new ones

    def _remove(self, state: RequestState) -> None:
        """Take a request out of the queue, and cancel its prefetch."""
        self._queue.pop(state.request_id, None)
        if state.request_id in self._prefetching:
            self._prefetching.remove(state.request_id)
            self._cancelled.append(state.request_id)

    def _tasks(self, state: RequestState) -> Iterator[PrefetchTask]:
        """Yield the prefetches of a request: of its prompt, and of the documents to blend."""
        request, blend = state.request, state.blend
        # prefetches use the cache policy's tiers, not the request's
        names_tiers = (state.policy.load_from, state.policy.store_to) != (None, None)
        is_received = state.remote_prefill is not None
        if is_received or names_tiers or state.no_external_kv or request.skip_reading_prefix_cache:
            return
        computed = self._engine.cached_tokens(request)
        limits = lookup_limits(self._config, state, computed)
        sequence = self._engine.sequence(request, limits.lookup) if computed < limits.load else None
        if sequence is None:
            return
        yield PrefetchTask(state.request_id, sequence, computed)
        if blend is not None and blend.has_reusable_after(computed):
            for document in blend.documents(whole_sequence(self._engine, request)):
                yield PrefetchTask(state.request_id, document, blend.blend_request.prefix)
