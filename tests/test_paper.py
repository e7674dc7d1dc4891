"""The report: built from sample results and from those of the repository; what is missing is named."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("typst")


def _load() -> ModuleType:
    """paper/build.py, which is a script, under a name that no package has."""
    spec = importlib.util.spec_from_file_location("paper_build", ROOT / "paper" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


paper = _load()
VALUES: Mapping[str, Any] = {"file_system": "ext4", "threads": 4, "records": 512, "bytes": 1_000_000}
Change = Callable[[dict[str, dict[str, Any]]], object]


def entry(name: str, fields: Sequence[str]) -> dict[str, Any]:
    """A benchmark's result with these fields, and no more than every result has."""
    made: dict[str, Any] = {"name": name, "min_s": 1e-3, "median_s": 1.1e-3}
    for number, field in enumerate(fields):
        *way, last = field.replace("GB/s", "GB%s").split("/")
        target = made
        for step in way:
            target = target.setdefault(step, {})
        target.setdefault(last.replace("GB%s", "GB/s"), VALUES.get(last, 0.5 + 0.13 * number))
    return made


def sample(
    folder: Path,
    change: Change = lambda results: None,
    optional: bool = False,
    turns: int = 3,
    slug: str = "x",
) -> Path:
    """A folder of results as `make bench` and `kvkit demo` leave them, after `change`."""
    fields = {**paper.NEEDED, **(paper.OPTIONAL if optional else {})}
    results = {name: entry(name, needed) for name, needed in fields.items()}
    change(results)
    about = {
        "machine": {"cpu": "Sample CPU", "cores": 3, "gpu": None, "memory_gib": 5, "system": "Linux 6.1"},
        "versions": {"python": "3.11.0", "kvkit": "0", "torch": "2", "numpy": "2", "numba": "0"},
    }
    turn = {"prompt_tokens": 100, "hit_tokens": {"disk": 64}, "computed_tokens": 36, "ttft_s": 0.25}
    compared = turn | {"ttft_cold_s": 2.0, "identical": True}
    folder.mkdir(exist_ok=True)
    (folder / f"{slug}.json").write_text(json.dumps(about | {"results": list(results.values())}))
    figures = about | {"model": "a model", "turns": [compared | {"identical": i > 0} for i in range(turns)]}
    (folder / f"demo-{slug}.json").write_text(json.dumps(figures))
    return folder


def compiled(folder: Path) -> Path:
    """A file as the compile gate records it."""
    found = {"registers": 80, "spill_bytes": 0, "shared_bytes": 1024}
    found |= {"loads": 4, "loads_16": 2, "stores": 2, "stores_16": 2}
    kernels = [
        {"problem": f"a {kernel}", "kernel": kernel, "target": target, **found}
        for kernel in ("copy_rows", "attend")
        for target in ("sm_90", "gfx942")
    ]
    path = folder / "compile.json"
    path.write_text(json.dumps({"triton": "3", "kernels": kernels}))
    return path


def blended(folder: Path, size: str = "1k", slug: str = "x") -> Path:
    """A file as `kvkit bench blend` leaves it."""
    names = ("full", "naive", "default .05", "default .15", "k deviation .15", "k deviation .15, block mask")
    measured: dict[str, dict[str, Any]] = {
        name: {
            "samples": 2,
            "rows": 0.1 * number,
            "kl": 0.3 / number,
            "kl_interval": [0.2 / number, 0.4 / number],
            "top1": 0.9,
            "perplexity": 9.0,
            "speedup": 2.0 * number,
        }
        for number, name in enumerate(names, 1)
    }
    measured["default .15"] |= {"kl_of_k_deviation": 0.6, "kl_of_k_deviation_interval": [0.5, 0.7]}
    asked = {name: figures | {"exact": 0.5} for name, figures in measured.items()}
    sets = {"contiguous": measured, "documents": measured, "retrieval": asked}
    path = folder / f"blend-{size}-{slug}.json"
    path.write_text(json.dumps({"model": "a model", "samples": 2, "tokens": 1024, "sets": sets}))
    return path


def pages(pdf: Path) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))


