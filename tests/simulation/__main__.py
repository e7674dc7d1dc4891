"""`python -m simulation`: run seeds; print those that find something, with their stories; exit status 1."""

from __future__ import annotations

import argparse
import os
import sys
import time

from simulation.lives import SCENARIOS, failure_of, live, story
from simulation.scheduler import Carriers


def main() -> int:
    """Run what the command line asks for; 1 where a seed found something."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many, over all scenarios")
    parser.add_argument("--first", type=int, default=0, help="the first of each scenario")
    parser.add_argument("--scenario", choices=[*SCENARIOS], action="append", help="only this one")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument("--story", action="store_true", help="print the story of the first seed as well")
    asked = parser.parse_args()
    names = asked.scenario or list(SCENARIOS)
    carriers, failed, began, done = Carriers(), 0, time.monotonic(), 0
    for seed in range(asked.first, asked.first + -(-asked.seeds // len(names))):
        for name in names:
            failure = failure_of(name, seed, live(name, seed, carriers))
            done += 1
            if failure is not None or asked.story:
                print(story(live(name, seed, carriers, traced=True)))
            if failure is not None:
                print(failure)
                failed += 1
        if failed >= asked.failures or asked.story:
            break
    print(f"{done} seeds in {time.monotonic() - began:.1f} s: {failed} found something")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of an interleaving
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    sys.exit(main())
