"""KV events report the records that the tiers of all ranks hold, through evictions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm")

from event_workers import (
    BLOCK,
    CHUNK,
    TIERS,
    Listener,
    Request,
    ToldEngine,
    beginnings,
    lives,
    prompts,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvkit.adapters.engine.changes import MAX_TAKEN, Changes
from kvkit.adapters.vllm.events import Events, TierBlocksStored, TiersCleared
from kvkit.adapters.vllm.step import Listed, NamedChunks, WorkerReport
from kvkit.tiers.settings import TierConfig

IDS = list(range(40))


def new_events(ranks: int = 1) -> Events:
    pool = TierConfig(url="s3://pool/kv", scope="shared")
    return Events(TIERS | {"pool": pool}, CHUNK, BLOCK, ranks)


def named(rank: int, request_id: str = "a", first: int = 0, chunks: int = 1) -> WorkerReport:
    """A rank says what the records of chunks are called; each has two."""
    names = [(f"{rank}/0/{i}", f"{rank}/1/{i}") for i in range(first, first + chunks)]
    return WorkerReport(named=[NamedChunks(rank, "", request_id, first, names)])


def change(tier: str, *names: str, held: bool = True, rank: int | None = None) -> WorkerReport:
    """What a tier holds: of that rank, or of the one that its records' names begin with."""
    return WorkerReport(
        changes=[(int(name[0]) if rank is None else rank, (tier, name, held)) for name in names]
    )


def test_a_chunk_is_told_with_its_blocks_when_all_ranks_have_it() -> None:
    events, request = new_events(ranks=2), Request("a", IDS)
    events.expect(request, 0, 2)
    events.update_from_workers(change("disk", "0/0/1", "0/1/1", "1/0/1"))  # before anybody says what that is
    for rank in range(2):
        events.update_from_workers(named(rank, chunks=2))
    events.update_from_workers(change("memory", "1/1/1"))
    assert events.take() == [], "one record of four in memory, three of four on disk"
    events.update_from_workers(change("disk", "1/1/1"))
    (event,) = events.take()
    sent = msgspec.msgpack.encode(KVEventBatch(0.0, [event]))
    (others,) = msgspec.msgpack.decode(sent, type=KVEventBatch).events
    assert type(others) is BlockStored
    assert (others.block_hashes, others.ownership) == (event.block_hashes, "disk"), "others read vLLM's event"
    assert event.block_hashes == list(map(maybe_convert_block_hash, request.block_hashes[2:4]))
    assert event.parent_block_hash == maybe_convert_block_hash(request.block_hashes[1])
    assert (event.token_ids, event.block_size, event.extra_keys) == (IDS[16:32], BLOCK, None)
    events.update_from_workers(change("disk", "0/0/1", held=False))
    events.update_from_workers(change("disk", "0/1/1", held=False))
    (gone,) = events.take()
    assert isinstance(gone, BlockRemoved)
    assert (gone.block_hashes, gone.medium, gone.ownership) == (event.block_hashes, "STORAGE", "disk")


@pytest.mark.parametrize(
    ("tier", "told"),
    [
        ("memory", ("CPU", "LOCAL", "memory")),
        ("disk", ("STORAGE", "LOCAL", "disk")),
        ("pool", ("STORAGE", "REMOTE", "pool")),
    ],
)
def test_the_tier_is_told(tier: str, told: tuple[str, str, str]) -> None:
    events = new_events()
    events.expect(Request("a", IDS, cache_salt="s"), 0, 1)
    events.update_from_workers(named(0))
    events.update_from_workers(change(tier, "0/0/0", "0/1/0"))
    (event,) = events.take()
    assert isinstance(event, BlockStored)
    assert (event.medium, event.locality, event.ownership) == told
    assert (event.parent_block_hash, event.extra_keys) == (None, [("s",), None])


def test_two_names_of_one_adapter_are_told_one_at_a_time() -> None:
    """Their records are the same; vLLM's hashes are not."""
    events = new_events()
    for name in ("one", "two"):
        lora = SimpleNamespace(adapter_id=1, lora_name=name, lora_path="/l", name=name)
        events.expect(Request(name, IDS, name, lora), 0, 1)
        events.update_from_workers(named(0, name))
        events.update_from_workers(change("disk", "0/0/0", "0/1/0"))
    stored, removed, again = events.take()
    assert [type(event) for event in (stored, removed, again)] == [
        TierBlocksStored,
        BlockRemoved,
        TierBlocksStored,
    ]
    assert stored.block_hashes == removed.block_hashes != again.block_hashes


def test_ranks_whose_records_share_a_name_hold_them_apart() -> None:
    events, request = new_events(ranks=2), Request("a", IDS)
    events.expect(request, 0, 1)
    for rank in range(2):
        events.update_from_workers(WorkerReport(named=[NamedChunks(rank, "", "a", 0, [("equal",)])]))
    events.update_from_workers(change("memory", "equal", rank=0))
    assert events.take() == [], "the other rank lacks it"
    events.update_from_workers(change("memory", "equal", rank=1))
    assert [type(event) for event in events.take()] == [TierBlocksStored]
    events.update_from_workers(change("memory", "equal", rank=0, held=False))
    assert [type(event) for event in events.take()] == [BlockRemoved]
    events.expect(request, 0, 1)
    events.update_from_workers(WorkerReport(named=[NamedChunks(0, "", "a", 0, [("new",)])]))
    events.update_from_workers(change("memory", "equal", rank=1, held=False))
    events.update_from_workers(change("memory", "new", rank=0))
    events.update_from_workers(change("memory", "equal", rank=1))
    assert [type(event) for event in events.take()] == [TierBlocksStored], (
        "what one calls it now the other does not"
    )


