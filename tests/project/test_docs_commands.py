"""Every command and program in README and docs is run by a test, or the page says why not."""

from __future__ import annotations

import ast
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from completions_server import Completions
from page_blocks import DATA, EXCUSE, PAGES, ROOT, RUNNABLE, Block, blocks, check_printed, on_page, run_shell
from page_command_server import Typed
from repository import TESTS

from kvkit.lab.serve.workloads import WORKLOADS
from kvkit.lab.testbed.openai_engine import OpenAIEngine
from kvkit.lab.testbed.servers import free_ports, together
from kvkit.tiers.testing.contract import DEADLINE_S

EVERY = [block for page in PAGES for block in blocks(page)]


def asked_for() -> Iterator[tuple[str, str]]:
    """(page, beginning of a block) of what tests take from the pages; without one: all its Python."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if node.func.id == "on_page":
                page, start = texts
                yield page, start
            elif node.func.id == "run_page":
                yield texts[0], ""


def runs(asked: tuple[str, str], block: Block) -> bool:
    page, start = asked
    return page == block.page and (block.text.startswith(start) if start else block.language == "python")


def excused(block: Block) -> bool:
    """Whether the page says why no test runs it."""
    return block.after.startswith(EXCUSE)


def unaccounted(every: list[Block], asked: list[tuple[str, str]]) -> list[str]:
    """What of `every` neither runs nor says why not, or has no known language."""
    found = []
    for block in every:
        if block.language not in (*RUNNABLE, *DATA):
            found.append(f"{block}: a language of {', '.join((*RUNNABLE, *DATA))} is missing")
        elif block.language in RUNNABLE and not excused(block) and not any(runs(a, block) for a in asked):
            found.append(f"{block}: no test runs it, and the page does not say '{EXCUSE}...'")
    return found


def test_every_command_and_program_is_run_or_says_why_not() -> None:
    assert unaccounted(EVERY, list(asked_for())) == []


def test_what_tests_ask_for_is_on_the_pages() -> None:
    for asked in asked_for():
        found = [block for block in EVERY if runs(asked, block)]
        assert found if asked[1] == "" else len(found) == 1, asked


@pytest.mark.parametrize(
    ("block", "word"),
    [
        (Block("a.md", "", "kvkit doctor\n", ""), "a language of sh"),
        (Block("a.md", "sh", "kvkit doctor\n", "Then type:"), "no test runs it"),
        (Block("a.md", "python", "print(1)\n", ""), "no test runs it"),
    ],
)
def test_a_block_that_nothing_runs_is_found(block: Block, word: str) -> None:
    (found,) = unaccounted([block], [("b.md", "kvkit doctor"), ("a.md", "kvkit top")])
    assert word in found
    excused = Block(block.page, block.language or "text", block.text, "<!-- not run: it needs a GPU. -->")
    assert unaccounted([excused], []) == []


def test_a_typed_server_that_ends_is_told_of_by_its_log(tmp_path: Path) -> None:
    server = Typed(tmp_path, "echo no such model; exit 3", {}, *free_ports(1))
    with pytest.raises(AssertionError, match="no such model"), server:
        pass


def test_doctor(tmp_path: Path) -> None:
    done = run_shell(on_page("docs/index.md", "kvkit doctor"), tmp_path)
    assert "packages: " in done.stdout
    assert "kernels on the CPU: ok" in done.stdout


def test_policies_and_capacities_are_compared(tmp_path: Path) -> None:
    done = run_shell(on_page("docs/research/simulate.md", "kvkit simulate mixed --compare"), tmp_path)
    check_printed("docs/research/simulate.md", "kvkit simulate mixed --compare", done.stdout)


@pytest.mark.nightly
def test_a_fleet_is_simulated_as_the_page_has_it(tmp_path: Path) -> None:
    (settings,) = blocks("docs/research/simulate.md", "toml")
    (tmp_path / "sim.toml").write_text(settings.text)
    done = run_shell(on_page("docs/research/simulate.md", "kvkit simulate mixed --config"), tmp_path)
    check_printed("docs/research/simulate.md", "kvkit simulate mixed --config", done.stdout)


@pytest.mark.nightly
def test_snapshots_are_compared(tmp_path: Path) -> None:
    done = run_shell(on_page("docs/research/simulate.md", "printf '[model]"), tmp_path)
    check_printed("docs/research/simulate.md", "printf '[model]", done.stdout)


@pytest.mark.nightly
def test_policies_are_compared_on_sessions_of_agents(tmp_path: Path) -> None:
    """With the figures that the page shows: the trace is in the repository."""
    block = on_page("docs/research/simulate.md", "printf '[tiers.memory]")
    done = run_shell(block, tmp_path, {"benchmarks/traces": str(ROOT / "benchmarks" / "traces")})
    check_printed("docs/research/simulate.md", "printf '[tiers.memory]", done.stdout)
    shown = (ROOT / "docs/research/simulate.md").read_text()
    rates = re.findall(r"^│ (?:lru|arc|sessions) .*%.*$", done.stdout, re.MULTILINE)
    assert len(rates) == 3
    assert all(row in shown for row in rates)


@pytest.mark.nightly
def test_a_file_is_simulated_with_the_settings_that_the_module_shows(tmp_path: Path) -> None:
    """A trace in Mooncake's format; figures and a picture of them."""
    line = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    (tmp_path / "conversation_trace.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    example = ast.get_docstring(ast.parse((ROOT / "kvkit/lab/simulate/config.py").read_text())) or ""
    (tmp_path / "sim.toml").write_text("\n".join(re.findall(r"^    (.*)$", example, re.MULTILINE)))
    command = "kvkit simulate conversation_trace.jsonl --config sim.toml --json out.json --png out.png"
    assert "hit" in run_shell(command, tmp_path).stdout
    assert json.loads((tmp_path / "out.json").read_text())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_servers_that_run_are_measured(tmp_path: Path) -> None:
    with Completions() as mine, Completions() as other:
        places = {"http://127.0.0.1:8000": mine.url("good"), "http://10.0.0.7:8000": other.url("counting")}
        command = on_page("docs/research/measure.md", "kvkit bench serve --url")
        check_printed(
            "docs/research/measure.md",
            "kvkit bench serve --url",
            run_shell(command, tmp_path, places).stdout,
        )
    rows = json.loads((tmp_path / "serve.json").read_text())["results"]
    assert {(row["workload"], row["system"]) for row in rows} == {
        (workload, system) for workload in WORKLOADS for system in ("mine", "other")
    }


def test_a_tier_is_measured(tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(on_page("docs/research/measure.md", "import time"))
    (tmp_path / "kvkit.toml").write_text(f'staging = "64MiB"\ntiers.disk.url = "{tmp_path}/kv"\n')
    done = run_shell("python measure.py", tmp_path)
    check_printed("docs/research/measure.md", "import time", done.stdout)


@pytest.mark.nightly
def test_code_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # a benchmark within a worker of pytest-xdist measures nothing
    command = on_page("docs/research/measure.md", "python -m benchmarks.report.run")
    done = run_shell(command, ROOT, HOME=str(tmp_path), KVKIT_RESULTS=str(tmp_path / "results"))
    check_printed("docs/research/measure.md", "python -m benchmarks.report.run", done.stdout)


def test_the_router_and_its_engines(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    roles = ("prefill", "first", "second")
    engines = [OpenAIEngine(tmp_path / role) for role in roles]
    for engine in engines:
        engine.folder.mkdir()
    places = {f"http://10.0.0.{i}:8000": engine.url for i, engine in enumerate(engines, 1)}
    places["--port 8000"] = f"--port {port}"
    command = on_page("docs/serve/router.md", "kvkit router --prefill")
    with together(*engines), Typed(tmp_path, command, places, port) as router:
        body = json.dumps({"model": "toy", "prompt": "x" * 2000, "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"{router.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            assert len(json.loads(reply.read())["choices"]) == 1
        assert [len(engine.seen()) for engine in engines].count(1) == 2, "one P and one D"
        check_printed("docs/serve/router.md", "kvkit router --prefill", router.log.read_text())
