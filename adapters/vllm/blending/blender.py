"""Completion of prompts' KV in vLLM's pages: choose tokens and recompute them, some rows each step.

`kvkit.blend.run` does this with a loop over layers; here, vLLM's own model is run. The computed rows go
through the first layers, so that the question's attention can be measured. Then the computed and the chosen
rows go through all layers. Prompts share runs. vLLM computes the last token itself, to sample from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ReduceOp
from vllm.lora.request import LoRARequest

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.attention import scoring
from kvkit.adapters.vllm.blending.drift import PromptDrift
from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.adapters.vllm.blending.rows import RequestRows, RowRunner
from kvkit.adapters.vllm.step import Tables
from kvkit.blend.drift import sources_and_targets
from kvkit.blend.methods.method import NeedsQuestion
from kvkit.blend.plan import BlendPlan, Selection, choose, observed_layers, question_needs
from kvkit.blend.run import reduce_heads
from kvkit.format.rope import Rope
from kvkit.kernels.attention.api import query_scores
from kvkit.kernels.attention.rows import Rows


class QuestionAttention:
    """The question's attention to the tokens of a prompt, by layer: the scores by which tokens are chosen.

    Scores are combined over the heads and layers of all ranks, so that every rank gets the same.

    Args:
        pages: K and V of the rank's layers.
        layers: number of the model's first layers that rows run through.
        plan: the prompt's plan, which has the question's positions.
        blocks: block tables of the prompt, with its documents loaded.
        needs: the attention that the method needs; `registry.served` must accept it.
    """

    def __init__(
        self, pages: LayerPages, layers: int, plan: BlendPlan, blocks: Tables, needs: NeedsQuestion
    ) -> None:
        self.layers = layers
        self._first_layer = max(0, layers - (needs.last or layers))
        self._pages, self._blocks, self._needs = pages, blocks, needs
        self._query_start, self._tokens = int(plan.question_positions[0]), plan.tokens
        self._head_scores: dict[int, torch.Tensor] = {}  # [Hq, N] by layer
        self._rows: dict[tuple[int, int, bytes], Rows] = {}
        self._scores: torch.Tensor | None = None
        self._sum_over_stages: Any = None  # in flight

    def add_queries(self, index: int, q: torch.Tensor, positions: NDArray[np.int64]) -> None:
        """Add the attention of queries [M, Hq, D] of some rows in layer `index`. K and V must be written."""
        layer = self._pages.layers[index]
        first = int(np.searchsorted(positions, self._query_start))  # the question comes last
        if not self._first_layer <= layer.number < self.layers or first == len(positions):
            return
        k, v, table = self._pages.read(index, self._blocks, self._tokens)
        rows, values = self._rows_at(positions[first:], table, k), v if self._needs.value_norm else None
        scores = query_scores(q[first:], k, values, rows, scoring(layer.module))
        self._head_scores[index] = self._head_scores[index] + scores if index in self._head_scores else scores

    def start_combining(self) -> None:
        """Start combining the scores of all ranks. Call it on every rank, in the same order.

        Does not wait for other stages of a pipeline.
        """
        layer_scores = torch.zeros(len(self._head_scores), self._tokens)
        for row, index in zip(layer_scores, sorted(self._head_scores), strict=True):
            row.copy_(reduce_heads(self._head_scores[index], self._needs))
        ranks, stages = compat.find("get_tp_group")(), compat.find("get_pp_group")()
        if ranks.world_size > 1 and layer_scores.numel():  # empty on all ranks of a stage without such layers
            use_max = self._needs.heads == "max"
            operation = ReduceOp.MAX if use_max else ReduceOp.SUM
            torch.distributed.all_reduce(layer_scores, operation, group=ranks.cpu_group)
            layer_scores /= 1 if use_max else ranks.world_size
        self._scores = torch.zeros(self.layers - self._first_layer, self._tokens)
        layers = [self._pages.layers[index].number - self._first_layer for index in sorted(self._head_scores)]
        self._scores[layers] = layer_scores
        if stages.world_size > 1:
            self._sum_over_stages = torch.distributed.all_reduce(
                self._scores, ReduceOp.SUM, group=stages.cpu_group, async_op=True
            )

    def wait_for_scores(self) -> NDArray[np.float32]:
        """Return the scores of all rows and ranks, float32 [layers, N], once `start_combining` has them."""
        assert self._scores is not None
        if self._sum_over_stages is not None:
            self._sum_over_stages.wait()
        return np.asarray(self._scores.numpy(), np.float32)

    def _rows_at(self, positions: NDArray[np.int64], table: NDArray[np.int64], pages: torch.Tensor) -> Rows:
        """Return `Rows` at these positions of one sequence, cached: all layers share its masks and tiles."""
        key = int(positions[0]), pages.shape[2], table.tobytes()
        if key not in self._rows:
            ends, lengths = np.array([0, len(positions)]), np.array([self._tokens])
            self._rows[key] = Rows.of(positions, ends, lengths, table[None], pages.shape[2], pages.device)
        return self._rows[key]


@dataclass(eq=False, slots=True)
class BlendedPrompt:
    """A prompt with KV to complete, except the last token's. Pass it to `Blender.begin_prompt` first.

    Args:
        ids: int32 [N], the prompt.
        plan: the tokens with KV, and those to compute.
        selection: the way to choose tokens to recompute.
        blocks: the request's block tables, from token 0 on.
        lora: the request's adapter; None: none.
        selected: tokens to recompute, int32 ascending; None: not chosen yet.

    Attributes:
        pending_rows: rows that have yet to run: first those that the choice needs, then those to compute.
        attention: the question's attention, by which tokens are chosen; None: not needed, or no longer.
        corrects: whether a run computes all of the chosen and computed rows, and corrects other tokens.
        seconds: time by stage. The time of a shared run is divided by the prompts' rows.
    """

    ids: TokenIds
    plan: BlendPlan
    selection: Selection
    blocks: Tables
    _: KW_ONLY
    lora: LoRARequest | None = None
    selected: NDArray[np.int32] | None = None
    pending_rows: RequestRows = field(init=False)
    attention: QuestionAttention | None = None
    corrects: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: {"choose": 0.0, "rows": 0.0})

    @property
    def is_scored(self) -> bool:
        """True if all rows that the choice needs have run and tokens are not chosen yet."""
        return self.attention is not None and not len(self.pending_rows.positions)

    @property
    def is_complete(self) -> bool:
        """True if the KV is complete."""
        return self.selected is not None and not len(self.pending_rows.positions)

    def rows_at(self, positions: NDArray[np.int32]) -> RequestRows:
        """Return the prompt's rows at `positions`."""
        return RequestRows(self.ids[positions], positions.astype(np.int64), self.blocks, self.lora)


