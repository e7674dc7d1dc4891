"""Lookups of requests and loads of what they found, on the scheduler's side.

A lookup is a message: `find` notes it, `plan` puts it into the next step's message, the workers look up in
the background, and `update_from_workers` notes their answers. The workers keep the deadline: with
asynchronous scheduling, a step may pass before they receive the lookup. Once vLLM has allocated blocks for
what was found (`admit`), the next step's message has the load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest
from kvkit.adapters.vllm.blending.requests import Blend
from kvkit.adapters.vllm.handoff.handoff_planner import handed_off_tokens
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
from kvkit.adapters.vllm.states import align_states
from kvkit.adapters.vllm.step import LoadTask, StepMetadata, Tables, WorkerReport, cut
from kvkit.adapters.vllm.tiers.save_planner import savable_tokens

FRESH_S = 10.0
"""Seconds for which an answer is valid. A request that is not admitted in this time is looked up again."""


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """`lookup`: how many tokens to look up; `load`: how many of them may be loaded."""

    lookup: int
    load: int


def lookup_limits(config: SchedulerConfig, state: RequestState, computed: int) -> LookupLimits:
    """Return the limits of a request whose first `computed` tokens vLLM has."""
    tokens, max_load_tokens = state.request.num_tokens, state.policy.max_load_tokens
    # the last token is always computed, for its logits
    if state.remote_prefill is not None:  # includes the partial last chunk
        lookup = handed_off_tokens(config, tokens)
        return LookupLimits(lookup, min(lookup, tokens - 1))
    chunk, load = config.chunk_tokens, config.whole_grains(tokens - 1)
    if max_load_tokens is not None:
        load = min(load, config.whole_grains(computed + max_load_tokens))
    lookup = min(tokens // chunk, -(-(load + config.recompute_last_block) // chunk)) * chunk
    return LookupLimits(lookup, min(load, config.usable_tokens(lookup)))


class LoadPlanner(Planner):
    """The lookups of one engine's requests, and the loads other than those of blends."""

    def __init__(self, config: SchedulerConfig, engine: EngineView) -> None:
        super().__init__(config, engine)
        self._numbers = count(1)
        self._lookups: list[LookupRequest] = []
        self._loads: list[LoadTask] = []

    def find(
        self, state: RequestState, tokens: int, blend: Blend | None, inline: bool
    ) -> PendingLookup | None:
        """Return a request's lookup once all ranks have answered it; None until then.

        Starts a lookup if there is none that is valid. Sets `state.no_external_kv` if the request cannot be
        cached.

        Args:
            tokens: how many tokens to look up.
            blend: blend whose documents are to be looked up too.
            inline: True if the worker in this process may answer at once.
        """
        lookup, chunks = state.lookup, -(-tokens // self._config.chunk_tokens)
        if lookup is None or lookup.chunks != chunks or self._engine.now() > lookup.answered_at + FRESH_S:
            sequence = self._engine.sequence(state.request, tokens)
            if sequence is None:
                state.no_external_kv = True
                return None
            lookup = state.lookup = PendingLookup(next(self._numbers), chunks)
            transfer = state.remote_prefill
            request = LookupRequest(
                state.request_id,
                lookup.number,
                sequence,
                state.computed,
                "" if transfer is None else transfer.transfer,
                transfer is not None and transfer.computed,
                policy=replace(state.policy, max_load_tokens=None),  # the sequence already ends at that limit
            )
            if blend is not None:
                request = blend.with_documents(request, whole_sequence(self._engine, state.request))
            answer = self._engine.lookup_inline(request) if inline else None
            if answer is None:
                self._lookups.append(request)
            else:
                self._add_answer(state, answer)
        return lookup if lookup.is_answered else None

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        if tokens and not state.will_blend:
            self._loads.append(begin_load(self._config, state, tokens, blocks))

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks_of: BlocksOf) -> None:
        step.lookups, self._lookups = self._lookups, []
        step.loads, self._loads = self._loads, []

    def update_from_workers(self, report: WorkerReport, requests: Mapping[str, RequestState]) -> None:
        for answer in report.answers:
            if state := requests.get(answer.request_id):
                self._add_answer(state, answer)

    def _add_answer(self, state: RequestState, answer: LookupAnswer) -> None:
        """Note a rank's answer, unless it is to an earlier lookup."""
        lookup = state.lookup
        if lookup is None or lookup.number != answer.number:
            return
        lookup.answers[answer.rank] = answer
        if chunks := savable_tokens(self._config, state, answer.tokens) // self._config.chunk_tokens:
            self._engine.expect_chunks(state.request, 0, chunks)
        if len(lookup.answers) == self._config.ranks:
            lookup.answered_at = self._engine.now()


def begin_load(config: SchedulerConfig, state: RequestState, tokens: int, blocks: Tables) -> LoadTask:
    """Return the load of `tokens` found tokens after those that vLLM has. Mutates `state`.

    After a reset between answer and blocks, there is no lookup: the load fails, and vLLM computes the tokens.
    """
    lookup, chunk = state.lookup, config.chunk_tokens
    state.admitted = None if lookup is None else lookup.common_answer(bool(config.states))
    state.start = start = state.computed
    stop = start + tokens
    blocks = align_states(blocks, config.states, stop, chunk)
    blocks = cut(blocks, config.block_tokens, start // chunk * chunk, -(-stop // chunk) * chunk, start, stop)
    return LoadTask(state.request_id, 0 if lookup is None else lookup.number, start, stop, blocks)
