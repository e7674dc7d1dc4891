"""kvkit's tier under vLLM's offloading knows weights by their contents, and not by a name."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from small_models import QWEN, save
from vllm.config import KVTransferConfig, LoRAConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm_engine import BLOCK

from kvkit.adapters.vllm.connector import register
from kvkit.adapters.vllm.offloading import TIER_MODULE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(QWEN, tmp_path_factory.mktemp("models") / "model")


def vllm_config(model: Path, folder: Path, change: Callable[[Any], None] | None = None) -> VllmConfig:
    tier = {
        "type": "KVKitTier",
        "module_path": TIER_MODULE,
        "kvkit": {"tiers": {"disk": {"url": str(folder)}}},
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [tier],
        },
    }
    args = EngineArgs(str(model), skip_tokenizer_init=True, kv_transfer_config=KVTransferConfig(**offloading))
    config = args.create_engine_config()
    if change is not None:
        change(config)
    return config


def namespace(config: VllmConfig) -> Any:
    """The namespace of kvkit's tier under the connector that vLLM makes for its scheduler."""
    register()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(QWEN.num_hidden_layers)]
    cache = KVCacheConfig(64, [], [KVCacheGroupSpec(layers, spec)])
    connector: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    (offloading,) = getattr(connector, "_connectors", [connector])
    (tier,) = offloading.connector_scheduler.manager.secondary_tiers
    found = tier._pages._format.namespace
    connector.shutdown()
    return found


def test_weights_are_known_by_their_contents(model: Path, tmp_path: Path) -> None:
    """Wherever they lie; one changed byte of a file of weights is another model."""
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(model, copy)
    first = namespace(vllm_config(model, tmp_path / "kv"))
    assert first.model == "model"
    assert "unknown" not in first.revision
    assert namespace(vllm_config(copy, tmp_path / "kv")) == first
    (weights,) = copy.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert namespace(vllm_config(copy, tmp_path / "kv")) != first


def test_what_an_engine_computes_with_counts(model: Path, tmp_path: Path) -> None:
    def quantise(config: Any) -> None:
        config.model_config.dtype = torch.float16

    first = namespace(vllm_config(model, tmp_path))
    assert namespace(vllm_config(model, tmp_path, quantise)) != first


def test_an_identity_that_is_given_stays(model: Path, tmp_path: Path) -> None:
    def identify(config: Any) -> None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra["secondary_tiers"][0]["identity"] = "weights of May"

    assert namespace(vllm_config(model, tmp_path, identify)).revision.startswith("weights of May+")


def test_with_adapters_nothing_outlives_an_engine(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def adapt(config: Any) -> None:
        config.lora_config = LoRAConfig()

    with caplog.at_level(logging.WARNING, "kvkit"):
        first, second = (namespace(vllm_config(model, tmp_path, adapt)) for _ in range(2))
    assert first != second
    assert "with LoRA adapters, pages do not outlive this engine; give `identity`" in caplog.text


def test_under_a_multi_connector(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model, tmp_path)
    own = config.kv_transfer_config
    inner = {"kv_connector": own.kv_connector, "kv_role": "kv_both"}
    inner |= {"kv_connector_extra_config": own.kv_connector_extra_config}
    alone = namespace(config)
    for tier in own.kv_connector_extra_config["secondary_tiers"]:
        del tier["identity"]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [inner]},
    )
    assert namespace(config) == alone
