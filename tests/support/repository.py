"""Folders of the repository that tests read, and that programs which they start must find."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The repository: programs with it on PYTHONPATH import the kvkit that is tested."""
TESTS = ROOT / "tests"
"""The folders of test files, and the packages `simulation`, `histories` and `models`."""
SUPPORT = TESTS / "support"
"""Modules that test files share, and programs that they start."""
