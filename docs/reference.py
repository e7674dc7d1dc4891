"""Write the tables of settings, metrics, commands, names and tests on pages, from what defines them.

python -m docs.reference
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperGroup
from typer.main import get_command

import kvkit
from docs import peers
from kvkit.adapters.engine.tier_settings import PageSettings
from kvkit.adapters.sglang.settings import StorageSettings
from kvkit.adapters.vllm.settings import BlendSettings, SessionSettings, Settings
from kvkit.adapters.vllm_tier.settings import TierSettings
from kvkit.cli import app
from kvkit.config import Config, PolicyConfig, ServerConfig
from kvkit.handoff.settings import HandoffConfig
from kvkit.lab.simulate import config as simulate
from kvkit.observe import metrics
from kvkit.router import metrics as router_metrics
from kvkit.router.settings import BlendLimits, EngineConfig, RouterConfig
from kvkit.tiers.mooncake import MooncakeOptions
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.requests import RequestLimits

ROOT = Path(__file__).parent.parent
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "tests/README.md"]
    if "<!-- reference:" in path.read_text()
)
API = (
    "cache",
    "transfer.sequence",
    "transfer.store",
    "config",
    "settings",
    "tiers.settings",
    "tiers.registry",
    "tiers.eviction.policies",
    "format.layout",
    "transfer.policy",
    "staging",
    "format.keys",
    "format.names",
    "format.record",
    "blend.plan",
    "blend.methods.method",
    "blend.gate",
    "format.rope",
    "observe.metrics",
    "observe.inspect",
    "tiers.testing.contract",
    "tiers.testing.faulty",
    "tiers.base",
    "handoff.chunk_sender",
    "handoff.sender",
    "handoff.receiver",
    "kernels.pages.api",
    "kernels.pages.memory",
    "kernels.pages.reference",
    "kernels.pages.jax",
    "kernels.attention.api",
    "kernels.attention.latent",
    "kernels.attention.rows",
    "kernels.attention.layer",
    "kernels.attention.reference",
    "kernels.attention.jax",
    "kernels.checks",
    "kernels.tuning.configs",
    "kernels.tuning.tables",
    "kernels.tuning.cases",
    "kernels.tuning.problems",
    "kernels.tuning.gpus",
    "kernels.tuning.assembly",
    "kernels.tuning.compiling",
    "kernels.tuning.search",
    "kernels.tuning.strategies",
    "kernels.tuning.trials",
    "kernels.tuning.autotune",
    "kernels.tuning.devices",
    "kernels.tuning.shapes",
    "adapters.huggingface.cached",
    "adapters.huggingface.fingerprint",
    "adapters.huggingface.probe",
    "adapters.huggingface.growing",
    "adapters.huggingface.steps",
    "adapters.huggingface.blended",
    "adapters.huggingface.latent",
    "adapters.huggingface.auxiliary",
    "adapters.huggingface.smollm2",
    "adapters.huggingface.packaged",
    "adapters.jax.pages",
    "adapters.vllm.connector",
    "lab.compiling.gate",
    "lab.compiling.keys",
    "lab.compiling.prediction",
    "lab.tuning.recordings",
    "lab.tuning.replay",
    "lab.simulate.config",
    "lab.simulate.model",
    "lab.simulate.optimum",
    "lab.simulate.traces",
    "lab.serve.workloads",
    "lab.quality.judge",
    "lab.quality.methods",
    "lab.quality.tasks.registry",
    "adapters.vllm.settings",
    "lab.serve.memory",
)
"""Modules of kvkit whose names are for users; those of all others may change from one version to the next."""
SETTINGS: dict[str, type[BaseModel]] = {
    "settings": Config,
    "tiers": TierConfig,
    "mooncake": MooncakeOptions,
    "policy": PolicyConfig,
    "server": ServerConfig,
    "handoff": HandoffConfig,
    "router": RouterConfig,
    "router_blend": BlendLimits,
    "router_requests": RequestLimits,
    "router_engine": EngineConfig,
    "vllm": Settings,
    "vllm_blend": BlendSettings,
    "vllm_requests": RequestLimits,
    "vllm_sessions": SessionSettings,
    "vllm_tier": TierSettings,
    "sglang": StorageSettings,
    "lmcache": PageSettings,
    "simulated_model": simulate.ModelConfig,
    "simulated_nodes": simulate.NodesConfig,
    "simulated_link": simulate.LinkConfig,
    "simulated_tier": simulate.SimulatedTier,
    "simulated_policy": simulate.RolePolicy,
}
"""The models of all settings, by the marker of their tables."""
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
        **{marker: partial(settings, model) for marker, model in SETTINGS.items()},
        "face": face,
        "names": names,
        "commands": commands,
        "tests": tests,
        "peers": peers.table,
        "metrics": lambda: documented_metrics(metrics.METRICS),
        "router_metrics": lambda: documented_metrics(router_metrics.__doc__ or ""),
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


def face() -> str:
    """A table of what `kvkit` itself gives, with the module where each is made."""
    rows = ["| name | of | what it is |", "|---|---|---|"]
    for name in kvkit.__all__:
        thing = getattr(kvkit, name)
        rows.append(f"| `{name}` | `{thing.__module__}` | {_first_sentence_of(inspect.getdoc(thing))} |")
    return "\n".join(rows)


def names() -> str:
    """A section for each module of `API`: its public classes and functions, in the module's order."""
    parts = []
    for module in API:
        tree = ast.parse(source_of(module).read_text())
        rows = [f"| `{node.name}` | {_first_sentence(node)} |" for node in public(tree)]
        table = ["| name | what it is |", "|---|---|", *rows]
        parts.append("\n".join([f"## `kvkit.{module}`", "", _first_sentence(tree), "", *table]))
    return "\n\n".join(parts)


