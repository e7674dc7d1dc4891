"""The workers' side of the vLLM connector over real tiers and pages, step by step, without an engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from servers import adjacent_ports
from vllm.v1.kv_cache_interface import FullAttentionSpec
from waiting import wait_for

from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.settings import read_settings
from kvkit.adapters.vllm.step import (
    Ask,
    LoadTask,
    Lora,
    PrefetchTask,
    SaveTask,
    SendTask,
    Sequence,
    StepMetadata,
    TokenIds,
)
from kvkit.adapters.vllm.worker import Worker
from kvkit.handoff.protocol.states import Phase
from kvkit.handoff.sender import Sender
from kvkit.handoff.tier import HandoffTier
from kvkit.moving.sequence import UnknownModel
from kvkit.tiers.testing.contract import record_names
from kvkit.tiers.testing.faulty import Fault, FaultyTier, Plan
from kvkit.workers import Transfer

BLOCKS, BLOCK, CHUNK = 12, 8, 16
SPECS = [
    FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=size, dtype=torch.float32)
    for size in (8, 16)
]
IDS = np.arange(3 * CHUNK, dtype=np.int32)
TABLE = [1, 2, 3, 4, 5, 6]


class Rank:
    """A worker with pages, and the steps that it was told."""

    def __init__(
        self,
        folder: Path,
        load: str,
        handoff: dict[str, Any] | None = None,
        served: tuple[str, ...] | None = None,
        groups: int = 1,
        pool: Path | None = None,
        ranks: tuple[int, int] = (0, 1),
        server: dict[str, Any] | None = None,
        memory: str = "1MiB",
        loras: Loras | None = None,
        **more: Any,
    ) -> None:
        tiers: dict[str, Any] = {"memory": {"capacity": memory}, "disk": {"url": f"file://{folder}"}}
        if pool is not None:
            tiers["pool"] = {"url": f"file://{pool}", "scope": "shared"}
        kvkit = {"chunk_tokens": CHUNK, "staging": "1MiB", "tiers": tiers, "handoff": handoff}
        kvkit["server"] = server or {}
        number, world = ranks
        settings, config = read_settings({"kvkit": kvkit, "load": load} | more)
        specs = {f"layers.{2 * group + i}": SPECS[group] for group in range(groups) for i in range(2)}
        self.pages = {name: torch.zeros(BLOCKS, 2, BLOCK, 2 * spec.head_size) for name, spec in specs.items()}
        self.worker = Worker(
            config,
            settings,
            [specs],
            BLOCKS,
            lambda layout: config.namespace(layout, model="m", dtype="float32", rank=number, world=world),
            tells_stores=False,
            served=served,
            loras=loras,
        )
        self.worker.open(self.pages)
        self.waits = load != "async"
        self.number = 0

    @property
    def sender(self) -> Sender:
        """Its side of handoff."""
        handoff = self.worker.cache.tiers["handoff"]
        assert isinstance(handoff, HandoffTier)
        assert handoff.sender is not None
        return handoff.sender

    def wrap(self, tier: str, plan: Plan) -> FaultyTier:
        """Have a tier meet faults from now on."""
        made = FaultyTier(self.worker.cache.tiers[tier], plan)
        self.worker.cache.tiers[tier] = made
        return made

    def stored(self, tier: str) -> int:
        """Chunks that a tier was given."""
        return self.worker.cache.counts().stored_records[tier]

    def step(self, finished: tuple[str, ...] = (), **told: Any) -> tuple[set[str], set[str], set[str]]:
        """One step; what `finish` returns."""
        self.number += 1
        step = StepMetadata(self.number, **told)
        self.worker.settle()
        self.worker.begin(step)
        self.worker.start_loads(step)
        self.worker.save(step)
        return self.worker.finish(set(finished))

    def fill(self, value: float) -> None:
        for tensor in self.pages.values():
            tensor.fill_(value)

    def save(self, first: int = 0, **told: Any) -> None:
        """Save the three chunks of IDS from `first` on."""
        blocks = TABLE[first * CHUNK // BLOCK :]
        self.step(saves=[SaveTask("a", Sequence(IDS), first, (blocks,))], **told)
        self.worker.settle()
        self.worker.cache.flush()

    def found(self, **told: Any) -> int:
        """Tokens of IDS that a lookup finds; the answer is number 1, for request a."""
        self.step(asks=[Ask("a", 1, Sequence(IDS))], idle=True, **told)
        return self.heard(**told)

    def heard(self, **told: Any) -> int:
        """Tokens that the answer under way finds."""
        while (report := self.worker.report()) is None:
            self.step(idle=True, **told)
        (answer,) = report.answers
        return answer.tokens

    def load(self, load: LoadTask, **told: Any) -> bool:
        """Load what was found; whether all of it came."""
        received, failed, _ = self.step(loads=[load], **told)
        while self.waits is False and not received:
            received, failed, _ = self.step(idle=True)
        report = self.worker.report()
        short = report is not None and report.failed == ["a"]
        assert received == (set() if self.waits else {"a"})
        assert failed == ({"a"} if short and not self.waits else set())
        assert report is None or report.failed_step == (self.number if self.waits else 0)
        return not short


@pytest.fixture(params=["async", "sync", "layerwise"])
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path, request.param)
    yield made
    made.worker.close()


def test_what_was_saved_is_loaded_into_other_blocks(rank: Rank) -> None:
    rank.fill(3.0)
    rank.save()
    rank.fill(0.0)
    assert rank.found() == len(IDS)
    assert rank.load(LoadTask("a", 1, BLOCK, 5 * BLOCK, ([-1, 7, 8, 9, 10],)))
    assert rank.worker.invalid_blocks() == set()
    for tensor in rank.pages.values():
        assert bool((tensor[7:11] == 3.0).all())
        assert bool((tensor[:7] == 0.0).all())
        assert bool((tensor[11:] == 0.0).all())


def test_nothing_that_rests_on_a_failed_load_is_saved(rank: Rank, tmp_path: Path) -> None:
    """Where steps wait for their loads: none is saved until the scheduler has heard of the failure."""
    rank.fill(3.0)
    rank.save()
    assert rank.found() == len(IDS)
    rank.worker.cache.clear("memory")
    for file in tmp_path.rglob("c.*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    save = SaveTask("b", Sequence(IDS + 1000), 0, (TABLE,))
    stored = rank.worker.cache.counts().stored_records["disk"]

    def saved() -> int:
        rank.worker.settle()
        rank.worker.cache.flush()
        return rank.worker.cache.counts().stored_records["disk"] - stored

    assert not rank.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)), saves=[save])
    assert rank.worker.invalid_blocks() == {7, 8, 9, 10, 11, 6}
    assert saved() == (0 if rank.waits else 3)
    failed_step = rank.number if rank.waits else 0
    rank.step(saves=[save], heard=failed_step - 1 if rank.waits else 0)
    assert saved() == (0 if rank.waits else 3)
    rank.step(saves=[save], heard=failed_step)
    assert saved() == 3


@pytest.mark.parametrize("blocks", [[1, 2, -1, 4, 5, 6], [1, 2, 3, -1, 5, 6], [1, 2, 3]])
def test_a_chunk_that_lacks_a_block_is_not_stored(rank: Rank, blocks: list[int]) -> None:
    """A padded or a short table: the record would have zeros under the name of the whole chunk."""
    rank.fill(3.0)
    rank.step(saves=[SaveTask("a", Sequence(IDS), 0, (blocks,))])
    rank.worker.settle()
    rank.worker.cache.flush()
    assert (rank.stored("memory"), rank.stored("disk")) == (1, 1)
    assert rank.found() == CHUNK
    rank.save()
    assert rank.found() == len(IDS), "and is stored once it is there"


def test_nothing_of_an_adapter_that_is_not_known_is_stored_or_found(rank: Rank) -> None:
    nobody = Sequence(IDS, Lora(1, "org/adapter"))
    rank.step(saves=[SaveTask("a", nobody, 0, (TABLE,))])
    rank.worker.settle()
    rank.worker.cache.flush()
    assert (rank.stored("memory"), rank.stored("disk")) == (0, 0)
    rank.step(asks=[Ask("a", 1, nobody)], idle=True)
    assert rank.heard() == 0


def test_a_load_of_what_was_never_found_is_none(rank: Rank) -> None:
    assert not rank.load(LoadTask("a", 1, 0, CHUNK, ([7, 8],)))
    assert rank.worker.invalid_blocks() == {7, 8}


def test_a_later_epoch_finds_only_its_own(rank: Rank) -> None:
    rank.save()
    assert rank.found() == len(IDS)
    assert rank.found(epoch="later") == 0
    rank.save(epoch="later")
    assert rank.found(epoch="later") == len(IDS)


def test_a_query_is_about_what_a_request_would_find_now(tmp_path: Path) -> None:
    """By the model's name and salt of requests; what it asks is counted apart."""
    files = tmp_path / "adapter"
    files.mkdir()
    (files / "adapter_model.safetensors").write_bytes(b"what it holds")
    rank = Rank(tmp_path / "kv", "async", served=("base", "/models/base"), loras=Loras("float32"))
    cache = rank.worker.cache

    def held(model: str | None = None, salt: str = "") -> int:
        return cache.query(IDS, cache.space_of(model, salt)).tokens

    rank.save()
    adapter = Sequence(IDS, Lora(1, str(files), "adapter"), "tenant")
    with pytest.raises(UnknownModel, match=r"model = .adapter.: neither served nor an adapter"):
        held("adapter")
    rank.step(saves=[SaveTask("b", adapter, 0, (TABLE,))])
    rank.worker.settle()
    cache.flush()
    before = cache.counts()
    assert [held(), held("base"), held("/models/base")] == [len(IDS)] * 3
    assert [held(salt="tenant"), held("adapter")] == [0, 0]
    assert held("adapter", "tenant") == len(IDS)
    rank.step(epoch="later")
    assert [held(), held("base"), held("adapter", "tenant")] == [0, 0, 0]
    assert rank.found(epoch="later") == 0
    rank.save(epoch="later")
    assert held() == len(IDS)
    after = cache.counts()
    assert (after.queries - before.queries, after.lookups - before.lookups) == (10, 1)
    rank.worker.close()


