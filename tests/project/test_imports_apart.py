"""Benchmarks import no tests, and tests import benchmarks only where those, or their results, are tested."""

from __future__ import annotations

import ast

import pytest
from repository import ROOT, SUPPORT, TESTS
from test_floors import files

TESTING_BENCHMARKS = ("tests/benchmarking", "tests/project")
"""Benchmarks themselves, and pages and a paper that show their results."""
OF_TESTS = {"tests", *(path.stem for folder in (TESTS, SUPPORT) for path in folder.iterdir())}
"""What is imported from tests: the folders on pytest's `pythonpath`, and what lies in them."""


def imported(source: str) -> set[str]:
    """The packages and modules at the top of the path that a program imports, within functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def programs(folder: str) -> dict[str, set[str]]:
    """By Python file below a folder of the repository, what it imports."""
    paths = files(folder)
    assert len(paths) > 30
    return {str(path.relative_to(ROOT)): imported(path.read_text()) for path in paths}


def test_benchmarks_import_no_tests() -> None:
    wrong = {path: names & OF_TESTS for path, names in programs("benchmarks").items()}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_tests_import_benchmarks_only_where_those_are_tested() -> None:
    importing = [path for path, names in programs("tests").items() if "benchmarks" in names]
    assert [path for path in importing if not path.startswith(TESTING_BENCHMARKS)] == []
    assert len(importing) > 5


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from tests.support.caches import CHUNK", "tests"),
        ("def f():\n    import tests.support.caches as c", "tests"),
        ("from caches import CHUNK", "caches"),
        ("from support import caches", "support"),
        ("import simulation.mutation", "simulation"),
    ],
)
def test_each_way_to_import_tests_is_found(line: str, name: str) -> None:
    assert imported(line) & OF_TESTS == {name}
