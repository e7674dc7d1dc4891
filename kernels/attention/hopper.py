"""Attention on Hopper GPUs by the kernel of `hopper_kernels`, where a tuned table says that it is faster.

`attend` of `triton_kernels` is the fallback, and what results are compared with. Both have the same plan of
tiles, and parts of split tiles have the same `merge`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kvkit.kernels.attention import triton
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.attention.triton import AttentionPlan
from kvkit.kernels.attention.triton_kernels import attend
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket
from kvkit.kernels.tuning.gpus import GPUS
from kvkit.kernels.tuning.planned import LaunchPlan
from kvkit.kernels.tuning.tables import distance, results_of

try:
    from kvkit.kernels.attention import hopper_kernels
except ImportError:  # Triton without Gluon, or with another Gluon
    KERNEL: Any = None
else:
    KERNEL = hopper_kernels.attend_hopper

OP = "attend_hopper"
"""Name of the kernel, and operation of its buckets."""
TARGET = "sm_90"
SIZES = (64, 128, 256)
"""Channels of the heads that the kernel takes."""
LEFT_OUT = ("V_SIZE", "VALUES", "LATENT", "INTERPRET")
"""Constants of `attend` that this kernel does not have."""


@functools.cache
def available() -> bool:
    """Return whether this process's GPU, or an H100 without one, can run the kernel with this Triton."""
    if KERNEL is None or torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)


def plan_attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, rows: Rows, scoring: Scoring
) -> AttentionPlan:
    """Plan as `triton.plan_attention` does, with the Hopper kernel where it is known to be faster.

    Whether the pages are aligned to 16 bytes is a part of the form that is planned for.
    """
    plan = triton.plan_attention(q, k_pages, v_pages, rows, scoring)
    if plan.attending is None or not available():
        return plan
    arguments = {"q": q, "k": k_pages, "v": v_pages, **plan.attending.shared}
    if not supports(arguments):
        return plan
    config = faster(triton.bucket(Launch(attend, (), arguments, plan.attending.config)), configs(arguments))
    if config is None:
        return plan
    plan = triton.plan_attention(q, k_pages, v_pages, rows, scoring, config)
    assert plan.attending is not None
    shared = {name: value for name, value in plan.attending.shared.items() if name not in LEFT_OUT}
    return plan._replace(attending=LaunchPlan(KERNEL, config, shared, plan.attending.own))


def with_kernel(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Return an attention's launches in a configuration of `configs` with the Hopper kernel for `attend`."""
    first, *others = launches
    arguments = {name: value for name, value in first.arguments.items() if name not in LEFT_OUT}
    return replace(first, kernel=KERNEL, arguments=arguments), *others


def supports(arguments: Mapping[str, Any]) -> bool:
    """Return whether the kernel takes these arguments of `attend`: dtype, channels, alignment, values."""
    k, v, size = arguments["k"], arguments["v"], arguments["SIZE"]
    strides = *(x.stride(axis) for x in (k, v) for axis in (0, 1)), k.stride(2), v.stride(2)
    return (
        k.element_size() == 2
        and size == arguments["V_SIZE"]
        and size in SIZES
        and arguments["VALUES"]
        and not arguments["LATENT"]
        and not any(x.data_ptr() % 16 for x in (k, v))
        and not any(stride % 16 for stride in strides)
    )


def configs(arguments: Mapping[str, Any]) -> tuple[KernelConfig, ...]:
    """Return the configurations for arguments of `attend` that it `supports`, the default first.

    TILE_ROWS and TILE_KEYS are the sides of a tile of scores; STAGES tiles of K and of V have buffers.
    """
    return _configs(arguments["SIZE"], arguments["PAGE"])


@functools.cache
def _configs(size: int, page: int) -> tuple[KernelConfig, ...]:
    # with 128 keys a thread would hold too many block ids if each key may be in another block
    first = 128 if size <= 128 and hopper_kernels.run_length(page, 128, size) > 1 else 64
    other = 64 if size <= 128 else 32
    every = [(keys, stages) for keys in (first, other) for stages in (2, 3, 4)]
    limit = GPUS[TARGET].block_shared_bytes - 1024  # barriers, and what Triton passes to warps
    return tuple(
        KernelConfig((("TILE_ROWS", 128), ("TILE_KEYS", keys), ("STAGES", stages)), 4, 1)
        for keys, stages in dict.fromkeys(every)
        if 2 * size * (128 + 2 * stages * keys) <= limit
    )


def faster(bucket: ProblemBucket, space: tuple[KernelConfig, ...]) -> KernelConfig | None:
    """Return the tuned configuration of `space` for a bucket of `attend`; None if `attend` is not slower.

    The two kernels' times are compared where both were measured, at the sizes nearest to the bucket's.
    """
    own, other = (results_of(op, bucket.form, kernel) for op, kernel in ((OP, KERNEL), (bucket.op, attend)))
    both = [key for key in own.keys() & other.keys() if own[key].config in space]
    nearest = min(both, key=lambda key: (distance(key[0], bucket.sizes), key), default=None)
    if nearest is None or own[nearest].us >= other[nearest].us:
        return None
    return own[nearest].config
