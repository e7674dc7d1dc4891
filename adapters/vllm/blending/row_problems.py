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
from kvkit.adapters.vllm.blending.attention import OwnLayer, OwnRows
from kvkit.adapters.vllm.blending.choice import RowsForm, entry
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
    def form(self) -> RowsForm:
        """Sizes by which the attention is chosen."""
        rows, runs = len(self.positions), len(self.starts) - 1
        return RowsForm(rows, runs, self.tokens, self.group, self.size, "bfloat16")

    def __str__(self) -> str:
        form = self.form
        return f"{form.rows} rows in {form.runs} runs, {self.tokens} keys, heads of {self.size}"


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
        own: all rows as one request, for kvkit's attention.
        apart: every run of rows as a request of its own, as engines take them.
        query_starts: int32 [runs + 1], the first row of each run, then M.
        used: int32 [runs], number of keys that each run sees.
        scoring: scale, window and soft-cap of the layer.
    """

    q: torch.Tensor
    pages: torch.Tensor
    out: torch.Tensor
    own: OwnRows
    apart: Rows
    query_starts: torch.Tensor
    used: torch.Tensor
    scoring: Scoring

    @staticmethod
    def of(prompt: PromptRows, device: torch.device, filled: bool = True) -> RowTensors:
        """Allocate the tensors; fill them with random numbers if `filled`."""
        at, blocks = prompt.positions, prompt.tokens // prompt.block_tokens
        new = partial(torch.empty, dtype=torch.bfloat16, device=device)
        q = new(len(at), prompt.heads * prompt.group, prompt.size)
        memory = new(blocks, prompt.block_tokens, prompt.heads, 2 * prompt.size)
        if filled:
            fill(q)
            fill(memory)
        table, scoring = np.random.default_rng(1).permutation(blocks), Scoring(prompt.size**-0.5)
        plan = partial(Rows.of, block_tokens=prompt.block_tokens, device=device)
        starts = prompt.starts
        apart = plan(at, starts, at[starts[1:] - 1] + 1, np.repeat(table[None], len(starts) - 1, 0))
        layer = OwnLayer(scoring, prompt.size, 0, prompt.block_tokens, 1)
        own = OwnRows((layer,), {layer: plan(at, np.array([0, len(at)]), at[-1:] + 1, table[None])})
        first, used = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (starts, apart.lengths))
        return RowTensors(q, memory.transpose(1, 2), torch.empty_like(q), own, apart, first, used, scoring)

    def run(self, TOGETHER: int) -> None:
        """Compute `out`, with kvkit's attention if `TOGETHER` is not 0, otherwise with vLLM's."""
        if TOGETHER:
            self.own.attend(0, self.q, self.pages, self.out)
        else:
            _by_vllm(self)

    def wrong(self) -> float:
        """Return the error of 64 rows of `out`, relative to their norm."""
        (rows,) = self.own.rows.values()
        indices = np.unique(np.linspace(0, rows.count - 1, 64).astype(np.int64))
        ends, sample_rows = np.array([0, len(indices)]), torch.from_numpy(indices).to(self.q.device)
        sample = Rows.of(
            rows.positions[indices], ends, rows.lengths, rows.tables, rows.block_tokens, rows.device
        )
        k, v = self.pages.chunk(2, -1)
        expected, _ = reference.blend_attention(self.q[sample_rows].double(), k, v, sample, self.scoring)
        return float((self.out[sample_rows].double() - expected).norm() / expected.norm())


def _by_vllm(tensors: RowTensors) -> None:
    """Compute `out` with every run as a sequence, as vLLM's own backend does: FlashAttention."""
    k, v = tensors.pages.transpose(1, 2).chunk(2, -1)
    compat.find("flash_attn_varlen_func")(
        q=tensors.q,
        k=k,
        v=v,
        out=tensors.out,
        cu_seqlens_q=tensors.query_starts,
        max_seqlen_q=int(np.diff(tensors.apart.row_starts).max()),
        seqused_k=tensors.used,
        max_seqlen_k=int(tensors.apart.lengths.max()),
        softmax_scale=tensors.scoring.scale,
        causal=True,
        block_table=tensors.apart.device_tables,
        fa_version=compat.find("get_flash_attn_version")(head_size=tensors.q.shape[2]),
    )


def problems() -> Iterator[Problem]:
    """Return all problems; no tensors are made yet."""
    return map(row_problem, PROMPTS)


def row_problem(prompt: PromptRows) -> Problem:
    """Return the problem of one prompt. It is not gated, as no config compiles a kernel of its own."""
    form = prompt.form
    moved = 2 * prompt.heads * prompt.size * (2 * prompt.tokens + 2 * form.rows * prompt.group)
    return Problem(
        name=str(prompt),
        bucket=form.bucket,
        kernel=attend,
        space=(entry(form.untuned), entry(not form.untuned)),
        make=partial(_case, prompt),
        work=lambda config: Work(moved),
        gated=False,
        operation="blend_attention",
    )


def _case(prompt: PromptRows, device: torch.device, filled: bool) -> Case:
    tensors = RowTensors.of(prompt, device, filled)
    if filled and device.type == "cuda":
        tensors.run(TOGETHER=0)  # fails if vLLM's cannot run: tuning has to compare both

    def launches(config: KernelConfig | None) -> tuple[HostLaunch, ...]:
        return (HostLaunch(tensors.run, {}, config or entry(prompt.form.untuned)),)

    def poison() -> None:
        tensors.out.fill_(torch.nan)

    def fault() -> str:
        error = tensors.wrong()
        return "" if error < 0.01 else f"rows differ from the reference by {error:.2g} of their norm"

    return Case(launches, poison, fault, (tensors.out,))
