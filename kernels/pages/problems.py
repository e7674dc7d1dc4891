"""The problems that pack and unpack are compiled, tuned and checked with: one for each form that matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Literal

import numpy as np
import torch

from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages import reference
from kvkit.kernels.pages import triton as pages
from kvkit.kernels.pages.checks import Turns
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.pages.quantised import Quantised
from kvkit.kernels.pages.way_problems import way_problems
from kvkit.kernels.tuning.cases import (
    INTERLEAVED,
    LLAMA_ROPE,
    POISON,
    Case,
    Problem,
    Work,
    different,
    far,
    fill,
    rope_of,
)
from kvkit.kernels.tuning.configs import KernelConfig, Launch, Runnable
from kvkit.kernels.tuning.shapes import ModelShape

CHUNK_TOKENS = 256


def problems() -> Iterator[Problem]:
    """All of them, made on the CPU without contents."""
    return chain(map(move_problem, MOVES), way_problems())


def model_problems(shape: ModelShape) -> Iterator[Problem]:
    """Those of a model."""
    return map(move_problem, model_moves(shape))


def model_moves(shape: ModelShape) -> Iterator[MoveSpec]:
    """Moves of a model's pages, many and few: plain, with keys that are rotated, quantised."""
    channels = shape.rotary or shape.head - shape.latent
    rope = rope_of(channels, 10000.0, interleaved=bool(shape.latent), first=shape.latent)
    forms: tuple[Quantised | None, ...] = (None, "fp8", "int8")
    for chunks in (8, 1):
        for form in forms:
            for verb, turned in (("pack", None), ("unpack", None), ("rotate", rope)):
                name = " ".join([verb, *filter(None, [form]), f"{shape}, {chunks} chunks"])
                yield MoveSpec(
                    name, shape.group(), verb == "pack", chunks, quantised=form, rope=turned, wide=(0, 0)
                )


@dataclass(frozen=True, slots=True)
class MoveSpec:
    """A pack (`to_records`) or unpack."""

    name: str  # of the problem
    group: LayerGroup  # of the pages
    to_records: bool
    chunks: int = 8
    tokens: int = CHUNK_TOKENS  # of a chunk
    slots: bool = False  # pages are named token by token, not block by block
    quantised: Literal["fp8", "int8"] | None = None  # form of the records
    rope: Rope | None = None  # of keys that are rotated on the way
    wide: tuple[int, int] = (1, 1)  # as in `Problem`, of its one kernel
    gated: bool = True  # as in `Problem`


LLAMA = LayerGroup(tuple(range(32)), kv_heads=8, k_size=128, v_size=128, dtype="bfloat16", block_tokens=16)
"""Llama-3.1-8B."""

SMOLLM = LayerGroup(tuple(range(30)), kv_heads=3, k_size=64, v_size=64, dtype="float32", block_tokens=16)
"""SmolLM2-135M."""

DEEPSEEK = LayerGroup(tuple(range(61)), kv_heads=1, k_size=576, v_size=0, dtype="bfloat16", block_tokens=64)
"""DeepSeek-V3's latents, with 64 rotary channels at their end."""

INDEX = LayerGroup(tuple(range(61)), kv_heads=1, k_size=132, v_size=0, dtype="uint8", block_tokens=64)
"""DeepSeek-V3.2's index keys: rows of 4-byte words."""

LATENT_ROPE = rope_of(64, 10000.0, interleaved=True, first=512)

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
    MoveSpec("pack fp8", LLAMA, True, quantised="fp8", wide=(1, 0)),
    MoveSpec("pack int8", LLAMA, True, quantised="int8", wide=(1, 0)),
    MoveSpec("unpack fp8", LLAMA, False, quantised="fp8", wide=(0, 2)),
    MoveSpec("unpack int8", LLAMA, False, quantised="int8", wide=(0, 2), gated=False),
    MoveSpec("rotate fp8", LLAMA, False, quantised="fp8", rope=LLAMA_ROPE, wide=(4, 2)),
    MoveSpec("rotate int8", LLAMA, False, quantised="int8", rope=LLAMA_ROPE, wide=(4, 2), gated=False),
)


