"""Triton attention kernels equal the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import DTYPES, ROPES, TOLERANCES, Problem, oracle

from kvkit.format.rope import Rope
from kvkit.kernels.attention import reference, schedule, triton
from kvkit.kernels.attention.layer import RowRotations
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.gpus import GPUS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, in the interpreter
POISON = 0xA5


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor within memory that is 0xA5 in every byte, with 64 elements before and after it."""
    count = math.prod(shape)
    memory = torch.full(((count + 128) * dtype.itemsize,), POISON, dtype=torch.uint8, device=DEVICE)
    return memory.view(dtype)[64 : 64 + count].view(shape)


def check_surroundings(tensor: torch.Tensor) -> None:
    """What `poisoned` put around the tensor is still there."""
    start = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(tensor.untyped_storage())
    assert (memory[:start] == POISON).all()
    assert (memory[start + tensor.numel() * tensor.element_size() :] == POISON).all()


def run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch.run()


def tiles(rows: int, keys: int) -> KernelConfig:
    return KernelConfig((("TILE_ROWS", rows), ("TILE_KEYS", keys)), 4, 2)


def attend(
    problem: Problem, config: KernelConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, tuple[Launch, ...]]:
    """o, lse and the launches; everything around the outputs is untouched."""
    q, k, v = (x.to(DEVICE) for x in problem.tensors())
    rows = problem.plan(DEVICE)
    out = poisoned(*q.shape[:2], problem.v_size, dtype=problem.dtype)
    lse = poisoned(*q.shape[:2])
    launches = triton.attention(q, k, v, rows, problem.scoring, out, lse, config)
    run(launches)
    check_surroundings(out)
    check_surroundings(lse)
    return out.cpu(), lse.cpu(), launches


def check(problem: Problem, config: KernelConfig | None = None) -> tuple[Launch, ...]:
    o, lse, launches = attend(problem, config)
    q, k, v = problem.tensors()
    wanted, wanted_lse = oracle(problem, q, k, v, problem.plan())
    tolerance = TOLERANCES[problem.dtype]
    torch.testing.assert_close(o.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-4)
    return launches


SMALL = Problem(
    rows=(((0, 3, 4, 17, 30, 31, 38), 40), ((20,), 21), ((), 4), ((-1, 2, 9), 5)), heads=2, group=3
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [4, 16, 32, 50])
def test_pages(tokens: int, dtype: torch.dtype) -> None:
    """Blocks smaller than a tile of keys, as large, larger, and one that holds a whole request."""
    check(replace(SMALL, tokens=tokens, dtype=dtype), tiles(16, 16))


