"""Errors of the simulator, which name file, setting, value and choices."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


class SimulationError(ValueError):
    """A trace or a setting is not what it must be. The message says where, what and which are the choices."""


def explain(entry: Any, source: str, choices: Sequence[str] = ()) -> str:
    """One pydantic error as "source: setting = value: what is wrong; the choices"."""
    where = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), choices, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = f"; {hint}the settings here are {', '.join(choices)}" if choices else ""
        return f"{source}: {where}: unknown setting{known}"
    text = repr(entry["input"])
    shown = f" = {text}" if len(text) < 60 and entry["type"] != "missing" and where else ""
    hint = "; want bytes, or a number with a unit such as '4GiB'" if "byte_size" in entry["type"] else ""
    message = entry["msg"].removeprefix("Value error, ")
    return f"{source}: {where}{shown}{': ' if where else ''}{message}{hint}"
