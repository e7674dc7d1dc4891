"""Counters and histograms agree with a plain list of the values, and copies do not change."""

from __future__ import annotations

from dataclasses import fields
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_cache import filled_counts

from kvkit.transfer.counters import BYTES_PER_SECOND, SECONDS, Counts, Histogram

VALUES = st.lists(st.floats(0, 100) | st.sampled_from(SECONDS), max_size=60)


@pytest.mark.parametrize(("bounds", "first", "last"), [(SECONDS, 1e-5, 50.0), (BYTES_PER_SECOND, 1e6, 5e10)])
def test_bounds_ascend_over_the_documented_range(
    bounds: tuple[float, ...], first: float, last: float
) -> None:
    assert (bounds[0], bounds[-1]) == (first, last)
    assert list(bounds) == sorted(set(bounds))


@given(VALUES)
def test_a_histogram_counts_values_up_to_each_bound(values: list[float]) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.add(value)
    lower = -1.0
    for bound, count in zip((*SECONDS, float("inf")), histogram.buckets, strict=True):
        assert count == sum(lower < value <= bound for value in values)
        lower = bound
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))


@given(VALUES.filter(len), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_value_it_stands_for(values: list[float], share: float) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.add(value)
    exact = sorted(values)[ceil(share * len(values)) - 1]
    found = histogram.quantile(share)
    assert found is not None
    upper = min((b for b in SECONDS if b >= exact), default=SECONDS[-1])
    lower = max((b for b in SECONDS if b < exact), default=0.0)
    assert lower * (1 - 1e-9) <= found <= upper * (1 + 1e-9)


def test_quantiles_by_hand() -> None:
    assert Histogram((1.0, 2.0)).quantile(0.5) is None
    histogram = Histogram((1.0, 2.0, 4.0), [2, 0, 2, 0])
    assert histogram.quantile(0.5) == 1.0
    assert histogram.quantile(0.75) == 3.0
    assert histogram.quantile(0.25) == 0.5
    assert Histogram((1.0, 2.0), [0, 0, 9]).quantile(0.5) == 2.0, "no more is known than the last bound"


def test_a_histogram_has_a_bucket_per_bound_and_one_more() -> None:
    with pytest.raises(ValueError, match="2 buckets, want one more than the 2 bounds"):
        Histogram((1.0, 2.0), [0, 0])


def test_a_transfer_is_a_time_and_a_throughput() -> None:
    counts = Counts()
    counts.moved("disk", "get", 3_000_000, 0.5)
    counts.moved("disk", "put", 10, 0.0)
    assert counts.seconds["disk", "get"].total == 0.5
    assert counts.bytes_per_second["disk", "get"].total == 6e6
    assert counts.seconds["disk", "put"].count == 1
    assert counts.bytes_per_second["disk", "put"].count == 0, "no time, no throughput"


def test_a_copy_is_equal_and_stays_so() -> None:
    counts, untouched = filled_counts(), filled_counts()
    copy = counts.copy()
    assert copy == counts
    for field in fields(Counts):
        value = getattr(counts, field.name)
        assert value != getattr(Counts(), field.name), "filled_counts left it out"
        if isinstance(value, int):
            setattr(counts, field.name, value + 1)
            continue
        for key in list(value):
            if isinstance(value[key], Histogram):
                value[key].add(1.0)
            else:
                value[key] += 1
    assert copy == untouched
    assert all(getattr(counts, f.name) != getattr(copy, f.name) for f in fields(Counts))
