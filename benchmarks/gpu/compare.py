"""`make gpu`: choices that were made without a GPU, each beside what it replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from kvkit.kernels.attention.hopper import available
from kvkit.kernels.attention.latent import LatentWeights, absorbs, latent_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.problems import (
    ATTENTIONS,
    AttentionSpec,
    Heads,
    attention_problem,
    hopper_problem,
)
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.tuning.cases import Case, Problem
from kvkit.kernels.tuning.compiling import ProblemFactory, compile_pool, survey
from kvkit.kernels.tuning.configs import KernelConfig, Launch, Runnable
from kvkit.kernels.uploads import DeviceArray

SAMPLES = 5
CONVERSIONS = ("encode_rows", "decode_rows")
TILES = tuple(
    KernelConfig((("TILE_ROWS", rows), ("TILE_KEYS", keys)), 8, 3)
    for rows, keys in ((128, 64), (128, 32), (128, 128), (64, 32), (32, 32))
)
"""Tiles of `attend`: three for heads of 128 channels, two for latent attention."""
NAMES = (
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
    given = launch.arguments["parts"]
    parts = (given.tensor() if isinstance(given, DeviceArray) else given).view(-1, 7)
    ordered = torch.cat([parts[0::2], parts[1::2]]).flatten()
    return (replace(launch, arguments={**launch.arguments, "parts": ordered}),)


def tiles_and_splits(bench: Bench) -> None:
    """Compare tiles of attention, whole, split where the simulation says so, and split at 2048 keys.

    On a Hopper GPU, the kernel for it comes first, in each of its configurations.
    """
    factory = attentions if bench.device.type == "cuda" else small_attentions
    _compile(bench, factory)
    for problem in factory():
        for config in _configs_of(problem):
            _record(bench, problem.name, problem.make(bench.device, True), config)


SPLITS: dict[str, int | None] = {"whole": 0, "split where it pays": None, "split at 2048": 2048}
"""`AttentionSpec.split` by its name in results."""


def _with_splits(specs: Iterable[AttentionSpec]) -> tuple[Problem, ...]:
    return tuple(
        attention_problem(replace(spec, name=f"{spec.name}, {way}", split=split))
        for spec in specs
        for way, split in SPLITS.items()
    )


@cache
def attentions() -> tuple[Problem, ...]:
    """Return the problems of `tiles_and_splits`."""
    specs = [spec for spec in ATTENTIONS if spec.name in NAMES]
    hopper = [hopper_problem(spec) for spec in specs if spec.on_hopper and available()]
    return *hopper, *_with_splits(specs)


@cache
def small_attentions() -> tuple[Problem, ...]:
    """Return a problem of `tiles_and_splits` for a rehearsal."""
    return _with_splits([AttentionSpec("attention", Heads(4, 2, 64, 64), 128)])


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
    """Return those of TILES that a problem has; all of a Hopper kernel's, which has none of them."""
    return tuple(config for config in TILES if config in problem.space) or problem.space


def _compile(bench: Bench, factory: ProblemFactory) -> None:
    began = time.perf_counter()
    jobs = [(p.name, config, bench.target) for p in factory() for config in _configs_of(p)]
    with compile_pool(os.cpu_count() or 1) as pool:
        errors = [report.error for report in survey(pool, factory, jobs) if report.error]
    bench.results.record("compiled", count=len(jobs), seconds=time.perf_counter() - began, errors=errors)


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
