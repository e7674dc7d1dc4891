"""`python -m histories`: real processes over shared stores, killed, stopped and cut off."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from histories.defects import DEFECTS
from histories.history import counted, findings
from histories.network import Host, lacking
from histories.run import run, warm_up
from histories.setups import HOSTS, SETUPS


def main() -> int:
    """Run what the command line asks for; 1 where a run found something, or none found a planted defect."""
    parser = argparse.ArgumentParser(prog="python -m histories", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="over all set-ups, or for each defect")
    parser.add_argument("--each", type=float, default=3.0, help="how long one run lasts, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--setup", choices=[*SETUPS], action="append", help="only this one")
    parser.add_argument("--defects", nargs="*", metavar="WORDS", help="plant these (none given: all) in turn")
    parser.add_argument("--keep", type=Path, help="a folder for the histories of runs that found something")
    asked = parser.parse_args()
    warm_up()
    why = lacking()
    if why is not None:
        print(f"no link is cut: {why}")
    hosts = [] if why is not None else [Host(number) for number in range(HOSTS)]
    if asked.defects is None:
        return int(bool(_play(asked, asked.setup or [*SETUPS], hosts)))
    missed = 0
    for what, defect in DEFECTS.items():
        if asked.defects and not any(words in what for words in asked.defects):
            continue
        found = _play(asked, [defect.setup], hosts, defect.plant)
        print(f"{'found' if found else 'missed'}: {what}", flush=True)
        missed += not found
    return int(missed > 0)


def _play(
    asked: argparse.Namespace,
    names: Sequence[str],
    hosts: Sequence[Host],
    plant: Callable[[], object] | None = None,
) -> int:
    """Run set-ups in turn, each at least once and for so long; how many runs found something.

    With a defect planted, until one run did.
    """
    began, runs, failed = time.monotonic(), 0, 0
    while (runs < len(names) or time.monotonic() - began < asked.seconds) and not (plant and failed):
        name, seed = names[runs % len(names)], asked.seed + runs
        with tempfile.TemporaryDirectory(prefix="kvkit-histories-") as scratch:
            history = run(name, asked.each, seed, Path(scratch), hosts, plant)
            found = findings(history)
            counts = ", ".join(f"{count} {what}" for what, count in counted(history).items())
            print(f"{name}, seed {seed}: {len(history.notes)} processes, {counts}", flush=True)
            for what in found[: 1 if plant else None]:
                print(f"{name}, seed {seed}: {what}", flush=True)
            if found and asked.keep is not None:
                Path(scratch).rename(asked.keep / f"{name}-{seed}")
                Path(scratch).mkdir()
        failed += bool(found)
        runs += 1
    print(f"{runs} runs in {time.monotonic() - began:.1f} s: {failed} found something", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
