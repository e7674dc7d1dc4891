"""vLLM's OpenAI server on the CPU, as a process."""

from __future__ import annotations

import json
import os
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
from vllm_engine import Settings
from vllm_process import Fork

from kvkit.adapters.huggingface import smollm2
from kvkit.lab.testbed.servers import Process, free_ports

MODULE = "vllm.entrypoints.openai.api_server"


class Served(Process):
    """vLLM's OpenAI server.

    Args:
        transfer: its `kv_transfer_config`; None: without a connector.
        model: folder; None: SmolLM2.
        address: where it listens.
        network: the file of a network namespace to be in, such as `Host.network`.
        apart: whether its worker is a process of its own; its processes import all anew, as a user's do.
    """

    start_s = 300.0

    def __init__(
        self,
        folder: Path,
        transfer: Settings | None,
        model: Path | None = None,
        address: str = "127.0.0.1",
        network: str = "",
        apart: bool = False,
    ) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)
        self.url = f"http://{address}:{self.port}"
        self._transfer = transfer
        self._model = model
        self._address = address
        self._network = network
        self._apart = apart

    def environment(self) -> dict[str, str]:
        """Its variables, besides those of the tests."""
        method = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} if self._apart else {}
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self._apart)), **method}

    def arguments(self) -> list[str]:
        options = {
            "--model": str(self._model or smollm2.fetch()),
            "--served-model-name": "smollm2",
            "--dtype": "float32",
            "--max-model-len": "2048",
            "--kv-cache-memory-bytes": str(256 << 20),
            "--port": str(self.port),
            "--host": self._address,
        }
        if self._transfer is not None:
            options["--kv-transfer-config"] = json.dumps(self._transfer)
        flat = [word for pair in options.items() for word in pair]
        return [*flat, "--enforce-eager", "--no-enable-prefix-caching", "--enable-prompt-tokens-details"]

    def command(self) -> list[str]:
        """As `python -m` has it."""
        return [MODULE, *self.arguments()]

    def launch(self) -> None:
        with open(os.devnull) as nothing, open(self.log, "ab") as log:
            streams = nothing.fileno(), log.fileno(), log.fileno()
            module, *arguments = self.command()
            variables = self.environment()
            self._process = Fork(module, arguments, streams, variables, self.folder, self._network)

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
