"""NIXL's Python API: its package, whatever CUDA it is for, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

_PACKAGES = ("nixl_cu12", "nixl_cu13")


def import_nixl() -> Any:
    """Return NIXL's module of agents. Raises `ValueError` if no package has it."""
    for package in _PACKAGES:
        with suppress(ModuleNotFoundError):
            return import_module(f"{package}._api")
    raise ValueError("NIXL is missing: pip install 'kvkit-llm[nixl]'")


@contextmanager
def translated() -> Iterator[None]:
    """Convert NIXL's exceptions, which have no common base, to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if type(error).__name__ == "nixlRemoteDisconnectError":
            raise ConnectionError(str(error)) from error
        raise OSError(f"NIXL: {error}") from error
