"""What benchmarks compared, above pytest-benchmark's table: each way's time and its ratio to roof or peer."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """A line for each way of each benchmark that was timed."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or session.quiet:
        return
    for timed in session.benchmarks:
        ways = {name: found for name, found in timed.extra_info.items() if isinstance(found, dict)}
        if not ways:
            continue
        terminalreporter.write_line(f"{timed.name}, against {timed.extra_info.get('against', 'each other')}")
        for name, found in ways.items():
            us = f"{found['us']:12.1f} µs" if "us" in found else " " * 15
            least, middle = (found.get(f"ratio_{k}", found.get(k)) for k in ("min", "median"))
            ratios = "" if least is None else f"  ratio {least:.3f} of minima"
            ratios += "" if middle is None else f", {middle:.3f} of medians"
            terminalreporter.write_line(f"  {name:<26}{us}{ratios}")
