"""KV is shared only if every byte that decides it is equal: weights, config, adapter, salt."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import save_file
from small_models import QWEN
from transformers import AutoModelForCausalLM
from vllm.config import KVTransferConfig, LoRAConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm_engine import BLOCK, connector

from kvkit.adapters.engine.weights import folder_fingerprint
from kvkit.adapters.vllm import identity
from kvkit.adapters.vllm.connector import KVKitConnector
from kvkit.adapters.vllm.identity import (
    adapter_fingerprint,
    draft_identity,
    model_identity,
)
from kvkit.adapters.vllm.settings import read_settings
from kvkit.format.layout import KVLayout, Namespace
from kvkit.transfer.sequence import Chunks

IDS = np.arange(8 * BLOCK, dtype=np.int32)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several files."""
    folder = tmp_path_factory.mktemp("original") / "model"
    AutoModelForCausalLM.from_config(QWEN).save_pretrained(folder, max_shard_size="1MB")
    (folder / "tower").mkdir()
    (folder / "tower" / "model.safetensors").write_bytes(b"x" * 3000)
    (folder / "modeling.py").write_text("# code that comes with a model\n")
    (folder / "README.md").write_text("# A model\n")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of it, of one's own."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def vllm_config(model: Path | str, chunk_tokens: int = BLOCK, **options: Any) -> VllmConfig:
    chosen = {"model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
    transfer = connector({"chunk_tokens": chunk_tokens, "tiers": {"memory": {"capacity": "1MiB"}}})
    return EngineArgs(
        **{"max_model_len": 1024} | chosen | options, kv_transfer_config=KVTransferConfig(**transfer)
    ).create_engine_config()


def name_commit(config: VllmConfig, commit: str | None) -> None:
    """Have it serve a model of the hub, which transformers found at this commit."""
    config.model_config.model = "org/name"
    config.model_config.hf_config._commit_hash = commit


def namespace_of(
    config: VllmConfig, block: int = BLOCK, heads: int = 2, layout: KVLayout | None = None
) -> Namespace:
    """The namespace that kvkit's connector stores under in an engine of this configuration."""
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)]
    )
    KVKitConnector(config, KVConnectorRole.WORKER, caches)  # refuses what it cannot serve
    _, own = read_settings(config.kv_transfer_config.kv_connector_extra_config)
    return identity.rank_namespace(config, own, layout or layout_of(block, heads), ranks_share=False)


def layout_of(block: int = BLOCK, heads: int = 2) -> KVLayout:
    return KVLayout.from_tensors([torch.zeros(4, heads, block, 64)])


def opaque(block: int) -> KVLayout:
    """As vLLM's pages are on a CPU."""
    return KVLayout.from_tensors([torch.zeros(4, 2, block, 64)], v_size=0, opaque=True)


def keys(space: Namespace, layout: KVLayout | None = None) -> set[bytes]:
    return set(Chunks.of(IDS, layout or layout_of(), space).keys)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ (1 << random.Random(at).randrange(8))]))


