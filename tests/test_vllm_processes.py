"""One store, several vLLM processes: a new engine hits what another saved, whatever tier is left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from servers import RedisServer, S3Server, data_folder
from vllm_engine import Engine, Settings, connector, prompt
from vllm_server import Served

PROMPTS = [prompt(600, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, RedisServer]]:
    with (
        data_folder(tmp_path_factory, "s3") as one,
        data_folder(tmp_path_factory, "redis") as other,
        S3Server(one) as s3,
        RedisServer(other, "redis") as redis,
    ):
        yield s3, redis


@pytest.fixture(scope="module")
def store(
    servers: tuple[S3Server, RedisServer], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Settings]:
    """A folder, a bucket and a Redis server; nothing is written back, so that each keeps to itself."""
    s3, redis = servers
    folder = tmp_path_factory.mktemp("kv")
    return folder, {
        "timeout_s": 5.0,
        "policy": {"write_back_to": []},
        "tiers": {
            "disk": {"url": f"file://{folder}"},
            "s3": {"url": f"s3://{S3Server.BUCKET}/vllm", "options": s3.options},
            "redis": {"url": redis.url},
        },
    }


@pytest.fixture(scope="module")
def answers(store: tuple[Path, Settings]) -> list[list[int]]:
    """What an engine computed, and saved to every tier, before its process ended."""
    with Engine() as engine:
        engine.open(connector(store[1]))
        computed = engine.generate(PROMPTS)
        engine.flush()
    assert [answer["cached"] for answer in computed] == [0] * len(PROMPTS)
    return [answer["tokens"] for answer in computed]


def test_a_new_process_hits_and_survives_its_tiers(
    servers: tuple[S3Server, RedisServer], store: tuple[Path, Settings], answers: list[list[int]]
) -> None:
    """Scheduler and worker in a process of their own; one tier after the other goes while it serves."""
    s3, redis = servers
    folder, settings = store
    with Engine(VLLM_ENABLE_V1_MULTIPROCESSING="1") as engine:
        engine.open(connector(settings))

        def ask(number: int) -> tuple[int, list[str]]:
            before = engine.metrics()
            (answer,) = engine.generate([PROMPTS[number]])
            assert answer["tokens"] == answers[number]
            after = engine.metrics()
            names = {f"vllm:kvkit_loaded_tokens_total{{tier={tier}}}": tier for tier in settings["tiers"]}
            return answer["cached"], [
                tier for name, tier in names.items() if after.get(name, 0) > before.get(name, 0)
            ]

        assert ask(0) == (512, ["disk"])
        shutil.rmtree(folder)
        assert ask(1) == (512, ["s3"])
        s3.kill()
        assert ask(2) == (512, ["redis"])
        redis.kill()
        assert ask(3) == (0, [])


def test_the_openai_server(tmp_path: Path) -> None:
    path = tmp_path / "kvkit.toml"
    path.write_text(f'chunk_tokens = 128\nstaging = "64MiB"\n[tiers.disk]\nurl = "file://{tmp_path}/kv"\n')
    transfer: dict[str, Any] = {
        "kv_connector": "KVKitConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvkit_config": str(path)},
    }
    body = {"model": "smollm2", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
    with Served(tmp_path, transfer) as server:
        cold, hit = (json.loads(server.ask("/v1/completions", body)) for _ in range(2))
        metrics = server.ask("/metrics")
    assert cold["choices"][0]["text"] == hit["choices"][0]["text"]
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 512
    (line,) = [x for x in metrics.splitlines() if x.startswith("vllm:kvkit_loaded_tokens_total")]
    assert 'tier="disk"' in line
    assert line.endswith(" 512.0")


def test_importing_the_connector_leaves_numba_alone() -> None:
    """vLLM's search for its CPU kernels, at start-up, stumbles over the modules of llvmlite."""
    code = "import sys, kvkit.adapters.vllm.connector as c; c.register(); c.register()"
    code += "; print('llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
