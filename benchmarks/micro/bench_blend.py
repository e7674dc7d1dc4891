"""kvkit.kernels' sparse attention on a CPU, against torch's of the same rows with a mask, and of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.timing import interleaved, ratio
from kvkit.format.rope import Rope
from kvkit.kernels.attention.api import blend_attention, query_scores, rope_scatter
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows

THREADS = 2
SHARE = 0.15  # of the rows are computed, and the question's
QUESTION = 64


@dataclass(frozen=True)
class Shape:
    """One layer's attention: N keys in blocks, some rows."""

    tokens: int
    heads: int
    group: int
    size: int
    dtype: torch.dtype
    block_tokens: int


CASES = {
    "smollm2": Shape(4096, 3, 3, 64, torch.float32, 4096),
    "smollm2-paged": Shape(4096, 3, 3, 64, torch.float32, 128),
    "llama-8b": Shape(2048, 8, 4, 128, torch.bfloat16, 16),
}


class Job:
    """Random rows, keys and values of a shape, and what torch needs of them."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        random = np.random.default_rng(0)
        chosen = random.choice(tokens, int(SHARE * tokens), replace=False)
        positions = np.union1d(chosen, np.arange(tokens - min(QUESTION, tokens), tokens))
        per_block = min(shape.block_tokens, tokens)
        blocks = random.permutation(tokens // per_block)
        self.rows = Rows.of(
            positions, np.array([0, len(positions)]), np.array([tokens]), blocks[None], per_block
        )
        heads, size = shape.heads * shape.group, shape.size
        pages = len(blocks), shape.heads, per_block, size
        self.k, self.v = (torch.randn(pages).to(shape.dtype) for _ in range(2))
        self.all_q = torch.randn(tokens, heads, size).to(shape.dtype)
        self.q = self.all_q[torch.from_numpy(positions)]
        keys, values = (
            x[torch.from_numpy(blocks)].transpose(0, 1).reshape(1, shape.heads, tokens, size)
            for x in (self.k, self.v)
        )
        # repeated outside the clock: enable_gqa repeats them in every call
        self.keys, self.values = (x.repeat_interleave(shape.group, 1) for x in (keys, values))
        self.mask = torch.arange(tokens) <= torch.from_numpy(positions)[:, None]
        self.scoring = Scoring(size**-0.5)

    def blend(self) -> torch.Tensor:
        return blend_attention(self.q, self.k, self.v, self.rows, self.scoring)[0]

    def masked(self) -> torch.Tensor:
        """torch's attention of the same rows."""
        q = self.q.transpose(0, 1)[None]
        o = torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=self.mask)
        return o[0].transpose(0, 1)

    def full(self) -> torch.Tensor:
        """torch's causal attention of all rows."""
        q = self.all_q.transpose(0, 1)[None]
        o = torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.values, is_causal=True)
        return o[0].transpose(0, 1)


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_attention(benchmark: Any, name: str) -> None:
    """A ratio below 1: faster than torch. The least that `full` can give is the share of visible keys."""
    shape = CASES[name]
    job = Job(shape, shape.tokens if benchmark.enabled else 256)
    close = {"atol": 0.02, "rtol": 0.02} if shape.dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(job.blend(), job.masked(), **close)
    torch.testing.assert_close(job.blend(), job.full()[torch.from_numpy(job.rows.positions)], **close)
    benchmark(job.blend)
    functions: dict[str, Callable[[], object]] = {"blend": job.blend, "masked": job.masked, "full": job.full}
    times = interleaved(functions, 15 if benchmark.enabled else 1, warmup=2 if benchmark.enabled else 0)
    visible = int(job.mask.sum())
    tokens = job.mask.shape[1]
    share = visible / (tokens * (tokens + 1) / 2)
    flops = 4 * shape.heads * shape.group * shape.size * visible
    benchmark.extra_info.update(
        rows=job.rows.count, visible_share=share, gflops=flops / min(times["blend"]) / 1e9
    )
    for other in ("masked", "full"):
        found = ratio(times, "blend", other)
        benchmark.extra_info[other] = {"ratio_min": found["min"], "ratio_median": found["median"]}
        print(f"{name}: of {other}: min {found['min']:.3f}, median {found['median']:.3f}")
    print(f"{name}: {share:.3f} of all visible keys")


def test_around_the_attention(benchmark: Any) -> None:
    """What else a blended layer does, as a share of its attention."""
    job = Job(CASES["smollm2"], 4096 if benchmark.enabled else 256)
    count, heads, size = job.q.shape
    rope = Rope(tuple((10000.0 ** -(np.arange(size // 2) / (size // 2))).tolist()))
    turns = RowRotations(rope, torch.from_numpy(rope.table(job.rows.positions)))
    fused = torch.randn(count, heads + 2 * job.k.shape[1], size)
    q, k, v = fused.split([heads, job.k.shape[1], job.k.shape[1]], 1)
    positions, tokens = job.rows.positions[-QUESTION:], job.mask.shape[1]
    question = Rows.of(
        positions, np.array([0, QUESTION]), np.array([tokens]), job.rows.tables, job.rows.block_tokens
    )
    _, lse = blend_attention(job.q, job.k, job.v, job.rows, job.scoring)

    def scatter() -> None:
        rope_scatter(q, k, v, turns, job.rows.slots, job.k, job.v)

    def scores() -> None:
        query_scores(job.q[-QUESTION:], job.k, job.v, question, job.scoring, lse[-QUESTION:])

    benchmark(scores)
    functions: dict[str, Callable[[], object]] = {"blend": job.blend, "scatter": scatter, "scores": scores}
    times = interleaved(functions, 15 if benchmark.enabled else 1, warmup=2 if benchmark.enabled else 0)
    for name in ("scatter", "scores"):
        found = ratio(times, name, "blend")
        benchmark.extra_info[name] = {"ratio_min": found["min"], "ratio_median": found["median"]}
        print(f"{name}: of the attention: min {found['min']:.3f}, median {found['median']:.3f}")
