"""Record every trial of tuning this machine's CPU, for `kvkit tune replay` to compare strategies on.

    python -m benchmarks.research.tuning_trials --json FILE

The problems are kvkit's own of the CPU and those of `tuning_problems`. Each configuration is measured, in
the order of the strategy `nearest`; the file has a step "tune" for each problem, as those of GPUs do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.research.tuning_problems import problems as large_problems
from kvkit.kernels.tuning.devices import tools_here
from kvkit.kernels.tuning.problems import host_problems
from kvkit.kernels.tuning.search import SearchStep, tune
from kvkit.kernels.tuning.tables import build_of
from kvkit.lab.files import about


def rounded(number: float) -> float:
    """Round to four digits: more are noise."""
    return float(f"{number:.4g}")


def recorded(step: SearchStep) -> dict[str, Any]:
    """Return the entry of a problem, with the trials that ran."""
    problem, tuned = step.problem, step.tuned
    trials = [
        {
            "config": str(trial.config),
            "us": rounded(trial.us),
            "samples_us": [rounded(us) for us in trial.samples],
            "outcome": trial.outcome,
        }
        for trial in step.trials
        if trial.us is not None
    ]
    return {
        "step": "tune",
        "what": problem.name,
        **problem.bucket._asdict(),
        "source": build_of(problem.kernel, problem.host).source,
        "state": step.state,
        "config": tuned and str(tuned.config),
        "us": tuned and rounded(tuned.us),
        "trials": trials,
    }


def entries() -> Iterator[dict[str, Any]]:
    """Tune the problems, the large spaces first, and yield their entries."""
    with tempfile.TemporaryDirectory() as folder, tools_here(host=True) as tools:
        for step in tune([*large_problems(), *host_problems()], Path(folder), tools):
            yield recorded(step)


def main() -> None:
    """Write the document, a line for each problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    document = about("python -m benchmarks.research.tuning_trials", seed=0)
    lines = []
    for entry in entries():
        lines.append(f"  {json.dumps(entry, ensure_ascii=False)}")
        print(f"{entry['what']}: {len(entry['trials'])} trials, {entry['us']} µs", flush=True)
    head = json.dumps(document, indent=1, ensure_ascii=False).removesuffix("\n}")
    path.write_text(f'{head},\n "results": [\n' + ",\n".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    main()
