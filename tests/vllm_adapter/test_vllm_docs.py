"""The commands of docs/serve/vllm.md work on real vLLM without a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from page_blocks import blocks, on_page, run_shell
from page_command_server import Typed
from servers import free_ports
from vllm_process import ENVIRONMENT
from waiting import wait_for

INFO = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}


@pytest.mark.nightly
def test_the_first_experiment_on_a_cpu(tmp_path: Path) -> None:
    """As typed, with what the page promises in the log: only the port and the disk's folder change.

    (And nothing is compiled, in one process: it starts sooner.)
    """
    settings = blocks("docs/serve/vllm.md", "toml")[0].text
    (tmp_path / "kvkit.toml").write_text(settings.replace("file:///tmp", f"file://{tmp_path}"))
    (port,) = free_ports(1)
    there = {":8000/": f":{port}/"}
    serve = on_page("docs/serve/vllm.md", "MODEL=$(python")
    changes = {"--served-model-name": f"--port {port} --enforce-eager --served-model-name"}
    promised = [
        block.text.strip()
        for block in blocks("docs/serve/vllm.md", "text")
        if "prompt tokens hit" in block.text
    ]
    again = on_page("docs/serve/vllm.md", "curl -X POST http://127.0.0.1:8000/reset_prefix_cache")
    reset, ask = again.splitlines()
    cached, told = [], []

    def have_told(command: str) -> None:
        """Type a command that asks, and wait for what the log says of it."""
        cached.append(_cached(run_shell(command, tmp_path, there).stdout))
        wait_for(lambda: len(_told(served)) == len(cached))
        told.append(_told(served)[-1])

    with Typed(tmp_path, serve, changes, port, **INFO) as served:
        have_told(on_page("docs/serve/vllm.md", 'python -c "\nimport json'))
        have_told(ask)
        assert json.loads(run_shell(reset, tmp_path, there).stdout) == {"success": True}
        have_told(ask)
    with Typed(tmp_path, serve, changes, port, **INFO) as served:
        have_told(ask)
    assert cached == [0, 1792, 1792, 1792]
    assert told == [promised[0], "of 1835 prompt tokens hit none; stored none", *promised[1:]]


def _cached(answer: str) -> int:
    """Read how many tokens of a prompt no computation was needed for."""
    return int(json.loads(answer[answer.index("{") :])["usage"]["prompt_tokens_details"]["cached_tokens"])


def _told(served: Typed) -> list[str]:
    """List what the log says of each request."""
    return re.findall(r"of \d+ prompt tokens hit .*", served.log.read_text())