class Blender:
    """Completion of prompts with one rank's part of vLLM's model. All ranks must make the same calls.

    Args:
        rows: runner of the model.
        pages: K and V of its layers.
        ropes: rope of each layer; None: its keys are not rotated.
    """

    def __init__(self, rows: RowRunner, pages: LayerPages, ropes: Sequence[Rope | None]) -> None:
        self._rows = rows
        self._pages = pages
        self._ropes = ropes

    def begin_prompt(self, prompt: BlendedPrompt) -> None:
        """Set the rows that run first. Documents must be in the pages already. Mutates `prompt`."""
        if prompt.selected is None:
            plan, selection = prompt.plan, prompt.selection
            layers = observed_layers(selection, plan, self._rows.count)
            if layers:
                needs, prompt.pending_rows = question_needs(selection), prompt.rows_at(plan.computed)
                prompt.attention = QuestionAttention(self._pages, layers, plan, prompt.blocks, needs)
        if prompt.attention is None:
            self._choose_tokens(prompt)

    def advance(self, prompts: Sequence[BlendedPrompt]) -> None:
        """Advance prompts by as many rows as vLLM computes in a step. Mutates their pages.

        Prompts without chosen tokens come first, so that more prompts share the runs through all layers.

        A pipeline stage must not wait here for a later stage: vLLM sends the later stage its own rows of the
        step after this call, and the later stage receives those first. So no stage waits for data sent in the
        same step, and a choice that needs all stages is made in the next step.
        """
        self._rows.wait_for_sends()
        for prompt in prompts:
            if prompt.is_scored:
                self._choose_tokens(prompt)
        limit = self._rows.max_rows
        while limit > 0 and (unfinished := [p for p in prompts if not (p.is_complete or p.is_scored)]):
            unchosen = [prompt for prompt in unfinished if prompt.attention is not None]
            ran = self._run_batch(unchosen or unfinished, limit)
            if not ran:  # the next step has room for the rows
                break
            limit -= ran
            for prompt in unchosen:
                if prompt.is_scored and prompt.attention is not None:
                    prompt.attention.start_combining()
                    if self._rows.stages == 1:
                        self._choose_tokens(prompt)

    def _run_batch(self, prompts: Sequence[BlendedPrompt], limit: int) -> int:
        """Run at most `limit` of the pending rows, and return their number.

        Rows of prompts with `attention` run through the layers that it needs, all others through all layers.
        """
        in_batch, batch = self._next_batch(prompts, limit)
        if not batch:
            return 0
        needed_layers = [prompt.attention.layers for prompt in in_batch if prompt.attention is not None]
        began = time.perf_counter()
        if needed_layers:
            on_queries = partial(_add_queries, in_batch, batch)
            self._rows.run(batch, on_queries, max(needed_layers), hidden=False)
        else:
            drifts = [self._drift_of(p, rows) for p, rows in zip(in_batch, batch, strict=True) if p.corrects]
            self._rows.run(batch, on_kv=partial(_correct, drifts) if drifts else None, hidden=False)
        if self._rows.device.type == "cuda":  # else the time would cover the launches only
            torch.cuda.current_stream(self._rows.device).synchronize()
        total = sum(len(rows.ids) for rows in batch)
        row_s = (time.perf_counter() - began) / total
        for prompt, rows in zip(in_batch, batch, strict=True):
            prompt.pending_rows = prompt.pending_rows.slice(len(rows.ids), len(prompt.pending_rows.ids))
            prompt.seconds["choose" if needed_layers else "rows"] += row_s * len(rows.ids)
        return total

    def _next_batch(
        self, prompts: Sequence[BlendedPrompt], limit: int
    ) -> tuple[list[BlendedPrompt], list[RequestRows]]:
        """Return the rows to run next and their prompts; empty if only rows that must not be cut are left.

        A prompt's rows are cut if they do not fit in any run, but not because of other prompts: what a prompt
        gets does not depend on them. Without all rows in a run, nothing is corrected. Mutates the prompts.
        """
        batch = next(self._rows.batches([p.pending_rows for p in prompts], limit))
        index, rows = batch[-1]
        prompt = prompts[index]
        if prompt.corrects and len(rows.ids) < len(prompt.pending_rows.ids):
            if len(batch) > 1 or limit < self._rows.max_rows:
                batch.pop()
            else:
                prompt.corrects = False
        return [prompts[index] for index, _ in batch], [rows for _, rows in batch]

    def _drift_of(self, prompt: BlendedPrompt, rows: RequestRows) -> PromptDrift:
        return PromptDrift(self._pages, self._ropes, prompt.selection, prompt.plan, rows)

    def _choose_tokens(self, prompt: BlendedPrompt) -> None:
        """Choose tokens, unless chosen before, and set the rows to compute next. Mutates `prompt`."""
        attention, plan, last = prompt.attention, prompt.plan, prompt.plan.tokens - 1
        if prompt.selected is None:
            scores = None if attention is None else attention.wait_for_scores()
            prompt.selected = choose(prompt.selection, plan, self._rows.count, scores)
        prompt.attention, prompt.corrects = None, False
        positions = np.union1d(plan.computed, prompt.selected).astype(np.int32)
        prompt.pending_rows = prompt.rows_at(positions[(positions < last) & ~plan.exact[positions]])
        if self._rows.writes_kv_first and prompt.selection.drift:
            sources, targets = sources_and_targets(prompt.selection, plan, prompt.pending_rows.positions)
            prompt.corrects = len(sources) > 0 and len(targets) > 0


def _correct(drifts: Sequence[PromptDrift], index: int) -> None:
    """Correct a layer of each prompt."""
    for drift in drifts:
        drift.correct(index)


def _add_queries(
    prompts: Sequence[BlendedPrompt], batch: Sequence[RequestRows], index: int, q: torch.Tensor
) -> None:
    """Pass the queries of each prompt's rows in a batch to its attention."""
    first = 0
    for prompt, rows in zip(prompts, batch, strict=True):
        stop = first + len(rows.ids)
        if prompt.attention is not None:
            prompt.attention.add_queries(index, q[first:stop], rows.positions)
        first = stop
