"""Plans of attention for JAX arrays, made where torch is, to be lowered where jax-triton is.

python tests/support/jax_plans.py FILE writes one for each of `CASES`, with the shapes of q and of the pages.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from kvkit.kernels.attention import jax_plan
from kvkit.kernels.attention.layer import Scoring

if TYPE_CHECKING:
    from kvkit.kernels.attention.rows import Rows


class Array(NamedTuple):
    """All that a plan depends on of an array."""

    shape: tuple[int, ...]
    dtype: str

    def __len__(self) -> int:
        return self.shape[0]


class Case(NamedTuple):
    """A problem: rows of one request per entry of `counts`, strewn over its tokens."""

    counts: tuple[int, ...] = (700, 60)
    lengths: tuple[int, ...] = (4096, 900)
    dtype: str = "bfloat16"
    heads: int = 8
    group: int = 4
    sizes: tuple[int, int] = (128, 128)
    tokens: int = 16
    window: int | None = None
    softcap: float | None = None

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.sizes[0] ** -0.5, self.window, self.softcap)

    def rows(self) -> Rows:
        from kvkit.kernels.attention.rows import Rows  # where torch is

        random = np.random.default_rng(0)
        blocks = -(-max(self.lengths) // self.tokens)
        tables = random.permutation(len(self.counts) * blocks).reshape(-1, blocks)
        positions = [
            np.sort(random.permutation(length)[:count])
            for count, length in zip(self.counts, self.lengths, strict=True)
        ]
        starts = np.cumsum([0, *self.counts])
        return Rows.of(np.concatenate(positions), starts, np.array(self.lengths), tables, self.tokens)

    def arrays(self) -> tuple[Array, Array, Array]:
        """q, K pages and V pages."""
        blocks = len(self.counts) * -(-max(self.lengths) // self.tokens)
        q = Array((sum(self.counts), self.heads * self.group, self.sizes[0]), self.dtype)
        k, v = (Array((blocks, self.heads, self.tokens, size), self.dtype) for size in self.sizes)
        return q, k, v


CASES = {
    "whole": Case((1500, 600)),
    "split": Case((7,), (4000,)),
    "window": Case(dtype="float16", window=300, sizes=(64, 64)),
    "softcap": Case(softcap=30.0, sizes=(80, 96), tokens=13),
    "float32": Case(dtype="float32", heads=2, group=3, sizes=(64, 64)),
    "one head": Case((50,), (900,), heads=1, group=8, sizes=(128, 64), tokens=64),
    "one block": Case((40, 9), (60, 64), heads=2, tokens=64),
    "latent": Case((80,), (2000,), heads=1, group=16, sizes=(576, 512), tokens=64),
}


class Planned(NamedTuple):
    """A plan in numpy, with the arrays that it is for."""

    arrays: tuple[Array, Array, Array]
    scoring: Scoring
    work: jax_plan.Work
    calls: jax_plan.Calls


def planned(case: Case) -> Planned:
    arrays: Any = case.arrays()
    work, calls = jax_plan.plan(case.rows(), *arrays, case.scoring)
    return Planned(arrays, case.scoring, jax.tree.map(np.asarray, work), calls)


def main(path: Path) -> None:
    path.write_bytes(pickle.dumps({name: planned(case) for name, case in CASES.items()}))


if __name__ == "__main__":
    import jax_plans  # not __main__, by which another process would not find the classes

    jax_plans.main(Path(sys.argv[1]))
