"""The command `kvkit tune`."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvkit.settings import extension, grouped_options, import_from_here, imported

if TYPE_CHECKING:
    from kvkit.kernels.tuning.cases import Problem
    from kvkit.kernels.tuning.compiling import ProblemFactory
    from kvkit.kernels.tuning.configs import KernelConfig
    from kvkit.kernels.tuning.strategies import StrategyFactory
    from kvkit.kernels.tuning.telemetry import DeviceState


@dataclass(frozen=True, slots=True)
class TuneChoice:
    """Problems to tune, and the device to tune them on."""

    op: Annotated[list[str] | None, typer.Option(help="only this operation or kernel; can be repeated")] = (
        None
    )
    model: Annotated[
        str | None, typer.Option(help="at this model's shapes: a config.json, its folder or a hub id")
    ] = None
    shape: Annotated[
        str,
        typer.Option(
            help="at this shape, or the model's with these fields replaced: heads=32,kv_heads=4,head=96"
        ),
    ] = ""
    problems: Annotated[
        str | None, typer.Option(help="your own problems: module:function that returns them")
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="gpu, host (the CPU) or, to show results, a device's name; default: gpu, else host"
        ),
    ] = None

    gpus: Annotated[str | None, typer.Option(help="tune on these GPUs of one kind side by side: 0,1,2,3")] = (
        None
    )
    share: Annotated[
        str | None, typer.Option(help="tune one of equal shares of the problems: 0/4 to 3/4", hidden=True)
    ] = None

    @property
    def host(self) -> bool:
        """True for the CPU."""
        from kvkit.environment import gpu_name

        if self.device not in (None, "gpu", "host"):
            sys.exit(f"--device {self.device}: want gpu or host; host is the CPU")
        return self.device == "host" or (self.device is None and gpu_name() is None)

    def device_name(self) -> str:
        """Return the name of the device to show results of."""
        from kvkit.kernels.tuning.tables import device_name

        is_local = self.device in (None, "gpu", "host", "cpu")  # `self.host` refuses cpu
        name = device_name(self.host) if is_local else self.device
        return name or sys.exit("--device gpu: no GPU here; --device NAME shows another device's results")

    def factory(self, host: bool) -> ProblemFactory:
        """Return the factory of the problems."""
        from kvkit.format.layout import LayoutError
        from kvkit.kernels.tuning.problems import ModelProblems, every_problem, host_problems
        from kvkit.kernels.tuning.shapes import ModelShape, ShapeError, shapes_of, with_settings

        if self.problems is not None and (self.model or self.shape):
            sys.exit("--problems: these have their own shapes; --model and --shape are for kvkit's")
        if self.problems is not None:
            return _function(self.problems)
        if not (self.model or self.shape):
            return host_problems if host else every_problem
        try:
            shapes = shapes_of(self.model) if self.model else (ModelShape(),)
        except (ShapeError, LayoutError) as error:
            sys.exit(f"--model {error}")
        try:
            return ModelProblems(tuple(with_settings(shape, self.shape) for shape in shapes), host)
        except ShapeError as error:
            sys.exit(f"--shape {self.shape}: {error}")

    def chosen(self, factory: ProblemFactory, host: bool) -> list[Problem]:
        """Return the problems of a GPU or the host; matrix products come first, as they can gain the most."""
        from kvkit.kernels.tuning.cases import Problem

        all_problems = list(factory())
        if wrong := [problem for problem in all_problems if not isinstance(problem, Problem)]:
            sys.exit(f"--problems {self.problems}: returned {wrong[0]!r}, want Problems")
        if repeated := [name for name, count in Counter(p.name for p in all_problems).items() if count > 1]:
            sys.exit(f"--problems {self.problems}: {repeated[0]!r} is the name of two problems")
        problems = [problem for problem in all_problems if problem.host == host]
        known = list(dict.fromkeys(name for problem in problems for name in problem.names))
        for op in self.op or ():
            if op not in known:
                device = "--device host, the CPU" if host else "a GPU"
                sys.exit(
                    f"--op {op}: for {device}, want one of {', '.join(known)}{self._other_device(op, host)}"
                )
        chosen = [problem for problem in problems if not self.op or set(self.op) & set(problem.names)]
        return sorted(chosen, key=lambda problem: not problem.work(problem.space[0]).flops)

    def shared(self, problems: list[Problem]) -> list[Problem]:
        """Return this process's share of problems."""
        if self.share is None:
            return problems
        index, _, count = self.share.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            sys.exit(f"--share {self.share}: want INDEX/COUNT, such as 0/4")
        return problems[int(index) :: int(count)]

    def gpu_ids(self) -> list[str]:
        """Return the GPUs to tune on side by side."""
        from kvkit.environment import gpu_name

        ids = [word.strip() for word in (self.gpus or "").split(",")]
        if not all(ids) or len(set(ids)) < len(ids):
            sys.exit(f"--gpus {self.gpus}: want ids of GPUs with commas between, each once, such as 0,1")
        if gpu_name() is None or self.device == "host":
            sys.exit(f"--gpus {self.gpus}: no GPU here, or --device host: the CPU is tuned by one process")
        return ids

    def _other_device(self, op: str, host: bool) -> str:
        """Return a hint if the other device, GPU or host, has such an operation, else ""."""
        if self.problems is not None:
            return ""
        try:
            found = {name for problem in self.factory(not host)() for name in problem.names}
        except ImportError:  # of Triton
            return ""
        other = "a GPU: --device gpu" if host else "the CPU: --device host"
        return f"; {op} is for {other}" if op in found else ""


