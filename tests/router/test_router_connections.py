"""Idle connections keep nobody out of the router, and a lack of descriptors is logged once."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")

from routers import (  # noqa: F401 - fixtures, too
    COMPLETIONS,
    Command,
    Routed,
    Start,
    ask,
    completion,
    engine_processes,
    engines_as_new,
    stream,
    text_of,
    wanted,
)

from kvkit.tiers.testing.contract import DEADLINE_S


def connected(url: str, said: bytes = b"") -> socket.socket:
    """A connection that says no more than this."""
    parts = urlsplit(url)
    found = socket.create_connection((parts.hostname, parts.port), DEADLINE_S)
    found.sendall(said)
    return found


@pytest.mark.parametrize("said", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"])
def test_idle_connections_give_way_to_requests(start: Start, said: bytes) -> None:
    engines = start(prefill=0)
    with Routed(**engines.settings(), connections=20) as router, ExitStack() as stack:
        for _ in range(10):
            for _ in range(30):
                stack.enter_context(connected(router.url, said))
            assert ask(router.url, COMPLETIONS, completion())[0] == 200


def test_a_stream_does_not_give_way(start: Start) -> None:
    engines = start(prefill=0)
    engines["d0"].set(hold_after=2)
    with Routed(**engines.settings(), connections=4) as router, ExitStack() as stack:
        events = stream(router.url, COMPLETIONS, completion())
        made = text_of(next(events))
        for _ in range(40):
            stack.enter_context(connected(router.url))
        assert ask(router.url, "/health")[0] == 200
        engines["d0"].set(hold_after=None)
        assert made + "".join(map(text_of, events)) == wanted(completion())


class Limited(Command):
    """The command, where there are few descriptors."""

    def command(self) -> list[str]:
        given = super().command()
        given[2] = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200)); " + given[2]
        return given


def test_the_command_has_all_descriptors_that_it_may_and_survives(start: Start, tmp_path: Path) -> None:
    engines = start(prefill=0)
    with Limited(tmp_path, "--decode", engines["d0"].url) as router, ExitStack() as stack:
        soft, hard = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
        assert (soft, hard) == (200, 200)
        for _ in range(400):
            stack.enter_context(connected(router.url))
        assert ask(router.url, COMPLETIONS, completion())[0] == 200
        assert router.end() == 0
        log = "".join(path.read_text(errors="replace") for path in tmp_path.iterdir() if path.is_file())
        assert "Traceback" not in log
        assert len(log) < 10_000
