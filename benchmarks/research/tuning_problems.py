"""Problems with large spaces, of CPU kernels that are not kvkit's: tuning strategies are compared on them.

kvkit tune --problems benchmarks.research.tuning_problems:problems --device host
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.kernels.tuning import (
    Case,
    HostLaunch,
    KernelConfig,
    Problem,
    ProblemBucket,
    Work,
    different,
    fill,
    host_config,
    not_close,
)

SIDES = (16, 4, 8, 32, 64, 128, 256)
PRODUCT_SPACE = tuple(
    host_config(ROWS=rows, COLUMNS=columns, DEPTH=depth)
    for rows, columns, depth in itertools.product(SIDES[:6], SIDES[:6], SIDES[:6])
)
"""216 configurations, the default first."""
TRANSPOSE_SPACE = tuple(
    host_config(ROWS=rows, COLUMNS=columns, BY_COLUMN=by_column)
    for by_column, rows, columns in itertools.product((0, 1), SIDES, SIDES)
)
"""98 configurations, the default first."""


@numba.njit(nogil=True, fastmath=True)
def product(a: Any, b: Any, c: Any, ROWS: int, COLUMNS: int, DEPTH: int) -> None:
    """Compute c = a b in tiles of [ROWS, COLUMNS] and DEPTH terms."""
    c[:] = 0
    for i0 in range(0, a.shape[0], ROWS):
        for k0 in range(0, a.shape[1], DEPTH):
            for j0 in range(0, b.shape[1], COLUMNS):
                for i in range(i0, min(i0 + ROWS, a.shape[0])):
                    for k in range(k0, min(k0 + DEPTH, a.shape[1])):
                        factor = a[i, k]
                        for j in range(j0, min(j0 + COLUMNS, b.shape[1])):
                            c[i, j] += factor * b[k, j]


@numba.njit(nogil=True)
def transpose(a: Any, b: Any, ROWS: int, COLUMNS: int, BY_COLUMN: int) -> None:
    """Compute b = a^T in tiles of [ROWS, COLUMNS] of a, which follow each other down the columns or not."""
    rows, columns = -(-a.shape[0] // ROWS), -(-a.shape[1] // COLUMNS)
    for tile in range(rows * columns):
        if BY_COLUMN:
            i0, j0 = tile % rows * ROWS, tile // rows * COLUMNS
        else:
            i0, j0 = tile // columns * ROWS, tile % columns * COLUMNS
        for i in range(i0, min(i0 + ROWS, a.shape[0])):
            for j in range(j0, min(j0 + COLUMNS, a.shape[1])):
                b[j, i] = a[i, j]


def problems() -> Iterator[Problem]:
    """Yield products and transpositions of float32 matrices of three sizes each."""
    for side in (96, 144, 192):
        yield _problem(
            "product", product, side, PRODUCT_SPACE, _product_case, Work(12 * side**2, 2 * side**3)
        )
    for side in (768, 1280, 1792):
        yield _problem("transpose", transpose, side, TRANSPOSE_SPACE, _transpose_case, Work(8 * side**2))


def _problem(
    op: str,
    kernel: Callable[..., None],
    side: int,
    space: tuple[KernelConfig, ...],
    make: Callable[..., Case],
    work: Work,
) -> Problem:
    return Problem(
        name=f"{op} of {side}",
        bucket=ProblemBucket(op, "float32", (side,)),
        kernel=kernel,
        space=space,
        make=partial(make, side),
        work=lambda config: work,
        host=True,
    )


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.numpy()


def _product_case(side: int, device: torch.device, filled: bool) -> Case:
    a, b, c = (torch.empty(side, side, device=device) for _ in range(3))
    if filled:
        fill(a)
        fill(b)
    arguments = {"a": _array(a), "b": _array(b), "c": _array(c)}
    return Case(
        launches=lambda config: (HostLaunch(product, arguments, config or PRODUCT_SPACE[0]),),
        poison=partial(c.fill_, torch.nan),
        fault=lambda: not_close("c", c, a @ b, 1e-3, 1e-3),
    )


def _transpose_case(side: int, device: torch.device, filled: bool) -> Case:
    a, b = (torch.empty(side, side, device=device) for _ in range(2))
    if filled:
        fill(a)
    arguments = {"a": _array(a), "b": _array(b)}
    return Case(
        launches=lambda config: (HostLaunch(transpose, arguments, config or TRANSPOSE_SPACE[0]),),
        poison=partial(b.fill_, torch.nan),
        fault=lambda: different("b", b, a.T),
    )
