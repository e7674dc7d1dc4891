"""File of the compile gate's records of each kernel, and the regressions since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kvkit.kernels.tuning.assembly import Compiled

SLACK = 1.02
"""Factor above which a figure counts as worse."""

_LESS = ("per_line", "per_mma", "predicted_us")
_MORE = ("blocks_per_sm", "in_flight")
_MORE_ALIKE = ("loads_16", "stores_16")  # with equal tiles

Document = Mapping[str, Any]
"""Reports as made by `report.as_json`."""


def _listed(document: Document) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {(e["problem"], e["kernel"], e["target"]): e for e in document["kernels"]}


def known_of(recorded: Document) -> dict[str, Compiled]:
    """Return compiled kernels by `keys.compile_key`, without those that failed or have a hazard."""
    names = [field.name for field in fields(Compiled) if field.default is MISSING]
    right = (entry for entry in recorded["kernels"] if not entry.keys() & {"error", "hazard"})
    return {e["key"]: Compiled(**{name: e[name] for name in names}) for e in right if "key" in e}


def regressions(found: Document, recorded: Document, complete: bool = True) -> list[str]:
    """Return what is worse than recorded, one line each.

    Kernels that are not recorded are named and, with `complete`, those that are gone. Figures are compared
    only for equal versions of Triton, because another version makes other instructions of the same kernels.
    """
    now, before = _listed(found), _listed(recorded)
    worse = [f"{', '.join(key)}: not recorded" for key in now.keys() - before.keys()]
    worse += [f"{', '.join(key)}: recorded, but gone" for key in before.keys() - now.keys() if complete]
    worse.sort()
    if found["triton"] != recorded["triton"]:
        return worse
    for key in now:
        for words in _worse(now[key], before.get(key, {})):
            worse.append(f"{', '.join(key)}: {words}")
    return worse


def _worse(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    alike = now["config"] == before.get("config")
    less = _LESS if any(name in before for name in _LESS[:2]) or not alike else (*_LESS, "instructions")
    found = [
        f"{name} is {now[name]:g}, was {before[name]:g}"
        for name in less
        if name in now and name in before and now[name] > SLACK * before[name]
    ]
    for name in (*_MORE, *_MORE_ALIKE) if alike else _MORE:
        if name in now and name in before and now[name] < before[name]:
            detail = f" ({now['registers']} registers, were {before['registers']})"
            found.append(f"{name} is {now[name]}, was {before[name]}{detail * (name == 'blocks_per_sm')}")
    return found


def write(path: Path, found: Document, complete: bool = True) -> None:
    """Record a document in a file, one line per kernel. Without `complete`, other kernels stay.

    Raises:
        ValueError: the document is not complete, and the file is of another version of Triton.
        OSError: the file cannot be read or written.
    """
    kernels = _listed(found)
    if not complete:
        recorded = json.loads(path.read_text())
        if recorded["triton"] != found["triton"]:
            raise ValueError(
                f"{path} is of Triton {recorded['triton']}, this is {found['triton']}: record all of it"
            )
        kernels = _listed(recorded) | kernels
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in kernels.values())
    path.write_text(f'{{\n "triton": {json.dumps(found["triton"])},\n "kernels": [\n{lines}\n ]\n}}\n')
