"""The scheduler's side of the vLLM connector answers matches correctly in edge cases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from scheduler_engine import scheduler_of
from test_vllm_scheduler import BLOCK, CHUNK, Clock, Request, answer, new_scheduler, request, step

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.vllm.blending.blend_planner import BLEND_WAIT_S, BlendPlanner
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.planner import RequestState
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.step import WorkerReport
from kvkit.adapters.vllm.tiers.load_planner import FRESH_S
from kvkit.transfer.policy import RequestPolicy

TABLE = list(range(1, 13))


def made(**fields: Any) -> Scheduler:
    return scheduler_of(CHUNK, fields.pop("blocks", (BLOCK,)), **fields)


def found(scheduler: Scheduler, request: Request, tokens: int, computed: int = 0) -> tuple[int | None, bool]:
    """What a request is told once so many tokens were found of it."""
    assert scheduler.get_num_new_matched_tokens(request, computed) == (None, False)
    answer(scheduler, step(scheduler), tokens)
    return scheduler.get_num_new_matched_tokens(request, computed)


def test_a_new_scheduler_has_nothing_to_tell() -> None:
    scheduler = new_scheduler()
    assert not scheduler.has_pending_reset
    told = step(scheduler)
    assert (told.epoch, told.acked_failure_step, told.computed, told.idle) == ("", 0, 0, True)
    assert (told.lookups, told.loads, told.saves, told.sends) == ([], [], [], [])
    assert [told.number, step(scheduler).number] == [1, 2]


def test_a_request_that_nobody_asked_about_ends() -> None:
    scheduler = new_scheduler()
    assert scheduler.request_finished(request(20), None) is False
    assert step(scheduler).ended == {}


def test_what_a_request_is_handed_is_read_off_it() -> None:
    read: list[Request] = []
    a = request(20)
    made(handoff_of=read.append).get_num_new_matched_tokens(a, 0)
    assert read == [a]


def test_former_states_are_kept_by_whole_chunks_as_windows_are() -> None:
    assert found(made(states={1: True}, blocks=(BLOCK, BLOCK)), request(16), 8) == (8, True)
    assert made(states={1: True}, blocks=(BLOCK, BLOCK)).get_num_new_matched_tokens(request(8), 0) == (
        0,
        False,
    )


def test_an_answer_counts_to_the_end_of_its_time() -> None:
    clock = Clock()
    scheduler, a = new_scheduler(clock), request(20)
    assert found(scheduler, a, 16) == (16, True)
    clock.now = FRESH_S
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)


def test_what_is_not_told_by_ids_is_asked_for_once() -> None:
    asked: list[int] = []

    def unknown(request: Request, count: int) -> Sequence | None:
        asked.append(count)
        return None

    scheduler, a = made(sequence=unknown), request(20)
    for _ in range(3):
        assert scheduler.get_num_new_matched_tokens(a, 0) == (0, False)
    assert asked == [16]


def test_a_question_is_about_no_transfer_where_nothing_is_received() -> None:
    scheduler = new_scheduler()
    scheduler.get_num_new_matched_tokens(request(20), 0)
    (ask,) = step(scheduler).lookups
    assert (ask.transfer, ask.computed_remotely) == ("", False)


def test_what_vllm_has_by_now_itself_changes_the_lookup() -> None:
    scheduler, a = made(policy_of=lambda request: RequestPolicy(max_load_tokens=9)), request(40)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    answer(scheduler, step(scheduler), 8)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (8, True)
    assert scheduler.get_num_new_matched_tokens(a, 8) == (None, False)
    (ask,) = step(scheduler).lookups
    assert (len(ask.sequence.tokens), ask.computed) == (16, 8)


def test_the_end_of_a_hit_is_computed_again_for_a_draft_but_not_of_what_is_received() -> None:
    assert found(made(recompute_last_block=True), request(40), 16) == (12, True)
    receives = made(recompute_last_block=True, handoff_of=lambda request: RemotePrefill("t", computed=True))
    assert found(receives, request(17), 16) == (16, True)


def test_what_a_draft_looks_ahead_at_is_looked_up_with_what_is_wanted() -> None:
    assert found(made(recompute_last_block=True, blocks=(1,)), request(40), 16) == (15, True)
    scheduler = made(recompute_last_block=True, policy_of=lambda request: RequestPolicy(max_load_tokens=8))
    assert scheduler.get_num_new_matched_tokens(request(40), 0) == (None, False)
    asked = step(scheduler)
    assert [len(ask.sequence.tokens) for ask in asked.lookups] == [16]


def test_a_hit_may_be_a_single_token() -> None:
    receives = made(blocks=(1,), handoff_of=lambda request: RemotePrefill("t", computed=True))
    assert found(receives, request(2), 1) == (1, True)


def crowded(**fields: Any) -> tuple[Scheduler, Request]:
    """A scheduler of an engine whose blocks one request has, which stands still; and another request."""
    room = [100]
    scheduler, first, other = (
        made(free_blocks=lambda: room[0], **fields),
        request(40, "first"),
        request(20, "a"),
    )
    assert found(scheduler, other, 16) == (16, True)
    tokens, _ = found(scheduler, first, 32)
    assert tokens == 32
    scheduler.update_state_after_alloc(first, (TABLE,), 32)
    room[0] = 0
    return scheduler, other


def test_what_could_wait_for_blocks_for_good_waits_before_it_has_any() -> None:
    scheduler, a = crowded(windows=True)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    scheduler, a = crowded()
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)
    scheduler.update_from_workers(WorkerReport(failed=["a"]))
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False), (
        "it would be before those that hold some"
    )
    step(scheduler, {"first": 8})
    assert scheduler.get_num_new_matched_tokens(a, 0) == (0, False)


def test_a_request_that_ends_stands_still_no_more() -> None:
    scheduler, a = crowded(windows=True)
    scheduler.request_finished(request(40, "first"), None)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)


def test_of_what_was_not_admitted_no_tier_is_a_source() -> None:
    scheduler, a = new_scheduler(), request(20)
    assert scheduler.tier_tokens("a", 16) == {}
    scheduler.get_num_new_matched_tokens(a, 0)
    assert scheduler.tier_tokens("a", 16) == {}


def test_what_each_tier_gave_is_counted_from_where_the_load_began() -> None:
    scheduler, a = new_scheduler(), request(41)
    scheduler.get_num_new_matched_tokens(a, 4)
    (ask,) = step(scheduler).lookups
    segments = (("memory", 8), ("disk", 16), ("memory", 8))
    scheduler.update_from_workers(WorkerReport([LookupAnswer("a", ask.number, 0, 32, segments)]))
    assert scheduler.get_num_new_matched_tokens(a, 4) == (28, True)
    scheduler.update_state_after_alloc(a, (TABLE,), 28)
    assert scheduler.tier_tokens("a", 28) == {"memory": 12, "disk": 16}
    assert scheduler.tier_tokens("a", 20) == {"memory": 4, "disk": 16}
    assert scheduler.tier_tokens("a", 4) == {"memory": 4}


class FakeBlend:
    """One request's blend, which reuses something wherever it may."""

    plan, private, exact = None, None, 0

    def has_reusable_after(self, computed: int) -> bool:
        return computed < 8

    def with_documents(self, lookup: LookupRequest, prompt: Sequence) -> LookupRequest:
        assert len(prompt.tokens) == 20
        return lookup

    def plan_reuse(self, tokens: int, exact: int, documents: tuple[int, ...]) -> bool:
        self.plan = "a plan"
        return True


