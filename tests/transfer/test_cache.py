"""A cache stores and loads leading runs over real tiers, writes back, counts, and reports errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from repository import SUPPORT
from two_tier_caches import make_engine, open_cache, sequence, store

from kvkit.cache import Cache, CacheError, CacheTimeout, SequencePages
from kvkit.format.layout import KVLayout, LayerGroup, LayoutError
from kvkit.format.record import Damage
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.lab.testbed.waiting import wait_for
from kvkit.staging import Staging, release_all
from kvkit.tiers.base import Tier
from kvkit.tiers.health import FAILURES_TO_PAUSE
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import DEADLINE_S
from kvkit.tiers.testing.faulty import Fault, FaultyTier, Wrapper
from kvkit.transfer import clearing
from kvkit.transfer.lookup import look_up_in_memory
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, Policy, PolicyError, RequestPolicy
from kvkit.transfer.sequence import Hit


@pytest.mark.parametrize("groups", [1, 3])
def test_store_lookup_load_round_trip(tmp_path: Path, groups: int) -> None:
    engine = make_engine(groups)
    tokens = sequence(8 * 5 + 3)
    with open_cache(engine, tmp_path, slots=12 * groups) as cache:
        store(cache, engine, tokens)
        hit = cache.lookup(tokens)
        assert hit.tokens == 40
        assert sum(hit.by_tier.values()) == 40
        table = engine.table(48)
        loaded = cache.load(hit, engine.places(table))
        assert loaded.tokens == 40
        engine.assert_loaded(tokens, table, 5)
        cache.check_integrity()


@pytest.mark.parametrize("groups", [1, 3])
def test_what_memory_holds_whole_is_known_at_once(tmp_path: Path, groups: int) -> None:
    """And nothing else: of a part other tiers may hold more. What is not known counts as no lookup."""
    engine, tokens = make_engine(groups), sequence(8 * 4)
    longer = np.concatenate([tokens, sequence(8, seed=1)])
    with open_cache(engine, tmp_path, slots=12 * groups, memory_slots=4 * groups) as cache:

        def in_memory(
            asked: npt.NDArray[np.int32], policy: RequestPolicy = DEFAULT_REQUEST_POLICY
        ) -> Hit | None:
            return look_up_in_memory(cache.tier_set, cache.chunks(asked, policy=policy), 0, None)

        assert in_memory(tokens) is None
        store(cache, engine, tokens)
        hit = in_memory(tokens)
        assert hit is not None
        assert hit.plan == cache.lookup(tokens).plan
        assert hit.by_tier == {"memory": 32}
        before = cache.counts()
        assert in_memory(longer) is None
        assert in_memory(tokens[:7]) is None, "no whole chunk"
        assert in_memory(tokens, RequestPolicy(load_from=("disk",))) is None
        assert cache.counts() == before
        table = engine.table(32)
        assert cache.load(hit, engine.places(table)).tokens == 32
        engine.assert_loaded(tokens, table, 4)
        cache.tiers["memory"].delete(hit.chunks.records(0, 1))
        assert in_memory(tokens) is None, "its first chunk is on disk alone"
        assert cache.lookup(tokens).by_tier == {"disk": 32}


def test_a_tier_in_memory_that_fails_is_left_to_the_lookup_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = make_engine(), sequence(8)
    with open_cache(engine, tmp_path) as cache:
        store(cache, engine, tokens)

        def fail(name: str) -> int:
            raise OSError

        monkeypatch.setattr(cache.tiers["memory"], "size", fail)
        assert look_up_in_memory(cache.tier_set, cache.chunks(tokens), 0, None) is None


@pytest.mark.parametrize("hash_name", ["xxh3_128", "sha256", "blake3"])
def test_a_new_cache_finds_what_an_older_one_stored(tmp_path: Path, hash_name: str) -> None:
    engine = make_engine(hash=hash_name)
    tokens = sequence(32)
    with open_cache(engine, tmp_path) as cache:
        store(cache, engine, tokens)
    with open_cache(engine, tmp_path) as cache:
        hit = cache.lookup(list(tokens))
        assert hit.by_tier == {"disk": 32}
        table = engine.table(32)
        assert cache.load(hit, engine.places(table)).by_tier == {"disk": 32}
        engine.assert_loaded(tokens, table, 4)


def test_a_hit_ends_at_the_first_gap_and_goes_on_in_the_next_tier(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(48)
    with open_cache(engine, tmp_path, memory_slots=3) as cache:
        store(cache, engine, tokens)  # memory keeps 3 of the 6 chunks, disk all
        disk = cache.tiers["disk"]
        names = cache.lookup(tokens).chunks.names
        disk.delete([names[4]])
        cache.tiers["memory"].delete(names)
        hit = cache.lookup(tokens)
        assert hit.by_tier == {"disk": 32}
        table = engine.table(48)
        assert cache.load(hit, engine.places(table)).tokens == 32
        engine.assert_loaded(tokens, table, 4)
        assert cache.tiers["memory"].match_prefix(names) == 3, "the first chunks loaded were written back"


def test_write_back_shares_the_slot_and_serves_the_next_load(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    with open_cache(engine, tmp_path, memory_slots=4) as cache:
        store(cache, engine, tokens)
    with open_cache(engine, tmp_path, memory_slots=4) as cache:
        table = engine.table(24)
        cache.load(cache.lookup(tokens), engine.places(table))
        assert cache.lookup(tokens).by_tier == {"memory": 24}
        assert cache.staging.free == cache.staging.slots - 3
        engine.wipe()
        cache.load(cache.lookup(tokens), engine.places(table))
        engine.assert_loaded(tokens, table, 3)


def test_what_a_target_holds_is_not_stored_again(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(48)
    policy = Policy(("disk",), ("disk",))
    with open_cache(engine, tmp_path, policy=policy) as cache:
        table = engine.table(48)
        engine.compute(tokens, table)
        assert cache.store(tokens[:24], engine.places(table)).new_tokens == 24
        cache.flush()
        assert cache.store(tokens, engine.places(table)).new_tokens == 24
        cache.flush()
        assert cache.store(tokens, engine.places(table)).new_tokens == 0
        assert cache.counts().stored_records == {"disk": 6}


def test_more_chunks_than_slots_stream_through(tmp_path: Path) -> None:
    engine = make_engine()
    engine = Engine(engine.layout, engine.namespace, blocks=128)
    tokens = sequence(24 * 8)
    with open_cache(engine, tmp_path, slots=4, memory_slots=1) as cache:
        store(cache, engine, tokens)
        table = engine.table(24 * 8)
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 24 * 8
        engine.assert_loaded(tokens, table, 24)
        cache.check_integrity()


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    engine = make_engine(salt="a")
    other = small_namespace(engine.layout, salt="b")
    tokens = sequence(24)
    with open_cache(engine, tmp_path) as cache:
        store(cache, engine, tokens)
        assert cache.lookup(tokens).tokens == 24
        assert cache.lookup(tokens, other).tokens == 0
    assert not any(b'"a"' in f.read_bytes() for f in tmp_path.rglob("zarr.json")), (
        "the salt is not written down"
    )


def test_engines_with_different_pages_share_a_store(tmp_path: Path) -> None:
    tokens = sequence(32)
    group = LayerGroup(layers=(0, 1), kv_heads=2, k_size=8, v_size=4, dtype="float32", block_tokens=4)
    writer_layout = KVLayout((group,))
    reader_layout = KVLayout(
        (LayerGroup((0, 1), kv_heads=2, k_size=8, v_size=4, dtype="float32", block_tokens=2, order="BLNHC"),)
    )
    writer = Engine(writer_layout, small_namespace(writer_layout))
    reader = Engine(reader_layout, small_namespace(reader_layout))
    assert writer.namespace == reader.namespace
    with open_cache(writer, tmp_path) as cache:
        store(cache, writer, tokens)
    with open_cache(reader, tmp_path) as cache:
        table = reader.table(32)
        assert cache.load(cache.lookup(tokens), reader.places(table)).tokens == 32
        reader.assert_loaded(tokens, table, 4)


def test_opaque_pages_round_trip(tmp_path: Path) -> None:
    layout = KVLayout(
        (
            LayerGroup(
                (0, 1, 2), kv_heads=1, k_size=1, v_size=0, dtype="uint8", block_tokens=4, page_bytes=132
            ),
        )
    )
    engine = Engine(layout, small_namespace(layout, isa="avx512"))
    tokens = sequence(16)
    with open_cache(engine, tmp_path) as cache:
        store(cache, engine, tokens)
        table = engine.table(16)
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 16
        engine.assert_loaded(tokens, table, 2)


def test_token_slots(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(16)
    with open_cache(engine, tmp_path) as cache:
        store(cache, engine, tokens)
        table = engine.table(16)
        slots = np.concatenate([np.arange(4) + 4 * block for block in table]).astype(np.int64)
        cache.load(cache.lookup(tokens), SequencePages(engine.pages[0], slots=slots))
        engine.assert_loaded(tokens, table, 2)


def test_an_empty_or_short_prompt_is_no_hit_and_no_error(tmp_path: Path) -> None:
    engine = make_engine()
    with open_cache(engine, tmp_path) as cache:
        for tokens in (sequence(0), sequence(7)):
            hit = cache.lookup(tokens)
            assert hit.tokens == 0
            assert cache.load(hit, engine.places([])).tokens == 0
            assert cache.store(tokens, engine.places([])).new_tokens == 0


def test_place_errors_name_the_argument(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(16)
    with open_cache(engine, tmp_path) as cache:
        store(cache, engine, tokens)
        hit = cache.lookup(tokens)
        with pytest.raises(CacheError, match=r"pages\[0\].blocks: 3 entries, 2 chunks take 4"):
            cache.load(hit, engine.places([1, 2, 3]))
        with pytest.raises(CacheError, match="blocks or slots"):
            cache.load(hit, SequencePages(engine.pages[0]))
        with pytest.raises(CacheError, match="2 given, the layout has 1"):
            cache.load(hit, engine.places([1, 2, 3, 4]) * 2)
        with pytest.raises(ValueError, match="blocks"):
            cache.load(hit, engine.places([1, 2, 3, 1000]))
        cache.check_integrity()


def test_construction_errors_name_the_setting(tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(PolicyError, match="store_to='tape': no such tier; the tiers are memory, disk"):
        open_cache(engine, tmp_path, policy=Policy(("memory",), ("tape",)))
    with pytest.raises(CacheError, match="slot_bytes"):
        Cache(engine.layout, engine.namespace, [], staging=Staging(4096, 2))
    other = small_layout(2)
    with pytest.raises(LayoutError, match=r"namespace\.layout"):
        Cache(other, engine.namespace, [], staging=Staging(1 << 20, 2))


def hanging(folder: Path, operation: str) -> FaultyTier:
    """A folder whose gets, puts or lookups hang until it is released or closed."""
    inner = ObjectTier(str(folder), name="stuck")
    return FaultyTier(inner, lambda asked, name: Fault.HANG if asked == operation else None)


def test_a_tier_that_never_answers_is_a_miss_at_the_deadline(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    stuck = hanging(tmp_path / "stuck", "get")
    policy = Policy(("stuck", "disk"), ("stuck", "disk"))
    with open_cache(engine, tmp_path / "disk", policy=policy, timeout_s=1.0, extra=[stuck]) as cache:
        store(cache, engine, tokens)
        table = engine.table(24)
        loaded = cache.load(cache.lookup(tokens), engine.places(table))
        assert loaded.by_tier == {"disk": 24}
        engine.assert_loaded(tokens, table, 3)
        assert cache.counts().timeouts["stuck"] >= 1
        stuck.release()
    engine.assert_loaded(tokens, table, 3)


def test_flush_gives_up_at_its_deadline(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(8)
    stuck = hanging(tmp_path, "put")
    with open_cache(engine, None, policy=Policy((), ("stuck",)), extra=[stuck], timeout_s=1.0) as cache:
        table = engine.table(8)
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        with pytest.raises(CacheTimeout, match="1 puts are still in flight"):
            cache.flush()
        stuck.release()
        cache.flush(10)
        assert cache.counts().stored_records == {"stuck": 1}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 2))
def test_loads_are_leading_runs_whatever_is_missing(missing: list[int], groups_less_one: int) -> None:
    engine = make_engine(groups_less_one + 1)
    groups = groups_less_one + 1
    tokens = sequence(48)
    with open_cache(engine, None, slots=24 * groups, memory_slots=20 * groups) as cache:
        store(cache, engine, tokens)
        names = cache.lookup(tokens).chunks.names
        stale = cache.lookup(tokens)
        cache.tiers["memory"].delete([names[i * groups + i % groups] for i in missing])
        run = min(missing)
        assert cache.lookup(tokens).tokens == run * 8
        table = engine.table(48)
        assert cache.load(stale, engine.places(table)).tokens == run * 8, "a hit may be out of date"
        engine.assert_loaded(tokens, table, run)
        cache.check_integrity()


def test_threads_share_a_cache(tmp_path: Path) -> None:
    engine = make_engine()
    errors: list[BaseException] = []
    with open_cache(engine, tmp_path, slots=6, memory_slots=2) as cache:

        def work(seed: int) -> None:
            try:
                mine = Engine(engine.layout, engine.namespace)
                for round_ in range(6):
                    shared = sequence(16)
                    tokens = np.concatenate([shared, sequence(16, seed * 100 + round_)])
                    table = mine.table(32)
                    mine.compute(tokens, table)
                    cache.store(tokens, mine.places(table))
                    mine.wipe()
                    hit = cache.lookup(tokens)
                    loaded = cache.load(hit, mine.places(table))
                    assert loaded.tokens <= hit.tokens
                    mine.assert_loaded(tokens, table, loaded.tokens // 8)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        cache.flush()
        cache.check_integrity()
        assert cache.staging.free == cache.staging.slots - 2


def test_bfloat16_pages_round_trip(tmp_path: Path) -> None:
    layout = small_layout(dtype="bfloat16")
    engine = Engine(layout, small_namespace(layout))
    assert engine.pools[0][0].dtype == torch.bfloat16
    tokens = sequence(16)
    with open_cache(engine, tmp_path) as cache:
        store(cache, engine, tokens)
        table = engine.table(16)
        cache.load(cache.lookup(tokens), engine.places(table))
        engine.assert_loaded(tokens, table, 2)


@pytest.mark.parametrize("codec", ["zstd", "bitshuffle-zstd"])
def test_a_tier_with_a_codec_serves_memory_with_plain_records(codec: str, tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    packed = ObjectTier(TierConfig(url=str(tmp_path), codec=codec), name="packed")
    with open_cache(engine, None, extra=[packed]) as cache:
        store(cache, engine, tokens)
        assert not cache.counts().write_errors
    packed = ObjectTier(TierConfig(url=str(tmp_path), codec=codec), name="packed")
    with open_cache(engine, None, extra=[packed]) as cache:
        table = engine.table(24)
        assert cache.load(cache.lookup(tokens), engine.places(table)).by_tier == {"packed": 24}
        engine.assert_loaded(tokens, table, 3)
        engine.wipe()
        assert cache.load(cache.lookup(tokens), engine.places(table)).by_tier == {"memory": 24}
        engine.assert_loaded(tokens, table, 3)


def test_records_written_with_another_codec_stay_readable(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    table = engine.table(24)
    for codec, stop in (("zstd", 8), ("none", 16), ("bitshuffle-zstd", 24)):
        tier = ObjectTier(TierConfig(url=str(tmp_path), codec=codec), name="packed")
        with open_cache(engine, None, memory_slots=0, extra=[tier]) as cache:
            engine.wipe()
            loaded = cache.load(cache.lookup(tokens), engine.places(table))
            assert loaded.tokens == stop - 8
            engine.assert_loaded(tokens, table, loaded.tokens // 8)
            store(cache, engine, tokens[:stop])


def test_a_damaged_compressed_record_is_a_miss(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    table = engine.table(24)
    tier = ObjectTier(TierConfig(url=str(tmp_path), codec="zstd"), name="packed")
    with open_cache(engine, None, memory_slots=0, extra=[tier]) as cache:
        store(cache, engine, tokens)
        file = tmp_path / cache.lookup(tokens).chunks.names[1]
        data = bytearray(file.read_bytes())
        data[4096] ^= 1
        file.write_bytes(data)
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 8
        engine.assert_loaded(tokens, table, 1)
        assert cache.counts().damaged == {("packed", "layer"): 1}
        assert not file.exists()


def test_a_tier_that_hangs_when_asked_does_not_hang_the_lookup(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    hung = hanging(tmp_path / "hung", "count")
    policy = Policy(("stuck", "disk"), ("disk",))
    with open_cache(
        engine, tmp_path / "d", memory_slots=0, policy=policy, extra=[hung], timeout_s=1.0
    ) as cache:
        table = engine.table(24)
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush(10)
        assert cache.lookup(tokens).by_tier == {"disk": 24}
        assert cache.counts().timeouts == {"stuck": 1}


def test_a_tier_that_keeps_failing_is_passed_over(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    asked: list[str] = []

    def plan(operation: str, name: str) -> Fault | None:
        asked.append(operation)
        return Fault.FAIL

    broken = FaultyTier(ObjectTier(str(tmp_path), name="broken"), plan)
    with open_cache(engine, None, memory_slots=0, policy=Policy(("broken",), ()), extra=[broken]) as cache:
        for _ in range(FAILURES_TO_PAUSE + 5):
            assert cache.lookup(tokens).tokens == 0
        assert asked == ["count"] * FAILURES_TO_PAUSE
        assert cache.counts().read_errors["broken"] == FAILURES_TO_PAUSE


def test_a_hung_tier_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(SUPPORT)]!r}
from pathlib import Path
from test_cache import *

engine = make_engine()
hung = hanging({str(tmp_path)!r}, "count")
with open_cache(engine, None, memory_slots=0, extra=[hung], timeout_s=1.0) as cache:
    assert cache.lookup(sequence(24)).tokens == 0
    hung.close = lambda: hung._released.wait()
print("closed")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "closed\n", done.stderr


def test_a_load_that_gets_no_slot_ends_and_blames_no_tier(tmp_path: Path) -> None:
    engine = make_engine()
    tokens = sequence(24)
    with open_cache(engine, tmp_path, slots=4, memory_slots=0, timeout_s=1.0) as cache:
        store(cache, engine, tokens)
        taken = cache.staging.acquire(4, 1.0, at_least=4)
        table = engine.table(24)
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 0
        engine.compute(tokens, table)
        more = sequence(24, seed=1)
        assert cache.store(more, engine.places(table)).new_tokens == 0
        assert not cache.counts().timeouts
        release_all(taken)
        engine.wipe()
        assert cache.load(cache.lookup(tokens), engine.places(table)).tokens == 24
        engine.assert_loaded(tokens, table, 3)


class Stuck(Wrapper):
    """`inner`, whose listing or deleting waits for `gate`."""

    def __init__(self, inner: Tier, method: str) -> None:
        super().__init__(inner)
        self._method = method
        self.gate = threading.Event()

    def scan(self) -> Iterator[tuple[str, int]]:
        if self._method == "scan":
            self.gate.wait(DEADLINE_S)
        yield from self.inner.scan()

    def delete(self, names: Sequence[str]) -> None:
        if self._method == "delete":
            self.gate.wait(DEADLINE_S)
        self.inner.delete(names)


@pytest.mark.parametrize("method", ["scan", "delete"])
def test_clear_has_a_deadline(method: str, tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(40)
    table = engine.table(len(tokens))
    tier = Stuck(ObjectTier(f"file://{tmp_path}", name="stuck"), method)
    with open_cache(engine, None, extra=[tier]) as cache:
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table), to=["stuck"])
        cache.flush()
        with pytest.raises(
            TimeoutError, match=r"tier 'stuck': not empty after 0.05 s; 0 records are deleted"
        ):
            cache.clear("stuck", timeout_s=0.05)
        assert cache.lookup(tokens).tokens == 40, "a tier that is slow to list or delete still answers"
        tier.gate.set()
        cache.clear("stuck")
        assert list(tier.scan()) == []


def test_clear_deletes_more_records_than_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "CLEARED_AT_ONCE", 2)
    engine, tokens = make_engine(), sequence(40)
    table = engine.table(len(tokens))
    with open_cache(engine, tmp_path) as cache:
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table), to=["memory", "disk"])
        cache.flush()
        assert cache.clear("disk") == 5
        assert cache.lookup(tokens).by_tier == {"memory": 32}
        assert cache.clear("memory") == 4
        assert cache.clear("memory") == cache.clear("disk") == 0


def test_clear_goes_on_past_what_cannot_be_deleted_and_shuns_nothing_else(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(40)
    table = engine.table(len(tokens))
    kept: set[str] = set()
    disk = FaultyTier(
        ObjectTier(f"file://{tmp_path}"),
        lambda operation, name: Fault.FAIL if operation == "delete" and name in kept else None,
    )
    with open_cache(engine, None, extra=[disk], memory_slots=0) as cache:
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        names = cache.chunks(tokens).names
        kept.update(names[1:3])
        for name in names[1:3]:
            cache.tier_set.drop("disk", name, Damage.LAYER)
        assert cache.lookup(tokens).tokens == 8, "what could not be deleted is shunned"
        kept.remove(names[1])
        with pytest.raises(OSError, match=f"'disk': 4 records are deleted, 1 cannot be: {names[2]}"):
            cache.clear("disk")
        assert [name for name, _ in disk.scan()] == [names[2]]
        cache.store(tokens, engine.places(table))
        cache.flush()
        assert cache.lookup(tokens).tokens == 16
        kept.clear()
        assert cache.clear("disk") == 5
        cache.store(tokens, engine.places(table))
        cache.flush()
        assert cache.lookup(tokens).tokens == 40


def test_a_cache_that_is_open_has_no_threads_for_what_nobody_asked(tmp_path: Path) -> None:
    engine = make_engine()
    before = threading.active_count()
    with open_cache(engine, tmp_path) as cache:
        assert cache.staging.ready.wait(DEADLINE_S)
        wait_for(lambda: threading.active_count() - before <= 3)  # once compiled kernels are loaded
