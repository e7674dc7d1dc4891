"""The tuning search finds the fastest correct configuration of real kernels, with made-up times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_fixtures import SPACE, scale_problem, tiled
from repository import ROOT, SUPPORT
from typer.testing import CliRunner, Result

from kvkit import cli
from kvkit.kernels.tuning import search as tuning
from kvkit.kernels.tuning.cases import Case, Problem, Work
from kvkit.kernels.tuning.compiling import CompileError
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.problems import every_problem
from kvkit.kernels.tuning.search import (
    CompileInfo,
    Late,
    Measure,
    Roofline,
    SearchStep,
    Tools,
    Trial,
    search,
    tune,
)
from kvkit.kernels.tuning.tables import Build, TableError, Tuned, TunedKey, build_of, read_table, write_table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU, FILE = "NVIDIA H200", "nvidia-h200.json"
DEFAULT, SMALL, MIDDLE, WRONG, LARGE = SPACE
FREE = Roofline(1e30, 1e30)
"""Every bound is 0: nothing is left out for it."""


class Times:
    """A timer that answers with given seconds, and counts."""

    def __init__(self, seconds: Mapping[KernelConfig, float]) -> None:
        self.seconds = dict(seconds)
        self.calls: list[KernelConfig] = []

    def __call__(self, config: KernelConfig) -> float:
        self.calls.append(config)
        if self.seconds[config] < 0:
            raise CompileError("out of resource")
        return self.seconds[config]


def find(
    times: Mapping[KernelConfig, float],
    flaws: Mapping[KernelConfig, str] | None = None,
    roofline: Roofline = FREE,
    problem: Problem | None = None,
) -> tuple[Tuned | None, dict[KernelConfig, str], Times]:
    problem = problem or scale_problem()
    measure = Times(times)
    look = {config: CompileInfo(rejection) for config, rejection in (flaws or {}).items()}
    tuned, trials = search(problem, problem.make(DEVICE, True), measure, look, roofline)
    assert [trial.config for trial in trials] == list(problem.space)
    return tuned, {trial.config: trial.outcome for trial in trials}, measure


def seconds(**known: float) -> dict[KernelConfig, float]:
    names = {"default": DEFAULT, "small": SMALL, "middle": MIDDLE, "wrong": WRONG, "large": LARGE}
    return {config: known.get(name, 5.0) for name, config in names.items()}


def test_the_fastest_is_taken() -> None:
    tuned, outcome, _ = find(seconds(large=1e-6, default=2e-6, small=1.5e-6))
    assert tuned is not None
    assert tuned.config == LARGE
    assert tuned.us == pytest.approx(1)
    assert tuned.default_us == pytest.approx(2)
    assert outcome[LARGE] == "best"
    assert outcome[SMALL] == outcome[DEFAULT] == "slower"


def test_a_wrong_one_is_never_taken_however_fast() -> None:
    tuned, outcome, _ = find(seconds(wrong=1.0, middle=1.1, default=1.2))
    assert tuned is not None
    assert tuned.config == MIDDLE
    assert outcome[WRONG] == "wrong: 1 elements differ"


def test_a_wrong_default_is_reported_and_not_taken() -> None:
    problem = scale_problem(space=(WRONG, SMALL, MIDDLE))
    for far in (1.0, 9.0):  # finalists, and configurations that were given up after their first samples
        tuned, outcome, _ = find(seconds(wrong=1.0, middle=1.2 * far, small=1.1 * far), problem=problem)
        assert tuned is not None
        assert tuned.config == SMALL
        assert outcome[WRONG] == "wrong: 1 elements differ"


def test_the_default_stays_where_little_is_gained() -> None:
    gain = tuning.GAIN
    tuned, _, _ = find(seconds(default=1.0, small=1 - gain / 2))
    assert tuned is not None
    assert tuned.config == DEFAULT
    tuned, _, _ = find(seconds(default=1.0, small=1 - 2 * gain))
    assert tuned is not None
    assert tuned.config == SMALL


def test_rejected_ones_are_not_run_except_the_default() -> None:
    flaws = {SMALL: "does not fit", DEFAULT: "does not fit"}
    tuned, outcome, measure = find(seconds(small=1.0, default=3.0, middle=2.0), flaws)
    assert tuned is not None
    assert tuned.config == MIDDLE
    assert SMALL not in measure.calls
    assert DEFAULT in measure.calls
    assert outcome[SMALL] == "does not fit"


def test_spilling_ones_run_last_and_may_win() -> None:
    measure, problem = Times(seconds(small=1.0, default=3.0, middle=2.0)), scale_problem()
    spills = {SMALL: 8, MIDDLE: 64, DEFAULT: 16}
    infos = {config: CompileInfo(numbers={"spill_bytes": spilled}) for config, spilled in spills.items()}
    tuned, _ = search(problem, problem.make(DEVICE, True), measure, infos, FREE)
    assert tuned is not None
    assert tuned.config == SMALL
    first, *others = dict.fromkeys(measure.calls)
    assert first == DEFAULT
    assert others[-2:] == [SMALL, MIDDLE]


def test_measured_times_of_a_latent_attention_keep_the_configuration_that_spills() -> None:
    """An H200 took less time with tiles of 64 rows, which spill, than with any that do not."""
    recorded = json.loads((ROOT / "benchmarks/results/gpu-nvidia-h200.json").read_text())
    (step,) = (
        line
        for line in recorded["results"]
        if (line["step"], line["what"]) == ("tune", "attention DeepSeek-V3")
    )
    times = {trial["config"]: trial["us"] * 1e-6 for trial in step["trials"] if trial["us"]}
    (problem,) = (problem for problem in every_problem() if problem.name == step["what"])
    measured = [config for config in problem.space if str(config) in times]
    space = tuple(sorted(measured, key=lambda c: str(c) != "TILE_ROWS=32 TILE_KEYS=32 warps=8 stages=3"))
    spills = {config: 64 * (dict(config.tiles)["TILE_ROWS"] == 64) for config in space}
    infos = {config: CompileInfo(numbers={"spill_bytes": n}) for config, n in spills.items()}
    case = Case(launches=lambda config: (), poison=lambda: None, fault=lambda: "")
    tuned, _ = search(replace(problem, space=space), case, lambda config: times[str(config)], infos, FREE)
    assert tuned is not None
    assert str(tuned.config) == step["config"]
    assert tuned.us == pytest.approx(step["us"])


def test_what_cannot_win_at_the_roof_is_not_run() -> None:
    # the toy's flops are its BLOCK: at 1 flop/s and OPTIMISM 1.25 the bound of 2048 is 1638 s
    tuned, outcome, measure = find(
        seconds(default=1000.0, small=900.0, middle=950.0, wrong=5e3, large=1.0), roofline=Roofline(1e30, 1.0)
    )
    assert tuned is not None
    assert tuned.config == SMALL
    assert LARGE not in measure.calls
    assert "at the roofline" in outcome[LARGE]


def test_a_roof_that_is_too_low_keeps_nothing_from_being_run(tmp_path: Path) -> None:
    """As a busy machine measures it: the default beats it here, and so do those left out before and after."""
    low = Roofline(1e30, 1.0)
    assert low.refuted_by(Work(0, 100), 79.0)
    assert not low.refuted_by(Work(0, 100), 81.0)
    times = seconds(default=1000.0, small=900.0, middle=1.0, wrong=5e3, large=0.5)
    tuned, outcome, measure = find(times, roofline=low)
    order = list(dict.fromkeys(measure.calls))
    assert order.index(LARGE) > order.index(MIDDLE), "it was left out until the roof was refuted"
    assert tuned is not None
    assert tuned.config == LARGE
    assert not any("at the roofline" in why for why in outcome.values())
    slow = seconds(default=1000.0, small=900.0, middle=950.0, wrong=5e3, large=1700.0)
    timers = iter([Times(slow), Times(times), Times(slow)])
    given = replace(tools(), timer=lambda case: next(timers), roofline=low)
    steps = tune(PROBLEMS, tmp_path, given)
    out = [[t.config for t in step.trials if "at the roofline" in t.outcome] for step in steps]
    assert out == [[LARGE], [], []], "of the next problem neither"


def test_one_that_does_not_run_is_passed_over() -> None:
    tuned, outcome, _ = find(seconds(small=-1, default=2.0, middle=1.0))
    assert tuned is not None
    assert tuned.config == MIDDLE
    assert outcome[SMALL] == "does not run: out of resource"


def test_a_default_that_does_not_run_has_no_time() -> None:
    tuned, _, _ = find(seconds(default=-1, small=1.0))
    assert tuned is not None
    assert tuned == Tuned(SMALL, 1e6, None)


def test_nothing_runs() -> None:
    tuned, outcome, _ = find(dict.fromkeys(SPACE, -1.0))
    assert tuned is None
    assert set(outcome.values()) == {"does not run: out of resource"}


def test_finalists_take_turns() -> None:
    _, _, measure = find(seconds(default=1.0, small=1.0, middle=1.0))
    final = measure.calls[tuning.FIRST_SAMPLES * len(SPACE) :]
    assert set(final) == {DEFAULT, SMALL, MIDDLE}
    for turn in range(tuning.FINAL_SAMPLES):
        assert set(final[3 * turn : 3 * turn + 3]) == set(final)


def test_a_lucky_start_does_not_win() -> None:
    """The first samples choose who is measured in turns; only those count."""
    problem, calls = scale_problem(space=(DEFAULT, SMALL)), []

    def measure(config: KernelConfig) -> float:
        calls.append(config)
        return (
            0.8
            if config == SMALL and calls.count(SMALL) <= tuning.FIRST_SAMPLES
            else 2.0
            if config == SMALL
            else 1.0
        )

    tuned, _ = search(problem, problem.make(DEVICE, True), measure, {}, FREE)
    assert tuned == Tuned(DEFAULT, 1e6, 1e6)


def test_the_check_sees_only_what_this_configuration_wrote() -> None:
    """Outputs are poisoned in between: the right results of the one before do not vouch for it."""
    problem = scale_problem(space=(DEFAULT, WRONG))
    tuned, outcome, _ = find({DEFAULT: 2.0, WRONG: 1.9}, problem=problem)
    assert tuned is not None
    assert tuned.config == DEFAULT
    assert outcome[WRONG].startswith("wrong")


class Clock:
    """Goes on when it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def tools(
    times: Mapping[KernelConfig, float] | None = None,
    gpu: str = GPU,
    made: list[Case] | None = None,
) -> Tools:
    def timer(case: Case) -> Measure:
        if made is not None:
            made.append(case)
        return Times(times or seconds(small=1.0))

    return Tools(gpu, DEVICE, lambda problem, late: {}, timer, FREE, lambda: 0.0)


