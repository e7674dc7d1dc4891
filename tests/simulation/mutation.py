"""`python -m simulation.mutation`: plant each defect of `simulation.mutants` in a copy; say what finds it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repository import ROOT, SUPPORT, TESTS

from kvkit.lab.files import about, commit
from simulation.lives import BUDGET
from simulation.mutant import Mutant
from simulation.mutants import MUTANTS

RESULTS = ROOT / "benchmarks" / "results" / "simulation-mutants.json"


def plant(mutant: Mutant, copy: Path) -> str:
    """Have a copy of the product contain one defect; the file as it was.

    Raises:
        ValueError: what is to be replaced is not there once: the product has changed.
    """
    file = copy / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.what}: {mutant.file} has {text.count(mutant.old)} places for it, want 1")
    file.write_text(text.replace(mutant.old, mutant.new))
    return text


def copied(folder: Path) -> Path:
    """The product, in a folder of its own."""
    ignored = shutil.ignore_patterns("__pycache__", "tuned")
    shutil.copytree(ROOT / "kvkit", folder / "kvkit", symlinks=False, ignore=ignored)
    return folder


def find(mutant: Mutant, copy: Path, seeds: int) -> tuple[int | None, str]:
    """The first seed that finds a defect, None if none does, and what it says."""
    file = copy / mutant.file
    before = plant(mutant, copy)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "simulation", "--scenario", mutant.scenario, "--seeds", str(seeds)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": f"{copy}:{TESTS}:{SUPPORT}", "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(before)
    found = re.search(rf"^{mutant.scenario}, seed (\d+): (.*)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or (found is None) != (run.returncode == 0):
        raise RuntimeError(f"{mutant.what}: {run.stdout[-500:]}{run.stderr[-2000:]}")
    return (None, "") if found is None else (int(found[1]), found[2])


def run(mutants: Sequence[Mutant], seeds: int | None = None, *, keep: bool = False) -> list[dict[str, Any]]:
    """A row for each: what it is, the first seed that finds it, and what that says; `keep`: in RESULTS."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for mutant in mutants:
            seed, says = find(mutant, copy, seeds or BUDGET[mutant.scenario])
            rows.append(
                {
                    "what": mutant.what,
                    "file": mutant.file,
                    "scenario": mutant.scenario,
                    "seed": seed,
                    "says": says,
                }
            )
            print(f"{'missed' if seed is None else f'seed {seed}':>12}  {mutant.what}", flush=True)
            if keep:
                record(rows[-1])
    return rows


def record(row: dict[str, Any]) -> None:
    """Put a row in the place of the one of before."""
    known = {before["what"]: before for before in json.loads(RESULTS.read_text())["mutants"]}
    known[row["what"]] = row | {"commit": commit()}
    every = [known[mutant.what] for mutant in MUTANTS if mutant.what in known]
    document = about("make simulate-mutants", seed=0) | {"budget": BUDGET, "mutants": every}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Run all, or those whose words contain what is asked for; 1 where one is not found."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutation", description=__doc__)
    parser.add_argument("--seeds", type=int, help="for each at most; default: as many as CI runs")
    parser.add_argument("--only", default="", help="words of the defect; the others' results stay")
    parser.add_argument("--scenario", choices=[*BUDGET], help="those of this one")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if asked.only in m.what and asked.scenario in (None, m.scenario)]
    rows = run(chosen, asked.seeds, keep=not asked.seeds)
    missed = [row for row in rows if row["seed"] is None]
    print(f"{len(rows) - len(missed)} of {len(rows)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