def test_each_rank_is_seen_at_a_port_of_its_own(tmp_path: Path) -> None:
    port = adjacent_ports()
    server = {"enabled": True, "port": port, "token": "known-to-the-tests-alone"}
    for number in (0, 1):
        rank = Rank(tmp_path / str(number), "async", ranks=(number, 2), server=server)
        endpoint = rank.worker.cache.server
        assert endpoint is not None
        assert endpoint.url == f"http://127.0.0.1:{port + number}"
        rank.save()
        told = rank.worker.take_stats()
        assert told is not None
        assert told.data.keys() == {str(number)}
        assert told.data[str(number)]["stored_tokens"] == {"memory": len(IDS), "disk": len(IDS)}
        rank.worker.close()


def test_the_log_has_a_line_of_each_request_when_its_last_put_is_over(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvkit.adapters.vllm.tally")
    disk = rank.wrap("disk", lambda operation, _: Fault.HANG if operation == "put" else None)
    rank.step(saves=[SAVE])
    rank.step(("a", "b"), ended={"a": 50, "b": 7})
    assert caplog.messages == ["b: of 7 prompt tokens hit none; stored none"]
    disk.release()
    wait_for(lambda: len(caplog.messages) == 2)
    assert caplog.messages[1] == "a: of 50 prompt tokens hit none; stored 48 (memory), 48 (disk)"
    assert rank.found() == len(IDS)
    assert rank.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)))
    rank.step(("a",), ended={"a": 60})
    assert caplog.messages[2:] == ["a: of 60 prompt tokens hit 48 (memory); stored none"]


