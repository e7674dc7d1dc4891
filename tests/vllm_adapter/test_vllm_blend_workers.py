"""Workers load a blend's documents from real tiers into the right pages, until it ends or fails.

The model's part is left out: rows are done at once, and nothing is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_rank import BLOCK, BLOCKS, CHUNK, SPECS, Rank

from kvkit.adapters.engine.lookup_request import LookupRequest
from kvkit.adapters.engine.lookup_request import Sequence as Prompt
from kvkit.adapters.vllm.blending.blender import BlendedPrompt
from kvkit.adapters.vllm.blending.executor import DocumentPages
from kvkit.adapters.vllm.step import Arrival, BlendTask, LoadTask, SaveTask, WorkerReport
from kvkit.blend.plan import Selection, Span
from kvkit.format.rope import Rope
from kvkit.kernels.pages.reference import rotate
from kvkit.lab.testbed.waiting import wait_for
from kvkit.tiers.testing.faulty import Fault

SIZE = SPECS[0].head_size
ROPES = {"layers.0": Rope((1.0, 0.1)), "layers.1": None}
PREFIX, DOCUMENT = np.arange(CHUNK, dtype=np.int32), np.arange(100, 100 + 2 * CHUNK, dtype=np.int32)
GAP = np.arange(200, 203, dtype=np.int32)
"""Puts the document where no chunk and no block begins."""
IDS = np.concatenate([PREFIX, GAP, DOCUMENT, GAP])
START = len(PREFIX) + len(GAP)
TABLE = [11, 9, 7, 5, 3, 1, 2]
TASK = BlendTask(
    "a",
    1,
    Prompt(IDS),
    LoadTask("a", 1, 0, CHUNK, (TABLE[:2],)),
    CHUNK,
    (Span(START, START + len(DOCUMENT)),),
    Selection(),
    None,
    (TABLE,),
)


class DoneAtOnce:
    """Stands for the model: whatever it is given is complete with the next step."""

    def __init__(self) -> None:
        self.prompts: list[BlendedPrompt] = []

    def begin_prompt(self, prompt: BlendedPrompt) -> None:
        self.prompts.append(prompt)
        prompt.pending_rows = prompt.rows_at(prompt.plan.computed)

    def advance(self, prompts: Sequence[BlendedPrompt]) -> None:
        for prompt in prompts:
            prompt.selected = np.zeros(0, np.int32)
            prompt.pending_rows = prompt.rows_at(prompt.selected)


class Blending(Rank):
    """A rank that blends, whose tiers have the prefix and the document; no two tokens are alike."""

    def __init__(self, folder: Path, world: int = 1) -> None:
        super().__init__(folder, "async", ranks=(0, world))
        worker = self.worker
        self.model: Any = DoneAtOnce()
        h, n, d = np.ix_(range(2), range(BLOCK), range(SIZE))
        order = type("Order", (), {"k": torch.from_numpy((h * BLOCK + n) * 2 * SIZE + d)})
        order.v = order.k + SIZE
        worker.add_blending(self.model, DocumentPages(worker._context.groups, [order], ROPES))
        assert worker.blends is not None
        self.blends = worker.blends
        generator = torch.Generator().manual_seed(0)
        for tensor in self.pages.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.before = {name: tensor.clone() for name, tensor in self.pages.items()}
        for request, ids, blocks in (("p", PREFIX, [1, 2]), ("d", DOCUMENT, [3, 4, 5, 6])):
            self.step(saves=[SaveTask(request, Prompt(ids), 0, (blocks,))])
        worker.end_saves()
        worker.cache.flush()
        for tensor in self.pages.values():
            tensor.zero_()

    def ask(self, prefill: float | None = None, **more: Any) -> tuple[int, tuple[int, ...]]:
        """What a lookup of the prompt finds: leading tokens, and those of the document."""
        self.worker._loads.lookups.tokens_per_s = lambda: prefill
        lookup = LookupRequest("a", 1, Prompt(IDS), documents=(Prompt(DOCUMENT),), **more)
        self.step(lookups=[lookup], idle=True)
        while not (report := self.worker.report()):
            self.step(idle=True)
        (answer,) = report.answers
        return answer.tokens, answer.documents

    def tokens(self, name: str, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, H, D] of the prompt in a layer's pages."""
        at = np.array(positions)
        both = self.pages[name][np.array(TABLE)[at // BLOCK], :, at % BLOCK]
        return both[..., :SIZE], both[..., SIZE:]

    def received(self, **told: Any) -> set[str]:
        """What is received in a step that tells this, or the first one after it that receives something."""
        received, _, _ = self.step(**told)
        while not received:
            received, failed, _ = self.step(idle=True)
            assert not failed
        return received


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Blending]:
    made = Blending(tmp_path)
    yield made
    made.worker.close()


def test_documents_come_to_their_places_with_turned_keys(rank: Blending) -> None:
    assert rank.ask() == (CHUNK, (len(DOCUMENT),))
    assert rank.received(blends=[TASK]) == {"a"}
    for name, rope in ROPES.items():
        saved = rank.before[name]
        document = saved[3:7].transpose(1, 2).flatten(0, 1)
        k, v = document[..., :SIZE], document[..., SIZE:]
        if rope is not None:
            k = rotate(k, torch.from_numpy(rope.delta_table(np.array([START])))[:, None], rope)
        found_k, found_v = rank.tokens(name, range(START, START + len(DOCUMENT)))
        torch.testing.assert_close(found_k, k)
        assert torch.equal(found_v, v)
        assert torch.equal(rank.pages[name][TABLE[:2]], saved[1:3])
        for gap in (range(CHUNK, START), range(START + len(DOCUMENT), len(IDS))):
            assert not any(part.any() for part in rank.tokens(name, gap))
        others = sorted(set(range(BLOCKS)) - set(TABLE))
        assert not rank.pages[name][others].any()
    (prompt,) = rank.model.prompts
    assert prompt.plan.computed.tolist() == [*range(CHUNK, START), *range(START + len(DOCUMENT), len(IDS))]
    report = rank.worker.report()
    assert report is not None
    (done,) = report.blended
    assert (done.exact, done.reused, done.computed) == (CHUNK, len(DOCUMENT), 2 * len(GAP))
    assert done.spans == TASK.spans
    assert set(done.seconds) == {"load", "place", "choose", "rows"}
    told = rank.worker.stats.take()
    assert told is not None
    assert told.data["0"]["blend_reused_tokens"] == len(DOCUMENT)


def test_what_is_lost_of_prefix_and_document_is_computed(rank: Blending, tmp_path: Path) -> None:
    rank.ask()
    rank.worker.cache.clear("memory")
    kept = rank.worker.cache.chunks(DOCUMENT).names[0]
    for file in [path for path in tmp_path.rglob("c.*") if kept not in str(path)]:
        file.unlink()
    assert rank.received(blends=[TASK]) == {"a"}
    (prompt,) = rank.model.prompts
    assert int(prompt.plan.exact.sum()) == 0
    assert np.flatnonzero(prompt.plan.reused).tolist() == list(range(START, START + CHUNK))


@pytest.mark.parametrize("agreed", [(CHUNK, (2 * CHUNK,)), (0, (CHUNK,)), (CHUNK, (0,))])
def test_ranks_go_on_with_what_all_of_them_have(tmp_path: Path, agreed: tuple[int, tuple[int, ...]]) -> None:
    rank = Blending(tmp_path, world=2)
    try:
        rank.ask()
        rank.step(blends=[TASK])
        arrivals: list[Arrival] = []
        while not arrivals:
            assert rank.step(idle=True)[0] == set()
            arrivals = (rank.worker.report() or WorkerReport()).arrivals
        assert arrivals == [Arrival("a", 1, 0, CHUNK, (len(DOCUMENT),))]
        assert rank.step(idle=True)[0] == set()
        exact, documents = agreed
        received, _, _ = rank.step(arrivals=[Arrival("a", 1, -1, exact, documents)])
        assert received == {"a"}
        (prompt,) = rank.model.prompts
        assert int(prompt.plan.exact.sum()) == exact
        assert int(prompt.plan.reused.sum()) == sum(documents)
    finally:
        rank.worker.close()


def test_a_request_that_ends_is_told_once_its_blocks_are_touched_no_more(rank: Blending) -> None:
    rank.ask()
    disk = rank.wrap("disk", lambda operation, name: Fault.HANG if operation == "get" else None)
    rank.worker.cache.clear("memory")
    rank.step(blends=[TASK])
    wait_for(lambda: disk.hanging > 0)
    assert rank.step(finished=("a",))[0] == set()
    disk.release()
    assert rank.received() == {"a"}
    assert rank.model.prompts == []
    assert rank.blends.last is None
    assert not rank.blends.busy
    rank.worker.cache.check_integrity()


def test_documents_that_are_computed_sooner_are_not_found(rank: Blending) -> None:
    rank.worker._context.row_speed.note_step(100, 10.0)  # ten rows a second
    assert rank.ask(prefill=50.0, recomputed_share=0.1) == (CHUNK, (len(DOCUMENT),))
    assert rank.ask(prefill=50.0, recomputed_share=0.3) == (CHUNK, (0,))


def test_a_blend_of_nothing_that_was_found_is_computed_whole(rank: Blending) -> None:
    assert rank.received(blends=[replace(TASK, prefix=None, exact=0)]) == {"a"}
    (prompt,) = rank.model.prompts
    assert len(prompt.plan.computed) == len(IDS)
