"""README and docs state what results, code and tests hold."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import page_blocks
import pytest
import typer
import yaml
from matplotlib import image
from page_blocks import blocks
from pydantic import BaseModel
from s3_fixture import s3  # noqa: F401 - a fixture
from typer.core import TyperGroup
from typer.main import get_command

import kvkit
from benchmarks.report.pictures import draw
from benchmarks.report.spec import MACHINE
from benchmarks.report.tables import PAGES, RESULTS, ROOT, render
from docs import reference
from kvkit.adapters.vllm.settings import Settings as ConnectorSettings
from kvkit.cli import app
from kvkit.config import Config, PolicyConfig, ServerConfig
from kvkit.handoff.settings import HandoffConfig
from kvkit.kernels import tuning
from kvkit.observe import http, metrics
from kvkit.observe.access import DEFAULT_PORT
from kvkit.router import metrics as router_metrics
from kvkit.tiers import health
from kvkit.tiers.settings import TierConfig

SITE = [page for page in page_blocks.PAGES if page.startswith("docs/")]


def test_tables_come_from_the_results() -> None:
    assert len(PAGES) > 5
    stale = [page for page in PAGES if render(text := (ROOT / page).read_text()) != text]
    assert stale == [], "run: python -m benchmarks.report.tables"


def test_pictures_come_from_the_results(tmp_path: Path) -> None:
    """Drawn anew they are the same, but for what another version of matplotlib does to an edge."""
    names = sorted(path.name for path in (ROOT / "docs/pictures").glob("*.png"))
    assert len(names) > 5
    stale = []
    for name in names:
        draw(name, tmp_path / name)
        here, there = (image.imread(folder / name) for folder in (tmp_path, ROOT / "docs/pictures"))
        if here.shape != there.shape or np.abs(here - there).mean() >= 0.002:
            stale.append(name)
    assert stale == [], "run: python -m benchmarks.report.pictures"


def test_the_timeline_shows_what_its_page_says() -> None:
    assert (
        "A record is verified by the thread that read it"
        in (ROOT / "docs/evidence/performance.md").read_text()
    )
    events = json.loads((RESULTS / f"timeline-{MACHINE}.json").read_text())["events"]
    by_kind = {kind: {e["thread"] for e in events if e["kind"] == kind} for kind in ("verify", "unpack")}
    assert all(thread.startswith(("kvkit-disk-", "kvkit-s3-")) for thread in by_kind["verify"])
    assert by_kind["unpack"] == {"MainThread"}


def test_the_reference_comes_from_the_code() -> None:
    assert len(reference.PAGES) > 4
    stale = [page for page in reference.PAGES if reference.render(text := (ROOT / page).read_text()) != text]
    assert stale == [], "run: make docs"


def models() -> list[type[BaseModel]]:
    """Every model of settings in kvkit; `BlendFields` are a request's."""
    root = Path(kvkit.__file__).parent
    for folder in (root, root / "adapters" / "vllm"):
        for path in folder.rglob("*.py"):
            if "import BaseModel" in (text := path.read_text()) or ", BaseModel" in text:
                importlib.import_module(".".join(("kvkit", *path.relative_to(root).with_suffix("").parts)))

    def below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        for inner in model.__subclasses__():
            yield inner
            yield from below(inner)

    found = [model for model in below(BaseModel) if model.__module__.startswith("kvkit.")]
    return [m for m in found if not m.__name__.startswith("_") and m.__name__ != "BlendFields"]


def test_every_setting_is_in_a_table() -> None:
    text = "".join((ROOT / page).read_text() for page in reference.PAGES)
    for marker in reference.SETTINGS:
        assert text.count(f"<!-- reference: {marker} -->") == 1, marker
    found = models()
    assert len(found) > len(reference.SETTINGS)
    for model in found:
        for name, field in model.model_fields.items():
            if reference.is_section(field):
                continue
            related = [m for m in reference.SETTINGS.values() if issubclass(model, m) or issubclass(m, model)]
            shown = [m for m in related if name in m.model_fields]
            assert shown, (
                f"{model.__module__}.{model.__qualname__}.{name} is in no table of docs/reference.py"
            )
            assert field.description, f"{model.__qualname__}.{name} has no description"


