"""Problems for compiling, tuning and checking pack and unpack, one for each kind of compiled kernel.

Transfers between a GPU's pages and pinned host memory are tuned too, by size and number of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from kvkit.format.layout import LayerGroup
from kvkit.kernels.pages import streams
from kvkit.kernels.pages import triton as pages
from kvkit.kernels.pages.copies import can_batch
from kvkit.kernels.pages.device import (
    BUFFER_BYTES,
    PROGRAM_CHOICES,
    DeviceMove,
    best_programs,
    programs_config,
    steps,
    transfer_bucket,
    untuned_programs,
)
from kvkit.kernels.pages.moves import (
    CHUNK_TOKENS,
    LLAMA,
    SMOLLM,
    MoveSpec,
    case_of,
    model_moves,
    move_case,
    move_tensors,
)
from kvkit.kernels.tuning.cases import INTERLEAVED, LLAMA_ROPE, Case, Problem, Work, rope_of
from kvkit.kernels.tuning.configs import KernelConfig, Launch, Runnable
from kvkit.kernels.tuning.shapes import ModelShape


def problems() -> Iterator[Problem]:
    """Return all problems, made on the CPU without contents."""
    return chain(map(move_problem, MOVES), map(transfer_problem, TRANSFERS))


def model_problems(shape: ModelShape) -> Iterator[Problem]:
    """Return the problems of a model."""
    return map(move_problem, model_moves(shape))


DEEPSEEK = LayerGroup(tuple(range(61)), kv_heads=1, k_size=576, v_size=0, dtype="bfloat16", block_tokens=64)
"""DeepSeek-V3's latents, with 64 rotary channels at their end."""

INDEX = LayerGroup(tuple(range(61)), kv_heads=1, k_size=132, v_size=0, dtype="uint8", block_tokens=64)
"""DeepSeek-V3.2's index keys: rows of 4-byte words."""

LATENT_ROPE = rope_of(64, 10000.0, interleaved=True, first=512)

FP8, INT8 = replace(LLAMA, precision="fp8"), replace(LLAMA, precision="int8")

MOVES = (
    *(
        MoveSpec(f"{'pack' if to_records else 'unpack'} Llama, {chunks} chunks", LLAMA, to_records, chunks)
        for to_records in (True, False)
        for chunks in (1, 8)
    ),
    MoveSpec("pack Llama by slots", LLAMA, True, slots=True, gated=False),
    MoveSpec("unpack Llama by slots", LLAMA, False, slots=True, gated=False),
    MoveSpec("pack 132-byte rows", INDEX, True, wide=(0, 0)),
    MoveSpec("unpack 132-byte rows", INDEX, False, wide=(0, 0)),
    MoveSpec("rotate Llama, 1 chunk", LLAMA, False, 1, rope=LLAMA_ROPE, wide=(6, 2)),
    MoveSpec("rotate Llama, 8 chunks", LLAMA, False, rope=LLAMA_ROPE, wide=(6, 2)),
    MoveSpec("rotate Llama by slots", LLAMA, False, slots=True, rope=LLAMA_ROPE, wide=(6, 2)),
    MoveSpec("rotate interleaved", LLAMA, False, rope=INTERLEAVED, wide=(6, 2)),
    MoveSpec("rotate SmolLM2, float32", SMOLLM, False, rope=rope_of(64, 100000.0), wide=(4, 2)),
    MoveSpec("rotate DeepSeek's latents", DEEPSEEK, False, rope=LATENT_ROPE, wide=(6, 2)),
    MoveSpec("pack fp8", FP8, True, wide=(1, 0)),
    MoveSpec("pack int8", INT8, True, wide=(1, 0)),
    MoveSpec("unpack fp8", FP8, False, wide=(0, 2)),
    MoveSpec("unpack int8", INT8, False, wide=(0, 2), gated=False),
    MoveSpec("rotate fp8", FP8, False, rope=LLAMA_ROPE, wide=(4, 2)),
    MoveSpec("rotate int8", INT8, False, rope=LLAMA_ROPE, wide=(4, 2), gated=False),
)


def move_problem(move: MoveSpec) -> Problem:
    """Make the problem of a move, on the CPU without contents."""
    (launch,) = move_case(pages.move, move, torch.device("cpu"), False).launches(None)
    assert isinstance(launch, Launch)
    exact = replace(move.group, precision=None)
    moved = move.chunks * (exact.chunk_bytes(move.tokens) + move.group.chunk_bytes(move.tokens))
    kernel = launch.kernel.__name__
    return Problem(
        name=move.name,
        bucket=pages.bucket(launch),
        kernel=launch.kernel,
        space=pages.configs(kernel),
        defaults={"gfx942": pages.configs(kernel, amd=True)[0]},
        make=partial(move_case, pages.move, move),
        work=lambda config: Work(moved),
        wide={kernel: move.wide},
        gated=move.gated,
        operation="pack" if move.to_records else "unpack",
    )


_LAYER = replace(LLAMA, layers=(0,))

TRANSFERS = tuple(
    MoveSpec(
        f"{'pages_to_host' if to_records else 'host_to_pages'}, {records} of "
        f"{group.chunk_bytes(CHUNK_TOKENS) >> 10} KiB",
        group,
        to_records,
        records,
        gated=False,  # configurations differ only in how records move
    )
    for to_records in (True, False)
    for group, records in (
        (LLAMA, 1),  # 32 MiB
        (LLAMA, 8),
        (_LAYER, 8),  # 1 MiB
        (_LAYER, 32),
        (replace(_LAYER, kv_heads=1), 32),  # 128 KiB
        (replace(_LAYER, kv_heads=1, k_size=32, v_size=32), 64),  # 32 KiB
        (replace(_LAYER, kv_heads=1, k_size=16, v_size=16), 128),  # 16 KiB
    )
)
"""Moves of records of several sizes, few and many, between a group's pages and pinned memory."""


def transfer_problem(move: MoveSpec) -> Problem:
    """Make the problem of a transfer, without tensors."""
    batched = can_batch()
    default = untuned_programs(move.record_bytes, move.chunks, batched)
    moved = 2 * move.chunks * move.record_bytes
    return Problem(
        name=move.name,
        bucket=transfer_bucket(move.record_bytes, move.chunks, move.to_records, batched),
        kernel=steps,
        space=tuple(map(programs_config, dict.fromkeys((default, *PROGRAM_CHOICES)))),
        make=partial(_transfer_case, move),
        work=lambda config: Work(moved),
        gated=move.gated,
        operation="pack" if move.to_records else "unpack",
    )


def _transfer_case(move: MoveSpec, device: torch.device, filled: bool) -> Case:
    tensors = move_tensors(move, device, filled, pinned=True)
    records = list(tensors.records)
    device_move = DeviceMove(tensors.pages, tensors.blocks, False, move.to_records)

    def launches(config: KernelConfig | None) -> tuple[Runnable, ...]:
        config = config or programs_config(best_programs(move.record_bytes, move.chunks, move.to_records))
        programs = dict(config.tiles)["PROGRAMS"]
        addresses = [_address(record, device) if programs else None for record in records]
        return tuple(steps(device_move, records, addresses, BUFFER_BYTES, programs))

    return case_of(move, tensors, launches)


def _address(record: torch.Tensor, device: torch.device) -> int | None:
    """Return a record's address for kernels; on a CPU, which interprets them, its own address."""
    if device.type == "cpu":
        return record.data_ptr()
    with torch.cuda.device(device):
        return streams.device_address(record.data_ptr())
