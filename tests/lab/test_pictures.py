"""Commands draw pictures and name the files that they write; the SVG has its texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvkit import cli
from kvkit.lab.quality import comparison as quality


def texts(picture: Path) -> list[str]:
    return re.findall(r"<!-- (.*) -->", picture.read_text())


def test_simulate_names_capacities_in_gib_and_says_what_it_wrote(tmp_path: Path) -> None:
    picture, figures, trace = (tmp_path / name for name in ("x.svg", "x.json", "x.jsonl"))
    options = ["--requests", "20", "--sweep", "memory=512MiB,1GiB,3GiB", "--png", picture]
    options += ["--json", figures, "--save", trace]
    done = CliRunner().invoke(cli.app, ["simulate", "chat", *map(str, options)])
    assert done.exit_code == 0, done.output
    said = done.stdout.splitlines()
    assert [f"trace: {trace}", f"figures: {figures}", f"picture: {picture}"] == [said[0], *said[-2:]]
    assert texts(picture)[:4] == ["0.5", "1", "3", "capacity of memory, GiB"]
    assert not any("$" in text for text in texts(picture)), "as 10^0 would be"


def test_methods_of_one_s_own_have_a_mark_and_a_name_in_the_legend(tmp_path: Path) -> None:
    """One mark for all shares of rows of a method; kvkit's others are dots with their names beside."""
    names = ("default .05", "default .15", "k_deviation .15", "infoflow .15", "full")
    mine = ("mine:entropy .15", "mine:entropy .30", "default .15, first 9", "other .10")
    figures: dict[str, Any] = {"kl": 0.1, "kl_interval": [0.05, 0.2]}
    summary = {"qa": {name: figures | {"rows": 0.15} for name in (*names, *mine)}}
    quality.draw(summary, tmp_path / "x.svg")
    picture = (tmp_path / "x.svg").read_text()
    legend = re.findall(r"<!-- (.*) -->", picture[picture.index('<g id="legend_1">') :])
    assert legend == ["default", "k_deviation", "mine:entropy", "default .15, first 9", "other"]
    assert "infoflow .15" in texts(tmp_path / "x.svg")
    dots = [text for text in texts(tmp_path / "x.svg") if text in mine]
    assert dots == ["default .15, first 9"], "in the legend alone"
