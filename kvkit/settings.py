"""Shared handling of settings: reading files and objects, explaining errors, grouping a command's options."""

from __future__ import annotations

import difflib
import inspect
import os
import reprlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from kvkit.format.urls import shown

_Model = TypeVar("_Model", bound=BaseModel)

ENVIRONMENT = "environment"
TOO_DEEP = "tables or lists are nested too deep"
_SECRET = {"token", "password", "options", "secret", "kvkit"}
"""Settings with values that no message shows."""


class CommandError(RuntimeError):
    """A command failed or could not start; the message states why, and what to change."""


class ConfigError(ValueError):
    """A setting is unknown or invalid. The message names the setting, the value and the choices."""


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and parse a TOML file. Raises ConfigError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ConfigError(f"{path}: {TOO_DEEP}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def read_object(given: Any, model: type[_Model], where: str, alternative: str = "") -> _Model:
    """Parse a request's object by its model.

    Args:
        given: the object, decoded from JSON.
        where: name of the object, for messages.
        alternative: values allowed instead of an object, for messages, such as "false, or ".

    Raises:
        ConfigError: it is no object, or a field is unknown or invalid.
    """
    if not isinstance(given, dict):
        choices = ", ".join(model.model_fields)
        raise ConfigError(f"{where} = {reprlib.repr(given)}: want {alternative}an object of {choices}")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ConfigError(explain(error, model, f"{where}.")) from error


def explain(
    error: ValidationError, model: type[BaseModel], source: str = "", values: Mapping[str, Any] | None = None
) -> str:
    """Format pydantic's errors, one per line: source, "setting = value: problem; the choices".

    Args:
        model: model of the settings.
        source: source of `values`, such as "kvkit.toml: "; settings not in `values` came from the
            environment.
        values: given settings; None: all came from `source`.
    """
    lines = []
    for entry in error.errors():
        from_source = values is None or _has(values, entry["loc"])
        lines.append((source if from_source else f"{ENVIRONMENT}: ") + _explain_entry(entry, model))
    return "\n".join(lines)


def _has(values: Any, path: tuple[str | int, ...]) -> bool:
    """Return whether `values` has this setting, or a value in place of one of its tables."""
    for key in path:
        if isinstance(values, dict):
            if key not in values:
                return False
            values = values[key]
    return True


def _explain_entry(entry: Any, model: type[BaseModel]) -> str:
    path = entry["loc"]
    setting = ".".join(map(str, path))
    if entry["type"] == "extra_forbidden":
        known = list(_section(model, path).model_fields)
        matches = difflib.get_close_matches(str(path[-1]), known, 1)
        hint = f"did you mean {matches[0]!r}? " if matches else ""
        return f"{setting}: unknown setting; {hint}the settings here are {', '.join(known)}"
    secret = not _SECRET.isdisjoint(path)
    shown_value = "" if secret or isinstance(entry["input"], dict) else shown(repr(entry["input"]))
    # `shown` does not recognise a password in an address without a scheme
    login = "://" not in shown_value and ":" in shown_value.rpartition("@")[0]
    assignment = f" = {shown_value}" if shown_value and not login else ""
    hint = "; want bytes, or a number with a unit such as '4GiB'" if "byte_size" in entry["type"] else ""
    message = entry["msg"].removeprefix("Value error, ") + hint
    return f"{setting}{assignment}: {message}" if setting else message


def _section(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """Return the model of the table that contains a setting."""

    def models(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for argument in get_args(annotation):
            yield from models(argument)

    for key in path[:-1]:
        if key in model.model_fields:
            model = next(models(model.model_fields[str(key)].annotation), model)
    return model


def imported(path: str) -> Any:
    """Import the object named by "package.module:name".

    Raises:
        ImportError, AttributeError: the module, or the name in it, does not exist.
        ValueError: the module or the name is missing, or the module's name is relative.
    """
    module, _, name = path.partition(":")
    if not module or not name or module.startswith("."):
        raise ValueError("want package.module:name")
    return getattr(import_module(module), name)


def extension(group: str, option: str) -> Any:
    """Return the function of an installed package that carries out a command's option.
    Raises CommandError if no installed package has it."""
    for entry in entry_points(group=group, name=option):
        return entry.load()
    raise CommandError(f"--{option}: no installed package has it (entry points {group!r})")


def import_from_here() -> None:
    """Let a command import modules from the current folder, after installed ones. Mutates `sys.path`."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def grouped_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adapt `command` to typer: the fields of each dataclass parameter become options."""
    signature = inspect.signature(command, eval_str=True)
    flat: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for parameter in signature.parameters.values():
        options = [parameter]
        if is_dataclass(parameter.annotation):
            kind: Any = parameter.annotation
            fields = inspect.signature(kind, eval_str=True).parameters.values()
            options = [field.replace(kind=parameter.kind) for field in fields]
            groups[parameter.name] = kind, [field.name for field in fields]
        flat += options

    @wraps(command)
    def run(**values: Any) -> None:
        for name, (kind, names) in groups.items():
            values[name] = kind(**{option: values.pop(option) for option in names})
        command(**values)

    run.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run
