"""What fleets of engines need, simulated: hits, times and the bytes of each link, by what tiers there are.

    python -m benchmarks.research.fleet --json benchmarks/results/fleet.json
    python -m benchmarks.research.fleet --config yours.toml

The traffic grows with the fleet: every ten engines serve a population of their own, of `mixed`. Speeds of
tiers are those that were measured on the machine of results/, or a user's, as `kvkit simulate` takes them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.folders import RESULTS
from kvkit.lab.files import about
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import Report, simulate
from kvkit.lab.simulate.report import summary
from kvkit.lab.simulate.traces import Request, Trace, mixed
from kvkit.settings import read_toml

MACHINE = RESULTS / "amd-epyc-2-cores.json"
ENGINES = 10, 100, 1000
PER_HOST, POPULATION, REQUESTS = 8, 10, 150
"""Engines of a host, engines for which there is a population, and the requests of one."""
MEMORY, DISK, STORE = 2 << 30, 16 << 30, 16 << 30
"""Bytes for each engine, in whatever place there is: as little as the trace is short."""
LAYOUTS = {
    "memory of each engine": ("memory",),
    "a pool for each host": ("pool",),
    "and a disk for each host": ("pool", "disk"),
    "and a store for all, no disk": ("pool", "store"),
}


def speeds(machine: Path = MACHINE) -> dict[str, dict[str, Any]]:
    """Bandwidth of each tier, bytes a second, as measured."""
    found = {entry["name"]: entry for entry in json.loads(machine.read_text())["results"]}
    hits = found["shm::hits[1]"]
    return {
        "memory": {"bandwidth": int(hits["bytes"] / hits["memory"]["us"] * 1e6)},
        "pool": {"bandwidth": int(hits["bytes"] / hits["shm"]["us"] * 1e6)},
        "disk": {"bandwidth": int(32 * (6 << 20) / found["tiers::read[6MiB-cold]"]["min_s"])},
        "store": {"bandwidth": int(4 * (32 << 20) / found["s3::get[4x32MiB-obstore]"]["min_s"])},
    }


def fleet(engines: int, layout: Sequence[str], given: Mapping[str, Any]) -> SimulationConfig:
    """So many engines with these tiers; `given` says otherwise what it says."""
    tiers = {
        "memory": {"capacity": MEMORY, "in_memory": True},
        "pool": {"capacity": MEMORY * PER_HOST, "in_memory": True, "scope": "host"},
        "disk": {"capacity": DISK * PER_HOST, "scope": "host"},
        "store": {"capacity": STORE * engines, "scope": "shared"},
    }
    chosen = {name: tiers[name] | speeds()[name] | given.get("tiers", {}).get(name, {}) for name in layout}
    nodes = {"both": engines, "per_host": PER_HOST} | given.get("nodes", {})
    return SimulationConfig.model_validate({**given, "nodes": nodes, "tiers": chosen})


def traffic(engines: int) -> Trace:
    """What so many engines are asked: a population for each ten of them."""
    populations = [mixed(REQUESTS, seed) for seed in range(max(1, engines // POPULATION))]
    requests = [_of(request, number) for number, p in enumerate(populations) for request in p.requests]
    return Trace(populations[0].block_tokens, tuple(sorted(requests, key=lambda r: r.timestamp_ms)))


def _of(request: Request, population: int) -> Request:
    """A request as that of one population: others share nothing with it."""
    chunks = tuple(f"{population}-{chunk}" for chunk in request.chunks)
    return replace(request, session=f"{population}-{request.session}", chunks=chunks)


def measure(engines: int, layout: str, trace: Trace, given: Mapping[str, Any]) -> dict[str, Any]:
    """One layout of one fleet: what was hit and how long that took, and bytes a second of each tier."""
    config = fleet(engines, LAYOUTS[layout], given)
    began = time.perf_counter()
    report: Report = simulate(trace, config)
    seconds = (trace.requests[-1].timestamp_ms - trace.requests[0].timestamp_ms) / 1000
    return {
        "engines": engines,
        "layout": layout,
        "requests": report.requests,
        "seconds": seconds,
        "simulated_in_s": time.perf_counter() - began,
        "hit_rate": report.hit_rate,
        "hits": {t: report.hit_tokens[t] / report.prompt_tokens for t in config.tiers},
        "computed_share": report.computed_tokens / report.prompt_tokens,
        "busy": report.computed_tokens / config.model.prefill_tokens_per_s / seconds / engines,
        "read_bytes_per_s": {t: report.read_bytes[t] / seconds for t in config.tiers},
        "written_bytes_per_s": {t: report.written_bytes[t] / seconds for t in config.tiers},
        "peak_bytes": {t: report.peak_bytes.get(t, 0) for t in config.tiers},
        "ttft_s": summary(report.ttft_s),
        "cost_per_month": report.cost_per_month,
    }


def main() -> None:
    """Every layout of every fleet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--config", type=Path, help="settings as `kvkit simulate` has them, speeds and prices"
    )
    parser.add_argument("--engines", nargs="+", type=int, default=ENGINES)
    arguments = parser.parse_args()
    given = read_toml(arguments.config) if arguments.config else {}
    runs = []
    for engines in arguments.engines:
        trace = traffic(engines)
        for layout in LAYOUTS:
            runs.append(measure(engines, layout, trace, given))
            print(json.dumps(runs[-1]), flush=True)
            if arguments.json:
                told = {"speeds": speeds(), "given": given, "per_host": PER_HOST, "runs": runs}
                document = about("python -m benchmarks.research.fleet", seed=0) | told
                arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
