"""Latent attention, absorbed and expanded, equals attention to the keys and values that latents stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvkit.kernels.attention import latent, reference
from kvkit.kernels.attention.latent import LatentWeights, absorbs, latent_attention
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.checks import LaunchError

HEADS, SIZE, ROTARY, LATENT, V_SIZE, TOKENS = 5, 24, 8, 40, 16, 16


@dataclass(frozen=True)
class Given:
    """Requests as (positions, length), and their tensors."""

    requests: Sequence[tuple[Sequence[int], int]]
    dtype: torch.dtype = torch.float32

    def rows(self) -> Rows:
        lengths = np.array([length for _, length in self.requests])
        blocks = -(-lengths // TOKENS)
        ids = np.random.default_rng(0).permutation(int(blocks.sum()))
        tables = np.full((len(lengths), max(1, blocks.max())), -1)
        for table, own in zip(tables, np.split(ids, np.cumsum(blocks)[:-1]), strict=True):
            table[: len(own)] = own
        positions = np.concatenate([np.array(p, np.int64) for p, _ in self.requests])
        starts = np.cumsum([0, *(len(p) for p, _ in self.requests)])
        return Rows.of(positions, starts, lengths, tables, TOKENS)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, LatentWeights]:
        made = torch.Generator().manual_seed(0)
        rows = self.rows()

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made).to(self.dtype)

        pages = new(rows.last_block + 2, 1, TOKENS, LATENT + ROTARY)
        # rows of one matrix, as DeepSeek's kv_b_proj has them: no contiguous tensors
        joined = new(HEADS, SIZE + V_SIZE, LATENT) * LATENT**-0.5
        return new(rows.count, HEADS, SIZE + ROTARY), pages, LatentWeights(joined[:, :SIZE], joined[:, SIZE:])


def expected(given: Given, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 to K and V of every token of every page."""
    q, pages, weights = given.tensors()
    latents, rotary = pages[:, 0].double().split([LATENT, ROTARY], -1)
    k = torch.einsum("bnl,hdl->bhnd", latents, weights.k.double())
    v = torch.einsum("bnl,hdl->bhnd", latents, weights.v.double())
    k = torch.cat([k, rotary[:, None].expand(-1, HEADS, -1, -1)], -1)
    return reference.blend_attention(q.double(), k, v, given.rows(), scoring)


MANY = Given([((0, 5, 17, 30, 31, 39), 40), ((), 20), ((3, 100, 140), 150), ((-2, 7), 8), ((1,), 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scoring", [Scoring(0.2), Scoring(0.2, window=9), Scoring(0.2, softcap=3.0)], ids=str
)
@pytest.mark.parametrize("absorbed", [True, False])
def test_both_ways_equal_the_attention_to_keys(absorbed: bool, scoring: Scoring, dtype: torch.dtype) -> None:
    given = Given(MANY.requests, dtype)
    q, pages, weights = given.tensors()
    before = pages.clone()
    o, lse = latent_attention(q, pages, weights, given.rows(), scoring, absorbed)
    wanted, wanted_lse = expected(given, scoring)
    assert (o.dtype, o.shape) == (dtype, (q.shape[0], HEADS, V_SIZE))
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(o.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=tolerance, rtol=tolerance)
    assert torch.equal(pages, before)


@pytest.mark.parametrize("limit", [1, 40 * 48 * 4 * 2, 1 << 30])
def test_heads_are_expanded_in_turns(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, some, or all: the same numbers, of float32 products."""
    monkeypatch.setattr(latent, "EXPANDED_BYTES", limit)
    q, pages, weights = MANY.tensors()
    o, _ = latent_attention(q, pages, weights, MANY.rows(), Scoring(0.2), absorbed=False)
    torch.testing.assert_close(o.double(), expected(MANY, Scoring(0.2))[0], atol=1e-4, rtol=1e-4)


def deepseek(count: int, length: int) -> bool:
    rows = Rows.of(
        np.sort(np.random.default_rng(0).choice(length, count, replace=False)),
        np.array([0, count]),
        np.array([length]),
        np.arange(length // 64)[None],
        64,
    )
    weights = LatentWeights(torch.empty(128, 128, 512), torch.empty(128, 128, 512))
    return absorbs(rows, Scoring(0.1), weights, 64)


def test_few_rows_are_absorbed_and_many_expanded() -> None:
    """DeepSeek-V3's sizes; rows at the end see more keys, so that fewer of them are worth the expansion."""
    assert deepseek(16, 8192)
    assert not deepseek(1292, 8192)
    found = [deepseek(count, 8192) for count in range(8, 1024, 8)]
    assert found == sorted(found, reverse=True), "there is one number of rows from which on it pays"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"q": torch.zeros(12, HEADS, 20)}, "q: .*want .* at least 24 channels"),
        ({"q": torch.zeros(12, HEADS + 1, 32)}, r"q: .*want \[M, 5,"),
        ({"pages": torch.zeros(20, 1, TOKENS, 47)}, r"pages: .*want \[B, 1, N, 48\]"),
        ({"pages": torch.zeros(20, 2, TOKENS, 48)}, r"pages: .*want \[B, 1, N, 48\]"),
        ({"v": torch.zeros(HEADS, V_SIZE, LATENT + 1)}, r"weights\.v: .*want \(5, 16, 40\) float32"),
        ({"k": torch.zeros(HEADS, SIZE, LATENT).half()}, r"weights\.k: .*float16.*want .*float32"),
        ({"v": torch.zeros(V_SIZE, LATENT)}, r"weights: .*want \[Hq, Dn, L\] and \[Hq, Dv, L\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], error: str) -> None:
    q, pages, weights = MANY.tensors()
    given = {"q": q, "pages": pages, "k": weights.k, "v": weights.v} | change
    weights = LatentWeights(given["k"], given["v"])
    with pytest.raises(LaunchError, match=error):
        latent_attention(given["q"], given["pages"], weights, MANY.rows(), Scoring(0.2))
