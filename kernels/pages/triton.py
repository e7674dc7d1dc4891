"""Pack and unpack in Triton: all layers, K and V, and all chunks in one launch, converted on the way.

The kernels are in `triton_kernels.py`; this module chooses the kernel of a move and its compile-time
arguments. Letters are those of `kvkit.format.layout`. A row is one head of one token; P is the number of
parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.jit import JITFunction

from kvkit.format.layout import LARGEST, SMALLEST_AMAX
from kvkit.kernels.pages.triton_kernels import copy_rows, decode_rows, encode_rows
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket
from kvkit.kernels.tuning.planned import LaunchPlan
from kvkit.kernels.tuning.tables import best
from kvkit.kernels.uploads import upload_arguments

if TYPE_CHECKING:
    from kvkit.format.rope import Rope
    from kvkit.kernels.pages.checks import ResolvedRotation
    from kvkit.kernels.pages.memory import Pages

VECTOR_BYTES = 16
ARRAYS = "parts", "records", "ids"
ROTATION = "cos_sin", "which"
"""Further arrays, if keys are rotated."""
NUMBERS = "tokens", "ids_count", "tiles", "count"
"""Integers that differ from move to move."""
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@functools.cache
def configs(kernel: str, amd: bool | None = None) -> tuple[KernelConfig, ...]:
    """Return the configurations of a kernel, the default first, within 9 % of the fastest on an H100.

    TILE counts what a program moves: vectors of `copy_rows`, pairs of vectors of `decode_rows`, elements of
    `encode_rows`.

    Args:
        kernel: name of the kernel.
        amd: for an AMD GPU, where 8 warps have more lanes than a tile has vectors; None: this process's GPU.
    """
    tiles = {
        "copy_rows": (1024, 256, 512, 2048),
        "decode_rows": (256, 128, 512, 1024),
        "encode_rows": (4096, 1024, 2048, 8192),
    }[kernel]
    on_amd = torch.version.hip is not None if amd is None else amd
    counts = (8, 4) if kernel == "decode_rows" and not on_amd else (4, 8)
    return tuple(KernelConfig((("TILE", tile),), warps, 1) for tile in tiles for warps in counts)


def bucket(launch: Launch) -> ProblemBucket:
    """Return the bucket of `launch`: problems that are compiled alike, of about as many bytes."""
    args = launch.arguments
    compiled = (f"{name}={value}" for name, value in args.items() if name.isupper() and name != "INTERPRET")
    rows = len(args["records"]) * args["parts_count"] * args["heads"] * args["tokens"]
    size = power_of_2(rows * args["RECORD_ROW"])
    return ProblemBucket(launch.kernel.__name__, " ".join(compiled), (size,))


def move(
    pages: Pages,
    records: Sequence[int],
    ids: NDArray[np.int64],
    to_records: bool,
    *,
    slots: bool = False,
    rotation: ResolvedRotation | None = None,
    config: KernelConfig | None = None,
    programs: int = 0,
) -> Launch:
    """Return the launch that packs (`to_records`) or unpacks. Copies small arrays to the pages' device.

    Checks nothing (`api` does) and starts nothing. The caller keeps pages and records alive until the device
    is done. What depends only on the pages is chosen once, and kept in them.

    Args:
        pages: pages of one group; the engine's memory.
        records: [chunks], addresses that the device can reach, in its own memory or in pinned memory.
            Multiples of the dtype's size if keys are rotated and the group has no precision.
        ids: [chunks, I], blocks or, with `slots`, each token's block * N + index in the block; ids < 0 are
            skipped.
        rotation: rotation of the keys; None: keys are not rotated.
        config: configuration to use; None: the best known when the pages first moved so many bytes.
        programs: maximum number of programs, which then move several tiles each; 0: a program for each tile.
            For pinned memory: a few programs fill the bus; more would wait for it and take room from others.
    """
    rope = None if rotation is None else rotation.rope
    alignment = math.gcd(VECTOR_BYTES, *records)
    choice = pages.once(
        ("kernel", to_records, rope, alignment), lambda: _choose(pages, alignment, to_records, rope)
    )
    granule = 1 if slots else pages.tokens
    tokens = ids.shape[1] * granule
    counts = len(choice.parts), pages.heads, tokens
    size = power_of_2(len(records) * math.prod(counts) * choice.constants["RECORD_ROW"])
    plan = pages.once(
        ("plan", choice, slots, size, config, programs > 0),
        lambda: _plan(choice, (len(records), *counts), granule, slots, config, programs > 0),
    )
    if slots:
        blocks, offsets = np.divmod(ids, pages.tokens)
        ids = np.where(ids < 0, -1, blocks << 32 | offsets)
    else:
        ids = np.maximum(ids, -1).astype(np.int32)
    arrays: list[NDArray[Any]] = [choice.parts.ravel(), np.array(records, np.int64), ids.ravel()]
    if rotation is not None:
        arrays += rotation.cos_sin.ravel(), rotation.rows.ravel()
    tiles = -(-tokens * choice.row_work // max(dict(plan.config.tiles)["TILE"], choice.min_tile))
    grid: tuple[int, ...] = len(records) * tiles, pages.heads, len(choice.parts)
    count = math.prod(grid)
    if programs:
        grid = (min(programs, count),)
    own = *upload_arguments(arrays, pages.device), tokens, ids.shape[1], tiles, count
    return Launch(plan.kernel, grid, plan.arguments(*own), plan.config)


def _plan(
    choice: _KernelChoice,
    counts: tuple[int, int, int, int],
    granule: int,
    slots: bool,
    config: KernelConfig | None,
    persistent: bool,
) -> LaunchPlan:
    """Return the launch that moves of about as many bytes share; counts: chunks, parts, heads and tokens."""
    chunks, parts, heads, tokens = counts
    shared = {
        **choice.constants,
        "parts_count": parts,
        "heads": heads,
        "GRANULE": granule,
        "SLOTS": slots,
        "PERSISTENT": False,
        "INTERPRET": not isinstance(choice.kernel, JITFunction),
    }
    space = configs(choice.kernel.__name__)
    draft = Launch(choice.kernel, (), {**shared, "records": np.empty(chunks), "tokens": tokens}, space[0])
    config = config or best(bucket(draft), space[0], space, choice.kernel)
    return LaunchPlan(choice.kernel, config, shared | {"PERSISTENT": persistent}, choice.arrays, NUMBERS)


@dataclass(frozen=True, slots=True, eq=False)
class _KernelChoice:
    """Kernel of a move, with its compile-time arguments."""

    kernel: Any  # copy_rows, decode_rows or encode_rows
    parts: NDArray[np.int64]  # [P, 7], first byte, width and strides in the units of the pages
    row_work: int  # units of a tile that a row takes at most, see `configs`
    min_tile: int  # smallest tile
    constants: dict[str, Any]  # compile-time arguments
    arrays: tuple[str, ...] = ARRAYS  # arguments of each launch, besides NUMBERS


def _choose(pages: Pages, alignment: int, to_records: bool, rope: Rope | None) -> _KernelChoice:
    """Choose the kernel for records at multiples of `alignment` bytes."""
    if pages.group.precision is None and rope is None:
        return _choose_copy(pages, alignment, to_records)
    return _choose_encode(pages, alignment) if to_records else _choose_decode(pages, alignment, rope)


def _choose_copy(pages: Pages, alignment: int, to_records: bool) -> _KernelChoice:
    parts, group = pages.table, pages.group
    row_bytes = group.page_bytes or group.channels * group.item_bytes
    align = _align(parts[:, 1:3], parts[:, 3:], alignment, row_bytes)
    unit = min(align, max(WORDS))
    row = int(parts[:, 2].max()) // align
    constants = {
        "TO_RECORDS": to_records,
        "WORD": WORDS[unit],
        "WIDTH": align // unit,
        "RECORD_ROW": row_bytes // unit,
        "ROW": row,
    }
    return _KernelChoice(copy_rows, _in_units(parts, unit), row, 1, constants)


def _choose_decode(pages: Pages, alignment: int, rope: Rope | None) -> _KernelChoice:
    group, halves = pages.group, pages.halves()
    parts = _in_units(halves, group.item_bytes)
    unit, row_size = group.stored.item_bytes, group.stored.channels
    first, pairs = (rope.first, rope.channels // 2) if rope else (0, 0)
    width = math.gcd(_align(halves[:, 2:]) // group.item_bytes, first, pairs)
    row = -(-int(parts[:, 2].max()) // (2 * width))
    record_width = _align(alignment, parts[:, 1] * unit, row_size * unit) // unit
    constants = {
        **({} if rope else dict.fromkeys(ROTATION)),
        "DTYPE": group.dtype,
        "FORM": group.precision,
        "CHANNELS": group.channels,
        "SCALE_BYTES": _align(alignment, row_size, group.channels, 4) if group.precision else 4,
        "WIDTH": width,
        "RECORD_WIDTH": math.gcd(record_width, width),
        "RECORD_ROW": row_size,
        "ROW": row,
        "FIRST": first,
        "PAIRS": pairs,
        "INTERLEAVED": rope is not None and rope.interleaved,
    }
    arrays = (*ARRAYS, *ROTATION) if rope else ARRAYS
    return _KernelChoice(decode_rows, parts, row, 1, constants, arrays)


def _choose_encode(pages: Pages, alignment: int) -> _KernelChoice:
    group, halves = pages.group, pages.halves()
    assert group.precision is not None
    parts = _in_units(halves, group.item_bytes)
    row_size, columns = group.stored.channels, power_of_2(int(parts[:, 2].max()))
    constants = {
        "DTYPE": group.dtype,
        "FORM": group.precision,
        "CHANNELS": group.channels,
        "SCALE_BYTES": _align(alignment, row_size, group.channels, 4),
        "WIDTH": _align(halves[:, 2:]) // group.item_bytes,
        "RECORD_WIDTH": _align(alignment, row_size, parts[:, 1]),
        "RECORD_ROW": row_size,
        "COLUMNS": columns,
        "LARGEST": LARGEST[group.precision],
        "SMALLEST": SMALLEST_AMAX,
    }
    return _KernelChoice(encode_rows, parts, columns, columns, constants)


def _in_units(parts: NDArray[np.int64], unit: int) -> NDArray[np.int64]:
    """Return `Pages.table` with `unit` bytes as unit; addresses stay in bytes."""
    divided = parts.copy()
    divided[:, [1, 2, 4, 5, 6]] //= unit
    return divided


def _align(*numbers: NDArray[np.int64] | int) -> int:
    """Return the largest power of two, 16 at most, that divides all numbers."""
    return math.gcd(VECTOR_BYTES, *(int(np.gcd.reduce(np.asarray(n), axis=None)) for n in numbers))


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()
