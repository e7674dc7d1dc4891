"""The quantised forms of records: their names and the numbers that define them."""

from __future__ import annotations

from typing import Literal

Quantised = Literal["fp8", "int8"]

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Of each form, the largest code: float8 e4m3fn (https://arxiv.org/abs/2209.05433), or int8."""

SMALLEST_AMAX = 1e-30
"""A head's K or V whose largest magnitude is below this becomes zeros: its reciprocal would overflow."""
