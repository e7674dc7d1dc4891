"""The commands `kvkit demo` and `kvkit bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkit.lab.serve.options import Targets, Traffic
from kvkit.settings import grouped_options, import_from_here

if TYPE_CHECKING:
    from rich.console import Console

bench = typer.Typer(help="Run benchmarks on this machine.", no_args_is_help=True)
Model = Annotated[
    str | None,
    typer.Option(help="hub id, folder, gemma, qwen-0.5b or qwen-1.5b; default: SmolLM2-135M, from PyPI"),
]
Figures = Annotated[Path, typer.Option("--json", help="where to write the figures")]


def demo(
    model: Model = None,
    json_path: Figures = Path("demo.json"),
    png_path: Annotated[Path, typer.Option("--png", help="where to write the picture")] = Path("demo.png"),
    pd: Annotated[
        bool, typer.Option("--pd", help="compare a prefill and a decode engine of vLLM with plain vLLM")
    ] = False,
    flow: Annotated[
        str, typer.Option(help="with --pd: handoff, pool, pull or both; docs/serve/pd.md describes them")
    ] = "both",
    blend: Annotated[
        bool,
        typer.Option("--blend", help="compare vLLM that blends documents in changing order with plain vLLM"),
    ] = False,
    vllm: Annotated[str, typer.Option(help="with --pd or --blend: additional options of vLLM")] = "",
) -> None:
    """Hold a 4-turn conversation over a long document, then again in a new process with its KV on disk."""
    from rich.console import Console

    if pd and blend:
        raise typer.BadParameter("want one of --pd and --blend")
    if blend:
        from kvkit.lab.demo import rag

        rag.run(model, vllm, json_path, png_path, Console())
    elif pd:
        from kvkit.lab.demo import pd as pd_demo

        pd_demo.run(flow, model, vllm, json_path, png_path, Console())
    else:
        from kvkit.lab.demo.conversation import run

        run(model, json_path, png_path, Console())


@dataclass(frozen=True, slots=True)
class BlendResults:
    """Options for the output of `kvkit bench blend`."""

    json_path: Figures = Path("blend.json")
    png_path: Annotated[
        Path | None, typer.Option("--png", help="where to draw quality against computed rows")
    ] = None
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", help="also show the interval of every figure, and KL relative to K deviation's"
        ),
    ] = False


@bench.command("blend")
@grouped_options
def bench_blend(
    model: Model = None,
    samples: Annotated[int, typer.Option(min=1, help="samples per data set")] = 40,
    tokens: Annotated[int, typer.Option(min=512, help="approximate tokens per prompt")] = 1024,
    methods: Annotated[
        str,
        typer.Option(help="names separated by semicolons; also NAME .15 for any method; default: all"),
    ] = "",
    auxiliary: Annotated[
        str | None, typer.Option(help="hub id, folder or gemma: the auxiliary model of cacheclip")
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="names or files .jsonl, separated by semicolons, or all; default: the gate's tasks"
        ),
    ] = "",
    answered: Annotated[
        bool, typer.Option("--answered", help="only samples that full recompute answers correctly")
    ] = False,
    *,
    results: BlendResults,
) -> None:
    """Measure the effect of blending on a model's answers, by method.

    Writes finished samples to a .jsonl file beside the figures; an interrupted run resumes from it.
    """
    from rich.console import Console

    from kvkit.lab.files import BenchError, check_folders, measuring, model_folder
    from kvkit.lab.quality import comparison as quality
    from kvkit.lab.quality.in_vllm import opened
    from kvkit.lab.quality.judge import Judge, load_auxiliary
    from kvkit.lab.quality.methods import METHODS, method_named
    from kvkit.lab.quality.tasks.registry import SETS, TASKS, parse_tasks
    from kvkit.observe.progress import counted, timed

    import_from_here()  # custom methods
    names = [name.strip() for name in methods.split(";") if name.strip()] or list(METHODS)
    selected = {method: method_named(method) for method in names}
    sets = {"": tuple(SETS), "all": tuple(TASKS)}.get(tasks) or parse_tasks(tasks)
    check_folders(results.json_path, results.png_path)
    console = Console()
    folder = model_folder(model, console)
    with measuring(folder), opened(folder, console, selected, tokens) as (judge, encode, measured):
        if auxiliary is not None and isinstance(judge, Judge):
            judge.auxiliary = load_auxiliary(auxiliary, folder, console)
        samples_path = results.json_path.with_suffix(".jsonl")
        chosen: Any = {"methods": measured, "sets": sets, "answered": answered}
        work = quality.run(judge, encode, samples_path, count=samples, tokens=tokens, **chosen)
        entries = list(counted(work, "samples", samples * len(sets), timed(console)))
    if not entries:
        raise BenchError("answered: full recompute answers no sample of these tasks")
    name = Path(folder).name if Path(folder).is_dir() else folder
    settings = {"model": name, "samples": samples, "tokens": tokens, "answered": answered, "seed": 0}
    _write_blend(entries, results, settings, console)


def _write_blend(
    entries: list[dict[str, Any]], results: BlendResults, settings: dict[str, Any], console: Console
) -> None:
    """Print tables of measured samples by set, and of their means; write the figures and the picture."""
    from kvkit.lab.files import write_figures
    from kvkit.lab.quality import comparison as quality
    from kvkit.observe.terminal import print_text, show

    summary, means = quality.summarise(entries), quality.overall(entries)
    for kind, figures in {**summary, "mean": means}.items():
        show(quality.table(kind, figures, results.wide), console)
    write_figures(results.json_path, command="kvkit bench blend", **settings, sets=summary, overall=means)
    print_text(f"figures: {results.json_path}", console)
    if results.png_path is not None:
        quality.draw(summary, results.png_path)
        print_text(f"picture: {results.png_path}", console)


@bench.command("serve")
@grouped_options
def bench_serve(
    traffic: Traffic,
    targets: Targets,
    json_path: Figures = Path("serve.json"),
    png_path: Annotated[Path | None, typer.Option("--png", help="where to draw the times")] = None,
) -> None:
    """Compare vLLM, plain, with kvkit and with LMCache, or any server, on standard KV cache workloads.

    Reports times to first token, hit tokens, throughput, and the overhead of a cache without reuse. vLLM's
    own prefix cache is off unless --vllm enables it.
    """
    from rich.console import Console

    from kvkit.lab.serve.run import run

    run(traffic, targets, json_path, png_path, Console())
