"""A cache over memory and a folder, and sequences of tokens to store in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkit.cache import Cache
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import largest_record_bytes


def sequence(length: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50_000, length, np.int32)


def open_cache(
    engine: Engine,
    folder: Path | None,
    *,
    slots: int = 12,
    memory_slots: int = 4,
    policy: Policy | None = None,
    timeout_s: float = 10.0,
    extra: Sequence[Tier] = (),
) -> Cache:
    layout = engine.layout
    staging = Staging(largest_record_bytes(layout, engine.namespace), slots)
    tiers: list[Tier] = []
    if memory_slots:
        tiers.append(MemoryTier(staging, memory_slots * staging.slot_bytes))
    if folder is not None:
        tiers.append(ObjectTier(f"file://{folder}"))
    tiers.extend(extra)
    return Cache(
        layout,
        engine.namespace,
        tiers,
        staging=staging,
        policy=policy,
        timeout_s=timeout_s,
        shutdown_timeout_s=timeout_s,
    )


def make_engine(groups: int = 1, **fields: object) -> Engine:
    layout = small_layout(groups)
    return Engine(layout, small_namespace(layout, **fields))


def store(cache: Cache, engine: Engine, tokens: npt.NDArray[np.int32]) -> None:
    table = engine.table(len(tokens))
    engine.compute(tokens, table)
    cache.store(tokens, engine.places(table), engine.namespace)
    cache.flush()
    engine.wipe()
