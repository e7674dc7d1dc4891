"""The layer loop of blending: recomputes chosen rows of a prompt against KV computed elsewhere.

For every layer: the rows' q, k, v -> rotate q and k, write K and V into the pages -> attention of the rows to
all keys at or before them -> the rest of the layer. The rows are the prompt's computed tokens (gaps and the
question) and the selected ones, together and in order; the KV of all other tokens stays as found.

The rows are selected first, from the input that the selection's method needs (`kvkit.blend.methods`). Then
all of them start at layer 0, except with deviations:

    the question's attention   the computed rows alone run through the first layers against the KV as found.
                               They run again with the selected rows, so that the final rows attend to the
                               updated keys. Choosing costs computed rows * layers run.
                               If these layers are dense, every row that is not exact runs through them,
                               and the selected rows continue from there.
    deviations                 every row that is not exact runs through layer 0; its K and V of layer 1 are
                               computed and compared with those in the pages. The selected rows continue from
                               layer 1. If the choice is gradual, each later layer does the same with the
                               remaining rows. Choosing costs layer 0 of the other rows.
    an auxiliary model         the model provides the input; so does a full recompute, in other pages. Their
                               costs are not counted.
    nothing                    choosing costs nothing.

A selection's ratio is a budget that includes the cost of choosing. With every reused token selected, the
result is equal to a full prefill's, up to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.blend.drift import Drift
from kvkit.blend.methods.method import NeedsAuxiliary, NeedsDeviation, NeedsQuestion
from kvkit.blend.methods.registry import method_named
from kvkit.blend.plan import (
    BlendError,
    BlendPlan,
    Selection,
    choose,
    counts_by_layer,
    observed_layers,
    question_needs,
)
from kvkit.format.rope import Rope
from kvkit.kernels.attention.api import blend_attention, query_scores, rope_scatter, token_deviation
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows

Positions = NDArray[np.int32]
LastKeys = Callable[[Positions], Positions]
"""Function from positions of rows to the last key that each row attends to, both ascending."""
Reader = Callable[[NDArray[np.int32], BlendPlan], NDArray[np.float32]]
"""Auxiliary model: function from a prompt's token ids and its plan to the input of `NeedsAuxiliary`."""
_OnAttention = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with a layer, its rotated q, and the logsumexp of its attention."""
ANCHORS_FIRST = 4
"""Number of tokens at the start of every span that are always anchors."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Rope and scoring of the attention in one layer."""

    rope: Rope  # of its queries and keys
    scoring: Scoring