def imported(code: str) -> Iterator[str]:
    """The modules of kvkit that some Python imports, as `from MODULE import name` or `import MODULE`.

    What `kvkit` itself gives is left out; what `kvkit.kernels.tuning` gives is where it is defined.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvkit"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole.removeprefix("kvkit.") not in kvkit.__all__:
                    if node.module == "kvkit.kernels.tuning" and alias.name in tuning.__all__:
                        yield getattr(tuning, alias.name).__module__
                        continue
                    is_module = reference.source_of(whole.removeprefix("kvkit.")).exists()
                    yield whole if is_module else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("kvkit."))


def test_what_pages_and_examples_import_is_listed_as_public() -> None:
    outside = [page for page in page_blocks.PAGES if page != "CONTRIBUTING.md"]  # whose code is kvkit's own
    shown = [block.text for page in outside for block in page_blocks.blocks(page, "python")]
    programs = [text for text in shown if "import " in text]
    programs += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    for path in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        programs += [re.sub(r"\A%%writefile .*\n", "", source) for source in sources]
    found = {module.removeprefix("kvkit.") for code in programs for module in imported(code)}
    assert len(found) > 5
    ours = {module for module in found if module.startswith("kernels.blocks")}  # which own-kernel.md adds
    assert found - ours - set(reference.API) == set()


def test_every_public_class_and_function_is_on_the_page_and_says_what_it_is() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    for module in reference.API:
        text = page.split(f"\n## `kvkit.{module}`\n")[1].split("\n## ")[0]
        for node in reference.public(ast.parse(reference.source_of(module).read_text())):
            assert f"\n| `{node.name}` | " in text, f"kvkit.{module}.{node.name}; run: make docs"
            assert ast.get_docstring(node), f"kvkit.{module}.{node.name} has no docstring"


PROMISES = re.compile(
    r"\b(?:yet|this version|will be|(?:is|are) planned|plan to|future|for now|coming soon|to come|todo)\b",
    re.I,
)
"""Words that promise or deny: what stands on a page so is forgotten there when it is made."""


def promises(text: str) -> list[str]:
    """Where a page promises or denies something."""
    return [
        " ".join(text[max(0, word.start() - 60) : word.end() + 60].split())
        for word in PROMISES.finditer(text)
    ]


def test_no_page_promises_or_denies_what_may_exist() -> None:
    found = {page: promises((ROOT / page).read_text()) for page in page_blocks.PAGES}
    assert {page: words for page, words in found.items() if words} == {}


def test_a_promise_is_found() -> None:
    for text in (
        "This version has none: engines meet",
        "| none yet | no handoff |",
        "loads by layer are\nnot yet written back",
    ):
        assert promises(text)


@pytest.mark.parametrize("gpu", ["nvidia-h100-80gb-hbm3", "nvidia-h200"])
def test_what_a_page_says_of_a_gpu_is_in_its_results(gpu: str) -> None:
    """All defaults are right, equal runs give equal bits, the sanitizer finds nothing."""
    path = RESULTS / f"gpu-{gpu}.json"
    found = json.loads(path.read_text())["results"]
    right = [line["right"] for line in found if line["step"] == "defaults"]
    differ = [line["differ"] for line in found if line["step"] == "determinism" and line["runs"]]
    errors = [line["errors"] for line in found if line["step"] == "sanitizer"]
    assert (all(right), sum(differ), errors) == (True, 0, [0, 0])
    assert len(right) == len(differ) == len([line for line in found if line["step"] == "defaults"]) > 50


def test_kernels_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    def table(name: str, results: list[dict[str, Any]]) -> list[str]:
        (tmp_path / f"{MACHINE}.json").write_text(json.dumps({"results": results}))
        return render(f"<!-- table: {name} -->\n<!-- end -->", tmp_path).splitlines()[1:-1]

    assert table("kernels", []) == table("lost_context", []) == ["*Not measured yet.*"]
    prefill = {"name": "prefill::blended_prefill[4k]", "ratio_min": 0.2, "ratio_median": 0.25}
    speed = {"unpack rotated": {"of copy_": {"min": 0.5, "median": 0.4}}}
    *_, unpack, blended = table("kernels", [prefill, {"name": "pages::conversions[llama-bfloat16]"} | speed])
    assert unpack.startswith("| unpack rotated, Llama")
    assert unpack.endswith("| 2.00 | 2.50 |"), "time over time, where the benchmark gives speed over speed"
    assert blended.startswith("| blended prefill")
    assert blended.endswith("| 0.20 | 0.25 |")


def test_files_that_are_named_exist() -> None:
    absent = []
    for page in page_blocks.PAGES:
        text = (ROOT / page).read_text()
        named = re.findall(r"\]\(([^)#:]+)\)", text)
        named += re.findall(r"`((?:kvkit|tests|benchmarks|examples|docs)/[\w./-]+)`", text)
        folders = (ROOT, (ROOT / page).parent)
        absent += [(page, path) for path in named if not any((folder / path).exists() for folder in folders)]
    assert absent == []


def commands_of(page: str) -> list[str]:
    """The lines of a page's shell blocks, and what it names in its text, that call kvkit."""
    shells = [block.text for block in blocks(page, "sh")]
    lines = [line for shell in shells for line in shell.splitlines() if line.startswith("kvkit ")]
    return lines + re.findall(r"`(kvkit [a-z].*?)`", (ROOT / page).read_text())


def test_commands_that_are_named_exist() -> None:
    lines = [line for page in page_blocks.PAGES for line in commands_of(page)]
    assert len(lines) > 50
    for line in lines:
        command: Any = get_command(app)
        words = line.split("#")[0].split()[1:]
        while isinstance(command, TyperGroup) and not (
            command.invoke_without_command and (not words or words[0].startswith("--"))
        ):
            command = command.get_command(typer.Context(command), words.pop(0))
            assert command is not None, line
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_metrics_and_paths_that_are_named_exist() -> None:
    text = "".join((ROOT / page).read_text() for page in SITE)
    listed = (metrics.METRICS, reference.vllm_metrics(), router_metrics.__doc__)
    known = set(re.findall(r"kvkit_\w+", "".join(text or "" for text in listed)))
    known |= set(ConnectorSettings.model_fields)
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bkvkit_[a-z_]+", text)}
    assert named
    assert named <= known
    paths = re.findall(r"127\.0\.0\.1:9477(/\w+)", text)
    assert paths
    assert all(f" {path} " in (http.__doc__ or "") for path in paths)
    rules = [yaml.safe_load(block.text) for block in blocks("docs/serve/operate.md", "yaml")]
    assert {rule["expr"] for rule in rules[1]["groups"][0]["rules"]}
    assert rules[0]["scrape_configs"][0]["static_configs"][0]["targets"] == [f"127.0.0.1:{DEFAULT_PORT}"]


def test_operations_says_what_the_circuit_does() -> None:
    text = (ROOT / "docs/serve/operate.md").read_text()
    first, *others = (f"{pause:.0f} s" for pause in health.PAUSES_S)
    assert f"For {first}, then {', '.join(others)} at most" in text
    assert f"{health.FAILURES_TO_PAUSE} failures in a row, or one timeout" in text
    assert f"the last {health.RECENT} reads took {health.SLOW_FACTOR:.0f} times as long" in text


def test_settings_that_take_the_place_of_lmcaches_exist() -> None:
    rows = re.findall(
        r"^\| `.*\| (.*?) \| .*\|$", (ROOT / "docs/serve/from-lmcache.md").read_text(), re.MULTILINE
    )
    names = re.findall(r"`([\w.]+)`", "".join(rows))
    assert len(names) > 20
    tables: dict[str, type[BaseModel]] = {"tiers": TierConfig, "policy": PolicyConfig, "server": ServerConfig}
    tables["handoff"] = HandoffConfig
    of_connector = re.findall(r"`(\w+)` of the connector", "".join(rows))
    assert of_connector
    assert set(of_connector) <= set(ConnectorSettings.model_fields)
    for name in names:
        table, *path = name.split(".")
        if name in of_connector:
            continue
        if not path or (table == "tiers" and len(path) == 1):
            assert table in Config.model_fields, name
        else:
            assert path[-1] in tables[table].model_fields, name


def test_each_promise_of_security_names_a_test_that_is_there() -> None:
    text = (ROOT / "docs/serve/security.md").read_text().split("\n## ", 2)[2]
    promises = re.findall(r"^- \*\*.*?(?=^- |^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert len(promises) > 15
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", promise)
        assert named, f"no test behind: {promise}"
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
