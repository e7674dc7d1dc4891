"""The scheduler's side of the vLLM connector looks up, loads, waits and saves for made-up requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from scheduler_engine import scheduler_of

from kvkit.adapters.engine.lookup_request import LookupAnswer
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.step import StepMetadata, Tables, WorkerReport
from kvkit.adapters.vllm.tiers.load_planner import FRESH_S
from kvkit.adapters.vllm.tiers.prefetch_planner import MAX_REQUESTS

CHUNK, BLOCK = 8, 4


@dataclass
class Request:
    """What vLLM's request has of it."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def request(tokens: int, request_id: str = "a") -> Request:
    return Request(request_id, list(range(100, 100 + tokens)), tokens)


def new_scheduler(clock: Callable[[], float] = lambda: 0.0, **fields: object) -> Scheduler:
    return scheduler_of(CHUNK, (BLOCK,), now=clock, **fields)


def step(
    scheduler: Scheduler, scheduled: dict[str, int] | None = None, blocks: Tables = ([],)
) -> StepMetadata:
    return scheduler.plan(scheduled or {}, lambda _: blocks)


def answer(scheduler: Scheduler, asked: StepMetadata, tokens: int, rank: int = 0, tier: str = "disk") -> None:
    (ask,) = asked.lookups
    found = LookupAnswer(ask.request_id, ask.number, rank, tokens, ((tier, tokens),) if tokens else ())
    scheduler.update_from_workers(WorkerReport([found]))


def test_a_request_waits_for_its_answer_and_is_asked_about_once() -> None:
    scheduler, a = new_scheduler(), request(20)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    asked = step(scheduler)
    assert asked.idle
    assert [ask.sequence.tokens.tolist() for ask in asked.lookups] == [a.tokens[:16]]
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    assert not step(scheduler).lookups
    answer(scheduler, asked, 16)
    for _ in range(2):  # cheap and without side effects, as long as the request cannot be admitted
        assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)
    assert not step(scheduler).loads


def test_what_is_admitted_is_loaded_into_its_blocks() -> None:
    scheduler, a = new_scheduler(), request(30)
    scheduler.get_num_new_matched_tokens(a, 4)
    answer(scheduler, step(scheduler), 24)
    assert scheduler.get_num_new_matched_tokens(a, 4) == (20, True)
    scheduler.update_state_after_alloc(a, ([11, 12, 13, 14, 15, 16, 17, 18],), 20)
    (load,) = step(scheduler).loads
    assert (load.start, load.stop) == (4, 24)
    assert load.blocks == ([-1, 12, 13, 14, 15, 16],)  # what vLLM has computed itself is left alone
    assert scheduler.tier_tokens("a", 20) == {"disk": 20}
    scheduler.update_state_after_alloc(a, ([11, 12, 13, 14, 15, 16, 17, 18],), 0)  # the load is done
    assert not step(scheduler).loads


@pytest.mark.parametrize(
    ("tokens", "windows", "found"),
    [(16, False, 12), (17, False, 16), (16, True, 8), (17, True, 16), (8, True, 0), (4, False, 0)],
)
def test_the_last_token_is_always_computed(tokens: int, windows: bool, found: int) -> None:
    scheduler, a = new_scheduler(windows=windows), request(tokens)
    waits = scheduler.get_num_new_matched_tokens(a, 0)
    asked = step(scheduler)
    if asked.lookups:
        assert waits == (None, False)
        answer(scheduler, asked, len(asked.lookups[0].sequence.tokens))
    assert scheduler.get_num_new_matched_tokens(a, 0) == (found, found > 0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.permutations(range(4)), st.integers(0, 3))
def test_a_hit_is_what_every_rank_has(chunks: list[int], order: list[int], computed: int) -> None:
    scheduler, a = new_scheduler(ranks=len(chunks)), request(5 * CHUNK + 1)
    scheduler.get_num_new_matched_tokens(a, computed * BLOCK)
    asked = step(scheduler)
    for rank in [r for r in order if r < len(chunks)]:
        assert scheduler.get_num_new_matched_tokens(a, computed * BLOCK) == (None, False)
        answer(scheduler, asked, chunks[rank] * CHUNK, rank)
    found = max(0, min(chunks) * CHUNK - computed * BLOCK)
    assert scheduler.get_num_new_matched_tokens(a, computed * BLOCK) == (found, found > 0)


