"""A worker of the vLLM connector over real tiers and pages, and a pair that hands off, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvkit.adapters.engine.question import Question, Sequence, TokenIds
from kvkit.adapters.vllm.loras import Loras
from kvkit.adapters.vllm.pages import group_pages
from kvkit.adapters.vllm.settings import read_settings
from kvkit.adapters.vllm.step import LoadTask, SaveTask, SendTask, StepMetadata
from kvkit.adapters.vllm.worker import Worker
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
        loras: Loras | None = None,
        **more: Any,
    ) -> None:
        tiers: dict[str, Any] = {"memory": {"capacity": memory}, "disk": {"url": f"file://{folder}"}}
        if pool is not None:
            tiers["pool"] = {"url": f"file://{pool}", "scope": "shared"}
        kvkit = {"chunk_tokens": CHUNK, "staging": "1MiB", "tiers": tiers, "handoff": handoff}
        kvkit["server"] = server or {}
        number, world = ranks
        settings, config = read_settings({"kvkit": kvkit, "load": load} | more)
        specs = {f"layers.{2 * group + i}": SPECS[group] for group in range(groups) for i in range(2)}
        self.pages = {name: torch.zeros(BLOCKS, 2, BLOCK, 2 * spec.head_size) for name, spec in specs.items()}
        layout, where = group_pages([specs], self.pages, BLOCKS, opaque=True)
        namespace = config.namespace(layout, model="m", dtype="float32", rank=number, world=world)
        self.worker = Worker(
            config, settings, layout, where, namespace, tells_stores=False, served=served, loras=loras
        )
        self.waits = load != "async"
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
        step = StepMetadata(self.number, **told)
        self.worker.settle()
        self.worker.begin(step)
        self.worker.start_loads(step)
        self.worker.save(step)
        return self.worker.finish(set(finished))

    def fill(self, value: float) -> None:
        for tensor in self.pages.values():
            tensor.fill_(value)

    def save(self, first: int = 0, **told: Any) -> None:
        """Save the three chunks of IDS from `first` on."""
        blocks = TABLE[first * CHUNK // BLOCK :]
        self.step(saves=[SaveTask("a", Sequence(IDS), first, (blocks,))], **told)
        self.worker.settle()
        self.worker.cache.flush()

    def found(self, **told: Any) -> int:
        """Tokens of IDS that a lookup finds; the answer is number 1, for request a."""
        self.step(questions=[Question("a", 1, Sequence(IDS))], idle=True, **told)
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
        while self.waits is False and not received:
            received, failed, _ = self.step(idle=True)
        report = self.worker.report()
        short = report is not None and report.failed == ["a"]
        assert received == (set() if self.waits else {"a"})
        assert failed == ({"a"} if short and not self.waits else set())
        assert report is None or report.failed_step == (self.number if self.waits else 0)
        return not short


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
