"""Problems that pack and unpack are tuned with on a CPU: pages, conversions and sizes as in serving."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvkit.format.layout import Precision
from kvkit.kernels.pages import numba
from kvkit.kernels.pages.checks import ResolvedRotation, token_slots
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.pages.moves import LLAMA, SMOLLM, MoveSpec, model_moves, move_case
from kvkit.kernels.tuning.cases import LLAMA_ROPE, Problem, Work, rope_of
from kvkit.kernels.tuning.configs import HostLaunch, KernelConfig, host_config
from kvkit.kernels.tuning.shapes import ModelShape

CPU = torch.device("cpu")
LAYER = replace(LLAMA, layers=(0,))
WIDE = replace(LLAMA, block_tokens=128)
OPAQUE = replace(SMOLLM, block_tokens=128, page_bytes=replace(SMOLLM, block_tokens=128).block_bytes)
"""Pages as vLLM has them on a CPU."""

CONVERSIONS: tuple[tuple[str, bool, Precision | None, bool], ...] = (
    ("pack fp8", True, "fp8", False),
    ("unpack fp8", False, "fp8", False),
    ("rotate", False, None, True),
    ("rotate fp8", False, "fp8", True),
)
"""Name, whether the move packs, precision of the records, whether keys are rotated."""

MOVES = (
    *(
        MoveSpec(f"{'pack' if to_records else 'unpack'} {what}", group, to_records, chunks, tokens)
        for what, group, chunks, tokens in (
            ("a layer of Llama, 16 tokens", LAYER, 1, 16),
            ("a layer of Llama, 512 tokens", LAYER, 2, 256),
            ("Llama, 64 tokens", LLAMA, 4, 16),
            ("Llama, 256 tokens", LLAMA, 1, 256),
            ("Llama in blocks of 128, 256 tokens", WIDE, 1, 256),
            ("opaque SmolLM2, 128 tokens", OPAQUE, 1, 128),
            ("opaque SmolLM2, 512 tokens", OPAQUE, 2, 256),
        )
        for to_records in (True, False)
    ),
    *(
        MoveSpec(
            f"{what}, {tokens} tokens of {name}",
            replace(group, precision=precision),
            to_records,
            *(1, tokens),
            rope=LLAMA_ROPE if rotated else None,
        )
        for what, to_records, precision, rotated in CONVERSIONS
        for name, group, tokens in (("a layer of Llama", LAYER, 256), ("Llama", LLAMA, 128))
    ),
    MoveSpec("pack int8, 128 tokens of Llama", replace(LLAMA, precision="int8"), True, 1, 128),
    MoveSpec("unpack int8, 128 tokens of Llama", replace(LLAMA, precision="int8"), False, 1, 128),
    MoveSpec("rotate, 256 tokens of SmolLM2", SMOLLM, False, 1, 256, rope=rope_of(64, 100000.0)),
)


def problems() -> Iterator[Problem]:
    """Return all problems, made without contents."""
    return map(problem_of, MOVES)


def model_problems(shape: ModelShape) -> Iterator[Problem]:
    """Return the problems of a model."""
    return map(problem_of, model_moves(shape))


def problem_of(move: MoveSpec) -> Problem:
    """Make the problem of a move, without contents."""
    (launch,) = move_case(_start, move, CPU, False).launches(None)
    assert isinstance(launch, HostLaunch)
    job, conversion = launch.arguments["job"], launch.arguments["conversion"]
    moved = job.bytes + job.row_bytes * job.heads * len(move.group.layers) * job.slots.size
    return Problem(
        name=move.name,
        bucket=numba.bucket(job, conversion),
        kernel=numba.move_rows,
        space=tuple(dict.fromkeys((launch.config, *numba.configs()))),
        make=partial(move_case, _start, move),
        work=lambda config: Work(moved),
        host=True,
    )


def _start(
    pages: Pages,
    records: NDArray[np.int64],
    ids: NDArray[np.int64],
    to_records: bool,
    *,
    slots: bool,
    rotation: ResolvedRotation | None,
    config: KernelConfig | None,
) -> HostLaunch:
    """Return the launch of a move; see `triton.move`. Without `config`, it has the default."""
    job = numba.Job.of(pages, records, ids if slots else token_slots(ids, pages.tokens), to_records)
    conversion = numba.Conversion.of(pages.group, rotation)
    size = len(pages.group.layers) * pages.heads * job.slots.shape[1] * job.row_bytes
    read = [(ctypes.c_uint8 * size).from_address(record) for record in records.tolist() if to_records]
    arguments: dict[str, Any] = {"job": job, "conversion": conversion, "read": read, "owner": pages}
    return HostLaunch(_run, arguments, config or numba.default_config(job))


def _run(
    job: numba.Job, conversion: numba.Conversion | None, read: list[Any], owner: object, **tiles: int
) -> None:
    """Move, then read packed records once, as serving does for their checksums.

    Without the read, writes that bypass the caches would seem faster than they are.
    """
    numba.move(job, conversion, torch.get_num_threads(), owner, host_config(**tiles))
    for record in read:
        xxh3_64_intdigest(record)
