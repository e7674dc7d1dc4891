"""`python -m benchmarks.report.run` keeps the results of benchmarks that passed when others fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from terminals import assert_whole

from benchmarks.report.run import table
from kvkit.lab.testbed.waiting import wait_for

BENCHMARKS = """
import time

def test_first(benchmark):
    benchmark.pedantic(lambda: None)
    benchmark.extra_info["bytes"] = 3

def test_second(benchmark):
    benchmark.pedantic(lambda: None)
    {second}

def test_third(benchmark):
    benchmark.pedantic(lambda: None)
"""


def start(file: Path, second: str = "pass") -> subprocess.Popen[str]:
    file.write_text(BENCHMARKS.format(second=second))
    # a benchmark within a worker of pytest-xdist measures nothing
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.report.run", str(file)],
        cwd=ROOT,
        env=environment | {"KVKIT_RESULTS": str(file.parent / "results")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kept(folder: Path) -> list[str]:
    found = [json.loads(file.read_text()) for file in folder.glob("results/*.json")]
    return [entry["name"] for document in found for entry in document["results"]]


def test_one_that_fails_costs_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "bench_some.py"
    process = start(file, "assert False")
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert f"{file}: exit 1" in printed
    assert kept(tmp_path) == ["some::first", "some::third"]
    process = start(file)
    process.communicate(timeout=200)
    assert process.returncode == 0
    assert kept(tmp_path) == ["some::first", "some::second", "some::third"]
    (entry, *_), *_ = (json.loads(f.read_text())["results"] for f in tmp_path.glob("results/*.json"))
    assert entry["bytes"] == 3
    assert 0 < entry["min_s"] <= entry["median_s"]


def test_what_passed_before_it_was_killed_is_kept(tmp_path: Path) -> None:
    begins = tmp_path / "begins"
    process = start(tmp_path / "bench_some.py", f"open({str(begins)!r}, 'w').close(); time.sleep(600)")
    wait_for(lambda: begins.exists() or process.poll() is not None)  # for the second to begin
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert kept(tmp_path) == ["some::first"]


@pytest.mark.nightly
def test_pytest_measures_a_benchmark_as_it_is_typed() -> None:
    """Without an option, and with --benchmark-only alone: a table, and a ratio for each way."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    few = ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1"]
    for options in ([], ["--benchmark-only"]):
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "benchmarks/micro/bench_record.py",
                "-k",
                "cost_per_record",
                *few,
                *options,
            ],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout
        assert "Name (time in" in run.stdout
        assert re.search(r"^  seal +[\d.]+ µs  ratio [\d.]+ of minima, [\d.]+ of medians$", run.stdout, re.M)
        assert "1 passed" in run.stdout


def test_the_table_is_whole_at_80_columns() -> None:
    entry = {"name": "records::test_a_long_name[of-it]", "min_s": 1e-3, "ratio_min": 1.5, "against": "peer"}
    assert_whole(table([entry]), [entry["name"], "1000.0", "1.50"])