class Blending:
    """What blending takes: all of what it asks for is granted, but for blocks.

    Attributes:
        room: whether there are enough; None: there will never be.
        blend: the blend of the last new request.
    """

    def __init__(self, room: bool | None) -> None:
        self.room, self.pinned = room, 0

    def scheduler(self, **fields: Any) -> Scheduler:
        scheduler = made(**fields)
        blends: Any = BlendPlanner(scheduler.config, scheduler.engine, lambda request: None, None, self)
        blends.on_new_request = self.begin
        scheduler.bind(blends.private, blends)
        return scheduler

    def begin(self, state: RequestState) -> None:
        self.blend: Any = FakeBlend()
        state.blend = self.blend

    def has_room(self, tokens: int) -> bool | None:
        return self.room

    def pin(self, request: Request, computed: int) -> bool:
        self.pinned += 1
        return True

    def unpin(self) -> None:
        self.pinned = 0


@pytest.mark.parametrize("windows", [False, True])
def test_a_request_is_blended_as_a_whole_but_for_what_vllm_computes(windows: bool) -> None:
    blending = Blending(room=True)
    assert found(blending.scheduler(windows=windows), request(20), 8, computed=4) == (16 - windows, True)
    assert blending.pinned == 1


def test_what_is_not_worth_blending_any_more_is_loaded_as_it_is() -> None:
    scheduler, a = Blending(room=True).scheduler(), request(20)
    assert found(scheduler, a, 16) == (20, True)
    assert scheduler.get_num_new_matched_tokens(a, 8) == (8, True), "vLLM has more of it by now"
    scheduler.update_state_after_alloc(a, (TABLE,), 8)
    told = step(scheduler)
    assert ([load.stop for load in told.loads], told.blends) == ([16], [])


