"""Small caches over real tiers, and tokens and tiers for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.cache import Cache
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import OnComplete, Tier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.testing.faulty import Wrapper
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import largest_record_bytes

CHUNK = 8
DEADLINE_S = 60.0


def sequence(chunks: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 1000, chunks * CHUNK).astype(np.int32)


def make_engine(groups: int = 1, blocks: int = 64) -> Engine:
    layout = small_layout(groups)
    return Engine(layout, small_namespace(layout, CHUNK), blocks)


class Recorder(Wrapper):
    """`inner`, and what was asked of it, in order; gets wait for `gate`."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.got: list[str] = []
        self.asked = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        self.got.extend(names)
        self.asked.set()
        held = [lease.share() for lease in leases]

        def go_on() -> None:
            self.gate.wait(DEADLINE_S)
            self.inner.get(names, held, on_complete)
            release_all(held)

        threading.Thread(target=go_on, daemon=True).start()


def new_staging(engine: Engine, slots: int) -> Staging:
    return Staging(largest_record_bytes(engine.layout, engine.namespace), slots)


def new_cache(engine: Engine, staging: Staging, tiers: Sequence[Tier], **policy: Any) -> Cache:
    names = tuple(tier.name for tier in tiers)
    given = {"retrieve_from": names, "store_to": names} | policy
    return Cache(
        engine.layout,
        engine.namespace,
        tiers,
        staging=staging,
        policy=Policy(**given),
        timeout_s=DEADLINE_S,
    )


def fill(engine: Engine, path: Path, tokens: np.ndarray[Any, np.dtype[np.int32]], first: int = 0) -> None:
    """A folder that holds chunks `first` on of `tokens`."""
    staging = new_staging(engine, 8)
    with new_cache(engine, staging, [ObjectTier(str(path))]) as cache:
        table = engine.table(len(tokens))
        engine.compute(tokens, table)
        cache.store(tokens, engine.places(table))
        cache.flush()
        if first:
            cache.tiers["disk"].delete(cache.lookup(tokens).chunks.records(0, first))
    engine.wipe()
