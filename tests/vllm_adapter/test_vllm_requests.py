"""A vLLM request's cache settings reach the scheduler and the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from test_vllm_scheduler import BLOCK, answer, new_scheduler, request, step
from vllm_rank import IDS, TABLE, Pair, Rank

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.settings import read_settings
from kvkit.adapters.vllm.step import RetainTask, SaveTask
from kvkit.settings import ConfigError
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

BLOCKS = ([1, 2, 3, 4, 5, 6],)


def scheduler_of(handoff: RemoteDecode | RemotePrefill | None = None, **wish: Any) -> Scheduler:
    """One whose requests all want this."""
    return new_scheduler(policy_of=lambda request: RequestPolicy(**wish), handoff_of=lambda request: handoff)


@pytest.mark.parametrize(
    ("limit", "computed", "asked", "loaded"), [(9, 0, 8, 8), (9, 4, 16, 8), (16, 0, 16, 16)]
)
def test_no_more_is_asked_for_and_loaded_than_a_request_wants(
    limit: int, computed: int, asked: int, loaded: int
) -> None:
    scheduler, a = scheduler_of(max_load_tokens=limit), request(40)
    assert scheduler.get_num_new_matched_tokens(a, computed) == (None, False)
    told = step(scheduler)
    (ask,) = told.lookups
    assert (len(ask.sequence.tokens), ask.policy) == (asked, DEFAULT_REQUEST_POLICY)
    answer(scheduler, told, asked)
    assert scheduler.get_num_new_matched_tokens(a, computed) == (loaded, True)


def test_a_request_that_wants_to_load_nothing_is_not_looked_up() -> None:
    scheduler, a = scheduler_of(max_load_tokens=BLOCK - 1), request(40)
    scheduler.on_new_request(a)
    assert scheduler.get_num_new_matched_tokens(a, 8) == (0, False)
    told = step(scheduler)
    assert (told.lookups, told.prefetches) == ([], [])


def test_what_is_handed_to_a_request_is_loaded_whatever_it_wants_of_tiers() -> None:
    scheduler, a = scheduler_of(RemotePrefill("t", computed=True), max_load_tokens=0), request(15)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
    (ask,) = step(scheduler).lookups
    assert (ask.transfer, len(ask.sequence.tokens)) == ("t", 15)


def test_nothing_is_brought_near_for_a_request_that_names_tiers() -> None:
    for wish in ({"load_from": ("disk",)}, {"store_to": ()}):
        scheduler, a = scheduler_of(**wish), request(40)
        scheduler.on_new_request(a)
        assert step(scheduler).prefetches == []
        assert scheduler.get_num_new_matched_tokens(a, 0) == (None, False)
        (ask,) = step(scheduler).lookups
        assert ask.policy == RequestPolicy(**wish)


def test_what_a_request_wants_goes_with_what_is_saved() -> None:
    wish = RequestPolicy(store_to=("disk",), keep_s=60)
    scheduler, a = scheduler_of(store_to=("disk",), keep_s=60.0), request(16)
    scheduler.update_state_after_alloc(a, BLOCKS, 0)
    first = step(scheduler, {"a": 16}, BLOCKS)
    assert [save.policy for save in first.saves] == [wish]
    (retain,) = first.retains
    assert retain.policy == wish, "what it hits is not saved, and is kept all the same"
    assert retain.sequence.tokens.tolist() == a.tokens
    a.tokens += range(9)
    a.num_computed_tokens = 24
    assert scheduler.request_finished(a, BLOCKS)
    last = step(scheduler)
    assert ([save.policy for save in last.saves], last.retains) == ([wish], [])


def test_of_a_request_that_is_not_to_be_stored_nothing_is_saved_but_all_is_sent() -> None:
    scheduler, a = scheduler_of(RemoteDecode("t", "unix:///d"), store_to=()), request(16)
    scheduler.update_state_after_alloc(a, BLOCKS, 0)
    planned = step(scheduler, {"a": 16}, BLOCKS)
    assert (planned.saves, planned.retains) == ([], [])
    assert [send.stop for send in planned.sends] == [16]
    plain, b = scheduler_of(store_to=()), request(24)
    plain.update_state_after_alloc(b, BLOCKS, 0)
    assert not step(plain, {"a": 16}, BLOCKS).saves
    b.num_computed_tokens = 24
    b.tokens += range(2)
    assert not plain.request_finished(b, BLOCKS)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path, "async")
    yield made
    made.worker.close()


def test_a_rank_stores_to_and_loads_from_the_tiers_that_a_request_names(rank: Rank) -> None:
    rank.fill(3.0)
    rank.step(saves=[SaveTask("a", Sequence(IDS), 0, (TABLE,), RequestPolicy(store_to=("disk",)))])
    rank.worker.end_saves()
    rank.worker.cache.flush()
    assert (rank.stored("memory"), rank.stored("disk")) == (0, 3)
    for number, (tiers, found) in enumerate([(("memory",), 0), (("disk", "memory"), len(IDS))]):
        wish = RequestPolicy(load_from=tiers)
        rank.step(lookups=[LookupRequest("a", number, Sequence(IDS), policy=wish)], idle=True)
        assert rank.heard() == found


def test_a_rank_keeps_what_a_request_hits(rank: Rank) -> None:
    rank.save()
    memory = rank.worker.cache.tiers["memory"]
    names = rank.worker.cache.chunks(IDS).names
    rank.step(retains=[RetainTask(Sequence(IDS), RequestPolicy(priority=80))])
    assert {memory._state.entries[name].priority for name in names} == {80}  # type: ignore[attr-defined]


def test_what_was_sent_for_a_request_is_found_whatever_tiers_it_names(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    try:
        pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
        wish = RequestPolicy(load_from=("disk",))
        asked = LookupRequest("a", 1, Sequence(IDS), transfer="t", computed_remotely=True, policy=wish)
        pair.decode.step(lookups=[asked], idle=True)
        assert pair.decode.heard() == len(IDS)
    finally:
        pair.close()


TIERS: dict[str, Any] = {"memory": {"capacity": "1MiB"}, "disk": {"url": "/nowhere"}}


def test_requests_may_name_the_tiers_of_the_policy_unless_others_are_set() -> None:
    kvkit: dict[str, Any] = {"tiers": TIERS, "policy": {"store_to": ["disk"]}}
    settings, _ = read_settings({"kvkit": kvkit})
    assert (settings.requests.load_from, settings.requests.store_to) == (("memory", "disk"), ("disk",))
    settings, _ = read_settings({"kvkit": kvkit, "requests": {"load_from": [], "store_to": ["memory"]}})
    assert (settings.requests.load_from, settings.requests.store_to) == ((), ("memory",))
    with pytest.raises(
        ConfigError, match=r"requests\.store_to='nfs': no such tier; the tiers are memory, disk"
    ):
        read_settings({"kvkit": kvkit, "requests": {"store_to": ["nfs"]}})