def move_problem(move: MoveSpec) -> Problem:
    """That of a move, made on the CPU without contents."""
    (launch,) = move_case(move, torch.device("cpu"), False).launches(None)
    assert isinstance(launch, Launch)
    record = move.group.quantised() if move.quantised else move.group
    moved = move.chunks * (move.group.chunk_bytes(move.tokens) + record.chunk_bytes(move.tokens))
    kernel = launch.kernel.__name__
    return Problem(
        name=move.name,
        bucket=pages.bucket(launch),
        kernel=launch.kernel,
        space=pages.configs(kernel),
        make=partial(move_case, move),
        work=lambda config: Work(moved),
        wide={kernel: move.wide},
        gated=move.gated,
        operation="pack" if move.to_records else "unpack",
    )


def move_case(
    move: MoveSpec, device: torch.device, filled: bool, start: Callable[..., Runnable] = pages.move
) -> Case:
    """Its tensors; `start` takes what `pages.move` takes, and makes the launch."""
    group, random = move.group, np.random.default_rng(0)
    record = group.quantised() if move.quantised else group
    each = move.tokens // group.block_tokens
    used = move.chunks * each
    blocks = used + used // 4 if filled else 1  # of the pool: some are nobody's
    ids = (
        random.permutation(used + used // 4)[:used].reshape(move.chunks, each)
        if filled
        else np.zeros((move.chunks, each), np.int64)
    )
    size = record.chunk_bytes(move.tokens)
    records = torch.empty(move.chunks, size, dtype=torch.uint8, device=device)
    pool = group.pages(blocks, POISON, str(device))
    engine = Pages.of(group, pool)
    slots = (ids[:, :, None] * engine.tokens + np.arange(engine.tokens)).reshape(move.chunks, -1)
    rotation = None
    if move.rope is not None:
        rotation = Rotation(move.rope, random.integers(-5000, 5000, move.chunks))
    if filled and move.to_records:
        for tensor in pool:
            fill(tensor)
    elif filled:
        for chunk in records:
            values = torch.empty(group.record_shape(move.tokens), dtype=pool[0].dtype, device=device)
            fill(values)
            if move.quantised:
                values = reference.quantise(values, group.k_size, move.quantised)
            chunk.copy_(values.view(torch.uint8).reshape(-1))

    def launches(config: KernelConfig | None) -> tuple[Runnable, ...]:
        launch = start(
            engine,
            records.data_ptr() + size * np.arange(move.chunks),
            slots if move.slots else ids,
            move.to_records,
            slots=move.slots,
            quantised=move.quantised,
            turns=Turns(rotation.rope, *rotation.resolve(*slots.shape)) if rotation else None,
            config=config,
        )
        return (launch,)

    def poison() -> None:
        for tensor in [records] if move.to_records else pool:
            tensor.view(torch.uint8).fill_(POISON)

    @cache
    def expected() -> list[torch.Tensor]:
        host = (
            [np.full(size, POISON, np.uint8) for _ in records]
            if move.to_records
            else list(records.cpu().numpy())
        )
        if move.to_records:
            reference.pack(group, engine.parts, host, slots, move.quantised)
            return [torch.from_numpy(np.stack(host)).to(device)]
        fresh = group.pages(blocks, POISON, str(device))
        reference.unpack(group, Pages.of(group, fresh).parts, host, slots, rotation, move.quantised)
        return fresh

    def fault() -> str:
        for i, (want, got) in enumerate(zip(expected(), [records] if move.to_records else pool, strict=True)):
            where = "records" if move.to_records else f"pages of layer {i}"
            if rotation:  # a multiplication and an addition may or may not be rounded as one
                found = far(where, got, want, 2 * torch.finfo(got.dtype).eps, 1e-5)
            else:
                found = different(where, got.view(torch.uint8), want.view(torch.uint8))
            if found:
                return found
        return ""

    return Case(launches, poison, fault, (records,) if move.to_records else tuple(pool))