PROBLEMS = [scale_problem("float32", count) for count in (256, 512, 1024)]
HERE = build_of(PROBLEMS[0].kernel, False)
KEYS = [TunedKey(problem.bucket, HERE) for problem in PROBLEMS]


def states(steps: Iterator[SearchStep]) -> list[str]:
    return [step.state for step in steps]


def test_every_bucket_is_kept(tmp_path: Path) -> None:
    assert states(tune(PROBLEMS, tmp_path / "new", tools())) == ["tuned"] * 3
    table = read_table(tmp_path / "new" / FILE, "nvidia-h200")
    assert table == dict.fromkeys(KEYS, Tuned(SMALL, 1e6, 5e6))


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    steps = tune(PROBLEMS, tmp_path, tools())
    assert next(steps).state == "tuned"
    steps.close()
    assert list(read_table(tmp_path / FILE, "nvidia-h200")) == [KEYS[0]]
    made: list[Case] = []
    assert states(tune(PROBLEMS, tmp_path, tools(seconds(large=1.0), made=made))) == [
        "known",
        "tuned",
        "tuned",
    ]
    assert len(made) == 2
    table = read_table(tmp_path / FILE, "nvidia-h200")
    assert [table[key].config for key in KEYS] == [SMALL, LARGE, LARGE]


