"""The commands of the quick start, and of the pages that go on from it, work on real vLLM without a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from page_blocks import blocks, changed, check_printed, on_page, run_shell
from page_command_server import Typed
from vllm_process import ENVIRONMENT

from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for

INFO = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}
START, REQUESTS, VLLM = (f"docs/serve/{name}.md" for name in ("quick-start", "requests", "vllm"))


class Asked:
    """What is typed beside a server, and what its log says of each request.

    Args:
        served: the server.
        folder: where it is typed.
        port: of the server.
    """

    def __init__(self, served: Typed, folder: Path, port: int) -> None:
        self._served, self._folder, self._ports = served, folder, {":8000/": f":{port}/"}
        self.cached: list[int] = []

    def ask(self, command: str) -> str:
        """Type a command that asks, and wait for what the log says of it; return the log since."""
        before = len(self.log)
        asked = len(_told(self.log))
        answer = self.type(command)
        details = json.loads(answer[answer.index('{"id"') :])["usage"]["prompt_tokens_details"]
        self.cached.append(int(details["cached_tokens"]))
        wait_for(lambda: len(_told(self.log)) > asked)
        return self.log[before:]

    def type(self, command: str) -> str:
        return run_shell(command, self._folder, self._ports).stdout

    @property
    def log(self) -> str:
        return self._served.log.read_text()


@pytest.mark.nightly
def test_the_quick_start_on_a_cpu(tmp_path: Path) -> None:
    """As typed, with what the pages promise: only ports and the disk's folder change."""
    port, endpoint = free_ports(2)
    settings = {
        "file:///tmp": f"file://{tmp_path}",
        "enabled = true": f"enabled = true\nport = {endpoint}",
    }
    (tmp_path / "kvkit.toml").write_text(changed(blocks(START, "toml")[0].text, settings))
    serve = on_page("docs/serve/quick-start.md", "MODEL=$(python")
    changes = {"--served-model-name": f"--port {port} --served-model-name"}
    first = on_page("docs/serve/quick-start.md", 'python -c "\nimport json')
    reset, again = on_page("docs/serve/quick-start.md", "curl -X POST").splitlines()
    assert on_page("docs/serve/quick-start.md", "curl http://127.0.0.1:8000/v1").strip() == again
    private = on_page("docs/serve/requests.md", 'python -c "\nimport json')
    keep = on_page("docs/serve/requests.md", "sed '1s/^{/")
    count = on_page("docs/serve/vllm.md", "curl -s http://127.0.0.1:8000/metrics")
    top = on_page("docs/serve/quick-start.md", "kvkit top --once")
    with Typed(tmp_path, serve, changes, port, **INFO) as served:
        asked = Asked(served, tmp_path, port)
        _check(START, 'python -c "\nimport json', asked.ask(first))
        assert "hit none; stored none" in asked.ask(again)
        assert json.loads(asked.type(reset)) == {"success": True}
        _check(START, "curl -X POST", asked.ask(again))
        assert asked.cached == [0, 1792, 1792]
        _check(REQUESTS, 'python -c "\nimport json', asked.ask(private))
        check_printed(REQUESTS, "sed '1s/^{/", asked.ask(keep))
    with Typed(tmp_path, serve, changes, port, **INFO) as served:
        asked = Asked(served, tmp_path, port)
        _check(START, "curl http://127.0.0.1:8000/v1", asked.ask(again))
        assert asked.cached == [1792]
        wait_for(
            lambda: "vllm:kvkit_loaded_tokens_total{" in asked.type("curl -s http://127.0.0.1:8000/metrics")
        )
        check_printed(VLLM, "curl -s http://127.0.0.1:8000/metrics", asked.type(count))
        shown = run_shell(f"{top.strip()} http://127.0.0.1:{endpoint}", tmp_path).stdout
        check_printed(START, "kvkit top --once", shown)


def _check(page: str, start: str, log: str) -> None:
    """Compare what the log says of one request with what the page shows, numbers included."""
    check_printed(page, start, log)
    (block,) = (block for block in blocks(page) if block.text.startswith(start))
    assert _told(block.expected) == _told(log)


def _told(log: str) -> list[str]:
    """List what a log says of each request."""
    return re.findall(r"of \d+ prompt tokens hit .*", log)
