"""Rooms import only from lower floors; rooms, files and functions stay within their sizes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from repository import ROOT

PACKAGE = ROOT / "kvkit"
# lowest first; rooms of one floor do not import each other
FLOORS = (
    ("format", "workers", "environment"),
    ("kernels", "settings", "staging"),
    ("tiers", "blend"),
    ("transfer",),
    ("cache", "handoff"),
    ("observe",),
    ("config",),
    ("adapters", "doctor", "router"),
    ("cli",),
    ("lab",),
)
PURE = (
    "format.arrays",
    "format.codecs",
    "format.keys",
    "format.layout",
    "format.names",
    "format.quantised",
    "format.record",
    "format.rope",
    "blend.plan",
    *(f"blend.methods.{path.stem}" for path in (PACKAGE / "blend" / "methods").glob("[a-z]*.py")),
    "tiers.eviction.policies",
    "tiers.eviction.state",
    "transfer.counters",
    "transfer.plan",
    "transfer.policy",
    "transfer.requests",
    "handoff.protocol.messages",
    "handoff.protocol.outgoing",
    "handoff.protocol.states",
    "router.answers",
    "router.openai",
    "router.routing",
    "lab.prove.scenarios",
    "lab.prove.verdict",
    "lab.serve.workloads",
)
IMPURE = {
    "asyncio",
    "concurrent",
    "fsspec",
    "io",
    "os",
    "pathlib",
    "random",
    "socket",
    "subprocess",
    "threading",
    "time",
}
IN_VLLM = ("lab.prove.page_probe", "lab.quality.teacher_forcing")
"""What vLLM imports into its own processes."""
HEAVY = {"jax", "triton", "vllm", "transformers"}
FLOORS_AT_MOST, ENTRIES_AT_MOST, PARAMETERS_AT_MOST = 10, 20, 8
CLASS_LINES_AT_MOST, FUNCTION_LINES_AT_MOST = 300, 60
EXCEPTED = {"kvkit/cache.py: Cache": 396}
"""The public class, a third of which is docstrings: 33 methods of at most 31 lines."""
ROOM_LINES_AT_MOST = {
    "adapters/engine": 1_850,
    "adapters/huggingface": 1_900,
    "adapters/jax": 280,
    "adapters/lmcache": 400,
    "adapters/sglang": 400,
    "adapters/vllm": 9_480,
    "adapters/vllm_tier": 400,
    "kernels": 380,
    "kernels/attention": 4_550,
    "kernels/pages": 3_360,
    "kernels/tuning": 3_700,
    "kvkit": 2_100,
    "kvkit/blend": 1_600,
    "kvkit/doctor": 600,
    "kvkit/format": 1_900,
    "kvkit/handoff": 5_500,
    "kvkit/lab": 11_770,
    "kvkit/observe": 1_300,
    "kvkit/router": 4_130,
    "kvkit/tiers": 7_180,
    "kvkit/transfer": 4_050,
}
"""Lines of code by room, blank ones and docstrings included."""
CORE_LINES_AT_MOST = 54_500
"""Lines of all rooms but the laboratory."""
KERNELS = re.compile(r"(?:triton\.|gluon\.|numba\.|_)?n?jit\b")
"""What decorates a function that Triton or numba compiles: its parameters are registers and pointers, as are
those of type `jax.Ref` of a function that Pallas compiles."""
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def modules() -> list[str]:
    """Dotted names below kvkit, symlinked folders included."""
    folders = [folder for folder in PACKAGE.iterdir() if folder.is_dir()]
    files = [*PACKAGE.glob("*.py"), *(f for folder in folders for f in folder.rglob("*.py"))]
    names = [".".join(f.relative_to(PACKAGE).with_suffix("").parts) for f in files]
    return sorted(n for n in names if not n.endswith("__init__"))


@cache
def imports(module: str, top_level_only: bool = False) -> set[str]:
    """Absolute names that a module imports."""
    tree = ast.parse((PACKAGE / Path(*module.split("."))).with_suffix(".py").read_text())
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def graph() -> dict[str, set[str]]:
    """By module of kvkit, the others that it imports, within functions too."""
    every, found = set(modules()), {}
    for module in every:
        names = {n.removeprefix("kvkit.") for n in imports(module)}
        found[module] = (names | {name.rpartition(".")[0] for name in names}) & every - {module}
    return found


def files(*folders: str) -> list[Path]:
    """The Python files of some folders of the repository."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    )


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file but for compiled kernels."""
    for node in parsed(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = map(ast.unparse, node.decorator_list)
            if not any(map(KERNELS.match, decorators)) and "jax.Ref" not in ast.unparse(node.args):
                yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """What a caller gives: all but `self` and `cls`."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


