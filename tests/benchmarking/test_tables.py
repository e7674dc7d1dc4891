"""A table's cells, rows and heads are what its specification says."""

from __future__ import annotations

import tomllib

import pytest
from repository import ROOT

from benchmarks.report.spec import Table, cell
from benchmarks.report.tables import PAGES, TABLES


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("{inner[a]:.1f} s", "2.0 s"),
        ("{inner[a] over inner[b]:.2f}", "0.50"),
        ("{inner[a] plus inner[b]}", "6"),
        ("{none or inner[b]}", "4"),
        ("{many|median|*1e3:,.0f} ms", "3,000 ms"),
        ("{inner[a]|1/} of {bytes|>>10:,}", "0.5 of 2"),
        ("{GB/s|/2:.1f}", "1.5"),
        ("{none?:.1f} s", ""),
        ("{inner[none]?not measured:.1f} s", "not measured"),
        ("{zero|nonzero?0:.3f}", "0"),
        ("{0} {1}", "key 1"),
    ],
)
def test_a_cell(form: str, shown: str) -> None:
    row = {"inner": {"a": 2, "b": 4}, "many": [1, 3, 9], "bytes": 2048, "GB/s": 3.0, "zero": 0.0}
    assert cell(form, ("key", 1), row) == shown


def test_a_missing_figure_is_an_error() -> None:
    with pytest.raises(KeyError, match="none"):
        cell("{none:.1f}", (), {"inner": {}})


def test_rows_of_a_table() -> None:
    document = {"unit": "s", "models": {"m": {"forms": [{"x": 1, "kind": "a"}, {"x": 2, "kind": "b"}]}}}
    table = Table("x.json", "model | {unit} | x", "models/*/forms/*", "{0} | {1} | {x}", {"kind": "b"})
    assert table.made(document) == [["model", "s", "x"], ["m", "2", "2"]]
    rows = [("models/m/forms", "all"), ("models/none", "left out"), ("", "own | {unit} | cells")]
    assert Table("x.json", "a | b | c", rows, "x | y").made(document) == [
        ["a", "b", "c"],
        ["all", "x", "y"],
        ["own", "s", "cells"],
    ]


def test_every_word_of_the_specifications_is_used() -> None:
    text = (ROOT / "benchmarks/report/tables.toml").read_text()
    for word in tomllib.loads(text)["words"]:
        assert f"| {word}\n" in text


def test_every_table_is_on_a_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []
