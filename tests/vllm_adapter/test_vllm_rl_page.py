"""The commands of docs/serve/rl.md change the weights of a real server, and no KV of old ones is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from page_blocks import check_printed, on_page, run_shell
from page_command_server import Typed
from small_models import save_with_tokenizer
from vllm_process import ENVIRONMENT

from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_for

PAGE = "docs/serve/rl.md"
START = "curl -X POST 'http://127.0.0.1:8000/pause"
NEW = "/models/step-120"
SERVE = """VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --port 8000 \
    --served-model-name small --max-model-len 2048 --enforce-eager --kv-cache-memory-bytes 67108864 \
    --kv-transfer-config '{"kv_connector": "KVKitConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"kvkit": {"chunk_tokens": 128, "tiers": {"disk": {"url": "STORE"}}}}}'"""
ASK = """curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{
    "model": "small", "prompt": "PROMPT", "max_tokens": 4, "temperature": 0}'"""


@pytest.mark.nightly
def test_weights_change_as_the_page_has_it(tmp_path: Path) -> None:
    model = str(save_with_tokenizer(tmp_path / "model"))
    (port,) = free_ports(1)
    there = {":8000": f":{port}"}
    changes = {"--port 8000": f"--port {port}", "MODEL": model, "STORE": str(tmp_path / "kv")}
    ask = ASK.replace("PROMPT", "one two three " * 100)
    update = on_page("docs/serve/rl.md", "curl -X POST 'http://127.0.0.1:8000/pause")

    def hits(served: Typed) -> list[str]:
        return re.findall(r"prompt tokens hit (.*);", served.log.read_text())

    reset = "curl -X POST http://127.0.0.1:8000/reset_prefix_cache"  # vLLM's own alone

    with Typed(tmp_path, SERVE, changes, port, **ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}) as served:
        for number, command in enumerate(("true", reset, update), 1):
            places = there if "8000" in command else {}
            done = run_shell(command, tmp_path, places | ({NEW: model} if command == update else {}))
            if command == update:
                check_printed(PAGE, START, done.stdout)
            assert json.loads(run_shell(ask, tmp_path, there).stdout)["choices"]
            wait_for(lambda count=number: len(hits(served)) == count)
        first, again, updated = hits(served)
    assert (first, updated) == ("none", "none")
    assert again.endswith(" (disk)")
