"""Launches of attention in every form that an engine's batches are compiled for, to run before requests come.

Triton compiles a kernel for its constants and its configuration. These depend on the numbers of rows and keys
of a batch, by tuned results and by the plan of its tiles. Here they are found by planning batches of all
sizes; small ones of each form are run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.kernels.attention import triton
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.tuning.configs import KernelConfig, Launch


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Largest batch of an engine: rows, requests that they belong to, and keys of a request."""

    rows: int
    requests: int
    keys: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """An attention layer with its pages.

    Args:
        k_pages, v_pages: [B, H, N, D] and [B, H, N, Dv], with the strides of serving. Block 0 is read.
        query_heads: Hq.
        scoring: scale, window and soft-cap.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    query_heads: int
    scoring: Scoring

    @property
    def form(self) -> Hashable:
        """Properties that kernels are compiled for, equal in most layers of a model."""
        pages = ((x.shape[1:], x.stride(), x.dtype, x.data_ptr() % 16) for x in (self.k_pages, self.v_pages))
        scoring = self.scoring
        return self.query_heads, scoring.window is None, scoring.softcap is None, *pages

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.k_pages.shape[1]

    def rows(self, positions: NDArray[np.int64], length: int, blocks: int = 0) -> Rows:
        """Make rows of one request with `length` keys, in a table of `blocks` (0: as many as needed)."""
        tokens = self.k_pages.shape[2]
        tables = np.zeros((1, blocks or -(-length // tokens)), np.int64)
        return Rows.of(
            positions, np.array([0, len(positions)]), np.array([length]), tables, tokens, self.k_pages.device
        )


def launches(layers: Iterable[PagedLayer], limits: BatchLimits, output: bool = True) -> Iterator[Launch]:
    """Yield launches that have every compiled form of the batches within `limits`, to run in order.

    They read block 0 of the pages and write tensors of their own.

    Args:
        output: whether `api.blend_attention` is used; `api.query_scores` is, with and without norms of V.
    """
    known = set[Hashable]()
    for layer in {layer.form: layer for layer in layers}.values():
        for launch in _layer_launches(layer, limits, output):
            constants = ((name, value) for name, value in launch.arguments.items() if name.isupper())
            form = layer.form, launch.kernel.__name__, launch.config, *constants
            if form not in known:
                known.add(form)
                yield launch


def _layer_launches(layer: PagedLayer, limits: BatchLimits, output: bool) -> Iterator[Launch]:
    tokens = layer.k_pages.shape[2]
    # lengths of requests in one block, which have a form of their own, and of others
    for shortest, longest in ((1, min(tokens, limits.keys)), (tokens + 1, limits.keys)):
        if shortest <= longest:
            for values in (True, False) if output else (False,):
                yield from _attention(_Batches(layer, limits, values, shortest, longest))
            for values in (True, False):
                yield from _scores(_Batches(layer, limits, values, shortest, longest))


@dataclass(frozen=True, slots=True)
class _Batches:
    """Batches of one request with `shortest` to `longest` keys, with or without values."""

    layer: PagedLayer
    limits: BatchLimits
    values: bool
    shortest: int
    longest: int

    def attention(self, rows: Rows, config: KernelConfig | None, count: int = 0) -> tuple[Launch, ...]:
        """Plan `triton.attention`; with `count` > 0, for so many rows that share memory: do not run it."""
        layer, v_pages = self.layer, self.layer.v_pages if self.values else None
        q = self._queries(rows.count)
        out = None if v_pages is None else q.new_empty(*q.shape[:2], v_pages.shape[3])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        q = q.expand(count or rows.count, -1, -1)
        return triton.attention(q, layer.k_pages, v_pages, rows, layer.scoring, out, lse, config)

    def scores(self, rows: Rows, config: KernelConfig | None, count: int = 0) -> tuple[Launch, ...]:
        """Plan `triton.scores` of rows whose logsumexp is known; `count` as in `attention`."""
        layer, v_pages = self.layer, self.layer.v_pages if self.values else None
        q = self._queries(rows.count)
        lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
        out = lse.new_empty(layer.query_heads, int(rows.lengths[0]))
        q = q.expand(count or rows.count, -1, -1)
        return triton.scores(q, layer.k_pages, v_pages, rows, layer.scoring, lse, out, config)

    def configs(self, plan: Callable[[Rows, None, int], Sequence[Launch]]) -> dict[KernelConfig, list[int]]:
        """Return the configurations of plans for any numbers of rows and keys, each with numbers of rows.

        They depend on the number of rows, and on the table's width.
        """
        found: dict[KernelConfig, list[int]] = {}
        for blocks in self._widths():
            row = self.layer.rows(np.zeros(1, np.int64), self.shortest, blocks)
            for count in self._counts():
                found.setdefault(plan(row, None, count)[0].config, []).append(count)
        return found

    def _queries(self, count: int) -> torch.Tensor:
        return self.layer.k_pages.new_zeros(count, self.layer.query_heads, self.layer.k_pages.shape[3])

    def _counts(self) -> list[int]:
        """Return the largest number of rows of each range with the same configurations.

        These depend on the powers of two that hold the rows, and their query heads of a KV head.
        """
        most = self.limits.rows
        powers = [1 << i for i in range((most * self.layer.group).bit_length())]
        heads = [power // self.layer.group for power in powers]
        return sorted({count for count in (*powers, *heads, most) if 1 <= count <= most})

    def _widths(self) -> list[int]:
        """Return widths of block tables, one for each power of two of keys."""
        tokens = self.layer.k_pages.shape[2]
        fewest, most = -(-self.shortest // tokens), -(-self.limits.keys // tokens)
        return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i >= fewest)})


def _attention(batches: _Batches) -> Iterator[Launch]:
    """Yield launches of each configuration of `attend`, each PACK, and keys whole and split."""
    group, limits = batches.layer.group, batches.limits
    for config, counts in batches.configs(batches.attention).items():
        fewest = -(-min(counts) // limits.requests)  # rows of the request with the most
        for count in _pack_counts(group, dict(config.tiles)["TILE_ROWS"], fewest, max(counts)):
            rows = batches.layer.rows(np.zeros(count, np.int64), batches.shortest)
            yield from batches.attention(rows, triton.with_split(config, None))
            length = dict(config.tiles)["TILE_KEYS"] + 1
            if length <= batches.longest:  # so few keys are hardly ever split, but many are
                length = max(length, batches.shortest)
                rows = batches.layer.rows(np.arange(length - count, length).clip(min=0), length)
                yield from batches.attention(rows, triton.with_split(config, length - 1))


def _scores(batches: _Batches) -> Iterator[Launch]:
    """Yield launches of each configuration of `weigh`."""
    row = batches.layer.rows(np.zeros(1, np.int64), batches.shortest)
    for config in batches.configs(batches.scores):
        yield from batches.scores(row, config)


def _pack_counts(group: int, tile_rows: int, fewest: int, most: int) -> list[int]:
    """Return numbers of rows of a request, from `fewest` to `most`, that lead to each value of PACK."""
    counts = range(fewest, min(most, tile_rows) + 1) or [fewest]
    return sorted({triton.packed(group, tile_rows, rows): rows for rows in counts}.values())
