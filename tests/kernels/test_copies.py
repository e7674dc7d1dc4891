"""Copies between a GPU and pinned memory are one call of the driver where it can, and any others torch's.

The driver is tests/support/batched_copies.c, which copies CPU memory; its tensors only claim to be on a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repository import SUPPORT
from run_sizes import examples
from test_pages_numba import Job, check, jobs

from kvkit.format.layout import LayerGroup
from kvkit.kernels.pages import copies, device
from kvkit.kernels.pages.copies import BatchedCopy, Copies, CopyError
from kvkit.kernels.pages.device import DeviceMove, Pages
from kvkit.kernels.tuning.configs import Launch

STREAM = 0x7F0000001234
VERSIONS = ("CUDA_12", "CUDA_13")
NO_COPY = 2**64 - 1


class Attributes(ctypes.Structure):
    """What the driver was given, as its own compiler lays it out."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


@dataclass
class Driver:
    """A stand-in for the driver's library, and what it notes."""

    library: Any

    def read(self, name: str, kind: Any = ctypes.c_size_t) -> Any:
        return kind.in_dll(self.library, name)

    @property
    def calls(self) -> int:
        return int(self.read("calls").value)

    def fail(self, error: int, copy: int = NO_COPY) -> None:
        self.read("answer", ctypes.c_int).value = error
        self.read("failed_copy").value = copy


Build = Callable[[str], Driver]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Makes a driver of a version of CUDA. That takes a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None and not os.environ.get("CI"):
        pytest.skip("there is no cc to build tests/support/batched_copies.c")
    assert compiler is not None, "there is no cc to build tests/support/batched_copies.c"

    def made(version: str) -> Driver:
        library, source = tmp_path / f"lib{version}.so", SUPPORT / "batched_copies.c"
        options = ["-Wall", "-Werror", "-shared", "-fPIC", f"-D{version}"]
        subprocess.run([compiler, *options, "-o", library, source], check=True)
        return Driver(ctypes.CDLL(str(library)))

    return made


@dataclass
class Memory:
    """Memory that claims to be a GPU's, pinned or pageable; it counts torch's copies into it."""

    tensor: torch.Tensor
    kind: str
    copied: list[Any] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "gpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1) if self.is_cuda else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def is_pinned(self) -> bool:
        return self.kind == "pinned"

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        self.copied.append(source)
        assert non_blocking
        self.tensor.copy_(source.tensor)


class Batch:
    """Copies of odd sizes between parts of two arenas, with room between them."""

    def __init__(self, *kinds: tuple[str, str]) -> None:
        sizes = [7 * i + 1 for i in range(len(kinds))]
        starts = np.cumsum([3, *(size + 5 for size in sizes)])
        self.targets = torch.full((int(starts[-1]),), 0xA5, dtype=torch.uint8)
        self.sources = torch.randint(0, 256, self.targets.shape, dtype=torch.uint8)
        self.inside = torch.zeros(self.targets.shape, dtype=torch.bool)
        self.pairs: list[Any] = []
        for (to, source), start, size in zip(kinds, starts.tolist(), sizes, strict=False):
            span = slice(start, start + size)
            self.inside[span] = True
            self.pairs.append((Memory(self.targets[span], to), Memory(self.sources[span], source)))

    @property
    def singly(self) -> int:
        """How many copies torch has made."""
        return sum(len(target.copied) for target, _ in self.pairs)

    @property
    def is_copied(self) -> bool:
        """Whether all bytes are copied, and no others written."""
        return torch.equal(self.targets, torch.where(self.inside, self.sources, 0xA5))

    @property
    def is_untouched(self) -> bool:
        return bool((self.targets == 0xA5).all())


