"""Other KV caches than plain ones, in a real vLLM engine: sliding windows, latent attention, two ranks.

The models are small ones with random weights, large enough that their answers depend on every token.
"""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client.parser import text_string_to_metric_families
from servers import adjacent_ports
from small_models import COMMON, QWEN, VOCABULARY, save
from transformers import DeepseekV2Config, Gemma3TextConfig, PretrainedConfig
from vllm_engine import BLOCK, Engine, Settings, connector, on_disk, prompt

from kvkit.tiers.testing.contract import DEADLINE_S

GEMMA = Gemma3TextConfig(
    **COMMON,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=256,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
)
DEEPSEEK = DeepseekV2Config(
    **COMMON,
    num_key_value_heads=4,
    kv_lora_rank=512,  # vLLM's kernel takes this size of latents alone
    q_lora_rank=None,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    first_k_dense_replace=6,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
)
TOKEN = "known-to-the-tests-alone"
PROMPTS = [prompt(n, seed=n, vocabulary=VOCABULARY) for n in (900, 500, 700)]


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.mark.parametrize("config", [QWEN, GEMMA], ids=["gqa", "windows"])
def test_answers_are_the_same_with_and_without(
    config: PretrainedConfig, process: Engine, tmp_path: Path
) -> None:
    """Prompts in pieces, so that windows have lost blocks before their chunks are saved.

    What is loaded is compared with vLLM's own prefix cache, which computes the rest in the same pieces.
    """
    options: dict[str, Any] = {
        "model": save(config, tmp_path / "model"),
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 320,
        "max_num_seqs": 4,
    }

    def ask(prompts: list[list[int]]) -> list[Settings]:
        return [process.generate([given], tokens=20)[0] for given in prompts]

    process.open(None, **options, enable_prefix_caching=True)
    expected = ask(PROMPTS), ask(PROMPTS)
    (other,) = ask([[7, *PROMPTS[0][1:]]])
    assert other["logprobs"] != pytest.approx(expected[0][0]["logprobs"], abs=1e-2), "it looks at little"
    process.open(connector(on_disk(tmp_path / "kv")), **options)
    cold = ask(PROMPTS)
    process.flush()
    warm = ask(PROMPTS)
    assert [answer["cached"] for answer in cold] == [0, 0, 0]
    assert [answer["cached"] for answer in warm] == [(len(p) - 1) // BLOCK * BLOCK for p in PROMPTS]
    for found, wanted in zip((*cold, *warm), (*expected[0], *expected[1]), strict=True):
        assert found["tokens"] == wanted["tokens"]
        assert found["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
    turns = [[*given, *answer["tokens"], 7] for given, answer in zip(PROMPTS, cold, strict=True)]
    following = process.generate(turns, tokens=4)
    assert [answer["cached"] for answer in following] == [(len(p) + 19) // BLOCK * BLOCK for p in PROMPTS]


def test_latent_attention_on_a_cpu_is_refused(process: Engine, tmp_path: Path) -> None:
    """vLLM would pass over what was loaded, and answer wrongly."""
    transfer = connector(on_disk(tmp_path / "kv"))
    with pytest.raises(AssertionError, match=r"ConfigError: layer model\.layers\.0.*MLAAttentionSpec"):
        process.open(transfer, model=save(DEEPSEEK, tmp_path / "model"), skip_tokenizer_init=True)


def test_a_load_that_fails_with_several_groups(process: Engine, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": save(GEMMA, tmp_path / "model"), "skip_tokenizer_init": True}
    process.open(connector(on_disk(tmp_path / "kv")), **options)
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


def test_two_ranks(tmp_path: Path) -> None:
    """Each rank has records of its own, in a process of its own, and a hit is what both have.

    Each has an endpoint, and what it counts is told apart.
    """
    options: dict[str, Any] = {
        "model": save(QWEN, tmp_path / "model"),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    with Engine() as engine:
        port = adjacent_ports()
        server = {"enabled": True, "port": port, "token": TOKEN}
        engine.open(connector(on_disk(tmp_path / "kv") | {"server": server}), **options)
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
        spaces = list((tmp_path / "kv").iterdir())
        assert len(spaces) == 2
        shutil.rmtree(spaces[0])  # one of them loses its records: nothing is hit, and all is saved again
        lost = engine.generate(PROMPTS)
        found = engine.generate(PROMPTS)
        assert [answer["cached"] for answer in lost] == [0, 0, 0]
        assert [answer["cached"] for answer in found] == [answer["cached"] for answer in warm]
        for answers in (lost, found):
            assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in cold]
