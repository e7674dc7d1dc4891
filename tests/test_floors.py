"""The floors of the house: which module may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "kvkit"
# lowest first; modules of one floor may import each other only where the line says so
FLOORS = (
    ("layout", "rope", "xxh3", "environment", "threads", "promises"),
    ("chunks", "policy", "eviction"),
    ("record", "blend"),
    ("codecs", "arrays"),
    ("plan",),
    ("kernels", "staging"),
    ("tiers",),
    ("handoff",),
    ("testing", "sequence", "counts", "transfers", "puts", "quarantine"),
    ("access",),
    ("reads", "write_backs"),
    ("loads", "stores"),
    ("layers",),
    ("cache",),
    ("metrics", "connections"),
    ("server",),
    ("config", "top", "blending"),
    ("adapters", "simulate", "listing"),
    ("demo", "quality", "bench"),
    ("cli",),
)
PURE = (
    "layout",
    "rope",
    "chunks",
    "record",
    "blend",
    "codecs",
    "plan",
    "policy",
    "eviction",
    "counts",
    "handoff.messages",
    "handoff.outgoing",
    "handoff.states",
    "bench.workloads",
    "adapters.vllm.answers",
    "adapters.vllm.openai",
    "adapters.vllm.routing",
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
PACKAGES = ("kernels", "tiers", "handoff", "adapters", "simulate", "bench")


def modules() -> list[str]:
    """Dotted names below kvkit, symlinked folders included."""
    files = [*ROOT.glob("*.py"), *(f for package in PACKAGES for f in (ROOT / package).rglob("*.py"))]
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
        inside = package in PACKAGES and name.startswith(f"kvkit.{package}.")
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
