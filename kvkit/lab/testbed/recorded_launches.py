"""Stand-ins for Triton's compiler, driver and launcher: launches are recorded, and nothing needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

Start = Callable[[Any, tuple[Any, ...]], None]
"""Stand-in for the start of a kernel: takes it and the arguments of Triton's launcher.

These are the grid's 3 sizes, the stream, the kernel's function and packed metadata, the launch's metadata,
the hooks before and after it, and the kernel's arguments.
"""


@dataclass
class RecordingDriver:
    """Triton's driver, with devices and streams that a test chooses.

    Args:
        start: called for each launch; None: launches do nothing.
        target: GPU to specialise kernels for; None: an H100.
        device: current device.
        streams: current stream by device; 0 by default.
        compiled: counts kernels that were compiled.
    """

    start: Start | None = None
    target: Any = None
    device: int = 0
    streams: tuple[int, ...] = (0,)
    compiled: int = 0

    def get_current_target(self) -> Any:
        """Return the GPU of all devices."""
        from triton.backends.compiler import GPUTarget

        return self.target or GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the current device."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """Return the current stream of a device."""
        return self.streams[device]

    def compile(self, src: Any, target: Any, options: dict[str, Any]) -> Any:
        """Return a kernel that knows what it was compiled for, with a launcher that calls `start`."""
        from triton.compiler import CompiledKernel

        self.compiled += 1
        kernel = object.__new__(CompiledKernel)
        kernel.src, kernel.name, kernel.hash = src, src.fn.__name__, f"{self.compiled}"
        kernel.metadata = SimpleNamespace(target=target, options=options)
        kernel.packed_metadata, kernel.function, kernel.module = (), self.compiled, None
        kernel._init_handles = lambda: None  # all that reads a device's module
        kernel._run = self._launcher(kernel)
        return kernel

    def _launcher(self, kernel: Any) -> Callable[..., None]:
        def nothing(*_: Any) -> None: ...

        if self.start is None:
            return nothing
        start = self.start

        def launch(*arguments: Any) -> None:
            metadata, enter, leave = arguments[6:9]
            if enter is not None:
                enter(metadata)
            start(kernel, arguments)
            if leave is not None:
                leave(metadata)

        return launch


@contextmanager
def recorded(stand_in: RecordingDriver) -> Iterator[RecordingDriver]:
    """Make a stand-in Triton's driver and compiler within this context."""
    import triton
    from triton.runtime import driver

    try:
        previous = driver.active
    except RuntimeError:  # no GPU
        previous = None
    driver.set_active(stand_in)
    try:
        with mock.patch.object(triton.compiler, "compile", stand_in.compile):
            yield stand_in
    finally:
        driver.set_active(previous)