def test_force_measures_again(tmp_path: Path) -> None:
    list(tune(PROBLEMS, tmp_path, tools()))
    assert states(tune(PROBLEMS, tmp_path, tools(seconds(large=1.0)), force=True)) == ["tuned"] * 3
    assert read_table(tmp_path / FILE, "nvidia-h200")[KEYS[0]].config == LARGE


def test_a_configuration_that_the_kernel_lost_is_measured_again(tmp_path: Path) -> None:
    write_table(tmp_path / FILE, GPU, dict.fromkeys(KEYS, Tuned(tiled(4096), 1.0, 1.0)))
    assert states(tune(PROBLEMS, tmp_path, tools())) == ["tuned"] * 3


def test_other_buckets_stay(tmp_path: Path) -> None:
    """Those of another problem, and this one's of another source, Triton or driver."""
    source, compiler, driver = HERE
    builds = Build("0", compiler, driver), Build(source, "triton 1", driver), Build(source, compiler, "1")
    bucket = ProblemBucket("other", "x", (1,))
    keys = TunedKey(bucket, HERE), *(TunedKey(KEYS[0].bucket, build) for build in builds)
    other = dict.fromkeys(keys, Tuned(SMALL, 1.0, 1.0))
    write_table(tmp_path / FILE, GPU, other)
    assert states(tune(PROBLEMS[:1], tmp_path, tools())) == ["tuned"]
    table = read_table(tmp_path / FILE, "nvidia-h200")
    assert table == other | {KEYS[0]: Tuned(SMALL, 1e6, 5e6)}


