"""Comparisons of eviction policies, capacities and snapshots, as a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from pydantic import ByteSize, Field, TypeAdapter, ValidationError
from rich.markup import escape
from rich.table import Column, Table

from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import Report, Simulator, simulate
from kvkit.lab.simulate.optimum import most_hits
from kvkit.lab.simulate.traces import Trace
from kvkit.settings import ConfigError
from kvkit.tiers.eviction.plugins import check_policy

_BYTES = TypeAdapter(Annotated[ByteSize, Field(gt=0)])


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One simulation."""

    policy: str | None  # eviction policy of every tier; None: each tier's own
    capacity_bytes: int | None  # of the swept tier; None without a sweep
    snapshot_every: int | None  # None: as configured
    report: Report
    hit_rate_bound: float  # highest hit rate of any eviction policy with the room of all tiers together

    @property
    def share_of_bound(self) -> float:
        """The hit rate as a share of its bound."""
        return self.report.hit_rate / self.hit_rate_bound if self.hit_rate_bound else 1.0

    @property
    def label(self) -> str:
        """The choices of this run, except the capacity."""
        every = "" if self.snapshot_every is None else f"snapshot_every = {self.snapshot_every}"
        return ", ".join(filter(None, (self.policy, every))) or "as configured"


def compare(
    trace: Trace,
    config: SimulationConfig,
    policies: Sequence[str] = (),
    sweep: tuple[str, Sequence[int]] | None = None,
    snapshots: Sequence[int] = (),
) -> list[SimulatedRun]:
    """Simulate every combination of policies, snapshots and capacities of a tier.

    Args:
        policies: names of eviction policies for all tiers; none: as configured.
        sweep: a tier and its capacities in bytes; None: as configured.
        snapshots: values of `snapshot_every`; none: as configured.

    Raises:
        ConfigError: there is no such policy or tier, a policy failed, or the model has no states.
    """
    if snapshots and not config.model.state_bytes:
        raise ConfigError("snapshots: the model has no states; want model.state_bytes above 0")
    for name in policies:
        try:
            check_policy(name)
        except ValueError as error:
            raise ConfigError(f"compare = {name!r}: {error}") from error
    policy_choices: Sequence[str | None] = policies or [None]
    tier, capacities = sweep or ("", (None,))
    optimal_tokens = cache(lambda room: most_hits(trace, room) * trace.block_tokens)
    runs = []
    for policy, snapshot_every, capacity in product(policy_choices, snapshots or (None,), capacities):
        chosen = config.with_tiers({name: {"eviction": policy} for name in config.tiers} if policy else {})
        sized = chosen if capacity is None else chosen.with_tiers({tier: {"capacity": capacity}})
        if snapshot_every is not None:
            model = sized.model.model_copy(update={"snapshot_every": snapshot_every})
            sized = sized.model_copy(update={"model": model})
        report = simulate(trace, sized)
        bound = optimal_tokens(Simulator(sized, trace.block_tokens).room) / max(1, report.prompt_tokens)
        runs.append(SimulatedRun(policy, capacity, snapshot_every, report, bound))
    return runs


def default_sweep(config: SimulationConfig) -> tuple[str, list[int]]:
    """Sweep the first limited tier, from an eighth of its capacity to twice its capacity.

    Raises:
        ConfigError: no tier has a capacity.
    """
    for name, tier in config.tiers.items():
        if tier.capacity is not None:
            return name, [max(1, int(tier.capacity * share)) for share in (0.125, 0.25, 0.5, 1, 2)]
    raise ConfigError("sweep: no tier has a capacity; name one, as in --sweep memory=4GiB,8GiB")


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Parse "memory=4GiB,8GiB" to a tier and its capacities in bytes.

    Raises:
        ConfigError: the text is not in this format.
    """
    tier, _, sizes = text.partition("=")
    try:
        capacities = [_BYTES.validate_python(size.strip()) for size in sizes.split(",")]
    except ValidationError as error:
        raise ConfigError(
            f"sweep = {text!r}: want TIER=SIZE,SIZE with sizes above 0, such as memory=4GiB,8GiB"
        ) from error
    return tier, [int(capacity) for capacity in capacities]


def parse_snapshots(text: str) -> list[int]:
    """Parse "1,4,0" to values of `snapshot_every`; an empty text gives none.

    Raises:
        ConfigError: the text is not in this format.
    """
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not all(value.isdecimal() for value in values):
        raise ConfigError(f"snapshots = {text!r}: want whole numbers from 0 on, such as 1,4,0")
    return [int(value) for value in values]


def as_json(run: SimulatedRun) -> dict[str, Any]:
    """Return a run as plain numbers; times are in seconds, percentiles are over all requests."""
    report = run.report
    return {
        "policy": run.policy,
        "capacity_bytes": run.capacity_bytes,
        "snapshot_every": run.snapshot_every,
        "hit_rate": report.hit_rate,
        "hit_rate_bound": run.hit_rate_bound,
        "share_of_bound": run.share_of_bound,
        **{field.name: getattr(report, field.name) for field in fields(report)},
        "ttft_s": summary(report.ttft_s),
        "wait_s": summary(report.wait_s),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median and 99th percentile (nearest rank); zeros without values."""
    p50, p99 = np.percentile(values or [0.0], [50, 99], method="inverted_cdf").tolist()
    return {"mean": fmean(values or [0.0]), "p50": p50, "p99": p99}


