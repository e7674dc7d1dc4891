"""Blending, on the scheduler's side: claims, tasks for workers, and results.

A blended request claims its whole prompt as external tokens. KV from the first reused token on is private to
the request, computed and generated tokens included: other requests never see it. Blending leaves earlier KV
as it is. After a preemption, the KV that vLLM has lost is blended again as the first time: from the same
tokens of the same documents, with the same tokens recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkit.adapters.vllm.blending.blocks import PrivateBlocks, ScratchBlocks
from kvkit.adapters.vllm.blending.requests import Blend, BlendRequest
from kvkit.adapters.vllm.planner import (
    BlocksOf,
    EngineView,
    PendingLookup,
    Planner,
    RequestState,
    Scheduled,
    SchedulerConfig,
    whole_sequence,
)
from kvkit.adapters.vllm.step import Arrival, BlendTask, StepMetadata, Tables, WorkerReport
from kvkit.adapters.vllm.tiers.load_planner import begin_load
from kvkit.settings import ConfigError

log = logging.getLogger(__name__)

BLEND_WAIT_S = 5.0
"""Seconds that a request waits for the blocks of its blend; after that, it is computed in full."""


@dataclass(eq=False)
class BlendPlanner(Planner):
    """The blends of one engine's requests.

    Args:
        read: function that reads the blend request of vLLM's `Request`; None: it has none. A request for
            which it raises ConfigError is served without blending.
        private: private blocks of the engine's requests.
        scratch: blocks that replace those outside of windows during a blend.
    """

    config: SchedulerConfig
    engine: EngineView
    read: Callable[[Any], BlendRequest | None]
    private: PrivateBlocks
    scratch: ScratchBlocks
    _tasks: list[BlendTask] = field(default_factory=list, init=False)
    _arrivals: list[Arrival] = field(default_factory=list, init=False)

    def on_new_request(self, state: RequestState) -> None:
        try:
            blend_request = self.read(state.request)
        except ConfigError as error:
            log.warning("%s is not blended: %s", state.request_id, error)
            return
        state.blend = None if blend_request is None else Blend(blend_request)

    def claim(self, state: RequestState, lookup: PendingLookup) -> int | None:
        """Return the number of tokens to claim: the whole prompt; None: the request waits for blocks.

        A request that has waited for `BLEND_WAIT_S`, or for which there can never be enough blocks, is not
        blended.
        """
        request, blend = state.request, state.blend
        assert blend is not None
        has_room = self.scratch.has_room(request.num_tokens)
        if has_room and self.scratch.pin(request, state.computed):
            # vLLM computes the last token; it keeps the windows of the token after the claim
            return int(request.num_tokens - self.config.windows - state.computed)
        blend.plan = None
        if has_room is None or self.engine.now() > lookup.answered_at + BLEND_WAIT_S:
            log.warning("%s is not blended: there are too few blocks", request.request_id)
            state.blend = None
        return None

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        """Make the task of a planned blend. A request that gets blocks without a plan is never blended."""
        if state.blend is not None and state.will_blend and tokens:
            self._tasks.append(self._make_task(state, state.blend, blocks))
        elif state.blended_from is None:
            state.blend = None  # its KV is exact from now on, and stays exact

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks_of: BlocksOf) -> None:
        self.scratch.unpin()
        step.blends, self._tasks = self._tasks, []
        step.arrivals, self._arrivals = self._arrivals, []

    def update_from_workers(self, report: WorkerReport, requests: Mapping[str, RequestState]) -> None:
        for arrival in report.arrivals:
            state = requests.get(arrival.request_id)
            if state is not None and state.blend is not None:
                ready = state.blend.add_arrival(arrival, self.config.ranks)
                self._arrivals += [] if ready is None else [ready]
        for done in report.blended:
            state = requests.get(done.request_id)
            if state is not None and state.blend is not None:
                state.blend.record_result(state.request, done)
        for request_id in report.failed:
            state = requests.get(request_id)
            if state is not None and state.blend is not None:
                state.blend.record_failure(state.request)

    def _make_task(self, state: RequestState, blend: Blend, blocks: Tables) -> BlendTask:
        """Make a request's approximate KV private, and return its task for the workers."""
        assert blend.plan is not None
        request, computed = state.request, state.computed
        if blend.private is None:
            blend.private, blend.local_tokens = int(blend.plan.reused.argmax()), computed
            self.private.make_private(request, blend.private)
        tables = self.scratch.fill(request, blocks, computed)
        load = begin_load(self.config, state, blend.exact - computed, tables)
        assert state.admitted is not None
        return blend.task(whole_sequence(self.engine, request), state.admitted.documents, load, tables)
