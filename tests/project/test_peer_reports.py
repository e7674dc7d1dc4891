"""Behind each report that docs/evidence/peers.md calls solved there is a test."""

from __future__ import annotations

import ast

from repository import TESTS

from docs.peers import REPORTS


def test_what_is_solved_is_tested() -> None:
    assert [
        report.what for report in REPORTS if report.kvkit.startswith("solved") != bool(report.tests)
    ] == []
    for file, _, name in (test.partition("::") for report in REPORTS for test in report.tests):
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (
            file,
            name,
        )
