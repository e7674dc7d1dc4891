"""`make gpu`: choices that were made without a GPU, each beside what it replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from kvkit.kernels.attention import schedule
from kvkit.kernels.attention.latent import LatentWeights, absorbs, latent_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.tuning.cases import Case, Problem
from kvkit.kernels.tuning.compiling import compile_pool, survey
from kvkit.kernels.tuning.configs import KernelConfig, Launch, Runnable

SAMPLES = 5
CONVERSIONS = ("encode_rows", "decode_rows")
TILES = tuple(
    KernelConfig((("TILE_ROWS", rows), ("TILE_KEYS", keys)), 8, 3)
    for rows, keys in ((128, 64), (128, 32), (128, 128), (64, 32), (32, 32))
)
"""Of `attend`, the first three of heads of 128 channels, the others of latent attention."""
ATTENTIONS = (
    *(f"attention Llama-3.1-8B, {length} keys" for length in (4096, 8192, 32768)),
    "attention Llama-3-70B",
    "attention Qwen2-7B",
    "attention DeepSeek-V3, an eighth",
)


def run(bench: Bench) -> None:
    """Record each comparison's lines; what one raises is recorded too, and the next begins."""
    for compare in (order_of_parts, tiles_and_splits, latent_ways):
        try:
            compare(bench)
        except Exception as error:  # whatever a kernel's launch raises
            bench.results.record(compare.__name__, error=f"{type(error).__name__}: {error}"[:500])


def order_of_parts(bench: Bench) -> None:
    """Compare 8-bit moves with K and V of a layer as neighbours, and with all K before all V."""
    for problem in bench.problems:
        if problem.bucket.op not in CONVERSIONS:
            continue
        case, config = problem.make(bench.device, True), problem.space_on(bench.target)[0]
        for order, arranged in (("neighbours", None), ("all K first", _all_k_first)):
            _record(bench, f"{problem.name}, {order}", case, config, arranged)


def _all_k_first(launches: Sequence[Runnable]) -> tuple[Runnable, ...]:
    (launch,) = launches
    assert isinstance(launch, Launch)
    parts = launch.arguments["parts"]
    ordered = torch.cat([parts[0::2], parts[1::2]])
    return (replace(launch, arguments={**launch.arguments, "parts": ordered}),)


def tiles_and_splits(bench: Bench) -> None:
    """Compare tiles of attention, whole and split where the simulation says so, with its times."""
    chosen = [p for p in bench.problems if p.name in ATTENTIONS or bench.device.type == "cpu"]
    chosen = [problem for problem in chosen if problem.bucket.op == "attend"]
    jobs = {problem.name: _configs_of(problem) for problem in chosen}
    _compile(bench, jobs)
    for problem in chosen:
        for config in jobs[problem.name]:
            parts = set()
            for way in ("whole", "split"):
                with _whole() if way == "whole" else patch.object(schedule, "GAIN", 0):
                    case = problem.make(bench.device, True)  # anew: rows keep their plans
                    count = len(case.launches(config))
                    if count not in parts:
                        _record(bench, f"{problem.name}, {way}", case, config)
                    parts.add(count)


def latent_ways(bench: Bench) -> None:
    """Compare absorbed and expanded latent attention of DeepSeek-V3's sizes, by number of rows."""
    on_gpu = bench.device.type == "cuda"
    heads, length = (128, 8192) if on_gpu else (2, 128)
    for count in (64, 128, 256, 1292) if on_gpu else (16,):
        positions = np.sort(np.random.default_rng(0).choice(length, count, replace=False))
        table, starts = np.random.default_rng(1).permutation(length // 64), np.array([0, count])
        rows = Rows.of(positions, starts, np.array([length]), table[None], 64, bench.device)
        new = partial(torch.randn, dtype=torch.bfloat16, device=bench.device)
        q, pages = new(count, heads, 192), new(len(table), 1, 64, 576)
        weights = LatentWeights(*(new(heads, 128, 512) * 512**-0.5 for _ in range(2)))
        scoring = Scoring(192**-0.5)
        chosen = absorbs(rows, scoring, weights, 64)
        for absorbed in (True, False):
            times = bench.seconds(
                partial(latent_attention, q, pages, weights, rows, scoring, absorbed=absorbed)
            )
            way = "absorbed" if absorbed else "expanded"
            us = {"us": median(times) * 1e6, "min_us": min(times) * 1e6}
            bench.results.record(f"latents, {count} rows, {way}", **us, chosen=absorbed == chosen)


def _configs_of(problem: Problem) -> tuple[KernelConfig, ...]:
    return tuple(config for config in TILES if config in problem.space) or problem.space[:1]


@contextmanager
def _whole() -> Iterator[None]:
    """Let no tile be split in this context."""
    with patch.object(schedule, "BALANCED", 0):
        yield


def _compile(bench: Bench, jobs: dict[str, tuple[KernelConfig, ...]]) -> None:
    began = time.perf_counter()
    with compile_pool(os.cpu_count() or 1) as pool:
        named = [(name, config, bench.target) for name, configs in jobs.items() for config in configs]
        errors = [report.error for report in survey(pool, bench.factory, named) if report.error]
    bench.results.record("compiled", count=len(named), seconds=time.perf_counter() - began, errors=errors)


def _record(
    bench: Bench,
    what: str,
    case: Case,
    config: KernelConfig,
    arranged: Callable[[Sequence[Runnable]], tuple[Runnable, ...]] | None = None,
) -> None:
    """Record whether a configuration's launches, `arranged` if given, are right, and their time."""
    if arranged is not None:
        launches = case.launches
        case = replace(case, launches=lambda config: arranged(launches(config)))
    try:
        case.poison()
        case.run(config)
        bench.streams.synchronize()
        fault, timed = case.fault(), bench.timer(case)
        times = [timed(config) * 1e6 for _ in range(SAMPLES)]
    except Exception as error:  # one that does not fit must not hide the others
        bench.results.record(what, config=str(config), error=f"{type(error).__name__}: {error}"[:300])
        return
    found: dict[str, Any] = {"us": median(times), "min_us": min(times)}
    bench.results.record(what, config=str(config), right=not fault, fault=fault, **found)
