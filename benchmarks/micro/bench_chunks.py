"""Keys of a long prompt, and its token ids as an array, against what their bytes take at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from benchmarks.timing import interleaved, ratio
from kvkit.format.keys import DIGEST_BYTES, as_tokens, chunk_keys

TOKENS = np.random.default_rng(0).integers(0, 150_000, 131_072, np.int32)
PARENT = bytes(16)


def compare(
    benchmark: Any, ours: Callable[[], object], other: Callable[[], object], against: str, rounds: int = 200
) -> None:
    """pytest-benchmark's own statistics of `ours`; its ratio to `other` from calls that take turns."""
    benchmark(ours)
    times = interleaved({"ours": ours, "other": other}, rounds if benchmark.enabled else 2)
    found = ratio(times, "ours", "other")
    benchmark.extra_info.update(ratio_min=found["min"], ratio_median=found["median"], against=against)


@pytest.mark.parametrize("chunk_tokens", [16, 256])
def test_keys(benchmark: Any, chunk_tokens: int) -> None:
    compare(
        benchmark,
        lambda: chunk_keys(TOKENS, chunk_tokens, PARENT),
        lambda: xxhash.xxh3_128_digest(TOKENS),
        "one xxhash.xxh3_128_digest of the same bytes",
    )


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_other_algorithms(benchmark: Any, algorithm: str) -> None:
    parent = bytes(DIGEST_BYTES[algorithm])
    compare(
        benchmark,
        lambda: chunk_keys(TOKENS, 256, parent, algorithm),
        lambda: chunk_keys(TOKENS, 256, PARENT),
        "xxh3_128",
        rounds=50,
    )


def test_list(benchmark: Any) -> None:
    tokens = TOKENS.tolist()
    assert np.array_equal(as_tokens(tokens), TOKENS)
    compare(
        benchmark,
        lambda: as_tokens(tokens),
        lambda: np.array(tokens, np.int32),
        "numpy.array(tokens, numpy.int32)",
        rounds=50,
    )
