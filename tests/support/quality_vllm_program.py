"""The measurement in a process with vLLM of tests/lab/test_quality_vllm.py, printed last, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.lab.quality import comparison as quality
from kvkit.lab.quality.in_vllm import EngineJudge
from kvkit.lab.quality.methods import method_named


def measure(model: str, kept: str, lead: str, sizes: str, *names: str) -> Any:
    """Return what `quality.run` measures with `lead` tokens before every text, and of a system prompt.

    `sizes`, as JSON, are its arguments.
    """
    methods = {name: method_named(name) for name in names}
    judge = EngineJudge(model, methods)
    judge.lead, judge.system = np.split(np.arange(2 * int(lead), dtype=np.int32), 2)
    found = list(quality.run(judge, judge.encode, Path(kept), methods=methods, **json.loads(sizes)))
    judge.close()
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(measure(*sys.argv[1:])))
