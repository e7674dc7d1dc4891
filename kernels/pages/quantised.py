"""Constants that define quantised records."""

from __future__ import annotations

from collections.abc import Mapping

from kvkit.format.layout import Precision

LARGEST: Mapping[Precision, float] = {"fp8": 448.0, "int8": 127.0}
"""Largest code of each `precision`: float8 e4m3fn (https://arxiv.org/abs/2209.05433), or int8."""

SMALLEST_AMAX = 1e-30
"""A head's K or V with a largest magnitude below this becomes zeros: its reciprocal would overflow."""