def test_steps_that_take_long_do_not_turn_hits_into_misses() -> None:
    """With asynchronous scheduling, a lookup waits for the step before its own."""
    clock = Clock()
    scheduler, a = new_scheduler(clock), request(20)
    scheduler.get_num_new_matched_tokens(a, 0)
    asked = step(scheduler)
    clock.now = 60.0  # the step before it was a long prefill
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    answer(scheduler, asked, 16)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)


def test_an_answer_that_is_old_is_asked_for_again() -> None:
    clock = Clock()
    scheduler, a = new_scheduler(clock), request(20)
    scheduler.get_num_new_matched_tokens(a, 0)
    first = step(scheduler)
    answer(scheduler, first, 16)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)
    clock.now = FRESH_S + 1
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    second = step(scheduler)
    answer(scheduler, first, 16)  # to the first lookup
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    answer(scheduler, second, 8)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (8, True)


def test_a_preempted_request_asks_with_what_it_generated() -> None:
    scheduler, a = new_scheduler(), request(9)
    scheduler.get_num_new_matched_tokens(a, 0)
    answer(scheduler, step(scheduler), 0)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (0, False)
    scheduler.update_state_after_alloc(a, ([1, 2, 3],), 0)
    a.tokens += range(10)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    (ask,) = step(scheduler).lookups
    assert ask.sequence.tokens.tolist() == a.tokens[:16]


def test_a_request_whose_load_failed_computes() -> None:
    scheduler, a = new_scheduler(), request(20)
    scheduler.get_num_new_matched_tokens(a, 0)
    answer(scheduler, step(scheduler), 16)
    scheduler.get_num_new_matched_tokens(a, 0)
    scheduler.update_state_after_alloc(a, ([1, 2, 3, 4, 5],), 16)
    assert step(scheduler).acked_failure_step == 0
    scheduler.update_from_workers(WorkerReport(failed=["a"], failed_step=2))
    assert scheduler.get_num_new_matched_tokens(a, 0) == (0, False)
    assert step(scheduler).acked_failure_step == 2


def test_a_step_tells_once_which_requests_are_over() -> None:
    scheduler, a = new_scheduler(), request(20)
    scheduler.get_num_new_matched_tokens(a, 0)
    assert step(scheduler).ended == {}
    a.tokens += range(5)
    scheduler.request_finished(a, None)
    assert step(scheduler).ended == {"a": 20}
    assert step(scheduler).ended == {}


def test_what_a_queued_request_will_hit_is_brought_near_until_it_is_admitted() -> None:
    """vLLM asks about `a`, and has no blocks for it; it does not come to ask about `b`."""
    scheduler, a, b = new_scheduler(), request(20, "a"), request(30, "b")
    for each in (a, b):
        scheduler.on_new_request(each)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    asked = step(scheduler)
    assert [p.request_id for p in asked.prefetches] == ["b"], "a may be admitted once it is answered"
    assert asked.prefetches[0].sequence.tokens.tolist() == b.tokens[:24]
    answer(scheduler, asked, 16)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)
    (told,) = step(scheduler).prefetches
    assert (told.request_id, told.sequence.tokens.tolist()) == ("a", a.tokens[:16])
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)
    again = step(scheduler)
    assert not again.prefetches
    assert not again.cancelled_prefetches
    scheduler.get_num_new_matched_tokens(a, 0)
    scheduler.update_state_after_alloc(a, ([1, 2, 3, 4, 5],), 16)
    scheduler.request_finished(b, None)
    left = step(scheduler)
    assert left.cancelled_prefetches == ["a", "b"]
    assert len(left.loads) == 1
    assert not step(scheduler).cancelled_prefetches


def test_what_is_admitted_when_it_is_answered_is_not_brought_near() -> None:
    scheduler, a = new_scheduler(), request(20)
    scheduler.on_new_request(a)
    scheduler.get_num_new_matched_tokens(a, 0)
    asked = step(scheduler)
    answer(scheduler, asked, 16)
    scheduler.get_num_new_matched_tokens(a, 0)
    scheduler.update_state_after_alloc(a, ([1, 2, 3, 4, 5],), 16)
    admitted = step(scheduler)
    assert not asked.prefetches
    assert not admitted.prefetches
    assert not admitted.cancelled_prefetches


