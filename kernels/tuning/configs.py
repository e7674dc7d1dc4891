"""Launches of kernels: their configurations, and the buckets of problems that share one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvkit.kernels.caches import use_triton_cache
from kvkit.kernels.tuning.planned import PlannedArguments


class KernelConfig(NamedTuple):
    """Settings to compile and start a kernel with; a host kernel has only tiles, see `host_config`."""

    tiles: tuple[tuple[str, int], ...]  # compile-time sizes, or a host kernel's arguments, by name
    warps: int = 4  # Triton's num_warps; 0: not a Triton kernel
    stages: int = 2  # Triton's num_stages

    def __str__(self) -> str:
        triton = (("warps", self.warps), ("stages", self.stages)) if self.warps else ()
        return " ".join(f"{name}={size}" for name, size in (*self.tiles, *triton))

    @classmethod
    def parse(cls, text: str) -> KernelConfig:
        """Return the configuration that `str` wrote as `text`. Raises ValueError for any other text."""
        numbers = {name: int(size) for name, size in (word.split("=") for word in text.split())}
        warps, stages = numbers.pop("warps", 0), numbers.pop("stages", 0)
        return cls(tuple(numbers.items()), warps, stages)


def host_config(**tiles: int) -> KernelConfig:
    """Return a configuration of a kernel without Triton: sizes, counts and choices by argument."""
    return KernelConfig(tuple(tiles.items()), 0, 0)


class ProblemBucket(NamedTuple):
    """Problems that share a configuration."""

    op: str  # name of an operation's function in an `api`, or of one of its kernels
    form: str  # properties that change the code, as text: dtype, head sizes, alignment, flags
    sizes: tuple[int, ...]  # other sizes, rounded up to powers of two


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


class Runnable(Protocol):
    """Work that is ready to start: a `Launch`, a `HostLaunch` or anything else with `run`."""

    def run(self) -> None:
        """Do the work, or start it on the current device and stream; mutates what the kernel writes."""


def run_all(launches: Iterable[Runnable]) -> None:
    """Run launches one after another; mutates what they write."""
    for launch in launches:
        launch.run()


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A Triton kernel with its grid and arguments, ready to run or to compile for another target.

    Arguments of a `LaunchPlan` start its compiled kernel, which takes the host less time.
    """

    kernel: Any  # the `triton.jit` function
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # tensors, numbers, and compile-time values except those of `config`
    config: KernelConfig

    def run(self) -> None:
        """Start the kernel on the current device and stream; mutates what the kernel writes."""
        arguments = self.arguments
        planned = arguments if isinstance(arguments, PlannedArguments) and self._follows(arguments) else None
        if planned is not None and planned.plan.start(self.grid, planned.own):
            return
        use_triton_cache()
        compiled = self.kernel[self.grid](**self._kernel_arguments())
        if planned is not None:
            planned.plan.keep(compiled, planned.own)

    def compile(self) -> Any:
        """Compile what `run` would start on Triton's active driver; starts nothing."""
        use_triton_cache()
        return self.kernel.warmup(grid=self.grid, **self._kernel_arguments())

    def _follows(self, arguments: PlannedArguments) -> bool:
        """Return whether kernel and configuration are the plan's: not so in some copies by `replace`."""
        return self.kernel is arguments.plan.kernel and self.config is arguments.plan.config

    def _kernel_arguments(self) -> dict[str, Any]:
        options = {"num_warps": self.config.warps, "num_stages": self.config.stages}
        return {**self.arguments, **dict(self.config.tiles), **options}


@dataclass(frozen=True, slots=True, eq=False)
class HostLaunch:
    """A function with its arguments; the tiles of `config` are arguments too."""

    call: Callable[..., object]
    arguments: Mapping[str, Any]
    config: KernelConfig

    def run(self) -> None:
        """Call the function; mutates what the function writes."""
        self.call(**self.arguments, **dict(self.config.tiles))
