"""Draw docs/pictures/ from results/, so that none shows what was not measured.

python -m benchmarks.report.pictures
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.folders import RESULTS, ROOT
from benchmarks.report import dashboard
from benchmarks.report.spec import MACHINE
from benchmarks.research import leaderboard
from benchmarks.serving import resident, timeline, vllm_blend
from kvkit.lab.demo import conversation as demo
from kvkit.lab.demo import pd


def _demo(found: dict[str, Any], path: Path) -> None:
    first, second = ([demo.Turn(**turn) for turn in found[key]] for key in ("first_process", "turns"))
    demo.picture(first, second).savefig(path, dpi=110)


def _pd(found: dict[str, Any], path: Path) -> None:
    pd.draw([pd.PdTurn(**turn) for turn in found["turns"]], path)


def _resident(found: dict[str, Any], path: Path) -> None:
    samples = [resident.Sample(**sample) for sample in found["samples"]]
    resident.draw(resident.Run(found["stored_bytes"], found["staging_bytes"], samples), path)


def _timeline(found: dict[str, Any], path: Path) -> None:
    timeline.draw([timeline.Event(**event) for event in found["events"]], path)


def _vllm_blend(found: dict[str, Any], path: Path) -> None:
    vllm_blend.draw(found["results"], path)


PICTURES: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    "dashboard.png": ("dashboard", dashboard.draw),
    "demo.png": ("demo", _demo),
    "leaderboard.png": ("leaderboard-smollm2", leaderboard.draw),
    "pd.png": ("flow-both", _pd),
    "resident.png": ("resident", _resident),
    "timeline.png": ("timeline", _timeline),
    "vllm-blend.png": ("vllm-blend", _vllm_blend),
}
"""By file in docs/pictures/: whose result it shows, and what draws it."""


def draw(name: str, path: Path) -> None:
    """Draw one of `PICTURES` to `path`, as a PNG."""
    result, function = PICTURES[name]
    function(json.loads((RESULTS / f"{result}-{MACHINE}.json").read_text()), path)


if __name__ == "__main__":
    for name in PICTURES:
        draw(name, ROOT / "docs/pictures" / name)
