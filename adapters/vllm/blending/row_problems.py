"""Problems for tuning the choice between the engine's attention and kvkit's, on a GPU with vLLM.

`kvkit tune --problems kvkit.adapters.vllm.blending.row_problems:problems`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.attention import KvkitLayer, KvkitRows, RowSizes, tuned_entry
from kvkit.kernels.attention import reference
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.attention.triton_kernels import attend
from kvkit.kernels.tuning.cases import Case, Problem, Work, fill
from kvkit.kernels.tuning.configs import HostLaunch, KernelConfig


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a prompt in one layer: a random share of its tokens, and the question at the end."""

    tokens: int
    share: float
    question: int = 64
    heads: int = 8
    group: int = 4
    size: int = 128
    block_tokens: int = 16

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions of the rows, ascending."""
        first = self.tokens - self.question
        chosen = np.random.default_rng(0).choice(first, int(self.share * first), replace=False)
        return np.union1d(chosen, np.arange(first, self.tokens))

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index of the first row of each run, then the number of rows."""
        positions = self.positions
        return np.append(np.flatnonzero(np.diff(positions, prepend=-2) != 1), len(positions))

    @property
    def sizes(self) -> RowSizes:
        """Sizes by which the attention is chosen."""
        rows, runs = len(self.positions), len(self.starts) - 1
        return RowSizes(rows, runs, self.tokens, self.group, self.size, "bfloat16")

    def __str__(self) -> str:
        sizes = self.sizes
        return f"{sizes.rows} rows in {sizes.runs} runs, {self.tokens} keys, heads of {self.size}"


PROMPTS = tuple(
    PromptRows(tokens, share, question, size=size)
    for size in (64, 128, 256)
    for tokens in (4096, 32768)
    for share, question in ((0.15, 64), (0.02, 64), (0.002, 64), (0.0, 64), (0.0, 2048))
)
"""Prompts with many, some and few selected tokens, and with a question alone, short or long."""


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """Pages of a layer as in vLLM, and the rows of a prompt. Make it with `of`.

    Args:
        q: [M, Hq, D].
        pages: [B, H, N, 2 D]; in memory, tokens come before heads.
        out: [M, Hq, D], the output.
        kvkit_rows: all rows as one request, for kvkit's attention.
        rows_by_run: every run of rows as a request of its own, as engines take them.
        query_starts: int32 [runs + 1], the first row of each run, then M.
        key_counts: int32 [runs], number of keys that each run attends to.
        scoring: scale, window and soft-cap of the layer.
    """

    q: torch.Tensor
    pages: torch.Tensor
    out: torch.Tensor
    kvkit_rows: KvkitRows
    rows_by_run: Rows
    query_starts: torch.Tensor
    key_counts: torch.Tensor
    scoring: Scoring

    @staticmethod
    def of(prompt: PromptRows, device: torch.device, filled: bool = True) -> RowTensors:
        """Allocate the tensors; fill them with random numbers if `filled`."""
        positions, blocks = prompt.positions, prompt.tokens // prompt.block_tokens
        new = partial(torch.empty, dtype=torch.bfloat16, device=device)
        q = new(len(positions), prompt.heads * prompt.group, prompt.size)
        memory = new(blocks, prompt.block_tokens, prompt.heads, 2 * prompt.size)
        if filled:
            fill(q)
            fill(memory)
        table, scoring = np.random.default_rng(1).permutation(blocks), Scoring(prompt.size**-0.5)
        plan = partial(Rows.of, block_tokens=prompt.block_tokens, device=device)
        starts = prompt.starts
        lengths = positions[starts[1:] - 1] + 1
        rows_by_run = plan(positions, starts, lengths, np.repeat(table[None], len(starts) - 1, 0))
        layer = KvkitLayer(scoring, prompt.size, 0, prompt.block_tokens, 1)
        all_rows = plan(positions, np.array([0, len(positions)]), positions[-1:] + 1, table[None])
        query_starts, key_counts = (
            torch.from_numpy(x.astype(np.int32)).to(device) for x in (starts, rows_by_run.lengths)
        )
        return RowTensors(
            q,
            memory.transpose(1, 2),
            torch.empty_like(q),
            KvkitRows((layer,), {layer: all_rows}),
            rows_by_run,
            query_starts,
            key_counts,
            scoring,
        )

    def run(self, TOGETHER: int) -> None:
        """Compute `out`, with kvkit's attention if `TOGETHER` is not 0, otherwise with vLLM's."""
        if TOGETHER:
            self.kvkit_rows.attend(0, self.q, self.pages, self.out)
        else:
            _attend_by_vllm(self)

    def relative_error(self) -> float:
        """Return the error of 64 rows of `out`, relative to their norm."""
        (rows,) = self.kvkit_rows.rows.values()
        indices = np.unique(np.linspace(0, rows.count - 1, 64).astype(np.int64))
        ends, sample_rows = np.array([0, len(indices)]), torch.from_numpy(indices).to(self.q.device)
        sample = Rows.of(
            rows.positions[indices], ends, rows.lengths, rows.tables, rows.block_tokens, rows.device
        )
        k, v = self.pages.chunk(2, -1)
        expected, _ = reference.blend_attention(self.q[sample_rows].double(), k, v, sample, self.scoring)
        return float((self.out[sample_rows].double() - expected).norm() / expected.norm())


