"""Bytes and calls per record do not grow with the number of records."""

from __future__ import annotations

import tracemalloc

import pytest
from call_counts import calls

from benchmarks.research.scale import CHAIN, PARTS, measured

FEW, MANY = 1_000, 8_000
"""Records."""
BYTES = {"folder": 340, "full_folder": 420, "memory": 440, "shm": 250, "router": 160}
"""Of Python's memory for each record, at most: a fifth more than there are."""


@pytest.mark.parametrize("part", PARTS)
def test_records_take_as_much_however_many_there_are(part: str) -> None:
    (few, few_calls), (many, many_calls) = (cost(part, records) for records in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < BYTES[part]
    assert many_calls < 1.1 * few_calls


def cost(part: str, records: int) -> tuple[int, int]:
    """Bytes of one part of the benchmark, and calls of the same lookups and puts."""
    tracemalloc.start()
    try:
        with measured(part, records) as index:
            size = tracemalloc.get_traced_memory()[0]
            count = calls(lambda: [index.count(number) for number in range(0, FEW // CHAIN, 5)])
            if index.put is not None:
                put = index.put
                count += calls(lambda: [put(number) for number in range(records, records + 10 * CHAIN)])
            return size, count.total()
    finally:
        tracemalloc.stop()
