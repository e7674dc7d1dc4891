"""Read the results that the report shows. What is missing is named with the command that makes it.

Nothing lists the figures that are needed: `Figures` name one that is missing when Python asks for it, and
`explained` when Typst does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.registry import REGISTERED
from kvkit.format.layout import ORDERS

LLAMA = tuple(f"pages::pages[llama-{order}]" for order in ORDERS)
LMCACHE = "pages::lmcache"

SOURCES: Mapping[str, str] = {
    **{name: name for name in ("demo", "serve", "pd", "sending", "soak", "precision", "models", "queued")},
    **{name: name for name in ("scale", "timeline", "snapshots", "frontier", "fleet", "replay", "routing")},
    **{name: name.replace("_", "-") for name in ("lost_context", "blend_models", "replay_agents")},
    **{f"flow_{flow}": f"flow-{flow}" for flow in ("handoff", "pool", "pull", "both")},
    "compiled": "compile",
    "gpu": "gpu-nvidia-h100-80gb-hbm3",
    "board_smollm2": "leaderboard-smollm2",
    "board_qwen": "leaderboard-qwen",
    "details": "blend-details-smollm2",
    "served": "vllm-blend",
    "hybrid": "vllm-hybrid",
    "many": "many-requests",
    "simulated": "simulate",
}
"""The text's names of results, and those of `benchmarks.report.registry`."""


class PaperError(RuntimeError):
    """The paper cannot be built. The message names what is missing and the command that makes it."""


class Figures(dict[str, Any]):
    """An object of a result that names a key that it lacks.

    Args:
        found: its figures; objects in it, at any depth, become `Figures`, too.
        path: the file.
        place: of this object in the file, with / between keys.
    """

    def __init__(self, found: Mapping[str, Any], path: Path, command: str, place: str = "") -> None:
        self._path, self._command, self._place = path, command, place
        super().__init__({key: self._inner(value, f"{place}{key}/") for key, value in found.items()})

    def __missing__(self, key: str) -> Any:
        raise PaperError(lacks(self._path, f"{self._place}{key}", self._command))

    def _inner(self, value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            return Figures(value, self._path, self._command, place)
        if isinstance(value, list):
            return [self._inner(one, f"{place}{number}/") for number, one in enumerate(value)]
        return value


class Benchmarks(dict[str, Figures]):
    """Entries of the file of `make bench`, by name; one that is missing is named with its own command."""

    def __init__(self, document: Mapping[str, Any], path: Path) -> None:
        self._path = path
        super().__init__(
            {
                one["name"]: Figures(one, path, command_of(one["name"]), f"{one['name']}/")
                for one in document["results"]
            }
        )

    def __missing__(self, name: str) -> Figures:
        raise PaperError(lacks(self._path, name, command_of(name)))


def lacks(path: Path, what: str, command: str) -> str:
    """The message on a figure that a file lacks."""
    return f"{path} lacks {what}: run `{command}`"


def command_of(benchmark: str) -> str:
    """What measures a benchmark anew, by its name."""
    return f"python -m benchmarks.report.run benchmarks/micro/bench_{benchmark.partition('::')[0]}.py"


def read(folder: Path, machine: str) -> dict[str, Figures]:
    """All of `SOURCES`, by name.

    Raises:
        PaperError: a file is not there.
    """
    found = {}
    for name, registered in SOURCES.items():
        path = REGISTERED[registered].path(folder, machine)
        command = REGISTERED[registered].command_for(path)
        if not path.exists():
            raise PaperError(f"{path} is missing: run `{command}`")
        found[name] = Figures(json.loads(path.read_text()), path, command)
    return found


def explained(error: str, folder: Path, machine: str) -> str:
    """An error of Typst; one on a key that a result lacks names the file and the command, too.

    Args:
        error: the diagnosis, with the line of the text that asks for the key, and ^ below the place.
    """
    missing = re.search(r'dictionary does not contain key "(.+?)"(?: and|$)', error, re.MULTILINE)
    asks = re.search(r"^ *\d+ │ (.*)\n *│ ( *)\^", error, re.MULTILINE)
    if missing is None or asks is None:
        return error
    key, before = missing[1], asks[1][: len(asks[2])]
    names = [key, *reversed(re.findall(r'(?<=")[^"]+::[^"]+(?=")|[\w-]+', before))]
    for name in names:
        source = _aliases().get(name, name)
        if "::" in name:
            path, command = folder / f"{machine}.json", command_of(name)
        elif source in SOURCES:
            result = REGISTERED[SOURCES[source]]
            path = result.path(folder, machine)
            command = result.command_for(path)
        else:
            continue
        return f"{lacks(path, key, command)}\n{error}"
    return error


def _aliases() -> dict[str, str]:
    """Names that the text gives to results or to what is in them, with the names in `SOURCES`."""
    texts = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("*.typ"))
    return dict(re.findall(r"#let ([\w-]+) = data\.(\w+)", texts))
