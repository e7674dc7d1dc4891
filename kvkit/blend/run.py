"""The layer loop of blending: recompute chosen rows of a prompt against KV that was computed elsewhere.

For every layer: the rows' q, k, v -> rotate q and k, write K and V into the pages -> attention of the rows to
all keys at or before them -> the rest of the layer. The rows are the prompt's computed tokens (gaps and the
question) and the selected ones, together and in order; the KV of all other tokens stays as it was found.

Which rows are selected is decided first, and all of them then start at layer 0:

    question_attention   the computed rows alone run through `layers` layers against the KV as found; there
                         the question's attention is summed over its rows, and over layers that of the
                         head that pays most: few heads look for what the question is about. The rows run
                         again with the selected ones, so that each that counts has seen the updated keys.
                         Choosing costs computed rows * layers looked into.
    k_, v_deviation      every row that is not exact runs through layer 0, and its K and V of layer 1 are
                         computed and compared with what was there; the selected rows go on from layer 1.
                         Choosing costs the other rows' layer 0.
    first_n              choosing costs nothing.

A selection's ratio is a budget of which the cost of choosing is a part. With every reused token selected the
result is that of a full prefill, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.blend.plan import BlendError, BlendPlan, Selection, by_place, count_of, select_tokens
from kvkit.format.rope import Rope
from kvkit.kernels.attention.api import blend_attention, query_scores, rope_scatter, token_deviation
from kvkit.kernels.attention.layer import RowTurns, Scoring
from kvkit.kernels.attention.rows import Rows

Positions = NDArray[np.int32]
Sees = Callable[[Positions], Positions]
"""From the rows' positions, ascending, to the last key that each row attends to, ascending too."""


@dataclass(frozen=True, slots=True)
class Attention:
    """How one layer attends."""

    rope: Rope  # of its queries and keys
    scoring: Scoring


