"""`make gpu`: the rows of a blend in vLLM's pages: kvkit's attention, and what engines do, run by run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from kvkit.adapters.vllm.blending.attention import TILE_ROWS, tuned_entry
from kvkit.adapters.vllm.blending.row_problems import PromptRows, RowTensors
from kvkit.kernels.attention.api import blend_attention
from kvkit.lab.compiling.prediction import RATES, Rates

LLAMA = (
    *(PromptRows(tokens, 0.15) for tokens in (4096, 8192, 32768)),
    *(PromptRows(8192, share) for share in (0.02, 0.0)),
    PromptRows(8192, 0.0, question=2048),
)
"""Llama-3.1-8B's: selected tokens, few of them, the question alone, and a long one."""

SMALL = (PromptRows(256, 0.2, heads=2, group=2, size=16),)


def run(bench: Bench) -> None:
    """Records of each prompt the choice and predicted times, then each contender's time and error."""
    rates = RATES.get(bench.target)
    for prompt in LLAMA if bench.device.type == "cuda" else SMALL:
        given = RowTensors.of(prompt, bench.device)
        predicted = {
            f"predicted_us of {tuned_entry(together)}": predicted_us(prompt, together, rates)
            for together in (False, True)
            if rates
        }
        bench.results.record(
            str(prompt), untuned=str(tuned_entry(prompt.sizes.is_kvkit_expected_faster)), **predicted
        )
        for name, attend in CONTENDERS.items():
            try:
                given.out.fill_(torch.nan)
                call = attend(given)
                call()
                off = given.relative_error()
                times = bench.seconds(call)
            except Exception as error:  # not every torch has FlashAttention for pages of 16 tokens
                bench.results.record(f"{prompt}: {name}", error=f"{type(error).__name__}: {error}"[:300])
                continue
            us = {"us": median(times) * 1e6, "min_us": min(times) * 1e6}
            bench.results.record(f"{prompt}: {name}", **us, off=off, right=off < 0.01)


def predicted_us(prompt: PromptRows, together: bool, rates: Rates) -> float:
    """By data sheet, if each tile read its keys from memory."""
    keys = prompt.sizes.tiles(together) * prompt.heads * prompt.tokens / 2
    moved, flops = keys * 2 * prompt.size * 2, keys * 4 * prompt.size * TILE_ROWS
    return 1e6 * max(moved / rates.bytes_per_s, flops / rates.flops_per_s)


def kvkit(given: RowTensors) -> Callable[[], object]:
    return partial(given.run, TOGETHER=1)


def kvkit_by_run(given: RowTensors) -> Callable[[], object]:
    k, v = given.pages.chunk(2, -1)
    return lambda: given.out.copy_(blend_attention(given.q, k, v, given.rows_by_run, given.scoring)[0])


def flash_by_run(given: RowTensors) -> Callable[[], object]:
    """As vLLM's backend of that name calls it.

    Raises:
        RuntimeError: this torch's takes no pages: that of 2.11 and before.
    """
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in signature(varlen_attn).parameters:
        raise RuntimeError(f"varlen_attn of torch {torch.__version__} takes no pages")
    k, v = given.pages.transpose(1, 2).chunk(2, -1)
    sizes = int(np.diff(given.rows_by_run.row_starts).max()), int(given.rows_by_run.lengths.max())

    def call() -> torch.Tensor:
        found = varlen_attn(
            given.q, k, v, given.query_starts, None, *sizes, window_size=(-1, 0), enable_gqa=True,
            seqused_k=given.key_counts, block_table=given.rows_by_run.device_tables,
        )  # fmt: skip
        return given.out.copy_(found)

    return call


CONTENDERS = {
    "kvkit": kvkit,
    "kvkit, run by run": kvkit_by_run,
    "torch's FlashAttention, run by run": flash_by_run,
}
