"""vLLM's KV caches become kvkit's layer groups in the layouts of all its backends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm_names import project_groups

from kvkit.adapters.vllm.pages import (
    check_chunks,
    complete_tokens,
    group_pages,
    has_windows,
    layer_specs,
    table_specs,
    window_of,
)
from kvkit.kernels.pages.api import pack, unpack
from kvkit.settings import ConfigError

BLOCKS, CHUNK = 6, 64
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
SLIDING = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=48
)
NARROW = replace(SLIDING, sliding_window=16)
LOCAL = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, attention_chunk_size=64
)
LONGER = replace(LOCAL, attention_chunk_size=128)
FORMS = (("LBHNC", None), ("LBNHC", None), ("BLHNC", None), ("LBHNC", 8))
"""Layouts, and tokens of the kernel's blocks where they are smaller than vLLM's."""
MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)


def views(
    spec: KVCacheSpec, names: list[str], layout: str, kernel: int | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that vLLM makes of one allocation for some layers, with every element different."""
    page, layers = spec.page_size_bytes, len(names)
    by_layer = layout.startswith("L") and layout[1] == "B"
    tensor = KVCacheTensor(
        size=page * layers * BLOCKS,
        layers=names,
        layer_stride=page * BLOCKS if by_layer else page,
        block_stride=page if by_layer else page * layers,
    )
    raw = torch.randint(-128, 127, (tensor.size,), dtype=torch.int8, generator=torch.manual_seed(0))
    made = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[layout], tensor, kernel)
    return dict(zip(names, made, strict=True))


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, vLLM's blocks first."""
    return tensor.contiguous().view(torch.uint8).unflatten(0, (BLOCKS, -1))


def config(*groups: tuple[KVCacheSpec, list[str]]) -> Any:
    made = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
    return SimpleNamespace(kv_cache_groups=made)


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize(
    ("layout", "kernel"), [("LBHNC", None), ("LBNHC", None), ("BLHNC", None), ("LBHNC", 8)]
)
@pytest.mark.parametrize("spec", [FULL, MLA], ids=["gqa", "mla"])
def test_what_is_packed_is_unpacked_into_the_same_blocks(
    spec: KVCacheSpec, layout: str, kernel: int | None, opaque: bool
) -> None:
    names = [f"model.layers.{i}.attn" for i in (0, 1, 2)]
    specs = layer_specs(config((spec, names[::-1])), cpu=False)
    tensors = views(spec, names, layout, kernel)
    found, (group,) = group_pages(specs, tensors, BLOCKS, opaque)
    assert group.names == tuple(names)
    assert found.layers == 3
    assert found.groups[0].opaque == opaque
    assert found.groups[0].v_size == (0 if spec is MLA or opaque else 8)
    assert found.chunk_bytes(CHUNK) == 3 * spec.page_size_bytes * CHUNK // 32
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    record = np.zeros(found.chunk_bytes(CHUNK), np.uint8)
    form = SimpleNamespace(namespace=SimpleNamespace(chunk_tokens=CHUNK), group=found.groups[0])
    pack(group.pages, [record], **group.sequence_pages([4, 1], CHUNK).rows_of(form, range(1)))
    for tensor in tensors.values():
        tensor.fill_(7)
    blank = {name: tensor.clone() for name, tensor in tensors.items()}
    unpack(group.pages, [record], **group.sequence_pages([2, -1], CHUNK).rows_of(form, range(1)))
    for name, tensor in tensors.items():
        whole, was, empty = (blocks_of(t) for t in (tensor, before[name], blank[name]))
        assert torch.equal(whole[2], was[4])
        others = [b for b in range(BLOCKS) if b != 2]
        assert torch.equal(whole[others], empty[others])


def test_records_do_not_depend_on_the_layout() -> None:
    names = [f"model.layers.{i}.attn" for i in (0, 1)]
    specs = layer_specs(config((FULL, names)), cpu=False)
    records = []
    for layout, kernel in FORMS:
        tensors = views(FULL, names, layout, kernel)
        for i, name in enumerate(names):  # the same values everywhere, by their place in [B, tokens, H, C]
            by_token = tensors[name].unflatten(0, (BLOCKS, -1)).permute(0, 1, 3, 2, 4)
            by_token.copy_(torch.arange(by_token.numel()).view(BLOCKS, 32, 2, 16).view(by_token.shape) + i)
        found, (group,) = group_pages(specs, tensors, BLOCKS, False)
        form = SimpleNamespace(namespace=SimpleNamespace(chunk_tokens=CHUNK), group=found.groups[0])
        record = np.zeros(found.chunk_bytes(CHUNK), np.uint8)
        pack(group.pages, [record], **group.sequence_pages([4, 1], CHUNK).rows_of(form, range(1)))
        records.append((found.fingerprint(), record.tobytes()))
    assert len(set(records)) == 1


