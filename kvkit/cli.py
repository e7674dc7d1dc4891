"""The command line: `kvkit --help` lists its commands, defined in the packages' `commands` modules."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvkit.adapters.huggingface.smollm2 import ModelError
from kvkit.bench.commands import bench, demo, doctor
from kvkit.bench.files import BenchError
from kvkit.bench.prove.commands import prove
from kvkit.environment import DISTRIBUTION, printable, version_of
from kvkit.kernels.tuning.commands import tune
from kvkit.observe.commands import inspect, report, top
from kvkit.router.commands import router
from kvkit.settings import ConfigError
from kvkit.simulate.commands import simulate


class _Commands(TyperGroup):
    """A group of commands that prints exceptions and the messages of `sys.exit(MESSAGE)` as errors."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SystemExit, BenchError, ConfigError, ModelError) as error:
            message = error.code if isinstance(error, SystemExit) else str(error)
            if not isinstance(message, str):
                raise
            from rich.console import Console
            from rich.markup import escape

            text = escape("\n".join(map(printable, message.splitlines())))
            Console(stderr=True).print(f"[red]error:[/red] {text}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    help="Compute an LLM's KV cache once, use it everywhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvkit {version_of(DISTRIBUTION)}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="print kvkit's version", callback=_tell_version, is_eager=True)
]


@app.callback()
def _options(version: _Version = False) -> None: ...


for command in (demo, doctor, inspect, prove, report, router, simulate, top, tune):
    app.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    app()
