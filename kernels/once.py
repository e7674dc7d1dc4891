"""Results that are computed once per key and shared by later calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def once(results: dict[Hashable, Any], key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make`, which is called once per `key`. Mutates `results`."""
    try:
        value: T = results[key]
    except KeyError:
        value = results[key] = make()
    return value


def form_of(tensor: torch.Tensor) -> Hashable:
    """Return all that checks and kernels depend on, except a tensor's address and contents."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
