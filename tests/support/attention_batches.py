"""Random batches of engines, and whether the warm-up of attention has all that they are compiled for.

For a process that does not interpret kernels; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import torch

from kvkit.kernels.attention import triton
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.attention.warm_up import BatchLimits, PagedLayer, launches
from kvkit.kernels.tuning.configs import KernelConfig, Launch, ProblemBucket
from kvkit.lab.compiling.keys import compile_key

random = np.random.default_rng(0)


def best(
    bucket: ProblemBucket, default: KernelConfig, space: Collection[KernelConfig], kernel: Any
) -> KernelConfig:
    """A table that has another configuration for every bucket."""
    if kernel is triton.merge:  # it is not tuned
        return default
    choices = sorted(space)
    return choices[crc32(repr(bucket).encode()) % len(choices)]


def layer(
    query_heads: int,
    heads: int,
    size: int,
    v_size: int,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
) -> PagedLayer:
    """Pages as in vLLM: tokens outermost, K and V side by side."""
    pages = torch.empty(2, tokens, heads, size + v_size, dtype=dtype).transpose(1, 2)
    scoring = Scoring(size**-0.5, window, softcap)
    return PagedLayer(pages[..., :size], pages[..., size:], query_heads, scoring)


def batch(given: PagedLayer, limits: BatchLimits) -> Rows:
    """Rows of some requests, few or many, together or apart, with tables as long as the longest prompt's."""
    requests = int(random.choice([1, 1, 2, limits.requests]))
    room = limits.rows // requests
    most = int(2 ** random.uniform(0, np.log2(limits.keys)))
    positions = []
    for _ in range(requests):
        rows = min(int(2 ** random.uniform(0, np.log2(room))), most)
        first = int(random.integers(0, most - rows + 1))
        among = np.arange(first, first + rows) if random.random() < 0.3 else np.arange(most)
        positions.append(np.sort(random.choice(among, rows, replace=False)))
    starts = np.cumsum([0, *map(len, positions)])
    lengths = np.array([each[-1] + 1 for each in positions])
    tokens = given.k_pages.shape[2]
    tables = np.zeros((requests, -(-most // tokens)), np.int64)
    return Rows.of(np.concatenate(positions), starts, lengths, tables, tokens)


def planned(given: PagedLayer, limits: BatchLimits) -> Iterator[Launch]:
    """Launches of a batch, of the logsumexp and scores of a request's rows."""
    rows = batch(given, limits)
    heads, size = given.query_heads, given.k_pages.shape[3]
    fused = torch.empty(rows.count + 3, heads + 2 * given.k_pages.shape[1], size, dtype=given.k_pages.dtype)
    q = fused[: rows.count, :heads]
    lse, out = torch.empty(rows.count, heads), q.new_empty(rows.count, heads, given.v_pages.shape[3])
    yield from triton.attention(q, given.k_pages, given.v_pages, rows, given.scoring, out, lse)
    one = batch(given, replace(limits, requests=1))
    q = torch.empty(one.count, heads, size, dtype=q.dtype)
    values = given.v_pages if random.random() < 0.5 else None
    scores = torch.empty(heads, int(one.lengths[0]))
    yield from triton.scores(q, given.k_pages, values, one, given.scoring, None, scores)


LAYERS = {
    "grouped": [layer(32, 8, 128, 128, 16)],
    "a window and a soft-cap": [
        layer(8, 4, 64, 64, 16, window=700, softcap=50.0),
        layer(8, 4, 64, 64, 16, softcap=50.0),
    ],
    "71 to a head": [layer(71, 1, 64, 64, 16)],
    "odd sizes, large blocks": [layer(15, 5, 72, 40, 528, torch.float16)],
    "many heads": [layer(96, 96, 32, 32, 32, torch.float32, window=100)],
}
LIMITS = BatchLimits(rows=1024, requests=12, keys=5000)


def report(count: int, tuned: bool) -> None:
    """Print a line for each model: which launches of `count` batches would have to be compiled."""
    if tuned:
        triton.best = best  # type: ignore[assignment]
    for name, layers in LAYERS.items():
        warm = {compile_key(launch, "sm_90") for launch in launches(layers, LIMITS)}
        missing, seen = dict[str, str](), set[str]()
        for _ in range(count):
            for launch in (launch for given in layers for launch in planned(given, LIMITS)):
                key = compile_key(launch, "sm_90")
                seen.add(key)
                if key not in warm:
                    constants = {k: v for k, v in launch.arguments.items() if k.isupper()}
                    missing[key] = f"{launch.kernel.__name__} {launch.config} {constants}"
        words = f"{name}: {len(missing)} of {len(seen)} are missing, of {len(warm)}"
        print(words, *missing.values(), sep="; ")
