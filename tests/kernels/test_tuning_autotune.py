"""Kernels of others run with kvkit's tables, and Triton's autotuner and kvkit read each other's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kvkit.kernels.tuning import Work, autotuned, tables
from kvkit.kernels.tuning.autotune import (
    AutotuneCache,
    TunedKernel,
    from_triton,
    read_autotune_cache,
    to_triton,
    write_autotune_cache,
)
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.search import NO_ROOFLINE, search
from kvkit.kernels.tuning.tables import Tuned, TunedKey, build_of, forget_tables, write_table

GPU = "NVIDIA H200"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def add_one(x, y, blocks, N, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    """y = x + 1 in the first N; `blocks` has the BLOCK that wrote."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < N) + OFFSET, mask=i < N)
    tl.store(blocks + tl.program_id(0), BLOCK)


SPACE = tuple(KernelConfig((("BLOCK", block),), 4, 2) for block in (64, 128, 32))
KERNEL: TunedKernel = autotuned(SPACE, ["N", "OFFSET"])(triton.jit(add_one))


def grid(meta: Mapping[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["BLOCK"]),)


def run(kernel: TunedKernel, count: int, by_name: bool = False) -> int:
    """Run a kernel, check what it wrote and what it did not, and return its BLOCK."""
    x, y = torch.randn(count, device=DEVICE), torch.full((count + 7,), torch.nan, device=DEVICE)
    blocks = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    if by_name:
        kernel[grid](x=x, y=y, blocks=blocks, N=count, OFFSET=1)
    else:
        kernel[grid](x, y, blocks, count, OFFSET=1)
    assert torch.equal(y[:count], x + 1)
    assert y[count:].isnan().all()
    return int(blocks[0])


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of this user's table, which does not exist; the GPU here is an H200."""
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path))
    monkeypatch.setattr(tables, "gpu_name", lambda: GPU)
    forget_tables()
    yield tmp_path / "nvidia-h200.json"
    forget_tables()


FORM = "float32 float32 int32"


def test_a_kernel_of_others_takes_what_was_tuned(table: Path) -> None:
    assert run(KERNEL, 100) == 64, "the default"
    bucket = ProblemBucket("add_one", FORM, (128, 1))
    key = TunedKey(bucket, build_of(add_one, False))
    write_table(table, GPU, {key: Tuned(SPACE[2], 1.0, 2.0)})
    assert run(KERNEL, 100) == run(KERNEL, 128, by_name=True) == 32
    far = TunedKey(ProblemBucket("add_one", FORM, (4096, 1)), build_of(add_one, False))
    write_table(table, GPU, {key: Tuned(SPACE[2], 1.0, 2.0), far: Tuned(SPACE[1], 1.0, 2.0)})
    assert run(KERNEL, 3000) == 128
    assert run(KERNEL, 200) == 32, "of the nearest size"


def test_what_a_bucket_depends_on() -> None:
    x, half = torch.empty(1), torch.empty(1, dtype=torch.float16)
    blocks = torch.empty(1, dtype=torch.int32)
    assert KERNEL.bucket(x, half, blocks, 65, OFFSET=True) == ProblemBucket(
        "add_one", "float32 float16 int32 OFFSET=True", (128,)
    )
    assert KERNEL.bucket(x, y=half, blocks=blocks, N=0) == ProblemBucket(
        "add_one", "float32 float16 int32 N=0", ()
    )


def test_above_the_autotuner_it_takes_its_place() -> None:
    """The autotuner would run every configuration; this runs the first."""
    runs = list[int]()
    configs = [triton.Config({"BLOCK": 16}, num_warps=2), triton.Config({"BLOCK": 64}, maxnreg=128)]
    tuner = triton.autotune(configs, key=["N"])(triton.jit(add_one))
    kernel = autotuned()(tuner)
    assert kernel.configs == (
        KernelConfig((("BLOCK", 16),), 2, 3),
        KernelConfig((("BLOCK", 64), ("maxnreg", 128)), 4, 3),
    )
    assert kernel.key == ("N",)
    runs.append(run(kernel, 50))
    assert runs == [16]
    assert run(autotuned(configs[1:], key=[])(tuner), 50) == 64, "maxnreg is an option of the launch"


@pytest.mark.parametrize(
    "config",
    [
        triton.Config({"BLOCK": 64}),
        triton.Config({}, num_warps=8, num_stages=1, maxnreg=168),
        triton.Config({"A": 1, "B": 0}, num_ctas=2),
    ],
)
def test_configurations_come_back_from_kvkit(config: Any) -> None:
    assert to_triton(from_triton(config)) == config


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: autotuned()(triton.jit(add_one)), "add_one: want configs"),
        (lambda: autotuned([])(triton.jit(add_one)), "add_one: want configs"),
        (
            lambda: autotuned(SPACE, ["M"])(triton.jit(add_one)),
            r"key \['M'\]: want arguments, x, y, blocks, N",
        ),
        (lambda: from_triton(triton.Config({"A": "x"})), "whole numbers, got {'A': 'x'}"),
        (lambda: from_triton(triton.Config({"A": 1.5})), "whole numbers"),
        (lambda: from_triton(triton.Config({}, pre_hook=print)), "no pre_hook"),
        (lambda: from_triton(triton.Config({}, ir_override="x.ptx")), "ir_override"),
        (lambda: KERNEL.result(AutotuneCache((1,), {})), "want values of N, OFFSET"),
        (lambda: KERNEL.result(AutotuneCache((1, 1), {SPACE[0]: None})), "none of its configurations"),
    ],
)
def test_what_kvkit_cannot_take_is_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def cache_file(folder: Path, key: list[Any], milliseconds: Mapping[KernelConfig, float]) -> Path:
    """Write a file as Triton does."""
    timings = [[to_triton(config).__dict__, [ms, ms, 2 * ms]] for config, ms in milliseconds.items()]
    path = folder / "add_one.autotune.json"
    path.write_text(json.dumps({"key": key, "configs_timings": timings}))
    return path