def test_what_is_loaded_again_after_a_preemption_is_no_second_hit(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvkit.adapters.vllm.tally")
    rank.save()
    for _ in range(2):
        assert rank.found() == len(IDS)
        assert rank.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)))
    rank.step(("a",), ended={"a": 60})
    assert caplog.messages == ["a: of 60 prompt tokens hit 48 (memory); stored 48 (memory), 48 (disk)"]


def test_the_line_waits_for_a_load_that_its_request_calls_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvkit.adapters.vllm.tally")
    rank = Rank(tmp_path, "async")
    assert rank.found() == 0
    rank.save()
    rank.wrap("disk", lambda operation, _: Fault.HANG if operation == "get" else None)
    rank.worker.cache.clear("memory")
    assert rank.found() == len(IDS)
    load = LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],))
    received, _, _ = rank.step(("a",), loads=[load], ended={"a": 60})
    while not received:
        received, _, _ = rank.step(idle=True)
    assert caplog.messages[0] == "a: of 60 prompt tokens hit none; stored 48 (memory), 48 (disk)"
    rank.worker.close()


def test_without_adapters_the_base_model_has_any_name(rank: Rank) -> None:
    assert rank.worker.space_of("an alias", "") == rank.worker.space_of(None, "")


SAVE = SaveTask("a", Sequence(IDS), 0, (TABLE,))
DEADLINE_S = 60.0


