"""Problems for compiling, tuning and checking kernels: those of each operation, or of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.shapes import ModelShape

FOLDERS = ("pages", "attention")
"""Folders of kernels that have a `problems.py`."""

HOST_FOLDERS = ("pages",)
"""Folders of kernels for the CPU that have a `host_problems.py`."""


@cache
def every_problem() -> tuple[Problem, ...]:
    """Return all problems of GPUs, grouped by operation; made once, on the CPU, without contents."""
    return tuple(problem for module in _modules(False) for problem in module.problems())


@cache
def host_problems() -> tuple[Problem, ...]:
    """Return all problems of the CPU, made once, without contents."""
    return tuple(problem for module in _modules(True) for problem in module.problems())


@dataclass(frozen=True, slots=True)
class ModelProblems:
    """Factory of the problems of models, for a GPU or the CPU; it can be sent to other processes."""

    shapes: tuple[ModelShape, ...]
    host: bool = False

    def __call__(self) -> tuple[Problem, ...]:
        """Return the problems of each operation that has a `model_problems`; made once."""
        return _model_problems(self.shapes, self.host)


@cache
def _model_problems(shapes: tuple[ModelShape, ...], host: bool) -> tuple[Problem, ...]:
    makers = [module.model_problems for module in _modules(host) if hasattr(module, "model_problems")]
    return tuple(problem for make in makers for shape in shapes for problem in make(shape))


def _modules(host: bool) -> Iterator[ModuleType]:
    for folder in HOST_FOLDERS if host else FOLDERS:
        yield import_module(f"kvkit.kernels.{folder}.{'host_problems' if host else 'problems'}")
