"""Host time of one call of an operation, without the GPU's driver and Triton's C launcher.

Stand-ins take their place, so no GPU is needed; tensors are on the CPU. "through Triton" is the same call
with every launch by Triton's own `kernel[grid](**arguments)`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks.timing import interleaved
from kvkit.format.layout import LayerGroup
from kvkit.kernels import uploads
from kvkit.kernels.attention import api as attention
from kvkit.kernels.attention import triton as kernels
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.attention.triton_kernels import attend
from kvkit.kernels.pages import api as pages
from kvkit.kernels.pages.moves import LLAMA
from kvkit.kernels.tuning.cases import LLAMA_ROPE
from kvkit.kernels.tuning.planned import LaunchPlan
from kvkit.lab.testbed.recorded_launches import RecordingDriver, recorded

TOKENS, SELECTED, PAGE = 8192, 1292, 16
CALLS = 20
"""Calls per measurement: one is too short for the clock."""

pytestmark = pytest.mark.skipif(
    not isinstance(attend, JITFunction), reason="kernels are interpreted in this process"
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches that do nothing; operations take the path of a GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(attention, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(pages, "_on_gpu", lambda pages: True)
    monkeypatch.setattr(uploads, "_is_host", lambda device: False)
    with recorded(RecordingDriver()):
        yield
    torch.set_num_threads(threads)


@contextmanager
def through_triton() -> Iterator[None]:
    """Make Triton find the kernel in every launch."""
    with mock.patch.object(LaunchPlan, "start", refuse), mock.patch.object(LaunchPlan, "keep", refuse):
        yield


def refuse(*_: object) -> bool:
    return False


def repeated(call: Callable[[], object], context: Callable[[], Any]) -> Callable[[], None]:
    def many() -> None:
        with context():
            for _ in range(CALLS):
                call()

    return many


def report(benchmark: Any, name: str, call: Callable[[], object]) -> None:
    """Measure a call that launches kernels, and the same through Triton."""
    ways = {"planned": repeated(call, nullcontext), "through Triton": repeated(call, through_triton)}
    benchmark(call)
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("a launch went through Triton")):
        call()
    rounds = 100 if benchmark.enabled else 1
    times = interleaved(ways, rounds, warmup=3 if benchmark.enabled else 0, clock=time.thread_time)
    for way, seconds in times.items():
        us = [1e6 * each / CALLS for each in seconds]
        found = {"us": min(us), "median_us": statistics.median(us)}
        found |= {
            "ratio_min": min(seconds) / min(times["through Triton"]),
            "ratio_median": statistics.median(seconds) / statistics.median(times["through Triton"]),
        }
        benchmark.extra_info[way] = found
        print(f"{name}, {way}: {found['us']:.1f} µs, median {found['median_us']:.1f}, ", end="")
        print(f"ratio {found['ratio_min']:.2f}, of medians {found['ratio_median']:.2f}")


POSITIONS = np.sort(np.random.default_rng(0).choice(TOKENS, SELECTED, replace=False))
TABLES = np.random.default_rng(1).permutation(TOKENS // PAGE)[None]


def plan_rows() -> Rows:
    """Rows of a prompt of 8,192 tokens of which 1,292 are recomputed, in pages of 16."""
    return Rows.of(POSITIONS, np.array([0, SELECTED]), np.array([TOKENS]), TABLES, PAGE)


def layer_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, K pages and V pages of a layer of Llama-3.1-8B, without contents."""
    q = torch.empty(SELECTED, 32, 128, dtype=torch.bfloat16)
    layer_pages = torch.empty(TOKENS // PAGE, 8, PAGE, 256, dtype=torch.bfloat16)
    return q, layer_pages[..., :128], layer_pages[..., 128:]


def test_attention(benchmark: Any) -> None:
    rows, (q, k_pages, v_pages), scoring = plan_rows(), layer_tensors(), Scoring(128**-0.5)
    out = torch.empty_like(q)
    report(
        benchmark,
        "blend_attention",
        lambda: attention.blend_attention(q, k_pages, v_pages, rows, scoring, out),
    )


def test_scatter(benchmark: Any) -> None:
    rows, (q, k_pages, v_pages) = plan_rows(), layer_tensors()
    k, v = torch.empty(2, SELECTED, 8, 128, dtype=torch.bfloat16)
    rotations = RowRotations(LLAMA_ROPE, torch.from_numpy(LLAMA_ROPE.table(rows.positions)))
    report(
        benchmark,
        "rope_scatter",
        lambda: attention.rope_scatter(q, k, v, rotations, rows.slots, k_pages, v_pages),
    )


def test_planning(benchmark: Any) -> None:
    """Per batch: its rows, checked and uploaded, and the tiles of its attention; no launch."""
    (q, k_pages, v_pages), scoring = layer_tensors(), Scoring(128**-0.5)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    ways: dict[str, Callable[[], object]] = {
        "rows": plan_rows,
        "rows and plan": lambda: kernels.attention(q, k_pages, v_pages, plan_rows(), scoring, out, lse),
    }
    benchmark(ways["rows and plan"])
    times = interleaved(ways, 300 if benchmark.enabled else 1, clock=time.thread_time)
    for name, seconds in times.items():
        us = {"us": 1e6 * min(seconds), "median_us": 1e6 * statistics.median(seconds)}
        benchmark.extra_info[name] = us
        print(f"{name}: {us['us']:.1f} µs, median {us['median_us']:.1f}")


@pytest.mark.parametrize("chunks", [1, 8, 64])
@pytest.mark.parametrize("verb", ["pack", "unpack"])
def test_moves(benchmark: Any, verb: str, chunks: int) -> None:
    """All layers of Llama-3.1-8B, chunks of 256 tokens, between pages and one record after another."""
    group: LayerGroup = LLAMA
    chunk_blocks, blocks = 16, 128
    pool = pages.Pages.of(group, group.pages(blocks))
    ids = np.arange(chunks * chunk_blocks).reshape(chunks, chunk_blocks) % blocks
    records = [np.empty(group.chunk_bytes(256), np.uint8)] * chunks
    move = getattr(pages, verb)
    report(benchmark, f"{verb}, {chunks} chunks", lambda: move(pool, records, blocks=ids))
