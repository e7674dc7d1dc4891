"""Fallback cache folders for numba and Triton, where their own are read-only, as in some containers.

The compilers' own folders come first: NUMBA_CACHE_DIR, `__pycache__` and ~/.cache; TRITON_CACHE_DIR and
~/.triton.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile `function` with numba and a cache: numba's own, a temporary one, or none."""
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available": numba can write to none of its folders
        folder = _instead("numba")
    if folder is None:
        return numba.njit(nogil=True)(function)
    previous, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)  # read by numba while it decorates
    try:
        return numba.njit(nogil=True, cache=True)(function)
    finally:
        numba.config.CACHE_DIR = previous


@functools.cache
def use_triton_cache() -> None:
    """Make Triton use a temporary cache folder, where its own cannot be written and is empty.

    Mutates Triton's settings for this process. A read-only folder that holds kernels stays in use: it may
    have come with an image, and hold all kernels that are needed.
    """
    from triton import knobs

    folder = Path(knobs.cache.dir)
    if knobs.runtime.interpret or _is_writable(folder) or (folder.is_dir() and any(folder.iterdir())):
        return
    if (instead := _instead("triton")) is not None:
        knobs.cache.dir = str(instead)


def temporary_cache(kind: str) -> Path | None:
    """Make this user's folder for caches of a kind below the temporary folder.

    Code is loaded from the folder, so no other user may have access to it.

    Returns:
        path of the folder; None if it cannot be written, belongs to another user or is open to others.
    """
    try:
        user_folder = Path(tempfile.gettempdir()) / f"kvkit-{os.geteuid()}"
        user_folder.mkdir(mode=0o700, exist_ok=True)
        status = user_folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return None
    return user_folder / kind if _is_writable(user_folder / kind) else None


@functools.cache
def _instead(compiler: str) -> Path | None:
    """Return the folder that a compiler uses instead of its own, and log the choice once."""
    folder = temporary_cache(compiler)
    log.warning(
        "%s: no folder for compiled kernels can be written (%s, the home): %s; to choose one, set %s",
        *(compiler, "the package's" if compiler == "numba" else "Triton's"),
        f"they are kept in {folder}" if folder else "each process compiles them anew",
        f"{compiler.upper()}_CACHE_DIR",
    )
    return folder


def _is_writable(folder: Path) -> bool:
    """Make a folder, and return whether this process can write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
