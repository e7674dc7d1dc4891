"""Folders of the repository that benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""Quoted results, as JSON."""
