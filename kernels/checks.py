"""What the checks of every operation share."""

from __future__ import annotations

from collections.abc import Sequence


class LaunchError(ValueError):
    """A kernel cannot run on these arguments; nothing was written. Names the argument and its value."""


def check_overlap(name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Refuse strides by which two elements share memory, or axes interleave."""
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < extent:
            raise LaunchError(f"{name}: {tuple(shape)} strides {tuple(strides)} overlap or interleave")
        extent += (size - 1) * stride