@cache
def parsed(path: Path) -> list[ast.AST]:
    """Every node of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    """Every class of a file."""
    return (node for node in parsed(path) if isinstance(node, ast.ClassDef))


def long_ones() -> dict[str, int]:
    """Lines of the classes and functions that are longer than allowed, by file and name."""
    found = defaultdict[str, int](int)
    for path in files("kvkit", "kernels", "adapters"):
        limits = ((classes, CLASS_LINES_AT_MOST), (functions, FUNCTION_LINES_AT_MOST))
        for node, limit in ((node, limit) for nodes, limit in limits for node in nodes(path)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > limit:
                name = f"{path.relative_to(ROOT)}: {node.name}"
                found[name] = max(found[name], lines)
    return dict(found)


def room_lines() -> dict[str, int]:
    """Lines of each folder of kvkit, kernels and adapters, and of the files beside those folders."""
    found = defaultdict[str, int](int)
    for path in files("kvkit", "kernels", "adapters"):
        found["/".join(path.relative_to(ROOT).parent.parts[:2])] += len(path.read_text().splitlines())
    return dict(found)


def floor_of(dotted: str) -> int | None:
    parts = dotted.split(".")
    return FLOOR[parts[1]] if parts[0] == "kvkit" and len(parts) > 1 and parts[1] in FLOOR else None


def test_every_module_has_a_floor() -> None:
    assert {m.split(".")[0] for m in modules()} == set(FLOOR)
    assert len(FLOORS) <= FLOORS_AT_MOST


def test_the_root_of_kvkit_holds_few_entries() -> None:
    entries = [path.name for path in PACKAGE.iterdir() if not path.name.startswith((".", "__pycache__"))]
    assert len(entries) <= ENTRIES_AT_MOST, sorted(entries)


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_class_or_function_is_longer_than_a_reader_holds() -> None:
    found = long_ones()
    assert {name: lines for name, lines in found.items() if lines > EXCEPTED.get(name, 0)} == {}
    assert set(EXCEPTED) - set(found) == set(), "these are short now"


def test_no_room_outgrows_its_budget() -> None:
    found = room_lines()
    assert found.keys() == ROOM_LINES_AT_MOST.keys()
    assert {room: lines for room, lines in found.items() if lines > ROOM_LINES_AT_MOST[room]} == {}
    assert sum(found.values()) - found["kvkit/lab"] <= CORE_LINES_AT_MOST


def test_no_function_takes_more_than_a_reader_holds() -> None:
    many = {
        f"{path.relative_to(ROOT)}: {function.name}": len(parameters(function))
        for path in files("kvkit", "kernels", "adapters")
        for function in functions(path)
        if len(parameters(function)) > PARAMETERS_AT_MOST
    }
    assert many == {}


def test_imports_come_from_lower_floors() -> None:
    wrong = []
    for module in modules():
        package = module.split(".")[0]
        own = FLOOR[package]
        if module.endswith(
            ".commands"
        ):  # these may read a configuration, and nobody stands on them but the cli
            own = max(own, FLOOR["config"] + 1)
        for name in imports(module):
            floor = floor_of(name)
            inside = name.startswith(f"kvkit.{package}.") and (PACKAGE / package).is_dir()
            if not (floor is None or inside or floor < own) or (package != "cli" and ".commands." in name):
                wrong.append(f"kvkit.{module} imports {name}")
    assert wrong == []


def importing(names: set[str], found: Iterable[str], top_level_only: bool = False) -> dict[str, set[str]]:
    """By module of `found`, which of the packages `names` it imports; nothing of those that import none."""
    packages = {m: {name.split(".")[0] for name in imports(m, top_level_only)} & names for m in found}
    return {module: wrong for module, wrong in packages.items() if wrong}


def test_pure_modules_touch_nothing_outside() -> None:
    assert importing(IMPURE, PURE) == {}


def test_the_library_imports_no_engine_at_the_top() -> None:
    library = [m for m in modules() if m.split(".")[0] not in ("adapters", "kernels") and m not in IN_VLLM]
    assert importing(HEAVY, library, top_level_only=True) == {}


def test_what_every_engine_needs_imports_none() -> None:
    shared = [m for m in modules() if m.startswith("adapters.engine.")]
    assert shared
    assert importing(HEAVY, shared) == {}
    adapters = ("kvkit.adapters.vllm", "kvkit.adapters.huggingface")
    assert [m for m in shared if any(name.startswith(adapters) for name in imports(m))] == []


def test_the_router_knows_no_engine() -> None:
    router = [m for m in modules() if m.split(".")[0] == "router"]
    assert router
    assert importing(HEAVY | {"torch"}, router) == {}
    assert [m for m in router if any(name.startswith("kvkit.adapters") for name in imports(m))] == []


def test_an_import_of_an_engine_is_found() -> None:
    assert importing({"vllm"}, ["adapters.vllm.connector"]) == {"adapters.vllm.connector": {"vllm"}}


def test_no_init_shadows_another_package() -> None:
    for folder in ("kernels", "adapters"):
        assert not (PACKAGE.parent / folder / "__init__.py").exists()
        assert (PACKAGE / folder).is_symlink()