def test_a_cache_of_the_autotuner_becomes_a_tuned_result(table: Path, tmp_path: Path) -> None:
    dtypes = ["torch.float32", "torch.float32", "torch.int32"]
    other = KernelConfig((("BLOCK", 999),), 4, 2)
    times = {SPACE[0]: 0.004, SPACE[1]: 0.002, SPACE[2]: float("inf"), other: 0.001}
    path = cache_file(tmp_path, [4096, 1, *dtypes], times)
    cache = read_autotune_cache(path)
    assert cache.key == (4096, 1, *dtypes)
    assert cache.us == {SPACE[0]: 4.0, SPACE[1]: 2.0, SPACE[2]: None, other: 1.0}
    assert run(KERNEL, 4000) == 64
    assert KERNEL.keep(path) == Tuned(SPACE[1], 2.0, 4.0, 1)
    assert run(KERNEL, 4000) == 128
    KERNEL.keep(cache_file(tmp_path, [64, 1, *dtypes], {SPACE[2]: 0.001}))
    assert [run(KERNEL, count) for count in (4000, 60)] == [128, 32], "merged"
    KERNEL.keep(path, device="NVIDIA A100")
    assert (tmp_path / "nvidia-a100.json").exists()


def test_a_cache_without_a_gpu_needs_a_name(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "gpu_name", lambda: None)
    with pytest.raises(ValueError, match="want the device that it was measured on"):
        KERNEL.keep(cache_file(tmp_path, [64, 1], {SPACE[2]: 0.001}))


@pytest.mark.parametrize("text", ["", "{}", '{"key": [], "configs_timings": [[{"x": 1}, [1.0]]]}', "[1]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: no cache of Triton's autotuner"):
        read_autotune_cache(tmp_path / "x.json")


def problem(wrong: float = 0.0, tolerance: float = 0.0) -> Any:
    def arguments(device: torch.device) -> dict[str, Any]:
        x = torch.arange(100, dtype=torch.float32, device=device)
        blocks = torch.zeros(100, dtype=torch.int32, device=device)
        return {"x": x, "y": torch.empty_like(x), "blocks": blocks, "N": 100, "OFFSET": 1}

    return KERNEL.problem(
        "add one to 100",
        arguments,
        grid,
        lambda given: {"y": given["x"] + 1 + wrong},
        work=Work(800),
        tolerance=tolerance,
    )


def test_its_problem_is_tuned_and_checked() -> None:
    one = problem()
    assert one.bucket == ProblemBucket("add_one", FORM, (128, 1))
    case = one.make(DEVICE, True)
    for config in SPACE:
        case.poison()
        assert case.fault().startswith("y: ")
        case.run(config)
        assert case.fault() == ""
    times = dict(zip(SPACE, (3.0, 2.0, 1.0), strict=True))
    tuned, _ = search(one, case, times.__getitem__, {}, NO_ROOFLINE)
    assert tuned == Tuned(SPACE[2], 1e6, 3e6)
    for wrong, tolerance, faulty in ((0.5, 0.0, True), (1e-3, 1e-2, False), (2.5, 1e-2, True)):
        case = problem(wrong, tolerance).make(DEVICE, True)
        case.run(SPACE[0])
        assert bool(case.fault()) == faulty


SCRIPT = """
import json, sys
from pathlib import Path
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from kvkit.kernels.tuning.autotune import from_triton, read_autotune_cache, write_autotune_cache
from kvkit.kernels.tuning.compiling import StandInDriver, driver_for

def tuner():
    configs = [triton.Config({"BLOCK": block}, maxnreg=block) for block in (64, 128, 32)]

    @triton.autotune(configs, key=["N"], cache_results=True)
    @triton.jit
    def copy(x, y, N, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < N), mask=i < N)

    return copy

def fail():
    raise AssertionError("it was measured again")

key = (4096, "torch.float32", "torch.float32")
with driver_for(StandInDriver(GPUTarget("cuda", 90, 32))):
    first = tuner()
    space = [from_triton(config) for config in first.configs]
    us = {space[0]: 4.0, space[1]: 2.0}
    write_autotune_cache(first, key, us)
    (path,) = Path(sys.argv[1]).rglob("*.autotune.json")
    cache = read_autotune_cache(path)
    assert path.name == "copy.autotune.json" and cache.key == key, path
    assert cache.us == us | {space[2]: None}, cache
    again = tuner()
    again.check_disk_cache(key, again.configs, fail)
    assert from_triton(again.cache[key]) == space[1]
print("read", triton.__version__)
"""


def test_the_autotuner_reads_what_kvkit_wrote(tmp_path: Path) -> None:
    """By Triton's own code, for a GPU that is not here."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("read ")


def test_times_that_triton_would_not_keep_are_refused() -> None:
    tuner = SimpleNamespace(configs=[triton.Config({"BLOCK": 64})], base_fn=add_one)
    for key, us, words in (((), {SPACE[0]: 1.0}, "want a key"), ((1,), {}, "none of its configurations")):
        with pytest.raises(ValueError, match=words):
            write_autotune_cache(tuner, key, us)