@pytest.mark.parametrize("optional", [False, True])
def test_sample_results_make_a_paper(
    optional: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pdf = paper.build(sample(tmp_path / "results", optional=optional), tmp_path / "out")
    assert pdf == tmp_path / "out" / "kvkit.pdf"
    assert pages(pdf) >= 3
    assert capsys.readouterr().err == ""  # no warnings of Typst
    assert {path.name for path in pdf.parent.iterdir()} == {"kvkit.pdf", "data.json", "reuse.svg"}


def test_the_paper_says_what_the_results_say(tmp_path: Path) -> None:
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


def test_kernels_and_blending_are_in_the_paper_where_they_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = sample(tmp_path / "results", optional=True)
    made = {"none": paper.build(results, tmp_path / "none").read_bytes()}
    for name, write in {"gate": compiled, "1k": blended, "4k": lambda f: blended(f, "4k")}.items():
        write(results)
        made[name] = paper.build(results, tmp_path / name).read_bytes()
    assert len(set(made.values())) == 4
    assert not (tmp_path / "gate" / "blend.svg").exists()
    assert (tmp_path / "1k" / "blend.svg").exists()
    assert capsys.readouterr().err == ""
    blended(results, slug="another machine")
    assert paper.build(results, tmp_path / "other").read_bytes() == made["4k"]


def test_gaps_in_what_was_compiled_or_blended_are_named_with_their_commands(tmp_path: Path) -> None:
    results = sample(tmp_path / "results")
    path = compiled(results)
    path.write_text(path.read_text().replace("spill_bytes", "spilt"))
    with pytest.raises(paper.PaperError, match=r"lacks spill_bytes: .*kvkit.kernels.tuning.gate"):
        paper.build(results, tmp_path / "out")
    path.unlink()
    path = blended(results, "4k")
    document = json.loads(path.read_text())
    del document["sets"]["documents"]["naive"]["kl_interval"]
    path.write_text(json.dumps(document))
    found = "lacks kl_interval of naive in documents: run `kvkit bench blend --tokens 4096 --json "
    with pytest.raises(paper.PaperError, match=re.escape(found)):
        paper.build(results, tmp_path / "out")


@pytest.mark.parametrize("name", paper.NEEDED)
def test_a_missing_benchmark_is_named_with_its_command(name: str, tmp_path: Path) -> None:
    results = sample(tmp_path, lambda results: results.pop(name))
    with pytest.raises(paper.PaperError) as caught:
        paper.build(results, tmp_path / "out")
    command = f"{name}: run `python -m benchmarks.run benchmarks/bench_{name.split('::')[0]}.py`"
    assert str(caught.value).endswith(command)
    assert str(results / "x.json") in str(caught.value)
    assert (ROOT / "benchmarks" / f"bench_{name.split('::')[0]}.py").exists()


def test_a_missing_figure_of_a_benchmark_is_named(tmp_path: Path) -> None:
    name = "pages::pages[mla]"
    results = sample(tmp_path, lambda results: results[name]["pack"].pop("of copy_"))
    with pytest.raises(paper.PaperError, match=r"pack/of copy_/min, pack/of copy_/median of pages::pages"):
        paper.build(results, tmp_path / "out")


def test_a_missing_demo_is_named_with_its_command(tmp_path: Path) -> None:
    results = sample(tmp_path, turns=0)
    with pytest.raises(paper.PaperError, match=r"lacks turns: run `kvkit demo --json .*/demo-x\.json`"):
        paper.build(results, tmp_path / "out")
    (results / "demo-x.json").unlink()
    with pytest.raises(paper.PaperError, match=r"is missing: run `kvkit demo --json .*/demo-x\.json`"):
        paper.build(results, tmp_path / "out")


def test_a_folder_without_results_is_said(tmp_path: Path) -> None:
    with pytest.raises(paper.PaperError, match="run `make bench`"):
        paper.build(tmp_path, tmp_path / "out")
    with pytest.raises(paper.PaperError, match="is no folder"):
        paper.build(tmp_path / "none", tmp_path / "out")


def test_the_machine_with_the_most_results_is_taken(tmp_path: Path) -> None:
    sample(tmp_path, slug="b")
    sample(tmp_path, dict.clear, slug="a")
    assert paper.collect(tmp_path)["results"].keys() == paper.NEEDED.keys()


def test_a_slower_peer_and_a_missed_roof_point_to_the_right_sides() -> None:
    results = {name: entry(name, fields) for name, fields in {**paper.NEEDED, **paper.OPTIONAL}.items()}
    results["pages::lmcache"]["pack to LMCache gather"] = {"min": 4.0, "median": 2.0}  # times as fast
    results["pages::pages[vllm-cpu-LBHNC]"]["pack"]["of copy_"] = {"min": 0.5, "median": 0.8}  # of its speed
    ratios = {(bar.label, bar.other): bar.ratio for bar in paper.bars(results)}
    assert ratios["pack, vLLM's CPU pages", "LMCache gather"] == (0.25, 0.5)
    assert ratios["pack, vLLM's CPU pages", "copy_"] == (2.0, 1.25)


def test_no_measured_number_is_typed_by_hand() -> None:
    text = (ROOT / "paper" / "kvkit.typ").read_text().partition("= Introduction")[2]
    assert text
    assert re.findall(r"\d+\.\d+(?![\d.]*(?:pt|em|fr|cm))", text) == []


def test_every_reference_is_cited() -> None:
    text = (ROOT / "paper" / "kvkit.typ").read_text()
    keys = re.findall(r"^@\w+\{(\w+),", (ROOT / "paper" / "references.bib").read_text(), re.MULTILINE)
    assert keys
    assert [key for key in keys if f"@{key}" not in text] == []


def test_the_results_of_the_repository_make_a_paper(tmp_path: Path) -> None:
    assert list((ROOT / "benchmarks" / "results").glob("demo-*.json"))
    assert pages(paper.build(ROOT / "benchmarks" / "results", tmp_path)) >= 3


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["build.py", str(sample(tmp_path / "results")), str(out)])
    paper.main()
    assert capsys.readouterr().out.strip() == str(out / "kvkit.pdf")
    (tmp_path / "results" / "demo-x.json").unlink()
    with pytest.raises(SystemExit, match="kvkit demo"):
        paper.main()
