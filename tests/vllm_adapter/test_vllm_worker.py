"""The workers' side of the vLLM connector loads and stores over real tiers and pages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_rank import BLOCK, CHUNK, DEADLINE_S, IDS, SAVE, TABLE, Rank

from kvkit.adapters.engine.lookup_request import LookupRequest, Lora, Sequence, TokenIds
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.step import LoadTask, PrefetchTask, SaveTask
from kvkit.adapters.vllm.tiers.prefetch_executor import PrefetchExecutor
from kvkit.lab.testbed.servers import adjacent_ports
from kvkit.lab.testbed.waiting import wait_for
from kvkit.tiers.testing.faulty import Fault
from kvkit.transfer.sequence import UnknownModel
from kvkit.workers import Transfer


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
        rank.worker.end_saves()
        rank.worker.cache.flush()
        return rank.worker.cache.counts().stored_records["disk"] - stored

    assert not rank.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)), saves=[save])
    assert rank.worker.invalid_blocks() == {7, 8, 9, 10, 11, 6}
    assert saved() == (0 if rank.blocking_load else 3)
    failed_step = rank.number if rank.blocking_load else 0
    rank.step(saves=[save], acked_failure_step=failed_step - 1 if rank.blocking_load else 0)
    assert saved() == (0 if rank.blocking_load else 3)
    rank.step(saves=[save], acked_failure_step=failed_step)
    assert saved() == 3


@pytest.mark.parametrize("blocks", [[1, 2, -1, 4, 5, 6], [1, 2, 3, -1, 5, 6], [1, 2, 3]])
def test_a_chunk_that_lacks_a_block_is_not_stored(rank: Rank, blocks: list[int]) -> None:
    """A padded or a short table: the record would have zeros under the name of the whole chunk."""
    rank.fill(3.0)
    rank.step(saves=[SaveTask("a", Sequence(IDS), 0, (blocks,))])
    rank.worker.end_saves()
    rank.worker.cache.flush()
    assert (rank.stored("memory"), rank.stored("disk")) == (1, 1)
    assert rank.found() == CHUNK
    rank.save()
    assert rank.found() == len(IDS), "and is stored once it is there"


def test_nothing_of_an_adapter_that_is_not_known_is_stored_or_found(rank: Rank) -> None:
    nobody = Sequence(IDS, Lora(1, "org/adapter"))
    rank.step(saves=[SaveTask("a", nobody, 0, (TABLE,))])
    rank.worker.end_saves()
    rank.worker.cache.flush()
    assert (rank.stored("memory"), rank.stored("disk")) == (0, 0)
    rank.step(lookups=[LookupRequest("a", 1, nobody)], idle=True)
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
        return cache.query(IDS, cache.namespace_of(model, salt)).tokens

    rank.save()
    adapter = Sequence(IDS, Lora(1, str(files), "adapter"), "tenant")
    with pytest.raises(UnknownModel, match=r"model = .adapter.: neither served nor an adapter"):
        held("adapter")
    rank.step(saves=[SaveTask("b", adapter, 0, (TABLE,))])
    rank.worker.end_saves()
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
        told = rank.worker.stats.take()
        assert told is not None
        assert told.data.keys() == {str(number)}
        assert told.data[str(number)]["stored_tokens"] == {"memory": len(IDS), "disk": len(IDS)}
        rank.worker.close()


def test_the_log_has_a_line_of_each_request_when_its_last_put_is_over(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvkit.adapters.engine.request_stats")
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
    caplog.set_level(logging.INFO, "kvkit.adapters.engine.request_stats")
    rank.save()
    for _ in range(2):
        assert rank.found() == len(IDS)
        assert rank.load(LoadTask("a", 1, 0, len(IDS), ([7, 8, 9, 10, 11, 6],)))
    rank.step(("a",), ended={"a": 60})
    assert caplog.messages == ["a: of 60 prompt tokens hit 48 (memory); stored 48 (memory), 48 (disk)"]


def test_the_line_waits_for_a_load_that_its_request_calls_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvkit.adapters.engine.request_stats")
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
    assert rank.worker.namespaces.named("an alias", "") == rank.worker.namespaces.named(None, "")


def in_memory(rank: Rank, tokens: TokenIds = IDS) -> int:
    """How many leading tokens of a sequence lie in memory."""
    return rank.worker.cache.lookup(tokens, rank.worker.namespaces.current, retrieve_from=["memory"]).tokens


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
    names = rank.worker.cache.lookup(IDS, rank.worker.namespaces.current).chunks.names
    wait_for(lambda: rank.worker.cache.tiers["memory"].match_prefix(names[1:]) == 2)
    assert rank.worker.cache.tiers["memory"].match_prefix(names[:1]) == 0
    if asked == "after":
        assert rank.found() == len(IDS)
    assert rank.load(LoadTask("a", 1, CHUNK, len(IDS), ([7, 8, 9, 10],)), cancelled_prefetches=["a"])
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
    broken.update(hasty.worker.cache.lookup(IDS, hasty.worker.namespaces.current).chunks.names[2:])
    hasty.step(prefetches=[PrefetchTask("a", Sequence(IDS))], idle=True)
    wait_for(lambda: disk.hanging == 1)
    hasty.step(cancelled_prefetches=["a"], idle=True)
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


@pytest.mark.parametrize("second", ["b", "a"])
def test_what_is_brought_near_takes_half_of_the_memory(tmp_path: Path, second: str) -> None:
    """The first requests' come first; another's turn comes when one of them leaves. One may have several."""
    rank = Rank(tmp_path, "async", memory="120KiB")  # ten records of 12 KiB
    requests = {name: IDS + 1000 * i for i, name in enumerate("abc")}
    for tokens in requests.values():
        rank.step(saves=[SaveTask("s", Sequence(tokens), 0, (TABLE,))])
        rank.worker.end_saves()
    rank.worker.cache.flush()
    rank.worker.cache.clear("memory")
    assert rank.worker.cache.prefetch_chunks == 5

    def near() -> dict[str, int]:
        return {name: in_memory(rank, tokens) // CHUNK for name, tokens in requests.items()}

    names = "a", second, "c"
    queued = map(PrefetchTask, names, map(Sequence, requests.values()))
    rank.step(prefetches=list(queued), idle=True)
    wait_for(lambda: near() == {"a": 3, "b": 2, "c": 0})
    rank.step(idle=True)
    rank.step(cancelled_prefetches=["a"], idle=True)
    wait_for(lambda: near()["c"] == 3)
    rank.worker.close()
    assert rank.worker.cache.counts().loaded_tokens == {}


def test_a_failed_prefetch_gives_its_room_to_the_next(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = rank.worker.cache
    (prefetches,) = [it.prefetches for it in rank.worker.capabilities if isinstance(it, PrefetchExecutor)]
    room = cache.prefetch_chunks
    failed: Transfer[Any] = Transfer()
    failed.set_exception(OSError("no more threads"))
    monkeypatch.setattr(cache, "prefetch", lambda *_, **__: failed)
    started = [np.full(room * CHUNK, i, np.int32) for i in range(3)]
    for i, tokens in enumerate(started):
        prefetches.add(str(i), tokens, rank.worker.namespaces.current, 0)
    prefetches.start_next()
    assert all(prefetch.transfer is failed for prefetch in prefetches._prefetches)


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
    hasty.worker.end_saves()
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
    monkeypatch.setattr("kvkit.adapters.vllm.tiers.save_executor.SAVE_WAIT_S", 0.0)
    hasty.worker._saves._wait_s = 0.0
    forward, settling = threading.Event(), threading.Event()

    def forward_done(computed: int) -> Callable[[], object]:
        return lambda: (settling.wait(DEADLINE_S), forward.wait(DEADLINE_S))

    monkeypatch.setattr(hasty.worker, "_forward_done", forward_done)
    hasty.step(saves=[SAVE])
    settled = threading.Thread(target=lambda: (settling.set(), hasty.worker.end_saves()))
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
    hasty.worker.end_saves()
    for lease in taken:
        lease.release()
    hasty.worker.cache.flush()
    assert hasty.stored("disk") == 0
    told = hasty.worker.stats.take()
    assert told is not None
    assert told.data["0"]["saves_called_off"] == 1
