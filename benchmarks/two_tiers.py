"""A cache over a folder and a bucket, and sequences that lie in one of them or in ranges of both by turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkit.cache import Cache, SequencePages
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.record import RecordFormat
from kvkit.kernels.pages.api import Pages
from kvkit.lab.testbed.servers import S3Server
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.policy import Policy

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
TIMEOUT_S = 120.0

Tokens = npt.NDArray[np.int32]


def group_of(large: bool) -> LayerGroup:
    """32 layers whose chunk of 256 tokens takes 8 MiB, or 32 KiB where only the calls are tested."""
    heads, size = (4, 64) if large else (1, 1)
    return LayerGroup(tuple(range(32)), heads, size, size, dtype="bfloat16", block_tokens=BLOCK_TOKENS)


class TwoTiers:
    """A cache over the tiers disk and s3, with a memory tier before them where `memory` is above 0.

    Args:
        folder, server, prefix: where the two keep their records; caches of equal ones share them.
        chunks: the longest sequence.
        memory: chunks that the memory tier holds.
        slots: of staging, besides those.
        write_back_to: the policy's.
        large: as in `group_of`.
        open_tier: makes the tiers.
    """

    def __init__(
        self,
        folder: Path,
        server: S3Server,
        prefix: str,
        *,
        chunks: int,
        memory: int = 0,
        slots: int,
        write_back_to: tuple[str, ...],
        large: bool,
        open_tier: Callable[..., ObjectTier] = ObjectTier,
    ) -> None:
        group = group_of(large)
        layout = KVLayout((group,))
        space = Namespace("bench", layout.fingerprint(), "bfloat16", chunk_tokens=CHUNK_TOKENS)
        staging = Staging(RecordFormat.of(layout, 0, space).record_bytes, memory + slots)
        self.disk = open_tier(str(folder), name="disk")
        self.s3 = open_tier(
            TierConfig(url=f"s3://{server.BUCKET}/{prefix}", options=server.options, timeout_s=TIMEOUT_S),
            name="s3",
        )
        tiers: list[Tier] = [self.disk, self.s3]
        if memory:
            tiers.insert(0, MemoryTier(staging, memory * staging.slot_bytes))
        policy = Policy(tuple(tier.name for tier in tiers), (), write_back_to)
        self.folder = folder
        self.cache = Cache(layout, space, tiers, staging=staging, policy=policy, timeout_s=TIMEOUT_S)
        blocks = np.arange(chunks * CHUNK_TOKENS // BLOCK_TOKENS, dtype=np.int64)
        self.place = SequencePages(Pages.of(group, group.pages(len(blocks), fill_byte=1)), blocks=blocks)
        assert staging.ready.wait(TIMEOUT_S)

    def store(self, seed: int, chunks: int, tier_of: Callable[[int], str]) -> Tokens:
        """The tokens of a new sequence whose chunk `i` lies in the tier `tier_of(i)`, and in no other."""
        tokens = np.random.default_rng(seed).integers(0, 50_000, chunks * CHUNK_TOKENS, np.int32)
        homes = [tier_of(i) for i in range(chunks)]
        self.cache.store(tokens, self.place, to=sorted(set(homes)))
        self.cache.flush()
        names = self.cache.lookup(tokens).chunks.names
        for tier in (self.disk, self.s3):
            tier.delete([name for name, home in zip(names, homes, strict=True) if home != tier.name])
        hit = self.cache.lookup(tokens)
        assert hit.by_tier == {home: homes.count(home) * CHUNK_TOKENS for home in homes}, hit.by_tier
        return tokens

    def files(self) -> list[Path]:
        """The records of the disk tier."""
        return list(self.folder.rglob("c.*"))

    def load(self, tokens: Tokens) -> None:
        """All of `tokens` into the pages."""
        assert self.cache.load(self.cache.lookup(tokens), self.place).tokens == len(tokens)

    def prefetch(self, tokens: Tokens) -> None:
        """All of `tokens` into the memory tier."""
        assert self.cache.prefetch(tokens).result(TIMEOUT_S).by_tier == {"memory": len(tokens)}

    def close(self) -> None:
        self.cache.close()
        self.cache.check_integrity()


def by_turns(disk: int, s3: int) -> Callable[[int], str]:
    """Ranges of so many chunks by turns on disk and on S3, for `TwoTiers.store`."""
    return lambda i: "disk" if i % (disk + s3) < disk else "s3"