def test_what_one_rank_puts_where_all_of_a_host_look_is_there_for_them() -> None:
    events = Events(TIERS, CHUNK, BLOCK, ranks=4, per_host=2)
    events.expect(Request("a", IDS), 0, 1)
    for rank in range(4):
        events.update_from_workers(WorkerReport(named=[NamedChunks(rank, "", "a", 0, [("equal",)])]))
    events.update_from_workers(change("disk", "equal", rank=1))
    assert events.take() == [], "the other host's disk lacks it"
    events.update_from_workers(change("disk", "equal", rank=2))
    assert [type(event) for event in events.take()] == [TierBlocksStored]
    events.update_from_workers(change("disk", "equal", rank=3, held=False))
    assert [type(event) for event in events.take()] == [BlockRemoved]


def test_the_oldest_is_forgotten_and_told_as_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkit.adapters.vllm.events.MAX_RECORDS", 4)
    events, listener = new_events(), Listener()
    events.begin(complete=True)
    for i in range(3):
        events.expect(Request(str(i), [i] * CHUNK), 0, 1)
        report = WorkerReport(named=[NamedChunks(0, "", str(i), 0, [(f"0/0/{i}", f"0/1/{i}")])])
        events.update_from_workers(WorkerReport.aggregate(report, change("disk", f"0/0/{i}", f"0/1/{i}")))
        listener.hear(events.take())
        assert listener.complete == (i < 2)
    assert len(listener.held) == 2 * 2


def test_what_is_lost_is_told_as_cleared() -> None:
    changes = Changes(max_queued=MAX_TAKEN + 4)
    changes.note("disk", [f"{i}" for i in range(MAX_TAKEN + 4)], True)
    changes.note("disk", ["0"], False)
    first, lost = changes.take()
    assert (len(first), first[:2], lost) == (MAX_TAKEN, [("disk", "0", False), ("disk", "1", True)], False)
    changes.note("disk", [f"{i}" for i in range(MAX_TAKEN + 5)], True)
    assert changes.take() == ([], True)
    assert changes.take() == ([], False)
    events = new_events()
    events.expect(Request("a", IDS), 0, 1)
    events.update_from_workers(named(0))
    events.update_from_workers(change("disk", "0/0/0", "0/1/0"))
    events.update_from_workers(WorkerReport(watches=False))
    assert events.take() == [TiersCleared(complete=False)]
    sent = msgspec.msgpack.encode(KVEventBatch(0.0, [TiersCleared(complete=False)]))
    (others,) = msgspec.msgpack.decode(sent, type=KVEventBatch).events
    assert others == AllBlocksCleared()


@pytest.mark.parametrize(("seed", "ranks", "groups"), [(1, 1, 1), (2, 1, 2), (3, 2, 1), (4, 2, 2)])
def test_what_is_told_is_what_is_held(seed: int, ranks: int, groups: int, tmp_path: Path) -> None:
    """After any saves, loads, evictions, drops of damaged records, clears, resets and restarts."""
    engine, listener = ToldEngine(tmp_path, ranks, groups), Listener()
    most, evicted = 0, 0
    for what in lives(engine, seed, 60):
        if what == "restart":
            listener = Listener()
        listener.hear(engine.told())
        assert engine.held(engine.known) <= listener.held <= engine.held(beginnings()), what
        most = max(most, len(listener.held))
        evicted += sum(engine.ranks[0].worker.cache.counts().evicted_records.values())
    assert most > 10
    assert evicted
    engine.close()


def test_what_a_restart_finds_is_told(tmp_path: Path) -> None:
    """Of the base model's prompts without salt; what else is there may be asked about."""
    engine, listener, (text, other, *_) = ToldEngine(tmp_path), Listener(), prompts()
    engine.save(text)
    listener.hear(engine.told())
    assert listener.complete
    engine.close()
    engine.start()
    listener.hear(engine.told())
    assert listener.complete
    assert listener.held == engine.held(beginnings()) != set()
    assert {tier for tier, _ in listener.held} == {"disk"}
    engine.save(other, salt="s")
    engine.close()
    engine.start()
    listener.hear(engine.told())
    assert not listener.complete, "nobody can say of which salt"
    assert listener.held == engine.held(beginnings()) != set()
    engine.close()


def test_a_round_has_all_chunks_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all that tiers held before the start is listed in the midst of one."""
    monkeypatch.setattr("kvkit.adapters.vllm.events.RESYNC_CHUNKS", 1)
    events = Events(TIERS, CHUNK, BLOCK, 1, buffer_steps=30)
    events.begin(complete=False)
    for i in range(3):
        events.expect(Request(str(i), [i] * CHUNK), 0, 1)
        events.update_from_workers(
            WorkerReport(named=[NamedChunks(0, "", str(i), 0, [(f"0/0/{i}", f"0/1/{i}")])])
        )
        events.update_from_workers(change("disk", f"0/0/{i}", f"0/1/{i}"))
    rounds: dict[int, list[TierBlocksStored]] = {}
    for step in range(40):
        if step == 10:  # the first round has begun
            events.update_from_workers(WorkerReport(listed=[Listed(0, "", [], is_complete=True)]))
        for event in events.take():
            if isinstance(event, TierBlocksStored):
                rounds.setdefault(event.resync, []).append(event)
    assert [len(found) for found in rounds.values()] == [3] * len(rounds)
    assert len(rounds) > 3
    assert [found[-1].complete for found in rounds.values()] == [False, *[True] * (len(rounds) - 1)]
    assert [event.complete for event in rounds[1]] == [False, True, True]
