"""`make gpu`: every kernel's default configuration: is it right, and how far is it from the roof?"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.gpu import roofs
from benchmarks.gpu.bench import Bench, each
from benchmarks.gpu.driver import carried_cache
from benchmarks.gpu.packages import ROOT
from kvkit.kernels.tuning.cases import Problem, Work
from kvkit.kernels.tuning.compiling import compile_pool, survey

SAMPLES = 5


def run(bench: Bench) -> None:
    """Records of each problem what is wrong with it, its time, the predicted one and shares of the roofs."""
    if not carried_cache()["fits"] and not any(bench.results.of(bench.results.step)):
        _compile_all(bench)
    predicted = predictions(bench.target)

    def measure(problem: Problem) -> dict[str, Any]:
        config = problem.space_on(bench.target)[0]
        case = problem.make(bench.device, True)
        case.poison()
        began = time.perf_counter()
        case.run(config)
        bench.streams.synchronize()
        first_s = time.perf_counter() - began
        fault = case.fault()
        timed = bench.timer(case)
        times = [timed(config) for _ in range(SAMPLES)]
        return {
            "config": str(config),
            "right": not fault,
            "fault": fault,
            "first_launch_s": first_s,
            "us": median(times) * 1e6,
            "min_us": min(times) * 1e6,
            "predicted_us": predicted.get(problem.name),
            **shares(bench, problem.work(config), min(times)),
        }

    each(bench, bench.problems, measure)


def shares(bench: Bench, work: Work, seconds: float) -> dict[str, float]:
    """Bytes and flops per second, and as shares of the roofs that this file has."""
    measured = {line["what"]: line for line in bench.results.of("roofs")}
    found = {"GB/s": work.moved_bytes / seconds / 1e9}
    if roof := measured.get(roofs.COPY):
        found["of_copy"] = work.moved_bytes / seconds / (roof["moved_bytes"] / roof["min_s"])
    if work.flops:
        found["TFLOP/s"] = work.flops / seconds / 1e12
    if work.flops and (roof := measured.get(roofs.PRODUCT)):
        found["of_product"] = work.flops / seconds / (roof["flops"] / roof["min_s"])
    return found


def predictions(target: str) -> Mapping[str, float]:
    """Microseconds by problem, as the compile gate's table predicts them."""
    table = json.loads((ROOT / "benchmarks" / "results" / "compile.json").read_text())
    found: dict[str, float] = {}
    for entry in table["kernels"]:
        if entry["target"] == target and entry.get("predicted_us"):
            found[entry["problem"]] = found.get(entry["problem"], 0) + entry["predicted_us"]
    return found


def _compile_all(bench: Bench) -> None:
    """Fill Triton's cache by as many processes as there are cores, so that no launch waits for a compiler."""
    began, errors, count = time.perf_counter(), [], 0
    with compile_pool(os.cpu_count() or 1) as pool:
        for factory in (bench.factory, bench.small):
            jobs = [(p.name, p.space_on(bench.target)[0], bench.target) for p in factory()]
            errors += [report.error for report in survey(pool, factory, jobs) if report.error]
            count += len(jobs)
    took_s = time.perf_counter() - began
    bench.results.record("compiled", problems=count, seconds=took_s, errors=errors)
