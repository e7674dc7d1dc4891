"""The requests of a trace, served by the real cache."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from float_engine import FloatEngine

from kvkit.cache import Cache
from kvkit.format.record import RecordFormat
from kvkit.lab.simulate.traces import Request
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import Staging
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.shm.file import pool_path
from kvkit.tiers.shm.tier import ShmTier
from kvkit.transfer.policy import Policy


class Real:
    """The requests of a trace through the real cache: memory, or a pool, and a folder; one thread."""

    def __init__(
        self,
        folder: Path,
        memory: int,
        disk: int | None,
        eviction: str,
        policy: Policy,
        pool: str = "",
        precision: Any = None,
    ) -> None:
        layout = small_layout()
        space = small_namespace(layout)
        record = RecordFormat.of(layout, 0, space).record_bytes
        self.engine = (
            Engine(layout, space, blocks=256) if precision is None else FloatEngine(1, "float32", 256)
        )
        self.precision = precision
        staging = Staging(record, memory + 64)
        path, size = pool and pool_path(pool), memory * staging.slot_bytes
        self.cache = Cache(
            layout,
            space,
            [
                ShmTier(path, staging, size, "memory")
                if pool
                else MemoryTier(staging, memory * record, policy=eviction),
                ObjectTier(
                    TierConfig(
                        url=str(folder),
                        capacity=None if disk is None else disk * record,
                        threads=1,
                        eviction=eviction,
                        precision=precision,
                    )
                ),
            ],
            staging=staging,
            policy=policy,
        )

    def serve(self, request: Request) -> dict[str, int]:
        """Chunks loaded, by tier; and they are the right ones."""
        prompt, whole = (self.tokens(request.chunks[:n]) for n in (request.prompt_chunks, None))
        table = self.engine.table(len(whole))
        places = self.engine.places(table)
        hit = self.cache.lookup(prompt)
        self.engine.wipe()
        loaded = self.cache.load(hit, places)
        assert loaded.by_tier == hit.by_tier
        if isinstance(self.engine, FloatEngine):
            kinds = self.engine.loaded_as(prompt, table, loaded.tokens // 8, self.precision)
            assert kinds == "".join(
                ("e" if tier == "memory" else "a") * (tokens // 8) for tier, tokens in loaded.by_tier.items()
            )
        else:
            self.engine.assert_loaded(prompt, table, loaded.tokens // 8)
        self.cache.flush()
        exact = whole[: loaded.approximate_from]
        self.engine.compute(exact, table)
        self.cache.store(exact, places)
        self.cache.flush()
        return {tier: tokens // 8 for tier, tokens in loaded.by_tier.items()}

    @staticmethod
    def tokens(names: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Eight tokens that stand for a chunk's name."""
        parts = [
            np.random.default_rng(zlib.crc32(name.encode())).integers(0, 2**31, 8, np.int32) for name in names
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)
