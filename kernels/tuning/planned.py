"""Launches that differ in few arguments: the compiled kernel is found once, then started directly.

Triton's `kernel[grid](**arguments)` derives the compiled kernel from all arguments in every call. That takes
the host several times as long as the launch itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ALIGNMENT = 16
"""Bytes: Triton compiles another kernel for a tensor whose address is not a multiple of them."""

COMPILER_OPTIONS = ("num_ctas", "maxnreg")
"""Tiles of a configuration that are no arguments of the kernel: a launch takes them by keyword, too."""

LAUNCHER_VERSIONS = (3, 6), (3, 9)
"""Oldest and newest Triton whose launcher is called as `LaunchPlan.start` does."""


class LaunchPlan:
    """A Triton kernel, its configuration and the arguments that some launches share.

    The first launch goes through Triton, and its compiled kernel is kept. Later launches start that kernel on
    the current device and stream, with Triton's launch hooks. It is chosen by all that Triton compiles it for
    and that may differ between the launches: the device, the settings that Triton reads in each call, the
    dtype of each tensor and whether its address is aligned, the width of each integer.

    Other launches go through Triton: the first of each choice, those of interpreted kernels, with pre-run
    hooks or a hook that changes compilation, and on GPUs of AMD, where Triton compiles for the size of a
    tensor's memory, too.

    Args:
        kernel: the `triton.jit` function.
        config: its configuration, a `KernelConfig`.
        shared: arguments of all launches.
        tensors: names of the tensors of each launch.
        numbers: names of the integers of each launch, for which the kernel is not specialised
            (`do_not_specialize`).
    """

    def __init__(
        self,
        kernel: Any,
        config: Any,
        shared: Mapping[str, Any],
        tensors: Sequence[str],
        numbers: Sequence[str] = (),
    ) -> None:
        self.kernel, self.config, self.shared = kernel, config, shared
        self.own, self._tensors = (*tensors, *numbers), len(tensors)
        self._knobs, self._driver, self._known_launcher = _triton()
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._template: list[Any] = []  # arguments in the kernel's order, without those of a launch
        self._positions: list[int] = []  # in it, of the arguments in `own`

    def arguments(self, *own: Any) -> PlannedArguments:
        """Return the arguments of one launch; `own` are its tensors, then its integers."""
        return PlannedArguments(self, own)

    def start(self, grid: tuple[int, ...], own: Sequence[Any]) -> bool:
        """Start the kernel if it was kept; return whether it was. Mutates what the kernel writes."""
        runtime = self._knobs.runtime
        if not self._compiled or self.kernel.pre_run_hooks or runtime.add_stages_inspection_hook is not None:
            return False
        active = self._driver.active
        device = active.get_current_device()
        compiled = self._compiled.get(self._key(device, own))
        if compiled is None:
            return False
        arguments = self._template.copy()
        for position, value in zip(self._positions, own, strict=True):
            arguments[position] = value
        x, y, z = (*grid, 1, 1)[:3]
        hooked = _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook)
        if self._known_launcher and not hooked:
            function, metadata = compiled.function, compiled.packed_metadata
            stream = active.get_current_stream(device)
            compiled.run(x, y, z, stream, function, metadata, None, None, None, *arguments)
        else:
            compiled[x, y, z](*arguments)
        return True

    def keep(self, compiled: Any, own: Sequence[Any]) -> None:
        """Keep what Triton's `kernel[grid](**arguments)` returned for a launch with these arguments."""
        from triton.compiler import CompiledKernel

        if not isinstance(compiled, CompiledKernel) or compiled.metadata.target.backend != "cuda":
            return
        if not self._template:
            values = {**self.shared, **dict(self.config.tiles), **dict.fromkeys(self.own)}
            names = self.kernel.arg_names
            if values.keys() - set(COMPILER_OPTIONS) != set(names):  # one has a default
                return
            self._positions = [names.index(name) for name in self.own]
            self._template = [values[name] for name in names]
        self._compiled[self._key(self._driver.active.get_current_device(), own)] = compiled

    def _key(self, device: Any, own: Sequence[Any]) -> tuple[Any, ...]:
        compilation, tensors = self._knobs.compilation, own[: self._tensors]
        return (
            device,
            self._knobs.runtime.debug,
            compilation.instrumentation_mode,
            getattr(compilation, "fpsan_homomorphic_casts", None),  # from Triton 3.9 on
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors],
            *[-(1 << 31) <= number < 1 << 31 for number in own[self._tensors :]],
        )


class PlannedArguments(Mapping[str, Any]):
    """Arguments of one launch by name: its own, then those that the plan shares."""

    __slots__ = ("own", "plan")

    def __init__(self, plan: LaunchPlan, own: Sequence[Any]) -> None:
        self.plan, self.own = plan, own

    def __getitem__(self, name: str) -> Any:
        names = self.plan.own
        return self.own[names.index(name)] if name in names else self.plan.shared[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.plan.own
        yield from self.plan.shared

    def __len__(self) -> int:
        return len(self.plan.own) + len(self.plan.shared)


@functools.cache
def _triton() -> tuple[Any, Any, bool]:
    """Return Triton's settings and driver, and whether its launcher is known. Host kernels need no Triton."""
    import triton
    from triton.runtime import driver

    oldest, newest = LAUNCHER_VERSIONS
    return triton.knobs, driver, oldest <= tuple(map(int, triton.__version__.split(".")[:2])) <= newest


def _calls(hook: Any) -> Any:
    """Return what a launch hook of Triton calls: nothing if its chain is empty."""
    return getattr(hook, "calls", hook)
