"""Sizes of tests that CI runs in part and `make nightly` in full."""

from __future__ import annotations

import os

NIGHTLY = bool(os.environ.get("KVKIT_NIGHTLY"))


def examples(count: int) -> int:
    """Examples of a property: `count` in `make nightly`, half as many in CI."""
    return count if NIGHTLY else -(-count // 2)
