"""Keep what `make gpu` found, as one document: python -m benchmarks.gpu.keep results.jsonl...

Writes benchmarks/results/gpu-<gpu>.json, or what --json names. Of files of several runs on one GPU the later
ones count, for each thing that a step measured; configurations that nobody tried are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.folders import RESULTS
from kvkit.environment import slug_of


def merged(files: list[Path]) -> dict[str, Any]:
    """The document of some runs' results.

    Raises:
        ValueError: they are of several GPUs, or of none, or no file has the step that names the machine.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    gpus = set()
    for path in files:
        here: dict[tuple[str, str], list[dict[str, Any]]] = {}
        with path.open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                gpus |= {line.pop("gpu")} if "gpu" in line else set()
                if _counts(line):
                    here.setdefault((line["step"], line["what"]), []).append(_slim(line))
        found |= here
    if len(gpus) != 1:
        raise ValueError(f"results of {sorted(gpus)}: want those of one GPU")
    if ("driver", "machine") not in found:
        raise ValueError('no "machine" of the step "driver" in these files: name that of a whole run first')
    (machine,) = found.pop(("driver", "machine"))
    lines = [_rounded(line) for lines in found.values() for line in lines]
    lines = [_without_commit(line, machine.get("commit")) for line in lines]
    about = {name: machine.get(name) for name in ("command", "seed", "commit", "machine", "versions")}
    return about | {"driver": machine["nvidia_smi"], "target": machine["target"], "results": lines}


def _without_commit(line: dict[str, Any], commit: str | None) -> dict[str, Any]:
    """Leave out the commit of a line that is the whole document's."""
    return {name: value for name, value in line.items() if (name, value) != ("commit", commit)}


def _counts(line: Mapping[str, Any]) -> bool:
    """A trial is in its problem's own line, too."""
    return line["what"] != "ended" and (line["step"] != "tune" or line.get("state") == "tuned")


def _slim(line: Mapping[str, Any]) -> dict[str, Any]:
    slim = {name: value for name, value in line.items() if name != "printed"}
    if "trials" in line:
        slim["trials"] = [trial for trial in line["trials"] if trial["us"] is not None]
    return slim


def _rounded(value: Any) -> Any:
    """To four digits: more are noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def main() -> None:
    """Write the document of the files that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="results.jsonl of one run after another")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu-<gpu>.json")
    given = parser.parse_args()
    try:
        document = merged(given.files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    path = given.json or RESULTS / f"gpu-{slug_of(document['machine']['gpu'])}.json"
    lines = ",\n".join(f"  {json.dumps(line, ensure_ascii=False)}" for line in document.pop("results"))
    head = json.dumps(document, indent=1, ensure_ascii=False).removesuffix("\n}")
    path.write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n')
    print(path)


if __name__ == "__main__":
    main()
