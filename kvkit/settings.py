"""What all files, environments and command lines of settings share: errors in words, options in groups."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from kvkit.format.urls import shown

_SECRET = {"token", "password", "options", "secret", "kvkit"}
"""Settings whose values no message shows."""


class ConfigError(ValueError):
    """A setting is unknown or impossible. The message names the setting, the value and the choices."""


def explain(entry: Any, known: Sequence[str], together: str = "policy") -> str:
    """One pydantic error as "setting = value: what is wrong; the choices".

    Args:
        known: the settings there.
        together: what is wrong where it is no single setting; empty: the message names it.
    """
    where = ".".join(str(part) for part in entry["loc"]) or together
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{where}: unknown setting; {hint}the settings here are {', '.join(known)}"
    secret = not _SECRET.isdisjoint(entry["loc"])
    value = "" if secret or isinstance(entry["input"], dict) else f" = {shown(repr(entry['input']))}"
    hint = "; want bytes, or a number with a unit such as '4GiB'" if "byte_size" in entry["type"] else ""
    message = entry["msg"].removeprefix("Value error, ") + hint
    return f"{where}{value}: {message}" if where else message


def grouped_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer takes it: of each parameter that is a dataclass, the fields are options."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)
    }
    flat: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = groups.get(parameter.name)
        hints = get_type_hints(kind, include_extras=True) if kind else {}
        flat += [
            parameter.replace(name=field.name, annotation=hints[field.name], default=field.default)
            for field in (fields(kind) if kind else ())
        ] or [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run