def _attend_by_vllm(tensors: RowTensors) -> None:
    """Compute `out` with FlashAttention, every run as a sequence, as vLLM's backend does."""
    k, v = tensors.pages.transpose(1, 2).chunk(2, -1)
    compat.find("flash_attn_varlen_func")(
        q=tensors.q,
        k=k,
        v=v,
        out=tensors.out,
        cu_seqlens_q=tensors.query_starts,
        max_seqlen_q=int(np.diff(tensors.rows_by_run.row_starts).max()),
        seqused_k=tensors.key_counts,
        max_seqlen_k=int(tensors.rows_by_run.lengths.max()),
        softmax_scale=tensors.scoring.scale,
        causal=True,
        block_table=tensors.rows_by_run.device_tables,
        fa_version=compat.find("get_flash_attn_version")(head_size=tensors.q.shape[2]),
    )


def problems() -> Iterator[Problem]:
    """Return all problems; their tensors are allocated later."""
    return map(row_problem, PROMPTS)


def row_problem(prompt: PromptRows) -> Problem:
    """Return the problem of one prompt. It is not gated, as no config compiles a kernel of its own."""
    sizes = prompt.sizes
    expected = sizes.is_kvkit_expected_faster
    moved = 2 * prompt.heads * prompt.size * (2 * prompt.tokens + 2 * sizes.rows * prompt.group)
    return Problem(
        name=str(prompt),
        bucket=sizes.bucket,
        kernel=attend,
        space=(tuned_entry(expected), tuned_entry(not expected)),
        make=partial(_case, prompt),
        work=lambda config: Work(moved),
        gated=False,
        operation="blend_attention",
    )


def _case(prompt: PromptRows, device: torch.device, filled: bool) -> Case:
    tensors = RowTensors.of(prompt, device, filled)
    if filled and device.type == "cuda":
        tensors.run(TOGETHER=0)  # raises if vLLM's cannot run: tuning compares both

    def launches(config: KernelConfig | None) -> tuple[HostLaunch, ...]:
        return (HostLaunch(tensors.run, {}, config or tuned_entry(prompt.sizes.is_kvkit_expected_faster)),)

    def poison() -> None:
        tensors.out.fill_(torch.nan)

    def fault() -> str:
        error = tensors.relative_error()
        return "" if error < 0.01 else f"rows differ from the reference by {error:.2g} of their norm"

    return Case(launches, poison, fault, (tensors.out,))
