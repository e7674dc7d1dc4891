"""The scheduler's side: plan lookups, prefetches, loads and saves. Bookkeeping over plain data, no I/O.

Nothing here blocks. A lookup is a message: `get_num_new_matched_tokens` notes it, `plan` puts it into the
next step's message, the workers look up in the background, and `update_from_workers` notes their answers.
Until all ranks have answered, `get_num_new_matched_tokens` returns None, and vLLM asks again in its next
step. The workers keep the deadline: with asynchronous scheduling, a step may pass before they receive the
lookup. Only a handoff to the one worker in this process is looked up at once: that reads memory.

Requests that vLLM has not admitted yet are queued. The workers prefetch what the first few of them will hit,
until a request is admitted or ends.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import count, islice, takewhile
from typing import Any

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.vllm import params as parameters
from kvkit.adapters.vllm.allocations import PendingAllocations
from kvkit.adapters.vllm.blending.private import PrivateBlocks
from kvkit.adapters.vllm.blending.scheduling import Blend, Blends
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.request_state import PendingLookup, RequestState
from kvkit.adapters.vllm.states import spread
from kvkit.adapters.vllm.step import (
    LoadTask,
    PrefetchTask,
    RetainTask,
    SaveTask,
    SendTask,
    StepMetadata,
    Tables,
    WorkerReport,
    cut,
)
from kvkit.transfer.plan import is_snapshot_kept
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

log = logging.getLogger(__name__)

FRESH_S = 10.0
"""Seconds for which an answer is valid. A request that is not admitted in this time is looked up again."""

PATIENCE_S = 5.0
"""Seconds that a request waits for the blocks of its blend; after that, it is computed in full."""

AHEAD = 8
"""Number of queued requests to prefetch for at a time. The workers limit the bytes."""


@dataclass(eq=False)
class Scheduler:
    """The requests of one engine, with their lookups, loads and saves. Not thread-safe, like vLLM's.

    Arguments named `request` are vLLM's `Request`.

    Args:
        chunk_tokens: tokens of a chunk.
        block_tokens: tokens of a block, per KV cache group of vLLM; each divides `chunk_tokens`.
        sequence: returns the first n tokens of a request, as keys see them; None if it cannot be cached.
        windows: whether running requests lose blocks of K and V (those that sliding windows have left).
        states: numbers of the tables of states, and whether these run (`kvkit.adapters.vllm.states`).
        snapshot_every: as in `kvkit.transfer.plan.is_snapshot_kept`.
        recompute_last_block: whether a draft model's KV of a token depends on later tokens, so that the end
            of a hit is computed again.
        ranks: number of workers that answer lookups.
        blocking_load: whether a step waits for its loads (sync and layerwise loading).
        save_generated: whether chunks with generated tokens are saved.
        clock: monotonic clock, in seconds.
        stores: whether anything is saved.
        handoff: returns the handoff that a request's parameters ask for.
        has: returns how many tokens of a request vLLM's own cache has.
        free: returns the number of vLLM's free blocks.
        on_chunks: called with a request and its chunks [first, stop) that were found or will be saved.
        approximate: tiers with fewer bits. Tokens computed behind KV from these tiers are not saved.
        private: keeps blocks of approximate KV to their request; None: no KV is approximate.
        blends: what blending needs; None: no request is blended.
        request_policy_of: returns a request's policy.
        lookup_inline: answers a handoff's lookup at once; returns None if the workers have to.
    """

    chunk_tokens: int
    block_tokens: tuple[int, ...]
    sequence: Callable[[Any, int], Sequence | None]
    _: KW_ONLY
    windows: bool = False
    states: Mapping[int, bool] = field(default_factory=dict)
    snapshot_every: int = 1
    recompute_last_block: bool = False
    ranks: int
    blocking_load: bool
    save_generated: bool
    clock: Callable[[], float]
    stores: bool = True
    handoff: Callable[[Any], RemoteDecode | RemotePrefill | None] = lambda request: None
    has: Callable[[Any], int] = lambda request: 0
    free: Callable[[], int] = lambda: sys.maxsize
    on_chunks: Callable[[Any, int, int], object] = lambda request, first, stop: None
    approximate: frozenset[str] = frozenset()
    private: PrivateBlocks | None = None
    blends: Blends | None = None
    request_policy_of: Callable[[Any], RequestPolicy] = lambda request: DEFAULT_REQUEST_POLICY
    lookup_inline: Callable[[LookupRequest], LookupAnswer | None] = lambda lookup: None

    def __post_init__(self) -> None:
        self._loses = self.windows or bool(self.states)  # windows, and earlier states
        # with windows, only at a chunk's end are all tokens within the window known to be there
        self._grain_tokens = self.chunk_tokens if self._loses else math.lcm(*self.block_tokens)
        self._requests: dict[str, RequestState] = {}
        self._queue: dict[str, None] = {}  # in order of arrival
        self._ahead: set[str] = set()
        self._pending_allocations = PendingAllocations(self.block_tokens, self.states, self.free)
        self._numbers, self._steps = count(1), count(1)
        self._next = StepMetadata()
        self._acked_failure_step = 0
        self.epoch = self._told_epoch = ""
        self._keeps_old = False  # vLLM's own prefix cache kept blocks from before the last reset

    def on_new_request(self, request: Any) -> None:
        """Queue a new request. It may be long until vLLM asks for its matched tokens."""
        self._state(request)
        self._queue[request.request_id] = None

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` can be loaded, and whether the load is async.

        The number is None while unknown. Starts a lookup if there is none; repeated calls return the same.
        """
        state = self._state(request)
        state.epoch, state.computed = self.epoch, computed
        if not state.no_prefetch:
            self._queue.setdefault(request.request_id)  # a preempted one is queued again
        self._pending_allocations.leave(request.request_id)  # vLLM only asks about requests without blocks
        if state.no_external_kv and not self._pending_allocations.fits(request):
            return None, False  # else requests that hold blocks would wait behind it
        receiving = state.handoff if isinstance(state.handoff, RemotePrefill) else None
        asked, most = self._asked(state, computed)
        wanted = -(-asked // self.chunk_tokens)
        blend = state.blend
        if blend is not None:
            blend.plan = None
            if not blend.wants(computed):
                if blend.private is not None:
                    return 0, False  # exact KV from elsewhere would differ from its approximate KV
                blend = None
        if request.skip_reading_prefix_cache or state.no_external_kv:
            return 0, False
        if blend is None and min(asked, most) <= computed:
            return 0, False
        lookup = state.lookup
        if lookup is None or lookup.chunks != wanted or self.clock() > lookup.known_at + FRESH_S:
            sequence = self.sequence(request, asked)
            if sequence is None:
                state.no_external_kv = True
                return 0, False
            lookup = state.lookup = PendingLookup(next(self._numbers), wanted)
            transfer = ("", False) if receiving is None else (receiving.transfer, receiving.computed)
            policy = replace(state.policy, max_load_tokens=None)  # the sequence already ends at that limit
            told = LookupRequest(
                request.request_id, lookup.number, sequence, computed, *transfer, policy=policy
            )
            ask_now = blend is None and receiving is not None and not self.has_pending_reset
            answer = self.lookup_inline(told) if ask_now else None
            if answer is None:
                self._next.lookups.append(told if blend is None else blend.ask(told, self._whole(request)))
                return None, False
            self._take(answer)
        if not self._is_known(lookup):
            return None, False
        lookup.computed = computed
        least, exact = self._least(lookup), self._exact(lookup)
        most = min(most, least.tokens if receiving else self._usable(least.tokens))
        if isinstance(state.handoff, RemoteDecode):  # the receiver expects exact KV
            most = min(most, self._whole_grains(exact))
        if blend is not None and blend.private is not None:
            # blended tokens are blended again, although tiers may have exact KV of them by now
            most = min(most, self._whole_grains(blend.private))
        found = max(0, min(least.tokens, most) - computed)
        if found and computed + found > exact:  # before vLLM allocates blocks, which it may hash at once
            self._keep_private(state, max(computed, exact))
        blends = blend is not None and blend.promise(request.num_tokens, computed + found, least.documents)
        may_stand_still = (found or blends) and self._loses and not self.blocking_load
        if may_stand_still and not self._pending_allocations.fits(request):
            return None, False
        if blend is not None and blends:
            return self._promise_blend(state, blend, lookup)
        return found, found > 0 and not self.blocking_load

    def update_state_after_alloc(self, request: Any, blocks: Tables, tokens: int) -> None:
        """Note a request's blocks, and plan the load of `tokens` tokens into them."""
        state = self._state(request)
        self._leave(request.request_id)
        state.saved, state.no_prefetch = None, False
        self._retain(state)
        lookup, state.lookup = state.lookup, None
        blend = state.blend
        if blend is not None and lookup is not None and blend.plan is not None and tokens:
            self._pending_allocations.add(request)
            self._admit_blend(state, blend, lookup, blocks)
            return
        if blend is not None and blend.private is None:
            state.blend = None  # its KV is exact from now on, and stays exact
        if tokens:
            self._pending_allocations.add(request)
            self._next.loads.append(self._load(state, lookup, state.computed, tokens, blocks))
        elif isinstance(state.handoff, RemotePrefill):
            self._next.released_transfers.append(state.handoff.transfer)

    def sources(self, request_id: str, tokens: int) -> dict[str, int]:
        """Return how many of the `tokens` tokens that a request loaded last came from each tier."""
        state = self._requests.get(request_id)
        if state is None or state.admitted is None:
            return {}
        start, stop, end = state.start, state.start + tokens, 0
        found: Counter[str] = Counter()
        for tier, size in state.admitted.segments:
            end += size
            found[tier] += max(0, min(end, stop) - max(end - size, start))
        return +found

    def plan(self, scheduled: dict[str, int], blocks: Callable[[str], Tables | None]) -> StepMetadata:
        """Return the message of a step that computes `scheduled` tokens by request id; begin the next one."""
        if self.blends is not None:
            self.blends.scratch.unpin()
        self._pending_allocations.go(scheduled)
        step, self._next = self._next, StepMetadata()
        step.number = next(self._steps)
        step.prefetches += self._prefetches()
        step.saves += self._saves(scheduled, blocks)
        step.sends += self._sends(scheduled, blocks)
        step.computed, step.idle = sum(scheduled.values()), not scheduled
        step.acked_failure_step, step.epoch = self._acked_failure_step, self.epoch
        self._told_epoch = self.epoch
        return step

    def update_from_workers(self, report: WorkerReport) -> None:
        """Apply the workers' report."""
        for answer in report.answers:
            self._take(answer)
        for arrival in report.arrivals:
            blend = self._blend(arrival.request_id)
            go = None if blend is None else blend.arrive(arrival, self.ranks)
            if go is not None:
                self._next.arrivals.append(go)
        for done in report.blended:
            if blend := self._blend(done.request_id):
                blend.finish(self._requests[done.request_id].request, done)
        for request_id in report.failed:
            if request_id in self._requests:  # else the load would be retried without end
                self._requests[request_id].no_external_kv = True
            if blend := self._blend(request_id):
                blend.fail(self._requests[request_id].request)
        self._acked_failure_step = max(self._acked_failure_step, report.failed_step)

    def finish(self, request: Any, blocks: Tables | None) -> bool:
        """Forget a request. Return whether its blocks must stay until a worker reports that they are free.

        With asynchronous scheduling, the step that fills a chunk does not know the chunk's last token yet. If
        that token ends the request, no later step can save the chunk, so it is saved here. `blocks` is None
        if the request was aborted or failed: nothing is saved then.
        """
        state = self._requests.pop(request.request_id, None)
        self._leave(request.request_id)
        self._pending_allocations.leave(request.request_id)
        if state is None:
            return False
        self._next.ended[request.request_id] = request.num_prompt_tokens
        if self.private is not None:
            self.private.end(request)
        if isinstance(state.handoff, RemotePrefill):
            self._next.released_transfers.append(state.handoff.transfer)
        sends = state.sent is not None
        if state.saved is None or blocks is None or self._is_void(state):
            return sends
        chunk, first = self.chunk_tokens, state.saved
        stop = min(request.num_computed_tokens, self._known(state, request.num_tokens - 1)) // chunk
        if stop <= first:
            return sends
        end = stop * chunk
        sequence = self.sequence(request, end)
        table = self._to_save(request, blocks, 0, first, stop)
        sizes = zip(table, self.block_tokens, strict=True)
        parts = [part for number, part in enumerate(sizes) if number not in self.states]
        if sequence is None or any(-1 in part or len(part) * n < end - first * chunk for part, n in parts):
            return sends  # a window has left some of the blocks
        self._next.saves.append(SaveTask(request.request_id, sequence, first, table, state.policy, last=True))
        self.on_chunks(request, first, stop)
        return True

    def answer(self, request: Any) -> dict[str, Any] | None:
        """Return the answer of an ended request: the decode engine's parameters, or facts of its blend."""
        state = self._requests.get(request.request_id)
        if state is not None and state.blend is not None:
            return state.blend.answer()
        if state is None or state.sent is None or not isinstance(state.handoff, RemoteDecode):
            return None
        if self._is_void(state):
            return None
        return parameters.answer(state.handoff, state.sent)

    def received(self, request_id: str) -> None:
        """Release a blend's extra blocks: every rank has finished loading the request."""
        if self.blends is not None:
            self.blends.scratch.give_back(request_id)

    def forget(self, epoch: str, keeps_old: bool = False) -> None:
        """Begin an epoch: lookups no longer find what was saved before.

        Blocks may hold KV of old weights: requests that have blocks are not saved or sent until they get new
        ones, and last saves that the workers have not received yet are not stored.

        Args:
            epoch: name of the epoch; an earlier one's name makes its KV valid again.
            keeps_old: whether vLLM's own prefix cache kept blocks. Requests that hit them are not saved.
        """
        self.epoch, self._keeps_old = epoch, keeps_old
        for state in self._requests.values():
            state.lookup = None
        self._ahead.clear()  # the workers end their prefetches too, and get new ones
        self._next.saves = [replace(s, policy=replace(s.policy, store_to=())) for s in self._next.saves]
        under_way = sum(state.saved is not None for state in self._requests.values())
        log.info(
            "reset: earlier KV is no longer used; %d requests in flight and %d last saves are not stored",
            under_way,
            len(self._next.saves),
        )
        if keeps_old:
            log.warning(
                "reset: vLLM kept its own prefix cache, as requests are running; KV of requests that hit it "
                "is not stored; reset again when none runs, or with reset_running_requests"
            )

    @property
    def has_pending_reset(self) -> bool:
        """True if the workers do not know the current epoch yet. They have to learn it at once."""
        return self.epoch != self._told_epoch

    def _is_void(self, state: RequestState) -> bool:
        """Return whether a request's KV may be from before a reset, or depend on such KV."""
        return state.epoch != self.epoch or (self._keeps_old and state.computed > 0)

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            policy, handoff = self.request_policy_of(request), self.handoff(request)
            state = RequestState(request, policy, handoff, epoch=self.epoch)
            self._requests[request.request_id] = state
            state.blend = None if self.blends is None else self.blends.begin(request)
        state.request = request
        return state

    def _leave(self, request_id: str) -> None:
        """Take a request out of the queue, and cancel its prefetch."""
        self._queue.pop(request_id, None)
        if request_id in self._ahead:
            self._ahead.remove(request_id)
            self._next.cancelled_prefetches.append(request_id)

    def _prefetches(self) -> Iterator[PrefetchTask]:
        """Yield the prefetches of the first queued requests."""
        for request_id in list(islice(self._queue, AHEAD)):
            state = self._requests[request_id]
            is_asked = state.lookup is not None and not self._is_known(state.lookup)
            if request_id in self._ahead or is_asked:
                continue  # it may be admitted as soon as it is answered
            request, sequence, computed = state.request, None, 0
            receives = isinstance(state.handoff, RemotePrefill)
            # prefetches use the cache policy's tiers, not the request's
            names_tiers = (state.policy.load_from, state.policy.store_to) != (None, None)
            if not (receives or names_tiers or state.no_external_kv or request.skip_reading_prefix_cache):
                computed = self.has(request)
                asked, most = self._asked(state, computed)
                sequence = self.sequence(request, asked) if computed < min(asked, most) else None
            if sequence is None:  # no need to examine it in each step
                state.no_prefetch = True
                del self._queue[request_id]
            else:
                self._ahead.add(request_id)
                yield PrefetchTask(request_id, sequence, computed)
                blend = state.blend
                if blend is not None and blend.wants(computed):
                    for document in blend.documents(self._whole(request)):
                        yield PrefetchTask(request_id, document, blend.asked.prefix)

    def _asked(self, state: RequestState, computed: int) -> tuple[int, int]:
        """Return how many tokens of a request to look up, and up to which token they may be loaded."""
        request, limit = state.request, state.policy.max_load_tokens
        if isinstance(state.handoff, RemotePrefill):  # includes the partial last chunk
            asked = self._handed(request.num_tokens)
            return asked, min(asked, request.num_tokens - 1)
        # the last token is always computed, for its logits
        chunk, most = self.chunk_tokens, self._whole_grains(request.num_tokens - 1)
        if limit is not None:
            most = min(most, self._whole_grains(computed + limit))
        asked = min(request.num_tokens // chunk, -(-(most + self.recompute_last_block) // chunk)) * chunk
        return asked, min(most, self._usable(asked))

    def _usable(self, tokens: int) -> int:
        """Return up to which token a hit of `tokens` tokens (whole chunks) may be loaded."""
        return self._whole_grains(tokens - 1) if self.recompute_last_block else tokens

    def _whole_grains(self, tokens: int) -> int:
        """Round `tokens` down to a length that hits may have: whole chunks, or whole blocks of all groups."""
        return tokens // self._grain_tokens * self._grain_tokens

    def _handed(self, tokens: int) -> int:
        """Return how many tokens of a prompt of `tokens` tokens are handed off.

        The receiver computes the last token in any case: if that is alone in its block, it is not sent.
        """
        grains = self._whole_grains(tokens - 1)
        return grains if self._loses or grains == tokens - 1 else tokens

    def _promise_blend(
        self, state: RequestState, blend: Blend, lookup: PendingLookup
    ) -> tuple[int | None, bool]:
        """Claim the whole prompt, if there are blocks for it; otherwise make the request wait for a while."""
        assert self.blends is not None
        request, scratch, computed = state.request, self.blends.scratch, lookup.computed
        room = scratch.has_room(request.num_tokens)
        if room and scratch.pin(request, computed):
            # vLLM computes the last token; it keeps the windows of the token after the claim
            return request.num_tokens - self.windows - computed, True
        blend.plan = None
        if room is None or self.clock() > lookup.known_at + PATIENCE_S:
            log.warning("%s is not blended: there are too few blocks", request.request_id)
            state.blend = None
        return None, False

    def _admit_blend(self, state: RequestState, blend: Blend, lookup: PendingLookup, blocks: Tables) -> None:
        assert self.blends is not None
        request = state.request
        tables = self.blends.admit(request, blend, lookup.computed, blocks)
        start = lookup.computed
        load = self._load(state, lookup, start, blend.exact - start, tables)
        found = self._least(lookup).documents
        self._next.blends.append(blend.task(self._whole(request), found, load, tables))

    def _load(
        self, state: RequestState, lookup: PendingLookup | None, start: int, tokens: int, blocks: Tables
    ) -> LoadTask:
        """Return the load of `tokens` found tokens from token `start` on.

        `lookup` is None after a reset between answer and blocks: the load fails, and vLLM computes them.
        """
        state.admitted = None if lookup is None else self._least(lookup)
        state.start, stop, chunk = start, start + tokens, self.chunk_tokens
        blocks = spread(blocks, self.states, stop, chunk)
        table = cut(blocks, self.block_tokens, start // chunk * chunk, -(-stop // chunk) * chunk, start, stop)
        number = 0 if lookup is None else lookup.number
        return LoadTask(state.request.request_id, number, start, stop, table)

    def _blend(self, request_id: str) -> Blend | None:
        state = self._requests.get(request_id)
        return None if state is None else state.blend

    def _whole(self, request: Any) -> Sequence:
        sequence = self.sequence(request, request.num_tokens)
        assert sequence is not None  # else it would not have been looked up
        return sequence

    def _take(self, answer: LookupAnswer) -> None:
        """Note a rank's answer to a lookup."""
        state = self._requests.get(answer.request_id)
        lookup = None if state is None else state.lookup
        if state is None or lookup is None or lookup.number != answer.number:
            return  # the answer to an earlier lookup
        lookup.answers[answer.rank] = answer
        if found := self._known(state, answer.tokens) // self.chunk_tokens:
            self.on_chunks(state.request, 0, found)
        if self._is_known(lookup):
            lookup.known_at = self.clock()

    def _is_known(self, lookup: PendingLookup) -> bool:
        return len(lookup.answers) == self.ranks

    def _least(self, lookup: PendingLookup) -> LookupAnswer:
        """Return what every rank can load; with states, nothing unless all ranks found the same."""
        answers = lookup.answers.values()
        least = min(answers, key=lambda answer: (answer.tokens, answer.rank))
        if self.states and any(answer.tokens != least.tokens for answer in answers):
            least = replace(least, tokens=0, segments=())  # not all have a snapshot there
        documents = zip(*(answer.documents for answer in answers), strict=True)
        return replace(least, documents=tuple(map(min, documents)))

    def _exact(self, lookup: PendingLookup) -> int:
        """Return how many leading tokens every rank can load exactly: up to the first with fewer bits."""
        return min(
            sum(size for _, size in takewhile(lambda s: s[0] not in self.approximate, answer.segments))
            for answer in lookup.answers.values()
        )

    def _keep_private(self, state: RequestState, first: int) -> None:
        """Hide a request's approximate blocks, from token `first` on, from other requests for good."""
        assert self.private is not None
        if state.private is None:
            state.private = first
            self.private.begin(state.request, first)

    def _saves(self, scheduled: dict[str, int], blocks: Callable[[str], Tables | None]) -> Iterator[SaveTask]:
        """Yield saves of the chunks that this step completes.

            tokens     |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |
            computed   [------ before this step -----[ this step [
            saved      [-------- before -------[--- now ---[
                                               first       stop

        Blocks that a sliding window has left may be missing (-1), even in the first chunk to save: those that
        are a window before the tokens computed when that chunk was begun. A reader resumes at the chunk's end
        or later, and its window begins after the missing blocks: the zeros in their place are never read.
        Earlier chunks may have larger gaps, and are not saved.
        """
        chunk = self.chunk_tokens
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            if state is None or self._is_void(state):
                continue
            request = state.request
            computed = request.num_computed_tokens
            # after a preemption or a failed load, this is lower than `saved`: those chunks are recomputed
            first = min(computed // chunk, computed // chunk if state.saved is None else state.saved)
            if state.saved is None and isinstance(state.handoff, RemotePrefill) and not self.windows:
                first = 0  # received KV is in no tier yet
            if state.saved is None and state.blend is not None and not self.windows:
                first = min(first, state.blend.exact // chunk)  # nor is KV that blending computed
            stop = min(computed + tokens, self._known(state, request.num_tokens)) // chunk
            state.saved = max(first, stop)
            if stop <= first:
                continue
            end = stop * chunk
            sequence, table = self.sequence(request, end), blocks(request_id)
            if sequence is not None and table is not None:
                self.on_chunks(request, first, stop)
                part = self._to_save(request, table, computed + tokens, first, stop)
                yield SaveTask(request_id, sequence, first, part, state.policy)

    def _sends(self, scheduled: dict[str, int], blocks: Callable[[str], Tables | None]) -> Iterator[SendTask]:
        """Yield what this step completes of prompts to hand off: whole chunks, and the rest at the end.

        tokens     |  chunk 0  |  chunk 1  |  chunk 2  |       | the prompt's end
        computed   [------ before this step -----[- this step -[
        sent       [-------- before -------[------- now -------[
                                           first               stop
        """
        chunk = self.chunk_tokens
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            if state is None or not isinstance(state.handoff, RemoteDecode) or self._is_void(state):
                continue
            request = state.request
            whole = self._handed(request.num_prompt_tokens)
            computed, first = request.num_computed_tokens + tokens, state.sent or 0
            stop = whole if computed >= request.num_prompt_tokens else computed // chunk * chunk
            if stop <= first:
                continue
            sequence, table = self.sequence(request, whole), blocks(request_id)
            if sequence is None or table is None:
                continue
            state.sent = stop
            transfer, address = state.handoff.transfer, state.handoff.address
            table = spread(table, self.states, computed, chunk)
            part = cut(table, self.block_tokens, first, -(-stop // chunk) * chunk, 0, stop)
            yield SendTask(request_id, transfer, address, sequence, first, stop, part, last=stop == whole)

    def _retain(self, state: RequestState) -> None:
        """Apply the request policy's eviction to records that tiers have: hits are not saved again."""
        request, policy = state.request, state.policy
        sequence = self.sequence(request, request.num_tokens) if policy.retains else None
        if sequence is not None:
            self._next.retains.append(RetainTask(sequence, policy))

    def _known(self, state: RequestState, tokens: int) -> int:
        """Return how many of the first `tokens` tokens may be saved: only those with exact KV."""
        if state.policy.store_to == () or not self.stores:
            return 0
        if state.blend is not None and state.blend.private is not None:
            tokens = min(tokens, state.blend.private)
        if state.private is not None:
            tokens = min(tokens, state.private)
        return tokens if self.save_generated else min(tokens, state.request.num_prompt_tokens)

    def _to_save(self, request: Any, blocks: Tables, at: int, first: int, stop: int) -> Tables:
        """Return the blocks of chunks [first, stop), of snapshots those to store; states run at `at`."""
        chunk, prompt = self.chunk_tokens, (request.num_prompt_tokens - 1) // self.chunk_tokens
        tables, end = spread(blocks, self.states, at, chunk), stop * chunk
        part = cut(tables, self.block_tokens, first * chunk, end, 0, end)
        for table in self.states:
            for i in range(len(part[table])):
                if not is_snapshot_kept(first + i + 1, self.snapshot_every, prompt):
                    part[table][i] = -1
        return part