def notes(trace: Trace, name: str) -> Iterator[str]:
    """Yield notes on the trace that explain the figures."""
    if not trace.prefixes_known:
        yield (
            f"{name} has only the lengths of requests: no request is known to share a prefix with another, "
            "so there are no hits. Bytes and times are without reuse; eviction policies do not differ."
        )
    if trace.failed:
        yield f"{trace.failed:,} requests of {name} failed, with no answer, and are left out."


def table(runs: Sequence[SimulatedRun], config: SimulationConfig, swept: str | None, wide: bool) -> Table:
    """Build a row per run: hits, TTFT and cost; with `wide` also bytes, evictions and waits."""
    chosen = [list(_choices(run, config, swept)) for run in runs]
    results = [list(_figures(run, config, wide)) for run in runs]
    numbers = (Column(head, justify="right") for head, _ in results[0])
    shown = Table(*(head for head, _ in chosen[0]), *numbers)
    for choices, figures in zip(chosen, results, strict=True):
        shown.add_row(*(escape(text) for _, text in (*choices, *figures)))
    return shown


def _choices(run: SimulatedRun, config: SimulationConfig, swept: str | None) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of each column with a choice of the run."""
    yield "eviction", run.policy or ", ".join(dict.fromkeys(t.eviction for t in config.tiers.values()))
    if swept:
        yield swept, ByteSize(run.capacity_bytes or 0).human_readable()
    if run.snapshot_every is not None:
        yield "snapshots", f"every {run.snapshot_every}" if run.snapshot_every else "prompts' ends"


def _figures(run: SimulatedRun, config: SimulationConfig, wide: bool) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of each column with a result of the run."""
    report, tiers = run.report, config.tiers
    yield "hit rate", f"{report.hit_rate:.1%}"
    yield "of the optimum", f"{run.share_of_bound:.1%}" if run.hit_rate_bound else "no hits possible"
    for tier in tiers:
        yield f"from {tier}", f"{report.hit_tokens[tier] / max(1, report.prompt_tokens):.1%}"
    for tier in tiers if wide else ():
        yield f"GB read {tier}", f"{report.read_bytes[tier] / 1e9:.1f}"
        yield f"GB written {tier}", f"{report.written_bytes[tier] / 1e9:.1f}"
    if wide and config.nodes.decode:
        yield "GB handed over", f"{report.handoff_bytes / 1e9:.1f}"
    if wide:
        yield "chunks evicted", f"{report.evicted_chunks.total():,}"
    for name, value in summary(report.ttft_s).items():
        if wide or name != "p50":
            yield f"TTFT {name}", f"{value:.3f} s"
    if wide:
        yield "wait p99", f"{summary(report.wait_s)['p99']:.1f} s"
    if any(tier.price_per_gb_month for tier in tiers.values()):
        yield "cost/month", f"{sum(report.cost_per_month.values()):,.2f}"


def panels(count: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    """Make a matplotlib figure of `count` panels side by side, sizes in inches; return it and its panels.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--png needs matplotlib: pip install 'kvkit-llm[simulate]' ({error})") from error
    figure = Figure(figsize=(count * width, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def plot(runs: Sequence[SimulatedRun], swept: str, path: Path) -> None:
    """Plot hit rates against the capacity of the swept tier, as a PNG.

    A line per run label shows hits in that tier, a dashed line hits in all tiers. A dotted line shows the
    bound.

    Raises:
        ConfigError: matplotlib is not installed, or the picture cannot be written.
    """
    figure, (axes,) = panels(1, 6, 3.8)
    for label in dict.fromkeys(run.label for run in runs):
        label_runs = [run for run in runs if run.label == label]
        sizes = [(run.capacity_bytes or 0) / 2**30 for run in label_runs]
        share = [r.hit_tokens[swept] / max(1, r.prompt_tokens) for r in (run.report for run in label_runs)]
        (line,) = axes.plot(sizes, share, marker="o", label=label)
        axes.plot(sizes, [run.report.hit_rate for run in label_runs], "--", color=line.get_color(), alpha=0.5)
    axes.plot(sizes, [run.hit_rate_bound for run in label_runs], ":k", label="optimum, all tiers")
    axes.set(
        xscale="log", xlabel=f"capacity of {swept}, GiB", ylabel=f"prompt tokens from {swept} (dashed: all)"
    )
    axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
