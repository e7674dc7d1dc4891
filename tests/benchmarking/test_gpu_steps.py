"""The steps of `make gpu` run on small problems in Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import SUPPORT

from benchmarks.gpu import __main__ as schedule
from benchmarks.gpu import bench as benches
from benchmarks.gpu import compare, defaults, driver
from benchmarks.gpu.bench import Bench, each, rehearsal, three
from benchmarks.gpu.packages import ROOT
from benchmarks.gpu.results import AGAIN
from benchmarks.gpu.step import perform

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the steps themselves")

LIBCUDA = """
#include <stdint.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuMemHostGetDevicePointer_v2(uint64_t *found, void *host, unsigned flags) {
    if (host == 0) return 1;
    *found = (uint64_t)host;
    return 0;
}
"""
TOOL = """#!/bin/sh
while [ "$1" != "{python}" ]; do shift; done
"$@" || exit
{then}
"""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results, and an environment as that of the steps."""
    environment = schedule.environment(tmp_path) | {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}
    environment.pop("TRITON_CACHE_DIR", None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def rehearse(step: str, out: Path, libcuda: str = "", without_errors: bool = True) -> list[dict[str, Any]]:
    """The lines that a step records."""
    bench = rehearsal(step, out / "results.jsonl", libcuda)
    perform(bench)
    lines = list(bench.results.of(step))
    assert not (without_errors and any("error" in line for line in lines))
    return lines


def stand_in(folder: Path, tool: str, then: str) -> None:
    """A tool that runs what it is to look at, and then a line of shell."""
    path = folder / "bin" / tool
    path.parent.mkdir(exist_ok=True)
    path.write_text(TOOL.format(python=sys.executable, then=then))
    path.chmod(0o755)
    os.environ["PATH"] = f"{path.parent}{os.pathsep}{os.environ['PATH']}"


def test_the_driver_is_asked_how_it_sees_pinned_memory(out: Path) -> None:
    source, library = out / "cuda.c", out / "libcuda.so"
    source.write_text(LIBCUDA)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    lines = {line["what"]: line for line in rehearse("driver", out, str(library))}
    assert lines["driver"]["cuda"] == 13000
    assert lines["pinned memory"]["device_address_is_the_hosts"] is True
    assert lines["Triton cache"] == {**lines["Triton cache"], "carried": False, "fits": False}
    with pytest.raises(OSError, match="answers 1"):
        driver.device_address(driver.ctypes.CDLL(str(library)), 0)


def test_every_default_is_compiled_checked_timed_and_compared(out: Path) -> None:
    roofs = {line["what"]: line for line in rehearse("roofs", out)}
    assert {"device copy", "to the device", "from the device", "both ways at once"} < set(roofs)
    assert all(0 < line["min_s"] <= line["median_s"] for line in roofs.values())
    compiled, *lines = rehearse("defaults", out)
    assert compiled["problems"] == 2 * len(lines) == 2 * len(three())
    assert compiled["errors"] == []
    for line in lines:
        assert line["right"], line["fault"]
        assert 0 < line["min_us"] <= line["us"]
        copy = roofs["device copy"]["moved_bytes"] / roofs["device copy"]["min_s"] / 1e9
        assert line["of_copy"] == pytest.approx(line["GB/s"] / copy)
        assert ("of_product" in line) == ("TFLOP/s" in line)


def test_a_wrong_default_is_recorded_and_the_next_is_measured(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "carried_cache", lambda: {"fits": True})
    monkeypatch.setattr(benches.Case, "run", lambda case, config: None)
    assert [line["right"] for line in rehearse("defaults", out)] == [False] * len(three())


def test_runs_that_differ_are_counted(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line["differ"] for line in rehearse("determinism", out)] == [0] * len(three())
    run, number = benches.Case.run, iter(range(1000))

    def drift(case: benches.Case, config: Any) -> None:
        run(case, config)
        case.outputs[0].view(torch.uint8).flatten()[0] = next(number)

    monkeypatch.setattr(benches.Case, "run", drift)
    (out / "results.jsonl").unlink()
    assert [line["differ"] for line in rehearse("determinism", out)] == [1] * len(three())


@pytest.mark.nightly
def test_tools_run_over_kernels_and_what_they_say_is_kept(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    stand_in(out, "compute-sanitizer", "echo '========= ERROR SUMMARY: 3 errors'; exit 86")
    rows = ('"ID","Kernel Name","gpu__time_duration.sum"', '"","","us"', '"0","attend","12.5"')
    stand_in(out, "ncu", "\n".join(f"echo '{row}'" for row in rows))
    monkeypatch.setattr("benchmarks.gpu.sanitizer.CHECKS", ("memcheck",))
    (memcheck,) = rehearse("sanitizer", out)
    assert (memcheck["status"], memcheck["errors"]) == (86, 3)
    launch, ncu = rehearse("profile", out)
    assert launch["what"] == "attend"
    assert launch["metrics"]["gpu__time_duration.sum"] == "12.5 us"
    assert (ncu["status"], ncu["launches"]) == (0, 1)


def test_a_tool_that_is_missing_is_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.tools.find", lambda name: None)
    assert [line["found"] for step in ("sanitizer", "profile") for line in rehearse(step, out)] == [False] * 2


def test_tuning_begins_with_attention_and_keeps_trials(out: Path) -> None:
    lines = rehearse("tune", out)
    problems = [line for line in lines if "state" in line]
    assert len(problems) == len(three())
    assert {line["state"] for line in problems} == {"tuned"}
    assert problems[0]["trials"][0]["us"] > 0
    measured = lines[: lines.index(problems[0])]  # at once, and not when the problem is over
    assert {line["config"] for line in measured} == {
        trial["config"] for trial in problems[0]["trials"] if trial["us"] is not None
    }
    table = json.loads((out / "tuned" / "no-gpu.json").read_text())
    assert table["entries"][0]["op"] == "attend"


def test_ways_are_measured_beside_products_and_by_size(out: Path) -> None:
    lines = rehearse("moving", out)
    assert {line["what"] for line in lines} == {"beside products", "by size"}
    for what in ("beside products", "by size"):
        ways = {line["way"] for line in lines if line["what"] == what}
        assert {"copy engine", "16 programs"} <= ways


def test_choices_are_compared_with_what_they_replaced(out: Path) -> None:
    lines = {(line["what"], line.get("config")): line for line in rehearse("compare", out)}
    compiled = lines.pop(("compiled", None))
    assert compiled["count"] >= 1
    assert compiled["errors"] == []
    latents = [line for (what, _), line in lines.items() if what.startswith("latents")]
    assert [line["chosen"] for line in latents] in ([True, False], [False, True])
    for line in lines.values():
        assert line.get("right", line in latents), line["fault"]
        assert 0 < line["min_us"] <= line["us"]
    what = {what for what, _ in lines}
    (encoding,) = (problem.name for problem in three() if problem.bucket.op == "encode_rows")
    assert {f"{encoding}, neighbours", f"{encoding}, all K first"} < what
    assert {f"attention, {way}" for way in compare.SPLITS} < what


def test_a_hit_of_the_engine_gives_what_computing_gives(out: Path) -> None:
    lines = {line["what"]: line for line in rehearse("engine", out)}
    assert lines["from memory"]["right"], lines["from memory"]["off"]
    assert all(0 < line["min_s"] <= line["s"] for line in lines.values())
    assert {"computed", "copy of as many bytes", "from memory, beside a prefill"} < set(lines)


def test_peers_compute_the_same(out: Path) -> None:
    lines = {line["what"]: line for line in rehearse("peers", out, without_errors=False)}
    for name in ("kvkit", "SDPA with a mask", "FlexAttention", "FlexAttention, max-autotune"):
        assert lines[name]["off"] < 0.01
    assert {"FLASH_ATTENTION, 64 rows", "CUDNN_ATTENTION, 64 rows"} < set(lines)
    assert "error" in lines["flashinfer"]  # it is named, and hides no other


def test_rows_of_blends_are_compared_with_what_engines_do(out: Path) -> None:
    choice, *lines = rehearse("blend_rows", out, without_errors=False)
    own, by_run, flash = lines
    assert own["right"]
    assert by_run["right"]
    assert "error" in flash  # torch has it for GPUs alone
    assert choice["untuned"] == "TOGETHER=1"
    assert choice["predicted_us of TOGETHER=1"] < choice["predicted_us of TOGETHER=0"]


def test_jax_computes_the_same(out: Path) -> None:
    lines = {line["what"]: line for line in rehearse("with_jax", out)}
    assert lines["pack"]["different_bytes"] == 0
    assert lines["blend_attention"]["off"] < 0.01
    assert "jax-triton" in lines["blend_attention"]["path"]


def test_every_measuring_step_is_rehearsed_here() -> None:
    text = Path(__file__).read_text()
    names = [step.name for step in (*schedule.STEPS, *schedule.TESTS[:2])]
    assert [name for name in names if f'"{name}"' not in text] == []


CARRIED = """
import os, pathlib, sys, kernel_fixtures
from triton.runtime import cache, driver
from triton.backends.compiler import GPUTarget
from benchmarks.gpu.triton_cache import KEY, fill_cache, key_of
from kvkit.kernels.tuning.compiling import StandInDriver

assert key_of(pathlib.Path(cache.__file__).parent.parent) == cache.triton_key()
folder, key = pathlib.Path(sys.argv[1]), sys.argv[2]
(problem, *_) = kernel_fixtures.problems()
fill_cache(folder, [problem], "sm_90", "theirs")
assert (folder / KEY).read_text() == "theirs"
carried = set(folder.rglob("*"))
os.environ["TRITON_CACHE_DIR"] = str(folder)
cache.triton_key = lambda: key
driver.set_active(StandInDriver(GPUTarget("cuda", 90, 32)))
(launch,) = problem.make(kernel_fixtures.torch.device("cpu"), False).launches(problem.space[0])
launch.kernel.device_caches.clear()
assert launch.compile().asm["cubin"]
print({path.suffix for path in set(folder.rglob("*")) - carried if path.is_file()})
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("key", "compiled_again"), [("theirs", False), ("another's", True)])
def test_a_carried_cache_is_found_by_the_triton_that_it_is_for(
    tmp_path: Path, key: str, compiled_again: bool
) -> None:
    paths = os.pathsep.join(map(str, (ROOT, SUPPORT, os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": paths}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", CARRIED, str(tmp_path), key]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (".cubin" in done.stdout) == compiled_again


def test_after_an_error_that_spoils_the_gpu_a_new_process_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = rehearsal("defaults", out / "results.jsonl")
    first, second, *_ = bench.problems
    monkeypatch.setattr(benches, "_usable", lambda bench: False)

    def spoil(problem: Any) -> dict[str, Any]:
        if problem is first:
            raise RuntimeError("an illegal memory access was encountered")
        return {}

    with pytest.raises(SystemExit) as ended:
        each(bench, [first, second], spoil)
    assert ended.value.code == AGAIN
    each(bench, [first, second], spoil)
    assert [line["what"] for line in bench.results.of("defaults")] == [first.name, second.name]


def test_what_a_step_raises_is_recorded(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: Bench) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("benchmarks.gpu.determinism.run", fail)
    bench = rehearsal("determinism", out / "results.jsonl")
    with pytest.raises(ValueError, match="no such thing"):
        perform(bench)
    (line,) = bench.results.of("determinism")
    assert "no such thing" in line["traceback"]


def test_a_step_is_run_by_its_command(out: Path) -> None:
    (step,) = (step for step in schedule.STEPS if step.name == "roofs")
    assert schedule.run([step], out, os.environ) == 0
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines][-2:] == ["bfloat16 product", "ended"]
    assert lines[0]["gpu"] == "no GPU"
    assert lines[-1]["status"] == 0