def test_a_request_waits_a_while_for_blocks_to_be_blended_in(caplog: pytest.LogCaptureFixture) -> None:
    clock, blending = Clock(), Blending(room=False)
    scheduler, a = blending.scheduler(now=clock), request(20)
    assert found(scheduler, a, 8) == (None, False)
    clock.now = BLEND_WAIT_S
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    assert blending.blend.plan is None
    assert not caplog.messages
    clock.now = BLEND_WAIT_S + 0.1
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    assert caplog.messages == ["a is not blended: there are too few blocks"]
    assert scheduler.get_num_new_matched_tokens(a, 0) == (8, True), "what is exact is loaded"


def test_a_request_that_can_never_be_blended_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, a = Blending(room=None).scheduler(), request(20)
    assert found(scheduler, a, 8) == (None, False)
    assert caplog.messages == ["a is not blended: there are too few blocks"]


def test_what_is_found_and_saved_is_told_by_its_chunks() -> None:
    told: list[tuple[str, int, int]] = []
    scheduler = made(
        expect_chunks=lambda request, first, stop: told.append((request.request_id, first, stop))
    )
    a = request(41)
    assert found(scheduler, a, 16) == (16, True)
    assert told == [("a", 0, 2)]
    scheduler.update_state_after_alloc(a, (TABLE,), 16)
    a.num_computed_tokens = 16
    assert [save.request_id for save in step(scheduler, {"a": 25}, (TABLE,)).saves] == ["a"]
    assert told[1:] == [("a", 2, 5)]


def test_an_answer_that_nobody_awaits_is_passed_over() -> None:
    scheduler, a = new_scheduler(), request(20)
    scheduler.get_num_new_matched_tokens(a, 0)
    asked = step(scheduler)
    answer(scheduler, asked, 16)
    scheduler.update_state_after_alloc(a, (TABLE,), 0)
    answer(scheduler, asked, 16)
    scheduler.request_finished(a, None)
    answer(scheduler, asked, 16)
    assert not step(scheduler).loads


def test_every_request_of_a_step_is_looked_at() -> None:
    """Although those before it are not known, complete no chunk, have no blocks, or send nothing."""
    hands = {"c": RemoteDecode("t", "unix:///c"), "d": RemoteDecode("u", "unix:///d")}
    hands["e"] = RemoteDecode("v", "unix:///e")
    scheduler = made(handoff_of=lambda request: hands.get(request.request_id))
    scheduled = {"unknown": 8}
    for request_id, tokens in (("short", 4), ("b", 16), ("c", 4), ("e", 16), ("d", 16)):
        a = request(tokens if request_id != "c" else 16, request_id)
        scheduler.get_num_new_matched_tokens(a, 0)
        scheduler.update_state_after_alloc(a, (TABLE,), 0)
        scheduled[request_id] = tokens
    planned = scheduler.plan(scheduled, lambda request_id: None if request_id == "e" else ([*TABLE],))
    assert [save.request_id for save in planned.saves] == ["b", "d"]
    assert [(send.request_id, send.stop, send.last) for send in planned.sends] == [("d", 16, True)]


def test_blocks_of_fewer_bits_are_kept_to_their_request() -> None:
    kept: list[tuple[str, int]] = []
    private = SimpleNamespace(make_private=lambda request, first: kept.append((request.request_id, first)))
    scheduler, a = made(approximate=frozenset({"few"})), request(20)
    scheduler.bind(private)
    scheduler.get_num_new_matched_tokens(a, 0)
    answer(scheduler, step(scheduler), 16, tier="few")
    assert scheduler.get_num_new_matched_tokens(a, 0) == (16, True)
    assert kept == [("a", 0)]
