"""The command line: `kvkit --help` lists its commands; each is imported when it is run or listed.

Commands of the core package are in `COMMANDS`; all others are entry points of the group `kvkit.commands`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvkit.environment import DISTRIBUTION, printable, version_of
from kvkit.settings import CommandError, ConfigError

COMMANDS = {
    "doctor": "kvkit.doctor.commands:doctor",
    "inspect": "kvkit.observe.commands:inspect",
    "router": "kvkit.router.commands:router",
    "tune": "kvkit.kernels.tuning.commands:app",
}
GROUP = "kvkit.commands"


class _Commands(TyperGroup):
    """A group of commands that prints exceptions and the messages of `sys.exit(MESSAGE)` as errors."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*COMMANDS, *(entry.name for entry in entry_points(group=GROUP))})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            module, _, function = COMMANDS[cmd_name].partition(":")
            target = getattr(import_module(module), function)
        else:
            entries = tuple(entry_points(group=GROUP, name=cmd_name))
            if not entries:
                return None
            target = entries[0].load()
        if isinstance(target, typer.Typer):
            command = get_command(target)
        else:
            single = typer.Typer(add_completion=False)
            single.command()(target)
            command = get_command(single)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SystemExit, CommandError, ConfigError) as error:
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


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"kvkit {version_of(DISTRIBUTION)}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="print kvkit's version", callback=_print_version, is_eager=True)
]


@app.callback()
def _options(version: _Version = False) -> None: ...


def main() -> None:
    """Run the command line."""
    app()
