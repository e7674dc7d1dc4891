"""The commands that try kvkit out on this machine: `kvkit demo`, `kvkit doctor`, `kvkit bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkit.bench.options import Targets, Traffic
from kvkit.settings import grouped_options

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
Model = Annotated[str | None, typer.Option(help="hub id or folder; default: SmolLM2-135M from PyPI")]
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
    vllm: Annotated[str, typer.Option(help="with --pd: more of vLLM's options")] = "",
) -> None:
    """A 4-turn conversation over a long document, cold and then, in a new process, from disk."""
    from rich.console import Console

    if pd:
        from kvkit.bench import pd as over_both

        over_both.run(flow, model, vllm, json_path, png_path, Console())
    else:
        from kvkit.bench.demo import run

        run(model, json_path, png_path, Console())


def doctor(
    config: Annotated[Path | None, typer.Argument(help="a configuration file to check")] = None,
    blend: Annotated[
        str | None, typer.Option(help="hub id or folder: measure whether this model may be blended")
    ] = None,
) -> None:
    """Say what is installed, what is missing for which feature, and check a configuration file or a model."""
    from rich.console import Console

    from kvkit.bench.doctor import check_blending, check_config, show_versions

    console = Console()
    if blend is not None:
        check_blending(blend, console)
        return
    show_versions(console)
    if config is not None:
        check_config(config, console)


@bench.command("blend")
def bench_blend(
    model: Model = None,
    samples: Annotated[int, typer.Option(min=1, help="of each data set")] = 40,
    tokens: Annotated[int, typer.Option(min=512, help="of a prompt, about")] = 1024,
    methods: Annotated[str, typer.Option(help="names separated by semicolons; default: all of them")] = "",
    json_path: Figures = Path("blend.json"),
    png_path: Annotated[
        Path | None, typer.Option("--png", help="where to draw quality against computed rows")
    ] = None,
) -> None:
    """Measure what blending does to a model's answers, by method.

    Finished samples are kept beside the figures, in a .jsonl file: a run that was stopped goes on.
    """
    from rich.console import Console
    from rich.progress import track

    from kvkit.bench import quality
    from kvkit.bench.files import BenchError, check_folders, write_figures

    chosen = [name.strip() for name in methods.split(";") if name.strip()] or list(quality.METHODS)
    for name in chosen:
        if name not in quality.METHODS:
            raise BenchError(f"methods: {name!r}, want some of {'; '.join(quality.METHODS)}")
    check_folders(json_path, png_path)
    console = Console()
    judge, encode, name = quality.load_judge(model, console)
    kept = json_path.with_suffix(".jsonl")
    measured = {method: quality.METHODS[method] for method in chosen}
    work = quality.run(judge, encode, kept, count=samples, tokens=tokens, methods=measured)
    entries = list(track(work, "samples", total=samples * len(quality.SETS), console=console))
    summary = quality.summarise(entries)
    for kind, figures in summary.items():
        console.print(quality.table(kind, figures))
    settings = {"model": name, "samples": samples, "tokens": tokens}
    write_figures(json_path, command="kvkit bench blend", **settings, sets=summary)
    if png_path is not None:
        quality.draw(summary, png_path)
    console.print(f"figures: {json_path}", markup=False, highlight=False, soft_wrap=True)


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
