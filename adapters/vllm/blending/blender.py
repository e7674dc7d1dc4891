"""Completion of prompts' KV in vLLM's pages: choose tokens and recompute them, some rows each step.

`kvkit.blend.run` does this with a loop over layers; here, vLLM's own model is run. The computed rows go
through the first layers, to see what the question attends to. Then the computed and the chosen rows go
through all layers. Prompts share runs. vLLM computes the last token itself, to sample from it.
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
from kvkit.blend.plan import BlendPlan, Selection, choose, observed_layers, question_of


@dataclass(eq=False, slots=True)
class BlendedPrompt:
    """A prompt with KV to complete, except the last token's. Pass it to `Blender.begin` first.

    Args:
        ids: int32 [N], the prompt.
        plan: which tokens have KV, and which must be computed.
        selection: how tokens to compute again are chosen.
        blocks: the request's block tables, from token 0 on.
        lora: the request's adapter; None: none.
        selected: tokens to compute again, int32 ascending; None: not chosen yet.

    Attributes:
        left: rows that have yet to run: first those that the choice needs, then those to compute.
        scores: the question's attention, which the choice is made by; None: not needed, or no longer.
        seconds: time by stage. The time of a shared run is divided by the prompts' rows.
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
        """True if all rows that the choice needs have run and tokens are not chosen yet."""
        return self.scores is not None and not len(self.left.positions)

    @property
    def over(self) -> bool:
        """True if the KV is complete."""
        return self.selected is not None and not len(self.left.positions)

    def rows(self, positions: NDArray[np.int32]) -> RowsOf:
        """Return the prompt's rows at `positions`."""
        return RowsOf(self.ids[positions], positions.astype(np.int64), self.blocks, self.lora)


class Blender:
    """Completion of prompts with one rank's part of vLLM's model. All ranks must make the same calls.

    Args:
        rows: runner of the model.
        pages: K and V of its layers.
    """

    def __init__(self, rows: RowRunner, pages: PagesOfLayers) -> None:
        self._rows = rows
        self._pages = pages

    def begin(self, completion: BlendedPrompt) -> None:
        """Set the rows that run first. Documents must be in the pages already. Mutates `completion`."""
        if completion.selected is None:
            plan, selection = completion.plan, completion.selection
            layers = observed_layers(selection, plan, self._rows.count)
            if layers:
                needs, completion.left = question_of(selection), completion.rows(plan.computed)
                completion.scores = QuestionAttention(self._pages, layers, plan, completion.blocks, needs)
        if completion.scores is None:
            self._choose(completion)

    def step(self, completions: Sequence[BlendedPrompt]) -> None:
        """Advance completions by as many rows as vLLM computes in a step. Mutates their pages.

        Prompts without chosen tokens come first, so that more prompts share the runs through all layers.

        A pipeline stage must not wait here for a later stage: vLLM sends the later stage its own rows of the
        step after this call, and the later stage receives those first. So no stage waits for data sent in the
        same step, and a choice that needs all stages is made in the next step.
        """
        self._rows.wait_for_sends()
        for c in completions:
            if c.looked:
                self._choose(c)
        rows_left = self._rows.most_rows
        while rows_left > 0 and (unfinished := [c for c in completions if not (c.over or c.looked)]):
            choosing = [c for c in unfinished if c.scores is not None]
            rows_left -= self._run(choosing, self._run_first_layers, "choose", rows_left) if choosing else 0
            if not choosing:
                rows_left -= self._run(unfinished, self._run_all_layers, "rows", rows_left)
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
        limit: int,
    ) -> int:
        """Run at most `most` of the rows that are left, and return their number."""
        part = next(self._rows.parts([c.left for c in completions], limit))
        pieces = [(completions[index], rows) for index, rows in part]
        began = time.perf_counter()
        run(pieces)
        if self._rows.device.type == "cuda":  # else the time would cover the launches only
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
        """Choose tokens, unless chosen before, and set the rows to compute next. Mutates `completion`."""
        attention, plan, last = completion.scores, completion.plan, completion.plan.tokens - 1
        if completion.selected is None:
            scores = None if attention is None else attention.seen()
            completion.selected = choose(completion.selection, plan, self._rows.count, scores)
        completion.scores = None
        positions = np.union1d(plan.computed, completion.selected).astype(np.int32)
        completion.left = completion.rows(positions[(positions < last) & ~plan.exact[positions]])


def _look(pieces: Sequence[tuple[BlendedPrompt, RowsOf]], index: int, q: torch.Tensor) -> None:
    """Pass the queries of each prompt's rows to its scores."""
    first = 0
    for completion, rows in pieces:
        stop = first + len(rows.ids)
        if completion.scores is not None:
            completion.scores.look(index, q[first:stop], rows.positions)
        first = stop
