"""Workers of the vLLM connector hand prompts off to others, step by step, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm_rank import BLOCK, BLOCKS, CHUNK, DEADLINE_S, IDS, OTHER, TABLE, Pair, Rank, piece

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Lora, Sequence
from kvkit.adapters.vllm.handoff.send_executor import SendExecutor
from kvkit.adapters.vllm.step import LoadTask, SaveTask, SendTask, StepMetadata
from kvkit.handoff.protocol.states import Phase
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Lease, release_all
from kvkit.tiers.base import OnComplete, TierError
from kvkit.tiers.testing.contract import record_names


@pytest.fixture(params=["async", "sync"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, request.param)
    yield made
    made.close()


def test_room_is_asked_for_before_anything_is_computed(pair: Pair) -> None:
    step = StepMetadata(1, sends=[pair.send()])
    pair.prefill.fill(3.0)
    pair.prefill.worker.begin_step(step)
    wait_for(lambda: pair.receiver.transfers() == {"t": Phase.RECEIVING})
    pair.prefill.worker.start_saves(step)
    pair.finish(*pair.prefill.worker.finish_requests({"a"}))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.held) == (Phase.COMMITTED, 3)
    assert pair.decode.found() == len(IDS)


def test_what_is_sent_is_not_handed_off_once_more_when_it_is_saved(pair: Pair) -> None:
    """A prefill engine's policy names `handoff`, where the transfer waits for these very records."""
    pair.prefill.step(sends=[pair.send(CHUNK, last=False)])
    while pair.prefill.stored("handoff") == 0:  # until there is room, and the first chunk is on its way
        pair.prefill.step(idle=True)
    pair.prefill.save(first=1)
    assert (pair.prefill.stored("memory"), pair.prefill.stored("handoff")) == (2, 1)
    pair.prefill.step(finished=("a",))


@pytest.mark.parametrize(
    ("sequence", "blocks"),
    [
        (Sequence(IDS), [1, 2, 3, -1, 5, 6]),
        (Sequence(IDS), TABLE[:5]),
        (Sequence(IDS, Lora(1, "a/b")), TABLE),
    ],
    ids=["gap", "short", "adapter"],
)
def test_what_is_not_whole_or_not_known_is_not_sent(
    pair: Pair, sequence: Sequence, blocks: list[int]
) -> None:
    """And its pages come free."""
    send = SendTask("a", "t", pair.address, sequence, 0, len(IDS), (blocks,), last=True)
    pair.finish(*pair.prefill.step(("a",), sends=[send]))
    wait_for(lambda: pair.receiver.transfers() == {})
    assert pair.decode.found() == 0


def test_nothing_that_rests_on_a_failed_load_is_sent(tmp_path: Path) -> None:
    """The decode engine hears at once that it has to compute, and the prefill engine gets its blocks back."""
    pair = Pair(tmp_path, "sync")
    load = LoadTask("b", 1, 0, CHUNK, ([7, 8],))  # nobody has found that
    _, _, sent = pair.prefill.step(loads=[load], sends=[pair.send()], finished=("a",))
    assert sent == {"a"}
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.reason) == (None, "cancelled by its sender")
    pair.close()


