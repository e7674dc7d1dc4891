"""A new vLLM process hits what another stored, from whichever tier is left."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_engine import SIZES, Engine, Settings, connector, prompt
from vllm_server import Served

from kvkit.lab.testbed.servers import RedisServer, S3Server, data_folder

PROMPTS = [prompt(300, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[S3Server, RedisServer]]:
    with (
        data_folder("s3") as one,
        data_folder("redis") as other,
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


def toml(settings: Settings, name: str = "") -> str:
    """Settings as a kvkit.toml: plain values, then tables."""
    lines = [f"{key} = {json.dumps(v)}" for key, v in settings.items() if not isinstance(v, dict)]
    head = [f"[{name}]"] if name else []
    tables = [toml(v, f"{name}.{key}".strip(".")) for key, v in settings.items() if isinstance(v, dict)]
    return "\n".join([*head, *lines, *tables])


def loaded(server: Served) -> dict[str, float]:
    """Tokens loaded so far, by tier."""
    found = re.findall(
        r'^vllm:kvkit_loaded_tokens_total{.*tier="(\w+)".*} (.*)$', server.ask("/metrics"), re.MULTILINE
    )
    return {tier: float(value) for tier, value in found}


@pytest.mark.nightly
def test_a_server_hits_and_survives_its_tiers(
    servers: tuple[S3Server, RedisServer],
    store: tuple[Path, Settings],
    answers: list[list[int]],
    tmp_path: Path,
) -> None:
    """Scheduler and worker in processes of their own; one tier after the other goes while it serves."""
    s3, redis = servers
    folder, settings = store
    path = tmp_path / "kvkit.toml"
    path.write_text(toml(SIZES | settings))
    transfer: dict[str, Any] = {
        "kv_connector": "KVKitConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvkit_config": str(path),
            "lookup_timeout_s": 20.0,
            "prefill_tokens_per_s": 0.01,
        },
    }
    with Served(tmp_path, transfer, apart=True) as server:

        def ask(number: int) -> tuple[int, list[str]]:
            before = loaded(server)
            body = {"model": "smollm2", "prompt": PROMPTS[number], "max_tokens": 8, "temperature": 0}
            told = json.loads(server.ask("/v1/completions", body | {"return_token_ids": True}))
            assert told["choices"][0]["token_ids"] == answers[number]
            after = loaded(server)
            cached: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached, [tier for tier in after if after[tier] > before.get(tier, 0)]

        assert ask(0) == (256, ["disk"])
        shutil.rmtree(folder)
        assert ask(1) == (256, ["s3"])
        s3.kill()
        assert ask(2) == (256, ["redis"])
        redis.kill()
        assert ask(3) == (0, [])


@pytest.mark.nightly
def test_importing_the_connector_leaves_numba_alone() -> None:
    """vLLM's search for its CPU kernels, at start-up, stumbles over the modules of llvmlite."""
    code = "import sys, kvkit.adapters.vllm.connector as c; c.register(); c.register()"
    code += "; print('llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
