"""What loads and stores share: tiers that report late, twice or never, and what they cost the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_loads import CHUNK, DEADLINE_S, fill, make_engine, new_cache, new_staging, sequence

from kvkit.staging import Lease, release_all
from kvkit.testing import Wrapper
from kvkit.tiers.base import OnComplete
from kvkit.tiers.objects import ObjectTier


class Stumbling(Wrapper):
    """`inner`, but a get or put of several records completes the first, twice, and then raises."""

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._stumble(self.inner.get, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self._stumble(self.inner.put, names, leases, on_complete)

    @staticmethod
    def _stumble(
        move: Callable[[Sequence[str], Sequence[Lease], OnComplete], None],
        names: Sequence[str],
        leases: Sequence[Lease],
        on_complete: OnComplete,
    ) -> None:
        done = threading.Event()

        def twice(name: str, error: BaseException | None) -> None:
            on_complete(name, error)
            on_complete(name, OSError("a second report"))
            done.set()

        move(names[:1], leases[:1], twice)
        assert done.wait(DEADLINE_S)
        if len(names) > 1:
            raise RuntimeError("stumbled")


def test_a_tier_that_raises_half_way_has_failed_in_the_rest_alone(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(4)
    fill(engine, tmp_path / "a", tokens)
    with new_cache(engine, new_staging(engine, 16), [Stumbling(ObjectTier(str(tmp_path / "a")))]) as cache:
        table = engine.table(len(tokens))
        loaded = cache.load(cache.lookup(tokens), engine.places(table))
        assert loaded.tokens == CHUNK, "a record that came was taken for one that failed"
        engine.assert_loaded(tokens, table, 1)
    assert cache.staging.free == cache.staging.slots
    with new_cache(engine, new_staging(engine, 16), [Stumbling(ObjectTier(str(tmp_path / "b")))]) as cache:
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        assert cache.puts_under_way() == 0
        counts = cache.counts()
        assert (counts.stored_records, counts.write_errors) == ({"disk": 1}, {"disk": 3})


def test_what_was_put_is_counted_although_its_slot_is_in_use_again(tmp_path: Path) -> None:
    engine, tokens = make_engine(), sequence(2)
    staging = new_staging(engine, 3)
    stored = threading.Event()

    class Late(ObjectTier):
        """Reports when the caller, too, has given its slots back, and somebody has taken them."""

        def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
            def later(name: str, error: BaseException | None) -> None:
                assert stored.wait(DEADLINE_S)
                others = staging.acquire(staging.slots, DEADLINE_S)
                release_all(others)
                on_complete(name, error)

            super().put(names, leases, later)

    with new_cache(engine, staging, [Late(str(tmp_path), threads=1)]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        stored.set()
        cache.flush()
        size = cache.lookup(tokens).chunks.formats[0].record_bytes
        moved = cache.counts().bytes_per_second["disk", "put"]
        seconds = cache.counts().seconds["disk", "put"]
        assert moved.total * seconds.total == pytest.approx(2 * size)
