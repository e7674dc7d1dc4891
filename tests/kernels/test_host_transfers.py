"""Transfers between GPU and host take the tuned method, or the default one where nothing is tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkit.environment import slug_of
from kvkit.kernels.pages import device, problems
from kvkit.kernels.pages.copies import Copies
from kvkit.kernels.pages.device import (
    COPY_ENGINE,
    KERNEL,
    PROGRAM_CHOICES,
    best_programs,
    programs_config,
    steps,
    transfer_bucket,
    untuned_programs,
)
from kvkit.kernels.pages.problems import TRANSFERS, transfer_problem
from kvkit.kernels.tuning import tables
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.configs import Launch, ProblemBucket
from kvkit.kernels.tuning.tables import Tuned, TunedKey, build_of, forget_tables, write_table

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The name of a GPU that this machine seems to have, with an empty folder of tables."""
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path))
    monkeypatch.setattr(tables, "gpu_name", lambda: "Imaginary 9")
    forget_tables()
    yield "Imaginary 9"
    forget_tables()


@pytest.fixture(params=[False, True], ids=["singly", "batched"])
def batched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the driver seems to take copies in batches."""
    for module in (device, problems):
        monkeypatch.setattr(module, "can_batch", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize(
    ("record_bytes", "records", "way"),
    [
        (32 << 20, 1, COPY_ENGINE),
        (32 << 20, 64, COPY_ENGINE),
        (256 << 10, 4096, COPY_ENGINE),
        ((256 << 10) - 1, 16, KERNEL),
        ((256 << 10) - 1, 15, COPY_ENGINE),
        (1, 1, COPY_ENGINE),
        (1024, 1024, KERNEL),
    ],
)
def test_few_or_large_records_are_the_copy_engines(record_bytes: int, records: int, way: int) -> None:
    """Also in batches, which leave the kernel the smallest records."""
    assert untuned_programs(record_bytes, records, False) == way
    small = record_bytes < 64 << 10
    assert untuned_programs(record_bytes, records, True) == (way if small else COPY_ENGINE)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20), st.booleans(), st.booleans())
def test_buckets_round_up(record_bytes: int, records: int, to_records: bool, batched: bool) -> None:
    bucket = transfer_bucket(record_bytes, records, to_records, batched)
    for size, rounded in zip((record_bytes, records), bucket.sizes, strict=True):
        assert size <= rounded < 2 * size
    assert bucket == transfer_bucket(*bucket.sizes, to_records, batched)
    assert bucket.op != transfer_bucket(record_bytes, records, not to_records, batched).op
    assert bucket != transfer_bucket(record_bytes, records, to_records, not batched)
    assert untuned_programs(record_bytes, records, batched) in PROGRAM_CHOICES


def test_ways_differ() -> None:
    assert len(set(PROGRAM_CHOICES)) == len(PROGRAM_CHOICES)
    assert PROGRAM_CHOICES[0] == COPY_ENGINE == 0
    assert KERNEL in PROGRAM_CHOICES
    assert all(8 <= way <= 32 for way in PROGRAM_CHOICES[1:])


def test_a_tuned_way_is_taken_for_its_direction_and_about_its_size(
    gpu: str, tmp_path: Path, batched: bool
) -> None:
    slow = PROGRAM_CHOICES[-1]
    key = TunedKey(transfer_bucket(1 << 20, 8, True, batched), build_of(steps, False))
    write_table(tmp_path / f"{slug_of(gpu)}.json", gpu, {key: Tuned(programs_config(slow), 1.0, 2.0)})
    assert best_programs(1 << 20, 8, True) == slow
    assert best_programs((1 << 20) - 1, 7, True) == slow, "the same bucket"
    assert best_programs(2 << 20, 4, True) == slow, "the nearest"
    assert best_programs(1 << 20, 8, False) == COPY_ENGINE, "the default"


def test_a_way_that_was_tuned_beside_another_copy_engine_is_passed_over(
    gpu: str, tmp_path: Path, batched: bool
) -> None:
    """A table from before the driver took batches is read, and still right where it takes none."""
    key = TunedKey(ProblemBucket("pages_to_host", "", (128 << 10, 32)), build_of(steps, False))
    write_table(tmp_path / f"{slug_of(gpu)}.json", gpu, {key: Tuned(programs_config(8), 1.0, 2.0)})
    assert best_programs(128 << 10, 32, True) == (COPY_ENGINE if batched else 8)


def test_a_way_that_is_no_more_is_passed_over(gpu: str, tmp_path: Path, batched: bool) -> None:
    key = TunedKey(transfer_bucket(1024, 64, True, batched), build_of(steps, False))
    write_table(tmp_path / f"{slug_of(gpu)}.json", gpu, {key: Tuned(programs_config(7), 1.0, 2.0)})
    assert best_programs(1024, 64, True) == KERNEL


def small(to_records: bool) -> Problem:
    (spec, *_) = (spec for spec in TRANSFERS if spec.to_records == to_records)
    group = replace(spec.group, layers=(0, 1), kv_heads=2, k_size=8, v_size=8)
    return transfer_problem(replace(spec, group=group, chunks=3, tokens=32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; `make gpu` tunes it compiled")
@pytest.mark.parametrize("to_records", [True, False])
def test_every_way_moves_the_same_bytes(to_records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small(to_records)
    monkeypatch.setattr("kvkit.kernels.pages.problems.BUFFER_BYTES", 2 * 2048)
    case = problem.make(CPU, True)
    assert set(problem.space) == set(map(programs_config, PROGRAM_CHOICES))
    for way in PROGRAM_CHOICES:
        case.poison()
        assert case.fault(), "what was never written passes"
        case.run(programs_config(way))
        assert case.fault() == ""
        launches = case.launches(programs_config(way))
        kernels = [launch for launch in launches if isinstance(launch, Launch)]
        copies = sum(len(launch.pairs) for launch in launches if isinstance(launch, Copies))
        if way:
            assert [launch.grid[0] <= way for launch in kernels] == [True]
            assert copies == 0
        else:
            assert copies == 3


def test_problems_stand_for_what_is_asked_for(batched: bool) -> None:
    """The default first; the bucket is that which a move of this size looks up."""
    for spec in TRANSFERS:
        problem = transfer_problem(spec)
        default = untuned_programs(spec.record_bytes, spec.chunks, batched)
        assert problem.space[0] == programs_config(default)
        assert set(problem.space) == set(map(programs_config, PROGRAM_CHOICES))
        assert problem.bucket == transfer_bucket(spec.record_bytes, spec.chunks, spec.to_records, batched)
        assert problem.kernel is device.steps