def in_memory(rank: Rank, tokens: TokenIds = IDS) -> int:
    """How many leading tokens of a sequence lie in memory."""
    return rank.worker.cache.lookup(tokens, rank.worker._namespace, retrieve_from=["memory"]).tokens


@pytest.mark.parametrize("asked", ["before", "after"])
def test_what_was_brought_near_is_loaded_from_memory(rank: Rank, asked: str) -> None:
    """Also where the lookup still found it on disk, and behind what vLLM has."""
    rank.fill(3.0)
    rank.save()
    rank.fill(0.0)
    rank.worker.cache.clear("memory")
    if asked == "before":
        assert rank.found() == len(IDS)
    rank.step(prefetches=[PrefetchTask("a", Sequence(IDS), CHUNK)], idle=True)
    names = rank.worker.cache.lookup(IDS, rank.worker._namespace).chunks.names
    wait_for(lambda: rank.worker.cache.tiers["memory"].count_leading(names[1:]) == 2)
    assert rank.worker.cache.tiers["memory"].count_leading(names[:1]) == 0
    if asked == "after":
        assert rank.found() == len(IDS)
    assert rank.load(LoadTask("a", 1, CHUNK, len(IDS), ([7, 8, 9, 10],)), called_off=["a"])
    assert all(bool((tensor[7:11] == 3.0).all()) for tensor in rank.pages.values())
    assert rank.worker.cache.counts().loaded_tokens == {"memory": 2 * CHUNK}


def test_what_is_loaded_by_layers_is_written_back(tmp_path: Path) -> None:
    rank = Rank(tmp_path, "layerwise")
    rank.fill(3.0)
    rank.save()
    rank.worker.cache.clear("memory")
    assert rank.found() == len(IDS)
    assert rank.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)))
    assert rank.worker.cache.counts().loaded_tokens == {"disk": len(IDS)}
    assert in_memory(rank) == len(IDS)
    rank.worker.close()