def public(tree: ast.Module) -> list[ast.ClassDef | ast.FunctionDef]:
    """The classes and functions of a module whose names have no underscore in front."""
    found = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [node for node in found if not node.name.startswith("_")]


def source_of(module: str) -> Path:
    """The file of a module below kvkit."""
    return (ROOT / "kvkit" / Path(*module.split("."))).with_suffix(".py")


def _first_sentence(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    return _first_sentence_of(ast.get_docstring(node))


def _first_sentence_of(docstring: str | None) -> str:
    text = " ".join((docstring or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`\]])\. ", text)[0].rstrip(".").replace("|", "\\|")


def commands() -> str:
    """A section for each command: what it does, its arguments and options."""
    return "\n\n".join(_commands(get_command(app), "kvkit"))


def _commands(command: Any, name: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for word in command.list_commands(context):
            yield from _commands(command.get_command(context, word), f"{name} {word}")
        if not command.invoke_without_command:
            return
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        given = "" if parameter.default in (None, False, "", ()) else f"`{parameter.default}`"
        option = (
            f"`{parameter.opts[0]}`" if parameter.opts[0].startswith("-") else f"`{parameter.name.upper()}`"
        )
        rows.append(f"| {option} | {given} | {parameter.help or ''} |".replace("  ", " "))
    yield "\n".join([f"## `{name}`", "", inspect.cleandoc(command.help or ""), "", *rows])


def tests() -> str:
    """Return a section for each folder of tests: the behaviour that each file checks, by its first line."""
    sections = []
    for folder in sorted({path.parent for path in (ROOT / "tests").glob("*/test_*.py")}):
        rows = ["| behaviour | file |", "|---|---|"]
        for path in sorted(folder.glob("test_*.py")):
            behaviour = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            behaviour = behaviour.rstrip(".").replace("|", "\\|")
            rows.append(f"| {behaviour} | [{path.stem}]({folder.name}/{path.name}) |")
        sections.append("\n".join([f"## `{folder.name}`", "", *rows]))
    return "\n\n".join(sections)


def documented_metrics(text: str) -> str:
    """The table in the text of a module, which tests hold against what is exported."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return "\n".join(re.sub(r"((?:vllm:)?(?:kvkit|kv_offload)_\w+)", r"`\1`", row) for row in rows)


def vllm_metrics() -> str:
    """`kvkit.adapters.vllm.stats.METRICS`, read without vLLM."""
    tree = ast.parse((ROOT / "adapters/vllm/stats.py").read_text())
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
    }
    return str(ast.literal_eval(assigned["METRICS"]))


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
        return f"list of {_type(parts[0])}" + ("" if get_origin(parts[0]) is Literal else "s")
    if origin is dict:
        return "table"
    if hasattr(annotation, "__metadata__"):
        return _type(parts[0])
    return "size" if annotation is ByteSize else _NAMES[annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or value == {}:
        return ""
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, ByteSize):
        return f'`"{value.human_readable(decimal=not value % 10**6).replace(".0", "")}"`'
    return f"`{str(value).lower() if isinstance(value, bool) else repr(value)}`".replace("'", '"')


if __name__ == "__main__":
    for path in PAGES:
        page = ROOT / path
        page.write_text(render(page.read_text()))
