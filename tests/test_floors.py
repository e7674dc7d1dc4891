"""The floors of the house: which room may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "kvkit"
# lowest first; rooms of one floor do not import each other
FLOORS = (
    ("format", "workers", "environment"),
    ("kernels", "settings", "staging"),
    ("tiers", "blend"),
    ("moving",),
    ("handoff", "simulate"),
    ("cache", "observe"),
    ("config",),
    ("adapters", "router"),
    ("bench",),
    ("cli",),
)
PURE = (
    "format.arrays",
    "format.codecs",
    "format.keys",
    "format.layout",
    "format.record",
    "format.rope",
    "format.xxh3",
    "blend.plan",
    "tiers.eviction",
    "moving.counts",
    "moving.plan",
    "moving.policy",
    "handoff.protocol.messages",
    "handoff.protocol.outgoing",
    "handoff.protocol.states",
    "router.answers",
    "router.openai",
    "router.routing",
    "bench.workloads",
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
HEAVY = {"jax", "triton", "vllm", "transformers"}
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def modules() -> list[str]:
    """Dotted names below kvkit, symlinked folders included."""
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir()]
    files = [*ROOT.glob("*.py"), *(f for folder in folders for f in folder.rglob("*.py"))]
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    return sorted(n for n in names if not n.endswith("__init__"))


def imports(module: str, top_level_only: bool = False) -> set[str]:
    """Absolute names that a module imports."""
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def floor_of(dotted: str) -> int | None:
    parts = dotted.split(".")
    return FLOOR[parts[1]] if parts[0] == "kvkit" and len(parts) > 1 and parts[1] in FLOOR else None


def test_every_module_has_a_floor() -> None:
    assert {m.split(".")[0] for m in modules()} == set(FLOOR)


@pytest.mark.parametrize("module", modules())
def test_imports_come_from_lower_floors(module: str) -> None:
    package = module.split(".")[0]
    for name in imports(module):
        floor = floor_of(name)
        inside = name.startswith(f"kvkit.{package}.") and (ROOT / package).is_dir()
        assert floor is None or inside or floor < FLOOR[package], f"kvkit.{module} imports {name}"


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_touch_nothing_outside(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(module)} & IMPURE


@pytest.mark.parametrize("module", [m for m in modules() if m.split(".")[0] not in ("adapters", "kernels")])
def test_the_library_imports_no_engine_at_the_top(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(module, top_level_only=True)} & HEAVY


@pytest.mark.parametrize("folder", ["kernels", "adapters"])
def test_no_init_shadows_another_package(folder: str) -> None:
    assert not (ROOT.parent / folder / "__init__.py").exists()
    assert (ROOT / folder).is_symlink()
