"""The measured share of a document's lost context is one of all attention, and tables show it."""

from __future__ import annotations

import numpy as np
import pytest
from byte_tokens import encode
from random_models import random_model

from benchmarks.research import leaderboard
from benchmarks.research.lost_context import by_loss, paid, slope
from kvkit.lab.quality.judge import Judge
from kvkit.lab.quality.tasks.registry import samples


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(random_model("gqa"))


def test_shares_are_of_what_is_paid_in_all(judge: Judge) -> None:
    (sample,) = samples("hops", encode, 1, 768)
    (exact, alone), lost = paid(judge, sample)
    (first, stop), *_ = sample.documents
    assert exact.sum() == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(exact[lost == 0][first:stop], alone[lost == 0][first:stop], rtol=1e-3)
    assert not np.allclose(exact[lost > 0], alone[lost > 0], rtol=1e-3)


def test_tokens_lost_what_stands_before_their_document(judge: Judge) -> None:
    """The first one's nothing; the first eight of the others are computed again."""
    (sample,) = samples("hops", encode, 1, 768)
    _, lost = paid(judge, sample)
    for start, stop in sample.documents:
        of = np.log((np.arange(start, stop) + 1) / (np.arange(stop - start) + 1))
        of[:8] = 0
        np.testing.assert_allclose(lost[start:stop], of, rtol=1e-6)


def test_a_power_is_found() -> None:
    rng = np.random.default_rng(0)
    lost = rng.uniform(0.25, 5.25, 50_000).astype(np.float32)
    exact = rng.random(50_000)
    assert slope(np.stack([exact, exact * np.exp(0.3 * lost)]), lost) == pytest.approx(0.3, abs=0.01)


def test_the_tables_have_what_was_measured() -> None:
    lost = np.array([0.5, 1.0, 1.1], np.float32)
    shares = np.array([[0.1, 0.1, 0.1], [0.1, 0.2, 0.2]])
    run = {"tokens": 1024, "exact": 0.3, "alone": 0.5, "slope": 0.4, "slopes": {"qa": 0.3}}
    document = {"runs": [run | {"by_loss": by_loss(shares, lost)}]}
    rows = {row[0]: row[1:] for row in leaderboard.overpaid(document)}
    assert rows["those that saw 1 of 2.1 to 3.5"] == ["2.0×"]
    assert rows["those that saw 1 of 1.3 to 2.1"] == ["1.0×"]
    assert rows["to their keys as they were found"] == ["50%"]