def timed(clock: Clock, each: float) -> Tools:
    """A problem's runs take `each` seconds of the clock in all, as many for each configuration."""

    def timer(case: Case) -> Measure:
        def measure(config: KernelConfig) -> float:
            clock.now += each / len(SPACE) / tuning.FIRST_SAMPLES
            return 1.0 if config == MIDDLE else 2.0

        return measure

    return Tools(GPU, DEVICE, lambda problem, late: {}, timer, FREE, clock)


def test_the_budget_ends_the_search_within_a_problem(tmp_path: Path) -> None:
    """What was measured counts, and the next run searches again."""
    steps = list(tune(PROBLEMS, tmp_path, timed(Clock(), 100), budget_s=50))
    assert [step.state for step in steps] == ["tuned", "left", "left"]
    assert steps[0].tuned == Tuned(MIDDLE, 1e6, 2e6, 2)
    fates = [trial.outcome for trial in steps[0].trials]
    assert fates.count("untried: the time was over") == 2
    assert "2 configurations untried" in str(steps[0])
    steps = list(tune(PROBLEMS[:1], tmp_path, timed(Clock(), 1)))
    assert (steps[0].state, steps[0].tuned) == ("tuned", Tuned(MIDDLE, 1e6, 2e6))


def test_the_look_takes_half_of_the_time_and_the_nearest_to_the_default_come_first(tmp_path: Path) -> None:
    """A compiler that would take all of it leaves time to run what it looked at."""
    clock = Clock()
    looked: list[KernelConfig] = []

    def look(problem: Problem, late: Late) -> Mapping[KernelConfig, CompileInfo]:
        for config in problem.space:
            clock.now += 10
            looked.append(config)
            if late():
                break
        return dict.fromkeys(looked, CompileInfo())

    few = replace(timed(clock, 1), compile_space=look)
    (step,) = tune(PROBLEMS[:1], tmp_path, few, problem_s=40)
    assert looked == [DEFAULT, MIDDLE]
    assert [trial.config for trial in step.trials] == list(SPACE)
    assert not [trial.outcome for trial in step.trials if trial.outcome.startswith("untried")]


def test_each_problem_has_its_seconds(tmp_path: Path) -> None:
    """The default is measured whatever it takes, and what was measured is enough for the next such run."""
    steps = list(tune(PROBLEMS, tmp_path, timed(Clock(), 100), problem_s=0.5))
    assert [step.state for step in steps] == ["tuned"] * 3
    assert [len(step.trials[0].samples) for step in steps] == [tuning.FIRST_SAMPLES] * 3
    table = read_table(tmp_path / FILE, "nvidia-h200")
    assert set(table.values()) == {Tuned(DEFAULT, 2e6, 2e6, 4)}
    assert states(tune(PROBLEMS, tmp_path, timed(Clock(), 1), problem_s=0.5)) == ["known"] * 3


