"""The command line called in this process, on a terminal without colours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvkit import cli


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture: as through a pipe, without colours, and without settings from outside."""
    for name in list(os.environ):
        if name.startswith("KVKIT_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def failed(result: Result, *words: str) -> None:
    """It returned 1 and said why, on stderr, without a traceback."""
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.output