class Decoder(Protocol):
    """A decoder that can run its layers for some rows of a prompt; every method is pure.

    h is [M, E], the hidden state of M rows.
    """

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def device(self) -> torch.device:
        """Device of weights and KV."""

    def attention(self, layer: int) -> Attention:
        """Return rope and scoring of a layer's attention."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return h of token ids, int64 [M]."""

    def qkv(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [M, Hq, D], k [M, H, D], v [M, H, Dv] of a layer, not rotated."""

    def post(self, layer: int, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """Return h after a layer, given h before it and its attention's output o [M, Hq, Dv]."""

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] from h after the last layer."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """The KV of one sequence in an engine's pages.

    Args:
        layers: (k [B, H, N, D], v [B, H, N, Dv]) per layer, D innermost. Access to a layer may wait until its
            KV is loaded and rotated.
        table: block table of the sequence, int64 [blocks].
    """

    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    table: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Blended:
    """The result and cost of blending a prompt."""

    logits: torch.Tensor  # of the last token, [V]
    selected: Positions  # reused tokens that were recomputed, ascending
    row_layers: int  # number of rows run, summed over layers; a full prefill takes N * layers


@torch.inference_mode()
def blend(
    decoder: Decoder,
    kv: PagedKV,
    tokens: NDArray[np.int32],
    plan: BlendPlan,
    selection: Selection | None = None,
    *,
    last_keys: LastKeys | None = None,
    auxiliary: Reader | None = None,
) -> Blended:
    """Complete a prompt's KV: compute the missing tokens, recompute those that `selection` chooses.

    Mutates the pages of computed and selected tokens. A choice by deviation also mutates layers 0 and 1 of
    all tokens that are not exact; a gradual one also the next layer of the remaining tokens. `drift` also
    mutates the pages of all reused tokens. No other pages change.

    Args:
        kv: pages with the KV of all of the plan's tokens except computed ones, rotated to their positions.
        tokens: int32 [N], the whole prompt.
        selection: None: the default selection.
        last_keys: last key that each row attends to; None: the key at its own position, the only correct
            choice. Other functions imitate the masks of other systems.
        auxiliary: auxiliary model, for methods that need one.

    Raises:
        BlendError: plan and prompt differ in length, or the method needs an auxiliary model.
    """
    selection = selection or Selection()
    run = _Run(decoder, kv, tokens, plan, last_keys, selection)
    needs, seen = method_named(selection.method).needs, None
    if isinstance(needs, NeedsAuxiliary) and auxiliary is None:
        raise BlendError(f"method={selection.method!r}: needs {needs}: want `auxiliary`")
    if observed := observed_layers(selection, plan, decoder.layers):
        if isinstance(needs, NeedsDeviation):
            return run.blend_by_deviation(selection)
        if isinstance(needs, NeedsQuestion) and needs.dense:
            return run.blend_after_dense_layers(selection, observed)
        if isinstance(needs, NeedsQuestion):
            seen, _ = run.measure_attention(question_needs(selection), observed, plan.computed)
        else:
            seen = (
                auxiliary(tokens, plan)
                if isinstance(needs, NeedsAuxiliary) and auxiliary
                else run.measure_recompute()
            )
    return run.recompute(choose(selection, plan, decoder.layers, seen))


@torch.inference_mode()
def recompute(
    decoder: Decoder,
    kv: PagedKV,
    tokens: NDArray[np.int32],
    plan: BlendPlan,
    selected: Positions,
    *,
    last_keys: LastKeys | None = None,
) -> Blended:
    """Blend as `blend` does, with the tokens to recompute, int32 ascending, chosen by the caller."""
    return _Run(decoder, kv, tokens, plan, last_keys).recompute(selected)


def reduce_heads(attention: torch.Tensor, needs: NeedsQuestion) -> torch.Tensor:
    """Reduce the heads' attention, [Hq, N], as `NeedsQuestion.heads` states, except for `norm`."""
    if needs.heads == "each":
        return attention
    return attention.amax(0) if needs.heads == "max" else attention.mean(0)


