"""What snapshots of a hybrid model's states take and bring, by which are stored: simulated.

python -m benchmarks.research.snapshots writes results/snapshots.json.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.folders import RESULTS
from kvkit.lab.files import about
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.report import compare
from kvkit.lab.simulate.traces import agents, chat, rag

REQUESTS, BLOCK_TOKENS = 2000, 544
EVERY = (1, 4, 16, 0)
MODEL = {"kv_bytes_per_token": 24_576, "state_bytes": 36 * 1_097_728}
"""Of Qwen3-Next-80B: 12 layers of 2 heads of 256; 36 of 32 states [128, 128] and 3 inputs of 8,192."""
CAPACITY = 32 << 30
WRITTEN = RESULTS / "snapshots.json"


def main() -> None:
    """Bytes written, and hit rates without a limit and with one."""
    runs: list[dict[str, Any]] = []
    free, full = (
        SimulationConfig.model_validate({"model": MODEL, "tiers": {"disk": {"capacity": capacity}}})
        for capacity in (None, CAPACITY)
    )
    for make in (chat, rag, agents):
        trace = make(REQUESTS, 0, BLOCK_TOKENS)
        for all_kept, limited in zip(
            compare(trace, free, snapshots=EVERY), compare(trace, full, snapshots=EVERY), strict=True
        ):
            runs.append(
                {
                    "trace": make.__name__,
                    "snapshot_every": all_kept.snapshot_every,
                    "written_bytes": all_kept.report.written_bytes["disk"],
                    "hit_rate": round(all_kept.report.hit_rate, 5),
                    "limited_hit_rate": round(limited.report.hit_rate, 5),
                }
            )
            print(runs[-1], flush=True)
    document = about("python -m benchmarks.research.snapshots", seed=0) | {
        "requests": REQUESTS,
        "block_tokens": BLOCK_TOKENS,
        "model": MODEL,
        "capacity_bytes": CAPACITY,
        "runs": runs,
    }
    WRITTEN.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
