"""kvkit.format.keys against the obvious loop over the C library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from kvkit.format.keys import DIGEST_BYTES, Chain, as_tokens, chunk_keys, extend
from timing import interleaved, ratio

TOKENS = np.random.default_rng(0).integers(0, 150_000, 131_072, np.int32)
PARENT = bytes(16)


def bare_loop(chunk_tokens: int) -> list[bytes]:
    data = TOKENS.view(np.uint8).data
    size = 4 * chunk_tokens
    parent = PARENT
    keys = []
    for i in range(len(data) // size):
        parent = xxhash.xxh3_128_digest(parent + data[i * size : (i + 1) * size])
        keys.append(parent)
    return keys


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
    assert chunk_keys(TOKENS, chunk_tokens, PARENT) == bare_loop(chunk_tokens)
    compare(
        benchmark,
        lambda: chunk_keys(TOKENS, chunk_tokens, PARENT),
        lambda: bare_loop(chunk_tokens),
        "a Python loop over xxhash.xxh3_128_digest",
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


def test_append(benchmark: Any) -> None:
    empty = Chain("xxh3_128", 256, PARENT)
    _, chain = extend(empty, TOKENS)
    new = TOKENS[:256]
    compare(
        benchmark,
        lambda: extend(chain, new),
        lambda: extend(empty, new),
        "appending to an empty chain",
        rounds=2000,
    )