UP, DOWN = ("gpu", "pinned"), ("pinned", "gpu")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The handle of the current stream of GPU 1, which a test may change."""
    handle = [STREAM]

    def current_stream(of: torch.device) -> Any:
        assert of == torch.device("cuda", 1)
        return SimpleNamespace(cuda_stream=handle[0])

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return handle


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    """Makes a driver this process's."""

    def used(driver: Driver) -> Driver:
        call = BatchedCopy(driver.library)
        monkeypatch.setattr(copies, "batched_copy", lambda: call)
        return driver

    return used


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("count", [2, 5, 64])
def test_one_call_has_all_copies(
    version: str, way: tuple[str, str], count: int, build: Build, use: Any, stream: list[int]
) -> None:
    driver, batch = use(build(version)), Batch(*[way] * count)
    Copies(batch.pairs).run()
    assert batch.is_copied
    assert (driver.calls, batch.singly) == (1, 0)
    assert driver.read("count").value == count
    for name, wanted in (
        ("targets", [target.data_ptr() for target, _ in batch.pairs]),
        ("sources", [source.data_ptr() for _, source in batch.pairs]),
        ("sizes", [target.nbytes for target, _ in batch.pairs]),
    ):
        assert list(driver.read(name, ctypes.c_uint64 * 64))[:count] == wanted
    attributes = driver.read("attributes", Attributes)
    assert attributes.order == 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM in cuda.h
    assert attributes.flags == 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    assert list(attributes.hints) == [0] * 4
    assert (driver.read("first_copy").value, driver.read("attribute_count").value) == (0, 1)
    assert driver.read("stream", ctypes.c_void_p).value == STREAM


@pytest.mark.parametrize("handle", [0, 1, 2, STREAM])
def test_the_legacy_default_stream_has_no_batches(
    handle: int, build: Build, use: Any, stream: list[int]
) -> None:
    """0 and CU_STREAM_LEGACY; a thread's own default stream is fit."""
    stream[0] = handle
    driver, batch = use(build("CUDA_13")), Batch(UP, UP, UP)
    Copies(batch.pairs).run()
    assert batch.is_copied
    assert (driver.calls, batch.singly) == ((0, 3) if handle < 2 else (1, 0))


@pytest.mark.parametrize(
    "kinds",
    [
        (),
        (UP,),
        (("gpu", "pageable"),) * 2,
        (("pageable", "gpu"),) * 2,
        (UP, UP, ("gpu", "pageable")),
        (("gpu", "gpu"),) * 3,
        (UP, ("gpu", "gpu")),
        (("pinned", "pinned"),) * 2,
    ],
)
def test_other_copies_are_torchs(kinds: Any, build: Build, use: Any, stream: list[int]) -> None:
    """One alone, pageable memory, and copies within a device."""
    driver, batch = use(build("CUDA_13")), Batch(*kinds)
    Copies(batch.pairs).run()
    assert batch.is_copied
    assert (driver.calls, batch.singly) == (0, len(kinds))


def test_copies_can_be_kept_apart(build: Build, use: Any, stream: list[int]) -> None:
    driver, batch = use(build("CUDA_13")), Batch(UP, UP)
    Copies(batch.pairs).run_singly()
    assert batch.is_copied
    assert (driver.calls, batch.singly) == (0, 2)


