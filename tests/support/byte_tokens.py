"""A tokenizer that has a token per byte."""

from __future__ import annotations

from typing import Any

import numpy as np


def encode(text: str) -> list[int]:
    """A token per byte."""
    return list(text.encode())


def decode(tokens: Any) -> str:
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")
