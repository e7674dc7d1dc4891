"""Checks that all operations share, for tensors and JAX arrays, and their error."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kvkit.format.rope import Rope

FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes that kernels compute with."""


class LaunchError(ValueError):
    """Arguments that a kernel cannot run on; nothing was written. Names the argument and its value."""


class ArraySpec(NamedTuple):
    """Properties of a tensor or a JAX array that checks compare.

    Args:
        shape: size of every axis.
        dtype: name of the dtype, such as bfloat16.
        strides: strides in elements; None for a JAX array, which has none.
        device: name of the device; "" for a JAX array, which may be on any.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    device: str = ""

    @staticmethod
    def of(x: Any) -> ArraySpec:
        """Return the spec of a tensor, or of any other object with a shape and a dtype."""
        dtype = str(x.dtype).removeprefix("torch.")
        if not callable(getattr(x, "stride", None)):
            return ArraySpec(tuple(x.shape), dtype)
        return ArraySpec(tuple(x.shape), dtype, tuple(x.stride()), str(x.device))

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}" + (f" on {self.device}" if self.device else "")


def check_array(name: str, x: ArraySpec, want: ArraySpec) -> None:
    """Refuse an array that is not contiguous, or differs from `want` in shape, dtype or device."""
    if x._replace(strides=None) != want._replace(strides=None):
        raise LaunchError(f"{name}: {x}, want {want}")
    if x.strides is not None and any(
        n > 1 and stride != math.prod(x.shape[i + 1 :])
        for i, (n, stride) in enumerate(zip(x.shape, x.strides, strict=True))
    ):
        raise LaunchError(f"{name}: strides {x.strides}, want it contiguous")


def check_ids(name: str, ids: Any, shape: tuple[int, ...]) -> None:
    """Refuse anything but an array of int32 or int64 with this shape."""
    dtype = str(getattr(ids, "dtype", type(ids).__name__))
    if dtype not in ("int32", "int64"):
        raise LaunchError(f"{name}: {dtype}, want an array of int32")
    if ids.shape != shape:
        raise LaunchError(f"{name}: {ids.shape}, want {shape}")


def check_overlap(name: str, x: ArraySpec) -> None:
    """Refuse strides with which elements share memory or axes interleave."""
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(x.strides or (), x.shape, strict=False) if n > 1):
        if stride < extent:
            raise LaunchError(f"{name}: {x.shape} strides {x.strides} overlap or interleave")
        extent += (size - 1) * stride


def check_rope(name: str, rope: Rope, channels: int) -> None:
    """Refuse rotary channels beyond those of a head."""
    last = rope.first + rope.channels
    if last > channels:
        raise LaunchError(f"{name}: channels {rope.first} to {last}, but a head of K has {channels}")