def _function(path: str) -> ProblemFactory:
    import_from_here()
    try:
        factory: ProblemFactory = imported(path)
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(f"--problems {path}: want module:function, importable from here: {error}")
    return factory


HOST_BUDGET_S = 120.0
"""Default time limit for a CPU's kernels; the next run continues."""


@dataclass(frozen=True, slots=True)
class TuneLimits:
    """Limits of the time that tuning takes, and whether it repeats measurements."""

    budget_s: Annotated[
        float | None, typer.Option(help="stop after so many seconds; default: on the host 120")
    ] = None
    problem_s: Annotated[float | None, typer.Option(help="spend at most so many seconds on a problem")] = None
    force: Annotated[bool, typer.Option(help="measure problems with results again")] = False


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """Order in which the configurations of a problem are measured."""

    strategy: Annotated[
        str,
        typer.Option(help="what is measured next: nearest, random, halving, tpe, or package.module:name"),
    ] = "nearest"
    seed: Annotated[int, typer.Option(help="seed of the strategy")] = 0

    def factory(self) -> StrategyFactory:
        """Return the function that makes the strategy of a problem."""
        from kvkit.kernels.tuning.strategies import strategy_named

        import_from_here()
        try:
            return partial(strategy_named(self.strategy), seed=self.seed)
        except ValueError as error:
            sys.exit(f"--strategy {error}")


@dataclass(frozen=True, slots=True)
class TuneReport:
    """Reports on earlier runs; if one is wanted, nothing is measured."""

    show: Annotated[bool, typer.Option(help="print the known results, and measure nothing")] = False
    explain: Annotated[bool, typer.Option(help="explain why the best won, and measure nothing")] = False
    csv: Annotated[Path | None, typer.Option(help="write the trials to this file, and measure nothing")] = (
        None
    )
    wide: Annotated[
        bool, typer.Option("--wide", help="with --show or --target: all columns of the table")
    ] = False

    def __bool__(self) -> bool:
        return bool(self.show or self.explain or self.csv)


