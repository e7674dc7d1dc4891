"""Division of layers into records of about equal size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def divide(layers: Sequence[T], layer_bytes: int, record_bytes: int) -> list[Sequence[T]]:
    """Divide layers of `layer_bytes` each into records of about `record_bytes`.

    Slots are as large as the largest record, so a much larger one would waste memory in all slots.
    """
    layers_per_record = max(1, record_bytes // layer_bytes)
    return [layers[i : i + layers_per_record] for i in range(0, len(layers), layers_per_record)]
