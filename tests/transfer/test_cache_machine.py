"""Random calls of a cache over all tiers, with faults, restarts and damage, agree with a plain dict."""

from __future__ import annotations

import math
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from run_sizes import examples

from kvkit.cache import Cache
from kvkit.format.record import RecordFormat
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import Staging
from kvkit.tiers.health import Health
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.faulty import Fault, FaultyTier
from kvkit.transfer import write_pipeline as writes
from kvkit.transfer.policy import Policy

CHUNK = 8
# few, so that they meet again; they share prefixes, and chunks repeat after other prefixes
SEQUENCES = st.sampled_from([[], [0], [0, 1, 2, 0, 1], [0, 1, 1, 0], [2, 1, 2], [2, 1, 2, 2, 2, 2]])
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

    @rule(chunks=SEQUENCES, stale=st.booleans())
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
