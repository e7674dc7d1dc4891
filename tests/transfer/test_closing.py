"""Closing a cache keeps one deadline for everything, and logs what stays unsaved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from caches import CHUNK, DEADLINE_S, make_engine, new_staging, sequence

from kvkit.cache import Cache
from kvkit.lab.testbed.engine_stub import Engine
from kvkit.staging import Lease
from kvkit.tiers.base import OnComplete
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.faulty import Wrapper
from kvkit.transfer.closing import unsaved
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import largest_record_bytes

FOR_EVER_S = 3000.0


class Stuck(Wrapper):
    """A folder whose operations of these names hang until `go_on` is set; closing does not set it."""

    def __init__(self, folder: Path, *operations: str, name: str = "stuck") -> None:
        super().__init__(ObjectTier(str(folder), name=name))
        self.operations = operations
        self.go_on, self.met = threading.Event(), threading.Event()

    def match_prefix(self, names: Sequence[str]) -> int:
        self._meet("count")
        return self.inner.match_prefix(names)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        held = [lease.share() for lease in leases]

        def later() -> None:
            self._meet("put")
            self.inner.put(names, held, on_complete)
            for lease in held:
                lease.release()

        threading.Thread(target=later, daemon=True).start()

    def close(self) -> None:
        self._meet("close")
        self.inner.close()

    def _meet(self, operation: str) -> None:
        if operation in self.operations:
            self.met.set()
            self.go_on.wait()


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "kvkit"):
        yield


def open_cache(engine: Engine, tiers: Sequence[Stuck], slots: int = 40, shutdown_s: float = 0.5) -> Cache:
    """A cache whose single waits end never, as good as."""
    names = tuple(tier.name for tier in tiers)
    return Cache(
        engine.layout,
        engine.namespace,
        tiers,
        staging=new_staging(engine, slots),
        policy=Policy(names, names),
        timeout_s=FOR_EVER_S,
        shutdown_timeout_s=shutdown_s,
    )


def store(cache: Cache, engine: Engine, chunks: int, seed: int = 0) -> None:
    tokens = sequence(chunks, seed)
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    cache.store(tokens, engine.places(table))


def go_on(cache: Cache, *tiers: Stuck) -> None:
    """End the hangs, and wait until every slot is back."""
    for tier in tiers:
        tier.go_on.set()
    while cache.staging.free < cache.staging.slots:
        threading.Event().wait(0.001)


def test_one_deadline_is_for_all_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lookup, puts and the closing of two tiers hang; each alone would take all of the time."""
    engine = make_engine()
    tiers = [Stuck(tmp_path / name, "put", "close", name=name) for name in ("near", "far")]
    cache = open_cache(engine, tiers)
    store(cache, engine, 5)
    for tier in tiers:
        tier.operations += ("count",)
    looked = cache.lookup_async(sequence(5))
    assert tiers[0].met.wait(DEADLINE_S)
    closing = threading.Thread(target=cache.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    told = [record.getMessage() for record in caplog.records]
    size = 5 * largest_record_bytes(engine.layout, engine.namespace) / 2**20
    unsaved = f"5 records ({size:.1f} MiB) for tier 'near', 5 records ({size:.1f} MiB) for tier 'far'"
    assert [line for line in told if line.startswith("close: saving")] == [
        f"close: saving {unsaved}; at most 0.5 s"
    ]
    assert f"close: not saved after 0.5 s, and lost: {unsaved}" in "\n".join(told)
    assert "close: a job of 'kvkit-look' has not ended" in "\n".join(told)
    for tier in tiers:
        assert f"tier {tier.name!r} did not close in time" in told
    go_on(cache, *tiers)
    assert looked.exception(DEADLINE_S) is None


def test_what_stores_have_not_copied_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With 8 slots 12 of 20 chunks wait for one."""
    engine = make_engine(blocks=128)
    tier = Stuck(tmp_path, "put")
    cache = open_cache(engine, [tier], slots=8)
    tokens = sequence(20)
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    stored = cache.store_async(tokens, engine.places(table))
    assert tier.met.wait(DEADLINE_S)
    while unsaved(cache.writes).uncopied != 12:
        stored.exception(0.001) if stored.done() else threading.Event().wait(0.001)
    cache.close()
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "12 records of stores that are not copied yet" in told
    assert "8 records (" in told
    go_on(cache, tier)


def test_what_is_saved_in_time_is_not_told_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    tier = Stuck(tmp_path, "put")
    cache = open_cache(engine, [tier], shutdown_s=DEADLINE_S)
    store(cache, engine, 5)
    tier.go_on.set()
    cache.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with open_cache(engine, [Stuck(tmp_path)]) as again:
        assert again.lookup(sequence(5)).tokens == 5 * CHUNK


def test_a_signal_that_ends_the_closing_finds_its_word_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's workers get SystemExit amid it: no further wait, but a line."""
    engine = make_engine()
    tier = Stuck(tmp_path, "put", "close")
    cache = open_cache(engine, [tier], shutdown_s=FOR_EVER_S)
    store(cache, engine, 5)

    class Signal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "saving" in record.getMessage():
                raise SystemExit

    handler = Signal()
    logging.getLogger("kvkit").addHandler(handler)
    try:
        with pytest.raises(SystemExit):
            cache.close()
    finally:
        logging.getLogger("kvkit").removeHandler(handler)
    assert "close: not saved before SystemExit" in caplog.text
    assert "5 records (" in caplog.text
    go_on(cache, tier)
