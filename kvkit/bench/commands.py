"""The commands that try kvkit out on this machine: `kvkit demo`, `kvkit doctor`, `kvkit bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvkit.bench.options import Targets, Traffic
from kvkit.settings import grouped_options, import_from_here

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
Model = Annotated[
    str | None, typer.Option(help="hub id, folder or gemma (270M); default: SmolLM2-135M, from PyPI")
]
Figures = Annotated[Path, typer.Option("--json", help="where to write the figures")]


def demo(
    model: Model = None,
    json_path: Figures = Path("demo.json"),
    png_path: Annotated[Path, typer.Option("--png", help="where to write the picture")] = Path("demo.png"),
    pd: Annotated[
        bool, typer.Option("--pd", help="over a prefill and a decode engine of vLLM, and plain vLLM")
    ] = False,
    flow: Annotated[
        str, typer.Option(help="with --pd: handoff, pool, pull or both; docs/pd.md tells what they are")
    ] = "both",
    blend: Annotated[
        bool,
        typer.Option("--blend", help="over vLLM that blends documents in changing order, and plain vLLM"),
    ] = False,
    vllm: Annotated[str, typer.Option(help="with --pd or --blend: more of vLLM's options")] = "",
) -> None:
    """A 4-turn conversation over a long document, cold and then, in a new process, from disk."""
    from rich.console import Console

    if pd and blend:
        raise typer.BadParameter("want one of --pd and --blend")
    if blend:
        from kvkit.bench import rag

        rag.run(model, vllm, json_path, png_path, Console())
    elif pd:
        from kvkit.bench import pd as over_both

        over_both.run(flow, model, vllm, json_path, png_path, Console())
    else:
        from kvkit.bench.demo import run

        run(model, json_path, png_path, Console())


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="a configuration file to check: a record is put into every tier")
    ] = None,
    blend: Annotated[
        str | None, typer.Option(help="hub id, folder or gemma: measure whether this model may be blended")
    ] = None,
    precision: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="FORM MODEL",
            help="fp8 or int8, and hub id, folder or gemma: measure whether this model's KV may be held so",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="list packages, settings and notes")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> None:
    """Say what is installed and missing, try the kernels, and check a configuration file or a model.

    Of a configuration, a record is put into every tier, read and deleted. Exit status 1: a check failed.
    """
    from rich.console import Console

    from kvkit.bench.doctor import check_blending, check_precision, examine

    if (verbose or as_json) and (blend or precision):
        raise typer.BadParameter("--verbose and --json are not for --blend and --precision")
    console = Console()
    if precision is not None:
        check_precision(*precision, console)
        return
    if blend is not None:
        check_blending(blend, console)
        return
    import_from_here()  # eviction policies
    if not examine(config, console, verbose=verbose, as_json=as_json):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class BlendResults:
    """Where what was measured goes."""

    json_path: Figures = Path("blend.json")
    png_path: Annotated[
        Path | None, typer.Option("--png", help="where to draw quality against computed rows")
    ] = None
    wide: Annotated[
        bool, typer.Option("--wide", help="also show the interval of every figure, and KL / K deviation's")
    ] = False


@bench.command("blend")
@grouped_options
def bench_blend(
    model: Model = None,
    samples: Annotated[int, typer.Option(min=1, help="of each data set")] = 40,
    tokens: Annotated[int, typer.Option(min=512, help="of a prompt, about")] = 1024,
    methods: Annotated[
        str,
        typer.Option(help="names separated by semicolons; also NAME .15 of any method; default: all of them"),
    ] = "",
    auxiliary: Annotated[
        str | None, typer.Option(help="hub id, folder or gemma: the model by which cacheclip chooses")
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(help="names or files .jsonl, separated by semicolons; all; default: what the gate asks"),
    ] = "",
    *,
    results: BlendResults,
) -> None:
    """Measure what blending does to a model's answers, by method.

    Finished samples are kept beside the figures, in a .jsonl file: a run that was stopped goes on.
    """
    from rich.console import Console

    from kvkit.bench import quality
    from kvkit.bench.files import check_folders, commit, measuring, model_folder, write_figures
    from kvkit.bench.judge import METHODS, Judge, load_auxiliary, method_named
    from kvkit.bench.quality_vllm import opened
    from kvkit.bench.tasks.registry import SETS, TASKS, named
    from kvkit.observe.progress import counted, timed
    from kvkit.observe.terminal import show, tell

    import_from_here()  # methods of one's own
    chosen = [name.strip() for name in methods.split(";") if name.strip()] or list(METHODS)
    wanted = {method: method_named(method) for method in chosen}
    sets = {"": tuple(SETS), "all": tuple(TASKS)}.get(tasks) or named(tasks)
    json_path, png_path = results.json_path, results.png_path
    check_folders(json_path, png_path)
    console = Console()
    folder = model_folder(model, console)
    with measuring(folder), opened(folder, console, wanted, tokens) as (judge, encode, measured):
        if auxiliary is not None and isinstance(judge, Judge):
            judge.auxiliary = load_auxiliary(auxiliary, folder, console)
        kept = json_path.with_suffix(".jsonl")
        work = quality.run(judge, encode, kept, count=samples, tokens=tokens, methods=measured, sets=sets)
        entries = list(counted(work, "samples", samples * len(sets), timed(console)))
    summary = quality.summarise(entries)
    for kind, figures in summary.items():
        show(quality.table(kind, figures, results.wide), console)
    name = Path(folder).name if Path(folder).is_dir() else folder
    settings = {"model": name, "samples": samples, "tokens": tokens, "seed": 0, "commit": commit()}
    means = quality.overall(entries)
    show(quality.table("mean", means, results.wide), console)
    write_figures(json_path, command="kvkit bench blend", **settings, sets=summary, overall=means)
    tell(f"figures: {json_path}", console)
    if png_path is not None:
        quality.draw(summary, png_path)
        tell(f"picture: {png_path}", console)


@bench.command("serve")
@grouped_options
def bench_serve(
    traffic: Traffic,
    targets: Targets,
    json_path: Figures = Path("serve.json"),
    png_path: Annotated[Path | None, typer.Option("--png", help="where to draw the times")] = None,
) -> None:
    """Send the field's workloads to vLLM, plain, with kvkit and with LMCache, or to any server, side by side.

    Times to the first token, hit tokens, throughput, and what a cache costs where nothing is reused. vLLM's
    own prefix cache is off unless --vllm has it on.
    """
    from rich.console import Console

    from kvkit.bench.serve import run

    run(traffic, targets, json_path, png_path, Console())
