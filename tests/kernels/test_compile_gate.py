"""Kernels compile for GPUs that are not here, and the compile gate passes all of them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import kernel_fixtures
import pytest
import torch
from repository import ROOT, SUPPORT
from run_sizes import nightly

from kvkit.environment import version_of
from kvkit.kernels.attention.problems import (
    GEMMA_2,
    LLAMA_8B,
    AttentionSpec,
    Heads,
    attention_problem,
    hopper_problem,
)
from kvkit.kernels.tuning.assembly import Compiled, MachineInstruction
from kvkit.kernels.tuning.compiling import (
    CompileError,
    CompilePool,
    CompileReport,
    compile_for,
    compile_pool,
    survey,
)
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.problems import every_problem
from kvkit.lab.compiling.gate import GATE, faults, gate, run
from kvkit.lab.compiling.keys import KeyedCompiled, compile_key, compile_keyed
from kvkit.lab.compiling.overlap import loops_with_products, overlap_faults, sass_of
from kvkit.lab.compiling.report import as_json, shown

pytestmark = pytest.mark.timeout(1200)  # compilers beside others, on a machine that may be slow
RESULTS = ROOT / "benchmarks" / "results"
OTHERS = RESULTS / f"compile-triton-{version_of('triton')}.json"
RECORDED = OTHERS if OTHERS.exists() else RESULTS / "compile.json"
"""By the Triton at hand, or by the environment's."""


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    """Processes that do not interpret kernels as this one does."""
    with compile_pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def every(pool: CompilePool) -> list[CompileReport]:
    """The kernel_fixtures on every target."""
    return gate(pool, kernel_fixtures.everything)


@pytest.fixture(scope="module")
def reports(every: list[CompileReport]) -> dict[tuple[str, str], CompileReport]:
    """Those without a flaw."""
    names = {problem.name for problem in kernel_fixtures.problems()}
    return {(report.kernel, report.target): report for report in every if report.problem in names}


@pytest.fixture(scope="module")
def flawed(every: list[CompileReport]) -> list[CompileReport]:
    names = {problem.name for problem in kernel_fixtures.flawed()}
    return [report for report in every if report.problem in names]


def done(reports: dict[tuple[str, str], CompileReport], kernel: str, target: str) -> Compiled:
    compiled = reports[kernel, target].compiled
    assert compiled is not None, reports[kernel, target].error
    return compiled


@pytest.mark.parametrize("target", GATE)
def test_a_copy_moves_16_bytes_at_a_time(reports: dict[tuple[str, str], CompileReport], target: str) -> None:
    c = done(reports, "scale_kernel", target)
    assert c.loads == c.loads_16 > 0
    assert c.stores == c.stores_16 > 0
    assert (c.mma, c.shared_bytes, c.spill_bytes) == (0, 0, 0)
    assert 0 < c.registers < 64
    assert c.blocks_per_sm >= 8


@pytest.mark.parametrize("target", GATE)
def test_a_product_uses_matrix_instructions(
    reports: dict[tuple[str, str], CompileReport], target: str
) -> None:
    c = done(reports, "product_kernel", target)
    assert c.mma > 0
    assert c.loads == c.loads_16 > 0
    assert c.shared_bytes >= 2 * 64 * 64 * 2  # two bfloat16 matrices


def test_what_is_right_passes(reports: dict[tuple[str, str], CompileReport]) -> None:
    assert len(reports) == 2 * len(GATE)
    assert faults(list(reports.values()), kernel_fixtures.problems()) == []


def test_lost_vectors_are_a_fault(flawed: list[CompileReport]) -> None:
    odd = [report for report in flawed if "odd" in report.problem]
    assert len(odd) == len(GATE)
    for report, fault in zip(odd, faults(odd, kernel_fixtures.flawed()), strict=True):
        assert report.compiled is not None
        assert report.compiled.loads_16 == 0
        assert "the layout allows 1 and 1" in fault
        assert report.target in fault


def test_what_does_not_compile_is_a_fault(flawed: list[CompileReport]) -> None:
    refused = [report for report in flawed if "refused" in report.problem]
    assert len(refused) == len(GATE)
    for report in refused:
        assert report.compiled is None
        assert "power of 2" in report.error
        assert "BLOCK=1000" in report.error
    assert len(faults(refused, kernel_fixtures.flawed())) == len(GATE)


