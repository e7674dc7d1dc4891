"""Prompts whose KV is completed in vLLM's pages: tokens are chosen, then computed again, some rows each step.

What `kvkit.blend.run` does with a loop over layers are runs of vLLM's own model here: the computed rows
through the first layers, to see what the question attends to, then the computed and the chosen rows through
all of them. Prompts share runs. The last token is left to vLLM, which samples from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.lora.request import LoRARequest

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.adapters.vllm.blending.choosing import PagesOfLayers, QuestionAttention
from kvkit.adapters.vllm.blending.rows import RowRunner, RowsOf
from kvkit.adapters.vllm.step import Tables
from kvkit.blend.plan import BlendPlan, Selection, choose, looks, question_of


@dataclass(eq=False, slots=True)
class BlendedPrompt:
    """A prompt whose KV is being completed, but for its last token's. Give it to `Blender.begin` first.

    Args:
        ids: int32 [N], the prompt.
        plan: which of its KV is there.
        blocks: the request's, from token 0 on.
        selected: tokens to compute again, int32 ascending; None: they have yet to be chosen.

    Attributes:
        left: rows that have yet to run: to choose by, then those to compute.
        scores: what the choice is made by, while it is.
        seconds: what it took by stage. A run that prompts share counts by their rows.
    """

    ids: TokenIds
    plan: BlendPlan
    selection: Selection
    blocks: Tables
    _: KW_ONLY
    lora: LoRARequest | None = None
    selected: NDArray[np.int32] | None = None
    left: RowsOf = field(init=False)
    scores: QuestionAttention | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"choose": 0.0, "rows": 0.0})

    @property
    def looked(self) -> bool:
        """Whether all rows to choose by have run, and the choice is yet to be made."""
        return self.scores is not None and not len(self.left.positions)

    @property
    def over(self) -> bool:
        """Whether the KV is complete."""
        return self.selected is not None and not len(self.left.positions)

    def rows(self, positions: NDArray[np.int32]) -> RowsOf:
        """Those at these positions."""
        return RowsOf(self.ids[positions], positions.astype(np.int64), self.blocks, self.lora)


class Blender:
    """Completes prompts with one rank's part of vLLM's model. Every rank must be called alike.

    Args:
        rows: of the model.
        pages: its KV.
    """

    def __init__(self, rows: RowRunner, pages: PagesOfLayers) -> None:
        self._rows = rows
        self._pages = pages

    def begin(self, completion: BlendedPrompt) -> None:
        """Find out what has to run first. Documents are in their places."""
        if completion.selected is None:
            plan, selection = completion.plan, completion.selection
            layers = looks(selection, plan, self._rows.count)
            if layers:
                asked, completion.left = question_of(selection), completion.rows(plan.computed)
                completion.scores = QuestionAttention(self._pages, layers, plan, completion.blocks, asked)
        if completion.scores is None:
            self._choose(completion)

    def step(self, completions: Sequence[BlendedPrompt]) -> None:
        """Take completions further, by as many rows as vLLM computes in a step. Mutates their pages.

        First come those that have to be chosen for, so that more of them share the runs through all layers.

        No stage of a pipeline may wait in this for a later one: vLLM sends that one its own step's rows after
        this, and they come first there. So nobody waits for what was sent in the same step, and a choice that
        all stages have a part in is made in the next one.
        """
        self._rows.settle()
        for c in completions:
            if c.looked:
                self._choose(c)
        most = self._rows.most_rows
        while most > 0 and (open_ones := [c for c in completions if not (c.over or c.looked)]):
            choosing = [c for c in open_ones if c.scores is not None]
            most -= self._run(choosing, self._run_first_layers, "choose", most) if choosing else 0
            if not choosing:
                most -= self._run(open_ones, self._run_all_layers, "rows", most)
            for c in choosing:
                if c.looked and c.scores is not None:
                    c.scores.add_up()
                    if self._rows.stages == 1:
                        self._choose(c)

    def _run(
        self,
        completions: Sequence[BlendedPrompt],
        run: Callable[[Sequence[tuple[BlendedPrompt, RowsOf]]], None],
        stage: str,
        most: int,
    ) -> int:
        """Run some of the rows that are left; how many."""
        part = next(self._rows.parts([c.left for c in completions], most))
        pieces = [(completions[which], rows) for which, rows in part]
        began = time.perf_counter()
        run(pieces)
        if self._rows.device.type == "cuda":  # what is not over yet would seem to take no time
            torch.cuda.current_stream(self._rows.device).synchronize()
        each_s = (time.perf_counter() - began) / sum(len(rows.ids) for _, rows in pieces)
        for completion, rows in pieces:
            completion.left = completion.left.part(len(rows.ids), len(completion.left.ids))
            completion.seconds[stage] += each_s * len(rows.ids)
        return sum(len(rows.ids) for _, rows in pieces)

    def _run_all_layers(self, pieces: Sequence[tuple[BlendedPrompt, RowsOf]]) -> None:
        self._rows.run([rows for _, rows in pieces], hidden=False)

    def _run_first_layers(self, pieces: Sequence[tuple[BlendedPrompt, RowsOf]]) -> None:
        layers = max(c.scores.layers for c, _ in pieces if c.scores is not None)
        self._rows.run([rows for _, rows in pieces], partial(_look, pieces), layers, hidden=False)

    def _choose(self, completion: BlendedPrompt) -> None:
        """Choose, unless that was done before, and have what is computed run next."""
        scores, plan, last = completion.scores, completion.plan, completion.plan.tokens - 1
        if completion.selected is None:
            seen = None if scores is None else scores.seen()
            completion.selected = choose(completion.selection, plan, self._rows.count, seen)
        completion.scores = None
        positions = np.union1d(plan.computed, completion.selected).astype(np.int32)
        completion.left = completion.rows(positions[(positions < last) & ~plan.exact[positions]])


def _look(pieces: Sequence[tuple[BlendedPrompt, RowsOf]], index: int, q: torch.Tensor) -> None:
    """Show each prompt its own rows' queries."""
    first = 0
    for completion, rows in pieces:
        stop = first + len(rows.ids)
        if completion.scores is not None:
            completion.scores.look(index, q[first:stop], rows.positions)
        first = stop