app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
@grouped_options
def tune(
    context: typer.Context,
    *,
    choice: TuneChoice,
    limits: TuneLimits,
    strategy: StrategyChoice,
    report: TuneReport,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="merge this table's results into those of this machine; can be repeated"),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="compile every configuration for this target; needs no GPU")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="with --target: write the table to this file")
    ] = None,
) -> None:
    """Find the fastest correct configuration of every kernel on this machine's GPU or CPU, and keep it.

    Results go to $KVKIT_TUNED or ~/.cache/kvkit/tuned, one file per device, and every trial to a file of
    JSON lines beside it. A run that was stopped continues where it was.
    """
    if context.invoked_subcommand is not None:
        return
    if merge:
        _merge(merge)
    elif report:
        _report(choice, report)
    elif target is not None:
        factory = choice.factory(host=False)
        extension("kvkit.tune", "target")(
            factory, choice.chosen(factory, False), target, json_path, report.wide
        )
    elif choice.gpus is not None:
        _tune_side_by_side(choice, limits, strategy)
    else:
        _tune_here(choice, limits, strategy.factory())


Recorded = Annotated[
    list[Path],
    typer.Argument(
        help='recorded trials: a <device>.trials.jsonl, or results with steps "tune"', metavar="FILE..."
    ),
]


@app.command()
def replay(
    files: Recorded,
    strategies: Annotated[
        str, typer.Option(help="strategies to compare, with commas between; default: all of kvkit's")
    ] = "",
    seeds: Annotated[int, typer.Option(help="seeds of each strategy", min=1)] = 5,
    csv: Annotated[Path | None, typer.Option(help="write each trial to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="plot regrets to this .png, .svg or .pdf")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write this file for pytest-benchmark compare")
    ] = None,
) -> None:
    """Compare strategies on recorded trials: what each would have found after which runs and seconds.

    It measures nothing, and needs no GPU.
    """
    import_from_here()
    extension("kvkit.tune", "replay")(files, strategies, seeds, csv, plot, json_path)


@app.command()
def regret(files: Recorded) -> None:
    """Show how far the configurations of problems that were never tuned are from the best.

    Each recorded problem is left out in turn, and its configuration is guessed from the results of the
    others. It measures nothing, and needs no GPU.
    """
    extension("kvkit.tune", "regret")(files)


def _trials_path(device: str) -> Path:
    from kvkit.environment import slug_of
    from kvkit.kernels.tuning.tables import tuned_folder

    return tuned_folder() / f"{slug_of(device)}.trials.jsonl"


def _report(choice: TuneChoice, report: TuneReport) -> None:
    from kvkit.kernels.tuning import trials
    from kvkit.observe.terminal import print_text

    device = choice.device_name()
    if report.show:
        _show_tuned(device, report.wide)
    if not (report.explain or report.csv):
        return
    path = _trials_path(device)
    if not path.exists():
        is_local = choice.device in (None, "gpu", "host")
        command = f"kvkit tune --device {choice.device}" if is_local and choice.device else "kvkit tune"
        devices = ", ".join(sorted(file.name for file in path.parent.glob("*.trials.jsonl")))
        sys.exit(
            f"{device}: no trials are kept in {path}. To make them run {command}"
            f"{'' if is_local else ' on that machine'}{devices and f'; kept are {devices}'}"
        )
    try:
        lines = trials.read(path)
        if choice.op:
            known = dict.fromkeys(name for line in lines for name in (line["operation"], line["op"]))
            for op in choice.op:
                if op not in known:
                    sys.exit(f"--op {op}: no trials; want one of {', '.join(known) or 'none'}")
            lines = [line for line in lines if {line["operation"], line["op"]} & set(choice.op)]
        if report.csv:
            trials.write_csv(report.csv, lines)
            print_text(f"trials: {report.csv}")
    except OSError as error:
        sys.exit(str(error))
    if report.explain:
        print(trials.explain(lines))


def _merge(files: list[Path]) -> None:
    """Merge files into the user's own tables, one of each device."""
    from kvkit.environment import slug_of
    from kvkit.kernels.tuning.tables import (
        TableError,
        merged,
        read_file,
        read_table,
        tuned_folder,
        write_table,
    )

    try:
        for name, table in map(read_file, files):
            path = tuned_folder() / f"{slug_of(name)}.json"
            old_table = read_table(path, slug_of(name)) if path.exists() else {}
            new_table = merged([old_table, table])
            write_table(path, name, new_table)
            changed = sum(old_table.get(key) != tuned for key, tuned in new_table.items())
            print(f"{path}: {changed} of {len(table)} results are new or faster, {len(new_table)} in all")
    except (TableError, OSError) as error:
        sys.exit(str(error))