@pytest.fixture(scope="module")
def odd_jobs(pool: CompilePool) -> list[CompileReport]:
    """One that spills, and one whose launches cannot even be made."""
    (problem,) = kernel_fixtures.spilling()
    jobs = [
        (problem.name, config, "sm_80") for config in (problem.space[0], kernel_fixtures.KernelConfig(()))
    ]
    return list(survey(pool, kernel_fixtures.spilling, jobs))


def test_spills_are_a_fault(odd_jobs: list[CompileReport]) -> None:
    report = odd_jobs[0]
    assert report.compiled is not None
    assert report.compiled.spill_bytes > 0
    (fault,) = faults([report], kernel_fixtures.spilling())
    assert f"spills {report.compiled.spill_bytes} bytes" in fault


def test_launches_that_cannot_be_made_are_reported(odd_jobs: list[CompileReport]) -> None:
    report = odd_jobs[1]
    assert (report.kernel, report.compiled) == ("", None)
    assert "KeyError" in report.error


def test_a_table_shows_every_report(
    reports: dict[tuple[str, str], CompileReport], flawed: list[CompileReport]
) -> None:
    table = shown([*reports.values(), *flawed])
    assert table.row_count == len(reports) + len(flawed)
    entries = as_json([*reports.values(), *flawed], kernel_fixtures.everything())["kernels"]
    assert len(entries) == table.row_count
    assert json.loads(json.dumps(entries)) == entries
    assert entries[0]["registers"] > 0
    assert "error" in entries[-1]


def test_an_unknown_target_names_the_known() -> None:
    x = torch.empty(16)
    with pytest.raises(CompileError, match=r"'sm_1': want one of sm_80.*gfx942"):
        compile_for(kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(256)), "sm_1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only without a GPU")
def test_it_says_so_where_kernels_are_interpreted() -> None:
    x = torch.empty(16)
    with pytest.raises(CompileError, match="TRITON_INTERPRET"):
        compile_for(kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(256)), "sm_80")


def in_compiling_process(script: str, **variables: str) -> str:
    """What a script prints in a process that does not interpret kernels."""
    path = os.pathsep.join([str(SUPPORT), *sys.path])  # as here, if Triton is another one
    environment = os.environ | {"PYTHONPATH": path} | variables
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.nightly
def test_a_first_launch_finds_what_was_compiled(tmp_path: Path) -> None:
    """Every kind of argument, for both backends; only the driver's calls are stood in for."""
    script = """
import os, pathlib, sys, triton, kernel_fixtures
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from kvkit.kernels.tuning.compiling import StandInDriver, compile_for

launches = kernel_fixtures.taking_launches()
cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
files = lambda: sorted(str(path) for path in cache.rglob("*"))
started = []

class Driver(StandInDriver):
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        load_binary=lambda name, kernel, shared, device: (1, 1, 0, 0, 1024),
        unload_module=lambda module: None,
    )
    def launcher_cls(self, source, metadata):
        return lambda *given: started.append(given)

    def get_current_device(self):  # Triton remembers by device: a new one compiles anew, or finds files
        return "another"

for name, target in (("sm_90", GPUTarget("cuda", 90, 32)), ("gfx942", GPUTarget("hip", "gfx942", 64))):
    for launch in launches:
        compile_for(launch, name)
    compiled = files()
    kernel_fixtures.taking_kernel.device_caches.clear()
    triton.runtime.driver.set_active(Driver(target))
    for launch in launches:
        launch.run()
    assert compiled == files(), (len(compiled), len(files()))
print(len(started))
"""
    printed = in_compiling_process(script, TRITON_CACHE_DIR=str(tmp_path))
    assert int(printed) == 2 * len(kernel_fixtures.taking_launches())
    assert len(list(tmp_path.iterdir())) > 2


def refusals() -> list[str]:
    """What is said of a launch that lacks an argument, has one too many, or one of no kind."""
    launch = kernel_fixtures.scale_launch(torch.empty(16), torch.empty(16), kernel_fixtures.tiled(256))
    arguments = dict(launch.arguments)
    without = {name: value for name, value in arguments.items() if name != "x"}
    said = []
    for function in (compile_for, compile_key):
        for given in (without, arguments | {"z": 1}, arguments | {"x": object()}):
            with pytest.raises(CompileError) as caught:
                function(replace(launch, arguments=given), "sm_90")
            said.append(str(caught.value))
    return said


def test_wrong_arguments_are_named(pool: CompilePool) -> None:
    named = ("'x'", "argument z", "object") * 2
    for words, name in zip(pool.processes.submit(refusals).result(), named, strict=True):
        assert words.startswith("scale_kernel for sm_90, BLOCK=256")
        assert name in words


