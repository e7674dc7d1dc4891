"""What tokens that are computed again tell of those that are not: all lost context, some more than others.

The KV of a document that was computed alone differs from a full prefill's in part by chance, in part in the
same way for all of its tokens. A question attends to many tokens a little: there the first part cancels out
and the second adds up. How much a token lost is known beforehand: in a full prefill it would have seen all
tokens before it, alone it saw those of its document. The change of the tokens that are computed again grows
with the logarithm of the one over the other (docs/leaderboard.md), so its slope, by least squares through
the origin, is an estimate for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.blend.methods.method import offsets
from kvkit.blend.plan import BlendPlan
from kvkit.format.rope import Rope
from kvkit.kernels.pages import reference

KAndV = tuple[torch.Tensor, torch.Tensor]
"""Pages of one layer, or rows of them."""
Places = tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]
"""Positions, slots, and float32 what they lost, each [T]."""
OF_K = 0.5
"""Of K's change so much of the share is added: all of it overshoots in the scores that the question gives."""


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """The tokens that tell and those that are told, in pages k [B, H, n, D], v [B, H, n, Dv].

    Args:
        share: of the estimated change of V that is added; of K, before its rope, it is half as much.
        telling, told: tokens.
    """

    share: float
    telling: Places
    told: Places

    @classmethod
    def of(
        cls, share: float, first_n: int, plan: BlendPlan, rows: NDArray[np.int32], slots: torch.Tensor
    ) -> Drift | None:
        """That of recomputed `rows`, but for the first of every span; None where nobody tells or is told.

        Args:
            slots: int64 [N], of all tokens.
        """
        again = np.isin(np.arange(plan.tokens), rows)
        telling = np.flatnonzero(plan.reused & again & (offsets(plan.starts, plan.tokens) >= first_n))
        told = np.flatnonzero(plan.reused & ~again)
        if not share or not len(telling) or not len(told):
            return None
        device, missed = slots.device, missed_context(plan)

        def places(some: NDArray[np.int64]) -> Places:
            of_some = torch.from_numpy(missed[some]).to(device)
            return some, slots[torch.from_numpy(some).to(device)], of_some

        return cls(share, places(telling), places(told))

    def held(self, pages: KAndV) -> KAndV:
        """K and V of those that tell, [T, H, D] and [T, H, Dv], to be given to `tell`."""
        return _of(pages[0], self.telling[1]), _of(pages[1], self.telling[1])

    def tell(self, pages: KAndV, before: KAndV, rope: Rope) -> None:
        """Add the share of what has changed since `held`. Mutates the pages of those that are told."""
        k_pages, v_pages = pages
        (positions, _, lost), (others, slots, lost_by_others) = self.telling, self.told
        k, v = self.held(pages)
        back, there = (
            torch.from_numpy(rope.turns(turned))[:, None].to(k.device) for turned in (-positions, others)
        )
        of_k = reference.rotate(k.float() - before[0].float(), back, rope)
        added = lost_by_others[:, None, None] * _slope(of_k, lost)
        _add(k_pages, slots, OF_K * self.share * reference.rotate(added, there, rope))
        added = lost_by_others[:, None, None] * _slope(v.float() - before[1].float(), lost)
        _add(v_pages, slots, self.share * added)


def missed_context(plan: BlendPlan) -> NDArray[np.float32]:
    """How much of what a full prefill would have shown it each token has not seen, float32 [N].

    The logarithm of the tokens up to it in the prompt over those up to it where it was computed; 0 for what
    is exact or computed.
    """
    seen = np.arange(1, plan.tokens + 1)
    for span in plan.spans:
        seen[span.start : span.stop] -= span.delta
    missed = np.log(np.arange(1, plan.tokens + 1) / seen).clip(0)
    return np.where(plan.reused, missed, 0).astype(np.float32)


def _slope(change: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """By how much rows [T, H, D] change for each that they lost [T]: [H, D]."""
    square = lost.square().sum().clamp(min=torch.finfo(lost.dtype).tiny)
    return torch.einsum("t,thd->hd", lost, change) / square


def _of(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return pages[slots // pages.shape[2], :, slots % pages.shape[2]]


def _add(pages: torch.Tensor, slots: torch.Tensor, change: torch.Tensor) -> None:
    changed = (_of(pages, slots).float() + change).to(pages.dtype)
    pages[slots // pages.shape[2], :, slots % pages.shape[2]] = changed