class Decoder(Protocol):
    """A decoder whose layers can be run for some rows of a prompt; every method is pure.

    h is [M, E]: the hidden state of M rows.
    """

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def device(self) -> torch.device:
        """Where weights and KV are."""

    def attention(self, layer: int) -> Attention:
        """How a layer attends."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """h of token ids, int64 [M]."""

    def qkv(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [M, Hq, D], k [M, H, D], v [M, H, Dv] of a layer, not rotated."""

    def post(self, layer: int, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """h after a layer whose attention gave o [M, Hq, Dv]."""

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """[M, V] of h after the last layer."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """The KV of one sequence in an engine's pages.

    Args:
        layers: (k [B, H, N, D], v [B, H, N, Dv]) per layer, D innermost. Taking a layer out may wait until
            its KV has been loaded and rotated.
        table: int64 [blocks], the sequence's blocks in order.
    """

    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    table: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Blended:
    """What blending a prompt took."""

    logits: torch.Tensor  # of the last token, [V]
    selected: Positions  # reused tokens that were recomputed, ascending
    row_layers: int  # rows that went through a layer, over all layers; a full prefill takes N * layers


@torch.inference_mode()
def blend(
    decoder: Decoder,
    kv: PagedKV,
    tokens: NDArray[np.int32],
    plan: BlendPlan,
    selection: Selection | None = None,
    *,
    sees: Sees | None = None,
) -> Blended:
    """Complete a prompt's KV: compute what is missing, recompute what `selection` chooses.

    Mutates the pages of the computed and the selected tokens, and (K or V deviation) layers 0 and 1 of all
    that are not exact; no others.

    Args:
        kv: pages that hold the KV of all of the plan's tokens but the computed ones, rotated to its position.
        tokens: int32 [N], the whole prompt.
        selection: None is the default one.
        sees: what a row attends to; None: keys at or before its own position, which alone is right. Others
            imitate the masks of other systems.

    Raises:
        BlendError: the plan is of another length than the prompt.
    """
    selection = selection or Selection()
    run = _Run(decoder, kv, tokens, plan, sees)
    count, looked = count_of(selection, plan, decoder.layers)
    starts, reused = plan.starts, plan.reused
    first = select_tokens(None, starts, reused, 0, selection.first_n)
    after, scores = None, None
    if len(first) < count and looked > 0:  # otherwise no score would change anything
        if selection.method == "question_attention":
            scores = run.question_scores(selection, looked)
        else:
            after, scores = run.deviations(selection.method)
    return run.recompute(select_tokens(scores, starts, reused, count, selection.first_n), after)


@torch.inference_mode()
def recompute(
    decoder: Decoder,
    kv: PagedKV,
    tokens: NDArray[np.int32],
    plan: BlendPlan,
    selected: Positions,
    *,
    sees: Sees | None = None,
) -> Blended:
    """`blend` with the tokens to recompute, int32 ascending, chosen by the caller."""
    return _Run(decoder, kv, tokens, plan, sees).recompute(selected)


@dataclass(slots=True, eq=False)
class _Run:
    """One prompt under way; counts what it computes."""

    decoder: Decoder
    kv: PagedKV
    tokens: NDArray[np.int32]
    plan: BlendPlan
    sees: Sees | None
    row_layers: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != self.plan.tokens:
            raise BlendError(f"tokens: {len(self.tokens)}, the plan is of {self.plan.tokens}")

    def recompute(self, selected: Positions, after: torch.Tensor | None = None) -> Blended:
        """Run the computed and the selected rows through every layer, or on from what `deviations` gave."""
        rows = np.union1d(self.plan.computed, selected).astype(np.int32)
        if after is None:
            start, h = 0, self._embed(rows)
        else:
            which = np.searchsorted(np.flatnonzero(~self.plan.exact), rows)
            start, h = 1, after[self._tensor(which)]
        h = self.layers(rows, h, range(start, self.decoder.layers))
        return Blended(self.decoder.logits(h)[-1], selected, self.row_layers)

    def question_scores(self, selection: Selection, layers: int) -> NDArray[np.float32]:
        """float32 [N]: how much the question attends to each token in the first `layers` layers, by place."""
        rows, question = self.plan.computed, self.plan.question
        which = self._tensor(np.searchsorted(rows, question))
        asked = self._rows(question)
        total = torch.zeros(self.plan.tokens, device=self.decoder.device)

        def look(layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
            k, v = self.kv.layers[layer]
            values = v if selection.value_norm else None
            scoring = self.decoder.attention(layer).scoring
            paid = query_scores(q[which], k, values, asked, scoring, lse[which])
            total.add_(paid.amax(0))

        self.layers(rows, self._embed(rows), range(layers), look)
        scores: NDArray[np.float32] = total.cpu().numpy()
        return by_place(scores, self.plan.starts, selection.fade)

    def deviations(self, method: str) -> tuple[torch.Tensor, NDArray[np.float32]]:
        """h after layer 0 of every row that is not exact, and how much K or V of layer 1 changes, [N]."""
        every = np.flatnonzero(~self.plan.exact).astype(np.int32)
        h = self.layers(every, self._embed(every), range(1))
        q, k, v = self.decoder.qkv(1, h)
        k_pages, v_pages = self.kv.layers[1]
        slots = self._rows(every).slots
        changed = torch.empty(len(every), device=self.decoder.device)
        if method == "v_deviation":
            tokens = v_pages.shape[2]
            changed = token_deviation(v, v_pages[slots // tokens, :, slots % tokens])
        turns = self._turns(self.decoder.attention(1).rope, every)
        k_changed = changed if method == "k_deviation" else None
        rope_scatter(q, k, v, turns, slots, k_pages, v_pages, k_changed)
        scores = np.zeros(self.plan.tokens, np.float32)
        scores[every] = changed.cpu().numpy()
        return h, scores

    def layers(
        self,
        positions: Positions,
        h: torch.Tensor,
        layers: range,
        look: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run rows through layers; h after them, of the last row alone after the model's last layer.

        Mutates the rows' pages. `look` is shown every layer's rotated q and the logsumexp of its attention.
        """
        slots = self._rows(positions).slots
        seen = positions if self.sees is None else self.sees(positions)
        rows = self._rows(seen)
        turns: dict[Rope, RowTurns] = {}
        for layer in layers:
            form = self.decoder.attention(layer)
            k_pages, v_pages = self.kv.layers[layer]
            q, k, v = self.decoder.qkv(layer, h)
            if form.rope not in turns:
                turns[form.rope] = self._turns(form.rope, positions)
            q = rope_scatter(q, k, v, turns[form.rope], slots, k_pages, v_pages)
            self.row_layers += len(positions)
            if layer == self.decoder.layers - 1:  # only the last token's logits are wanted
                q, h, rows = q[-1:], h[-1:], self._rows(seen[-1:])
            o, lse = blend_attention(q, k_pages, v_pages, rows, form.scoring)
            if look is not None:
                look(layer, q, lse)
            h = self.decoder.post(layer, h, o)
        return h

    def _rows(self, positions: Positions) -> Rows:
        ends, lengths = np.array([0, len(positions)]), np.array([self.plan.tokens])
        table, block_tokens = self.kv.table[None], self.kv.layers[0][0].shape[2]
        return Rows.of(positions, ends, lengths, table, block_tokens, self.decoder.device)

    def _embed(self, positions: Positions) -> torch.Tensor:
        return self.decoder.embed(self._tensor(self.tokens[positions].astype(np.int64)))

    def _turns(self, rope: Rope, positions: Positions) -> RowTurns:
        return RowTurns(rope, self._tensor(rope.table(positions.astype(np.int64))))

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.decoder.device)
