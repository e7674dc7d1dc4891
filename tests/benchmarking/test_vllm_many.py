"""The scheduler's work for a request does not grow with the number of requests, up to a thousand."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from call_counts import calls

from benchmarks.serving import many_requests
from benchmarks.serving.many_requests import Driven

FEW, MANY = 50, 1_000


def test_a_request_takes_as_many_calls_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows, whoever is asked about has to leave blocks to all that stand still with some."""
    monkeypatch.setattr(many_requests, "GENERATED", 2)
    monkeypatch.setattr(many_requests, "STEP_TOKENS", 1 << 30)
    few, many = (calls(Driven(count, windows=True).run).total() / count for count in (FEW, MANY))
    assert many < 1.1 * few
