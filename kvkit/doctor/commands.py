"""The command `kvkit doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkit.settings import extension, import_from_here

MEASUREMENTS = "kvkit.doctor"
"""Group of entry points that measure a model: `blend` and `precision`."""


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="a configuration file to check: puts a record into every tier")
    ] = None,
    blend: Annotated[
        str | None, typer.Option(help="hub id, folder or gemma: measure whether this model may be blended")
    ] = None,
    precision: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="PRECISION MODEL",
            help="fp8 or int8, and hub id, folder or gemma: measure whether this model's KV may be quantised",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="list packages, settings and notes")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Report what is installed and missing, test the kernels, and check a configuration file or a model.

    With a configuration, puts, reads and deletes a record in every tier. Exit status 1: a check failed.
    """
    from rich.console import Console

    from kvkit.doctor.report import examine

    if (verbose or as_json) and (blend or precision):
        raise typer.BadParameter("--verbose and --json are not for --blend and --precision")
    console = Console()
    if precision is not None:
        extension(MEASUREMENTS, "precision")(*precision, console)
        return
    if blend is not None:
        extension(MEASUREMENTS, "blend")(blend, console)
        return
    import_from_here()  # custom eviction policies
    if not examine(config, console, verbose=verbose, as_json=as_json):
        raise typer.Exit(1)