@pytest.mark.nightly
def test_equal_keys_are_those_of_equal_launches() -> None:
    """In every process, before and after compiling; all that changes the result changes the key."""
    script = """
import sys, torch, kernel_fixtures
from dataclasses import replace
from kvkit.kernels.tuning.compiling import compile_for
from kvkit.lab.compiling.keys import compile_key

targets = ["sm_80", "gfx942"]
x = torch.empty(4096 + 16)
base = kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(256))
if sys.argv[1:] == ["compiled"]:
    compile_for(base, "sm_90")
    for target in reversed(targets):
        compile_key(base, target)
start = -x.data_ptr() % 16 // 4
odd = x[start + 1 :]
same = {
    "itself": base,
    "other memory": kernel_fixtures.scale_launch(
        torch.empty(4096), torch.empty(4096), kernel_fixtures.tiled(256)
    ),
    "another count of the kind": kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(256), 64),
}
other = {
    "another dtype": kernel_fixtures.scale_launch(x.half(), x, kernel_fixtures.tiled(256)),
    "unaligned": kernel_fixtures.scale_launch(odd, odd, kernel_fixtures.tiled(256)),
    "an odd count": kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(256), 65),
    "another constant": kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(256), add=4),
    "another tile": kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(512)),
    "warps": kernel_fixtures.scale_launch(x, x, kernel_fixtures.tiled(256, warps=8)),
    "stages": replace(base, config=base.config._replace(stages=3)),
    "another kernel": kernel_fixtures.product_launch(x, x, kernel_fixtures.KernelConfig((("SIZE", 16),))),
}
keys = {name: compile_key(launch, "sm_90") for name, launch in {**same, **other}.items()}
keys |= {target: compile_key(base, target) for target in targets}
assert len({keys[name] for name in same}) == 1, keys
assert len(set(keys.values())) == len(keys) - len(same) + 1, keys
print(sorted(keys.items()))
"""
    keys = in_compiling_process(script)
    assert in_compiling_process(f"import sys; sys.argv[1:] = ['compiled']\n{script}") == keys
    assert in_compiling_process(script, TRITON_DEFAULT_FP_FUSION="0") != keys


def test_what_is_known_is_not_compiled_again(
    pool: CompilePool, reports: dict[tuple[str, str], CompileReport]
) -> None:
    """What is predicted of it is worked out anew."""
    known = {}
    for report in reports.values():
        assert isinstance(report.compiled, KeyedCompiled)
        known[report.compiled.key] = replace(report.compiled, registers=7)
    assert len(known) == len(reports)
    again = gate(pool, kernel_fixtures.problems, known=known)
    for report in again:
        assert isinstance(report.compiled, KeyedCompiled)
        assert report.compiled == known[report.compiled.key]
    before = as_json([reports[report.kernel, report.target] for report in again], kernel_fixtures.problems())
    assert as_json(again, kernel_fixtures.problems())["kernels"] == [
        e | {"registers": 7} for e in before["kernels"]
    ]


def attending(page: int | None, stages: int) -> Compiled:
    """Attention on sm_90, its default but for the stages, of pages of so many tokens."""
    spec = AttentionSpec("attention", LLAMA_8B, 8192, page)
    case = attention_problem(spec).make(torch.device("cpu"), False)

    def attend(config: KernelConfig | None) -> Launch:
        (launch,) = (launch for launch in case.launches(config) if launch.kernel.__name__ == "attend")
        return launch

    default = attend(None).config
    return compile_for(attend(KernelConfig(default.tiles, default.warps, stages)), "sm_90")


def test_attention_prefetches_whatever_the_pages(pool: CompilePool) -> None:
    """Small ones, large ones, none: more stages leave more copies under way; they are another binary."""
    pages = (16, 128, None)
    three, four = (list(pool.processes.map(attending, pages, [stages] * 3)) for stages in (3, 4))
    for fewer, more in zip(three, four, strict=True):
        assert 0 < fewer.in_flight < more.in_flight
        assert fewer.shared_bytes < more.shared_bytes
        assert fewer.digest != more.digest


