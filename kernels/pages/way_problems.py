"""Problems that the way between GPU and host is tuned with: records of several sizes, few and many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch

from kvkit.format.layout import LayerGroup
from kvkit.kernels.pages import reference, streams
from kvkit.kernels.pages.device import (
    BUFFER_BYTES,
    WAYS,
    DeviceMove,
    best_way,
    steps,
    untuned_way,
    way_bucket,
    way_entry,
)
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.tuning.cases import POISON, Case, Problem, Work, different, fill
from kvkit.kernels.tuning.configs import KernelConfig, Runnable


@dataclass(frozen=True, slots=True)
class WaySpec:
    """Moves of `records` records of `tokens` tokens each between a group's pages and pinned memory."""

    group: LayerGroup
    records: int
    to_records: bool
    tokens: int = 256

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.group.chunk_bytes(self.tokens)


_MODEL = LayerGroup(tuple(range(32)), kv_heads=8, k_size=128, v_size=128, dtype="bfloat16", block_tokens=16)
_LAYER = replace(_MODEL, layers=(0,))

WAY_SPECS = tuple(
    WaySpec(group, records, to_records)
    for to_records in (True, False)
    for group, records in (
        (_MODEL, 1),  # 32 MiB
        (_MODEL, 8),
        (_LAYER, 8),  # 1 MiB
        (_LAYER, 32),
        (replace(_LAYER, kv_heads=1), 32),  # 128 KiB
        (replace(_LAYER, kv_heads=1, k_size=32, v_size=32), 64),  # 32 KiB
        (replace(_LAYER, kv_heads=1, k_size=16, v_size=16), 128),  # 16 KiB
    )
)


def way_problems() -> Iterator[Problem]:
    """Return all problems, made without tensors."""
    return map(way_problem, WAY_SPECS)


def way_problem(spec: WaySpec) -> Problem:
    """Make a problem. Configurations differ only in how records move, so none of it is gated."""
    bucket = way_bucket(spec.record_bytes, spec.records, spec.to_records)
    default = untuned_way(spec.record_bytes, spec.records)
    moved = 2 * spec.records * spec.record_bytes
    return Problem(
        name=f"{bucket.op}, {spec.records} of {spec.record_bytes >> 10} KiB",
        bucket=bucket,
        kernel=steps,
        space=tuple(map(way_entry, dict.fromkeys((default, *WAYS)))),
        make=partial(_case, spec),
        work=lambda config: Work(moved),
        gated=False,
        operation="pack" if spec.to_records else "unpack",
    )


def _case(spec: WaySpec, device: torch.device, filled: bool) -> Case:
    group, random = spec.group, np.random.default_rng(0)
    each = spec.tokens // group.block_tokens
    count = spec.records * each
    blocks = count + count // 4 if filled else 1  # blocks of the pool: some belong to no record
    ids = (random.permutation(blocks)[:count] if filled else np.zeros(count, np.int64)).reshape(-1, each)
    pool = group.pages(blocks, POISON, str(device))
    pinned = device.type == "cuda"
    records = torch.empty(spec.records, spec.record_bytes, dtype=torch.uint8, pin_memory=pinned)
    move = DeviceMove(Pages.of(group, pool), ids, False, spec.to_records)
    if filled:
        for tensor in pool if spec.to_records else [records]:
            fill(tensor)

    def launches(config: KernelConfig | None) -> tuple[Runnable, ...]:
        config = config or way_entry(best_way(spec.record_bytes, spec.records, spec.to_records))
        programs = dict(config.tiles)["PROGRAMS"]
        addresses = [_address(record, device) if programs else None for record in records]
        return tuple(steps(move, list(records), addresses, BUFFER_BYTES, programs))

    def poison() -> None:
        for tensor in [records] if spec.to_records else pool:
            tensor.view(torch.uint8).fill_(POISON)

    @cache
    def expected() -> list[torch.Tensor]:
        slots = (ids[:, :, None] * group.block_tokens + np.arange(group.block_tokens)).reshape(len(ids), -1)
        if spec.to_records:
            addresses = [np.empty(spec.record_bytes, np.uint8) for _ in records]
            reference.pack(group, move.pages.parts, addresses, slots)
            return [torch.from_numpy(np.stack(addresses))]
        fresh = group.pages(blocks, POISON, str(device))
        reference.unpack(group, Pages.of(group, fresh).parts, list(records.numpy()), slots)
        return fresh

    def fault() -> str:
        for got, want in zip([records] if spec.to_records else pool, expected(), strict=True):
            if addresses := different("bytes moved", got.view(torch.uint8), want.view(torch.uint8)):
                return addresses
        return ""

    return Case(launches, poison, fault, (records,) if spec.to_records else tuple(pool))


def _address(record: torch.Tensor, device: torch.device) -> int | None:
    """Return a record's address for kernels; on a CPU, which interprets them, its own address."""
    if device.type == "cpu":
        return record.data_ptr()
    with torch.cuda.device(device):
        return streams.device_address(record.data_ptr())