@given(st.permutations(range(3 * MAX_REQUESTS)))
def test_only_the_first_of_a_queue_are_brought_near(order: list[int]) -> None:
    """Whoever leaves first: never more at a time, each once, and all in their order."""
    scheduler = new_scheduler()
    queue = [request(20, str(i)) for i in range(3 * MAX_REQUESTS)]
    for each in queue:
        scheduler.on_new_request(each)
    waiting = [each.request_id for each in queue]
    told: list[str] = []
    ahead: set[str] = set()
    for leaves in [None, *order]:
        if leaves is not None:
            scheduler.request_finished(queue[leaves], None)
            waiting.remove(str(leaves))
        planned = step(scheduler)
        assert set(planned.cancelled_prefetches) == ahead - set(waiting)
        ahead = ahead & set(waiting) | {p.request_id for p in planned.prefetches}
        told += [p.request_id for p in planned.prefetches]
        assert ahead == set(waiting[:MAX_REQUESTS])
    assert told == sorted(set(told), key=int)


def test_what_vllm_has_itself_is_not_brought_near() -> None:
    tokens = {"a": 8, "b": 16, "c": 0}
    scheduler = new_scheduler()
    scheduler.engine.cached_tokens = lambda request: tokens[request.request_id]
    for request_id in tokens:
        scheduler.on_new_request(request(20 if request_id != "c" else CHUNK - 1, request_id))
    (told,) = step(scheduler).prefetches
    assert (told.request_id, told.computed) == ("a", 8)


def test_what_there_is_nothing_to_bring_near_for_is_looked_at_once_until_it_is_admitted() -> None:
    """Although vLLM asks about it in each step."""
    looked: list[str] = []

    def has(request: Request) -> int:
        looked.append(request.request_id)
        return 16

    scheduler = new_scheduler()
    scheduler.engine.cached_tokens = has
    a = request(20)
    scheduler.on_new_request(a)
    for _ in range(3):
        scheduler.get_num_new_matched_tokens(a, 16)
        step(scheduler)
    assert looked == ["a"]
    scheduler.update_state_after_alloc(a, ([1, 2, 3, 4, 5],), 0)
    scheduler.get_num_new_matched_tokens(a, 16)
    step(scheduler)
    assert looked == ["a", "a"]


def test_what_is_not_looked_up_is_not_brought_near() -> None:
    unread = request(20)
    unread.skip_reading_prefix_cache = True
    for scheduler, a in (
        (new_scheduler(), unread),
        (with_handoff(RemotePrefill("t", computed=True)), request(20)),
    ):
        scheduler.on_new_request(a)
        assert not step(scheduler).prefetches


def test_a_reset_has_queued_requests_told_anew() -> None:
    scheduler, a = new_scheduler(), request(20)
    scheduler.on_new_request(a)
    assert len(step(scheduler).prefetches) == 1
    scheduler.begin_epoch("later")
    assert len(step(scheduler).prefetches) == 1


def test_a_preempted_request_is_queued_again() -> None:
    scheduler, a = new_scheduler(), request(20)
    scheduler.on_new_request(a)
    scheduler.update_state_after_alloc(a, ([1, 2, 3, 4, 5],), 0)
    assert not step(scheduler, {"a": 20}, ([1, 2, 3, 4, 5],)).prefetches
    scheduler.get_num_new_matched_tokens(a, 0)
    asked = step(scheduler)
    assert not asked.prefetches
    answer(scheduler, asked, 16)
    scheduler.get_num_new_matched_tokens(a, 0)
    assert len(step(scheduler).prefetches) == 1


def test_what_must_not_be_read_is_not_asked_for() -> None:
    scheduler, a = new_scheduler(), request(20)
    a.skip_reading_prefix_cache = True
    assert scheduler.get_num_new_matched_tokens(a, 0) == (0, False)
    assert not step(scheduler).lookups


def test_a_reset_forgets_answers() -> None:
    scheduler, a = new_scheduler(), request(20)
    scheduler.get_num_new_matched_tokens(a, 0)
    answer(scheduler, step(scheduler), 16)
    assert not scheduler.has_pending_reset
    scheduler.begin_epoch("later")
    assert scheduler.has_pending_reset, "who asks the workers shall not wait for the next request"
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    assert step(scheduler).epoch == "later"
    assert not scheduler.has_pending_reset


