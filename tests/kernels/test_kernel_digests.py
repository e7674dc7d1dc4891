"""A kernel's digest changes with its code and the code that it calls, and with nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.tuning.source import SourceError, source_digest

HELPER = "def half(x):\n    return x // 2\n"
MODULE = '''import numba
import triton
import triton.language as tl
import helper

SIZE = 3
STEPS: tl.constexpr = tl.constexpr(4)

@triton.jit
def device(x):
    """What it calls."""
    return x * STEPS  # a comment

@triton.jit
def kernel(x):
    tl.store(x, device(SIZE))

@numba.njit
def inner(n):
    return n + SIZE

@numba.njit
def host(n):
    return inner(n)

def plain(n):
    return host(n) + helper.half(n)
'''


def load(path: Path, text: str, helper: str = HELPER) -> ModuleType:
    path.mkdir()
    (path / "helper.py").write_text(helper)
    (path / "module.py").write_text(text)
    found = []
    for name in ("helper", "module"):
        spec = importlib.util.spec_from_file_location(name, path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        found.append(module)
    return found[1]


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("helper", "module"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("x * STEPS", "STEPS * x", {"kernel"}),
        ("constexpr(4)", "constexpr(5)", {"kernel"}),
        ("SIZE = 3", "SIZE = 5", {"kernel", "host", "plain"}),
        ("n + SIZE", "n - SIZE", {"host", "plain"}),
        ("return inner(n)", "return 2 * inner(n)", {"host", "plain"}),
        ("import numba\n", "import numba\n\n\n# further down\n", set()),
        ('"""What it calls."""', '"""Other words."""', set()),
        ("  # a comment", "", set()),
        ("x // 2", "x // 3", {"plain"}),
        ("import helper\n", "import helper\nn = x = 7\n", set()),
    ],
)
def test_what_changes_the_digest(tmp_path: Path, old: str, new: str, changed: set[str]) -> None:
    assert (MODULE + HELPER).count(old) == 1
    before = load(tmp_path / "before", MODULE)
    after = load(tmp_path / "after", MODULE.replace(old, new), HELPER.replace(old, new))
    names = "kernel", "host", "plain"
    found = {n for n in names if source_digest(getattr(before, n)) != source_digest(getattr(after, n))}
    assert found == changed


def test_it_is_the_same_in_every_process_interpreted_or_not() -> None:
    script = (
        "from kvkit.kernels.tuning.problems import every_problem\n"
        "from kvkit.kernels.tuning.source import source_digest\n"
        "print(*(source_digest(problem.kernel) for problem in every_problem()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ['TRITON_INTERPRET'] = '0'\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [source_digest(problem.kernel) for problem in every_problem()]


@pytest.mark.parametrize("kernel", [3, len, None, int])
def test_what_is_no_function_is_refused(kernel: object) -> None:
    with pytest.raises(SourceError, match="want a Triton kernel, a numba function or a function"):
        source_digest(kernel)


def test_a_function_without_source_is_named() -> None:
    names: dict[str, object] = {"__name__": "nowhere"}
    exec("def typed(): pass", names)
    with pytest.raises(SourceError, match=r"nowhere\.typed: no source"):
        source_digest(names["typed"])
