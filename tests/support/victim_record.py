"""The record of a stored sequence that tests damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkit.format.record import RecordFormat
from kvkit.lab.testbed.engine_stub import Engine

TOKENS = 8 * 5
VICTIM = 2
"""The chunk whose record is harmed, of 5."""


def victim_file(engine: Engine, tokens: npt.NDArray[np.int32], folder: Path) -> Path:
    form = RecordFormat.of(engine.layout, 0, engine.namespace)
    return folder / form.name(engine.keys(tokens)[VICTIM])
