"""Packs and unpacks to tune and check kernels with: their tensors, and a check of the moved bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import LayerGroup, Precision
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages import reference
from kvkit.kernels.pages.checks import ResolvedRotation, token_slots
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.tuning.cases import POISON, Case, different, fill, not_close, rope_of
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

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.group.chunk_bytes(self.tokens)


def model_moves(shape: ModelShape) -> Iterator[MoveSpec]:
    """Yield moves of a model's pages, of many and few chunks: plain, with rotated keys, quantised."""
    channels = shape.rotary or shape.head - shape.latent
    rope = rope_of(channels, 10000.0, interleaved=bool(shape.latent), first=shape.latent)
    precisions: tuple[Precision | None, ...] = (None, "fp8", "int8")
    for chunks in (8, 1):
        for precision in precisions:
            for verb, key_rope in (("pack", None), ("unpack", None), ("rotate", rope)):
                name = " ".join([verb, *filter(None, [precision]), f"{shape}, {chunks} chunks"])
                group = replace(shape.group(), precision=precision)
                yield MoveSpec(name, group, verb == "pack", chunks, rope=key_rope, wide=(0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class MoveTensors:
    """Tensors of a move, and the pages and rotation that it names."""

    pool: list[torch.Tensor]  # per layer, pages [B, H, N, C]
    pages: Pages  # the same pages, as kernels take them
    records: torch.Tensor  # uint8 [chunks, bytes]
    blocks: NDArray[np.int64]  # [chunks, T / N], in random order
    slots: NDArray[np.int64]  # [chunks, T], of the tokens in these blocks
    rotation: Rotation | None


def move_tensors(move: MoveSpec, device: torch.device, filled: bool, pinned: bool = False) -> MoveTensors:
    """Make the tensors of a move on a device, with contents if `filled`.

    Args:
        pinned: whether the records are in host memory, pinned for a GPU.
    """
    group, random = move.group, np.random.default_rng(0)
    chunk_blocks = move.tokens // group.block_tokens
    used = move.chunks * chunk_blocks
    pool_blocks = used + used // 4 if filled else 1  # some belong to no chunk
    blocks = random.permutation(pool_blocks)[:used] if filled else np.zeros(used, np.int64)
    blocks = blocks.reshape(move.chunks, chunk_blocks)
    records = torch.empty(
        *(move.chunks, move.record_bytes),
        dtype=torch.uint8,
        device="cpu" if pinned else device,
        pin_memory=pinned and device.type == "cuda",
    )
    pool = group.pages(pool_blocks, POISON, str(device))
    pages = Pages.of(group, pool)
    rotation = None
    if move.rope is not None:
        rotation = Rotation(move.rope, random.integers(-5000, 5000, move.chunks))
    if filled:
        _fill_sources(move, pool, records)
    return MoveTensors(pool, pages, records, blocks, token_slots(blocks, pages.tokens), rotation)


def move_case(start: Callable[..., Runnable], move: MoveSpec, device: torch.device, filled: bool) -> Case:
    """Make the case of a move; `start` takes the arguments of `triton.move`, and returns the launch."""
    tensors = move_tensors(move, device, filled)
    records, slots, rotation = tensors.records, tensors.slots, tensors.rotation

    def launches(config: KernelConfig | None) -> tuple[Runnable, ...]:
        launch = start(
            tensors.pages,
            records.data_ptr() + move.record_bytes * np.arange(move.chunks),
            slots if move.slots else tensors.blocks,
            move.to_records,
            slots=move.slots,
            rotation=ResolvedRotation(rotation.rope, *rotation.resolve(*slots.shape)) if rotation else None,
            config=config,
        )
        return (launch,)

    return case_of(move, tensors, launches)


def case_of(
    move: MoveSpec, tensors: MoveTensors, launches: Callable[[KernelConfig | None], tuple[Runnable, ...]]
) -> Case:
    """Return the case of a move that `launches` carry out, compared with the `reference`."""
    group, pool, records, slots = move.group, tensors.pool, tensors.records, tensors.slots
    outputs = [records] if move.to_records else pool

    def poison() -> None:
        for tensor in outputs:
            tensor.view(torch.uint8).fill_(POISON)

    @cache
    def expected() -> list[torch.Tensor]:
        if move.to_records:
            packed = [np.full(move.record_bytes, POISON, np.uint8) for _ in records]
            reference.pack(group, tensors.pages.parts, packed, slots)
            return [torch.from_numpy(np.stack(packed)).to(records.device)]
        fresh = group.pages(len(pool[0]), POISON, str(pool[0].device))
        fresh_parts = Pages.of(group, fresh).parts
        reference.unpack(group, fresh_parts, list(records.cpu().numpy()), slots, tensors.rotation)
        return fresh

    def fault() -> str:
        for i, (want, got) in enumerate(zip(expected(), outputs, strict=True)):
            name = "records" if move.to_records else f"pages of layer {i}"
            if tensors.rotation:  # a multiplication and an addition may or may not be rounded together
                found = not_close(name, got, want, 2 * torch.finfo(got.dtype).eps, 1e-5)
            else:
                found = different(name, got.view(torch.uint8), want.view(torch.uint8))
            if found:
                return found
        return ""

    return Case(launches, poison, fault, tuple(outputs))


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