def test_an_older_driver_copies_one_by_one(build: Build, use: Any, stream: list[int]) -> None:
    use(build("CUDA_11"))
    batch = Batch(DOWN, DOWN)
    assert not copies.can_batch()
    Copies(batch.pairs).run()
    assert batch.is_copied
    assert batch.singly == 2


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_no_driver_or_amds_has_no_batches(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(
        copies, "cuda_driver", lambda: None if hip is None else pytest.fail("NVIDIA's driver was loaded")
    )
    copies.batched_copy.cache_clear()
    try:
        assert copies.batched_copy() is None
        assert not copies.can_batch()
        batch = Batch(UP, UP)
        Copies(batch.pairs).run()
        assert batch.is_copied
    finally:
        copies.batched_copy.cache_clear()


@pytest.mark.parametrize("error", [34, 36, 500, 801])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_call_that_is_not_supported_is_made_and_logged_once(
    version: str,
    error: int,
    build: Build,
    use: Any,
    stream: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = use(build(version))
    driver.fail(error)
    assert copies.can_batch()
    with caplog.at_level(logging.WARNING, copies.__name__):
        for _ in range(3):
            batch = Batch(UP, UP)
            Copies(batch.pairs).run()
            assert batch.is_copied
            assert batch.singly == 2
    assert driver.calls == 1
    assert not copies.can_batch()
    (line,) = caplog.messages
    assert f"cuMemcpyBatchAsync{'_v2' if version == 'CUDA_13' else ''} is not supported here" in line
    assert f"error {error}" in line
    assert ("CUDA_ERROR_NOT_SUPPORTED" in line) == (error == 801)


@pytest.mark.parametrize(
    ("version", "error", "copy", "words"),
    [
        ("CUDA_13", 700, 1, "cuMemcpyBatchAsync_v2 of 3 copies: CUDA error 700 CUDA_ERROR_ILLEGAL_ADDRESS"),
        (
            "CUDA_12",
            700,
            NO_COPY,
            "cuMemcpyBatchAsync of 3 copies: CUDA error 700 CUDA_ERROR_ILLEGAL_ADDRESS",
        ),
        ("CUDA_12", 1, 2, "cuMemcpyBatchAsync of 3 copies, copy 2: CUDA error 1"),
        ("CUDA_12", 1, 0, "cuMemcpyBatchAsync of 3 copies, copy 0: CUDA error 1"),
    ],
)
def test_other_errors_name_the_call_and_the_code(
    version: str, error: int, copy: int, words: str, build: Build, use: Any, stream: list[int]
) -> None:
    """They are not hidden by copying otherwise, and the next batch is tried."""
    driver, batch = use(build(version)), Batch(DOWN, DOWN, DOWN)
    driver.fail(error, copy)
    with pytest.raises(CopyError) as raised:
        Copies(batch.pairs).run()
    assert str(raised.value) == words
    assert batch.is_untouched
    driver.fail(0)
    Copies(batch.pairs).run()
    assert batch.is_copied
    assert driver.calls == 2


@pytest.fixture
def batches(build: Build, use: Any, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver that takes all copies, of whatever tensors."""
    monkeypatch.setattr(copies, "_batch_stream", lambda pairs: STREAM if pairs else None)
    driver: Driver = use(build("CUDA_13"))
    return driver


@pytest.mark.parametrize("to_records", [True, False])
def test_batches_and_kernels_are_in_order(to_records: bool, batches: Driver) -> None:
    """Each batch is queued before the kernel that reads it, and after the one that writes it."""
    group = LayerGroup((0,), 1, 4, 0, "uint8", block_tokens=2)
    pages, records = Pages.of(group, group.pages(8)), [torch.zeros(8, dtype=torch.uint8) for _ in range(5)]
    wanted = DeviceMove(pages, np.array([[0], [1], [-1], [3], [4]]), False, to_records)
    done: list[str] = []
    for step in device.steps(wanted, records, [None] * 5, 2 * 64):
        before = batches.calls
        step.run()
        done.append("kernel" if isinstance(step, Launch) else f"{len(step.pairs)} copies")
        assert batches.calls - before == (0 if isinstance(step, Launch) or not step.pairs else 1)
    if to_records:  # the third record has a skipped block, and is read first
        turns = [("0 copies", "2 copies"), ("1 copies", "2 copies"), ("0 copies", "1 copies")]
        assert done == [part for read, written in turns for part in (read, "kernel", written)]
    else:
        assert done == ["2 copies", "kernel", "2 copies", "kernel", "1 copies", "kernel"]


@settings(
    max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(job=jobs(), budget=st.integers(0, 5000))
def test_any_layout_in_batches(job: Job, budget: int, batches: Driver) -> None:
    """Exactly the named bytes change, on both sides."""

    def move(pages: Pages, records: list[Any], job: Job, to_records: bool) -> None:
        tensors = [device._tensor(record) for record in records]
        wanted, before = DeviceMove(pages, job.ids, job.granular == "slots", to_records), batches.calls
        for step in device.steps(wanted, tensors, [None] * len(tensors), budget):
            step.run()
        assert batches.calls > before or not records

    check(job, move)
