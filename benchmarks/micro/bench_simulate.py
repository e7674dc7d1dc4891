"""The simulator's speed against a bare dict, and eviction policies compared on traces.

python -m benchmarks.micro.bench_simulate [Mooncake's traces] writes results/simulate.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from benchmarks.folders import RESULTS, ROOT
from kvkit.lab.files import about
from kvkit.lab.simulate.config import SimulatedTier, SimulationConfig
from kvkit.lab.simulate.model import simulate
from kvkit.lab.simulate.traces import GENERATORS, Trace, mixed, read_trace
from kvkit.tiers.eviction.plugins import POLICIES

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
SEEDS = (0, 1, 2)
REQUESTS = 2000
EXAMPLE = ROOT / "benchmarks" / "traces" / "mixed.jsonl"
WRITTEN = RESULTS / "simulate.json"


def lookups(trace: Trace) -> int:
    return sum(request.prompt_chunks for request in trace.requests)


def distinct(trace: Trace) -> int:
    return len({chunk for request in trace.requests for chunk in request.chunks})


def limited(trace: Trace, *shares: float, **settings: Any) -> SimulationConfig:
    """Tiers that hold these shares of the trace's distinct chunks."""
    chunk_bytes = trace.block_tokens * SimulationConfig().model.kv_bytes_per_token
    sizes = [ByteSize(max(8, int(distinct(trace) * share)) * chunk_bytes) for share in shares]
    return SimulationConfig(
        tiers={f"tier{i}": SimulatedTier(capacity=s, **settings) for i, s in enumerate(sizes)}
    )


def bare(trace: Trace) -> int:
    """The least that a simulator does: a look at a dict per chunk, and an entry."""
    held: dict[str, int] = {}
    found = 0
    for request in trace.requests:
        for chunk in request.chunks[: request.prompt_chunks]:
            found += chunk in held
        for chunk in request.chunks:
            held[chunk] = found
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_lookups(benchmark: Any, policy: str) -> None:
    """Two tiers that hold a tenth and a half of what the trace has, each full most of the time."""
    trace = mixed(2000 if benchmark.enabled else 50)
    config = limited(trace, 0.1, 0.5, eviction=policy)
    began = time.perf_counter()
    assert bare(trace) > 0
    bare_s = time.perf_counter() - began
    report = benchmark.pedantic(simulate, (trace, config), rounds=3 if benchmark.enabled else 1)
    assert report.chunk_lookups == lookups(trace)
    if benchmark.enabled:
        seconds = benchmark.stats.stats.min
        benchmark.extra_info.update(
            chunk_lookups=lookups(trace),
            chunk_lookups_per_s=lookups(trace) / seconds,
            against="a bare dict",
            ratio_min=seconds / bare_s,
        )


def test_reading(benchmark: Any, tmp_path: Path) -> None:
    """A million requests in Mooncake's format, five blocks on average, of which two are known."""
    path = tmp_path / "trace.jsonl"
    requests = 1_000_000 if benchmark.enabled else 100
    with path.open("w") as file:
        for number in range(requests):
            talk, turn = divmod(number, 3)
            ids = [talk * 9 + i for i in range(2 + 3 * turn)]
            line = {"timestamp": number, "input_length": 512 * len(ids), "output_length": 99, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    read = benchmark.pedantic(read_trace, (path,), rounds=3 if benchmark.enabled else 1)
    assert len(read.requests) == requests
    began = time.perf_counter()
    with path.open("rb") as lines:
        assert sum(len(json.loads(line)["hash_ids"]) for line in lines) == lookups(read)
    bare_s = time.perf_counter() - began
    if benchmark.enabled:
        benchmark.extra_info.update(
            requests=requests, against="json.loads of each line", ratio_min=benchmark.stats.stats.min / bare_s
        )


def traces(paths: list[str]) -> Iterator[tuple[str, int, Trace]]:
    for name, make in GENERATORS.items():
        for seed in SEEDS:
            yield name, seed, make(REQUESTS, seed)
    yield "traces/mixed.jsonl", 0, read_trace(EXAMPLE)
    for path in paths:
        yield f"Mooncake, {Path(path).stem.removesuffix('_trace')}", 0, read_trace(path)


def main() -> None:
    """Hit rates of one tier by policy and by the share of distinct chunks that it holds."""
    runs = []
    for name, seed, trace in traces(sys.argv[1:]):
        for share in SHARES:
            for policy in POLICIES:
                report = simulate(trace, limited(trace, share, eviction=policy))
                runs.append(
                    {
                        "trace": name,
                        "seed": seed,
                        "share": share,
                        "policy": policy,
                        "hit_rate": round(report.hit_rate, 5),
                    }
                )
            print(
                name, seed, share, *(f"{run['hit_rate']:.3f}" for run in runs[-len(POLICIES) :]), flush=True
            )
    command = "python -m benchmarks.micro.bench_simulate conversation_trace.jsonl synthetic_trace.jsonl"
    document = about(command, SEEDS) | {
        "requests": REQUESTS,
        "shares": SHARES,
        "policies": list(POLICIES),
        "runs": runs,
    }
    WRITTEN.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
