"""Simulations side by side: eviction policies and capacities compared, as a table, JSON and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.table import Table

from kvkit.simulate.config import SimulationConfig
from kvkit.simulate.errors import SimulationError
from kvkit.simulate.model import Report, simulate
from kvkit.simulate.traces import Trace
from kvkit.tiers.eviction.policies import POLICIES

_BYTES = TypeAdapter(Annotated[ByteSize, Field(gt=0)])


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One simulation.

    Attributes:
        policy: the eviction policy of every tier; None: what each tier has set.
        capacity_bytes: of the tier that is swept; None without a sweep.
    """

    policy: str | None
    capacity_bytes: int | None
    report: Report


def compare(
    trace: Trace,
    config: SimulationConfig,
    policies: Sequence[str] = (),
    sweep: tuple[str, Sequence[int]] | None = None,
) -> list[SimulatedRun]:
    """Simulate every policy (none: as configured) at every capacity of a tier (none: as configured).

    Args:
        sweep: a tier and its capacities in bytes.

    Raises:
        SimulationError: there is no such policy or tier.
    """
    for name in policies:
        if name not in POLICIES:
            raise SimulationError(f"compare = {name!r}: want some of {', '.join(POLICIES)}")
    runs = []
    everyone: Sequence[str | None] = policies or [None]
    for policy in everyone:
        everywhere = {name: {"eviction": policy} for name in config.tiers} if policy else {}
        chosen = config.with_tiers(everywhere)
        if sweep is None:
            runs.append(SimulatedRun(policy, None, simulate(trace, chosen)))
            continue
        tier, capacities = sweep
        for capacity in capacities:
            sized = chosen.with_tiers({tier: {"capacity": capacity}})
            runs.append(SimulatedRun(policy, capacity, simulate(trace, sized)))
    return runs


def default_sweep(config: SimulationConfig) -> tuple[str, list[int]]:
    """The first limited tier, from an eighth of its capacity to twice it.

    Raises:
        SimulationError: no tier has a capacity.
    """
    for name, tier in config.tiers.items():
        if tier.capacity is not None:
            return name, [max(1, int(tier.capacity * share)) for share in (0.125, 0.25, 0.5, 1, 2)]
    raise SimulationError("sweep: no tier has a capacity; name one, as in --sweep memory=4GiB,8GiB")


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Read "memory=4GiB,8GiB" as tier and bytes.

    Raises:
        SimulationError: it is not of this form.
    """
    tier, _, sizes = text.partition("=")
    try:
        capacities = [_BYTES.validate_python(size.strip()) for size in sizes.split(",")]
    except ValidationError as error:
        raise SimulationError(
            f"sweep = {text!r}: want TIER=SIZE,SIZE with sizes above 0, such as memory=4GiB,8GiB"
        ) from error
    return tier, [int(capacity) for capacity in capacities]


def as_json(run: SimulatedRun) -> dict[str, Any]:
    """A run as plain numbers; times are in seconds, the percentiles those of all requests."""
    report = run.report
    return {
        "policy": run.policy,
        "capacity_bytes": run.capacity_bytes,
        "requests": report.requests,
        "prompt_tokens": report.prompt_tokens,
        "hit_rate": report.hit_rate,
        "hit_tokens": dict(report.hit_tokens),
        "computed_tokens": report.computed_tokens,
        "decode_hit_tokens": dict(report.decode_hit_tokens),
        "read_bytes": dict(report.read_bytes),
        "written_bytes": dict(report.written_bytes),
        "write_back_bytes": dict(report.write_back_bytes),
        "handoff_bytes": report.handoff_bytes,
        "evicted_chunks": dict(report.evicted_chunks),
        "refused_chunks": dict(report.refused_chunks),
        "peak_bytes": report.peak_bytes,
        "ttft_s": summary(report.ttft_s),
        "wait_s": summary(report.wait_s),
        "cost_per_month": report.cost_per_month,
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile (nearest rank); zeros of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return {"mean": math.fsum(ordered) / len(ordered), "p50": rank(0.5), "p99": rank(0.99)}


def table(runs: Sequence[SimulatedRun], config: SimulationConfig, swept: str | None) -> Table:
    """Runs as rows."""
    tiers = list(config.tiers)
    handed_over = config.nodes.decode > 0
    priced = any(tier.price_per_gb_month for tier in config.tiers.values())
    head = ["eviction", *([swept] if swept else []), "hit rate", *(f"from {tier}" for tier in tiers)]
    head += [f"GB {way} {tier}" for tier in tiers for way in ("read", "written")]
    head += ["GB handed over"] if handed_over else []
    head += ["evicted", "TTFT mean", "p50", "p99", "wait p99", *(["cost/month"] if priced else [])]
    shown = Table(*head)
    for run in runs:
        found = as_json(run)
        row = [run.policy or ", ".join(dict.fromkeys(t.eviction for t in config.tiers.values()))]
        row += [ByteSize(run.capacity_bytes or 0).human_readable()] if swept else []
        row += [f"{found['hit_rate']:.1%}"]
        row += [f"{found['hit_tokens'].get(t, 0) / max(1, found['prompt_tokens']):.1%}" for t in tiers]
        row += [f"{found[way].get(t, 0) / 1e9:.1f}" for t in tiers for way in ("read_bytes", "written_bytes")]
        row += [f"{found['handoff_bytes'] / 1e9:.1f}"] if handed_over else []
        row += [f"{sum(found['evicted_chunks'].values()):,}"]
        row += [f"{found['ttft_s'][k]:.3f} s" for k in ("mean", "p50", "p99")]
        row += [f"{found['wait_s']['p99']:.1f} s"]
        row += [f"{sum(found['cost_per_month'].values()):,.2f}"] if priced else []
        shown.add_row(*row)
    return shown


def plot(runs: Sequence[SimulatedRun], swept: str, path: Path) -> None:
    """Hit rates against the capacity of the tier that was swept, as a PNG: a line per policy for the hits of
    that tier, and a dashed one for those of all tiers.

    Raises:
        SimulationError: matplotlib is not installed, or the picture cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SimulationError(f"--png takes matplotlib: pip install 'kvkit[simulate]' ({error})") from error
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.8), constrained_layout=True)
    for policy in dict.fromkeys(run.policy for run in runs):
        mine = [run for run in runs if run.policy == policy]
        sizes = [(run.capacity_bytes or 0) / 2**30 for run in mine]
        share = [r.hit_tokens[swept] / max(1, r.prompt_tokens) for r in (run.report for run in mine)]
        (line,) = axes.plot(sizes, share, marker="o", label=policy or "as configured")
        axes.plot(sizes, [run.report.hit_rate for run in mine], "--", color=line.get_color(), alpha=0.5)
    axes.set(
        xscale="log", xlabel=f"capacity of {swept}, GiB", ylabel=f"prompt tokens from {swept} (dashed: all)"
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise SimulationError(f"{path}: {error}") from error
    finally:
        plt.close(figure)
