"""What docs/vllm.md has a user type on a machine without a GPU, on real vLLM."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pages import blocks, on_page
from servers import free_ports
from small_models import save_with_tokenizer
from typed import Typed
from vllm_process import ENVIRONMENT

WORDS = " ".join(f"word{number}" for number in range(400))


def complete(url: str, model: str, prompt: str) -> dict[str, int]:
    """The usage of a short completion."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        usage: dict[str, int] = json.loads(reply.read())["usage"]
    return usage


@pytest.mark.nightly
def test_the_quick_start_on_a_cpu(tmp_path: Path) -> None:
    """With the file and the command of the page: only the model, the disk's folder and the port change.

    (And nothing is compiled, in one process: it starts sooner.)
    """
    model = str(save_with_tokenizer(tmp_path / "model"))
    settings = blocks("docs/vllm.md", "toml")[0].text
    (tmp_path / "kvkit.toml").write_text(settings.replace("file:///var/cache", f"file://{tmp_path}"))
    (port,) = free_ports(1)
    command = on_page("docs/vllm.md", "VLLM_CPU_KVCACHE_SPACE=")
    changes = {"--model MODEL": f"--model {model} --port {port} --enforce-eager"}
    with Typed(tmp_path, command, changes, port, **ENVIRONMENT) as served:
        for _ in range(2):
            complete(served.url, model, WORDS)
        with urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
    stored = [line for line in lines if line.startswith("vllm:kvkit_stored_tokens_total{")]
    assert any(float(line.split()[-1]) > 0 for line in stored), lines
    assert list((tmp_path / "kvkit").rglob("c.*"))
