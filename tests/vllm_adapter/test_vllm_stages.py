"""Pipeline stages of every partition share one store, over real pages."""

from __future__ import annotations

from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zarr

pytest.importorskip("vllm")

from vllm_rank import BLOCK, BLOCKS, CHUNK, IDS, SPECS, TABLE, Rank

from kvkit.adapters.vllm.blending.page_order import PageOrder
from kvkit.adapters.vllm.pages import RankHeads, StageLayers, group_pages, rank_heads, stage_layers
from kvkit.adapters.vllm.step import LoadTask
from kvkit.format.layout import KVLayout, Precision
from kvkit.format.names import coordinates
from kvkit.kernels.pages import reference
from kvkit.settings import ConfigError
from kvkit.transfer.sequence import Chunks

HEADS, LAYERS = 2, 6
NAMES = [f"layers.{i}" for i in range(LAYERS)]
KINDS = dict(zip(NAMES, SPECS * (LAYERS // 2), strict=True))
"""Each kind of layer is every other one."""
ENGINES = [(1, (6,)), (1, (4, 2)), (2, (2, 2, 2)), (2, (2, 4))]
"""Ranks of each stage, and the stages' layers."""
OTHER = [7, 8, 9, 10, 11, 6]
MODEL = {
    name: torch.rand(BLOCKS, HEADS, BLOCK, 2 * spec.head_size, generator=torch.manual_seed(i))
    for i, (name, spec) in enumerate(KINDS.items())
}


def stages_of(partition: tuple[int, ...]) -> list[list[dict[str, object]]]:
    """What each stage has, in the one block table."""
    return [[{n: KINDS[n] for n in NAMES[a:b]}] for a, b in pairwise(accumulate(partition, initial=0))]


def order(name: str, heads: int) -> PageOrder:
    """Of pages as CPUs have them: a head's K and V are neighbours, in an order of their own."""
    size = KINDS[name].head_size
    of_head = torch.randperm(BLOCK * 2 * size, generator=torch.manual_seed(size)).view(BLOCK, 2 * size)
    each = torch.stack([of_head + head * of_head.numel() for head in range(heads)])
    return PageOrder(each[..., :size], each[..., size:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("constant", [True, False])
def test_a_copy_of_opaque_pages(dtype: torch.dtype, constant: bool) -> None:
    """Of pages in any order, one of them twice, with strides between tokens and channels or without."""
    heads, size = 2, 6
    numbers = torch.arange(heads * 2 * BLOCK * size)
    if constant:  # as without AMX: K is transposed
        k, v = numbers.view(heads, 2, -1).unbind(1)
        places = PageOrder(k.view(heads, size, BLOCK).mT, v.view(heads, BLOCK, size))
    else:
        k, v = numbers[torch.randperm(len(numbers), generator=torch.manual_seed(0))].chunk(2)
        places = PageOrder(k.view(heads, BLOCK, size), v.view(heads, BLOCK, size))
    memory = torch.rand(5, heads + 1, BLOCK, 2 * size, generator=torch.manual_seed(1)).to(dtype)
    pages, ids = memory[:, 1:], [3, 0, 3]  # other elements lie between pages
    for found, order in zip(places.read(pages, ids), (places.k, places.v), strict=True):
        assert found.is_contiguous()
        for i, page in enumerate(ids):
            for token in range(BLOCK):
                expected = pages[page].reshape(-1)[order[:, token]]
                assert torch.equal(found[:, i * BLOCK + token], expected)


def kept(name: str, precision: Precision | None) -> torch.Tensor:
    """The model's KV as it comes back from records."""
    if precision is None:
        return MODEL[name]
    places, size = order(name, HEADS).joined, KINDS[name].head_size
    found = MODEL[name].flatten(1).clone()
    rows = reference.quantise(found[:, places], size, precision)
    found[:, places] = reference.dequantise(rows, size, size, precision)
    return found.view_as(MODEL[name])


class Pipeline:
    """The workers of an engine whose records are of one head, and of one layer of each kind."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        partition: tuple[int, ...],
        opaque: bool,
        precision: Precision | None = None,
    ) -> None:
        stages = stages_of(partition)
        self._precision = precision
        self.each = [
            Rank(
                folder,
                "async",
                ranks=(ranks * number + rank, ranks * len(stages)),
                heads=RankHeads(HEADS, rank, ranks, 2),
                stages=StageLayers(stages, 3),
                specs=specs,
                opaque=opaque,
                precision=precision,
                orders=None if precision is None else {name: order(name, HEADS // ranks) for name in specs},
            )
            for number, (specs,) in enumerate(stages)
            for rank in range(ranks)
        ]
        self.shares = [
            slice(r * HEADS // ranks, (r + 1) * HEADS // ranks) for _ in stages for r in range(ranks)
        ]

    def save(self) -> None:
        for share, rank in zip(self.shares, self.each, strict=True):
            for name, pages in rank.pages.items():
                pages.copy_(MODEL[name][:, share])
            rank.save()

    def load(self) -> None:
        """Find and load all, and compare every page with the model's."""
        for share, rank in zip(self.shares, self.each, strict=True):
            rank.fill(-1.0)
            assert rank.found() == len(IDS)
            assert rank.load(LoadTask("a", 1, 0, len(IDS), (OTHER,)))
            for name, pages in rank.pages.items():
                expected = torch.full_like(pages, -1.0)
                expected[OTHER] = kept(name, self._precision)[TABLE][:, share]
                assert torch.equal(pages, expected)

    def close(self) -> None:
        for rank in self.each:
            rank.worker.close()


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("writer", ENGINES)
def test_every_pipeline_reads_what_any_wrote(
    writer: tuple[int, tuple[int, ...]], opaque: bool, tmp_path: Path
) -> None:
    with closing(Pipeline(tmp_path, *writer, opaque)) as pipeline:
        pipeline.save()
    files = sorted(tmp_path.rglob("c.*"))
    assert len(files) == LAYERS * HEADS * len(IDS) // CHUNK
    for ranks, partition in ENGINES:
        with closing(Pipeline(tmp_path, ranks, partition, opaque)) as pipeline:
            pipeline.load()
            pipeline.save()
    assert sorted(tmp_path.rglob("c.*")) == files, "all have the same names for them"


def test_every_pipeline_reads_the_fewer_bits_that_one_wrote(tmp_path: Path) -> None:
    """Of pages whose order is a CPU's, heads and layers divided."""
    for number, (ranks, partition) in enumerate(ENGINES):
        with closing(Pipeline(tmp_path, ranks, partition, True, "fp8")) as pipeline:
            if number == 0:
                pipeline.save()
            pipeline.load()
            pipeline.save()
    assert len([*tmp_path.rglob("c.*")]) == LAYERS * HEADS * len(IDS) // CHUNK


def test_a_zarr_reader_sees_all_layers_and_heads(tmp_path: Path) -> None:
    with closing(Pipeline(tmp_path, 2, (2, 4), opaque=False)) as pipeline:
        pipeline.save()
        cache = pipeline.each[-1].worker.cache
        chunks = Chunks.of(IDS, cache.layout, cache.namespace)
    for form in chunks.formats:
        array = zarr.open_array(tmp_path / form.array, mode="r")
        assert array.attrs["kvkit"]["layers"] == list(form.group.all_layers)
        for i, key in enumerate(chunks.keys):
            blocks = TABLE[i * CHUNK // BLOCK : (i + 1) * CHUNK // BLOCK]
            model = [MODEL[NAMES[n]][blocks].transpose(0, 1).flatten(1, 2) for n in form.group.all_layers]
            assert np.array_equal(array[coordinates(key)], torch.stack(model).numpy())


def layout_of(partition: tuple[int, ...], setting: int, stage: int = 0) -> KVLayout:
    stages = stages_of(partition)
    return group_pages(stages[stage], MODEL, BLOCKS, False, None, StageLayers(stages, setting))[0]


def test_layers_in_one_record_are_as_without_the_setting() -> None:
    plain, _ = group_pages(stages_of((6,))[0], MODEL, BLOCKS, False)
    assert layout_of((6,), 1) == plain
    assert layout_of((6,), 3).fingerprint() != plain.fingerprint()
    assert layout_of((6,), 3).layers == LAYERS
    assert layout_of((4, 2), 3, stage=1).layers == 2


@pytest.mark.parametrize(
    ("partition", "setting", "error"),
    [
        ((4, 2), 2, r"record_stages = 2: the stages have 2, 1 of the 3 layers like layers\.0; want one of 3"),
        ((6,), 2, r"record_stages = 2: the stages have 3 of the 3 layers like layers\.0; want one of 1, 3"),
        (
            (5, 1),
            3,
            r"record_stages = 3: layers like layers\.0 do not have the same spec in all stages; want none",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(partition: tuple[int, ...], setting: int, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        layout_of(partition, setting)


def test_a_pipeline_shares_where_it_is_told_to() -> None:
    parallel = SimpleNamespace(rank=3, world_size=4, tensor_parallel_size=2)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
    engine = SimpleNamespace(model_config=model, parallel_config=parallel)
    (specs,) = stages_of((6,))
    assert rank_heads(engine, specs, None) is None
    assert stage_layers(specs, None, stages=2) is None
    assert rank_heads(engine, specs, None, record_stages=3) == RankHeads(4, 1, 2, 2)
    assert stage_layers(specs, 3, stages=1) == StageLayers([specs], 3)
    model.get_total_num_kv_heads = lambda: 8
    with pytest.raises(
        ConfigError, match=r"record_stages = 3: layer layers\.0 has another number of KV heads"
    ):
        rank_heads(engine, specs, None, record_stages=3)
