"""Every problem that kernels are compiled, tuned and checked with: those of each operation's folder."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from kvkit.kernels.tuning.cases import Problem

FOLDERS = ("pages", "attention")
"""Folders of kernels that have a `problems.py`."""

HOST_FOLDERS = ("pages",)
"""Those that have a `host_problems.py`, of kernels for the CPU."""


@cache
def every_problem() -> tuple[Problem, ...]:
    """All of GPUs, those of an operation one after another; made once, on the CPU, without contents."""
    modules = (import_module(f"kvkit.kernels.{folder}.problems") for folder in FOLDERS)
    return tuple(problem for module in modules for problem in module.problems())


@cache
def host_problems() -> tuple[Problem, ...]:
    """All of the CPU, likewise."""
    modules = (import_module(f"kvkit.kernels.{folder}.host_problems") for folder in HOST_FOLDERS)
    return tuple(problem for module in modules for problem in module.problems())