def test_without_time_nothing_begins(tmp_path: Path) -> None:
    assert states(tune(PROBLEMS, tmp_path, tools(), budget_s=0)) == ["left"] * 3
    assert not (tmp_path / FILE).exists()


def test_equal_binaries_are_measured_once() -> None:
    """Of equal tiles and warps: others are another grid, or other blocks."""
    slow, twin, wide, warps = (
        *(KernelConfig(SMALL.tiles, stages=3), KernelConfig(SMALL.tiles, stages=4)),
        *(MIDDLE, KernelConfig(SMALL.tiles, warps=8)),
    )
    problem = scale_problem(space=(DEFAULT, slow, twin, wide, warps))
    look = {DEFAULT: CompileInfo(), **dict.fromkeys((slow, twin, wide, warps), CompileInfo(binary="a"))}
    measure = Times({DEFAULT: 2.0, slow: 1.0, wide: 3.0, warps: 3.0})
    tuned, trials = search(problem, problem.make(DEVICE, True), measure, look, FREE)
    assert tuned == Tuned(slow, 1e6, 2e6)
    assert trials[2] == Trial(twin, None, f"the same binary as {slow}", (), CompileInfo(binary="a"))
    assert wide in measure.calls
    assert warps in measure.calls


def test_what_never_ran_faster_does_not_replace_the_default() -> None:
    """A median can be of noisy moments; so can the default's."""
    problem, turns = scale_problem(space=(DEFAULT, SMALL)), {DEFAULT: 0, SMALL: 0}

    def measure(config: KernelConfig) -> float:
        turns[config] += 1
        return 0.9 if config == SMALL else (0.8 if turns[config] % 3 == 0 else 1.0)

    tuned, trials = search(problem, problem.make(DEVICE, True), measure, {}, FREE)
    assert tuned == Tuned(DEFAULT, pytest.approx(1e6), pytest.approx(1e6))
    assert len(trials[0].samples) == tuning.FINAL_SAMPLES
    assert min(trials[0].samples) == pytest.approx(0.8e6)


def test_a_failed_bucket_is_not_kept(tmp_path: Path) -> None:
    broken = scale_problem("broken", space=(WRONG,))
    steps = list(tune([broken, PROBLEMS[0]], tmp_path, tools()))
    assert [step.state for step in steps] == ["failed", "tuned"]
    assert "wrong: 1 elements differ" in str(steps[0])
    assert list(read_table(tmp_path / FILE, "nvidia-h200")) == [KEYS[0]]


def test_too_little_memory_costs_that_problem_alone(tmp_path: Path) -> None:
    def make(device: torch.device, filled: bool) -> Case:
        raise torch.OutOfMemoryError("80 GiB are not there")

    steps = list(tune([replace(PROBLEMS[0], make=make), PROBLEMS[1]], tmp_path, tools()))
    assert [step.state for step in steps] == ["failed", "tuned"]
    assert str(steps[0]) == "scale float32 256: failed; 80 GiB are not there"


def test_a_broken_table_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("mine")
    with pytest.raises(TableError, match=FILE):
        list(tune(PROBLEMS, tmp_path, tools()))
    assert (tmp_path / FILE).read_text() == "mine"


def test_each_gpu_has_its_own_file(tmp_path: Path) -> None:
    list(tune(PROBLEMS[:1], tmp_path, tools()))
    list(tune(PROBLEMS[:1], tmp_path, tools(seconds(large=1.0), gpu="AMD Instinct MI300X")))
    assert {file.name for file in tmp_path.iterdir()} == {FILE, "amd-instinct-mi300x.json"}
    assert read_table(tmp_path / FILE, "nvidia-h200")[KEYS[0]].config == SMALL


