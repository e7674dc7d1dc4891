"""Small problems of every kind: for the interpreter, and for tools that make a GPU slow."""

from __future__ import annotations

from dataclasses import replace

from kvkit.format.rope import Rope
from kvkit.kernels.attention.problems import (
    ATTENTIONS,
    SCATTERS,
    AttentionSpec,
    Heads,
    ScatterSpec,
    attention_problem,
    deviation_problem,
    scatter_problem,
)
from kvkit.kernels.pages.moves import MoveSpec
from kvkit.kernels.pages.problems import MOVES, move_problem
from kvkit.kernels.tuning.cases import Problem


def smaller(rope: Rope) -> Rope:
    """Over 8 channels, at the end of 16 if the model's are not at the beginning."""
    return replace(rope, inv_freq=rope.inv_freq[:4], first=8 if rope.first else 0)


def small_move(move: MoveSpec) -> Problem:
    group = replace(
        move.group,
        layers=(0, 1),
        kv_heads=1,
        k_size=132 if move.group.dtype == "uint8" else 16,
        v_size=16 if move.group.v_size else 0,
        block_tokens=64,
    )
    return move_problem(replace(move, group=group, chunks=2, rope=smaller(move.rope) if move.rope else None))


def small_attention(spec: AttentionSpec) -> Problem:
    group = min(4, spec.heads.query_heads // spec.heads.heads)
    latent = spec.heads.latent
    heads = Heads(2 * group, 2, 40 if latent else 16, 32, spec.heads.dtype, latent)
    window = None if spec.window is None else 50
    blocks = None if spec.block_tokens is None else 16
    return attention_problem(replace(spec, heads=heads, length=160, block_tokens=blocks, window=window))


def small_scatter(spec: ScatterSpec) -> Problem:
    heads = Heads(4, 2, 16, 32, spec.heads.dtype)
    return scatter_problem(replace(spec, heads=heads, rope=smaller(spec.rope), rows=13, tokens=64))


SMALL: tuple[Problem, ...] = (
    *(small_move(move) for move in MOVES if move.chunks > 1),
    *map(small_attention, ATTENTIONS),
    *map(small_scatter, SCATTERS),
    deviation_problem(37, 2, 16),
)
"""One of each form."""


def small_problems() -> tuple[Problem, ...]:
    """`SMALL`."""
    return SMALL
