"""Packs and unpacks to tune and check kernels with: their tensors, and a check of the moved bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from kvkit.format.layout import LayerGroup, Precision
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages import reference
from kvkit.kernels.pages.checks import Turns
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.tuning.cases import POISON, Case, different, far, fill, rope_of
from kvkit.kernels.tuning.configs import KernelConfig, Runnable
from kvkit.kernels.tuning.shapes import ModelShape

CHUNK_TOKENS = 256

LLAMA = LayerGroup(tuple(range(32)), kv_heads=8, k_size=128, v_size=128, dtype="bfloat16", block_tokens=16)
"""Pages of Llama-3.1-8B."""

SMOLLM = LayerGroup(tuple(range(30)), kv_heads=3, k_size=64, v_size=64, dtype="float32", block_tokens=16)
"""Pages of SmolLM2-135M."""


@dataclass(frozen=True, slots=True)
class MoveSpec:
    """A pack (`to_records`) or unpack of chunks."""

    name: str  # name of the problem
    group: LayerGroup  # group of the pages, with the records' precision
    to_records: bool
    chunks: int = 8
    tokens: int = CHUNK_TOKENS  # tokens of a chunk
    slots: bool = False  # pages are named token by token, not block by block
    rope: Rope | None = None  # embedding of the rotated keys; None: not rotated
    wide: tuple[int, int] = (1, 1)  # as in `Problem`, for its only kernel
    gated: bool = True  # as in `Problem`


def model_moves(shape: ModelShape) -> Iterator[MoveSpec]:
    """Yield moves of a model's pages, of many and few chunks: plain, with rotated keys, quantised."""
    channels = shape.rotary or shape.head - shape.latent
    rope = rope_of(channels, 10000.0, interleaved=bool(shape.latent), first=shape.latent)
    forms: tuple[Precision | None, ...] = (None, "fp8", "int8")
    for chunks in (8, 1):
        for precision in forms:
            for verb, key_rope in (("pack", None), ("unpack", None), ("rotate", rope)):
                name = " ".join([verb, *filter(None, [precision]), f"{shape}, {chunks} chunks"])
                group = replace(shape.group(), precision=precision)
                yield MoveSpec(name, group, verb == "pack", chunks, rope=key_rope, wide=(0, 0))


def move_case(start: Callable[..., Runnable], move: MoveSpec, device: torch.device, filled: bool) -> Case:
    """Make the case of a move; `start` takes the arguments of `triton.move`, and returns the launch."""
    group, random = move.group, np.random.default_rng(0)
    chunk_blocks = move.tokens // group.block_tokens
    used = move.chunks * chunk_blocks
    blocks = used + used // 4 if filled else 1  # blocks of the pool: some belong to no chunk
    ids = (
        random.permutation(used + used // 4)[:used].reshape(move.chunks, chunk_blocks)
        if filled
        else np.zeros((move.chunks, chunk_blocks), np.int64)
    )
    size = group.chunk_bytes(move.tokens)
    records = torch.empty(move.chunks, size, dtype=torch.uint8, device=device)
    pool = group.pages(blocks, POISON, str(device))
    engine = Pages.of(group, pool)
    slots = (ids[:, :, None] * engine.tokens + np.arange(engine.tokens)).reshape(move.chunks, -1)
    rotation = None
    if move.rope is not None:
        rotation = Rotation(move.rope, random.integers(-5000, 5000, move.chunks))
    if filled:
        _fill_sources(move, pool, records)

    def launches(config: KernelConfig | None) -> tuple[Runnable, ...]:
        launch = start(
            engine,
            records.data_ptr() + size * np.arange(move.chunks),
            slots if move.slots else ids,
            move.to_records,
            slots=move.slots,
            turns=Turns(rotation.rope, *rotation.resolve(*slots.shape)) if rotation else None,
            config=config,
        )
        return (launch,)

    def poison() -> None:
        for tensor in [records] if move.to_records else pool:
            tensor.view(torch.uint8).fill_(POISON)

    @cache
    def expected() -> list[torch.Tensor]:
        if move.to_records:
            packed = [np.full(size, POISON, np.uint8) for _ in records]
            reference.pack(group, engine.parts, packed, slots)
            return [torch.from_numpy(np.stack(packed)).to(device)]
        fresh = group.pages(blocks, POISON, str(device))
        reference.unpack(group, Pages.of(group, fresh).parts, list(records.cpu().numpy()), slots, rotation)
        return fresh

    def fault() -> str:
        for i, (want, got) in enumerate(zip(expected(), [records] if move.to_records else pool, strict=True)):
            name = "records" if move.to_records else f"pages of layer {i}"
            if rotation:  # a multiplication and an addition may or may not be rounded together
                found = far(name, got, want, 2 * torch.finfo(got.dtype).eps, 1e-5)
            else:
                found = different(name, got.view(torch.uint8), want.view(torch.uint8))
            if found:
                return found
        return ""

    return Case(launches, poison, fault, (records,) if move.to_records else tuple(pool))


def _fill_sources(move: MoveSpec, pool: Sequence[torch.Tensor], records: torch.Tensor) -> None:
    """Fill what a move reads, pages or records, with random numbers."""
    if move.to_records:
        for tensor in pool:
            fill(tensor)
        return
    shape = replace(move.group, precision=None).record_shape(move.tokens)
    for chunk in records:
        values = torch.empty(shape, dtype=pool[0].dtype, device=records.device)
        fill(values)
        if move.group.precision:
            values = reference.quantise(values, move.group.k_size, move.group.precision)
        chunk.copy_(values.view(torch.uint8).reshape(-1))
