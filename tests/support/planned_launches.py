"""Checks of planned launches, for a process that does not interpret kernels: prints the faults as JSON.

Nothing is compiled or started: `recorded_launches` stands in for Triton's compiler, driver and launcher.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import kernel_fixtures
import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvkit.kernels.attention import triton as attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages.memory import Pages
from kvkit.kernels.pages.moves import SMOLLM
from kvkit.kernels.pages.triton import move
from kvkit.kernels.pages.triton_kernels import copy_rows
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.planned import LaunchPlan, PlannedArguments
from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.uploads import DeviceArray
from kvkit.lab.testbed.recorded_launches import RecordingDriver, recorded

CPU = torch.device("cpu")


class Recorder:
    """Launches as Triton's launcher gets them, and how many of them went through Triton's `run`.

    Args:
        driver: fields of the `RecordingDriver`.
    """

    def __init__(self, **driver: Any) -> None:
        self.driver = RecordingDriver(self._start, **driver)
        self.started: list[tuple[Any, ...]] = []
        self.kept: list[Any] = []  # so that no other object gets the id of one of these
        self.through_triton = 0

    def _start(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        without_metadata = *arguments[:6], *arguments[9:]
        self.kept.append(arguments)
        # objects by identity: an equal tensor is another one
        self.started.append(
            (id(kernel), *[x if isinstance(x, int | float | str) else id(x) for x in without_metadata])
        )

    def run(self, launch: Launch) -> tuple[Any, ...]:
        """Run a launch; return what was started."""
        launch.run()
        return self.started[-1]

    def plain(self, launch: Launch) -> tuple[Any, ...]:
        """Run a launch by Triton's own `kernel[grid](...)`; return what was started."""
        launch.kernel[launch.grid](**launch._kernel_arguments())
        self.through_triton -= 1
        return self.started[-1]


@contextmanager
def recorder(**driver: Any) -> Iterator[Recorder]:
    found, run = Recorder(**driver), JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.through_triton += 1
        return run(self, *args, **kwargs)

    kernels = attention.attend, attention.merge, attention.scatter_rows, kernel_fixtures.taking_kernel
    for kernel in (*kernels, copy_rows):  # compiled by another check
        kernel.device_caches.clear()
    with recorded(found.driver), mock.patch.object(JITFunction, "run", counted):
        yield found