def _show_tuned(name: str, wide: bool) -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    from kvkit.environment import slug_of
    from kvkit.kernels.tuning.tables import load_table
    from kvkit.observe.terminal import print_text, show

    table = load_table(slug_of(name))
    if not table:
        print_text(f"{name}: nothing is tuned")
        return
    builds = ("compiler", "source") if wide else ()
    numbers = (Column(head, justify="right") for head in ("µs", "default µs"))
    shown = Table("operation", "form", "sizes", *builds, "configuration", *numbers, title=escape(name))
    for (bucket, build), tuned in sorted(table.items()):
        built = (f"{build.compiler} {build.driver}".strip(), build.source) if wide else ()
        cells = bucket.op, bucket.form, " x ".join(map(str, bucket.sizes)), *built, str(tuned.config)
        default = "" if tuned.default_us is None else f"{tuned.default_us:.1f}"
        shown.add_row(*map(escape, cells), f"{tuned.us:.1f}", default)
    show(shown)


def _tune_side_by_side(choice: TuneChoice, limits: TuneLimits, strategy: StrategyChoice) -> None:
    from kvkit.kernels.tuning.side_by_side import options_of, tune_side_by_side
    from kvkit.kernels.tuning.tables import TableError, tuned_folder

    strategy.factory()
    options = options_of(replace(choice, gpus=None), limits, strategy)
    try:
        status = tune_side_by_side(choice.gpu_ids(), options, tuned_folder())
    except (TableError, OSError) as error:
        sys.exit(str(error))
    if status:
        raise typer.Exit(status)


def _tune_here(choice: TuneChoice, limits: TuneLimits, strategy: StrategyFactory) -> None:
    from rich.console import Console

    from kvkit.kernels.tuning import search, trials
    from kvkit.kernels.tuning.devices import tools_here
    from kvkit.kernels.tuning.source import SourceError
    from kvkit.kernels.tuning.tables import TableError, tuned_folder
    from kvkit.kernels.tuning.telemetry import state_reader
    from kvkit.observe.progress import spaced, timed

    host = choice.host
    factory = choice.factory(host)
    problems = choice.shared(choice.chosen(factory, host))
    if host and limits.budget_s is None:
        limits = replace(limits, budget_s=HOST_BUDGET_S)
    console, count = Console(), Counter[str]()
    print_sometimes = spaced(timed(console))

    device_states: dict[str, dict[KernelConfig, DeviceState]] = defaultdict(dict)

    def on_trial(problem: Problem, trial: search.Trial) -> None:
        state = device_states[problem.name][trial.config] = read_state(problem.name)
        trials.append(path, [trials.line(problem, trial, *about, state)])
        print_sometimes(f"{problem.name}: measured {trial.config}")

    try:
        with tools_here(host, factory) as tools:
            path, about = _trials_path(tools.name), (tools.name, tools.roofline)
            read_state = state_reader(host)
            steps = search.tune(
                problems,
                tuned_folder(),
                tools,
                **asdict(limits),
                on_trial=on_trial,
                strategy=strategy,
            )
            for step in steps:
                trials.append(path, trials.lines(step, *about, device_states.pop(step.problem.name, {})))
                count[step.state] += 1
                console.print(str(step), markup=False, highlight=False, soft_wrap=True)
    except (search.TuningError, SourceError, TableError, OSError) as error:
        sys.exit(str(error))
    states = ", ".join(f"{number} {state}" for state, number in count.items()) or "no problems"
    console.print(f"{states}; tables are in {tuned_folder()}", markup=False, highlight=False, soft_wrap=True)
    if count["failed"]:
        raise typer.Exit(1)