def test_a_prefetch_that_is_called_off_ends(hasty: Rank) -> None:
    """It hangs, and keeps neither loads nor the slots that it took."""
    hasty.fill(3.0)
    hasty.save()
    hasty.worker.cache.clear("memory")
    broken: set[str] = set()
    disk = hasty.wrap("disk", lambda op, name: Fault.HANG if op == "get" and name in broken else None)
    broken.update(hasty.worker.cache.lookup(IDS, hasty.worker._namespace).chunks.names[2:])
    hasty.step(prefetches=[PrefetchTask("a", Sequence(IDS))], idle=True)
    wait_for(lambda: disk.hanging == 1)
    hasty.step(called_off=["a"], idle=True)
    wait_for(lambda: hasty.worker.cache.counts().cancelled == 1)
    wait_for(lambda: in_memory(hasty) == 2 * CHUNK)
    broken.clear()
    assert hasty.found() == len(IDS)
    assert hasty.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)))
    assert hasty.worker.cache.counts().loaded_tokens == {"memory": 2 * CHUNK, "disk": CHUNK}
    disk.release()
    staging = hasty.worker.cache.staging
    wait_for(lambda: staging.free == staging.slots - 3)
    staging.check_integrity()


def test_what_is_brought_near_takes_half_of_the_memory(tmp_path: Path) -> None:
    """The first requests' come first; another's turn comes when one of them leaves."""
    rank = Rank(tmp_path, "async", memory="120KiB")  # ten records of 12 KiB
    requests = {name: IDS + 1000 * i for i, name in enumerate("abc")}
    for tokens in requests.values():
        rank.step(saves=[SaveTask("s", Sequence(tokens), 0, (TABLE,))])
        rank.worker.settle()
    rank.worker.cache.flush()
    rank.worker.cache.clear("memory")
    assert rank.worker.cache.prefetch_chunks == 5

    def near() -> dict[str, int]:
        return {name: in_memory(rank, tokens) // CHUNK for name, tokens in requests.items()}

    rank.step(
        prefetches=[PrefetchTask(name, Sequence(tokens)) for name, tokens in requests.items()], idle=True
    )
    wait_for(lambda: near() == {"a": 3, "b": 2, "c": 0})
    rank.step(idle=True)
    rank.step(called_off=["a"], idle=True)
    wait_for(lambda: near()["c"] == 3)
    rank.worker.close()
    assert rank.worker.cache.counts().loaded_tokens == {}


def test_a_failed_prefetch_gives_its_room_to_the_next(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    prefetches, cache = rank.worker._prefetches, rank.worker.cache
    room = cache.prefetch_chunks
    failed: Transfer[Any] = Transfer()
    failed.set_exception(OSError("no more threads"))
    monkeypatch.setattr(cache, "prefetch", lambda *_, **__: failed)
    started = [np.full(room * CHUNK, i, np.int32) for i in range(3)]
    for i, tokens in enumerate(started):
        prefetches.add(str(i), tokens, rank.worker._namespace, 0)
    prefetches.go_on()
    assert all(wanted.move is failed for wanted in prefetches._wanted.values())


def test_a_later_epoch_calls_prefetches_off(hasty: Rank) -> None:
    hasty.save()
    hasty.worker.cache.clear("memory")
    disk = hasty.wrap("disk", lambda op, _: Fault.HANG if op == "get" else None)
    hasty.step(prefetches=[PrefetchTask("a", Sequence(IDS))], idle=True)
    wait_for(lambda: disk.hanging == 3)
    hasty.step(epoch="later", idle=True)
    wait_for(lambda: hasty.worker.cache.counts().cancelled == 1)
    disk.release()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Rank]:
    """A rank that waits for lookups only shortly."""
    made = Rank(tmp_path, "async", lookup_timeout_s=0.05)
    yield made
    made.worker.close()


def test_a_late_answer_is_none(hasty: Rank) -> None:
    hasty.fill(3.0)
    hasty.save()
    hasty.worker.cache.clear("memory")
    disk = hasty.wrap("disk", lambda operation, _: Fault.HANG if operation == "count" else None)
    assert hasty.found() == 0
    disk.release()
    assert hasty.found() == len(IDS)


def test_pages_come_free_before_a_tier_says_what_it_lacks(hasty: Rank) -> None:
    disk = hasty.wrap("disk", lambda operation, _: Fault.HANG if operation == "count" else None)
    hasty.fill(3.0)
    hasty.step(saves=[SAVE])
    hasty.worker.settle()
    hasty.fill(0.0)
    assert (hasty.stored("memory"), hasty.stored("disk")) == (3, 0)
    disk.release()
    hasty.worker.cache.flush()
    assert hasty.stored("disk") == 3
    hasty.worker.cache.clear("memory")
    assert hasty.found() == len(IDS)
    assert hasty.load(LoadTask("a", 1, 0, 3 * CHUNK, ([11, 10, 9, 8, 7, 6],)))
    assert all(bool((tensor[6:] == 3.0).all()) for tensor in hasty.pages.values())


def test_saves_wait_for_the_forward_however_long(hasty: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkit.adapters.vllm.worker.SAVE_WAIT_S", 0.0)
    hasty.worker._patience_s = 0.0
    forward, settling = threading.Event(), threading.Event()

    def forward_done(computed: int) -> Callable[[], object]:
        return lambda: (settling.wait(DEADLINE_S), forward.wait(DEADLINE_S))

    monkeypatch.setattr(hasty.worker, "_forward_done", forward_done)
    hasty.step(saves=[SAVE])
    settled = threading.Thread(target=lambda: (settling.set(), hasty.worker.settle()))
    settled.start()
    assert settling.wait(DEADLINE_S)
    forward.set()
    settled.join(DEADLINE_S)
    hasty.worker.cache.flush()
    assert hasty.stored("disk") == 3


def test_saves_that_no_slot_is_left_for_are_called_off(hasty: Rank) -> None:
    staging = hasty.worker.cache.staging
    waiting = threading.Event()
    taken = staging.acquire(staging.slots, DEADLINE_S, at_least=staging.slots)
    staging.on_shortage(lambda _: waiting.set())
    hasty.step(saves=[SAVE])
    assert waiting.wait(DEADLINE_S)
    hasty.worker.settle()
    for lease in taken:
        lease.release()
    hasty.worker.cache.flush()
    assert hasty.stored("disk") == 0
    told = hasty.worker.take_stats()
    assert told is not None
    assert told.data["0"]["saves_called_off"] == 1


class Pair:
    """A rank that sends and one that receives, with the same pages and keys."""

    def __init__(self, folder: Path, load: str = "async", **more: Any) -> None:
        self.address = f"unix://{folder}/decode/socket"
        receives = {"role": "decode", "listen": [self.address], "buffer": "1MiB"}
        self.decode = Rank(folder / "d", "async", receives, **more)
        self.prefill = Rank(folder / "p", load, {"role": "prefill"}, **more)
        handoff = self.decode.worker.cache.tiers["handoff"]
        assert isinstance(handoff, HandoffTier)
        assert handoff.receiver is not None
        self.receiver = handoff.receiver

    def send(self, stop: int = len(IDS), *, last: bool = True) -> SendTask:
        return SendTask("a", "t", self.address, Sequence(IDS), 0, stop, (TABLE,), last)

    def finish(self, received: set[str], failed: set[str], sent: set[str]) -> None:
        """Have the prefill engine go on until the pages of what it sends are free."""
        while not sent:
            _, _, sent = self.prefill.step(idle=True)

    def close(self) -> None:
        self.prefill.worker.close()
        self.decode.worker.close()


@pytest.fixture(params=["async", "sync"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, request.param)
    yield made
    made.close()


def test_room_is_asked_for_before_anything_is_computed(pair: Pair) -> None:
    step = StepMetadata(1, sends=[pair.send()])
    pair.prefill.fill(3.0)
    pair.prefill.worker.begin(step)
    wait_for(lambda: pair.receiver.transfers() == {"t": Phase.RECEIVING})
    pair.prefill.worker.save(step)
    pair.finish(*pair.prefill.worker.finish({"a"}))
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
    monkeypatch.setattr("kvkit.adapters.vllm.worker.NEWS_S", 0.0)
    pair = Pair(tmp_path, handoff_timeout_s=600.0)
    for computed_there, found in ((True, 0), (False, len(IDS))):
        ask = Ask("a", 1, Sequence(IDS), transfer="t", computed_there=computed_there)
        pair.decode.step(asks=[ask], idle=True)
        if not computed_there:
            assert pair.decode.worker.report() is None
            pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
        assert pair.decode.heard() == found
    pair.close()


def test_a_step_without_work_waits_for_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkit.adapters.vllm.worker.IDLE_WAIT_S", DEADLINE_S)
    pair = Pair(tmp_path)
    ask = Ask("a", 1, Sequence(IDS), transfer="t")
    found: list[dict[str, Phase]] = []

    def step() -> None:
        pair.decode.step(asks=[ask], idle=True)
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


def test_what_nobody_wants_makes_room(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert status.phase is Phase.COMMITTED
    pair.decode.step(unwanted=["t", "unknown"])
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
    pair.decode.step(asks=[Ask("a", 1, sequence, transfer="t", computed_there=True)], idle=True)
    assert pair.decode.heard() == tokens
    into = [11, 10, 9, 8, 7, 6][:blocks]
    assert pair.decode.load(LoadTask("a", 1, 0, tokens, (into,)))
    for ours, theirs in zip(pair.prefill.pages.values(), pair.decode.pages.values(), strict=True):
        assert torch.equal(ours[TABLE[:blocks]], theirs[into])
        assert not theirs[[block for block in range(BLOCKS) if block not in into]].any()
    assert pair.receiver.transfers() == {}
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


def test_what_cannot_be_put_is_missing_and_the_rest_arrives(pair: Pair) -> None:
    puts: list[str] = []

    def plan(operation: str, name: str) -> Fault | None:
        if operation == "put":
            puts.append(name)
        return Fault.FAIL if operation == "put" and len(puts) == 2 else None

    pair.prefill.wrap("handoff", plan)
    pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
    status = pair.receiver.wait("t", DEADLINE_S)
    assert status is not None
    assert (status.phase, status.held) == (Phase.COMMITTED, 2)
    assert pair.decode.found() == CHUNK


def piece(pair: Pair, request: str, tokens: TokenIds, first: int, stop: int) -> SendTask:
    """Tokens [first, stop) of what `request` sends."""
    address, blocks, last = pair.address, (TABLE[first // BLOCK :],), stop == len(tokens)
    return SendTask(request, f"of-{request}", address, Sequence(tokens), first, stop, blocks, last)


def test_a_step_that_waits_returns_when_all_it_computed_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkit.handoff.prompt.ROOM_S", DEADLINE_S)
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
    monkeypatch.setattr("kvkit.handoff.prompt.ROOM_S", DEADLINE_S)
    pair.prefill.step(sends=[piece(pair, "a", IDS, 0, CHUNK)])
    monkeypatch.setattr("kvkit.handoff.prompt.ROOM_S", 0.0)
    pair.prefill.step(sends=[piece(pair, "b", IDS + 1000, 0, CHUNK)])
    pair.prefill.step(sends=[piece(pair, "a", IDS, CHUNK, len(IDS))])
    assert pair.receiver.transfers()["of-a"] is Phase.COMMITTED
    wait_for(lambda: pair.receiver.transfers().get("of-b") is Phase.WAITING)
    pair.receiver.release("of-a")
    pair.prefill.step(("b",), sends=[piece(pair, "b", IDS + 1000, CHUNK, len(IDS))])
    pair.finish(set(), set(), set())
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

    def step() -> None:
        pair.prefill.step(idle=True)
        found.append(pair.receiver.transfers())

    thread = threading.Thread(target=step)
    thread.start()
    pair.prefill.sender.cancel("other")
    thread.join(DEADLINE_S)
    assert found == [{"t": Phase.RECEIVING}]
    monkeypatch.undo()
    pair.finish(set(), set(), set())
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
    rank.worker.settle()
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
    pair.decode.step(asks=[Ask("a", 1, Sequence(IDS), transfer="t", computed_there=True)], idle=True)
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
