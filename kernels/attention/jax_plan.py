"""Plan of attention's Triton kernels for JAX arrays, made on the host from rows that are known there.

A plan is the launches of `kvkit.kernels.attention.triton` for dense arrays, cut in two: what a compiled
function is kept for (`Calls`), and data (`Work`). Work is rounded up, so that similar batches compile once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from kvkit.kernels.attention import checks
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.planned import COMPILER_OPTIONS

if TYPE_CHECKING:
    from kvkit.kernels.attention.rows import Rows

ARRAYS = ("q", "k", "v", "tables", "positions", "work")
"""Arguments of `attend` and `merge` that are arrays."""
SPARE_ITEM, SPARE_MERGE = (0, 0, 0, 0, 0, 0, 0, -1), (0, 0, 0, 0)  # rows of no request, which write nothing


class KernelCall(NamedTuple):
    """Launch of a kernel without its arrays; hashable."""

    grid: tuple[int, ...]
    arguments: tuple[tuple[str, float], ...]  # numbers and compile-time values by name
    warps: int
    stages: int


class Calls(NamedTuple):
    """Launches of an attention, `attend` then `merge`; hashable, because a function is compiled for each."""

    attend: KernelCall
    merge: KernelCall | None  # None: no keys are split
    parts: tuple[int, int, int]  # results to merge: parts, programs of a part, rows of a program


class Work(NamedTuple):
    """Arrays that the kernels read beside q and pages; int32."""

    tables: jax.Array  # [requests, blocks]
    positions: jax.Array  # [M]
    items: jax.Array  # [items, 8], `Tiles.items` and spare ones
    merges: jax.Array  # [merges, 4], `Tiles.merges` and spare ones


def plan(rows: Rows, q: Any, k_pages: Any, v_pages: Any, scoring: Scoring) -> tuple[Work, Calls]:
    """Return the arrays and launches of `api.blend_attention`, planned once per `rows`.

    Args:
        rows: rows on the CPU, at least one.
        q, k_pages, v_pages: anything with their shapes and dtype; dense, K and V apart.

    Raises:
        LaunchError: heads have more channels than the kernels take, or the rows do not fit.
    """
    shapes = tuple((tuple(x.shape), str(x.dtype)) for x in (q, k_pages, v_pages))
    return rows.once(("jax", scoring, *shapes), lambda: _plan(rows, shapes, scoring))


def rows_of(requests: Requests, block_tokens: int) -> Rows:
    """Return requests with known values as `Rows`: those of no request are a last one without keys.

    Raises:
        RowsError: the values do not fit each other.
    """
    from kvkit.kernels.attention.rows import Rows

    tables, positions, row_starts, lengths = (np.array(x) for x in requests)
    positions[max(int(row_starts[-1]), 0) :] = -1
    return Rows.of(
        positions,
        np.append(row_starts, len(positions)),
        np.append(lengths, 0),
        np.append(tables, np.zeros_like(tables[:1]), 0),
        block_tokens,
    )


def requests_of(rows: Rows) -> Requests:
    """Return rows as the functions for JAX arrays take them on platforms without the Triton kernels."""
    arrays = rows.tables, rows.positions, rows.row_starts, rows.lengths
    return Requests(*(x.astype(np.int32) for x in arrays))


def rounded_up(count: int) -> int:
    """Return `count`, or up to an eighth more: above 16, eight numbers between powers of two."""
    step = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // step) * step


def _plan(
    rows: Rows, shapes: tuple[tuple[tuple[int, ...], str], ...], scoring: Scoring
) -> tuple[Work, Calls]:
    import torch

    from kvkit.kernels.attention import triton

    q, k, v = (torch.empty(size, dtype=getattr(torch, name), device="meta") for size, name in shapes)
    checks.check_rows(rows, torch.empty(len(q), 0), k)
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    planned = triton.plan_attention(q, k, v, rows, scoring, device=gpu)
    attending, merging = planned.attending, planned.merging
    assert attending is not None  # there are rows
    found = attending.shared["work"].numpy()
    items, units = _padded(found, SPARE_ITEM), planned.grid[0] // len(found)
    merges = np.empty((0, 4), np.int32) if merging is None else merging.shared["work"].numpy()
    merges = _padded(merges, SPARE_MERGE)
    attend = _call((len(items) * units,), attending.shared, attending.config)
    with jax.ensure_compile_time_eval():  # layers share the arrays, those traced by `jax.jit` too
        work = Work(
            *map(
                jax.device_put, (rows.tables.astype(np.int32), rows.positions.astype(np.int32), items, merges)
            )
        )
    if merging is None:
        return work, Calls(attend, None, (1, 1, 1))
    merge = _call((len(merges) * units, planned.merge_grid[1]), merging.shared, merging.config)
    parts, _, tile_rows = planned.parts
    return work, Calls(attend, merge, (rounded_up(parts), units, tile_rows))


def _call(grid: tuple[int, ...], arguments: Mapping[str, Any], config: KernelConfig) -> KernelCall:
    numbers = tuple((name, value) for name, value in arguments.items() if name not in ARRAYS)
    tiles = tuple(tile for tile in config.tiles if tile[0] not in COMPILER_OPTIONS)
    return KernelCall(grid, (*dict(numbers + tiles).items(),), config.warps, config.stages)


def _padded(work: NDArray[np.int32], spare: tuple[int, ...]) -> NDArray[np.int32]:
    """Append spare work up to a round number of items."""
    more = rounded_up(len(work)) - len(work)
    return np.concatenate([work, np.tile(np.array(spare, np.int32), (more, 1))])
