"""List the files of results/: what makes each, how long that takes, and which code it measures.

The list is registry.toml. The file of `make bench` has an entry for each file of benchmarks, of its part.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.folders import RESULTS, ROOT
from benchmarks.report.spec import BENCHMARKS, MACHINE


@dataclass(frozen=True, slots=True)
class Result:
    """A file of results, or the part of one that a benchmark writes.

    Args:
        file: its name; {machine} is the machine's.
        minutes: that its command takes, an estimate.
        command: makes it again; {json} is `--json` and the path. "": nothing in the repository does.
        measures: paths of the code that it measures, in the repository.
        part: of the names of the file's entries, before "::"; "": all of the file.
    """

    file: str
    minutes: float
    command: str
    measures: tuple[str, ...]
    part: str = ""

    def path(self, folder: Path = RESULTS, machine: str = MACHINE) -> Path:
        """Return the path of its file."""
        return folder / self.file.format(machine=machine)

    def command_for(self, path: Path) -> str:
        """The command that writes it to `path`; those without {json} know where to write."""
        return self.command.replace("{json}", f"--json {path}")


def registered(path: Path) -> dict[str, Result]:
    """All results by name, as `make results` calls them."""
    return dict(_results(tomllib.loads(path.read_text())))


def _results(found: dict[str, Any]) -> Iterator[tuple[str, Result]]:
    for name, (file, minutes, command, measures) in found["results"].items():
        yield name, Result(file, minutes, command, _paths(measures))
    prove = found["prove"]
    for name in prove["names"]:
        command = f"python -m benchmarks.serving.prove_peers {name}"
        file = f"prove-{name.lower()}"
        yield file, Result(f"{file}.json", prove["minutes"], command, _paths(prove["measures"]))
    for name, (minutes, measures) in found["micro"].items():
        command = f"python -m benchmarks.report.run benchmarks/micro/bench_{name}.py"
        yield f"micro/{name}", Result(BENCHMARKS, minutes, command, _paths(measures), name)


def _paths(measures: str) -> tuple[str, ...]:
    whole = (ROOT / "kvkit" / path for path in measures.split())
    return tuple(str(path.resolve().relative_to(ROOT.resolve())) for path in whole)  # as git knows them


REGISTERED = registered(Path(__file__).with_suffix(".toml"))
