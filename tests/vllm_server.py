"""vLLM's OpenAI server on the CPU, as a process."""

from __future__ import annotations

import json
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
from servers import Process, free_ports
from vllm_engine import ENVIRONMENT, Settings

from kvkit.adapters import smollm2


class Served(Process):
    """vLLM's OpenAI server. `transfer`: its `kv_transfer_config`; None: without a connector."""

    start_s = 300.0

    def __init__(self, folder: Path, transfer: Settings | None) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._transfer = transfer

    def command(self) -> list[str]:
        options = {
            "--model": str(smollm2.fetch()),
            "--served-model-name": "smollm2",
            "--dtype": "float32",
            "--max-model-len": "2048",
            "--port": str(self.port),
            "--host": "127.0.0.1",
        }
        if self._transfer is not None:
            options["--kv-transfer-config"] = json.dumps(self._transfer)
        variables = [f"{k}={v}" for k, v in (ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}).items()]
        flat = [word for pair in options.items() for word in pair]
        switches = ["--enforce-eager", "--no-enable-prefix-caching", "--enable-prompt-tokens-details"]
        module = "vllm.entrypoints.openai.api_server"
        return ["env", *variables, sys.executable, "-m", module, *flat, *switches]

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
            return bool(reply.status == 200)

    def kill(self) -> None:
        """End it and its engine, which would outlive it."""
        engine = psutil.Process(self.pid).children(recursive=True) if self._process is not None else []
        super().kill()
        for process in engine:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def ask(self, path: str, body: Settings | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            text: str = reply.read().decode()
            return text
