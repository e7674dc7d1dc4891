"""The problems that kernels are compiled, tuned and checked with: each operation's, or a model's."""

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
"""Those that have a `host_problems.py`, of kernels for the CPU."""


@cache
def every_problem() -> tuple[Problem, ...]:
    """All of GPUs, those of an operation one after another; made once, on the CPU, without contents."""
    return tuple(problem for module in _modules(False) for problem in module.problems())


@cache
def host_problems() -> tuple[Problem, ...]:
    """All of the CPU, likewise."""
    return tuple(problem for module in _modules(True) for problem in module.problems())


@dataclass(frozen=True, slots=True)
class ModelProblems:
    """Makes the problems of models, of a GPU or of the CPU; other processes can be sent it."""

    shapes: tuple[ModelShape, ...]
    host: bool = False

    def __call__(self) -> tuple[Problem, ...]:
        """Those of each operation that has a `model_problems`; made once."""
        return _model_problems(self.shapes, self.host)


@cache
def _model_problems(shapes: tuple[ModelShape, ...], host: bool) -> tuple[Problem, ...]:
    makers = [module.model_problems for module in _modules(host) if hasattr(module, "model_problems")]
    return tuple(problem for make in makers for shape in shapes for problem in make(shape))


def _modules(host: bool) -> Iterator[ModuleType]:
    for folder in HOST_FOLDERS if host else FOLDERS:
        yield import_module(f"kvkit.kernels.{folder}.{'host_problems' if host else 'problems'}")
