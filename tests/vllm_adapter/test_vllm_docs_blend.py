"""The commands of docs/serve/documents.md work on real vLLM without a GPU."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from page_blocks import blocks, changed, check_printed, on_page
from page_command_server import Typed
from vllm_process import ENVIRONMENT

from kvkit.adapters.huggingface import smollm2
from kvkit.lab.testbed.servers import free_ports

PAGE = "docs/serve/documents.md"


@pytest.mark.nightly
def test_documents_are_blended_as_the_page_shows(tmp_path: Path) -> None:
    """As typed, but for the port, and for a verdict on the model, which takes minutes."""
    (tmp_path / "kvkit.toml").write_text(blocks(PAGE, "toml")[0].text)
    (port,) = free_ports(1)
    changes = {
        "$MODEL": str(smollm2.fetch()),
        "--served-model-name": f"--port {port} --enforce-eager --served-model-name",
    }
    changes |= {'"ratio": 0.15': '"ratio": 0.15, "unchecked": true'}
    serve = on_page("docs/serve/documents.md", "VLLM_CPU_KVCACHE_SPACE=1 python -m vllm")
    ask = changed(on_page("docs/serve/documents.md", '"""ask.py"""'), {":8000/": f":{port}/"})
    printed = io.StringIO()
    with Typed(tmp_path, serve, changes, port, **ENVIRONMENT), contextlib.redirect_stdout(printed):
        exec(compile(ask, "ask.py", "exec"), {})
    check_printed(PAGE, '"""ask.py"""', printed.getvalue())
    counts = json.loads(printed.getvalue().replace("'", '"'))["blend"]
    assert counts["blended"] > counts["recomputed"] > counts["computed"] > 0
    assert counts["exact"] == 512
