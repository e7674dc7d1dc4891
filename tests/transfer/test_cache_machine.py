"""Random calls of a cache stay correct over all tiers, with faults, restarts and damage.

The first machine calls and waits, and compares with a plain dict; the second keeps calls in flight over tiers
that are late, fail, lie or hang.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import numpy.typing as npt
from caches import CHUNK, DEADLINE_S, make_engine, new_cache, new_staging
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from run_sizes import examples

from kvkit.cache import Cache
from kvkit.format.record import RecordFormat
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import Tier
from kvkit.tiers.health import Health
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.faulty import Fault, FaultyTier, LatencyTier
from kvkit.transfer import write_pipeline as writes
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import Hit, Loaded
from kvkit.transfer.store import Stored
from kvkit.workers import Transfer

# few, so that they meet again; they share prefixes, and chunks repeat after other prefixes
SEQUENCES = [[], [0], [0, 1, 2, 0, 1], [0, 1, 1, 0], [2, 1, 2], [2, 1, 2, 2, 2, 2]]
ONE = st.sampled_from(SEQUENCES)
FAULTS = {
    "none": {},
    "disk refuses": {"put": Fault.FAIL},
    "disk loses": {"put": Fault.DROP},
    "disk cannot read": {"get": Fault.FAIL},
    "disk flips bits": {"get": Fault.FLIP},
    "disk cuts short": {"get": Fault.TRUNCATE},
    "disk cannot be asked": {"count": Fault.FAIL},
    "disk cannot delete": {"delete": Fault.FAIL},
}


class CacheMachine(RuleBasedStateMachine):
    """`held` is the model: by tier, the records that must be there, whole, as of the last flush."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.bucket = f"memory://{uuid.uuid4().hex}"
        self.held: dict[str, set[str]] = {"disk": set(), "remote": set()}
        self.faults: dict[str, Fault] = {}
        self.harmed = False
        self.cache: Cache | None = None
        # a busy machine can stop for longer: what a tier is given would be left out, which is not modelled
        self.patience = mock.patch.object(writes, "STUCK_S", math.inf)
        self.patience.start()

    @initialize(
        groups=st.integers(1, 2),
        memory_slots=st.integers(0, 5),
        spare=st.integers(0, 4),
        order=st.permutations(["memory", "disk", "remote"]),
    )
    def open(self, groups: int, memory_slots: int, spare: int, order: list[str]) -> None:
        self.order = order
        layout = small_layout(groups)
        self.engine = Engine(layout, small_namespace(layout))
        self.memory_slots = memory_slots
        self.slots = memory_slots + groups + spare
        self._open()

    def _open(self) -> None:
        layout, space = self.engine.layout, self.engine.namespace
        staging = Staging(RecordFormat.of(layout, 0, space).record_bytes, self.slots)
        tiers: list[Any] = []
        if self.memory_slots:
            tiers.append(MemoryTier(staging, self.memory_slots * staging.slot_bytes))
        disk = ObjectTier(TierConfig(url=f"file://{self.folder}", threads=2), name="disk")
        tiers.append(FaultyTier(disk, lambda operation, name: self.faults.get(operation)))
        tiers.append(ObjectTier(TierConfig(url=self.bucket, threads=1, codec="zstd"), name="remote"))
        names = [tier.name for tier in tiers]
        policy = Policy(tuple(n for n in self.order if n in names), tuple(names), tuple(names[:2]))
        self.cache = Cache(layout, space, tiers, staging=staging, policy=policy)

    @rule()
    def restart(self) -> None:
        assert self.cache is not None
        self.cache.close()
        self.cache.check_integrity()
        assert self.cache.staging.free == self.cache.staging.slots
        self._open()

    @rule(fault=st.sampled_from(sorted(FAULTS)))
    def meet(self, fault: str) -> None:
        self.faults = FAULTS[fault]
        if not self.faults and self.cache is not None:
            self.cache.tier_set.health["disk"] = Health()  # no waiting for the pause to end

    @rule(chunks=ONE, stale=st.booleans())
    def turn(self, chunks: list[int], stale: bool) -> None:
        """What an engine does: load what is there, compute the rest, store."""
        self.load(chunks, stale)
        self.store(chunks)
        self.load(chunks, False)

    def store(self, chunks: list[int]) -> None:
        assert self.cache is not None
        tokens, table = self._sequence(chunks)
        self.engine.wipe()
        self.engine.compute(tokens, table)
        stored = self.cache.store(tokens, self.engine.places(table))
        assert stored.tokens == len(tokens)
        self.engine.wipe()  # the pages may be reused at once
        self.cache.flush()
        names = set(self.cache.chunks(tokens).names)
        self.held["remote"] |= names
        if not self.faults.keys() & {"put", "count"} and self.cache.tier_set.usable("disk"):
            self.held["disk"] |= names

    def load(self, chunks: list[int], stale: bool) -> None:
        assert self.cache is not None
        tokens, table = self._sequence(chunks)
        hit = self.cache.lookup(tokens)
        if stale and hit.plan.chunks:
            victim = hit.chunks.names[0]
            for tier in self.cache.tiers.values():
                (tier.inner if isinstance(tier, FaultyTier) else tier).delete([victim])
            self._gone(victim)
        self.engine.wipe()
        loaded = self.cache.load(hit, self.engine.places(table))
        assert loaded.tokens <= hit.tokens
        assert sum(loaded.by_tier.values()) == loaded.tokens
        self.engine.assert_loaded(tokens, table, loaded.tokens // CHUNK)
        if not stale:
            assert hit.tokens >= CHUNK * self._run(hit.chunks.names, "remote")
            assert loaded.tokens >= CHUNK * self._run(hit.chunks.names, "remote")
            if not self.faults and not self.harmed:
                assert loaded.tokens == hit.tokens
        self.cache.flush()  # of what was written back
        if self.faults.keys() & {"get"}:
            self.held["disk"].clear()  # what did not verify was deleted

    @rule(
        where=st.tuples(*[st.integers(0, 2**16)] * 3),
        how=st.sampled_from(["flip", "swap", "cut", "empty", "delete"]),
    )
    def damage(self, where: tuple[int, int, int], how: str) -> None:
        """`where` is the file, the byte and the bit, or the other file; each modulo how many there are."""
        files = sorted(file for file in self.folder.rglob("c.*") if file.stat().st_size)
        if not files:
            return
        self.harmed = True
        file = files[where[0] % len(files)]
        data = bytearray(file.read_bytes())
        if how == "flip":
            layers = range(min(4096, len(data) - 1), len(data))
            bytes_ = layers if where[2] & 8 else range(len(data))
            data[bytes_[where[1] % len(bytes_)]] ^= 1 << where[2] % 8
        elif how == "cut":
            del data[where[1] % len(data) :]
        elif how == "empty":
            data.clear()
        elif how == "swap":
            data = bytearray(files[where[1] % len(files)].read_bytes())
        if how == "delete":
            file.unlink()
        else:
            file.write_bytes(data)
        self.held["disk"].discard(str(file.relative_to(self.folder)))

    @invariant()
    def no_slot_is_lost(self) -> None:
        if self.cache is not None:
            self.cache.check_integrity()

    def teardown(self) -> None:
        self.patience.stop()
        if self.cache is not None:
            self.cache.close()
            self.cache.check_integrity()
            assert self.cache.staging.free == self.cache.staging.slots
        assert not list(self.folder.rglob(".tmp-*"))
        shutil.rmtree(self.folder)

    def _sequence(self, chunks: list[int]) -> tuple[npt.NDArray[np.int32], list[int]]:
        tokens = np.repeat(np.array(chunks, np.int32), CHUNK)
        return tokens, self.engine.table(len(tokens))

    def _run(self, names: list[str], tier: str) -> int:
        """Whole chunks at the start of `names` that `tier` must have."""
        groups = len(self.engine.layout.groups)
        count = next((i for i, name in enumerate(names) if name not in self.held[tier]), len(names))
        return count // groups

    def _gone(self, name: str) -> None:
        for names in self.held.values():
            names.discard(name)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


TIMEOUT_S, LATE_S = 0.05, 0.002
"""What a call may wait for a tier that hangs, and how late the far tier is. No check depends on either."""

MOST_UNDER_WAY = 8
SOME = st.lists(ONE, min_size=1, max_size=4)
ASYNC_FAULTS = {
    "none": {},
    "refuses": {"put": Fault.FAIL},
    "loses": {"put": Fault.DROP},
    "cannot read": {"get": Fault.FAIL},
    "flips bits": {"get": Fault.FLIP},
    "cuts short": {"get": Fault.TRUNCATE},
    "cannot be asked": {"count": Fault.FAIL},
    "cannot delete": {"delete": Fault.FAIL, "get": Fault.FLIP},
    "hangs": {"count": Fault.HANG},
    "hangs when it reads": {"get": Fault.HANG},
    "hangs when it writes": {"put": Fault.HANG},
}
Tokens = npt.NDArray[np.int32]
T = TypeVar("T")


class AsyncCacheMachine(RuleBasedStateMachine):
    """`stored` is the model: the payload of every record that any store was given, by name."""

    @initialize(
        groups=st.integers(1, 2),
        memory_slots=st.integers(0, 4),
        spare=st.integers(0, 4),
        order=st.permutations(["memory", "disk", "far"]),
        write_back=st.sampled_from([(), ("memory",), ("memory", "disk")]),
        fault=st.sampled_from(sorted(ASYNC_FAULTS)),
    )
    def open(
        self,
        groups: int,
        memory_slots: int,
        spare: int,
        order: list[str],
        write_back: tuple[str, ...],
        fault: str,
    ) -> None:
        """A cache that holds every sequence, as far as there is room, and the disk's first fault."""
        self.groups = groups
        self.folder = Path(tempfile.mkdtemp())
        self.stored: dict[str, bytes] = {}
        self.in_flight: list[tuple[Transfer[Any], Callable[[Any], None]]] = []
        self.faults: dict[str, Fault] = {}
        self.lied = False
        engine = make_engine(groups)
        self.staging = new_staging(engine, memory_slots + groups + spare)
        disk = ObjectTier(TierConfig(url=str(self.folder), threads=2, capacity=8 * self.staging.slot_bytes))
        self.disk = FaultyTier(disk, lambda operation, _: self.faults.get(operation))
        bucket = ObjectTier(
            TierConfig(url=f"memory://{uuid.uuid4().hex}", threads=2, codec="zstd"), name="far"
        )
        tiers: list[Tier] = [self.disk, LatencyTier(bucket, get_s=LATE_S, put_s=LATE_S)]
        if memory_slots:
            tiers.append(MemoryTier(self.staging, memory_slots * self.staging.slot_bytes))
        names = [tier.name for tier in tiers]
        self.cache: Cache = new_cache(
            engine,
            self.staging,
            tiers,
            retrieve_from=tuple(name for name in order if name in names),
            write_back_to=tuple(name for name in write_back if name in names),
        )
        self.store(SEQUENCES)
        self._come_to_rest()
        self.cache.tier_set.timeout_s = TIMEOUT_S
        self.meet(fault)

    @rule(fault=st.sampled_from(sorted(ASYNC_FAULTS)))
    def meet(self, fault: str) -> None:
        """What the disk does from now on; once it was released it hangs no more."""
        self.faults = ASYNC_FAULTS[fault]
        self.lied |= self.faults.get("get") in (Fault.FLIP, Fault.TRUNCATE)

    @rule(sequences=SOME)
    def store(self, sequences: list[list[int]]) -> None:
        """Several at once; as `load` and `prefetch`."""
        for chunks in sequences:
            self._store(chunks)

    @rule(sequences=SOME)
    def load(self, sequences: list[list[int]]) -> None:
        for chunks in sequences:
            self._load(chunks)

    @rule(sequences=SOME)
    def prefetch(self, sequences: list[list[int]]) -> None:
        for chunks in sequences:
            self._prefetch(chunks)

    def _store(self, chunks: list[int]) -> None:
        engine, tokens, table = self._sequence(chunks)
        engine.compute(tokens, table)
        names = self.cache.chunks(tokens).names
        payloads = engine.read(tokens, table, len(chunks))
        for i, name in enumerate(names):
            self.stored[name] = payloads[i % self.groups][i // self.groups]
        future = self.cache.store_async(tokens, engine.places(table))

        def check(stored: Stored | None) -> None:
            if stored is not None:
                assert 0 <= stored.new_tokens <= stored.tokens == len(tokens)
            assert engine.read(tokens, table, len(chunks)) == payloads, "a store changed its pages"

        self._note(future, check)

    def _load(self, chunks: list[int]) -> None:
        engine, tokens, table = self._sequence(chunks)
        hit = self.cache.lookup(tokens)
        future = self.cache.load_async(hit, engine.places(table))

        def check(result: Loaded | None) -> None:
            loaded = 0 if result is None else result.tokens
            assert loaded <= hit.tokens
            self._compare(engine, tokens, table, loaded // CHUNK)

        self._note(future, check)

    def _prefetch(self, chunks: list[int]) -> None:
        _, tokens, _ = self._sequence(chunks)
        future = self.cache.prefetch(tokens)

        def check(hit: Hit | None) -> None:
            names = [] if hit is None else hit.chunks.records(0, hit.plan.chunks)
            assert set(names) <= self.stored.keys()

        self._note(future, check)

    @rule(chunks=ONE, whole=st.booleans())
    def load_by_layers(self, chunks: list[int], whole: bool) -> None:
        """All of them, or one: the load is left then."""
        engine, tokens, table = self._sequence(chunks)
        hit = self.cache.lookup(tokens)
        load = self.cache.load_layers(hit, engine.places(table))
        assert next(load) == 0
        if whole:
            assert list(load) == list(range(1, 2 * self.groups))
            assert load.loaded.tokens <= hit.tokens
            # layers that came before a chunk's first failure are in its pages
            self._compare(engine, tokens, table, load.loaded.tokens // CHUNK, hit.tokens // CHUNK)
        load.close()

    @rule(chunks=ONE.filter(bool), which=st.integers(0, 5))
    def get(self, chunks: list[int], which: int) -> None:
        engine, tokens, _ = self._sequence(chunks)
        chunk = which % len(chunks)
        names = self.cache.chunks(tokens).records(chunk, chunk + 1)
        future = self.cache.get_non_blocking(tokens, chunk)

        def check(result: list[Lease] | None) -> None:
            leases = result or []
            for group, lease in enumerate(leases):
                form = RecordFormat.of(engine.layout, group, engine.namespace)
                payload = lease.array[form.header_bytes : form.layers_end].tobytes()
                assert payload == self.stored[names[group]]
            assert len(leases) in (0, self.groups)
            release_all(leases)

        self._note(future, check)

    @rule(chunks=ONE, seconds=st.sampled_from([0.0, 0.01, 3600.0]))
    def pin(self, chunks: list[int], seconds: float) -> None:
        _, tokens, _ = self._sequence(chunks)
        assert 0 <= self.cache.pin(tokens, seconds) <= len(tokens)

    @rule(tier=st.sampled_from(["memory", "disk", "far"]))
    def clear(self, tier: str) -> None:
        if tier in self.cache.tiers:
            with suppress(OSError):  # the disk may not be able to
                self.cache.clear(tier)

    @rule(which=st.integers(0, MOST_UNDER_WAY - 1))
    def cancel(self, which: int) -> None:
        if self.in_flight:
            self.in_flight[which % len(self.in_flight)][0].cancel()

    @rule(which=st.integers(0, MOST_UNDER_WAY - 1))
    def end(self, which: int) -> None:
        """Any of the calls under way ends, and did what it says."""
        if self.in_flight:
            self._end(which % len(self.in_flight))

    @rule()
    def flush(self) -> None:
        """While calls are under way."""
        self.disk.release()
        self.cache.flush(DEADLINE_S)

    @rule(chunks=ONE)
    def rest(self, chunks: list[int]) -> None:
        """All calls end; the faults as well. Every slot is back, and what is stored now is loaded."""
        self._come_to_rest()
        self.cache.tier_set.timeout_s = DEADLINE_S  # a busy machine must not look like a fault
        self.store([chunks])
        self._come_to_rest()
        engine, tokens, table = self._sequence(chunks)
        hit = self.cache.lookup(tokens)
        assert hit.tokens == len(tokens)
        assert self.cache.load(hit, engine.places(table)).tokens == len(tokens)
        self.cache.tier_set.timeout_s = TIMEOUT_S
        self._compare(engine, tokens, table, len(chunks))

    @invariant()
    def no_slot_is_lost(self) -> None:
        self.cache.check_integrity()

    @invariant()
    def nothing_is_damaged_that_is_not_a_lie(self) -> None:
        """Or a read was taken for one that it is not."""
        assert {tier for tier, _ in self.cache.counts().damaged} <= ({"disk"} if self.lied else set())

    def teardown(self) -> None:
        self._come_to_rest()
        self.cache.close()
        self.cache.check_integrity()
        assert self.staging.free == self.staging.slots
        assert not list(self.folder.rglob(".tmp-*"))
        shutil.rmtree(self.folder)

    def _sequence(self, chunks: list[int]) -> tuple[Engine, Tokens, list[int]]:
        """Tokens, and an engine of their own, whose pages nothing else uses."""
        engine = make_engine(self.groups, blocks=16)
        tokens = np.repeat(np.array(chunks, np.int32), CHUNK)
        return engine, tokens, engine.table(len(tokens))

    def _compare(self, engine: Engine, tokens: Tokens, table: list[int], chunks: int, begun: int = 0) -> None:
        """The first `chunks` chunks are what was stored, and no page but those of `begun` was written."""
        names = self.cache.chunks(tokens).records(0, chunks)
        expected = [
            [self.stored[name] for name in names[group :: self.groups]] for group in range(self.groups)
        ]
        assert engine.read(tokens, table, chunks) == expected
        engine.assert_loaded(tokens, table, chunks, begun)

    def _note(self, future: Transfer[T], check: Callable[[T | None], None]) -> None:
        """A call is under way; `check` takes what it returns, or None if it never began."""
        self.in_flight.append((future, check))
        if len(self.in_flight) > MOST_UNDER_WAY:
            self._end(0)

    def _end(self, which: int) -> None:
        future, check = self.in_flight.pop(which)
        wait([future], DEADLINE_S)
        assert future.done(), "a call hangs"
        check(None if future.cancelled() else future.result(0))

    def _come_to_rest(self) -> None:
        self.faults = {}
        self.disk.release()
        while self.in_flight:
            self._end(0)
        self.cache.flush(DEADLINE_S)
        for tier in self.cache.tiers:
            self.cache.tier_set.health[tier] = Health()  # no waiting for the pause to end
        # reads that were given up end as well, and what prefetches left makes room
        memory = self.cache.tiers.get("memory")
        rest = self.staging.slots - (len(list(memory.scan())) if memory else 0)
        release_all(self.staging.acquire(rest, DEADLINE_S, at_least=rest))
        assert self.staging.free == rest


TestAsyncCacheMachine = AsyncCacheMachine.TestCase
TestAsyncCacheMachine.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
