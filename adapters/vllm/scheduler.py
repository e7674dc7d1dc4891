"""The requests of an engine in vLLM's scheduler: lookups, loads and saves as plain data, without I/O.

Nothing here blocks. A lookup goes to the workers with the next step's message. Until all ranks have answered,
`get_num_new_matched_tokens` returns None, and vLLM asks again in its next step. Only a handoff to the one
worker in this process is looked up at once, since that only reads memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import count
from typing import Any

from kvkit.adapters.engine.lookup_request import LookupAnswer
from kvkit.adapters.vllm.allocations import PendingAllocations
from kvkit.adapters.vllm.blending.blend_planner import BlendPlanner
from kvkit.adapters.vllm.blending.blocks import PrivateBlocks
from kvkit.adapters.vllm.blending.requests import Blend
from kvkit.adapters.vllm.handoff.handoff_planner import HandoffPlanner
from kvkit.adapters.vllm.planner import (
    BlocksOf,
    EngineView,
    PendingLookup,
    Planner,
    RequestState,
    SchedulerConfig,
)
from kvkit.adapters.vllm.step import StepMetadata, Tables, WorkerReport
from kvkit.adapters.vllm.tiers.load_planner import LoadPlanner, lookup_limits
from kvkit.adapters.vllm.tiers.prefetch_planner import PrefetchPlanner
from kvkit.adapters.vllm.tiers.save_planner import SavePlanner

log = logging.getLogger(__name__)


class Scheduler:
    """The requests of one engine. Not thread-safe, like vLLM's scheduler.

    Methods that vLLM's connector calls have its names. Arguments named `request` are vLLM's `Request`. The
    planners of capabilities plan the tasks of a step; this class decides what they share.

    Attributes:
        private: keeps blocks of approximate KV to their request; None: no KV is approximate.
        blends: planner of blends; None: no request is blended.
        epoch: name of the current epoch.
    """

    def __init__(self, config: SchedulerConfig, engine: EngineView) -> None:
        self.config, self.engine = config, engine
        self.private: PrivateBlocks | None = None
        self.blends: BlendPlanner | None = None
        self.epoch = self._announced_epoch = ""
        self._keeps_old = False  # vLLM's own prefix cache kept blocks from before the last reset
        self._requests: dict[str, RequestState] = {}
        self._ended: dict[str, int] = {}
        self._traces: dict[str, dict[str, str]] = {}
        self._allocations = PendingAllocations(config.block_tokens, config.states, engine.free_blocks)
        self._loads = LoadPlanner(config, engine)
        self._prefetches = PrefetchPlanner(config, engine)
        self._saves = SavePlanner(config, engine)
        self._handoffs = HandoffPlanner(config, engine)
        self._planners: list[Planner] = [self._loads, self._prefetches, self._saves, self._handoffs]
        self._step_numbers = count(1)
        self._acked_failure_step = 0

    def bind(self, private: PrivateBlocks, blends: BlendPlanner | None = None) -> None:
        """Set what needs vLLM's `KVCacheManager`, before the first request."""
        self.private, self.blends = private, blends
        if blends is not None:
            self._planners.insert(0, blends)

    @property
    def has_pending_reset(self) -> bool:
        """True if no step has announced the current epoch to the workers yet."""
        return self.epoch != self._announced_epoch

    def on_new_request(self, request: Any) -> None:
        """Queue a new request for prefetches. vLLM may ask much later for its matched tokens."""
        self._prefetches.enqueue(self._state(request))

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` can be loaded, and whether the load is async.

        The number is None while unknown. Starts a lookup if there is none; repeated calls return the same.
        """
        state = self._state(request)
        state.epoch, state.computed = self.epoch, computed
        self._prefetches.enqueue(state)  # again, if the request was preempted
        self._allocations.remove(request.request_id)  # vLLM asks only for requests without blocks
        if state.no_external_kv and not self._allocations.fits(request):
            return None, False  # else requests that hold blocks would wait behind it
        blend, limits = self._blend_of(state), lookup_limits(self.config, state, computed)
        if not self._may_load(state, blend, limits.load):
            return 0, False
        inline = blend is None and not self.has_pending_reset
        lookup = self._loads.find(state, limits.lookup, blend, inline)
        if lookup is None:
            return 0 if state.no_external_kv else None, False
        answer = lookup.common_answer(bool(self.config.states))
        stop = self._loadable_tokens(state, lookup, answer, limits.load)
        blends = blend is not None and blend.plan_reuse(request.num_tokens, stop, answer.documents)
        may_wait_for_blocks = (stop > computed or blends) and self.config.loses_blocks
        if may_wait_for_blocks and not self.config.blocking_load and not self._allocations.fits(request):
            return None, False
        if self.blends is not None and blends:
            claimed_tokens = self.blends.claim(state, lookup)
            return claimed_tokens, claimed_tokens is not None
        return stop - computed, stop > computed and not self.config.blocking_load

    def update_state_after_alloc(self, request: Any, blocks: Tables, tokens: int) -> None:
        """Note a request's blocks, and plan the load of `tokens` tokens into them."""
        state = self._state(request)
        if tokens:
            self._allocations.add(request)
        for planner in self._planners:
            planner.admit(state, blocks, tokens)
        state.lookup = None

    def tier_tokens(self, request_id: str, tokens: int) -> dict[str, int]:
        """Return how many of the `tokens` tokens that a request loaded last came from each tier."""
        state = self._requests.get(request_id)
        return {} if state is None else state.tier_tokens(tokens)

    def plan(self, scheduled: Mapping[str, int], blocks_of: BlocksOf) -> StepMetadata:
        """Return the message of a step that computes `scheduled` tokens, by request id."""
        self._allocations.remove_scheduled(scheduled)
        step = StepMetadata(
            number=next(self._step_numbers),
            computed=sum(scheduled.values()),
            idle=not scheduled,
            acked_failure_step=self._acked_failure_step,
            epoch=self.epoch,
            ended=self._ended,
            traces=self._traces,
        )
        self._ended, self._traces, self._announced_epoch = {}, {}, self.epoch
        states = ((self._requests.get(request_id), tokens) for request_id, tokens in scheduled.items())
        current = [(state, n) for state, n in states if state is not None and not self._is_void(state)]
        for planner in self._planners:
            planner.plan(step, current, blocks_of)
        return step

    def update_from_workers(self, report: WorkerReport) -> None:
        """Apply the workers' report."""
        for request_id in report.failed:
            if state := self._requests.get(request_id):
                state.no_external_kv = True  # else the load would be retried without end
        self._acked_failure_step = max(self._acked_failure_step, report.failed_step)
        for planner in self._planners:
            planner.update_from_workers(report, self._requests)

    def request_finished(self, request: Any, blocks: Tables | None) -> bool:
        """Forget a request. Return whether its blocks must stay until a worker reports that they are free.

        Args:
            blocks: None if the request was aborted or failed: nothing is saved then.
        """
        self._allocations.remove(request.request_id)
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        self._ended[request.request_id] = request.num_prompt_tokens
        if self.private is not None:
            self.private.drop_private(request)
        kept = None if self._is_void(state) else blocks
        keeps_blocks = [planner.request_finished(state, kept) for planner in self._planners]
        return any(keeps_blocks)

    def answer(self, request: Any) -> dict[str, Any] | None:
        """Return `kv_transfer_params` of an ended request: for the decode engine, or results of its blend."""
        state = self._requests.get(request.request_id)
        if state is not None and state.blend is not None:
            return state.blend.output_params()
        return None if state is None or self._is_void(state) else self._handoffs.answer(state)

    def begin_epoch(self, epoch: str, keeps_old: bool = False) -> None:
        """Begin an epoch: lookups no longer find KV that was saved before.

        Blocks may hold KV of old weights: requests that have blocks are not saved or sent until they get new
        ones, and last saves that the workers have not received yet are not stored.

        Args:
            epoch: name of the epoch. With an earlier epoch's name, KV of that epoch is valid again.
            keeps_old: True if vLLM's own prefix cache kept blocks. Requests that hit them are not saved.
        """
        earlier = "KV of these weights is still" if epoch == self.epoch else "earlier KV is no longer"
        self.epoch, self._keeps_old = epoch, keeps_old
        for state in self._requests.values():
            state.lookup = None
        for planner in self._planners:
            planner.reset()
        log.info(
            "reset: %s used; %d requests in flight and %d last saves are not stored",
            earlier,
            sum(state.saved is not None for state in self._requests.values()),
            len(self._saves.last_saves),
        )
        if keeps_old:
            log.warning(
                "reset: vLLM kept its own prefix cache, as requests are running; KV of requests that hit it "
                "is not stored; reset again when none runs, or with reset_running_requests"
            )

    def _state(self, request: Any) -> RequestState:
        """Return a request's state; create it if the request is new."""
        state = self._requests.get(request.request_id)
        if state is None:
            policy, handoff = self.engine.policy_of(request), self.engine.handoff_of(request)
            state = RequestState(request, policy, handoff, epoch=self.epoch)
            self._requests[request.request_id] = state
            if trace := self.engine.trace_of(request):
                self._traces[request.request_id] = trace
            for planner in self._planners:
                planner.on_new_request(state)
        state.request = request
        return state

    def _is_void(self, state: RequestState) -> bool:
        """Return whether a request's KV may be from before a reset, or depend on such KV."""
        return state.epoch != self.epoch or (self._keeps_old and state.computed > 0)

    def _blend_of(self, state: RequestState) -> Blend | None:
        """Return a request's blend if it may reuse tokens that vLLM does not have. Drops its last plan."""
        blend = state.blend
        if blend is None:
            return None
        blend.plan = None
        return blend if blend.has_reusable_after(state.computed) else None

    def _may_load(self, state: RequestState, blend: Blend | None, limit: int) -> bool:
        """Return whether a request may load any of its first `limit` tokens, or blend."""
        if state.request.skip_reading_prefix_cache or state.no_external_kv:
            return False
        # exact KV from elsewhere would differ from the approximate KV of a blended request
        return blend is not None or (state.blended_from is None and state.computed < limit)

    def _loadable_tokens(
        self, state: RequestState, lookup: PendingLookup, answer: LookupAnswer, limit: int
    ) -> int:
        """Return how many leading tokens of a request vLLM has or may load from `answer`, up to `limit`.

        Hides approximate blocks from other requests for good: vLLM may hash them once it allocates them.
        """
        exact = lookup.exact_tokens(self.config.approximate)
        usable = answer.tokens if state.remote_prefill else self.config.usable_tokens(answer.tokens)
        stop = min(limit, usable)
        if state.remote_decode is not None:  # the receiver expects exact KV
            stop = min(stop, self.config.whole_grains(exact))
        if state.blended_from is not None:
            # blended tokens are blended again, although tiers may have exact KV of them by now
            stop = min(stop, self.config.whole_grains(state.blended_from))
        if stop > max(state.computed, exact) and state.private is None:
            assert self.private is not None
            state.private = max(state.computed, exact)
            self.private.make_private(state.request, state.private)
        return max(state.computed, stop)