def test_any_byte_of_any_file_of_the_weights_counts(model: Path) -> None:
    config, seed = vllm_config(model), random.Random(7)
    expected = model_identity(config)
    for path in (p for p in model.rglob("*") if p.suffix in (".safetensors", ".py")):
        size = path.stat().st_size
        for at in {0, size // 2, size - 1, *(seed.randrange(size) for _ in range(8))}:
            flip(path, at)
            assert model_identity(config) != expected, f"byte {at} of {path.name}"
            flip(path, at)
    assert model_identity(config) == expected


def test_keys_of_changed_weights_meet_none_of_the_old(model: Path) -> None:
    before = namespace_of(vllm_config(model))
    path = sorted(model.glob("*.safetensors"))[1]
    flip(path, path.stat().st_size // 2)
    after = namespace_of(vllm_config(model))
    assert not keys(before) & keys(after)
    flip(path, path.stat().st_size // 2)
    assert namespace_of(vllm_config(model)) == before


def test_a_merged_adapter_in_a_single_large_file_counts(tmp_path: Path) -> None:
    """Its ends and its size stay: what differs lies in the middle."""
    size, layers = 2048, 2
    tensors = {"model.embed_tokens.weight": torch.zeros(64, size), "model.norm.weight": torch.ones(size)}
    for layer in range(layers):
        for name in "qkv":
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = torch.zeros(size, size)
    file = tmp_path / "model.safetensors"

    def write() -> tuple[int, bytes, bytes]:
        save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, file)
        held = file.read_bytes()
        return len(held), held[:4096], held[-4096:]

    ends, found = write(), folder_fingerprint(tmp_path)
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensor.addmm_(torch.randn(size, 4), torch.randn(4, size), alpha=0.1)
    assert write() == ends
    assert folder_fingerprint(tmp_path) != found


def rename(folder: Path) -> None:
    next(folder.glob("*.safetensors")).rename(folder / "other.safetensors")


def remove(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def exchange(folder: Path) -> None:
    one, two, *_ = sorted(folder.glob("*.safetensors"))
    one.rename(folder / "third")
    two.rename(one)
    (folder / "third").rename(two)


CHANGES: dict[str, Callable[[Path], object]] = {
    "renamed": rename,
    "removed": remove,
    "added": lambda folder: (folder / "more.safetensors").write_bytes(b""),
    "added below": lambda folder: (folder / "tower" / "more.bin").write_bytes(b""),
    "exchanged": exchange,
    "another index": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    "quantisation": lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
    "image processor": lambda folder: (folder / "preprocessor_config.json").write_text("{}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_files_there_are_counts(model: Path, change: str) -> None:
    before = folder_fingerprint(model)
    CHANGES[change](model)
    assert folder_fingerprint(model) != before


def test_a_folder_that_cannot_be_listed_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all such folders would be alike. Where vLLM may not look either there is nothing that it loads."""
    with pytest.raises(FileNotFoundError):
        folder_fingerprint(model / "nowhere")
    expected, scandir, broken = folder_fingerprint(model), os.scandir, {model / "lost+found": errno.EACCES}
    (model / "lost+found").mkdir()

    def list_or_fail(path: Any) -> Any:
        if Path(path) in broken:
            number = broken[Path(path)]
            raise OSError(number, os.strerror(number), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", list_or_fail)
    assert folder_fingerprint(model) == expected
    for place, number in ((model / "tower", errno.EIO), (model, errno.EACCES)):
        broken[place] = number
        with pytest.raises(OSError, match=str(place)):
            folder_fingerprint(model)


def test_in_which_order_a_folder_is_listed_does_not_count(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a link leads to a folder beside it: files count by the first way to them."""
    (model / "another-way").symlink_to(model / "tower")
    expected, walk = folder_fingerprint(model), os.walk

    def walk_backwards(*arguments: Any, **options: Any) -> Any:
        for place, folders, files in walk(*arguments, **options):
            folders.reverse()
            files.reverse()
            yield place, folders, files

    monkeypatch.setattr(os, "walk", walk_backwards)
    assert folder_fingerprint(model) == expected


def touch(folder: Path) -> Path:
    for path in folder.rglob("*"):
        os.utime(path, ns=(0, 0))
    return folder


def in_the_hubs_cache(folder: Path) -> Path:
    """Links to files that are named by their digests, as the hub's client arranges them."""
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "model"
    blobs.mkdir()
    for number, path in enumerate(p for p in sorted(folder.rglob("*")) if p.is_file()):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def hard_links(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.parent / "linked" / "model", copy_function=os.link))


def with_papers(folder: Path) -> Path:
    for name in ("LICENSE", ".gitattributes", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "model.safetensors").write_bytes(b"of a training run")
    (folder / "README.md").write_text("# The same model\n")
    (folder / "itself").symlink_to(folder)
    return folder


SAME: dict[str, Callable[[Path], Path]] = {
    "touched": touch,
    "moved": lambda folder: Path(shutil.move(folder, folder.parent / "elsewhere" / "model")),
    "copied": lambda folder: Path(shutil.copytree(folder, folder.parent / "copy" / "model")),
    "hard links": hard_links,
    "the hub's cache": in_the_hubs_cache,
    "papers": with_papers,
}


@pytest.mark.parametrize("change", SAME)
def test_where_files_are_and_when_they_were_written_does_not_count(model: Path, change: str) -> None:
    before = namespace_of(vllm_config(model))
    (model.parent / "elsewhere").mkdir()
    assert namespace_of(vllm_config(SAME[change](model))) == before


def test_what_vllm_is_told_counts(model: Path) -> None:
    """Of the config, the options of vLLM and kvkit, the rank, the layout."""
    config = vllm_config(model)
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    two = vllm_config(model)
    two.parallel_config.world_size = 2
    second = vllm_config(model)
    second.parallel_config.world_size, second.parallel_config.rank = 2, 1
    heads = layout_of(heads=1)
    spaces = [
        namespace_of(config),
        namespace_of(vllm_config(model, hf_overrides=rope)),
        namespace_of(vllm_config(model, hf_overrides={"sliding_window": 64, "use_sliding_window": True})),
        namespace_of(vllm_config(model, hf_overrides={"rms_norm_eps": 1e-3})),
        namespace_of(vllm_config(model, hf_overrides={"architectures": ["Qwen2ForCausalLM", "Other"]})),
        namespace_of(vllm_config(model, dtype="bfloat16")),
        namespace_of(vllm_config(model, load_format="safetensors")),
        namespace_of(vllm_config(model, load_format="dummy")),
        namespace_of(vllm_config(model, load_format="dummy", seed=1)),
        namespace_of(vllm_config(model, kv_cache_dtype="fp8")),
        namespace_of(vllm_config(model, chunk_tokens=2 * BLOCK)),
        namespace_of(two),
        namespace_of(second),
        namespace_of(config, heads=1, layout=heads),
        namespace_of(config, layout=opaque(BLOCK)),
        namespace_of(config, block=64, layout=opaque(64)),
        replace(namespace_of(config), salt="tenant"),
        replace(namespace_of(config), lora="adapter"),
    ]
    same = [(i, j) for i, one in enumerate(spaces) for j, two in enumerate(spaces) if i < j and one == two]
    assert not same
    assert namespace_of(vllm_config(model)) == spaces[0]
    assert namespace_of(config, block=64, layout=layout_of(block=64)) == spaces[0], "records have no blocks"


def test_what_decides_no_kv_does_not_count(model: Path) -> None:
    """Nor do fields of vLLM's configs that are off: an engine without them shares with older ones."""
    config = vllm_config(model)
    expected = model_identity(config)
    for kind in identity.CONFIGS:
        assert not identity.set_fields(getattr(config, kind, None), kind), kind
    for more in ({"gpu_memory_utilization": 0.5}, {"max_num_seqs": 3}, {"served_model_name": "other"}):
        assert model_identity(vllm_config(model, **more)) == expected, more
    assert model_identity(vllm_config(model, load_format="auto", download_dir="/tmp")) == expected
    config.cache_config.mamba_ssm_cache_dtype = "float32"  # as vLLM has it on a CPU with AVX512-BF16
    assert model_identity(config) == expected, "states' dtypes are in their layout"


@pytest.mark.parametrize("kind", identity.CONFIGS)
def test_a_field_that_vllm_adds_counts_once_it_is_set(model: Path, kind: str) -> None:
    """Whoever knows that it decides no KV adds it to the list of those."""
    config = getattr(vllm_config(model), kind)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    later = make_dataclass("Later", [*values, "new"])
    assert not identity.set_fields(later(**values, new=None), kind)
    assert identity.set_fields(later(**values, new="different"), kind) == {"new": "different"}


def test_a_set_field_of_a_config_counts(model: Path) -> None:
    config = vllm_config(model)
    before = model_identity(config)
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    assert model_identity(config) != before


@pytest.mark.parametrize(
    "different",
    [
        {"target_modules": ["o_proj"]},
        {"target_modules": ["q_proj", "o_proj"]},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
        {"enable_mixed_moe_lora_format": True},
    ],
)
def test_what_vllm_does_with_adapters_counts(different: dict[str, Any]) -> None:
    def told(**options: Any) -> str:
        return identity.lora_settings(LoRAConfig(lora_dtype=torch.float32, **options))

    assert told() == told(max_loras=8, max_lora_rank=64) == "float32", "as adapters were known before"
    assert told(**different) != "float32"
    turned = {name: value[::-1] if isinstance(value, list) else value for name, value in different.items()}
    assert told(**different) == told(**turned), "an order means nothing"


def test_values_of_a_config_count(model: Path) -> None:
    path, found = model / "config.json", set()
    told = json.loads(path.read_text())
    changed = [
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 4096},
    ]
    for change in changed:
        path.write_text(json.dumps(told | change))
        found.add(namespace_of(vllm_config(model)).to_bytes())
    assert len(found) == len(changed)
    path.write_text(json.dumps(told | {"transformers_version": "0", "_name_or_path": "there"}))
    assert namespace_of(vllm_config(model)).to_bytes() in found


def test_weights_that_nobody_can_tell_are_one_engines_alone(model: Path, tmp_path: Path) -> None:
    """A branch of the hub moves, and a loader of its own may take weights from anywhere."""
    hub, elsewhere = vllm_config(model), vllm_config(model, load_format="runai_streamer")
    hub.model_config.model, hub.model_config.revision = "org/name", "main"
    hub.load_config.download_dir = str(tmp_path)
    elsewhere.load_config.load_format = "ipc_cache"
    streamed = vllm_config(model)
    streamed.model_config.model_weights = "s3://bucket/model"
    for config in (hub, elsewhere, streamed):
        assert model_identity(config)[1] != model_identity(config)[1]


def test_a_model_of_another_hub_is_not_the_one_of_that_name_in_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(model)
    config.model_config.model, config.load_config.download_dir = "org/name", str(tmp_path)
    kept = tmp_path / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("a" * 40)
    (kept / "snapshots" / ("a" * 40)).mkdir(parents=True)
    assert model_identity(config) == model_identity(config)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert model_identity(config) != model_identity(config)


def test_a_model_of_the_hub_is_its_commit(model: Path, tmp_path: Path) -> None:
    config = vllm_config(model)
    config.load_config.download_dir = str(tmp_path)
    found = []
    for commit in ("a" * 40, "b" * 40):
        name_commit(config, commit)
        found.append(model_identity(config))
        assert model_identity(config) == found[-1]
    name_commit(config, None)
    config.model_config.revision = "b" * 40
    assert model_identity(config) == found[-1]
    config.model_config.revision = None
    kept = tmp_path / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("a" * 40)
    (kept / "snapshots" / ("a" * 40)).mkdir(parents=True)
    assert model_identity(config) == found[0]
    assert [name for name, _ in found] == ["org/name", "org/name"]


def test_a_model_in_parts_is_all_of_them(model: Path) -> None:
    parts = [model / f"weights-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF" * 1000)
    (model / "weights-other.gguf").write_bytes(b"GGUF")
    config = vllm_config(model)
    config.model_config.model = str(parts[0])
    before = model_identity(config)
    (model / "weights-other.gguf").write_bytes(b"GGUG")
    assert model_identity(config) == before
    flip(parts[1], 2000)
    assert model_identity(config) != before


def test_a_draft_model_counts_by_its_weights(model: Path, tmp_path: Path) -> None:
    """Its KV lies beside the model's."""
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    config = vllm_config(model)
    alone = draft_identity(config)
    config.speculative_config = SpeculativeConfig(
        method="draft_model",
        model=str(draft),
        num_speculative_tokens=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    before = draft_identity(config)
    path = next(draft.glob("*.safetensors"))
    flip(path, path.stat().st_size // 2)
    assert len({alone, before, draft_identity(config)}) == 3
    assert before.startswith("draft_model draft ")
    config.speculative_config.draft_load_config = SimpleNamespace(load_format="ipc_cache")
    assert draft_identity(config) != draft_identity(config), "weights of which nobody knows what they are"
    config.speculative_config.method = "medusa"
    assert (alone, draft_identity(config)) == ("", ""), "it has no KV"


def test_a_longer_prompt_counts_where_it_decides_the_rotation(model: Path) -> None:
    longrope = {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 512,
        }
    }
    found = [
        [model_identity(vllm_config(model, max_model_len=n, hf_overrides=o)) for n in (256, 1024)]
        for o in ({}, longrope)
    ]
    assert found[0][0] == found[0][1]
    assert found[1][0] != found[1][1]


def adapter(folder: Path, scale: float = 1.0, rank: int = 4) -> Path:
    folder.mkdir(parents=True)
    save_file({"q_proj.lora_A.weight": torch.full((rank, 128), scale)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 8}))
    return folder


def test_any_byte_of_an_adapter_counts_and_not_where_it_is(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "here")
    before, seed = adapter_fingerprint(folder), random.Random(3)
    assert adapter_fingerprint(adapter(tmp_path / "there" / "other")) == before
    for path in folder.iterdir():
        for at in {0, path.stat().st_size - 1, *(seed.randrange(path.stat().st_size) for _ in range(20))}:
            flip(path, at)
            assert adapter_fingerprint(folder) != before, f"byte {at} of {path.name}"
            flip(path, at)
    (folder / "README.md").write_text("# An adapter")
    assert adapter_fingerprint(folder) == before
    with pytest.raises(FileNotFoundError, match="holds no LoRA adapter"):
        adapter_fingerprint(tmp_path)
