"""Lookups of requests, on the scheduler's side.

A lookup is a message: `find` notes it, `plan` puts it into the next step's message, the workers look up in
the background, and `update_from_workers` notes their answers. The workers keep the deadline: with
asynchronous scheduling, a step may pass before they receive the lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.vllm.blending.blend import Blend
from kvkit.adapters.vllm.handoff.handoff_planner import handed_off_tokens
from kvkit.adapters.vllm.planner import BlocksOf, Planner, Scheduled
from kvkit.adapters.vllm.request_state import PendingLookup, RequestState
from kvkit.adapters.vllm.scheduler_config import EngineView, SchedulerConfig, whole_sequence
from kvkit.adapters.vllm.step import StepMetadata, WorkerReport
from kvkit.adapters.vllm.tiers.save_planner import savable_tokens

FRESH_S = 10.0
"""Seconds for which an answer is valid. A request that is not admitted in this time is looked up again."""


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """`lookup`: how many tokens to look up; `load`: up to which token they may be loaded."""

    lookup: int
    load: int


def lookup_limits(config: SchedulerConfig, state: RequestState, computed: int) -> LookupLimits:
    """Return the limits of a request whose first `computed` tokens vLLM has."""
    tokens, limit = state.request.num_tokens, state.policy.max_load_tokens
    # the last token is always computed, for its logits
    if state.remote_prefill is not None:  # includes the partial last chunk
        lookup = handed_off_tokens(config, tokens)
        return LookupLimits(lookup, min(lookup, tokens - 1))
    chunk, load = config.chunk_tokens, config.whole_grains(tokens - 1)
    if limit is not None:
        load = min(load, config.whole_grains(computed + limit))
    lookup = min(tokens // chunk, -(-(load + config.recompute_last_block) // chunk)) * chunk
    return LookupLimits(lookup, min(load, config.usable_tokens(lookup)))


class LookupPlanner(Planner):
    """The lookups of one engine's requests."""

    def __init__(self, config: SchedulerConfig, engine: EngineView) -> None:
        self._config, self._engine = config, engine
        self._numbers = count(1)
        self._requested: list[LookupRequest] = []

    def find(
        self, state: RequestState, tokens: int, blend: Blend | None, inline: bool
    ) -> PendingLookup | None:
        """Return a request's lookup once all ranks have answered it; None until then.

        Starts a lookup if there is none that is valid. Sets `state.no_external_kv` if the request cannot be
        cached.

        Args:
            tokens: how many tokens to look up.
            blend: blend whose documents are to be looked up too.
            inline: whether the worker in this process may answer at once.
        """
        lookup, chunks = state.lookup, -(-tokens // self._config.chunk_tokens)
        if lookup is None or lookup.chunks != chunks or self._engine.now() > lookup.answered_at + FRESH_S:
            sequence = self._engine.sequence(state.request, tokens)
            if sequence is None:
                state.no_external_kv = True
                return None
            lookup = state.lookup = PendingLookup(next(self._numbers), chunks)
            self._start(state, lookup.number, sequence, blend, inline)
        return lookup if self.is_answered(lookup) else None

    def is_answered(self, lookup: PendingLookup) -> bool:
        """Return whether every rank has answered."""
        return len(lookup.answers) == self._config.ranks

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks: BlocksOf) -> None:
        step.lookups, self._requested = self._requested, []

    def update_from_workers(self, report: WorkerReport, requests: Mapping[str, RequestState]) -> None:
        for answer in report.answers:
            if state := requests.get(answer.request_id):
                self._add_answer(state, answer)

    def _start(
        self, state: RequestState, number: int, sequence: Sequence, blend: Blend | None, inline: bool
    ) -> None:
        """Look up `sequence` at once, or with the next step."""
        transfer = state.remote_prefill
        lookup = LookupRequest(
            state.request_id,
            number,
            sequence,
            state.computed,
            "" if transfer is None else transfer.transfer,
            transfer is not None and transfer.computed,
            policy=replace(state.policy, max_load_tokens=None),  # the sequence already ends at that limit
        )
        if blend is not None:
            lookup = blend.with_documents(lookup, whole_sequence(self._engine, state.request))
        answer = self._engine.lookup_inline(lookup) if inline else None
        if answer is None:
            self._requested.append(lookup)
        else:
            self._add_answer(state, answer)

    def _add_answer(self, state: RequestState, answer: LookupAnswer) -> None:
        """Note a rank's answer, unless it is to an earlier lookup."""
        lookup = state.lookup
        if lookup is None or lookup.number != answer.number:
            return
        lookup.answers[answer.rank] = answer
        if chunks := savable_tokens(self._config, state, answer.tokens) // self._config.chunk_tokens:
            self._engine.expect_chunks(state.request, 0, chunks)
        if self.is_answered(lookup):
            lookup.answered_at = self._engine.now()