@dataclass(slots=True, eq=False)
class _Run:
    """The blending of one prompt, with a count of the rows that it computes."""

    decoder: Decoder
    kv: PagedKV
    tokens: NDArray[np.int32]
    plan: BlendPlan
    last_keys: LastKeys | None
    selection: Selection | None = None  # for its drift
    row_layers: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != self.plan.tokens:
            raise BlendError(f"tokens: {len(self.tokens)}, want {self.plan.tokens}, as in the plan")

    def recompute(self, selected: Positions) -> Blended:
        """Run the computed and the selected rows through every layer."""
        rows = np.union1d(self.plan.computed, selected).astype(np.int32)
        h = self.run_layers(rows, self._embed(rows), range(self.decoder.layers))
        return Blended(self.decoder.logits(h)[-1], selected, self.row_layers)

    def measure_attention(
        self, needs: NeedsQuestion, layers: int, rows: Positions
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        """Run `rows` through the first `layers` layers; return the input that `needs` describes, and h."""
        query = self.plan.question_positions
        query_rows = np.searchsorted(rows, query).tolist()
        all_rows = self._rows(query)
        single_rows = [self._rows(query[i : i + 1]) for i in range(len(query))]
        by_layer = []

        def add_scores(layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
            if needs.last is not None and layer < layers - needs.last:
                return
            k, v = self.kv.layers[layer]
            values, scoring = v if needs.value_norm else None, self.decoder.attention(layer).scoring
            if needs.heads == "norm":
                pairs = zip(query_rows, single_rows, strict=True)
                by_row = [query_scores(q[i : i + 1], k, values, row, scoring) for i, row in pairs]
                by_layer.append(torch.stack(by_row).mean(1).square().sum(0).sqrt())
            else:
                query_lse = lse[query_rows] if needs.anchors == 1 else None
                scores = query_scores(q[query_rows], k, values, all_rows, scoring, query_lse)
                by_layer.append(reduce_heads(scores, needs))

        h = self.run_layers(rows, self._embed(rows), range(layers), add_scores, needs.anchors)
        return torch.stack(by_layer).cpu().numpy(), h

    def measure_recompute(self) -> NDArray[np.float32]:
        """Return the input of `NeedsRecompute`, from a full prefill. Works on copies; mutates nothing."""
        pages = [(k.clone(), v.clone()) for k, v in self.kv.layers]
        copied_run = replace(self, kv=PagedKV(pages, self.kv.table), row_layers=0, last_keys=None)
        inexact = np.flatnonzero(~self.plan.exact).astype(np.int32)
        needs = NeedsQuestion(heads="mean", value_norm=False)
        attention, _ = copied_run.measure_attention(needs, self.decoder.layers, inexact)
        changes, reused = np.zeros_like(attention), np.flatnonzero(self.plan.reused).astype(np.int32)
        slots, tokens = self._rows(reused).slots, pages[0][1].shape[2]
        for change, (_, new), (_, old) in zip(changes, pages, self.kv.layers, strict=True):
            new, old = (v[slots // tokens, :, slots % tokens] for v in (new, old))
            change[reused] = token_deviation(new, old).sqrt().cpu().numpy()
        return np.stack([attention, changes])

    def blend_by_deviation(self, selection: Selection) -> Blended:
        """Run every row that is not exact through layer 0, then choose, and run the chosen rows further."""
        plan, layers = self.plan, self.decoder.layers
        rows, selected = np.flatnonzero(~plan.exact).astype(np.int32), None
        h, free = self.run_layers(rows, self._embed(rows), range(1)), plan.reused
        counts = counts_by_layer(selection, plan, layers)
        for layer, count in enumerate(counts, start=1):
            chosen = choose(selection, plan, layers, self._deviations(layer, rows, h), (free, count))
            selected = chosen if selected is None else selected
            free = np.isin(np.arange(plan.tokens), chosen)
            kept = np.union1d(plan.computed, chosen).astype(np.int32)
            rows, h = kept, h[self._tensor(np.searchsorted(rows, kept))]
            h = self.run_layers(rows, h, range(layer, layer + 1 if layer < len(counts) else layers))
        assert selected is not None
        return Blended(self.decoder.logits(h)[-1], selected, self.row_layers)

    def blend_after_dense_layers(self, selection: Selection, dense: int) -> Blended:
        """Run every row that is not exact through the first `dense` layers, then the chosen rows further."""
        rows, layers = np.flatnonzero(~self.plan.exact).astype(np.int32), self.decoder.layers
        seen, h = self.measure_attention(question_needs(selection), dense, rows)
        selected = choose(selection, self.plan, layers, seen)
        kept = np.union1d(self.plan.computed, selected).astype(np.int32)
        h = h[self._tensor(np.searchsorted(rows, kept))]
        h = self.run_layers(kept, h, range(dense, layers))
        return Blended(self.decoder.logits(h)[-1], selected, self.row_layers)

    def _deviations(self, layer: int, rows: Positions, h: torch.Tensor) -> NDArray[np.float32]:
        """Return the input of `NeedsDeviation` for these rows. Mutates their pages of the layer."""
        q, k, v = self.decoder.qkv(layer, h)
        k_pages, v_pages = self.kv.layers[layer]
        slots, tokens = self._rows(rows).slots, v_pages.shape[2]
        v_changes = token_deviation(v, v_pages[slots // tokens, :, slots % tokens])
        k_changes = torch.empty_like(v_changes)
        rotations = self._rotations(self.decoder.attention(layer).rope, rows)
        rope_scatter(q, k, v, rotations, slots, k_pages, v_pages, k_changes)
        seen = np.zeros((2, self.plan.tokens), np.float32)
        seen[:, rows] = torch.stack([k_changes, v_changes]).cpu().numpy()
        return seen

    def run_layers(
        self,
        positions: Positions,
        h: torch.Tensor,
        layers: range,
        on_attention: _OnAttention | None = None,
        anchors: float = 1.0,
    ) -> torch.Tensor:
        """Run rows through layers and return h: after the model's last layer, of the last row only.

        Mutates the rows' pages. With `on_attention`, which is called in every layer, all rows run through the
        last layer, too. `anchors`: as in `NeedsQuestion`.
        """
        slots = self._rows(positions).slots
        drift = self._drift(positions) if on_attention is None else None
        last_keys = positions if self.last_keys is None else self.last_keys(positions)
        rows = self._rows(last_keys)
        rotations: dict[Rope, RowRotations] = {}
        for layer in layers:
            attention = self.decoder.attention(layer)
            k_pages, v_pages = self.kv.layers[layer]
            q, k, v = self.decoder.qkv(layer, h)
            if attention.rope not in rotations:
                rotations[attention.rope] = self._rotations(attention.rope, positions)
            kv_before = drift.read_sources((k_pages, v_pages)) if drift else None
            q = rope_scatter(q, k, v, rotations[attention.rope], slots, k_pages, v_pages)
            if drift and kv_before:
                drift.correct((k_pages, v_pages), kv_before, attention.rope)
            self.row_layers += len(positions)
            if layer == self.decoder.layers - 1 and on_attention is None:  # logits are of the last row
                q, h, rows = q[-1:], h[-1:], self._rows(last_keys[-1:])
            if anchors < 1:
                o, lse = blend_attention(
                    q, *self._anchored(positions, anchors, k_pages, v_pages), attention.scoring
                )
            else:
                o, lse = blend_attention(q, k_pages, v_pages, rows, attention.scoring)
            if on_attention is not None:
                on_attention(layer, q, lse)
            h = self.decoder.post(layer, h, o)
        return h

    def _drift(self, positions: Positions) -> Drift | None:
        selection = self.selection
        if selection is None or not selection.drift:
            return None
        slots = self._rows(np.arange(self.plan.tokens, dtype=np.int32)).slots
        return Drift.of(selection, self.plan, positions, slots)

    def _anchored(
        self, positions: Positions, share: float, k_pages: torch.Tensor, v_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Rows]:
        """Return K and V of the tokens that rows with anchors attend to, in one block, and `Rows` over it.

        In that block, a sliding window counts only these tokens.
        """
        plan, starts = self.plan, [*self.plan.starts.tolist(), self.plan.tokens]
        slots = self._rows(np.arange(plan.tokens, dtype=np.int32)).slots
        block, offset = slots // k_pages.shape[2], slots % k_pages.shape[2]
        key_norms = k_pages[block, :, offset].float().norm(dim=-1).mean(1).cpu().numpy()
        kept = plan.exact.copy()
        kept[plan.computed] = True
        for start, stop in itertools.pairwise(starts):
            free = start + np.flatnonzero(plan.reused[start:stop])
            kept[free[:ANCHORS_FIRST]] = True
            kept[free[np.argsort(key_norms[free], kind="stable")[: round(share * len(free))]]] = True
        kept_positions = np.flatnonzero(kept)
        kept_index = self._tensor(kept_positions)
        block, offset = block[kept_index], offset[kept_index]
        k, v = (pages[block, :, offset].transpose(0, 1)[None] for pages in (k_pages, v_pages))
        ends, table = np.array([0, len(positions)]), np.zeros((1, 1), np.int64)
        row_positions = np.searchsorted(kept_positions, positions)
        count = len(kept_positions)
        return k, v, Rows.of(row_positions, ends, np.array([count]), table, count, self.decoder.device)

    def _rows(self, positions: Positions) -> Rows:
        ends, lengths = np.array([0, len(positions)]), np.array([self.plan.tokens])
        table, block_tokens = self.kv.table[None], self.kv.layers[0][0].shape[2]
        return Rows.of(positions, ends, lengths, table, block_tokens, self.decoder.device)

    def _embed(self, positions: Positions) -> torch.Tensor:
        return self.decoder.embed(self._tensor(self.tokens[positions].astype(np.int64)))

    def _rotations(self, rope: Rope, positions: Positions) -> RowRotations:
        return RowRotations(rope, self._tensor(rope.table(positions.astype(np.int64))))

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.decoder.device)
