"""Background loads and stores overlap, stream, write back, are cancelled, and keep priorities."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import CHUNK, DEADLINE_S, Recorder, fill, make_engine, new_cache, new_staging, sequence

from kvkit.cache import CacheError
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import OnComplete
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.faulty import Fault, FaultyTier
from kvkit.transfer import read_pipeline as reads
from kvkit.transfer.sequence import Hit


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slots", [2, 3, 16])
def test_any_number_of_chunks_passes_through_any_number_of_slots(
    groups: int, slots: int, tmp_path: Path
) -> None:
    engine, tokens = make_engine(groups), sequence(24)
    fill(engine, tmp_path, tokens)
    staging = new_staging(engine, slots)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path))]) as cache:
        table = engine.table(len(tokens))
        assert (
            cache.load_async(cache.lookup(tokens), engine.places(table)).result(DEADLINE_S).tokens
            == 24 * CHUNK
        )
        engine.assert_loaded(tokens, table, 24)


def test_the_next_tier_reads_while_the_first_does(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(12)
    fill(engine, tmp_path / "far", tokens, first=6)
    fill(engine, tmp_path / "near", tokens[: 6 * CHUNK])
    near = Recorder(ObjectTier(str(tmp_path / "near"), name="near"))
    far = Recorder(ObjectTier(str(tmp_path / "far"), name="far"))
    near.gate.clear()
    with new_cache(engine, new_staging(engine, 16), [near, far]) as cache:
        table = engine.table(len(tokens))
        hit = cache.lookup(tokens)
        assert hit.by_tier == {"near": 6 * CHUNK, "far": 6 * CHUNK}
        future = cache.load_async(hit, engine.places(table))
        assert far.asked.wait(DEADLINE_S), "the far tier waits for the near one"
        assert not future.done()
        near.gate.set()
        assert future.result(DEADLINE_S).by_tier == hit.by_tier
        engine.assert_loaded(tokens, table, 12)


def fill_by_turns(
    engine: Engine, folder: Path, tokens: np.ndarray[Any, np.dtype[np.int32]], length: int
) -> list[str]:
    """Folders near and far with `length` chunks of `tokens` by turns; the names of all records."""
    for name in ("near", "far"):
        fill(engine, folder / name, tokens)
    with new_cache(engine, new_staging(engine, 2), [ObjectTier(str(folder / "near"))]) as cache:
        chunks = cache.lookup(tokens).chunks
    for i in range(len(chunks)):
        for name in chunks.records(i, i + 1):
            (folder / ("near" if i // length % 2 else "far") / name).unlink()
    return list(chunks.names)


@pytest.mark.parametrize("slots", [16, 64])
def test_slots_go_to_what_tiers_read_at_once_and_then_to_what_waits_for_their_threads(
    slots: int, tmp_path: Path
) -> None:
    """The near tier, which comes first, hangs: the far one goes on as far as there are slots."""
    engine, tokens = make_engine(blocks=128), sequence(32)
    names = fill_by_turns(engine, tmp_path, tokens, 8)
    near = Recorder(ObjectTier(TierConfig(url=str(tmp_path / "near"), threads=4), name="near"))
    far = Recorder(ObjectTier(TierConfig(url=str(tmp_path / "far"), threads=16), name="far"))
    near.gate.clear()
    few = slots == 16
    expected = {
        "near": names[:4] if few else names[:8] + names[16:24],
        "far": names[8:16] + names[24 : 28 if few else 32],
    }
    with new_cache(engine, new_staging(engine, slots), [near, far]) as cache:
        table = engine.table(len(tokens))
        future = cache.load_async(cache.lookup(tokens), engine.places(table))
        while len(near.got) + len(far.got) < min(slots, 32):
            wait([future], 0.001)
        assert {"near": sorted(near.got), "far": sorted(far.got)} == {
            tier: sorted(expected[tier]) for tier in expected
        }
        near.gate.set()
        assert future.result(DEADLINE_S).tokens == len(tokens)
        engine.assert_loaded(tokens, table, 32)


@pytest.mark.parametrize(("groups", "slots"), [(1, 1), (1, 2), (2, 2), (1, 5), (2, 16)])
def test_ranges_by_turns_pass_through_any_number_of_slots(groups: int, slots: int, tmp_path: Path) -> None:
    engine, tokens = make_engine(groups), sequence(24)
    fill_by_turns(engine, tmp_path, tokens, 4)
    tiers = [
        ObjectTier(TierConfig(url=str(tmp_path / name), threads=3), name=name) for name in ("near", "far")
    ]
    staging = new_staging(engine, slots)
    with new_cache(engine, staging, tiers) as cache:
        table = engine.table(len(tokens))
        hit = cache.lookup(tokens)
        assert len(hit.plan.segments) == 6
        assert cache.load(hit, engine.places(table)).by_tier == hit.by_tier
        engine.assert_loaded(tokens, table, 24)
        assert staging.free == slots


def test_loads_that_read_ahead_do_not_block_each_other(tmp_path: Path) -> None:
    """Each holds slots for what comes later while what comes first finds none: somebody has to give up."""
    engine = make_engine()
    sequences = [sequence(8, seed) for seed in range(6)]
    for tokens in sequences:
        fill(engine, tmp_path / "a", tokens[: 4 * CHUNK])
        fill(engine, tmp_path / "b", tokens, first=4)
    tiers = [ObjectTier(str(tmp_path / name), name=name) for name in "ab"]
    with new_cache(engine, new_staging(engine, 3), tiers) as cache:
        engines = [make_engine() for _ in sequences]
        futures = []
        for mine, tokens in zip(engines, sequences, strict=True):
            table = mine.table(len(tokens))
            futures.append(cache.load_async(cache.lookup(tokens), mine.places(table)))
        assert [future.result(DEADLINE_S).tokens for future in futures] == [8 * CHUNK] * 6
        for mine, tokens in zip(engines, sequences, strict=True):
            mine.assert_loaded(tokens, mine.table(len(tokens)), 8)


def test_a_load_that_is_called_off_ends_before_its_deadline(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(6)
    fill(engine, tmp_path, tokens)
    stuck: set[str] = set()
    disk = FaultyTier(
        ObjectTier(str(tmp_path)),
        lambda op, name: Fault.HANG if (op, name in stuck) == ("get", True) else None,
    )
    staging = new_staging(engine, 8)
    with new_cache(engine, staging, [disk]) as cache:
        hit = cache.lookup(tokens)
        stuck.update(hit.chunks.records(2, 3))
        table = engine.table(len(tokens))
        future = cache.load_async(hit, engine.places(table))
        while not disk.hanging:
            wait([future], 0.001)
        assert future.cancel() is False, "it is under way: the pages are in use until it is done"
        loaded = future.result(DEADLINE_S / 2)
        assert loaded.tokens <= 2 * CHUNK
        engine.assert_loaded(tokens, table, loaded.tokens // CHUNK)
        assert cache.counts().cancelled == 1
        assert not cache.counts().timeouts
        disk.release()
        assert cache.tier_states() == {"disk": "ok"}


def test_a_load_that_was_not_begun_moves_nothing(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path, tokens)
    disk = Recorder(ObjectTier(str(tmp_path)))
    disk.gate.clear()
    with new_cache(engine, new_staging(engine, 64), [disk]) as cache:
        hit, table = cache.lookup(tokens), engine.table(len(tokens))
        busy = [cache.load_async(hit, make_engine().places(table)) for _ in range(8)]
        late = cache.load_async(hit, engine.places(table))
        assert late.cancel()
        disk.gate.set()
        wait(busy, DEADLINE_S)
        with pytest.raises(CancelledError):
            late.result(DEADLINE_S)
        engine.assert_loaded(tokens, table, 0)


def test_staging_only_passes_through_memory(tmp_path: Path) -> None:
    engine, tokens = make_engine(2), sequence(12)
    staging = new_staging(engine, 12)
    memory = MemoryTier(staging, 6 * staging.slot_bytes)
    disk = Recorder(ObjectTier(str(tmp_path)))
    with new_cache(
        engine, staging, [memory, disk], write_back_to=("memory", "disk"), staging_only=True
    ) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        assert cache.store_async(tokens, engine.places(table)).result(DEADLINE_S).new_tokens == len(tokens)
        cache.flush()
        assert staging.free == staging.slots, "slots return when the last put is complete"
        engine.wipe()
        hit = cache.prefetch(tokens).result(DEADLINE_S)
        assert hit.by_tier == {"disk": len(tokens)}
        assert staging.free == staging.slots // 2, "a prefetch keeps half of the slots, not more"
        read = len(disk.got)
        assert cache.load(hit, engine.places(table)).tokens == len(tokens)
        engine.assert_loaded(tokens, table, 12)
        assert len(disk.got) - read == 24 - 6, "what the prefetch left was read again"
        assert list(memory.scan()) == []
        assert staging.free == staging.slots


def test_reads_go_before_writes(tmp_path: Path) -> None:
    """One thread, busy with a put; more puts wait, then a get: it comes next."""
    order: list[str] = []
    begun, gate = threading.Event(), threading.Event()

    class Slow(ObjectTier):
        def write(self, name: str, record: memoryview) -> None:
            begun.set()
            gate.wait(DEADLINE_S)
            super().write(name, record)

    tier = Slow(TierConfig(url=str(tmp_path), threads=1))
    staging = Staging(4096, 8)
    leases = staging.acquire(6, 0, at_least=6)
    names = [f"ab/0/c.0.{i}.0.0.0.0" for i in range(5)]
    done = threading.Event()

    def on_complete(name: str, error: BaseException | None) -> None:
        order.append(name if error is None else "get")
        if len(order) == 6:
            done.set()

    tier.put(names, leases[:5], on_complete)
    assert begun.wait(DEADLINE_S)
    assert tier.waiting() == 4
    tier.get(["ab/0/c.9.9.0.0.0.0"], leases[5:], on_complete)
    gate.set()
    assert done.wait(DEADLINE_S)
    assert order == [names[0], "get", *names[1:]]
    tier.close()
    release_all(leases)
    staging.close()


def test_a_store_goes_where_the_call_says(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(3)
    tiers = [ObjectTier(str(tmp_path / name), name=name) for name in "ab"]
    with new_cache(engine, new_staging(engine, 8), tiers) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table), to=["b"])
        cache.flush()
        assert [cache.tiers[name].match_prefix(cache.lookup(tokens).chunks.names) for name in "ab"] == [0, 3]
        with pytest.raises(ValueError, match="to='c': no such tier; the tiers are a, b"):
            cache.store_async(tokens, engine.places(table), to=["c"])


def test_pins_hold_against_newcomers(tmp_path: Path) -> None:
    engine, kept, other = make_engine(), sequence(4), sequence(4, 1)
    staging = new_staging(engine, 16)
    with new_cache(engine, staging, [MemoryTier(staging, 6 * staging.slot_bytes)]) as cache:
        table = engine.table(len(kept))
        for tokens in (kept, other):
            engine.compute(tokens, table)
            if tokens is kept:
                cache.store(tokens, engine.places(table))
                assert cache.pin(kept, 3600) == len(kept)
            else:
                cache.store(tokens, engine.places(table))
        assert cache.lookup(kept).tokens == len(kept)
        assert cache.lookup(other).tokens == 2 * CHUNK
        assert cache.counts().refused == {"memory": 2}
        assert cache.clear("memory") == 6
        assert cache.lookup(kept).tokens == 0
        with pytest.raises(CacheError, match="tier='disk'"):
            cache.clear("disk")


def test_a_hit_is_what_is_loaded_even_if_more_turns_up(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(6)
    fill(engine, tmp_path / "b", tokens)
    fill(engine, tmp_path / "a", tokens[: 2 * CHUNK])
    tiers = [ObjectTier(str(tmp_path / name), name=name) for name in "ab"]
    with new_cache(engine, new_staging(engine, 8), tiers) as cache:
        hit: Hit = cache.lookup(tokens[: 3 * CHUNK])
        (tmp_path / "a" / hit.chunks.names[0]).unlink()
        table = engine.table(len(tokens))
        assert cache.load(hit, engine.places(table)).tokens == 3 * CHUNK
        engine.assert_loaded(tokens, table, 3)


def test_a_load_passes_over_a_tier_that_failed_since_the_lookup(tmp_path: Path) -> None:
    """Three tiers; the second fails. What it has is read from the third, whatever the hit says."""
    engine, tokens = make_engine(), sequence(6)
    for name, first, stop in (("a", 0, 2), ("b", 0, 4), ("c", 2, 6)):
        fill(engine, tmp_path / name, tokens[: stop * CHUNK], first)
    tiers = [Recorder(ObjectTier(str(tmp_path / name), name=name)) for name in "abc"]
    with new_cache(engine, new_staging(engine, 8), tiers) as cache:
        hit = cache.lookup(tokens)
        assert list(hit.by_tier) == ["a", "b", "c"]
        cache.tier_set.failed("b", TimeoutError())
        assert cache.tier_states()["b"] == "open"
        table = engine.table(len(tokens))
        assert cache.load(hit, engine.places(table)).by_tier == {"a": 2 * CHUNK, "c": 4 * CHUNK}
        engine.assert_loaded(tokens, table, 6)
        assert not tiers[1].got, "a tier that is passed over was read"
        assert cache.tier_states()["b"] == "open"


def test_a_tier_that_cannot_pin_holds_nothing(tmp_path: Path) -> None:
    class Unpinned(ObjectTier):
        def pin(self, names: Sequence[str], seconds: float) -> int:
            raise OSError("on purpose")

    engine, tokens = make_engine(), sequence(2)
    for name in "ab":
        fill(engine, tmp_path / name, tokens)
    tiers = [Unpinned(str(tmp_path / "a"), name="a"), ObjectTier(str(tmp_path / "b"), name="b")]
    with new_cache(engine, new_staging(engine, 4), tiers) as cache:
        assert cache.pin(tokens, 1) == len(tokens)
        assert cache.counts().read_errors == {"a": 1}


def test_callers_may_reuse_the_array_of_their_tokens(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(3)
    fill(engine, tmp_path / "a", tokens)
    with new_cache(engine, new_staging(engine, 4), [ObjectTier(str(tmp_path / "a"))]) as cache:
        mine = tokens.copy()
        hit = cache.lookup(mine)
        mine[:] = 0
        table = engine.table(len(tokens))
        assert cache.load(hit, engine.places(table)).tokens == len(tokens)
        engine.assert_loaded(tokens, table, 3)
        assert not cache.counts().damaged, "good records were taken for damaged ones, and deleted"


def test_loaded_bytes_are_those_of_the_records(tmp_path: Path) -> None:
    layout = small_layout()
    engine = Engine(layout, small_namespace(layout, 12))
    tokens = sequence(3)
    staging = new_staging(engine, 4)
    with new_cache(engine, staging, [ObjectTier(str(tmp_path))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        cache.load(cache.lookup(tokens), engine.places(table))
        assert cache.counts().loaded_bytes == cache.counts().stored_bytes


def test_a_store_that_is_called_off_is_counted_and_says_how_much(tmp_path: Path) -> None:
    """It is called off while its first batch is put; there is room for one batch of two chunks at a time."""
    engine, tokens = make_engine(), sequence(6)
    begun, gate = threading.Event(), threading.Event()

    class Gated(ObjectTier):
        def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
            begun.set()
            gate.wait(DEADLINE_S)
            super().put(names, leases, on_complete)

    with new_cache(engine, new_staging(engine, 2), [Gated(str(tmp_path))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        future = cache.store_async(tokens, engine.places(table))
        assert begun.wait(DEADLINE_S)
        assert not future.cancel()
        gate.set()
        assert future.result(DEADLINE_S).new_tokens == 2 * CHUNK
        assert cache.counts().cancelled == 1
        cache.flush()
        assert cache.lookup(tokens).tokens == 2 * CHUNK


def test_a_tier_slower_than_computing_is_left_out_until_it_must_be_tried_again(tmp_path: Path) -> None:
    engine, tokens = make_engine(2), sequence(6)
    fill(engine, tmp_path, tokens)
    with new_cache(engine, new_staging(engine, 16), [ObjectTier(str(tmp_path))]) as cache:
        table = engine.table(len(tokens))
        assert cache.lookup(tokens, prefill_tokens_per_s=1e9).tokens == 6 * CHUNK, "nothing is known of it"
        cache.load(cache.lookup(tokens), engine.places(table))
        assert cache.lookup(tokens, prefill_tokens_per_s=1e9).tokens == 0
        assert cache.lookup(tokens, first=2, prefill_tokens_per_s=1e9).tokens == 2 * CHUNK
        assert cache.lookup(tokens, first=9, prefill_tokens_per_s=1e9).tokens == 6 * CHUNK
        assert cache.lookup(tokens, prefill_tokens_per_s=1e-9).tokens == 6 * CHUNK
        assert cache.lookup(tokens).tokens == 6 * CHUNK
        assert cache.counts().declined_tokens == {"disk": 10 * CHUNK}


def test_records_are_verified_while_an_earlier_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path, tokens)
    hangs: set[str] = set()
    tier = FaultyTier(
        ObjectTier(str(tmp_path)),
        lambda operation, name: Fault.HANG if operation == "get" and name in hangs else None,
    )
    verified = threading.Semaphore(0)
    verify = reads.record.verify

    def note(*args: Any) -> Any:
        found = verify(*args)
        verified.release()
        return found

    monkeypatch.setattr(reads.record, "verify", note)
    with new_cache(engine, new_staging(engine, 8), [tier]) as cache:
        hit = cache.lookup(tokens)
        hangs.add(hit.chunks.names[0])
        table = engine.table(len(tokens))
        loaded = cache.load_async(hit, engine.places(table))
        for _ in range(3):
            assert verified.acquire(timeout=DEADLINE_S)
        assert not loaded.done()
        assert not verified.acquire(blocking=False)
        tier.release()
        assert loaded.result(DEADLINE_S).tokens == len(tokens)
        assert verified.acquire(blocking=False)
        assert not verified.acquire(blocking=False), "a record was verified twice"
        engine.assert_loaded(tokens, table, 4)
