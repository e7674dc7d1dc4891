"""The command `kvkit simulate`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvkit.settings import grouped_options, import_from_here


@dataclass(frozen=True, slots=True)
class Generated:
    """Size and seed of a generated trace."""

    requests: Annotated[int, typer.Option(help="requests of a generated trace", min=1, max=10**7)] = 2000
    seed: Annotated[int, typer.Option(help="seed of a generated trace, and of times that a trace lacks")] = 0


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices to simulate side by side."""

    compare: Annotated[
        str, typer.Option(help="eviction policies to compare, such as lru,arc,mine:Largest")
    ] = ""
    sweep: Annotated[str, typer.Option(help="capacities of a tier to compare, such as memory=4GiB,8GiB")] = ""
    snapshots: Annotated[str, typer.Option(help="values of snapshot_every to compare, such as 1,4,0")] = ""


@grouped_options
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="a trace (JSON lines, CSV, or a folder), or chat, rag, agents or mixed to generate one"
        ),
    ],
    config: Annotated[Path | None, typer.Option(help="nodes, tiers, speeds: a TOML file")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write the figures")] = None,
    png_path: Annotated[Path | None, typer.Option("--png", help="where to plot hits by capacity")] = None,
    *,
    choices: Choices,
    generated: Generated,
    save: Annotated[Path | None, typer.Option(help="where to write the trace")] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="also show bytes by tier, evictions, medians and waits")
    ] = False,
) -> None:
    """Simulate a trace of requests on nodes and tiers: hits, bytes, times to the first token, cost."""
    from kvkit.lab.simulate import report
    from kvkit.lab.simulate.config import SimulationConfig, load_simulation
    from kvkit.lab.simulate.traces import trace_of, write_trace
    from kvkit.observe.terminal import print_text, show

    import_from_here()  # eviction policies
    try:
        setup = load_simulation(config) if config else SimulationConfig()
        # a plot needs several capacities
        sweep = choices.sweep
        swept = report.parse_sweep(sweep) if sweep else report.default_sweep(setup) if png_path else None
        snapshots = report.parse_snapshots(choices.snapshots)
        requested = trace_of(trace, generated.requests, generated.seed)
        if save:
            write_trace(requested, save)
            print_text(f"trace: {save}")
        policies = [name.strip() for name in choices.compare.split(",") if name.strip()]
        runs = report.compare(requested, setup, policies, swept, snapshots)
        show(report.table(runs, setup, swept[0] if swept else None, wide))
        for note in report.notes(requested, trace):
            print(note)
        if json_path:
            document = {
                "trace": trace,
                "generated": None if Path(trace).exists() else asdict(generated),
                "block_tokens": requested.block_tokens,
                "prefixes_known": requested.prefixes_known,
                "failed_requests": requested.failed,
                "config": setup.model_dump(mode="json"),
                "swept": swept[0] if swept else None,
                "runs": [report.as_json(run) for run in runs],
            }
            json_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print_text(f"figures: {json_path}")
        if png_path and swept:
            report.plot(runs, swept[0], png_path)
            print_text(f"picture: {png_path}")
    except OSError as error:
        sys.exit(str(error))
