"""Problems that pack and unpack are compiled, tuned and checked with: one for each form that matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from kvkit.format.layout import LayerGroup
from kvkit.kernels.pages import triton as pages
from kvkit.kernels.pages.moves import LLAMA, SMOLLM, MoveSpec, model_moves, move_case
from kvkit.kernels.pages.way_problems import way_problems
from kvkit.kernels.tuning.cases import INTERLEAVED, LLAMA_ROPE, Problem, Work, rope_of
from kvkit.kernels.tuning.configs import Launch
from kvkit.kernels.tuning.shapes import ModelShape


def problems() -> Iterator[Problem]:
    """Return all problems, made on the CPU without contents."""
    return chain(map(move_problem, MOVES), way_problems())


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
