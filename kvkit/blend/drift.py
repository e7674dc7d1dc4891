"""Drift: an estimate of the KV error of reused tokens, made from the tokens that are recomputed.

The KV of a document that was computed alone has a random error and a systematic one, which is alike for all
of its tokens. A question attends to many tokens a little, so random errors cancel out and systematic ones add
up. The context that a token lost is known in advance: in a full prefill it attends to all tokens before it;
alone, it attended only to those of its document. The change of recomputed tokens grows with the logarithm of
the ratio of the two (docs/evidence/leaderboard.md). The slope of this change, by least squares through the
origin, estimates the change of all other reused tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.blend.methods.method import offsets
from kvkit.blend.plan import BlendPlan, Selection
from kvkit.format.rope import Rope
from kvkit.kernels.pages import reference

KAndV = tuple[torch.Tensor, torch.Tensor]
"""Pages of one layer, or rows of them."""
DriftTokens = tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]
"""Positions, slots, and lost context in float32, each [T]."""
K_FACTOR = 0.5
"""Factor of the share for K: a larger one overcorrects the question's attention scores."""
_PIECE_TOKENS = 4096
"""Tokens that are corrected at a time, to bound memory beside the pages."""


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """The tokens to estimate from and the tokens to correct, in pages k [B, H, n, D], v [B, H, n, Dv].

    Args:
        share: share of V's estimated change that is added; of K's, before RoPE, half as much.
        sources: recomputed tokens, from which the change is estimated.
        targets: other reused tokens, which are corrected.
        tables: of each rope, tables that rotate the sources' keys to position 0, and others from there to the
            targets' positions. `correct` adds those that are missing.
    """

    share: float
    sources: DriftTokens
    targets: DriftTokens
    tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        selection: Selection,
        plan: BlendPlan,
        rows: NDArray[np.integer[Any]],
        slots: torch.Tensor,
        present: NDArray[np.bool_] | bool = True,
    ) -> Drift | None:
        """Return the drift of the recomputed `rows`; None if it has no sources or no targets.

        Nothing is estimated from the first `selection.first_n` tokens of a span.

        Args:
            slots: int64 [N], slots of all tokens.
            present: bool [N], tokens that have slots.
        """
        sources, targets = sources_and_targets(selection, plan, rows, present)
        if not selection.drift or not len(sources) or not len(targets):
            return None
        device, missed = slots.device, missed_context(plan)

        def with_slots(positions: NDArray[np.int64]) -> DriftTokens:
            lost = torch.from_numpy(missed[positions]).to(device)
            return positions, slots[torch.from_numpy(positions).to(device)], lost

        return cls(selection.drift, with_slots(sources), with_slots(targets))

    def read_sources(self, pages: KAndV) -> KAndV:
        """Return K and V of `sources`, [T, H, D] and [T, H, Dv], to be passed to `correct`."""
        return _read(pages[0], self.sources[1]), _read(pages[1], self.sources[1])

    def correct(self, pages: KAndV, before: KAndV, rope: Rope | None) -> None:
        """Add the share of the sources' change since `before` to K and V of `targets`. Mutates the pages.

        Args:
            rope: rope of the layer; None: its keys are not rotated.
        """
        (_, _, lost), (_, slots, target_lost) = self.sources, self.targets
        k_change, v_change = (
            now.float() - old.float() for now, old in zip(self.read_sources(pages), before, strict=True)
        )
        tables = None if rope is None else self._tables_of(rope, k_change.device)
        if rope is not None and tables is not None:
            k_change = reference.rotate(k_change, tables[0], rope)
        k_slope, v_slope = _slope(k_change, lost), _slope(v_change, lost)
        for first in range(0, len(slots), _PIECE_TOKENS):
            piece = slice(first, first + _PIECE_TOKENS)
            share = self.share * target_lost[piece, None, None]
            k_added = K_FACTOR * share * k_slope
            if rope is not None and tables is not None:
                k_added = reference.rotate(k_added, tables[1][piece], rope)
            _add(pages[0], slots[piece], k_added)
            _add(pages[1], slots[piece], share * v_slope)

    def _tables_of(self, rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if rope not in self.tables:
            to_zero, to_position = (
                torch.from_numpy(rope.delta_table(deltas))[:, None].to(device)
                for deltas in (-self.sources[0], self.targets[0])
            )
            self.tables[rope] = to_zero, to_position
        return self.tables[rope]


def sources_and_targets(
    selection: Selection,
    plan: BlendPlan,
    rows: NDArray[np.integer[Any]],
    present: NDArray[np.bool_] | bool = True,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of the tokens that `Drift.of` estimates from, and of those that it corrects."""
    reused, recomputed = plan.reused & present, np.isin(np.arange(plan.tokens), rows)
    late = offsets(plan.starts, plan.tokens) >= selection.first_n
    return np.flatnonzero(reused & recomputed & late), np.flatnonzero(reused & ~recomputed)


def missed_context(plan: BlendPlan) -> NDArray[np.float32]:
    """Return the context that each token lost against a full prefill, float32 [N].

    It is the logarithm of a ratio: the tokens up to it in the prompt, over the tokens up to it in the text in
    which it was computed. 0 for exact and computed tokens.
    """
    attended = np.arange(1, plan.tokens + 1)
    for span in plan.spans:
        attended[span.start : span.stop] -= span.delta
    missed = np.log(np.arange(1, plan.tokens + 1) / attended).clip(0)
    return np.where(plan.reused, missed, 0).astype(np.float32)


def _slope(change: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """Return the change [H, D] of rows [T, H, D] per unit of lost context [T]."""
    square = lost.square().sum().clamp(min=torch.finfo(lost.dtype).tiny)
    return torch.einsum("t,thd->hd", lost, change) / square


def _read(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return pages[slots // pages.shape[2], :, slots % pages.shape[2]]


def _add(pages: torch.Tensor, slots: torch.Tensor, change: torch.Tensor) -> None:
    changed = (_read(pages, slots).float() + change).to(pages.dtype)
    pages[slots // pages.shape[2], :, slots % pages.shape[2]] = changed
