"""A server that a page shows, started by the page's own command line."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from page_blocks import changed, environment

from kvkit.lab.testbed.servers import Process


class Typed(Process):
    """The server; a context manager.

    Args:
        folder: where it is typed, and its home.
        text: the command line.
        changes: what is replaced in it; see `page_blocks.run_shell`.
        port: where it answers `/health`.
        variables: of the environment, besides.
    """

    start_s = 300.0

    def __init__(
        self, folder: Path, text: str, changes: Mapping[str, str], port: int, **variables: str
    ) -> None:
        super().__init__(folder)
        self.url = f"http://127.0.0.1:{port}"
        self._text = changed(text, changes)
        self._variables = [f"{k}={v}" for k, v in environment(folder, **variables).items()]

    def command(self) -> list[str]:
        return ["env", "-i", *self._variables, "bash", "-euc", self._text]

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
            return bool(reply.status == 200)

    def kill(self) -> None:
        """End it and what it started, which would outlive it."""
        started: list[psutil.Process] = []
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):  # it has ended
                started = psutil.Process(self.pid).children(recursive=True)
        super().kill()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
