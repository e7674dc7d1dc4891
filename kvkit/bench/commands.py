"""The commands that try kvkit out on this machine: `kvkit demo`, `kvkit doctor`, `kvkit bench`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvkit.bench.options import Targets, Traffic
from kvkit.settings import grouped_options

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


def demo(
    model: Annotated[
        str | None, typer.Option(help="hub id or folder; default: SmolLM2-135M from PyPI")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("demo.json"),
    png_path: Annotated[Path, typer.Option("--png", help="where to write the picture")] = Path("demo.png"),
    pd: Annotated[
        bool,
        typer.Option("--pd", help="over a prefill and a decode engine of vLLM, and plain vLLM"),
    ] = False,
    flow: Annotated[
        str, typer.Option(help="with --pd: handoff, pool, pull or both; docs/pd.md tells what they are")
    ] = "both",
    vllm: Annotated[str, typer.Option(help="with --pd: more of vLLM's options")] = "",
) -> None:
    """A 4-turn conversation over a long document, cold and then, in a new process, from disk."""
    if pd:
        _demo_pd(flow, model, vllm, json_path, png_path)
        return
    from rich.console import Console

    from kvkit.adapters.huggingface.smollm2 import ModelError
    from kvkit.bench.demo import DemoError, run

    try:
        run(model, json_path, png_path, Console())
    except (DemoError, ModelError) as error:
        sys.exit(str(error))


def _demo_pd(flow: str, model: str | None, vllm: str, json_path: Path, png_path: Path) -> None:
    from rich.console import Console

    from kvkit.adapters.huggingface.smollm2 import ModelError
    from kvkit.bench.client import ClientError
    from kvkit.bench.memory import MemoryTooSmall
    from kvkit.bench.pd import FLOWS, PdError, run
    from kvkit.bench.systems import StartError

    chosen = next((known for known in FLOWS if known == flow), None)
    if chosen is None:
        sys.exit(f"flow = {flow!r}: want one of {', '.join(FLOWS)}")
    try:
        options = shlex.split(vllm)
    except ValueError as error:
        sys.exit(f"vllm = {vllm!r}: {error}")
    try:
        run(chosen, model, options, json_path, png_path, Console())
    except (PdError, StartError, ClientError, ModelError, MemoryTooSmall) as error:
        sys.exit(str(error))


def doctor(
    config: Annotated[Path | None, typer.Argument(help="a configuration file to check")] = None,
    blend: Annotated[
        str | None, typer.Option(help="hub id or folder: measure whether this model may be blended")
    ] = None,
) -> None:
    """Say what is installed, what is missing for which feature, and check a configuration file or a model."""
    from rich.console import Console

    from kvkit.bench.doctor import DoctorError, check_blending, check_config, show_versions

    console = Console()
    try:
        if blend is not None:
            if not check_blending(blend, console):
                sys.exit("this model must not be blended")
            console.print("this model may be blended")
            return
        show_versions(console)
        if config is not None:
            check_config(config, console)
    except DoctorError as error:
        sys.exit(str(error))


@bench.command("blend")
def bench_blend(
    model: Annotated[
        str | None, typer.Option(help="hub id or folder; default: SmolLM2-135M from PyPI")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="of each data set")] = 40,
    tokens: Annotated[int, typer.Option(min=512, help="of a prompt, about")] = 1024,
    methods: Annotated[str, typer.Option(help="names separated by semicolons; default: all of them")] = "",
    json_path: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path(
        "blend.json"
    ),
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

    chosen = [name.strip() for name in methods.split(";") if name.strip()] or list(quality.METHODS)
    for name in chosen:
        if name not in quality.METHODS:
            sys.exit(f"methods: {name!r}, want some of {'; '.join(quality.METHODS)}")
    for path in (json_path, png_path):
        if path is not None and not path.absolute().parent.is_dir():
            sys.exit(f"{path}: there is no folder {path.parent}")
    console = Console()
    try:
        judge, encode, name = quality.load_judge(model, console)
    except quality.QualityError as error:
        sys.exit(str(error))
    work = quality.run(
        judge,
        encode,
        json_path.with_suffix(".jsonl"),
        count=samples,
        tokens=tokens,
        methods={method: quality.METHODS[method] for method in chosen},
    )
    entries = list(track(work, "samples", total=samples * len(quality.SETS), console=console))
    summary = quality.summarise(entries)
    for kind, figures in summary.items():
        console.print(quality.table(kind, figures))
    quality.write(json_path, summary, model=name, samples=samples, tokens=tokens)
    if png_path is not None:
        quality.draw(summary, png_path)
    console.print(f"figures: {json_path}", markup=False, highlight=False, soft_wrap=True)


@bench.command("serve")
@grouped_options
def bench_serve(
    traffic: Traffic,
    targets: Targets,
    json_path: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path(
        "serve.json"
    ),
    png_path: Annotated[Path | None, typer.Option("--png", help="where to draw the times")] = None,
) -> None:
    """Send the field's workloads to vLLM, plain, with kvkit and with LMCache, or to any server, side by side.

    Times to the first token, hit tokens, throughput, and what a cache costs where nothing is reused. vLLM's
    own prefix cache is off unless --vllm has it on.
    """
    from rich.console import Console

    from kvkit.bench.serve import ServeError, run

    try:
        results = run(traffic, targets, json_path, png_path, Console())
    except ServeError as error:
        sys.exit(str(error))
    for measured in results:
        for answer in measured.answers:
            if answer.error is not None:
                sys.exit(f"{measured.workload} on {measured.system}: {answer.error}")
