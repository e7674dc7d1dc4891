"""An attention splits its tiles where the simulated schedule is shortest, and `Rows.tiles` follows it."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit.kernels.attention import problems, triton
from kvkit.kernels.attention.schedule import TileCost, best_split, makespan


def listed(loops: list[int], units: int, slots: int) -> int:
    """Schedule one program after another, each on the slot that is free first."""
    busy = [0] * slots
    for n in itertools.chain.from_iterable([n] * units for n in loops):
        heapq.heappush(busy, heapq.heappop(busy) + n)
    return max(busy)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 24), st.integers(1, 24))
def test_the_makespan_is_that_of_a_list_schedule(loops: list[int], units: int, slots: int) -> None:
    assert makespan(np.array(loops, np.int64), units, slots) == listed(loops, units, slots)


def ranges(*keys: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(keys), np.int64), np.array(keys, np.int64)


COST = TileCost(rows=128, keys=64, units=8, channels=256, v_size=128, resident=1)


@pytest.mark.parametrize("keys", [(), (0,), (0, 0, 0), (64,), (300,) * 1000])
def test_tiles_that_stay_whole(keys: tuple[int, ...]) -> None:
    """No keys, so few that parts have no keys, or so many tiles that all multiprocessors are busy."""
    assert best_split(*ranges(*keys), COST, 132) is None


def test_few_long_tiles_are_split() -> None:
    split = best_split(*ranges(32768), COST, 132)
    assert split is not None
    assert split % COST.keys == 0
    assert 32768 / split * COST.units >= 64


def test_parts_cost_their_bytes() -> None:
    """Results of many channels are worth less splitting than a logsumexp alone."""
    begin, end = ranges(*range(200, 4096, 200))
    wide = COST._replace(v_size=4096)
    small, large = (best_split(begin, end, cost, 132) for cost in (COST._replace(v_size=0), wide))
    assert small is not None
    assert large is None or large >= small


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9000)), min_size=1, max_size=20),
    st.integers(1, 16),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 200),
)
def test_a_split_is_faster_in_the_simulation(
    pairs: list[tuple[int, int]], units: int, keys: int, processors: int
) -> None:
    begin = np.array([first for first, _ in pairs], np.int64)
    end = begin + np.array([count for _, count in pairs], np.int64)
    cost = TileCost(64, keys, units, 128, 64, 2)
    split = best_split(begin, end, cost, processors)
    whole = makespan(np.sort(cost.loops(end - begin))[::-1], units, 2 * processors)
    if split is None:
        return
    assert split % keys == 0
    parts = [
        (min(last, stop) - max(first, start), first // split != (last - 1) // split)
        for first, last in zip(begin.tolist(), end.tolist(), strict=True)
        for start in range(first // split * split, max(last, first // split * split + 1), split)
        for stop in [start + split]
    ]
    assert sum(length for length, _ in parts) == int((end - begin).sum())
    loops = np.array(sorted((length for length, _ in parts), reverse=True), np.int64)
    merged = sum(of_several for _, of_several in parts)
    assert cost.seconds(makespan(cost.loops(loops), units, 2 * processors), merged) < cost.seconds(whole, 0)


MEASURED = {
    # problem, keys of a tile: microseconds in benchmarks/results/gpu-nvidia-h100-80gb-hbm3.json or, for 32
    # keys of 32768 and 128 of the 70B model, gpu-nvidia-h200.json
    ("attention Llama-3.1-8B, 8192 keys", 64): 294.3,
    ("attention Llama-3.1-8B, 8192 keys", 32): 301.1,
    ("attention Llama-3.1-8B, 32768 keys", 64): 3565,
    ("attention Llama-3.1-8B, 32768 keys", 32): 3143,
    ("attention Llama-3-70B", 64): 528.9,
    ("attention Llama-3-70B", 32): 468.1,
    ("attention Llama-3-70B", 128): 446.1,
    ("attention Llama-2-7B", 64): 356.8,
    ("attention Llama-2-7B", 32): 321.2,
}


@pytest.mark.parametrize(("name", "keys"), MEASURED, ids=str)
def test_the_simulation_agrees_with_measured_times(name: str, keys: int) -> None:
    """Tiles were whole in these runs; the model has two fitted numbers."""
    (spec,) = (spec for spec in problems.ATTENTIONS if spec.name == name)
    rows, heads = problems._rows(spec, torch.device("cpu")), spec.heads
    group = heads.query_heads // heads.heads
    pack = triton.packed(group, 128, rows.count)
    resident = 2 if keys == 32 else 1
    cost = TileCost(128, keys, heads.heads * -(-group // pack), 256, 128, resident)
    found = rows.tile_ranges(128 // pack, spec.window)
    loops = np.sort(cost.loops(found.end - found.begin))[::-1]
    seconds = cost.seconds(makespan(loops, cost.units, 132 * resident), 0)
    assert seconds * 1e6 == pytest.approx(MEASURED[name, keys], rel=0.1)


@pytest.mark.parametrize(
    "spec", [s for s in problems.ATTENTIONS if s.kernel == "attend"], ids=lambda s: s.name
)
def test_launches_of_every_problem_are_balanced(spec: problems.AttentionSpec) -> None:
    """Multiprocessors work for most of the simulated time, whatever the number of tiles."""
    rows, heads = problems._rows(spec, torch.device("cpu")), spec.heads
    group = heads.query_heads // heads.heads
    pack = triton.packed(group, 64, rows.count)
    cost = TileCost(64, 32, heads.heads * -(-group // pack), heads.size + heads.v_size, heads.v_size, 1)
    found = rows.tile_ranges(64 // pack, spec.window)
    tiles = rows.tiles(64 // pack, best_split(found.begin, found.end, cost, 132), spec.window)
    items = tiles.items.numpy().astype(np.int64)
    loops = cost.loops(items[:, 6] - items[:, 3])
    busy = loops.sum() * cost.units / 132 / makespan(loops, cost.units, 132)
    assert busy >= 0.75