def test_killed_in_the_middle_it_keeps_what_was_done(tmp_path: Path) -> None:
    """kill -9 after the second bucket: a whole table of two."""
    script = (
        "import sys; from pathlib import Path; import test_tuning_search as t\n"
        "for step in t.tune(t.PROBLEMS[:2], Path(sys.argv[1]), t.tools()): print(step.state, flush=True)\n"
        "print('waits', flush=True); sys.stdin.read()"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=-1, stdout=-1, env=environment, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lines == ["tuned\n", "tuned\n", "waits\n"]
    assert len(read_table(tmp_path / FILE, "nvidia-h200")) == 2


def test_the_roof_is_the_larger_of_two_times() -> None:
    roof = Roofline(bytes_per_s=1e9, flops_per_s=1e12)
    assert roof.seconds(Work(10**9)) == pytest.approx(1)
    assert roof.seconds(Work(10**9, 10**13)) == pytest.approx(10)
    assert roof.bound(Work(10**9)) == pytest.approx(1 / tuning.OPTIMISM)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, ["tune", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_help() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for option in ("--op", "--budget-s", "--force", "--show", "--device", "--target", "--json"):
        assert option in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_the_targets() -> None:
    result = run("--device", "gpu")
    assert result.exit_code == 1
    for word in ("no GPU here", "--target", "sm_90", "gfx942"):
        assert word in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "sm_1"), ("--target sm_1", "sm_80", "gfx942")),
        (("--target", "sm_90", "--json", "/nowhere/x.json"), ("--json /nowhere/x.json", "no folder")),
        (("--target", "sm_90", "--op", "nothing"), ("--op nothing", "blend_attention, attend,")),
        (("--device", "tpu"), ("--device tpu", "want gpu or host")),
        (("--device", "cpu"), ("--device cpu", "want gpu or host", "host is the CPU")),
        (("--device", "cpu", "--explain"), ("--device cpu", "want gpu or host")),
        (
            ("--device", "host", "--op", "rope_scatter"),
            ("rope_scatter is for a GPU", "want one of pack, unpack"),
        ),
        (("--device", "host", "--op", "nothing"), ("--op nothing", "want one of pack, unpack\n")),
        (("--merge", "/nowhere/x.json"), ("/nowhere/x.json", "No such file")),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.nightly
def test_compiling_for_a_target(tmp_path: Path) -> None:
    """Every configuration of one operation, with or without a GPU."""
    path = tmp_path / "compiled.json"
    result = run("--target", "sm_90", "--op", "token_deviation", "--json", str(path))
    assert result.exit_code == 0
    entries = json.loads(path.read_text())["kernels"]
    spaces = [problem.space for problem in every_problem() if problem.bucket.op == "measure"]
    assert [entry["config"] for entry in entries] == [str(config) for space in spaces for config in space]
    assert {(entry["kernel"], entry["target"]) for entry in entries} == {("measure", "sm_90")}
    assert all(entry["registers"] > 0 and entry["blocks_per_sm"] > 0 for entry in entries)
    assert f"{len(entries)} configurations, 0 of them not worth a run" in result.stdout


def test_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path))
    key = TunedKey(ProblemBucket("op", "bf16 [x]", (64, 8)), Build("5ce", "triton 3.9", "580"))
    write_table(tmp_path / FILE, GPU, {key: Tuned(SMALL, 12.34, 56.78)})
    few, every = run("--show", "--device", GPU), run("--show", "--wide", "--device", GPU)
    for word in ("op", "bf16 [x]", "64 x 8", "BLOCK=256", "warps=4", "12.3", "56.8"):
        assert word in few.stdout
        assert word in every.stdout
    for word in ("triton 3.9", "580", "5ce"):
        assert word not in few.stdout
        assert word in every.stdout
    assert "nothing is tuned" in run("--show", "--device", "NVIDIA A100").stdout


def test_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path / "mine"))
    for name, config, us in (("one", SMALL, 5.0), ("two", LARGE, 4.0)):
        write_table(tmp_path / f"{name}.json", GPU, {KEYS[0]: Tuned(config, us, 10.0)})
    result = run("--merge", str(tmp_path / "one.json"), "--merge", str(tmp_path / "two.json"))
    assert result.exit_code == 0
    assert read_table(tmp_path / "mine" / FILE, "nvidia-h200") == {KEYS[0]: Tuned(LARGE, 4.0, 10.0)}
    assert "1 of 1 results are new or faster, 1 in all" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_show_without_a_gpu() -> None:
    result = run("--show", "--device", "gpu")
    assert result.exit_code == 1
    assert "--device NAME" in result.stderr