def test_who_hears_nothing_of_a_transfer_that_should_be_under_way_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the prefill engine has not answered, it may not have begun: that is waited for."""
    monkeypatch.setattr("kvkit.adapters.engine.lookups.ALLOCATION_WAIT_S", 0.0)
    pair = Pair(tmp_path, handoff_timeout_s=600.0)
    for computed_remotely, found in ((True, 0), (False, len(IDS))):
        ask = LookupRequest("a", 1, Sequence(IDS), transfer="t", computed_remotely=computed_remotely)
        pair.decode.step(lookups=[ask], idle=True)
        if not computed_remotely:
            assert pair.decode.worker.report() is None
            pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
        assert pair.decode.heard() == found
    pair.close()


def test_a_step_without_work_waits_for_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkit.adapters.vllm.worker.IDLE_WAIT_S", DEADLINE_S)
    pair = Pair(tmp_path)
    ask = LookupRequest("a", 1, Sequence(IDS), transfer="t")
    found: list[dict[str, Phase]] = []

    def step() -> None:
        pair.decode.step(lookups=[ask], idle=True)
        found.append(pair.receiver.transfers())

    thread = threading.Thread(target=step)
    thread.start()
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    thread.join(DEADLINE_S)
    assert found == [{"t": Phase.COMMITTED}]
    report = pair.decode.worker.report()
    assert report is not None, "and for the lookup after it"
    assert [answer.tokens for answer in report.answers] == [len(IDS)]
    pair.close()


def test_what_has_come_is_known_at_once(tmp_path: Path) -> None:
    """Whatever other tiers there are: memory holds all that they could."""
    pair = Pair(tmp_path)
    worker, cache = pair.decode.worker, pair.decode.worker.cache
    for tensor in pair.prefill.pages.values():
        tensor.copy_(torch.rand(tensor.shape))
    ask = LookupRequest("a", 1, Sequence(IDS), transfer="t", computed_remotely=True)
    assert "disk" in cache.policy.retrieve_from
    assert worker.lookup_inline(ask) is None, "it has not come"
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    pair.receiver.wait("t", DEADLINE_S)
    longer = Sequence(np.concatenate([IDS, IDS]))
    assert worker.lookup_inline(replace(ask, sequence=longer)) is None, "the disk may hold more"
    assert worker.lookup_inline(replace(ask, documents=(Sequence(IDS),))) is None
    found = worker.lookup_inline(ask)
    assert found == LookupAnswer("a", 1, 0, len(IDS), (("handoff", len(IDS)),))
    assert worker.report() is None, "it is told once"
    assert pair.decode.load(LoadTask("a", 1, 0, len(IDS), (OTHER,)))
    for name, tensor in pair.decode.pages.items():
        assert torch.equal(tensor[OTHER], pair.prefill.pages[name][TABLE])
    assert pair.receiver.transfers() == {}
    pair.close()


def test_what_nobody_wants_makes_room(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert status.phase is Phase.COMMITTED
    pair.decode.step(released_transfers=["t", "unknown"])
    assert pair.receiver.transfers() == {}
    assert pair.receiver.arena.free == pair.receiver.arena.slots
    pair.close()


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK + 1, 2 * BLOCK, CHUNK + BLOCK + 3, 2 * CHUNK])
def test_a_prompt_arrives_whatever_its_length(tmp_path: Path, tokens: int) -> None:
    """Whole chunks, whole blocks behind them, and a part of one."""
    pair = Pair(tmp_path)
    for page, tensor in enumerate(pair.prefill.pages.values()):
        tensor[:] = torch.arange(tensor.numel()).reshape(tensor.shape) + 1.0 + 1e5 * page
    sequence, blocks = Sequence(IDS[:tokens]), -(-tokens // BLOCK)
    send = SendTask("a", "t", pair.address, sequence, 0, tokens, (TABLE[:blocks],), last=True)
    pair.finish(*pair.prefill.step(("a",), sends=[send]))
    pair.decode.step(
        lookups=[LookupRequest("a", 1, sequence, transfer="t", computed_remotely=True)], idle=True
    )
    assert pair.decode.heard() == tokens
    into = [11, 10, 9, 8, 7, 6][:blocks]
    assert pair.decode.load(LoadTask("a", 1, 0, tokens, (into,)))
    for ours, theirs in zip(pair.prefill.pages.values(), pair.decode.pages.values(), strict=True):
        assert torch.equal(ours[TABLE[:blocks]], theirs[into])
        assert not theirs[[block for block in range(BLOCKS) if block not in into]].any()
    assert pair.receiver.transfers() == {}
    pair.close()


def test_layers_are_packed_as_they_are_computed_and_take_no_slot(tmp_path: Path) -> None:
    """Whole chunks, and a block behind them. What the pages hold later does not matter."""
    tokens = 2 * CHUNK + 3
    pair = Pair(tmp_path)
    worker, staging = pair.prefill.worker, pair.prefill.worker.cache.staging
    taken = staging.acquire(staging.slots, 0.0)
    send = piece(pair, "a", IDS[:tokens], 0, tokens)
    step = StepMetadata(1, sends=[send])
    worker.begin_step(step)
    wait_for(lambda: pair.prefill.sender.transfers() == {"of-a": "sending"})
    arena = pair.receiver.arena

    def filling(packed: bytes) -> bool:
        return sum(packed in slot.tobytes() for slot in arena.arrays) == arena.slots - arena.free

    for number, (name, tensor) in enumerate(pair.prefill.pages.items()):
        tensor.fill_(3.0 + number)
        worker.layer_computed(name)
        packed = np.full(8, 3.0 + number, np.float32).tobytes()
        wait_for(lambda packed=packed: filling(packed))
        tensor.fill_(-1.0)
    assert pair.decode.found() == 0
    worker.start_saves(step)
    pair.finish(*worker.finish_requests({"a"}))
    release_all(taken)
    ask = LookupRequest("a", 1, send.sequence, transfer="of-a", computed_remotely=True)
    pair.decode.step(lookups=[ask], idle=True)
    assert pair.decode.heard() == tokens
    assert pair.decode.load(LoadTask("a", 1, 0, tokens, ([7, 8, 9, 10, 11],)))
    for number, tensor in enumerate(pair.decode.pages.values()):
        assert (tensor[7:] == 3.0 + number).all()
        assert not tensor[:7].any()
    assert pair.receiver.transfers() == {}
    pair.close()


def test_what_was_computed_before_there_was_room_is_packed_when_there_is(tmp_path: Path) -> None:
    """Before that it is not known what the receiver lacks."""
    pair = Pair(tmp_path)
    worker, slots = pair.prefill.worker, pair.receiver.arena.slots
    first = pair.prefill.sender.open("first", pair.address, record_names(slots), DEADLINE_S)
    assert first.admitted.result(DEADLINE_S) == slots
    pair.prefill.fill(3.0)
    step = StepMetadata(1, sends=[pair.send()])
    worker.begin_step(step)
    for name in pair.prefill.pages:
        worker.layer_computed(name)
    (sends,) = [found for found in worker.capabilities if isinstance(found, SendExecutor)]
    sends.prompts._packers.submit(int).result(DEADLINE_S)
    pair.prefill.sender.cancel("first")
    worker.start_saves(step)
    pair.finish(*worker.finish_requests({"a"}))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.held) == (Phase.COMMITTED, 3)
    assert pair.decode.found() == len(IDS)
    pair.close()


@pytest.mark.parametrize("why", ["abort", "failed load", "wanted back", "given up"])
def test_pages_of_a_step_that_is_not_sent_are_read_no_more(tmp_path: Path, why: str) -> None:
    """No slot of the receiver is lost, and it takes nothing for a record."""
    pair = Pair(tmp_path, "sync")
    worker = pair.prefill.worker
    load = LoadTask("b", 1, 0, CHUNK, ([7, 8],))  # nobody has found that
    step = StepMetadata(1, sends=[pair.send()], loads=[load] if why == "failed load" else [])
    worker.begin_step(step)
    wait_for(lambda: pair.prefill.sender.transfers() == {"t": "sending"})
    worker.start_loads(step)
    worker.layer_computed("layers.0")
    if why == "given up":
        pair.receiver.release("t", "given up")
        wait_for(lambda: pair.prefill.sender.transfers() == {})
    if why != "abort":
        worker.start_saves(step)
    if why == "wanted back":
        worker.end_reads()
    pair.finish(*worker.finish_requests({"a"}))
    pair.prefill.fill(7.0)
    wait_for(lambda: pair.receiver.transfers() in ({}, {"t": Phase.COMMITTED}))
    assert pair.decode.found() in (0, len(IDS) if why == "wanted back" else 0)
    pair.receiver.release("t")
    wait_for(lambda: pair.receiver.arena.free == pair.receiver.arena.slots)
    pair.receiver.check_integrity()
    pair.close()


class FullDecode:
    """A decode engine without room, and a prefill engine of a model with windows that goes on meanwhile."""

    def __init__(self, folder: Path, **more: Any) -> None:
        sizes = {"block_size": BLOCK, "sliding_window": CHUNK - BLOCK + 1, "num_kv_heads": 2, "head_size": 8}
        spec = SlidingWindowSpec(**sizes, dtype=torch.float32)
        self.pair = Pair(folder, specs={"layers.0": spec, "layers.1": spec}, **more)
        slots = self.pair.receiver.arena.slots
        others = self.pair.prefill.sender.open("others", self.pair.address, record_names(slots), DEADLINE_S)
        assert others.admitted.result(DEADLINE_S) == slots
        self.model = {name: torch.rand(3, *tensor.shape) for name, tensor in self.pair.prefill.pages.items()}

    def compute(self) -> None:
        """A chunk a step, of which each writes to all blocks; a block of the window is gone by then."""
        for number in range(3):
            send = piece(self.pair, "a", IDS, number * CHUNK, (number + 1) * CHUNK)
            step = StepMetadata(number, sends=[replace(send, blocks=([-1, *send.blocks[0][1:]],))])
            self.pair.prefill.run(step, forward=lambda number=number: self._write(number))
        self.pair.prefill.step()
        self.pair.prefill.fill(-1.0)

    def _write(self, number: int) -> None:
        for name, tensor in self.pair.prefill.pages.items():
            tensor.copy_(self.model[name][number])

    def make_room(self) -> int:
        """What of the prompt is found when there is some, and the prefill engine is done."""
        pair = self.pair
        pair.prefill.sender.cancel("others")
        pair.finish(*pair.prefill.step(("a",)))
        ask = LookupRequest("a", 1, Sequence(IDS), transfer="of-a", computed_remotely=True)
        pair.decode.step(lookups=[ask], idle=True)
        return pair.decode.heard()


@pytest.mark.parametrize("send", ["async", "sync"])
def test_what_waits_for_room_outlives_its_blocks(tmp_path: Path, send: str) -> None:
    """Windows that move on leave them to others before the receiver has room for the prompt."""
    full = FullDecode(tmp_path, send=send)
    full.compute()
    assert full.make_room() == len(IDS)
    assert full.pair.decode.load(LoadTask("a", 1, 0, len(IDS), (OTHER,)))
    for name, tensor in full.pair.decode.pages.items():
        for block in range(len(TABLE)):
            expected = full.model[name][block * BLOCK // CHUNK, TABLE[block]]
            gone = block * BLOCK % CHUNK == 0
            assert torch.equal(tensor[OTHER[block]], torch.zeros_like(expected) if gone else expected)
    assert full.pair.receiver.transfers() == {}
    full.pair.close()


def test_what_waits_for_room_takes_no_more_memory_than_slots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The decode engine hears that it has to compute, and the prefill engine gets its blocks back."""
    full = FullDecode(tmp_path)
    staging = full.pair.prefill.worker.cache.staging
    staging.slots, slots = 2, staging.slots
    full.compute()
    staging.slots = slots
    assert "a: not handed off: the engine needs its pages back too soon" in caplog.messages
    assert full.make_room() == 0
    full.pair.close()


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_load_in_parts_ends_where_a_record_is_damaged(tmp_path: Path, damaged: int) -> None:
    """Whatever the other part brought."""
    pair = Pair(tmp_path)
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    pair.decode.step(
        lookups=[LookupRequest("a", 1, Sequence(IDS), transfer="t", computed_remotely=True)], idle=True
    )
    assert pair.decode.heard() == len(IDS)
    lease = pair.receiver.borrow(pair.receiver.records()[damaged][0])
    assert lease is not None
    with lease:
        lease.array[lease.used // 2] ^= 1
    assert not pair.decode.load(LoadTask("a", 1, 0, len(IDS), (TABLE,)))
    assert pair.decode.worker.invalid_blocks() == set(TABLE[damaged * CHUNK // BLOCK :])
    assert pair.receiver.transfers() == {}
    pair.close()


def test_the_end_of_a_prompt_is_loaded_after_blocks_that_the_engine_has(tmp_path: Path) -> None:
    """Also where these reach into the chunk that is not filled."""
    tokens = CHUNK + BLOCK + 3
    pair = Pair(tmp_path)
    pair.prefill.fill(3.0)
    sequence = Sequence(IDS[:tokens])
    pair.finish(*pair.prefill.step(("a",), sends=[piece(pair, "a", sequence.tokens, 0, tokens)]))
    ask = LookupRequest("a", 1, sequence, CHUNK + BLOCK, transfer="of-a", computed_remotely=True)
    pair.decode.step(lookups=[ask], idle=True)
    assert pair.decode.heard() == tokens
    assert pair.decode.load(LoadTask("a", 1, CHUNK + BLOCK, tokens, ([-1, 8],)))
    for tensor in pair.decode.pages.values():
        assert (tensor[8] == 3.0).all()
        assert not tensor[[block for block in range(BLOCKS) if block != 8]].any()
    pair.close()


def test_a_prompt_of_more_records_than_are_put_at_a_time_arrives_whole(pair: Pair) -> None:
    """What is still on its way when the last page has been copied comes, too."""
    chunks = pair.receiver.arena.slots
    tokens = np.arange(chunks * CHUNK, dtype=np.int32)
    table = (TABLE * chunks)[: chunks * CHUNK // BLOCK]
    send = SendTask("a", "t", pair.address, Sequence(tokens), 0, len(tokens), (table,), last=True)
    pair.finish(*pair.prefill.step(("a",), sends=[send]))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.held) == (Phase.COMMITTED, chunks)


def test_what_cannot_be_put_is_missing_and_the_rest_arrives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[str] = []
    put = pair.prefill.sender.put

    def put_but_one(names: list[str], leases: list[Lease], on_complete: OnComplete) -> None:
        for name, lease in zip(names, leases, strict=True):
            puts.append(name)
            if len(puts) == 2:
                on_complete(name, TierError("no second record is sent"))
            else:
                put([name], [lease], on_complete)

    monkeypatch.setattr(pair.prefill.sender, "put", put_but_one)
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.held) == (Phase.COMMITTED, 2)
    assert pair.decode.found() == CHUNK


def test_a_step_that_waits_returns_when_all_it_computed_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkit.handoff.prompt.ADMISSION_S", DEADLINE_S)
    pair = Pair(tmp_path, send="sync")
    pair.prefill.step(sends=[piece(pair, "a", IDS, 0, CHUNK)])
    assert pair.prefill.stored("handoff") == 1
    _, _, sent = pair.prefill.step(("a",), sends=[piece(pair, "a", IDS, CHUNK, len(IDS))])
    assert sent == {"a"}, "its blocks are free at once"
    assert pair.receiver.transfers() == {"of-a": Phase.COMMITTED}
    pair.close()


def test_a_step_that_waits_does_not_wait_for_room_that_its_own_requests_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1, B1, A2, where B has no room before A is used, and A is used when it has been answered."""
    pair = Pair(tmp_path, send="sync", handoff_timeout_s=600.0)
    others = record_names(pair.receiver.arena.slots - 5)
    assert pair.prefill.sender.open("others", pair.address, others, DEADLINE_S).admitted.result(DEADLINE_S)
    monkeypatch.setattr("kvkit.handoff.prompt.ADMISSION_S", DEADLINE_S)
    pair.prefill.step(sends=[piece(pair, "a", IDS, 0, CHUNK)])
    monkeypatch.setattr("kvkit.handoff.prompt.ADMISSION_S", 0.0)
    pair.prefill.step(sends=[piece(pair, "b", IDS + 1000, 0, CHUNK)])
    pair.prefill.step(sends=[piece(pair, "a", IDS, CHUNK, len(IDS))])
    assert pair.receiver.transfers()["of-a"] is Phase.COMMITTED
    wait_for(lambda: pair.receiver.transfers().get("of-b") is Phase.WAITING)
    pair.receiver.release("of-a")
    pair.finish(*pair.prefill.step(("b",), sends=[piece(pair, "b", IDS + 1000, CHUNK, len(IDS))]))
    status = pair.receiver.wait("of-b", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.held) == (Phase.COMMITTED, 3)
    pair.prefill.sender.cancel("others")
    pair.close()


def test_a_step_without_work_waits_for_room_at_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    slots = pair.receiver.arena.slots
    other = pair.prefill.sender.open("other", pair.address, record_names(slots), DEADLINE_S)
    assert other.admitted.result(DEADLINE_S) == slots
    pair.prefill.step(("a",), sends=[pair.send()])
    wait_for(lambda: pair.receiver.transfers().get("t") is Phase.WAITING)
    monkeypatch.setattr("kvkit.adapters.vllm.worker.IDLE_WAIT_S", DEADLINE_S)
    found: list[dict[str, Phase]] = []
    ends: list[tuple[set[str], set[str], set[str]]] = []

    def step() -> None:
        ends.append(pair.prefill.step(idle=True))
        found.append(pair.receiver.transfers())

    thread = threading.Thread(target=step)
    thread.start()
    pair.prefill.sender.cancel("other")
    thread.join(DEADLINE_S)
    assert found == [{"t": Phase.RECEIVING}]
    monkeypatch.undo()
    pair.finish(*ends[0])
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.held) == (Phase.COMMITTED, 3)
    pair.close()


@pytest.fixture(params=[1, 2], ids=["one group", "two groups"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Engines that read the same pool, of a model with so many groups of layers."""
    made = Pair(tmp_path, groups=request.param, pool=tmp_path / "pool")
    yield made
    made.close()


def groups_of(pair: Pair) -> int:
    return len(pair.prefill.worker.cache.layout.groups)


def save_beginning(rank: Rank, chunks: int, kept: str) -> None:
    """Store the first chunks of IDS, and have them in one tier alone."""
    rank.fill(3.0)
    rank.step(saves=[SaveTask("b", Sequence(IDS[: chunks * CHUNK]), 0, (TABLE,))])
    rank.worker.end_saves()
    rank.worker.cache.flush()
    for name in ("memory", "disk", "pool"):
        if name != kept:
            rank.worker.cache.clear(name)


def handed(pair: Pair) -> int:
    """Chunks that come to decode when prefill sends IDS; all of these can then be had there."""
    put = pair.prefill.stored("handoff")
    pair.prefill.fill(3.0)
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert status.phase is Phase.COMMITTED
    came = pair.receiver.arena.slots - pair.receiver.arena.free
    assert came == pair.prefill.stored("handoff") - put, "nothing is copied that is not sent"
    pair.decode.step(
        lookups=[LookupRequest("a", 1, Sequence(IDS), transfer="t", computed_remotely=True)], idle=True
    )
    assert pair.decode.heard() == len(IDS)
    chunks, rest = divmod(came, groups_of(pair))
    assert not rest
    return chunks


def test_prefill_sends_nothing_that_a_shared_tier_holds(pool: Pair) -> None:
    save_beginning(pool.decode, 2, kept="pool")
    assert handed(pool) == 1


def test_prefill_sends_what_it_alone_holds(pool: Pair) -> None:
    save_beginning(pool.prefill, 2, kept="memory")
    assert handed(pool) == 3


def test_prefill_sends_nothing_that_decode_said_it_has(pool: Pair) -> None:
    save_beginning(pool.decode, 2, kept="memory")
    assert handed(pool) == 1


def test_decode_stores_nothing_that_the_pool_has(pool: Pair) -> None:
    save_beginning(pool.prefill, 2, kept="pool")
    assert handed(pool) == 1
    pool.decode.save()
    groups = groups_of(pool)
    assert [pool.decode.stored(tier) // groups for tier in ("memory", "disk", "pool")] == [3, 3, 1]
    pool.decode.save()
    assert [pool.decode.stored(tier) // groups for tier in ("memory", "disk", "pool")] == [3, 3, 1]
    assert pool.decode.stored("handoff") == 0


def test_decode_writes_back_what_the_pool_held_and_not_what_it_was_sent(pool: Pair) -> None:
    save_beginning(pool.decode, 2, kept="pool")
    assert handed(pool) == 1
    assert pool.decode.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)))
    pool.decode.worker.cache.flush()
    written_back = pool.decode.worker.cache.counts().written_back_records
    assert +written_back == {"memory": 2 * groups_of(pool)}
