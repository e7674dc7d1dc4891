"""Attention to pages in plain numpy, problems for it, a GPU to lower for: what needs JAX and no torch."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh
from numpy.typing import NDArray

from kvkit.kernels.attention.layer import Requests, Scoring

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")


EMULATED = {"xla_backend_optimization_level": 0}
"""Compiler options for what Pallas interprets: optimizing what nobody runs took half of its tests' time."""


def nvidia() -> AbstractContextManager[Any]:
    """Lower for a GPU that is not here."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H100))


class Problem(NamedTuple):
    """What attention takes."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    requests: Requests


def problem(
    seed: int,
    requests: int = 2,
    heads: int = 6,
    group: int = 3,
    sizes: tuple[int, int] = (8, 5),
    blocks: tuple[int, int] = (4, 5),
    m: int = 13,
    dtype: str = "float32",
) -> Problem:
    """Rows of requests with lengths of their own; the last rows are nobody's. NaN in all that is no key.

    Args:
        sizes: channels of K and of V.
        blocks: tokens of a block, blocks of a request.
    """
    random = np.random.default_rng(seed)
    tokens, per = blocks
    pool = requests * per + 2
    tables = random.permutation(pool)[: requests * per].reshape(requests, per)
    lengths = random.integers(tokens, per * tokens + 1, requests)
    k, v = (random.standard_normal((pool, heads, tokens, size)) for size in sizes)
    inside = np.zeros((pool, tokens), bool)
    for table, length in zip(tables, lengths, strict=True):
        j = np.arange(length)
        inside[table[j // tokens], j % tokens] = True
    for pages in (k, v):
        pages.swapaxes(1, 2)[~inside] = np.nan
    starts = np.linspace(0, m - 2, requests + 1).astype(int)
    positions = random.integers(0, per * tokens, m)
    for first, last in itertools.pairwise(starts):
        positions[first:last].sort()
    q = random.standard_normal((m, heads * group, sizes[0]))
    ids = Requests(*(jnp.asarray(x, jnp.int32) for x in (tables, positions, starts, lengths)))
    return Problem(*(jnp.asarray(x, dtype) for x in (q, k, v)), ids)


def attention(given: Problem, scoring: Scoring) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """o [M, Hq, Dv] and lse [M, Hq]; 0 and -inf of rows that see nothing."""
    q, k, v = (np.asarray(x, np.float64) for x in given[:3])
    tables, positions, starts, lengths = (np.asarray(x) for x in given.requests)
    group = q.shape[1] // k.shape[1]
    o, lse = np.zeros((*q.shape[:2], v.shape[3])), np.full(q.shape[:2], -np.inf)
    for r, (first, last) in enumerate(itertools.pairwise(starts)):
        for row in range(first, last):
            j = np.arange(lengths[r])
            j = j[(j <= positions[row]) & (j > positions[row] - (scoring.window or 2**30))]
            if not len(j):
                continue
            place = tables[r, j // k.shape[2]], slice(None), j % k.shape[2]
            keys, values = (np.repeat(pages[place], group, 1) for pages in (k, v))  # [keys, Hq, D]
            s = np.einsum("hd,khd->hk", q[row], keys) * scoring.scale
            if scoring.softcap is not None:
                s = scoring.softcap * np.tanh(s / scoring.softcap)
            lse[row] = np.log(np.exp(s).sum(1))
            o[row] = np.einsum("hk,khd->hd", np.exp(s - lse[row][:, None]), values)
    return o, lse
