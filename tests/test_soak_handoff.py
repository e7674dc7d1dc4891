"""A short run of benchmarks/soak_handoff.py: nothing may be wrong."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak_handoff import Soak


def test_handoff_under_random_requests(tmp_path: Path) -> None:
    result = Soak(requests=120, seed=1, folder=tmp_path).run()
    assert result["wrong"] == []
    assert result["requests"] >= 120
    assert result["outcomes"]["done"] > 0
    assert sum(result["killed"].values()) > 0
