"""The CPU's kernels move the same bytes with any tuned setting, and use those tuned on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pages_numba import (
    SMALL,
    Conversion,
    Job,
    by_host,
    check,
    check_conversion,
    conversions,
    convert_by_host,
    jobs,
)

from kvkit.environment import host_name, slug_of
from kvkit.kernels.pages import host_problems, numba
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.kernels.tuning.configs import KernelConfig, host_config
from kvkit.kernels.tuning.problems import host_problems as every_host_problem
from kvkit.kernels.tuning.search import Roofline, Tools, tune
from kvkit.kernels.tuning.tables import (
    Tuned,
    TunedKey,
    build_of,
    forget_tables,
    read_table,
    tuned_folder,
    write_table,
)

SPACE = numba.configs()
SMALL_MOVES = tuple(
    replace(move, group=replace(move.group, layers=(0, 1)), tokens=move.group.block_tokens)
    for move in host_problems.MOVES
)


@contextmanager
def tuned_to(config: KernelConfig, piece: int) -> Iterator[None]:
    """Have every job take this configuration, in pieces of so many bytes."""
    with (
        mock.patch.object(numba, "best", return_value=config),
        mock.patch.object(numba, "PIECE_BYTES", piece),
    ):
        yield


@settings(max_examples=150)
@given(job=jobs(), config=st.sampled_from(SPACE), piece=st.sampled_from([1, 256, 1 << 20]))
def test_any_configuration_moves_the_same_bytes(job: Job, config: KernelConfig, piece: int) -> None:
    """Odd shapes and alignments, skipped slots, poisoned outputs, neighbours of both."""
    with tuned_to(config, piece):
        check(job, by_host)


@settings(max_examples=80)
@given(conversion=conversions(), config=st.sampled_from(SPACE), piece=st.sampled_from([1, 256, 1 << 20]))
def test_any_configuration_converts_to_the_same_bits(
    conversion: Conversion, config: KernelConfig, piece: int
) -> None:
    with tuned_to(config, piece):
        check_conversion(conversion, convert_by_host)


@pytest.mark.parametrize("move", SMALL_MOVES, ids=lambda move: move.name)
def test_problems_check_what_was_moved(move: Any) -> None:
    """Every configuration is right, and what is left poisoned is not."""
    problem = host_problems.problem_of(move)
    assert problem.space[0] == host_config(THREADS=1, STREAM=0)
    assert set(problem.space) == set(SPACE)
    case = problem.make(torch.device("cpu"), True)
    for config in problem.space:
        case.poison()
        assert case.fault()
        case.run(config)
        assert not case.fault()


def test_every_problem_has_a_bucket_of_its_own() -> None:
    problems = every_host_problem()
    assert len({problem.bucket for problem in problems}) == len({p.name for p in problems}) == len(problems)
    assert {name for problem in problems for name in problem.names} == {"pack", "unpack"}


@pytest.mark.nightly
def test_the_host_is_tuned_without_triton(tmp_path: Path) -> None:
    """Which a torch for CPUs does not bring."""
    script = (
        "import sys; sys.modules['triton'] = None; from kvkit.cli import main; "
        "sys.argv = ['kvkit', 'tune', '--device', 'host', '--budget-s', '0']; main()"
    )
    environment = os.environ | {"KVKIT_TUNED": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{len(host_problems.MOVES)} left" in done.stdout


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of this machine's own table, which is not there yet."""
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path))
    forget_tables()
    yield tmp_path / f"{slug_of(host_name())}.json"
    forget_tables()


def shared(threads: int | None) -> int:
    """How many threads a small call of pack uses, and whether it moves what it should."""
    pages = SMALL.pages(4, 7)
    records = [np.zeros(SMALL.chunk_bytes(8), np.uint8)]
    with mock.patch.object(numba, "_share", wraps=numba._share) as share:
        pack(Pages.of(SMALL, pages), records, blocks=np.array([[2, 1]]), threads=threads)
    assert (records[0] == 7).all()
    unpack(Pages.of(SMALL, pages), records, blocks=np.array([[0, 3]]), threads=threads)
    return int(share.call_args.args[1])


def write(path: Path, threads: int) -> None:
    ids = np.array([[2, 1]])
    slots = (ids[:, :, None] * 4 + np.arange(4)).reshape(1, -1)
    job = numba.Job.of(Pages.of(SMALL, SMALL.pages(4)), np.zeros(1, np.int64), slots, True)
    key = TunedKey(numba.bucket(job, None), build_of(numba.move_rows, True))
    write_table(path, host_name(), {key: Tuned(host_config(THREADS=threads, STREAM=1), 1.0, 2.0)})


@pytest.fixture
def torch_has() -> Iterator[int]:
    """How many threads torch has: other than one, whatever the tests are given."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_what_was_tuned_is_used(tables: Path, torch_has: int) -> None:
    """As many threads as the table says, never more than the caller allows or torch has."""
    assert shared(threads=3) == 1, "the default of a small job"
    write(tables, 0)
    assert shared(threads=3) == 3
    assert shared(threads=2) == 2
    assert shared(threads=None) == torch_has
    write(tables, 1)
    assert shared(threads=3) == 1


def test_a_tuned_number_of_threads_is_an_upper_bound() -> None:
    with tuned_to(host_config(THREADS=4, STREAM=0), 64):
        assert [shared(threads) for threads in (1, 3, 8)] == [1, 3, 4]


def test_tuning_takes_a_problem_to_this_machines_table(tables: Path) -> None:
    """The whole way, with the clock of a machine where streaming is fast."""

    def timer(case: Any) -> Any:
        def measure(config: KernelConfig) -> float:
            case.run(config)
            return 1.0 if dict(config.tiles)["STREAM"] else 2.0

        return measure

    tools = Tools(
        host_name(), torch.device("cpu"), lambda *_: {}, timer, Roofline(1e18, 1e18), time.monotonic
    )
    problem = host_problems.problem_of(SMALL_MOVES[0])
    (step,) = tune([problem], tuned_folder(), tools)
    assert step.state == "tuned", str(step)
    (found,) = read_table(tables, slug_of(host_name())).values()
    assert dict(found.config.tiles)["STREAM"] == 1
    case = problem.make(torch.device("cpu"), True)
    with mock.patch.object(numba, "move_rows", wraps=numba.move_rows) as kernel:
        case.run(found.config)
    assert kernel.call_args.args[2] is True
