"""Reports of measurements by workload: tables, JSON and a picture."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from kvkit.lab.files import BenchError
from kvkit.lab.serve.client import Completion
from kvkit.lab.serve.workloads import CONTROL
from kvkit.lab.simulate.report import panels, summary


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of all rounds of one workload on one system."""

    system: str
    workload: str
    answers: tuple[Completion, ...]
    wall_s: float  # duration of all rounds
    hit_tokens: int | None  # prompt tokens not computed; None if the server does not report them

    def __add__(self, other: Measured) -> Measured:
        """Return the rounds of both as one measurement."""
        both_reported = self.hit_tokens is not None and other.hit_tokens is not None
        hits = (self.hit_tokens or 0) + (other.hit_tokens or 0) if both_reported else None
        answers, wall_s = self.answers + other.answers, self.wall_s + other.wall_s
        return Measured(self.system, self.workload, answers, wall_s, hits)


def summarise(measured: Measured) -> dict[str, Any]:
    """Return a measurement as plain numbers: times in seconds, over requests without an error.

    Percentiles are by nearest rank. `ttft_s` covers requests that a cache can help, `first_ttft_s` the
    others. `exact_answers` counts answers that begin with the exact answer; `judged_answers` counts requests
    with a known exact answer.
    """
    good = [answer for answer in measured.answers if answer.error is None]
    judged = [answer.exact for answer in good if answer.exact is not None]
    return {
        "system": measured.system,
        "workload": measured.workload,
        "requests": len(measured.answers),
        "errors": len(measured.answers) - len(good),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "hit_tokens": measured.hit_tokens,
        "output_tokens": sum(answer.output_tokens for answer in good),
        "exact_answers": sum(judged) if judged else None,
        "judged_answers": len(judged),
        "first_ttft_s": _spread([answer.ttft_s for answer in good if not answer.again]),
        "ttft_s": _spread([answer.ttft_s for answer in good if answer.again]),
        "gap_s": _spread(list(itertools.chain.from_iterable(answer.gaps_s for answer in good))),
        "wall_s": measured.wall_s,
        "requests_per_s": len(good) / measured.wall_s,
        "tokens_per_s": sum(a.prompt_tokens + a.output_tokens for a in good) / measured.wall_s,
    }


def overheads(found: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return the TTFT of each system relative to the first system, on the workload without reuse.

    Per system: the median and quartiles of the ratios of equal requests. Empty if that workload was not run.
    """
    control = [measured for measured in found if measured.workload == CONTROL]
    ratios = {}
    for measured in control[1:]:
        pairs = zip(measured.answers, control[0].answers, strict=True)
        request_ratios = [a.ttft_s / b.ttft_s for a, b in pairs if a.error is None and b.error is None]
        if len(request_ratios) > 1:
            low, middle, high = statistics.quantiles(request_ratios, method="inclusive")
            ratios[measured.system] = {"median": middle, "p25": low, "p75": high}
    return ratios


def as_json(found: Sequence[Measured]) -> dict[str, Any]:
    """Return summaries, overheads, and the figures of every request without its text."""
    answers = [
        {"system": m.system, "workload": m.workload}
        | {key: value for key, value in asdict(answer).items() if key not in ("text", "top")}
        for m in found
        for answer in m.answers
    ]
    return {"results": [summarise(m) for m in found], "overhead": overheads(found), "requests": answers}


def tables(found: Sequence[Measured]) -> list[Table]:
    """Return a table per workload, and one of the overheads if there are any."""
    made = []
    for workload in dict.fromkeys(measured.workload for measured in found):
        measurements = [measured for measured in found if measured.workload == workload]
        rows = [summarise(measured) for measured in measurements]
        judged = any(row["judged_answers"] for row in rows)
        columns = ("hit tokens", "first", "TTFT p50", "p99", "gap", "tokens/s")
        heads = [*columns, *(["exact"] if judged else [])]
        shown = Table("system", *(Column(head, justify="right") for head in heads), title=workload)
        for measured, row in zip(measurements, rows, strict=True):
            failed = f" ({row['errors']} failed)" if row["errors"] else ""
            share = "?" if row["hit_tokens"] is None else f"{row['hit_tokens']:,} of {row['prompt_tokens']:,}"
            shown.add_row(
                *(measured.system + failed, share, _seconds(row["first_ttft_s"], "p50")),
                *(_seconds(row["ttft_s"], "p50"), _seconds(row["ttft_s"], "p99")),
                *(_seconds(row["gap_s"], "p50"), f"{row['tokens_per_s']:,.0f}"),
                *([f"{row['exact_answers'] or 0} of {row['judged_answers']}"] if judged else []),
            )
        made.append(shown)
    ratios = overheads(found)
    if ratios:
        base = next(measured.system for measured in found if measured.workload == CONTROL)
        numbers = (Column(head, justify="right") for head in ("median", "quartiles"))
        overhead = Table("system", *numbers, title=f"TTFT without reuse / {base}'s")
        for system, ratio in ratios.items():
            overhead.add_row(system, f"{ratio['median']:.3f}", f"{ratio['p25']:.3f} – {ratio['p75']:.3f}")
        made.append(overhead)
    return made


def draw(found: Sequence[Measured], path: Path) -> None:
    """Draw the distribution of times to first token, a panel per workload and a line per system.

    Raises:
        BenchError: the picture cannot be written.
        ConfigError: matplotlib is not installed.
    """
    workloads = list(dict.fromkeys(measured.workload for measured in found))
    figure, all_axes = panels(len(workloads), 3.2, 3.2)
    for axes, workload in zip(all_axes, workloads, strict=True):
        for number, measured in enumerate(m for m in found if m.workload == workload):
            good = [answer for answer in measured.answers if answer.error is None]
            for again, style in ((False, ":"), (True, "-")):
                times = [answer.ttft_s for answer in good if answer.again == again]
                if times:
                    first = "" if again or workload == CONTROL else ", first"
                    axes.ecdf(times, ls=style, color=f"C{number}", label=measured.system + first)
        axes.set(title=workload, xlabel="time to first token, s")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    all_axes[0].set_ylabel("share of requests")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BenchError(str(error)) from error


def _spread(times: Sequence[float]) -> dict[str, float] | None:
    return summary(times) if times else None


def _seconds(spread: dict[str, float] | None, key: str) -> str:
    return "" if spread is None else f"{spread[key]:.3f} s"
