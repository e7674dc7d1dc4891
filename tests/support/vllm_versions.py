"""The versions of vLLM that the tests ran with: a row of benchmarks/results/vllm-versions.json each."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from async_scheduling import ASKED
from repository import ROOT

from kvkit.lab.files import about, commit

RESULTS = ROOT / "benchmarks" / "results" / "vllm-versions.json"


def record(counts: Mapping[str, int], results: Path = RESULTS) -> None:
    """Put a row in the place of that with the same vLLM and scheduling. Mutates the file.

    Args:
        counts: tests by outcome: passed, failed, error.
    """
    import vllm

    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"runs": []}
    row = {
        "vllm": vllm.__version__,
        "build": "CPU" if Path(vllm.__file__).parents[1].name == "site-packages" else "Python files alone",
        "scheduling": "overlapping" if os.environ.get(ASKED) else "in turn",
        "runner": "V1",
        **{name: version(name) for name in ("torch", "transformers", "numba")},
        "commit": commit(),
        "day": _output("date", "+%F"),
        **counts,
    }
    kept = [one for one in found["runs"] if _which(one) != _which(row)]
    document = about("make test-vllm-versions") | {"runs": sorted([*kept, row], key=_which)}
    results.write_text(json.dumps(document, indent=1) + "\n")


def _which(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["vllm"], row["scheduling"]


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
