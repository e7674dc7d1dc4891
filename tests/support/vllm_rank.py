"""A worker of the vLLM connector over real tiers and pages, and a pair that hands off, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence, TokenIds
from kvkit.adapters.vllm.blending.page_order import PageOrder
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.pages import RankHeads, StageLayers, add_states, group_pages
from kvkit.adapters.vllm.settings import read_settings
from kvkit.adapters.vllm.step import LoadTask, SaveTask, SendTask, StepMetadata
from kvkit.adapters.vllm.worker import Worker
from kvkit.format.layout import Precision
from kvkit.handoff.sender import Sender
from kvkit.handoff.tier import HandoffTier
from kvkit.tiers.testing.faulty import FaultyTier, Plan

BLOCKS, BLOCK, CHUNK = 12, 8, 16
SPECS = [
    FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=size, dtype=torch.float32)
    for size in (8, 16)
]
IDS = np.arange(3 * CHUNK, dtype=np.int32)
TABLE = [1, 2, 3, 4, 5, 6]


class Rank:
    """A worker with pages, and the steps that it was told."""

    def __init__(
        self,
        folder: Path,
        load: str,
        handoff: dict[str, Any] | None = None,
        served: tuple[str, ...] | None = None,
        groups: int = 1,
        pool: Path | None = None,
        ranks: tuple[int, int] = (0, 1),
        server: dict[str, Any] | None = None,
        memory: str = "1MiB",
        disk: str | None = None,
        reports_tiers: bool = False,
        loras: Loras | None = None,
        heads: RankHeads | None = None,
        stages: StageLayers | None = None,
        specs: dict[str, FullAttentionSpec] | None = None,
        opaque: bool = True,
        state: MambaSpec | None = None,
        drafts: bool = False,
        draft: str = "",
        precision: Precision | None = None,
        orders: dict[str, PageOrder] | None = None,
        **more: Any,
    ) -> None:
        self._drafts = drafts
        tiers: dict[str, Any] = {"memory": {"capacity": memory}, "disk": {"url": f"file://{folder}"}}
        if disk is not None:
            tiers["disk"]["capacity"] = disk
        if pool is not None:
            tiers["pool"] = {"url": f"file://{pool}", "scope": "shared"}
        kvkit = {"chunk_tokens": CHUNK, "staging": "1MiB", "tiers": tiers, "handoff": handoff}
        kvkit |= {"server": server or {}, "precision": precision}
        number, world = ranks
        settings, config = read_settings({"kvkit": kvkit, "load": load} | more)
        if specs is None:
            specs = {f"layers.{2 * group + i}": SPECS[group] for group in range(groups) for i in range(2)}
        held = {name: 2 if heads is None else heads.held_heads(spec) for name, spec in specs.items()}
        self.pages = {
            name: torch.zeros(BLOCKS, held[name], BLOCK, 2 * spec.head_size) for name, spec in specs.items()
        }
        if state is None:
            divided = heads, stages, precision, orders
            layout, where = group_pages([specs], self.pages, BLOCKS, opaque, *divided)
        else:
            every = [specs, {"layers.9.mixer": state}]
            self.pages["layers.9.mixer"] = torch.zeros(BLOCKS, 1, 1, 100, dtype=torch.uint8)
            found = group_pages(every, self.pages, BLOCKS, opaque)
            layout, where = add_states(*found, every, self.pages, CHUNK)
        share = heads is not None
        fields: dict[str, Any] = {"rank": number, "world": world, "ranks_share": share, "draft": draft}
        namespace = config.namespace(layout, model="m", dtype="float32", **fields)
        self.worker = Worker(
            config,
            settings,
            layout,
            where,
            namespace,
            reports_tiers=reports_tiers,
            served=served,
            loras=loras,
        )
        self.blocking_load = load != "async"
        self.number = 0

    @property
    def sender(self) -> Sender:
        """Its side of handoff."""
        handoff = self.worker.cache.tiers["handoff"]
        assert isinstance(handoff, HandoffTier)
        assert handoff.sender is not None
        return handoff.sender

    def wrap(self, tier: str, plan: Plan) -> FaultyTier:
        """Have a tier meet faults from now on."""
        made = FaultyTier(self.worker.cache.tiers[tier], plan)
        self.worker.cache.tiers[tier] = made
        return made

    def stored(self, tier: str) -> int:
        """Chunks that a tier was given."""
        return self.worker.cache.counts().stored_records[tier]

    def step(self, finished: tuple[str, ...] = (), **told: Any) -> tuple[set[str], set[str], set[str]]:
        """One step; what `finish` returns."""
        self.number += 1
        return self.run(StepMetadata(self.number, **told), finished)

    def run(
        self,
        step: StepMetadata,
        finished: Iterable[str] = (),
        forward: Callable[[], object] = lambda: None,
        draft: Callable[[], object] = lambda: None,
    ) -> tuple[set[str], set[str], set[str]]:
        """Take a step in vLLM's order, in which the model and its draft compute; what `finish` returns."""
        self.worker.end_saves()
        self.worker.begin_step(step)
        self.worker.start_loads(step)
        forward()
        if not self._drafts or step.idle:
            self.worker.start_saves(step)
            return self.worker.finish_requests(set(finished))
        found = self.worker.finish_requests(set(finished))
        draft()
        self.worker.start_saves(step)
        return found

    def fill(self, value: float) -> None:
        for tensor in self.pages.values():
            tensor.fill_(value)

    def save(self, first: int = 0, **told: Any) -> None:
        """Save the three chunks of IDS from `first` on."""
        blocks = TABLE[first * CHUNK // BLOCK :]
        self.step(saves=[SaveTask("a", Sequence(IDS), first, (blocks,))], **told)
        self.worker.end_saves()
        self.worker.cache.flush()

    def found(self, **told: Any) -> int:
        """Tokens of IDS that a lookup finds; the answer is number 1, for request a."""
        self.step(lookups=[LookupRequest("a", 1, Sequence(IDS))], idle=True, **told)
        return self.heard(**told)

    def heard(self, **told: Any) -> int:
        """Tokens that the answer under way finds."""
        while (report := self.worker.report()) is None:
            self.step(idle=True, **told)
        (answer,) = report.answers
        return answer.tokens

    def load(self, load: LoadTask, **told: Any) -> bool:
        """Load what was found; whether all of it came."""
        received, failed, _ = self.step(loads=[load], **told)
        while self.blocking_load is False and not received:
            received, failed, _ = self.step(idle=True)
        report = self.worker.report()
        short = report is not None and report.failed == ["a"]
        assert received == (set() if self.blocking_load else {"a"})
        assert failed == ({"a"} if short and not self.blocking_load else set())
        assert report is None or report.failed_step == (self.number if self.blocking_load else 0)
        return not short


HEADS = 2
OTHER = [7, 8, 9, 10, 11, 6]
"""Blocks that are loaded into."""
MODEL = {
    f"layers.{i}": torch.rand(
        BLOCKS, HEADS, BLOCK, 2 * SPECS[i // 2].head_size, generator=torch.manual_seed(i)
    )
    for i in range(4)
}
"""The KV of all heads."""


def share(rank: int, size: int) -> slice:
    """The heads that a rank has."""
    first = rank * HEADS // size
    return slice(first, first + max(1, HEADS // size))


class Ranks:
    """The workers of an engine that divides its heads into records of one."""

    def __init__(
        self, folder: Path, size: int, opaque: bool, load: str = "async", records: int = 2, **more: Any
    ) -> None:
        self.size = size
        self.each = [
            Rank(
                folder,
                load,
                groups=2,
                ranks=(number, size),
                heads=RankHeads(HEADS, number, size, records, per_host=size),
                opaque=opaque,
                **more,
            )
            for number in range(size)
        ]

    def compute(self) -> None:
        """Have the model's KV in all pages."""
        for number, rank in enumerate(self.each):
            for name, pages in rank.pages.items():
                pages.copy_(MODEL[name][:, share(number, self.size)])

    def save(self) -> None:
        self.compute()
        for rank in self.each:
            rank.save()

    def found(self) -> set[int]:
        return {rank.found() for rank in self.each}

    def load(self, tokens: int = len(IDS)) -> None:
        """Load what was found, and compare every page with the model's."""
        blocks = -(-tokens // BLOCK)
        for number, rank in enumerate(self.each):
            rank.fill(-1.0)
            assert rank.load(LoadTask("a", 1, 0, tokens, (OTHER[:blocks],)))
            for name, pages in rank.pages.items():
                expected = torch.full_like(pages, -1.0)
                expected[OTHER[:blocks]] = MODEL[name][TABLE[:blocks]][:, share(number, self.size)]
                assert torch.equal(pages, expected)

    def close(self) -> None:
        for rank in self.each:
            rank.worker.close()


SAVE = SaveTask("a", Sequence(IDS), 0, (TABLE,))
DEADLINE_S = 60.0


class Pair:
    """A rank that sends and one that receives, with the same pages and keys."""

    def __init__(self, folder: Path, load: str = "async", **more: Any) -> None:
        self.address = f"unix://{folder}/decode/socket"
        receives = {"role": "decode", "listen": [self.address], "buffer": "1MiB"}
        self.decode = Rank(folder / "d", "async", receives, **more)
        self.prefill = Rank(folder / "p", load, {"role": "prefill"}, **more)
        handoff = self.decode.worker.cache.tiers["handoff"]
        assert isinstance(handoff, HandoffTier)
        assert handoff.receiver is not None
        self.receiver = handoff.receiver

    def send(self, stop: int = len(IDS), *, last: bool = True) -> SendTask:
        return SendTask("a", "t", self.address, Sequence(IDS), 0, stop, (TABLE,), last)

    def finish(self, received: set[str], failed: set[str], sent: set[str]) -> None:
        """Have the prefill engine go on until the pages of what it sends are free."""
        while not sent:
            _, _, sent = self.prefill.step(idle=True)

    def close(self) -> None:
        self.prefill.worker.close()
        self.decode.worker.close()


def piece(pair: Pair, request: str, tokens: TokenIds, first: int, stop: int) -> SendTask:
    """Tokens [first, stop) of what `request` sends."""
    address, blocks, last = pair.address, (TABLE[first // BLOCK :],), stop == len(tokens)
    return SendTask(request, f"of-{request}", address, Sequence(tokens), first, stop, blocks, last)
