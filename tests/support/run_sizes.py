"""Sizes of tests that CI runs in part and `make nightly` in full."""

from __future__ import annotations

import os
from typing import Any

import pytest

NIGHTLY = bool(os.environ.get("KVKIT_NIGHTLY"))


def examples(count: int) -> int:
    """Examples of a property: `count` in `make nightly`, half as many in CI."""
    return count if NIGHTLY else -(-count // 2)


def nightly(*cases: object) -> list[Any]:
    """Parameters, or tuples of several, that CI leaves to `make nightly`; beside others that it has."""
    several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*values, marks=pytest.mark.nightly) for values in several]