class Layer:
    """An attention of few rows to pages, planned once."""

    def __init__(self, keys: int = 40) -> None:
        self.rows = Rows.of(
            np.array([3, keys - 1]), np.array([0, 2]), np.array([keys]), np.arange(40)[None], 16
        )
        pages = torch.empty(40, 2, 16, 64, dtype=torch.float16)
        self.k, self.v = pages.split(32, 3)
        self.q, self.out = (torch.empty(2, 4, 32, dtype=torch.float16) for _ in range(2))
        self.lse = torch.empty(2, 4)

    def launch(self, **changes: torch.Tensor) -> Launch:
        """Return the launch of `attend` for other tensors of the same form."""
        tensors = {"q": self.q, "out": self.out, "lse": self.lse} | changes
        config = KernelConfig((("TILE_ROWS", 16), ("TILE_KEYS", 16)), 4, 2)
        q, out, lse = tensors.values()
        return attention.attention(q, self.k, self.v, self.rows, Scoring(1.0), out, lse, config)[0]


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form, 2 bytes after a multiple of 16."""
    memory = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    assert memory.data_ptr() % 16 == 0
    return memory[1 : 1 + tensor.numel()].view(tensor.shape)


def test_every_kernel_gets_what_triton_would_pass() -> None:
    """Of all problems: the same compiled kernel, grid, stream and arguments, and Triton is asked once."""
    with recorder() as record:
        checked = set[str]()
        for problem in every_problem():
            if problem.host:
                continue
            for launch in problem.make(CPU, False).launches(None):
                if not isinstance(launch, Launch):
                    continue
                plain = record.plain(launch)
                assert record.run(launch) == plain, problem.name
                if isinstance(launch.arguments, PlannedArguments):
                    before = record.through_triton
                    assert record.run(launch) == plain, problem.name
                    assert record.through_triton == before, f"{problem.name}: not planned"
                    checked.add(launch.kernel.__name__)
        wanted = {"attend", "merge", "scatter_rows", "copy_rows", "decode_rows", "encode_rows"}
        assert checked == wanted, checked


def test_another_layer_passes_its_own_tensors() -> None:
    layer = Layer()
    with recorder() as record:
        record.run(layer.launch())
        for _ in range(3):
            launch = layer.launch(q=torch.empty_like(layer.q), out=torch.empty_like(layer.out))
            planned = record.run(launch)
            assert record.through_triton == 1
            assert planned == record.plain(launch)
        assert record.driver.compiled == 1


def test_an_unaligned_tensor_gets_another_kernel() -> None:
    layer = Layer()
    with recorder() as record:
        aligned = record.run(layer.launch())
        for name in ("q", "out", "lse"):
            launch = layer.launch(**{name: unaligned(getattr(layer, name))})
            for _ in range(2):
                found = record.run(launch)
                assert found == record.plain(launch)
                assert found[0] != aligned[0], name
        assert record.driver.compiled == 4
        assert record.run(layer.launch())[0] == aligned[0]
        assert record.through_triton == 4


def test_another_dtype_gets_another_kernel() -> None:
    layer = Layer()
    with recorder() as record:
        first = record.run(layer.launch())
        launch = layer.launch(out=layer.out.float())
        assert record.run(launch)[0] != first[0]
        assert record.run(launch) == record.plain(launch)


def test_the_current_device_and_stream_are_used() -> None:
    layer = Layer()
    with recorder(streams=(7, 9)) as record:
        kernels = []
        for device, streams in ((0, (7, 9)), (1, (7, 9)), (0, (8, 9)), (1, (8, 10)), (0, (7, 9))):
            record.driver.device, record.driver.streams = device, streams
            launch = layer.launch()
            found = record.run(launch)
            assert found == record.plain(launch)
            assert found[4] == streams[device]
            kernels.append(found[0])
        assert kernels == [kernels[0], kernels[1], kernels[0], kernels[1], kernels[0]]
        assert kernels[0] != kernels[1]
        assert record.through_triton == 2


def test_launch_hooks_are_called() -> None:
    layer, called = Layer(), list[tuple[str, str]]()
    runtime = knobs.runtime

    def enter(metadata: Any) -> None:
        called.append(("enter", metadata.get()["name"]))

    def leave(metadata: Any) -> None:
        called.append(("exit", metadata.get()["name"]))

    with recorder() as record:
        record.run(layer.launch())
        assert called == []
        runtime.launch_enter_hook.add(enter)
        planned = record.run(layer.launch())
        runtime.launch_exit_hook.add(leave)
        record.run(layer.launch())
        runtime.launch_enter_hook.remove(enter)
        record.run(layer.launch())
        runtime.launch_exit_hook.remove(leave)
        record.run(layer.launch())
        assert record.through_triton == 1
        assert planned == record.started[0]
    assert called == [("enter", "attend"), ("enter", "attend"), ("exit", "attend"), ("exit", "attend")]


def test_hooks_before_a_run_are_called() -> None:
    layer, called = Layer(), list[Any]()

    def hook(*_: Any, **given: Any) -> None:
        called.append(given["q"])

    with recorder() as record:
        record.run(layer.launch())
        attention.attend.add_pre_run_hook(hook)
        try:
            record.run(layer.launch())
        finally:
            attention.attend.pre_run_hooks.remove(hook)
        record.run(layer.launch())
    assert len(called) == 1
    assert called[0] is layer.q


def test_settings_that_change_kernels_count() -> None:
    layer = Layer()
    with recorder() as record:
        first = record.run(layer.launch())
        with knobs.runtime.scope():
            knobs.runtime.debug = True
            launch = layer.launch()
            debugged = record.run(launch)
            assert debugged == record.plain(launch)
            assert debugged[0] != first[0]
        with knobs.compilation.scope():
            knobs.compilation.instrumentation_mode = "other"
            assert record.run(layer.launch())[0] not in (first[0], debugged[0])
        assert record.run(layer.launch()) == first


def test_a_changed_copy_of_a_launch_goes_through_triton() -> None:
    layer = Layer()
    with recorder() as record:
        launch = layer.launch()
        first = record.run(launch)
        other = replace(launch, config=launch.config._replace(warps=8))
        capped = replace(launch, arguments={**launch.arguments, "WINDOWED": True})
        for copy in (other, capped):
            for _ in range(2):
                assert record.run(copy)[0] != first[0]
        wider = replace(launch, grid=(3, 2))
        before = record.through_triton
        assert record.run(wider)[1:4] == (3, 2, 1)
        assert record.through_triton == before


def test_wide_integers_get_another_kernel() -> None:
    (given, *_) = kernel_fixtures.taking_launches()
    shared = dict(given.arguments)
    tensor = shared.pop("tensor")
    del shared["plain"]
    plan = LaunchPlan(given.kernel, given.config, shared, ("tensor",), ("plain",))
    with recorder() as record:
        kernels = []
        for number in (5, 16, 1 << 31, 1, -(1 << 31), -(1 << 31) - 1):
            launch = Launch(plan.kernel, (1,), plan.arguments(tensor, number), plan.config)
            assert record.run(launch) == record.plain(launch)
            kernels.append(record.run(launch)[0])
        narrow, wide = kernels[0], kernels[2]
        assert kernels == [narrow, narrow, wide, narrow, narrow, wide]
        assert narrow != wide
        assert record.through_triton == 2


def test_other_tritons_are_called_by_their_public_way() -> None:
    layer = Layer()
    with recorder() as record:
        first = record.run(layer.launch())
        layer.launch().arguments.plan._known_launcher = False  # type: ignore[attr-defined]
        assert record.run(layer.launch()) == first
        assert record.through_triton == 1


def test_gpus_of_amd_go_through_triton() -> None:
    layer = Layer()
    with recorder(target=GPUTarget("hip", "gfx942", 64)) as record:
        for _ in range(3):
            record.run(layer.launch())
        assert record.through_triton == 3


def test_uploaded_arrays_get_the_kernel_of_tensors() -> None:
    """Aligned and not, by Triton's own launch and by the plan."""
    pages = Pages.of(SMOLLM, SMOLLM.pages(2))
    launch = move(pages, [4096], np.array([[0, 1]]), True)
    plan, (*tensors, tokens, count, tiles, total) = launch.arguments.plan, launch.arguments.own  # type: ignore[attr-defined]
    numbers = tokens, count, tiles, total
    with recorder() as record:
        first = record.run(launch)
        for shift, compiled in ((0, 1), (8, 2)):
            own = *(DeviceArray(each, each.data_ptr() + shift, each.dtype, 1) for each in tensors), *numbers
            other = replace(launch, arguments=plan.arguments(*own))
            for run in (record.plain, record.run, record.run):
                found = run(other)
                assert (found[0] == first[0]) is (shift == 0)
                assert set(found) >= {id(each) for each in own[:-4]}
            assert record.driver.compiled == compiled
        assert record.through_triton == 2


def fault(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


CHECKS = {name: value for name, value in globals().items() if name.startswith("test_")}

if __name__ == "__main__":
    print(json.dumps({name: fault(check) for name, check in CHECKS.items()}))
