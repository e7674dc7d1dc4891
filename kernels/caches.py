"""Folders for what numba and Triton compiled, where their own cannot be written, as in a read-only container.

The first choice is theirs: NUMBA_CACHE_DIR, `__pycache__` and ~/.cache; TRITON_CACHE_DIR and ~/.triton.
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
    """Return `function` as numba compiles it, with a cache: numba's own, a temporary one, or none."""
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "no locator available": none of its folders can be written
        folder = _instead("numba")
    if folder is None:
        return numba.njit(nogil=True)(function)
    given, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)  # read while it decorates
    try:
        return numba.njit(nogil=True, cache=True)(function)
    finally:
        numba.config.CACHE_DIR = given


@functools.cache
def use_triton_cache() -> None:
    """Let Triton keep what it compiles in a temporary folder, where its own cannot be written and is empty.

    Mutates Triton's settings, for this process. A folder with kernels in it that cannot be written is left:
    it may have come with an image, and hold all that is needed.
    """
    from triton import knobs

    folder = Path(knobs.cache.dir)
    if knobs.runtime.interpret or _is_writable(folder) or (folder.is_dir() and any(folder.iterdir())):
        return
    if (instead := _instead("triton")) is not None:
        knobs.cache.dir = str(instead)


def temporary_cache(kind: str) -> Path | None:
    """Make this user's folder for caches of a kind below the temporary folder.

    Code is loaded from there, so it must be this user's alone.

    Returns:
        its path; None: it cannot be written, or it is another user's, or open to others.
    """
    try:
        own = Path(tempfile.gettempdir()) / f"kvkit-{os.geteuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return None
    return own / kind if _is_writable(own / kind) else None


@functools.cache
def _instead(compiler: str) -> Path | None:
    """Return the folder that a compiler uses instead of its own, and log it, once."""
    folder = temporary_cache(compiler)
    log.warning(
        "%s: no folder for compiled kernels can be written (%s, the home): %s; to choose one, set %s",
        *(compiler, "the package's" if compiler == "numba" else "Triton's"),
        f"they are kept in {folder}" if folder else "each process compiles them anew",
        f"{compiler.upper()}_CACHE_DIR",
    )
    return folder


def _is_writable(folder: Path) -> bool:
    """Say whether this process can write into a folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