@pytest.mark.parametrize("split", [False, True])
def test_a_nan_in_k_is_seen_by_rows_that_see_its_key(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by no others, in the kernel as in the reference: neither hides it, nor does the merge of parts."""
    monkeypatch.setattr(schedule, "MERGE_S", 0 if split else 1)
    problem = Problem(rows=(((3, 29, 30, 250, 299), 300), ((2, 9), 12)), heads=2, group=2, tokens=16)
    q, k, v = problem.tensors()
    rows = problem.plan()
    k[rows.tables[0, 1], :, 14] = torch.nan  # key 30 of the first request
    wanted, wanted_lse = oracle(problem, q, k, v, rows)
    out, lse = poisoned(*wanted.shape, dtype=problem.dtype), poisoned(*q.shape[:2])
    given = [x.to(DEVICE) for x in (q, k, v)]
    launches = triton.attention(*given, problem.plan(DEVICE), problem.scoring, out, lse, tiles(16, 16))
    assert len(launches) == 1 + split
    run(launches)
    tolerance = TOLERANCES[problem.dtype]
    torch.testing.assert_close(out.cpu().double(), wanted, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert lse.isnan().all(1).tolist() == [False, False, True, True, True, False, False]


@pytest.mark.parametrize(
    "change",
    [
        {"window": 7},
        {"window": 1, "tokens": 16},
        {"window": 100},
        {"softcap": 2.0},
        {"softcap": 2.0, "window": 9, "tokens": 3},
        {"group": 1, "heads": 3},
        {"group": 8, "heads": 1},
        {"size": 40, "v_size": 40},
        {"size": 64, "v_size": 24},
        {"size": 80, "v_size": 128},
        {"size": 8, "v_size": 8},
        {"tokens_outermost": True, "tokens": 16},
        {"in_order": True},
    ],
    ids=str,
)
def test_forms(change: dict[str, Any]) -> None:
    check(replace(SMALL, **change), tiles(32, 16))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("keys", [16, 32])
def test_split_tiles(keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a tile, merged: so few rows are always split if it costs nothing."""
    monkeypatch.setattr(schedule, "MERGE_S", 0)
    positions = (1, 30, 31, 200, 255, 256, 299)
    problem = Problem(rows=((positions, 300), ((5,), 9)), heads=1, group=2, tokens=16, window=window)
    first, *others = check(problem, tiles(16, keys))
    assert first.arguments["SPLIT"]
    assert [launch.kernel.__name__ for launch in others] == ["merge"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_configuration(dtype: torch.dtype) -> None:
    problem = Problem(rows=((tuple(range(40)), 40),), heads=1, group=4, size=16, tokens=16, dtype=dtype)
    check(problem)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    rows = []
    for _ in range(data.draw(st.integers(1, 2))):
        length = data.draw(st.integers(0, 50))
        rows.append((tuple(sorted(data.draw(st.lists(st.integers(-1, length + 2), max_size=12)))), length))
    problem = Problem(
        rows=tuple(rows),
        heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.integers(1, 5)),
        tokens=data.draw(st.sampled_from([1, 5, 16, 64])),
        window=data.draw(st.none() | st.integers(1, 60)),
        softcap=data.draw(st.none() | st.just(3.0)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        seed=data.draw(st.integers(0, 99)),
    )
    if problem.plan().count:
        check(problem, tiles(16, data.draw(st.sampled_from([16, 32]))))


@pytest.mark.parametrize("keys", [40, 500])
def test_layers_share_what_was_planned_and_nothing_else(keys: int) -> None:
    """The second layer, of equal form, is right; whole tiles and split ones; the first's tensors are free."""
    problem = replace(SMALL, rows=(((0, 3, keys - 2), keys),))
    rows, config = problem.plan(DEVICE), tiles(16, 16)
    of_first = []
    for seed in (0, 1):
        q, k, v = (x.to(DEVICE) + seed for x in problem.tensors())
        out, lse = poisoned(*q.shape[:2], problem.v_size, dtype=problem.dtype), poisoned(*q.shape[:2])
        launches = triton.attention(q, k, v, rows, problem.scoring, out, lse, config)
        run(launches)
        wanted, wanted_lse = oracle(problem, q.cpu(), k.cpu(), v.cpu(), problem.plan())
        tolerance = TOLERANCES[problem.dtype]
        torch.testing.assert_close(out.cpu().double(), wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse.cpu(), wanted_lse, atol=1e-4, rtol=1e-4)
        if seed == 0:
            of_first = [weakref.ref(x) for x in (q, k, v, out, lse)]
            work = launches[0].arguments["work"]
            del q, k, v, out, lse, launches
            assert [x() for x in of_first] == [None] * 5
        else:
            assert launches[0].arguments["work"] is work
            assert len(launches) == (2 if keys == 500 else 1)


def test_another_form_is_planned_anew() -> None:
    """Other channels, strides, scores and windows, of the same rows."""
    rows = SMALL.plan(DEVICE)
    for change in ({}, {"size": 24}, {"v_size": 8}, {"softcap": 2.0}, {"window": 3}, {}):
        problem = replace(SMALL, **change)
        q, k, v = (x.to(DEVICE) for x in problem.tensors())
        for x in (q, torch.cat((q, q), 2)[..., : problem.size]):
            out, lse = poisoned(*q.shape[:2], problem.v_size, dtype=problem.dtype), poisoned(*q.shape[:2])
            run(triton.attention(x, k, v, rows, problem.scoring, out, lse))
            wanted, _ = oracle(problem, *problem.tensors(), problem.plan())
            torch.testing.assert_close(out.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


def test_no_rows() -> None:
    _, _, launches = attend(Problem(rows=(((), 4),)))
    assert launches == ()


def test_later_keys_change_nothing() -> None:
    problem = Problem(rows=(((2, 9, 10, 30), 40),), tokens=16)
    q, k, v = (x.to(DEVICE) for x in problem.tensors())
    rows = problem.plan(DEVICE)
    found = []
    for value in (0.0, -1e4, 1e4):
        for j in range(11, 40):
            k[rows.tables[0, j // 16], :, j % 16] = value
            v[rows.tables[0, j // 16], :, j % 16] = value
        out, lse = poisoned(*q.shape[:2], 16), poisoned(*q.shape[:2])
        run(triton.attention(q, k, v, rows, problem.scoring, out, lse, tiles(16, 16)))
        found.append((out, lse))
    for out, lse in found[1:]:
        assert torch.equal(out[:3], found[0][0][:3])
        assert torch.equal(lse[:3], found[0][1][:3])


@pytest.mark.parametrize("lse_known", [True, False])
@pytest.mark.parametrize("by_values", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 9, "tokens": 16},
        {"softcap": 2.0, "group": 1},
        {"dtype": torch.bfloat16, "size": 40, "v_size": 24, "tokens": 50},
        {"dtype": torch.float16, "rows": (((-1, 0, 60), 20),)},
    ],
    ids=str,
)
def test_scores(change: dict[str, Any], by_values: bool, lse_known: bool) -> None:
    problem = replace(SMALL, **({"rows": SMALL.rows[:1]} | change))
    q, k, v = (x.to(DEVICE) for x in problem.tensors())
    rows, values = problem.plan(DEVICE), v if by_values else None
    lse = None
    if lse_known:
        lse, o = poisoned(*q.shape[:2]), poisoned(*q.shape[:2], problem.v_size, dtype=q.dtype)
        run(triton.attention(q, k, v, rows, problem.scoring, o, lse))
    out = poisoned(q.shape[1], int(rows.lengths[0]))
    run(triton.scores(q, k, values, rows, problem.scoring, lse, out, tiles(16, 16)))
    check_surroundings(out)
    wanted = reference.query_scores(q, k, values, rows, problem.scoring)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("with_deviation", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_scatter(rope: Rope, dtype: torch.dtype, with_deviation: bool) -> None:
    """The right slots get the right keys; skipped rows and slots beyond the pages write nothing."""
    m, heads, group, size, v_size, tokens = 7, 2, 3, 8, 6, 4
    random = torch.Generator().manual_seed(1)
    k_pages = torch.randn(5, tokens, heads, size, generator=random).to(dtype).to(DEVICE).transpose(1, 2)
    v_pages = torch.randn(5, heads, tokens, v_size, generator=random).to(dtype).to(DEVICE)
    fused = torch.randn(m, heads * (group * size + size + v_size), generator=random).to(dtype).to(DEVICE)
    q, k, v = fused.split([heads * group * size, heads * size, heads * v_size], 1)
    q = q.view(m, heads * group, size)
    k, v = k.view(m, heads, size), v.view(m, heads, v_size)
    slots = torch.tensor([3, 19, -1, 0, 7, 20, 12], device=DEVICE)
    cos_sin = torch.from_numpy(rope.table(np.array([0, 1, 5, 100, 101, 4000, 131071])))
    turns = RowRotations(rope, cos_sin.to(DEVICE))
    legal = torch.where(slots < 20, slots, -1)
    wanted_k, wanted_v, wanted_deviation = k_pages.clone(), v_pages.clone(), poisoned(m)
    wanted_q = reference.rope_scatter(q, k, v, turns, legal, wanted_k, wanted_v, wanted_deviation)
    before = k_pages.clone(), v_pages.clone()
    out, deviation = poisoned(*q.shape, dtype=dtype), poisoned(m)
    run(
        triton.scatter(
            (q, k, v), turns, slots, k_pages, v_pages, deviation if with_deviation else None, out,
            KernelConfig((("ROWS", 4),), 4, 1),
        )
    )  # fmt: skip
    close = {"atol": 1e-6, "rtol": torch.finfo(dtype).eps}
    torch.testing.assert_close(out, wanted_q, **close)
    torch.testing.assert_close(k_pages, wanted_k, **close)
    assert torch.equal(v_pages, wanted_v)
    written = torch.zeros(20, dtype=torch.bool, device=DEVICE)
    written[legal[legal >= 0]] = True
    for pages, old in zip((k_pages, v_pages), before, strict=True):
        assert torch.equal((pages == old).all(3).all(1).flatten(), ~written)
    for output in (out, deviation):
        check_surroundings(output)
    if with_deviation:
        # a channel that the interpreter rounds down, not to the nearest, is off by one unit in its last place
        torch.testing.assert_close(deviation, wanted_deviation, atol=1e-4, rtol=16 * torch.finfo(dtype).eps)
        assert (deviation[legal < 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_deviation(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    new, old = (
        torch.randn(3, 9, 33, generator=random).to(dtype).to(DEVICE).transpose(0, 1) for _ in range(2)
    )
    out = poisoned(9)
    run(triton.deviation(new, old, out, KernelConfig((("ROWS", 4),), 4, 1)))
    check_surroundings(out)
    torch.testing.assert_close(out, reference.token_deviation(new, old))
    assert triton.deviation(new[:0], old[:0], out) == ()


def launches(dtype: torch.dtype = torch.bfloat16, size: int = 128, count: int = 700) -> list[Launch]:
    """One of every kernel, made and not run."""
    problem = Problem(
        rows=((tuple(range(count)), 1024),), heads=2, size=size, v_size=size, tokens=16, dtype=dtype
    )
    q, k, v = problem.tensors()
    rows, lse = problem.plan(), torch.empty(q.shape[:2])
    turns = RowRotations(Rope((1.0,) * (size // 2)), torch.empty(count, size))
    fresh = torch.empty(count, 2, size, dtype=dtype)
    (whole, *_) = triton.attention(q, k, v, rows, problem.scoring, torch.empty_like(q), lse)
    split = triton.with_split(whole.config, 256)
    return [
        *triton.attention(q, k, v, rows, problem.scoring, torch.empty_like(q), lse, split),
        *triton.scores(q, k, v, rows, problem.scoring, lse, torch.empty(2, 1024)),
        *triton.scatter((q, fresh, fresh), turns, rows.slots, k, v, None, torch.empty_like(q)),
        *triton.deviation(fresh, fresh, torch.empty(count)),
    ]


def plain(space: Sequence[KernelConfig]) -> set[KernelConfig]:
    """Return those without what depends on the target."""
    return {config for config in space if not {"maxnreg", "PACK"} & dict(config.tiles).keys()}


def test_every_kernel_has_a_space_and_a_bucket() -> None:
    found = launches()
    names = [launch.kernel.__name__ for launch in found]
    assert sorted(names) == ["attend", "measure", "merge", "scatter_rows", "weigh"]
    for launch in found:
        space = triton.configs(launch)
        assert launch.config == space[0]
        for target in GPUS:
            assert plain(triton.configs(launch, target)) == plain(space)
        assert len(set(space)) == len(space)
        assert triton.bucket(launch).op == launch.kernel.__name__
    wide, narrow = (triton.bucket(launches(size=size)[0]) for size in (128, 64))
    assert wide.form != narrow.form
    assert wide.sizes == narrow.sizes == (1024, 2, 2048)
    assert triton.bucket(launches(count=600)[0]) == wide
    assert triton.bucket(launches(torch.float16)[0]).form != wide.form