def test_groups_with_tables_of_their_own_stay_apart() -> None:
    full, sliding = ["layers.2", "layers.10"], ["layers.1", "layers.3"]
    specs = layer_specs(config((FULL, full), (SLIDING, sliding)), cpu=False)
    tensors = views(FULL, full, "LBHNC") | views(SLIDING, sliding, "LBHNC")
    found, pages = group_pages(specs, tensors, BLOCKS, False)
    assert [(g.layers, g.window) for g in found.groups] == [((0, 2), 48), ((1, 3), None)]
    assert [(g.table, g.names) for g in pages] == [
        (1, ("layers.1", "layers.3")),
        (0, ("layers.2", "layers.10")),
    ]
    assert has_windows([FULL, SLIDING])
    assert not has_windows([FULL])


def test_a_stage_of_a_pipeline_may_lack_all_layers_of_a_group() -> None:
    """What its config says of that group stands for those of other stages."""
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate((FULL, SLIDING))]
    made = SimpleNamespace(kv_cache_groups=project_groups(groups, {"layers.0": FULL}))
    specs, tables = layer_specs(made, cpu=False), table_specs(made)
    assert specs == [{"layers.0": FULL}, {}]
    assert tables == [FULL, SLIDING]
    assert check_chunks(CHUNK, tables) == (32, 32)
    found, pages = group_pages(specs, views(FULL, ["layers.0"], "LBHNC"), BLOCKS, False)
    assert [(group.table, group.names) for group in pages] == [(0, ("layers.0",))]
    assert found.layers == 1


def test_what_cannot_be_restored_is_named() -> None:
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"layer layers\.1\.cross: .* CrossAttentionSpec.*FullA"):
        layer_specs(config((FULL, ["layers.0"]), (cross, ["layers.1.cross"])), cpu=False)
    with pytest.raises(ConfigError, match=r"layer layers\.0: .*MLAAttentionSpec.* first token"):
        layer_specs(config((MLA, ["layers.0"])), cpu=True)


def test_what_is_blended_has_no_records_with_gaps() -> None:
    assert window_of(FULL, CHUNK) is None
    assert window_of(SLIDING, 32) == 48
    with pytest.raises(ConfigError, match="chunk_tokens = 48: want less than 48 with blend"):
        window_of(SLIDING, 48)
    with pytest.raises(ConfigError, match="blend: chunks of local attention"):
        window_of(LOCAL, CHUNK)


def test_a_chunk_is_a_multiple_of_every_block() -> None:
    wide = FullAttentionSpec(block_size=48, num_kv_heads=2, head_size=8, dtype=torch.float32)
    tables = table_specs(config((FULL, ["a"]), (wide, ["b"])))
    assert check_chunks(192, tables) == (32, 48)
    with pytest.raises(ConfigError, match=r"chunk_tokens = 256: .* 32, 48 tokens; .* of 96, such as 288"):
        check_chunks(256, tables)
    with pytest.raises(ConfigError, match="such as 96"):
        check_chunks(8, tables)


@pytest.mark.parametrize(
    ("spec", "gone", "complete"),
    [
        (FULL, [], 128),
        (FULL, [0], 0),
        (FULL, [2], 64),
        (FULL, [3], 64),
        (SLIDING, [], 128),
        (SLIDING, [0], 0),  # the first chunk's last 47 tokens begin in it
        (NARROW, [0], 128),
        (NARROW, [1], 0),
        (NARROW, [0, 2], 128),
        (NARROW, [0, 3], 64),
        (LOCAL, [0, 1], 128),  # a part ends with each chunk
        (LONGER, [0, 1], 0),  # and here with the second alone
        (LONGER, [2, 3], 128),
    ],
)
def test_a_chunk_is_complete_if_all_that_is_attended_to_behind_it_is_there(
    spec: KVCacheSpec, gone: list[int], complete: int
) -> None:
    names = ["layers.0"]
    _, groups = group_pages([{names[0]: spec}], views(spec, names, "LBHNC"), BLOCKS, False)
    table = [-1 if i in gone else i + 1 for i in range(4)]
    assert complete_tokens(groups, [table], CHUNK, 256, 384) == complete


@pytest.mark.parametrize(
    ("blocks", "stop", "complete"), [(3, 384, 64), (3, 321, 65), (2, 321, 64), (0, 384, 0)]
)
def test_a_table_that_is_short_lacks_blocks(blocks: int, stop: int, complete: int) -> None:
    names = ["layers.0"]
    _, groups = group_pages([{names[0]: FULL}], views(FULL, names, "LBHNC"), BLOCKS, False)
    assert complete_tokens(groups, [[1, 2, 3, 4][:blocks]], CHUNK, 256, stop) == complete
