"""Write the tables of settings and metrics in docs/, from the models and the texts that define them.

python -m docs.reference
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvkit import metrics
from kvkit.adapters.vllm import router_metrics
from kvkit.adapters.vllm.router_settings import EngineConfig, RouterConfig
from kvkit.adapters.vllm.settings import Settings
from kvkit.config import Config, PolicyConfig, ServerConfig, TierConfig
from kvkit.handoff.settings import HandoffConfig
from kvkit.tiers.mooncake import MooncakeOptions

ROOT = Path(__file__).parent.parent
PAGES = ("docs/configuration.md", "docs/operations.md", "docs/pd.md", "docs/vllm.md")
_NAMES = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "string",
    SecretStr: "string",
    Path: "path",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "at least"}


def render(page: str) -> str:
    """`page` with each table between its markers made anew.

    Raises:
        KeyError: a marker names no table.
    """
    tables: dict[str, Callable[[], str]] = {
        "settings": lambda: settings(Config),
        "tiers": lambda: settings(TierConfig),
        "mooncake": lambda: settings(MooncakeOptions),
        "policy": lambda: settings(PolicyConfig),
        "server": lambda: settings(ServerConfig),
        "handoff": lambda: settings(HandoffConfig),
        "metrics": lambda: documented_metrics(metrics.__doc__ or ""),
        "router": lambda: settings(RouterConfig),
        "router_engine": lambda: settings(EngineConfig),
        "router_metrics": lambda: documented_metrics(router_metrics.__doc__ or ""),
        "vllm": lambda: settings(Settings),
        "vllm_metrics": lambda: documented_metrics(vllm_metrics()),
    }

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{tables[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- reference: (\w+) -->)\n.*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def settings(model: type[BaseModel]) -> str:
    """A Markdown table of a model's settings. Those that are tables of their own are left out."""
    rows = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if not is_section(field):
            cells = (f"`{name}`", _values(field), _default(field), field.description or "")
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def documented_metrics(text: str) -> str:
    """The table in the text of a module, which tests hold against what is exported."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return "\n".join(re.sub(r"((?:vllm:)?kvkit_\w+)", r"`\1`", row) for row in rows)


def vllm_metrics() -> str:
    """The text of `kvkit.adapters.vllm.stats`, read without vLLM."""
    return ast.get_docstring(ast.parse((ROOT / "adapters/vllm/stats.py").read_text())) or ""


def is_section(field: FieldInfo) -> bool:
    """Whether a setting is a table of settings."""
    return any(isinstance(part, type) and issubclass(part, BaseModel) for part in _parts(field.annotation))


def _parts(annotation: Any) -> Iterator[Any]:
    """The types that a value may have, and those of what it holds."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _values(field: FieldInfo) -> str:
    """What a setting may be: its types, choices and bounds."""
    text = _type(field.annotation)
    bounds = [
        f"{words} {getattr(entry, bound):,}"
        for entry in field.metadata
        for bound, words in _BOUNDS.items()
        if getattr(entry, bound, None) is not None
    ]
    unit = " characters" if any(hasattr(entry, "min_length") for entry in field.metadata) else ""
    return ", ".join([text, *bounds]) + unit


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return ", ".join(f'`"{choice}"`' for choice in parts)
    if origin is tuple:
        return f"list of {_type(parts[0])}s"
    if origin is dict:
        return "table"
    if hasattr(annotation, "__metadata__"):
        return _type(parts[0])
    return "size" if annotation is ByteSize else _NAMES[annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or value == {}:
        return ""
    if isinstance(value, ByteSize):
        return f'`"{value.human_readable().replace(".0", "")}"`'
    return f"`{str(value).lower() if isinstance(value, bool) else repr(value)}`".replace("'", '"')


if __name__ == "__main__":
    for path in PAGES:
        page = ROOT / path
        page.write_text(render(page.read_text()))
