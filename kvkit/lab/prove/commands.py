"""The command `kvkit prove`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkit.lab.prove.options import ProveOptions
from kvkit.settings import grouped_options

if TYPE_CHECKING:
    from kvkit.lab.prove.verdict import ScenarioVerdict


@grouped_options
def prove(
    options: ProveOptions,
    json_path: Annotated[Path, typer.Option("--json", help="where to write the verdicts")] = Path(
        "prove.json"
    ),
    html_path: Annotated[Path, typer.Option("--html", help="where to write the page")] = Path("prove.html"),
) -> None:
    """Prove that a KV connector of vLLM restores what the engine would have computed.

    Each scenario compares answers and pages with those of an engine without the connector, and checks that
    KV was loaded. Exit status 0: everything that ran is proven; 1: something differs; 2: something is not
    proven, the engine was gone, or nothing could run.
    """
    import time

    from rich.console import Console

    from kvkit.adapters.huggingface.packaged import ModelError
    from kvkit.lab.files import BenchError, check_folders
    from kvkit.lab.prove.preparation import command_of, prepared
    from kvkit.lab.prove.report import comparison_text, shown
    from kvkit.lab.prove.run import run
    from kvkit.lab.prove.verdict import exit_status
    from kvkit.lab.serve.systems import ended_by_sigterm
    from kvkit.observe.progress import timed
    from kvkit.observe.terminal import print_text, show

    console, start_s = Console(), time.monotonic()

    try:
        check_folders(json_path, html_path)
        with ended_by_sigterm(), prepared(options, console) as proof:
            command = command_of(options, proof.seed)
            print_text(command, console)
            verdicts = run(proof, timed(console))
        comparison = comparison_text(proof.dtype, proof.engine.no_pages_reason)
        facts = {
            "command": command,
            "connector": options.kv_transfer_config,
            "model": options.model or "SmolLM2-135M-Instruct",
            "dtype": proof.dtype,
            "seed": proof.seed,
            "compared": comparison,
            "wall_s": round(time.monotonic() - start_s, 1),
            "cpu_s": _cpu_s(),
        }
        show(shown(verdicts), console)
        print_text(comparison, console)
        for verdict in verdicts:
            if verdict.outcome in ("differs", "not proven"):
                print_text(f"to repeat: {command_of(options, proof.seed, verdict.scenario)}", console)
        _write(verdicts, facts, json_path, html_path)
        print_text(f"verdicts: {json_path}\npage: {html_path}", console)
    except (BenchError, ModelError, OSError) as error:
        print_text(f"error: {error}", Console(stderr=True))
        raise typer.Exit(2) from error
    raise typer.Exit(exit_status(verdicts))


def _cpu_s() -> float:
    """Return the CPU time of this process and its ended children, in seconds."""
    import resource

    processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return round(sum(sum(resource.getrusage(process)[:2]) for process in processes), 1)


def _write(
    verdicts: Sequence[ScenarioVerdict], facts: Mapping[str, Any], json_path: Path, html_path: Path
) -> None:
    """Write the figures and the page, with the versions of installed packages."""
    import time
    from dataclasses import asdict

    from kvkit.lab.files import write_figures
    from kvkit.lab.prove.report import html, versions

    packages = versions()
    write_figures(json_path, **facts, packages=packages, verdicts=[asdict(verdict) for verdict in verdicts])
    html_path.write_text(html(verdicts, {**facts, **packages}, time.time()), encoding="utf-8")
