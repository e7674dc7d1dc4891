"""Sliding windows and two ranks work in a real vLLM engine, beyond the zoo (test_vllm_zoo.py).

The models are small ones with random weights, large enough that their answers depend on every token.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from prometheus_client.parser import text_string_to_metric_families
from small_models import COMMON, QWEN, VOCABULARY, save
from transformers import Gemma3TextConfig
from vllm_engine import BLOCK, Engine, connector, on_disk, prompt

from kvkit.lab.testbed.servers import adjacent_ports
from kvkit.tiers.testing.contract import DEADLINE_S

GEMMA = Gemma3TextConfig(
    **COMMON,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=256,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
)
OPTIONS = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20}
TOKEN = "known-to-the-tests-alone"
OTHER = prompt(600, seed=1, vocabulary=VOCABULARY)
HANDED = prompt(800, seed=2, vocabulary=VOCABULARY)
PROMPTS = [prompt(n, seed=n, vocabulary=VOCABULARY) for n in (900, 500, 700)]


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


def test_a_load_that_fails_with_several_groups(process: Engine, tmp_path: Path) -> None:
    process.open(connector(on_disk(tmp_path / "kv")), save(GEMMA, tmp_path / "model"), **OPTIONS)
    expected = process.text(*PROMPTS)
    process.flush()
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 14:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    before = process.metrics().get("vllm:kvkit_load_errors_total{}", 0)
    assert process.text(*PROMPTS) == expected
    assert process.metrics()["vllm:kvkit_load_errors_total{}"] == before + len(PROMPTS)


def scraped(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples at one rank's endpoint."""
    address = f"http://127.0.0.1:{port}/metrics"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def test_two_ranks(process: Engine, tmp_path: Path) -> None:
    """Each rank has records of its heads, in a process of its own, and a hit is what both have.

    Each has an endpoint, and what it counts is told apart. A process of all heads reads and writes the same,
    and is handed what both have computed.
    """
    alone = {"model": save(QWEN, tmp_path / "model")} | OPTIONS
    options = alone | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    kept = on_disk(tmp_path / "kv") | {"staging": "16MiB"}
    address = f"unix://{tmp_path}/sockets/{{rank}}"
    receives = {"handoff": {"role": "decode", "listen": [address], "buffer": "16MiB"}}
    process.open(connector(kept | receives, record_ranks=2), **alone)
    (first,) = process.generate([OTHER])
    with Engine() as engine:
        port = adjacent_ports()
        server = {"enabled": True, "port": port, "token": TOKEN}
        sends = {"server": server, "handoff": {"role": "prefill"}}
        engine.open(connector(kept | sends), **options)
        cold = engine.generate(PROMPTS)
        warm = engine.generate(PROMPTS)
        metrics = engine.metrics()
        for rank in (0, 1):
            shown = scraped(port + rank)
            (info,) = (labels for name, labels in shown if name == "kvkit_cache_info")
            assert {("rank", str(rank)), ("world", "2")} <= info
            loaded = shown["kvkit_loaded_tokens_total", frozenset({("tier", "disk")})]
            assert loaded == sum(answer["cached"] for answer in warm)
            labels = "{rank=1,tier=disk}" if rank else "{tier=disk}"
            assert metrics[f"vllm:kvkit_loaded_tokens_total{labels}"] == loaded
            assert metrics[f"vllm:kvkit_loaded_bytes_total{labels}"] > 0
        assert [answer["cached"] for answer in warm] == [(len(p) - 1) // BLOCK * BLOCK for p in PROMPTS]
        assert [answer["tokens"] for answer in warm] == [answer["tokens"] for answer in cold]
        (again,) = engine.generate([OTHER])
        assert (again["cached"], again["tokens"]) == (len(OTHER) // BLOCK * BLOCK, first["tokens"])
        engine.flush()
        shared = process.generate(PROMPTS)
        assert [answer["cached"] for answer in shared] == [answer["cached"] for answer in warm]
        assert [answer["tokens"] for answer in shared] == [answer["tokens"] for answer in cold]
        for file in (tmp_path / "kv").rglob("c.*.0.1.0.0"):  # one of them loses its records: nothing is hit
            file.unlink()
        lost = engine.generate(PROMPTS)
        found = engine.generate(PROMPTS)
        assert [answer["cached"] for answer in lost] == [0, 0, 0]
        assert [answer["cached"] for answer in found] == [answer["cached"] for answer in warm]
        for answers in (lost, found):
            assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in cold]
        (here,) = engine.generate([HANDED])
        sent = {"do_remote_decode": True, "do_remote_prefill": False, "handoff": address}
        (told,) = engine.generate([HANDED], 1, extra_args={"kv_transfer_params": sent})
        (there,) = process.generate([HANDED], extra_args={"kv_transfer_params": told["handoff"]})
        assert there["tokens"] == here["tokens"]
        handed = process.metrics()["vllm:kvkit_loaded_tokens_total{tier=handoff}"]
        assert handed == -(-(len(HANDED) - 1) // BLOCK) * BLOCK
    whole = on_disk(tmp_path / "whole") | {"staging": "16MiB"}  # records as one rank makes them by default
    process.open(connector(whole), **alone)
    process.generate(PROMPTS)
    process.flush()
    files = sorted((tmp_path / "whole").rglob("c.*"))
    with Engine() as engine:
        engine.open(connector(whole, record_ranks=1), **options)
        parts = engine.generate(PROMPTS)
        engine.generate([OTHER])
        engine.flush()
    assert [answer["cached"] for answer in parts] == [answer["cached"] for answer in warm]
    assert [answer["tokens"] for answer in parts] == [answer["tokens"] for answer in cold]
    assert sorted((tmp_path / "whole").rglob("c.*")) == files, "who has parts stores nothing"
