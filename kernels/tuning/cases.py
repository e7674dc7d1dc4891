"""Problems to tune and check kernels with: their tensors, their least work, a check of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvkit.format.rope import Rope
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, Runnable, run_all


@dataclass(frozen=True, slots=True)
class Work:
    """Least work of a problem."""

    moved_bytes: int  # bytes read from and written to memory
    flops: int = 0  # multiplications and additions of matrix products
    iterations: int = 0  # of the loop with these products, over all programs; 0: unknown


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A problem with its tensors on a device.

    Args:
        launches: returns the kernels of a configuration (None: the best known), in order, over these tensors:
            `Launch`es of Triton kernels, `HostLaunch`es of functions, or anything else with `run`.
        poison: overwrites everything that the kernels write.
        fault: compares results with the operation's `reference`: returns where they differ, "" if nowhere.
        outputs: tensors that the kernels write: equal runs leave equal bits in them.
    """

    launches: Callable[[KernelConfig | None], tuple[Runnable, ...]]
    poison: Callable[[], None]
    fault: Callable[[], str]
    outputs: tuple[torch.Tensor, ...] = ()

    def run(self, config: KernelConfig) -> None:
        """Run the kernels of `config`, on a GPU on the current stream; mutates what they write."""
        run_all(self.launches(config))


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One problem of a bucket.

    Args:
        name: unique name.
        bucket: bucket that it represents.
        kernel: tuned Triton kernel or function: results count only for its present source.
        space: configurations to choose from, the default first.
        make: makes its tensors on a device; with False they have no contents, to inspect launches only.
        work: returns the work of a configuration; its tiles may take more than the problem needs.
        wide: by kernel's name, the loads and stores of at least 16 bytes that the layout allows.
        gated: whether the compile gate compiles it; False if another problem compiles to nearly the same.
        defaults: by target, the default if it is not the first of `space`.
        operation: name of the public function of an `api`; "" if it is the bucket's op.
        host: whether it runs on the CPU, with results in the CPU's table.
        spills: by target, bytes of registers that a default may spill, as its larger tiles are faster.
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
    spills: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, str]:
        """Names for `kvkit tune --op`: the operation, and the kernel."""
        return self.operation or self.bucket.op, self.bucket.op

    def space_on(self, target: str) -> tuple[KernelConfig, ...]:
        """Return the configurations for a target, a name in `gpus.GPUS`; the default first."""
        return tuple(dict.fromkeys((self.defaults.get(target, self.space[0]), *self.space)))


def rope_of(channels: int, base: float, **fields: Any) -> Rope:
    """Return a model's default embedding of `channels` rotary channels; `fields` are others of `Rope`."""
    return Rope(tuple(base ** (-2 * i / channels) for i in range(channels // 2)), **fields)


LLAMA_ROPE = rope_of(128, 500000.0)

INTERLEAVED = rope_of(128, 10000.0, interleaved=True)

POISON = 0xA5


def fill(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with normally distributed numbers, or with random integers below 256."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    if tensor.dtype.is_floating_point:
        tensor.normal_(generator=generator)
    else:
        tensor.random_(0, 256, generator=generator)


def different(name: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """Return the number of bytes that differ, as text; "" if none do."""
    count = int((got != want).sum())
    return f"{name}: {count} of {got.numel()} bytes differ" if count else ""


def not_close(name: str, got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float) -> str:
    """Return the number of values that differ by more than a tolerance, as text; "" if none do.

    A NaN in `got` differs from everything.
    """
    error = (got.double() - want.double()).abs()
    wrong = ~(error <= absolute + relative * want.double().abs())  # also a NaN
    return (
        f"{name}: {int(wrong.sum())} of {got.numel()} numbers are off, by up to {error.max():.2g}"
        if wrong.any()
        else ""
    )
