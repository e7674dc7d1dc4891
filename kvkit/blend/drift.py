"""What tokens that are computed again tell of those that are not: all lost the same context.

The KV of a document that was computed alone differs from a full prefill's in part by chance, in part in the
same way for all of its tokens. A question attends to many tokens a little: there the first part cancels out
and the second adds up. The mean change of the tokens that are computed again is an estimate of it.
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


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """The tokens that tell and those that are told, in pages k [B, H, n, D], v [B, H, n, Dv].

    Args:
        share: of the mean change of K, before its rope, and V, that is added.
        telling, told: positions and slots of tokens.
    """

    share: float
    telling: tuple[NDArray[np.int64], torch.Tensor]
    told: tuple[NDArray[np.int64], torch.Tensor]

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
        device = slots.device
        return cls(share, *((some, slots[torch.from_numpy(some).to(device)]) for some in (telling, told)))

    def held(self, pages: KAndV) -> KAndV:
        """K and V of those that tell, [T, H, D] and [T, H, Dv], to be given to `tell`."""
        return _of(pages[0], self.telling[1]), _of(pages[1], self.telling[1])

    def tell(self, pages: KAndV, before: KAndV, rope: Rope) -> None:
        """Add the share of what has changed since `held`. Mutates the pages of those that are told."""
        k_pages, v_pages = pages
        positions, (others, slots) = self.telling[0], self.told
        k, v = self.held(pages)
        back, there = (
            torch.from_numpy(rope.turns(turned))[:, None].to(k.device) for turned in (-positions, others)
        )
        changed = reference.rotate(k.float() - before[0].float(), back, rope).mean(0)
        every = changed.expand(len(others), *changed.shape)
        _add(k_pages, slots, self.share * reference.rotate(every, there, rope))
        _add(v_pages, slots, self.share * (v.float() - before[1].float()).mean(0))


def _of(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return pages[slots // pages.shape[2], :, slots % pages.shape[2]]


def _add(pages: torch.Tensor, slots: torch.Tensor, change: torch.Tensor) -> None:
    changed = (_of(pages, slots).float() + change).to(pages.dtype)
    pages[slots // pages.shape[2], :, slots % pages.shape[2]] = changed
