"""docs/reference/structure.md and the glossary name rooms, files and words that exist."""

from __future__ import annotations

import ast
import re

import pytest
from repository import ROOT
from test_floors import FLOOR, FLOORS, PACKAGE, files

PAGE = (ROOT / "docs/reference/structure.md").read_text()
GLOSSARY = (ROOT / "docs/reference/glossary.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]


def quoted(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def members(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """The names that a module or a class defines, each with what is defined in it."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: [] for target in targets if isinstance(target, ast.Name)})
    return found


def is_there(name: str) -> bool:
    """Whether a dotted name below kvkit is a module, or something that one defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = PACKAGE.joinpath(*parts[:count]).with_suffix(".py")
        if module.exists():
            body = ast.parse(module.read_text()).body
            for part in parts[count:]:
                found = members(body)
                if part not in found:
                    return False
                body = found[part]
            return True
    return False


@pytest.mark.parametrize("text", [PAGE, GLOSSARY], ids=["structure", "glossary"])
def test_what_is_named_is_there(text: str) -> None:
    paths = [name for name in quoted(text) if re.fullmatch(r"[\w./-]*/[\w./-]*|\w+\.py", name)]
    names = [name for name in quoted(text) if re.fullmatch(r"[a-z_0-9]+(\.\w+)+", name) and name not in paths]
    assert len(names) + len(paths) > 20
    assert [name for name in names if not is_there(name)] == []
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, PACKAGE))] == []


@pytest.mark.parametrize(
    "name", ["transfer.nowhere", "cache.Cache.fetch", "cache.Cash", "staging.Lease.release.it"]
)
def test_what_is_not_there_is_found(name: str) -> None:
    assert not is_there(name)


def test_every_room_has_a_line_with_its_floor() -> None:
    lines = re.findall(r"^\| (\d+) \| `([\w.]+)/?` \|", PAGE, re.MULTILINE)
    listed = {room.removesuffix(".py"): int(floor) - 1 for floor, room in lines}
    assert listed == FLOOR
    assert [floor for floor, _ in lines] == sorted((floor for floor, _ in lines), key=int)
    assert len(FLOORS) == max(listed.values()) + 1


def test_every_thread_has_a_line() -> None:
    rows = [line for line in PAGE.split("\n## Where threads are\n")[1].splitlines() if line.startswith("| `")]
    listed = {re.sub("[A-Z]+", "*", name) for row in rows for name in quoted(row.split("|")[1])}
    started = set()
    for path in files("kvkit", "adapters"):
        if path.is_relative_to(ROOT / "kvkit/lab") or "testing" in path.parts:
            continue
        for call in re.findall(
            r'(?:Workers|Thread)\([^"\n]*(?:\n[^"\n)]*)*?f?"(kvkit-[^"]+)"', path.read_text()
        ):
            started.add(re.sub(r"\{[^}]+\}", "*", call))
    assert started <= listed
    assert len(started) > 8
