"""Queries of docs/grafana.json name metrics and labels that kvkit exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

from repository import ROOT

from docs.reference import vllm_metrics
from kvkit.observe import metrics
from kvkit.router import metrics as router_metrics

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana.json").read_text())
PROMETHEUS = {"instance", "job", "__name__"}
"""Labels that every sample has, besides its metric's own."""


@cache
def exported() -> dict[str, set[str]]:
    """The labels of each series, by its name."""
    found: dict[str, set[str]] = {}
    tables = metrics.METRICS + (router_metrics.__doc__ or "") + vllm_metrics()
    for name, labels, meaning in re.findall(
        r"^\| (\S*(?:kvkit|kv_offload)_\w+) \| ?(.*?) ?\| (.*) \|$", tables, re.MULTILINE
    ):
        own = {*filter(None, labels.split(", "))}
        if meaning.startswith("histogram"):
            found |= {f"{name}_bucket": own | {"le"}, f"{name}_sum": own, f"{name}_count": own}
        else:  # a client of Prometheus adds what counters end with
            found[f"{name}_total" if name.startswith("vllm:") else name] = own
    return found


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    """Every query of the panels and of the variables."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def unknown(query: str) -> set[str]:
    """What a query names that is not exported: metrics, and labels that none of its metrics has."""
    series = exported()
    named = set(re.findall(r"(?:vllm:)?(?:kvkit|kv_offload)_\w+", query))
    grouped = re.findall(r"(?:by|ignoring|without) \(([\w, ]+)\)", query)
    labels = {label for group in grouped for label in group.split(", ")}
    labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", query))
    return (named - set(series)) | (labels - PROMETHEUS).difference(*(series.get(name, ()) for name in named))


def test_queries_name_what_is_exported() -> None:
    found = {query: unknown(query) for query in queries(DASHBOARD)}
    assert len(found) > 50
    assert all(re.search(r"(?:kvkit|kv_offload)_\w", query) for query in found)
    assert {query: wrong for query, wrong in found.items() if wrong} == {}


def test_a_legend_names_labels_that_its_query_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                kept = re.search(rf"by \([\w, ]*\b{label}\b", target["expr"])
                assert kept or (label == "instance" and " by " not in target["expr"]), target


def test_what_is_not_exported_is_found() -> None:
    wrong = {
        "rate(kvkit_hits_total[5m])": {"kvkit_hits_total"},
        "sum by (tier, cause) (kvkit_timeouts_total)": {"cause"},
        'kvkit_tier_state{status="open"}': {"status"},
        "vllm:kvkit_hit_tokens": {"vllm:kvkit_hit_tokens"},
        "kvkit_transfer_seconds": {"kvkit_transfer_seconds"},
    }
    assert {query: unknown(query) for query in wrong} == wrong


def test_every_metric_is_plotted() -> None:
    text = " ".join([*queries(DASHBOARD)])
    plotted = set(re.findall(r"(?:vllm:)?(?:kvkit|kv_offload)_\w+", text))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in plotted}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()} == shown


def test_panels_lie_side_by_side() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)