def test_what_is_not_told_by_ids_is_neither_asked_for_nor_saved() -> None:
    scheduler = new_scheduler(sequence=lambda *_: None)
    a = request(20)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (0, False)
    planned = step(scheduler, {"a": 20}, ([1, 2, 3, 4, 5],))
    assert not planned.lookups
    assert not planned.saves


def test_blocks_outside_a_window_are_not_saved() -> None:
    scheduler = new_scheduler(windows=True)
    a = request(24)
    scheduler.get_num_new_matched_tokens(a, 0)
    a.num_computed_tokens = 12
    planned = step(scheduler, {"a": 12}, ([0, 0, 0, 7, 8, 9],))
    (save,) = planned.saves
    assert (save.first, save.blocks) == (1, ([-1, 7, 8, 9],))


@dataclass
class Engine:
    """A request in an engine with asynchronous scheduling: what it samples is known `lag` steps later."""

    request: Request
    lag: int
    in_flight: list[int] = field(default_factory=list)

    def settle(self, all_of_it: bool = False) -> None:
        while len(self.in_flight) > (0 if all_of_it else self.lag):
            self.request.tokens += [len(self.request.tokens)] * self.in_flight.pop(0)


@given(
    prompt=st.integers(1, 40),
    lag=st.integers(0, 2),
    save_generated=st.booleans(),
    moves=st.lists(st.one_of(st.integers(1, 20), st.just("preempt"), st.integers(-5, -1)), max_size=40),
)
def test_every_complete_chunk_is_saved_once_and_no_other(
    prompt: int, lag: int, save_generated: bool, moves: list[int | str]
) -> None:
    """However prefill is cut, whenever a request is preempted or loses what failed to load."""
    scheduler = new_scheduler(save_generated=save_generated)
    a = request(prompt)
    engine = Engine(a, lag)
    scheduler.get_num_new_matched_tokens(a, 0)
    blocks = list(range(1, 400))
    saved: set[int] = set()
    for move in moves:
        if move == "preempt" or (isinstance(move, int) and move < 0):
            engine.settle(all_of_it=True)
            lost = a.num_computed_tokens if move == "preempt" else -int(move) * BLOCK
            a.num_computed_tokens = max(0, a.num_computed_tokens - lost) // BLOCK * BLOCK
            saved = {chunk for chunk in saved if chunk < a.num_computed_tokens // CHUNK}
            if move == "preempt":
                scheduler.update_state_after_alloc(a, (blocks,), 0)
            continue
        left = a.num_tokens + sum(engine.in_flight) - a.num_computed_tokens
        count = min(int(move), max(1, left))
        planned = step(scheduler, {"a": count}, (blocks,))
        known = min(a.num_computed_tokens + count, a.num_tokens)
        for save in planned.saves:
            stop = len(save.sequence.tokens) // CHUNK
            assert len(save.sequence.tokens) == stop * CHUNK <= known
            assert save.sequence.tokens.tolist() == a.tokens[: stop * CHUNK]
            assert save.blocks == (blocks[save.first * CHUNK // BLOCK : stop * CHUNK // BLOCK],)
            chunks = set(range(save.first, stop))
            assert not chunks & saved
            saved |= chunks
        a.num_computed_tokens += count
        limit = known if save_generated else min(known, prompt)
        assert saved == set(range(limit // CHUNK))
        if a.num_computed_tokens >= a.num_tokens + sum(engine.in_flight):
            engine.in_flight.append(1)
        engine.settle()
    engine.settle(all_of_it=True)  # it ends here
    complete = min(a.num_computed_tokens, a.num_tokens - 1)
    ends = scheduler.request_finished(a, (blocks[: -(-a.num_computed_tokens // BLOCK)],))
    last = step(scheduler).saves
    assert ends == bool(last)
    for save in last:
        assert save.last
        stop = len(save.sequence.tokens) // CHUNK
        assert save.sequence.tokens.tolist() == a.tokens[: stop * CHUNK]
        assert save.blocks == (blocks[save.first * CHUNK // BLOCK : stop * CHUNK // BLOCK],)
        chunks = set(range(save.first, stop))
        assert not chunks & saved
        saved |= chunks
    whole = (complete if save_generated else min(complete, prompt)) // CHUNK
    assert saved - {whole} == set(
        range(whole)
    )  # a chunk whose last token was sampled last is saved by its step


@pytest.mark.parametrize(
    ("computed", "blocks"),
    [(23, [7, 8, 9, 10, 11, 12]), (24, None), (24, [7, 8, 9, 10]), (24, [7, 8, 9, 10, 0, 12])],
    ids=["incomplete", "aborted", "pages given back", "behind a window"],
)
def test_what_cannot_be_saved_in_the_end_is_not_kept(computed: int, blocks: list[int] | None) -> None:
    scheduler, a = new_scheduler(), request(16)
    scheduler.get_num_new_matched_tokens(a, 0)
    assert len(step(scheduler, {"a": 16}, ([7, 8, 9, 10],)).saves) == 1
    a.tokens += range(9)
    a.num_computed_tokens = computed
    assert not scheduler.request_finished(a, None if blocks is None else (blocks,))
    assert not step(scheduler).saves


def test_the_chunk_that_ends_with_its_request_is_saved() -> None:
    scheduler, a = new_scheduler(), request(16)
    told: list[tuple[Request, int, int]] = []
    scheduler.engine.expect_chunks = lambda request, first, stop: told.append((request, first, stop))
    scheduler.get_num_new_matched_tokens(a, 0)
    step(scheduler, {"a": 16}, ([7, 8, 9, 10],))
    a.tokens += range(9)
    a.num_computed_tokens = 24
    assert scheduler.request_finished(a, ([7, 8, 9, 10, 11, 12],))
    (save,) = step(scheduler).saves
    assert (save.first, save.blocks, save.last) == (2, ([11, 12],), True)
    assert not step(scheduler).saves
    assert told == [(a, 0, 2), (a, 2, 3)]


def with_handoff(handoff: RemoteDecode | RemotePrefill, windows: bool = False) -> Scheduler:
    return new_scheduler(windows=windows, handoff_of=lambda request: handoff)


@given(
    tokens=st.integers(1, 60),
    loaded=st.integers(0, 14),
    steps=st.lists(st.integers(1, 20), min_size=1),
    windows=st.booleans(),
)
def test_a_prompt_is_sent_once_and_in_order_as_it_is_computed(
    tokens: int, loaded: int, steps: list[int], windows: bool
) -> None:
    scheduler, a = with_handoff(RemoteDecode("t", "unix:///d"), windows), request(tokens)
    all_of_it = (tokens - 1) // CHUNK * CHUNK if windows else tokens - (tokens % BLOCK == 1)
    table = list(range(500, 520))
    scheduler.update_state_after_alloc(a, (table,), 0)
    a.num_computed_tokens = min(loaded * BLOCK, tokens - 1) // BLOCK * BLOCK
    sent, last = 0, False
    for count in steps:
        left = tokens - a.num_computed_tokens
        if not left:
            break
        computes = min(count, left)
        for send in step(scheduler, {"a": computes}, (table,)).sends:
            assert not last, "nothing comes after the last piece"
            assert (send.transfer, send.address, send.first) == ("t", "unix:///d", sent)
            assert send.sequence.tokens.tolist() == a.tokens[:all_of_it]
            blocks = range(sent // BLOCK, -(-send.stop // CHUNK) * CHUNK // BLOCK)
            assert send.blocks == ([table[i] if i * BLOCK < send.stop else -1 for i in blocks],)
            assert sent < send.stop <= a.num_computed_tokens + computes, "only what is computed"
            sent, last = send.stop, send.last
            assert last or sent % CHUNK == 0
        a.num_computed_tokens += computes
    whole = a.num_computed_tokens == tokens
    assert sent == (all_of_it if whole else min(all_of_it, a.num_computed_tokens // CHUNK * CHUNK))
    assert last == (0 < sent == all_of_it)
    told = scheduler.answer(a)
    assert told is None if not sent else told is not None and told["remote_num_tokens"] == sent
    assert scheduler.request_finished(a, (table,)) == (sent > 0), "its blocks stay until they were read"


def test_what_is_received_comes_with_the_unfilled_chunk_and_is_saved_from_its_beginning() -> None:
    scheduler, a = with_handoff(RemotePrefill("t", computed=True)), request(15)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    asked = step(scheduler)
    (ask,) = asked.lookups
    assert (ask.transfer, ask.computed_remotely) == ("t", True)
    assert (ask.computed, len(ask.sequence.tokens)) == (0, 15)
    answer(scheduler, asked, 15, tier="handoff")
    assert scheduler.get_num_new_matched_tokens(a, 0) == (14, True), "the last token's logits are wanted"
    table: Tables = ([21, 22, 23, 24],)
    scheduler.update_state_after_alloc(a, table, 14)
    found = step(scheduler)
    (load,) = found.loads
    assert (load.start, load.stop, load.blocks) == (0, 14, table)
    assert found.released_transfers == []
    a.num_computed_tokens = 14
    a.tokens.append(7)
    (save,) = step(scheduler, {"a": 2}, table).saves
    assert (save.first, save.blocks) == (0, table)


def test_what_is_received_is_admitted_at_once_where_a_worker_answers_at_once() -> None:
    scheduler, a = with_handoff(RemotePrefill("t", computed=True)), request(15)
    scheduler.engine.lookup_inline = lambda ask: LookupAnswer(
        ask.request_id, ask.number, 0, 15, (("handoff", 15),)
    )
    scheduler.begin_epoch("later")
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False), "the worker knows of no reset yet"
    (ask,) = step(scheduler).lookups
    scheduler.begin_epoch("later")
    step(scheduler)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (14, True)
    scheduler.update_state_after_alloc(a, ([21, 22, 23, 24],), 14)
    (load,) = step(scheduler).loads
    assert load.number > ask.number


@pytest.mark.parametrize(("tokens", "computed"), [(1, 0), (13, 12), (15, 14)])
def test_what_is_received_for_nothing_is_not_wanted(tokens: int, computed: int) -> None:
    """vLLM has it in its prefix cache, or there is a single token."""
    scheduler, a = with_handoff(RemotePrefill("t", computed=True)), request(tokens)
    assert scheduler.get_num_new_matched_tokens(a, computed) == (0, False)
    scheduler.update_state_after_alloc(a, ([21, 22, 23, 24],), 0)
    assert step(scheduler).released_transfers == ["t"]
    assert step(scheduler).released_transfers == []


def test_nor_is_what_is_received_for_a_request_that_ends_before() -> None:
    scheduler, a = with_handoff(RemotePrefill("t", computed=True)), request(15)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    scheduler.request_finished(a, None)
    assert step(scheduler).released_transfers == ["t"]


def approximate(*segments: tuple[str, int], **fields: object) -> tuple[Scheduler, list[int], Request]:
    """A scheduler that knows what was found of a request, of "few" with fewer bits; what it keeps private."""
    begun: list[int] = []
    kept, a = SimpleNamespace(make_private=lambda request, tokens: begun.append(tokens)), request(41)
    scheduler = new_scheduler(approximate=frozenset({"few"}), **fields)
    scheduler.bind(kept)
    scheduler.get_num_new_matched_tokens(a, 0)
    (asked,) = step(scheduler).lookups
    total = sum(size for _, size in segments)
    scheduler.update_from_workers(WorkerReport([LookupAnswer("a", asked.number, 0, total, segments)]))
    return scheduler, begun, a


@pytest.mark.parametrize(
    ("segments", "first"),
    [
        ((("disk", 8), ("few", 16), ("disk", 8)), 8),
        ((("few", 32),), 0),
        ((("disk", 32),), None),
        ((), None),
    ],
)
def test_from_the_first_token_of_fewer_bits_on_nothing_is_saved(
    segments: tuple[tuple[str, int], ...], first: int | None
) -> None:
    scheduler, begun, a = approximate(*segments)
    found, table = scheduler.get_num_new_matched_tokens(a, 0)[0] or 0, list(range(1, 13))
    assert begun == ([] if first is None else [first])
    scheduler.update_state_after_alloc(a, (table,), found)
    step(scheduler)
    a.num_computed_tokens = found
    saves = step(scheduler, {"a": 41 - found}, (table,)).saves
    assert [(s.first, len(s.sequence.tokens)) for s in saves] == ([(found // 8, 40)] if first is None else [])


def test_what_is_handed_off_is_exact() -> None:
    sends = {"handoff_of": lambda request: RemoteDecode("t", "tcp://decode:1")}
    scheduler, begun, a = approximate(("disk", 16), ("few", 16), **sends)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)
    assert begun == []
