"""The installed command in a terminal of 80 columns and with its output in a pipe, and tables as printed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvkit.observe.terminal import FittedTable
from kvkit.tiers.testing.contract import DEADLINE_S

COLUMNS = 80


def environment(**more: str) -> dict[str, str]:
    """That of a shell in a terminal: nothing but the terminal says how wide it is."""
    outside = ("KVKIT_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    return kept | {"TERM": "xterm"} | more


def command(*arguments: object) -> list[str]:
    """What is run."""
    return [str(Path(sys.executable).parent / "kvkit"), *map(str, arguments)]


def open_terminal(rows: int = 24) -> tuple[int, int]:
    """A pseudo-terminal of COLUMNS: the end that reads what is shown, and the command's."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    return master, slave


def in_terminal(*arguments: object, **variables: str) -> list[str]:
    """The lines that the command shows in a terminal until it ends, without colours."""
    master, slave = open_terminal()
    with subprocess.Popen(
        command(*arguments), env=environment(**variables), stdin=slave, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        text = b""
        while True:
            try:
                text += os.read(master, 65536)
            except OSError:  # the command's end is closed
                break
        os.close(master)
        assert process.wait(DEADLINE_S) == 0, text.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode()).splitlines()


def piped(*arguments: object, **variables: str) -> list[str]:
    """The lines that the command writes into a pipe."""
    done = subprocess.run(
        command(*arguments),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return done.stdout.splitlines()


def printed(table: Table, width: int, endless: bool = False) -> str:
    """What a table is in a console so wide. `endless`: as long as it needs to be."""
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(FittedTable(table, endless), crop=False)
    return captured.get()


def assert_whole(table: Table, words: Sequence[str]) -> None:
    """No cell of a table is cut at `COLUMNS` columns, and these words are in it."""
    shown = printed(table, COLUMNS)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= COLUMNS
    assert [word for word in words if word not in shown] == []
    assert len(printed(table, COLUMNS, endless=True).splitlines()) < 8 + 2 * table.row_count
