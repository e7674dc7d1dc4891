"""Find libibverbs for Mooncake: where the system has none, NIXL brings one."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

LIBRARY = "libibverbs.so.1"


def library_path(folder: Path) -> str:
    """What LD_LIBRARY_PATH must be for processes that import Mooncake; `folder` may get a link.

    Without NIXL the test is skipped.
    """
    given = os.environ.get("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        spec = find_spec("nixl_cu12")
        if spec is None or spec.origin is None:
            pytest.skip(f"there is no {LIBRARY}: apt-get install libibverbs1")
        libraries = Path(spec.origin).parent.with_name("nixl_cu12.libs")
        (found,) = libraries.glob("libibverbs-*.so*")
        (folder / LIBRARY).symlink_to(found)
        return f"{folder}:{libraries}:{given}"
    return given
