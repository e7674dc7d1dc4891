"""The report builds from sample results and the repository's, and names missing results."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typst")

from repository import ROOT

from benchmarks.report.registry import REGISTERED
from paper import build as paper
from paper import derived, plots, sources

RESULTS = ROOT / "benchmarks" / "results"
MACHINE = "amd-epyc-2-cores"
Change = Callable[[dict[str, dict[str, Any]]], object]


def sample(folder: Path, change: Change = lambda results: None, slug: str = "x") -> Path:
    """The recorded results as another machine's, those of benchmarks after `change`."""
    folder.mkdir(exist_ok=True)
    for name in sources.SOURCES.values():
        result = REGISTERED[name]
        shutil.copy(result.path(RESULTS, MACHINE), result.path(folder, slug))
    document = json.loads((RESULTS / f"{MACHINE}.json").read_text())
    results = {entry["name"]: entry for entry in document["results"]}
    change(results)
    (folder / f"{slug}.json").write_text(json.dumps(document | {"results": list(results.values())}))
    return folder


def pages(pdf: Path) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))


@pytest.mark.nightly
def test_the_paper_says_what_the_results_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal results make equal bytes; another figure, shown in the text alone, makes other ones."""

    def slower(results: dict[str, dict[str, Any]]) -> None:
        results["record::cost_per_record"]["verify"]["us"] = 77.0

    def build(name: str, change: Change = lambda results: None) -> tuple[bytes, bytes]:
        pdf = paper.build(sample(tmp_path / name, change), tmp_path / f"{name}-out")
        return pdf.read_bytes(), (pdf.parent / "reuse.svg").read_bytes()

    first, again, changed = build("first"), build("again"), build("changed", slower)
    assert first == again
    assert changed[0] != first[0]
    assert changed[1] == first[1]
    assert capsys.readouterr().err == ""  # no warnings of Typst


def test_a_missing_file_is_named_with_its_command(tmp_path: Path) -> None:
    folder = sample(tmp_path)
    for name in sources.SOURCES.values():
        path = REGISTERED[name].path(folder, "x")
        kept = path.read_bytes()
        path.unlink()
        command = REGISTERED[name].command_for(path)
        with pytest.raises(paper.PaperError, match=re.escape(f"{path} is missing: run `{command}`")):
            sources.read(folder, "x")
        path.write_bytes(kept)


@pytest.mark.parametrize(
    ("name", "way", "says"),
    [
        # the text asks for these
        ("compile", ("triton",), "lacks triton: run `python -m kvkit.lab.compiling.gate --json "),
        ("demo", ("turns", 2, "identical"), "lacks identical: run `kvkit demo --json "),
        ("soak", ("parts", "vllm", "wrong_tokens"), "lacks wrong_tokens: run `python -m benchmarks.soak "),
        # and Python for these
        (
            "vllm-blend",
            ("results", 0, "ttft_s", "hit, on"),
            "lacks results/0/ttft_s/hit, on: run `python -m ",
        ),
    ],
)
def test_a_missing_figure_is_named_with_its_command(
    name: str, way: tuple[str | int, ...], says: str, tmp_path: Path
) -> None:
    path = REGISTERED[name].path(sample(tmp_path / "results"), "x")
    document = inner = json.loads(path.read_text())
    for step in way[:-1]:
        inner = inner[step]
    del inner[way[-1]]
    path.write_text(json.dumps(document))
    with pytest.raises(paper.PaperError, match=re.escape(f"{path} {says}")):
        paper.build(path.parent, tmp_path / "out")


def test_a_missing_figure_of_no_certain_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = REGISTERED["leaderboard-smollm2"].path(sample(tmp_path / "results"), "x")
    document = json.loads(path.read_text())
    del document["overall"]["naive"]["kept_interval"]
    path.write_text(json.dumps(document))
    with pytest.raises(paper.PaperError, match=r'"kept_interval"[^│]*paper/text/appendix\.typ:\d+'):
        paper.build(path.parent, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "lost", "says"),
    [
        ("tiers::memory_borrow", None, "tiers::memory_borrow"),
        ("pages::lmcache", None, "pages::lmcache"),
        ("pages::pages[vllm-cpu-LBHNC]", "pack", "pages::pages[vllm-cpu-LBHNC]/pack"),
        ("cache::overhead_of_a_memory_hit", "us_per_chunk", "us_per_chunk"),
    ],
)
def test_a_missing_benchmark_or_figure_of_it_is_named_with_its_command(
    name: str, lost: str | None, says: str, tmp_path: Path
) -> None:
    folder = sample(
        tmp_path / "results", lambda results: results.pop(name) if lost is None else results[name].pop(lost)
    )
    file = f"benchmarks/micro/bench_{name.split('::')[0]}.py"
    assert (ROOT / file).exists()
    message = f"{folder / 'x.json'} lacks {says}: run `python -m benchmarks.report.run {file}`"
    with pytest.raises(paper.PaperError, match=re.escape(message)):
        paper.build(folder, tmp_path / "out")


def test_a_folder_without_results_is_said(tmp_path: Path) -> None:
    with pytest.raises(paper.PaperError, match="run `make bench`"):
        paper.build(tmp_path, tmp_path / "out")
    with pytest.raises(paper.PaperError, match="is no folder"):
        paper.build(tmp_path / "none", tmp_path / "out")


def test_the_machine_with_the_most_results_is_taken(tmp_path: Path) -> None:
    sample(tmp_path, slug="b")
    sample(tmp_path, dict.clear, slug="a")
    assert paper.collect(tmp_path)["slug"] == "b"


def test_a_slower_peer_and_a_missed_roof_point_to_the_right_sides(tmp_path: Path) -> None:
    def change(results: dict[str, dict[str, Any]]) -> None:
        results["pages::lmcache"]["pack to LMCache gather"] = {"min": 4.0, "median": 2.0}  # times as fast
        results["pages::pages[vllm-cpu-LBHNC]"]["pack"]["of copy_"] = {"min": 0.5, "median": 0.8}  # its speed

    results = paper.collect(sample(tmp_path, change))["results"]
    ratios = {(bar.label, bar.other): bar.ratio for bar in plots.bars(results)}
    assert ratios["pack, vLLM's CPU pages", "LMCache gather"] == (0.25, 0.5)
    assert ratios["pack, vLLM's CPU pages", "copy_"] == (2.0, 1.25)


def test_a_ratio_is_that_of_pairs() -> None:
    """Where one is always twice the other the interval has no width, however much both vary."""
    others = [1.0, 3.0, 8.0, 2.0]
    found = derived.ratio([2 * time for time in others], others)
    assert found == pytest.approx({"mean": 2, "low": 2, "high": 2, "pairs": 4})


def test_what_was_hit_and_what_was_new_are_compared_with_plain_vllm() -> None:
    times = {"plain": (4.0, 5.0), "kvkit": (1.0, 5.5), "lmcache": (2.0, 6.0)}
    requests = [
        {"system": system, "workload": workload, "again": again, "ttft_s": time}
        for system, (hit, new) in times.items()
        for workload, again, time in (
            ("document-qa", False, 9.0),
            ("document-qa", True, hit),
            ("random", False, new),
        )
    ]
    results = [
        {"system": system, "workload": "document-qa", "hit_tokens": 1, "prompt_tokens": 2} for system in times
    ]
    rows = {row["system"]: row for row in derived.serve({"requests": requests, "results": results})}
    assert rows["kvkit"]["hit"]["mean"] == 0.25
    assert rows["kvkit"]["new"]["mean"] == pytest.approx(1.1)
    assert rows["kvkit"]["of_lmcache"]["mean"] == 0.5


def test_the_gap_that_a_policy_closes() -> None:
    runs = [
        {
            "trace": "t",
            "share": 0.1,
            "seed": s,
            "asked": 100,
            "bound": 60,
            "hits": {"lru": 20, "arc": 20 + 20 * s},
        }
        for s in (0, 1)
    ]
    small = {
        "trace": "t",
        "share": 0.5,
        "seed": 0,
        "asked": 1000,
        "bound": 509,
        "hits": {"lru": 500, "arc": 0},
    }
    found = derived.frontier([*runs, small])
    assert len(found["cells"]) == 1, "a gap below a point is none to close"
    assert found["closed"] == {"lru": 0, "arc": 0.25}
    assert found["cells"][0]["bound"] == 0.6
    assert found["cells"][0]["hits"] == pytest.approx({"lru": 0.2, "arc": 0.3})


def test_what_is_refused_on_one_way_is_no_wrong_answer() -> None:
    right, wrong = ({"same_tokens": same, "difference": 0.25} for same in (True, False))
    rows = derived.models(
        {
            "A": {"special": "", "tolerance": 1, "ways": {"x": right, "y": {"refused": "why"}}},
            "B": {
                "special": "",
                "tolerance": 1,
                "refused": "why",
                "lmcache": {"ways": {"x": right, "y": wrong}},
            },
        }
    )
    assert [(row["kind"], row["same"], row["ways"], row["refused"]) for row in rows] == [
        ("run", 1, 1, 1),
        ("refused", 0, 0, 0),
    ]
    assert rows[0]["lmcache"] is None
    assert (rows[1]["lmcache"]["same"], rows[1]["lmcache"]["ways"]) == (1, 2)


def texts() -> dict[str, str]:
    found = {str(path): path.read_text() for path in (ROOT / "paper").rglob("*.typ")}
    assert len(found) > 5
    return found


def test_no_measured_number_is_typed_by_hand() -> None:
    for name, text in texts().items():
        if "/text/" in name:
            assert re.findall(r"\d+\.\d+(?![\d.]*(?:pt|em|fr|cm))", strip_code(text)) == [], name


def strip_code(text: str) -> str:
    """`text` without versions of what is required, which measure nothing."""
    return re.sub(r"Python 3\.\d+ or later|TLS 1\.3", "", text)


def test_every_reference_is_cited() -> None:
    text = "\n".join(texts().values())
    keys = re.findall(r"^@\w+\{(\w+),", (ROOT / "paper" / "references.bib").read_text(), re.MULTILINE)
    assert keys
    assert [key for key in keys if f"@{key}" not in text] == []


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r'"(\w+/test_\w+)"', "\n".join(texts().values())))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / "tests" / f"{name}.py").exists()] == []


def test_the_command_makes_a_paper_of_the_repository_s_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["build.py", str(RESULTS), str(out)])
    paper.main()
    assert capsys.readouterr().out.strip() == str(out / "kvkit.pdf")
    assert pages(out / "kvkit.pdf") >= 10
    made = {"kvkit.pdf", "data.json", "reuse.svg", "blend.svg", "frontier.svg", "timeline.svg"}
    assert {path.name for path in out.iterdir()} == made
    results = sample(tmp_path / "results")
    (results / "demo-x.json").unlink()
    monkeypatch.setattr(sys, "argv", ["build.py", str(results), str(out)])
    with pytest.raises(SystemExit, match="kvkit demo"):
        paper.main()
