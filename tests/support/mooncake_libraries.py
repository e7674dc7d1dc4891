"""Find libibverbs for tests of Mooncake, which are skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkit.lab.testbed import mooncake


def library_path(folder: Path) -> str:
    """Return LD_LIBRARY_PATH for processes that import Mooncake; `folder` may get a link."""
    try:
        return mooncake.library_path(folder)
    except FileNotFoundError as error:
        pytest.skip(str(error))
