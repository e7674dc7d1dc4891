"""Ranks of every tensor-parallel size share one store, over real pages."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zarr

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm_rank import BLOCK, CHUNK, HEADS, IDS, MODEL, OTHER, TABLE, Ranks

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence
from kvkit.adapters.vllm.pages import RankHeads, group_pages, rank_heads
from kvkit.adapters.vllm.step import LoadTask, StepMetadata
from kvkit.format.names import coordinates
from kvkit.settings import ConfigError
from kvkit.transfer.sequence import Chunks

SIZES = (1, 2, 4)
"""Ranks; of four, two have the same head."""


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("writer", SIZES)
def test_every_size_reads_what_any_wrote(writer: int, opaque: bool, tmp_path: Path) -> None:
    with closing(Ranks(tmp_path, writer, opaque)) as ranks:
        ranks.save()
    files = sorted(tmp_path.rglob("c.*"))
    assert len(files) == len(set(files)) == 2 * HEADS * len(IDS) // CHUNK, "each head of each chunk once"
    assert sum(rank.stored("disk") for rank in ranks.each) == len(files), "by one rank"
    for size in SIZES:
        with closing(Ranks(tmp_path, size, opaque)) as ranks:
            assert ranks.found() == {len(IDS)}
            ranks.load()
            ranks.save()
    assert sorted(tmp_path.rglob("c.*")) == files, "all have the same names for them"


def test_a_zarr_reader_sees_all_heads(tmp_path: Path) -> None:
    with closing(Ranks(tmp_path, 2, opaque=False)) as ranks:
        ranks.save()
        cache = ranks.each[1].worker.cache
        chunks = Chunks.of(IDS, cache.layout, cache.namespace)
    for group, form in enumerate(chunks.formats):
        names = f"layers.{2 * group}", f"layers.{2 * group + 1}"
        assert form.array.endswith(f"/{group}")
        array = zarr.open_array(tmp_path / form.array, mode="r")
        for i, key in enumerate(chunks.keys):
            blocks = TABLE[i * CHUNK // BLOCK : (i + 1) * CHUNK // BLOCK]
            model = [MODEL[name][blocks].transpose(0, 1).flatten(1, 2) for name in names]
            assert np.array_equal(array[coordinates(key)], torch.stack(model).numpy())


def test_layers_are_loaded_one_by_one_over_their_heads(tmp_path: Path) -> None:
    with closing(Ranks(tmp_path, 2, opaque=False)) as ranks:
        ranks.save()
    with closing(Ranks(tmp_path, 1, opaque=False, load="layerwise")) as ranks:
        (rank,) = ranks.each
        rank.fill(-1.0)
        rank.step(lookups=[LookupRequest("a", 2, Sequence(IDS))], idle=True)
        rank.heard()
        rank.worker.begin_step(step := StepMetadata(9, loads=[LoadTask("a", 2, 0, len(IDS), (OTHER,))]))
        rank.worker.start_loads(step)
        for name, pages in rank.pages.items():
            rank.worker.wait_for_layer(name)
            assert torch.equal(pages[OTHER], MODEL[name][TABLE])
        rank.worker.start_saves(step)


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_part_of_records_that_hold_more(size: int, opaque: bool, tmp_path: Path) -> None:
    """Records of all heads, as an engine of one rank makes them, for ranks that have one each."""
    with closing(Ranks(tmp_path, 1, opaque, records=1)) as ranks:
        ranks.save()
    files = sorted(tmp_path.rglob("c.*"))
    assert len(files) == 2 * len(IDS) // CHUNK, "both heads of each chunk in one"
    with closing(Ranks(tmp_path, size, opaque, records=1)) as ranks:
        for number, rank in enumerate(ranks.each):
            layout = rank.worker.cache.layout
            assert (layout.copy, layout.copies) == (number, size), "they share reading"
        assert ranks.found() == {len(IDS)}
        ranks.load()


def test_records_of_other_sizes_are_not_found(tmp_path: Path) -> None:
    """Whose records hold other heads is a stranger, and finds nothing rather than something else."""
    with closing(Ranks(tmp_path, 1, opaque=True, records=1)) as ranks:
        ranks.save()
    with closing(Ranks(tmp_path, 1, opaque=True, records=2)) as ranks:
        assert ranks.found() == {0}


SPEC = FullAttentionSpec(block_size=8, num_kv_heads=4, head_size=8, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=24, dtype=torch.float32)


def engine(ranks: int, heads: int = 8, stages: int = 1) -> Any:
    parallel = SimpleNamespace(rank=1, world_size=ranks * stages, tensor_parallel_size=ranks)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


def pages_of(heads: int, channels: int = 16) -> torch.Tensor:
    return torch.zeros(2, heads, 8, channels)


def test_latents_and_heads_that_several_ranks_have_are_one() -> None:
    specs = [{"a": LATENT, "b": replace(SPEC, num_kv_heads=1)}]
    tensors = {"a": pages_of(1, 24), "b": pages_of(1)}
    for ranks, place in ((8, 1), (16, 0)):
        heads = rank_heads(engine(ranks), specs, None)
        layout, _ = group_pages(specs, tensors, 2, False, heads)
        shards = [(g.head_shard, g.head_shards, g.kv_heads) for g in layout.groups]
        assert shards == [(0, 1, 1), (place, 8, 1)]


def test_who_shares_the_work() -> None:
    def copies(rank: int, ranks: int, per_host: int, specs: list[Any]) -> tuple[int, int]:
        return RankHeads(8, rank, ranks, ranks, per_host).record_copies(specs)

    assert copies(5, 8, 8, [LATENT]) == (5, 8)
    assert copies(5, 16, 16, [SPEC]) == (1, 2)
    assert copies(13, 32, 32, [LATENT, SPEC]) == (1, 4), "as far as all layers are equal"
    assert copies(5, 8, 4, [LATENT]) == (1, 4), "on one host"
    assert copies(5, 8, 1, [LATENT]) == (0, 1), "it is not known who is on which"
    assert copies(5, 8, 8, [SPEC]) == (0, 1)


@pytest.mark.parametrize(
    ("told", "held", "setting", "error"),
    [
        (engine(2, stages=2), 4, 4, "record_ranks = 4: it is a pipeline; want none"),
        (
            engine(2),
            2,
            4,
            "record_ranks = 4: layer a has another number of KV heads than the model; want none",
        ),
        (
            engine(2),
            4,
            3,
            r"record_ranks = 3: .* 2 ranks have 4 KV heads each of the model's 8; want one of 1, 2, 4, 8",
        ),
        (engine(3, heads=12), 4, 2, "record_ranks = 2: .*; want one of 1, 3, 6, 12"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(told: Any, held: int, setting: int, error: str) -> None:
    specs = [{"a": replace(SPEC, num_kv_heads=held)}]
    with pytest.raises(ConfigError, match=error):
        group_pages(specs, {"a": pages_of(held)}, 2, False, rank_heads(told, specs, setting))
    if "want none" in error:
        assert rank_heads(told, specs, None) is None, "each rank's are its own"
