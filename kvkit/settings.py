"""What is wrong with a setting, said once for all files, environments and command lines."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from kvkit.format.urls import shown

_SECRET = {"token", "password", "options", "secret"}
"""Settings whose values no message shows."""


class ConfigError(ValueError):
    """A setting is unknown or impossible. The message names the setting, the value and the choices."""


def explain(entry: Any, known: Sequence[str]) -> str:
    """One pydantic error as "setting = value: what is wrong; the choices"; `known` are the settings there."""
    where = ".".join(str(part) for part in entry["loc"]) or "policy"
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{where}: unknown setting; {hint}the settings here are {', '.join(known)}"
    secret = not _SECRET.isdisjoint(entry["loc"])
    value = "" if secret or isinstance(entry["input"], dict) else f" = {shown(repr(entry['input']))}"
    hint = "; want bytes, or a number with a unit such as '4GiB'" if "byte_size" in entry["type"] else ""
    return f"{where}{value}: {entry['msg'].removeprefix('Value error, ')}{hint}"
