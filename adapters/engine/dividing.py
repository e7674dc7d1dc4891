"""Division of layers into records of about equal size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def divide(layers: Sequence[T], layer_bytes: int, record_bytes: int) -> list[Sequence[T]]:
    """Divide layers of one form into records of about `record_bytes`: slots are as large as any record."""
    each = max(1, record_bytes // layer_bytes)
    return [layers[i : i + each] for i in range(0, len(layers), each)]