def hopper_sass(spec: AttentionSpec) -> tuple[MachineInstruction, ...]:
    """The default of a Hopper attention, on sm_90."""
    problem = hopper_problem(spec)
    launch = problem.make(torch.device("cpu"), False).launches(problem.space[0])[0]
    assert isinstance(launch, Launch)
    assert launch.kernel.__name__ == "attend_hopper"
    return sass_of(launch, "sm_90")


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec("attention", LLAMA_8B, 8192),
        *nightly(
            AttentionSpec("in parts, with a window", LLAMA_8B, 1024, window=512),
            AttentionSpec("odd blocks, in parts", replace(LLAMA_8B, dtype=torch.float16), 1000, 20),
            AttentionSpec("heads of 64", Heads(16, 4, 64, 64), 8192, 64),
            AttentionSpec("heads of 64, capped", Heads(8, 8, 64, 64), 8192, None, softcap=30.0),
            AttentionSpec("heads of 256, capped, with a window", GEMMA_2, 4096, window=512, softcap=50.0),
        ),
    ],
    ids=lambda spec: spec.name,
)
def test_a_hopper_attention_overlaps_products_and_softmax(pool: CompilePool, spec: AttentionSpec) -> None:
    """Both warpgroups, in the loops with a mask and in that without."""
    sass = pool.processes.submit(hopper_sass, spec).result()
    assert len(loops_with_products(sass)) == (4 if spec.window is None else 6)
    assert overlap_faults(sass) == []
    if spec.heads.size <= 128:
        assert [one.name for one in sass if one.name.startswith(("LDL", "STL"))] == []


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel's default, on every target: no flaws, and nothing worse than what is recorded."""
    path = tmp_path_factory.mktemp("gate") / "compile.json"
    options = "--compare", str(RECORDED.relative_to(ROOT)), "--json", str(path)
    command = [sys.executable, "-m", "kvkit.lab.compiling.gate", *options]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: list[dict[str, Any]] = json.loads(path.read_text())["kernels"]
    return found


def test_the_gate(entries: list[dict[str, Any]]) -> None:
    made = {entry["problem"] for entry in entries}
    # the ways between GPU and host are no kernels
    kernels_of = {p.name: p.bucket.op for p in every_problem() if p.bucket.op == p.kernel.__name__}
    assert {kernels_of[name] for name in made} == set(kernels_of.values())
    predicted = [entry for entry in entries if entry["kernel"] == kernels_of[entry["problem"]]]
    assert all(0 < entry["roof_us"] <= entry["predicted_us"] for entry in predicted)
    assert all(
        "per_mma" in entry or "per_line" in entry for entry in predicted if "float32" not in entry["problem"]
    )


def test_what_is_recorded_is_of_these_kernels_and_of_this_compiler(
    pool: CompilePool, entries: list[dict[str, Any]]
) -> None:
    """What is known by its key is not compiled again: of each kernel one is, and is as recorded."""
    document = json.loads(RECORDED.read_text())
    if document["triton"] != version_of("triton"):
        pytest.skip(f"nothing is recorded of Triton {version_of('triton')}")
    old = [entry for entry in entries if entry not in document["kernels"]]
    assert old == [], f"python -m kvkit.lab.compiling.gate --json {RECORDED.relative_to(ROOT)}"
    kernels = sorted({entry["kernel"] for entry in entries})
    sample = set(zip(kernels, itertools.cycle(GATE), strict=False))
    spaces = {problem.name: problem.space_on for problem in every_problem()}
    jobs = {
        kernel: (entry["problem"], spaces[entry["problem"]](target)[0], target)
        for entry in entries
        if ((kernel := entry["kernel"]), (target := entry["target"])) in sample
    }
    anew = list(survey(pool, every_problem, list(jobs.values()), partial(compile_keyed, {})))
    assert {report.kernel for report in anew} == set(kernels)
    made = as_json(anew, every_problem())["kernels"]
    assert [entry for entry in made if entry not in document["kernels"]] == []


def test_some_problems_are_compared_and_recorded(
    pool: CompilePool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "compile.json"
    options = "--problem", "132-byte", "--compare", str(path), "--json", str(path)

    def shut() -> str:
        assert run(pool, options) == 1
        return capsys.readouterr().out

    other = {"problem": "x", "kernel": "y", "target": "z"}
    path.write_text(json.dumps({"triton": version_of("triton"), "kernels": [other]}))
    assert "pack 132-byte rows, copy_rows, sm_90: not recorded" in shut()
    document = json.loads(path.read_text())
    assert document["kernels"][0] == other
    assert {(entry["problem"], entry["target"]) for entry in document["kernels"][1:]} == {
        (f"{way} 132-byte rows", target) for way in ("pack", "unpack") for target in GATE
    }
    for entry in document["kernels"][1:]:
        entry["per_line"] /= 2
    path.write_text(json.dumps(document))
    words = shut()
    assert "pack 132-byte rows, copy_rows, sm_90: per_line is" in words
    assert f"if it is meant: python -m kvkit.lab.compiling.gate --json {path}" in words
