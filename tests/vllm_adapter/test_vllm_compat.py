"""Private names of vLLM are used in one room, and a vLLM that lacks some is still served."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from small_models import QWEN, save
from test_vllm_identity import name_commit, namespace_of, opaque, vllm_config
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm_engine import BLOCK

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.connector import KVKitConnector
from kvkit.adapters.vllm.identity import draft_identity
from kvkit.adapters.vllm.loras import Loras
from kvkit.settings import ConfigError

ROOM = Path(compat.__file__).parent
PUBLIC = {
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.lora.request",
    "vllm.platforms",
    "vllm.v1.core.sched.output",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.outputs",
    "vllm.v1.request",
    "vllm.v1.sample.logits_processor",
}
"""Modules whose names a connector is given, or is to return."""


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each import of vLLM in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")


def test_nothing_else_imports_what_is_not_public() -> None:
    found = {
        (path.name, module, name)
        for path in ROOM.rglob("*.py")
        if path.name != "compat.py"
        for module, name in imports(path)
        if module not in PUBLIC or name.startswith("_")
    }
    assert not found


def test_every_name_is_where_a_row_says() -> None:
    """The version that the tests run with has all of them, and moved ones are not where they were."""
    version = ".".join(vllm.__version__.split(".")[:2])
    assert version in compat.TESTED
    for name, row in compat.NAMES.items():
        assert set(row.features) <= compat.FEATURES.keys()
        if row.features == ("tuning",):  # not in a build for CPUs
            continue
        assert compat.find(name) is not None
        newest = next(
            (place for since, place in row.later_locations.items() if since <= version), row.location
        )
        module, _, attribute = newest.partition(":")
        assert hasattr(import_module(module), attribute), name


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Takes names away from this vLLM."""

    def take(*names: str) -> None:
        found = compat._found
        monkeypatch.setattr(compat, "_found", lambda name: () if name in names else found(name))

    return take


def connector_of(config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> KVKitConnector:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layers.0"], spec)]
    return KVKitConnector(
        config, role, KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(QWEN, tmp_path_factory.mktemp("model"))


def with_blend(config: Any) -> Any:
    config.kv_transfer_config.kv_connector_extra_config["blend"] = {"unchecked": True}
    return config


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("name", [n for n, row in compat.NAMES.items() if "blend" in row.features])
def test_blending_is_refused_by_name_and_the_rest_serves(
    without: Callable[..., None], model: Path, name: str, role: KVConnectorRole
) -> None:
    without(name)
    said = rf"blend: vLLM {vllm.__version__}.* has no {name} .*tested with vLLM 0\.32, 0\.33"
    with pytest.raises(ConfigError, match=said):
        connector_of(with_blend(vllm_config(model)), role)
    assert connector_of(vllm_config(model), role)


@pytest.mark.parametrize("name", [n for n, row in compat.NAMES.items() if "events" in row.features])
def test_events_are_left_out(
    without: Callable[..., None], model: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    assert connector_of(vllm_config(model, kv_events_config=events))._scheduler_side.events is not None
    without(name)
    assert connector_of(vllm_config(model, kv_events_config=events))._scheduler_side.events is None
    assert f"has no {name} " in caplog.text
    assert "vLLM's KV events do not report kvkit's tiers" in caplog.text


def test_adapters_are_not_cached(
    without: Callable[..., None], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config(model, enable_lora=True)
    found = connector_of(config, KVConnectorRole.WORKER)._loras
    assert found is not None
    found.close()
    without("WorkerLoRAManager")
    assert connector_of(config, KVConnectorRole.WORKER)._loras is None
    assert "so requests with LoRA adapters are not cached" in caplog.text
    assert Loras.watched("float32") is None


@pytest.mark.parametrize("name", ["_get_attn_isa", "envs"])
def test_what_cannot_be_told_apart_is_one_engine_s_alone(
    without: Callable[..., None], model: Path, name: str
) -> None:
    config = vllm_config(model)
    if name == "envs":  # known by the hub's name
        name_commit(config, "0" * 40)
    assert namespace_of(config, layout=opaque(BLOCK)) == namespace_of(config, layout=opaque(BLOCK))
    without(name)
    assert namespace_of(config, layout=opaque(BLOCK)) != namespace_of(config, layout=opaque(BLOCK))


def test_a_draft_that_is_not_known_is_one_engine_s_alone(model: Path) -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace())
    assert draft_identity(config).startswith("unknown-")
    assert draft_identity(config) != draft_identity(config)
    assert compat.draft_reads_ahead(config.speculative_config)


def test_weights_that_cannot_be_watched_are_said_so(
    without: Callable[..., None], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without("EngineCore", "Worker")
    for role in KVConnectorRole:
        caplog.clear()
        assert connector_of(vllm_config(model), role)
        assert "weights that change while an engine runs are not noticed" in caplog.text
