"""The share of a file that is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


def pages_in_memory(path: Path) -> int:
    """Pages of a file that are in the page cache, by mincore(2); reads none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    size = path.stat().st_size
    known = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    with open(path, "rb") as file:
        start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert libc.mincore(start, size, known) == 0, os.strerror(ctypes.get_errno())
        libc.munmap(start, size)
    return sum(page & 1 for page in known.raw[: -(-size // mmap.PAGESIZE)])
