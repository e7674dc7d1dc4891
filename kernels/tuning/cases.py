"""What a problem is: tensors for a kernel, what it cannot do without, and whether its results are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvkit.format.rope import Rope
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, Runnable


@dataclass(frozen=True, slots=True)
class Work:
    """What a problem cannot be done without."""

    moved_bytes: int  # read from and written to memory
    flops: int = 0  # multiplications and additions of its matrix products
    iterations: int = 0  # of the loop that has these, in all programs together; 0: not known


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A problem with its tensors on a device.

    Args:
        launches: the kernels of a configuration (None: the best that is known), in order, over these tensors:
            `Launch`es of Triton kernels, `HostLaunch`es of functions, or anything else with `run`.
        poison: overwrites whatever the kernels write.
        fault: compares what they wrote with the operation's `reference`: where it differs, "" if nowhere.
        outputs: what the kernels write: equal runs leave equal bits there.
    """

    launches: Callable[[KernelConfig | None], tuple[Runnable, ...]]
    poison: Callable[[], None]
    fault: Callable[[], str]
    outputs: tuple[torch.Tensor, ...] = ()

    def run(self, config: KernelConfig) -> None:
        """Run the kernels of `config`, on a GPU on the current stream; mutates what they write."""
        for launch in self.launches(config):
            launch.run()


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One problem of a bucket.

    Args:
        name: unique.
        bucket: that it stands for.
        kernel: the Triton kernel or function that is tuned: results count for its present source alone.
        space: configurations to choose from, the default first.
        make: its tensors on a device; with False they hold nothing, for a look at the launches alone.
        work: of a configuration, whose tiles may take more than the problem needs.
        wide: by kernel's name, how many of its instructions the layout lets load and store 16 bytes at least.
        gated: has a form of its own in the compile gate; False where another's is nearly the same.
        defaults: by target, where another than the first of `space` comes first.
        operation: the name of a function of an `api`, which users know it by; "" where it is the bucket's op.
        host: it runs on the CPU; its results are in the CPU's table.
    """

    name: str
    bucket: ProblemBucket
    kernel: Any
    space: tuple[KernelConfig, ...]
    make: Callable[[torch.device, bool], Case]
    work: Callable[[KernelConfig], Work]
    wide: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    gated: bool = True
    defaults: Mapping[str, KernelConfig] = field(default_factory=dict)
    operation: str = ""
    host: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """What `kvkit tune --op` knows it by: the operation, and the kernel."""
        return self.operation or self.bucket.op, self.bucket.op

    def space_on(self, target: str) -> tuple[KernelConfig, ...]:
        """Configurations for a target, a name of `gpus.GPUS`; the default first."""
        return tuple(dict.fromkeys((self.defaults.get(target, self.space[0]), *self.space)))


def rope_of(channels: int, base: float, **more: Any) -> Rope:
    """A model's default embedding of so many rotary channels; more fields as in `Rope`."""
    return Rope(tuple(base ** (-2 * i / channels) for i in range(channels // 2)), **more)


LLAMA_ROPE = rope_of(128, 500000.0)

INTERLEAVED = rope_of(128, 10000.0, interleaved=True)

POISON = 0xA5


def fill(tensor: torch.Tensor) -> None:
    """Overwrite with normally distributed numbers, or with any bytes."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    if tensor.dtype.is_floating_point:
        tensor.normal_(generator=generator)
    else:
        tensor.random_(0, 256, generator=generator)


def different(name: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """How many bytes differ, as text; "" if none do."""
    count = int((got != want).sum())
    return f"{name}: {count} of {got.numel()} bytes differ" if count else ""


def far(name: str, got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float) -> str:
    """How many numbers are further off than this allows, as text; "" if none are. A NaN is."""
    error = (got.double() - want.double()).abs()
    wrong = ~(error <= absolute + relative * want.double().abs())  # NaN is wrong too
    return (
        f"{name}: {int(wrong.sum())} of {got.numel()} numbers are off, by up to {error.max():.2g}"
        if wrong.any()
        else ""
    )
