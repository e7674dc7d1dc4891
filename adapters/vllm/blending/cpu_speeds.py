"""Measured speeds of the engine's attention and of kvkit's on a CPU, by which one is chosen for rows.

Engines' attention pads short runs of rows to tiles, whose size depends on the CPU's instructions, so the
choice is measured when the engine starts: both compute the same rows in one layer, in long and in short runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.attention import KvkitAttention
from kvkit.adapters.vllm.blending.rows import RequestRows, RowRunner
from kvkit.adapters.vllm.step import Tables
from kvkit.kernels.attention.torch_cpu import TILE_ROWS

log = logging.getLogger(__name__)

RUN_LENGTHS = (1, 8, 64)
"""Rows of a run, ascending."""
ROWS, CONTEXT = TILE_ROWS, 1024
"""Rows that are measured, and keys that the last one sees, or as many as the model takes."""
ROUNDS = 5
"""Rounds in which all are measured in turn; each one's fastest counts."""


@dataclass(frozen=True, slots=True)
class CpuSpeeds:
    """Seconds of attention in one layer.

    Args:
        engine: seconds per row and key that it sees, for each of `RUN_LENGTHS`.
        kvkit: seconds per row and key of its tile.
        copy: seconds to copy a token's K and V out of its page, which kvkit's attention needs.
    """

    engine: tuple[float, ...]
    kvkit: float
    copy: float

    def is_kvkit_faster(self, rows: Sequence[RequestRows]) -> bool:
        """Return whether kvkit's attention is expected to be faster for these rows, at least one."""
        engine_s = kvkit_s = 0.0
        for request in rows:
            seen = request.positions + 1
            if not len(seen):
                continue
            run_length = len(seen) / (len(request.runs) - 1)
            engine_s += int(seen.sum()) * float(
                np.interp(np.log(run_length), np.log(RUN_LENGTHS), self.engine)
            )
            kvkit_s += _tile_pairs(seen) * self.kvkit + int(seen[-1]) * self.copy
        return kvkit_s < engine_s

    def described(self, keys: int) -> str:
        """Return the time of a row that sees `keys` keys, in words."""
        runs = [
            f"{e * keys * 1e6:.1f} us in runs of {n}" for n, e in zip(RUN_LENGTHS, self.engine, strict=True)
        ]
        own, copy = (f"{seconds * keys * 1e6:.1f} us" for seconds in (self.kvkit, self.copy))
        return f"the engine {', '.join(runs)}; kvkit {own}, and the copy of the keys {copy}"


def _tile_pairs(seen: NDArray[np.int64]) -> int:
    """Return the rows times keys of all tiles: each has the keys that its last row sees.

    Args:
        seen: int64 [M], number of keys that each row sees, ascending.
    """
    last = np.minimum(np.arange(TILE_ROWS, len(seen) + TILE_ROWS, TILE_ROWS), len(seen))
    return int((np.diff(last, prepend=0) * seen[last - 1]).sum())


@torch.inference_mode()
def measure_speeds(rows: RowRunner, attention: KvkitAttention) -> CpuSpeeds:
    """Measure both in the rank's first layer; all ranks get the same numbers, and must call this together.

    Mutates no pages.
    """
    context = min(CONTEXT, int(rows.config.model_config.max_model_len))
    count, calls = min(ROWS, context), list[Callable[[], object]]()
    module, size = rows.layers[0].module, rows.layers[0].block_tokens
    blocks = len(module.kv_cache) * module.kv_cache.shape[2] // size
    tokens = min(layer.block_tokens for layer in rows.layers)  # other groups' blocks may be smaller
    table = (1 + np.arange(-(-context // tokens)) % (blocks - 1)).tolist()
    tables: Tables = tuple(table for _ in range(1 + max(layer.table for layer in rows.layers)))
    query = torch.zeros(count, module.num_heads, module.head_size, dtype=module.dtype)
    seen = []
    for length in RUN_LENGTHS:
        request = spread_rows(count, length, context, tables)
        seen.append(int((request.positions + 1).sum()))
        engine, planned = rows.engine_attention(0, [request]), attention.plan_rows([request], rows.device)
        kvkit, output = planned.forward_of(0), torch.empty_like(query)
        calls.append(partial(engine, query, output))
        calls.append(partial(kvkit, module, query, None, None, module.kv_cache, None, output))
    calls.append(partial(attention.pages.read, 0, tables, context))
    seconds = torch.tensor(_fastest(calls), dtype=torch.double)
    ranks = compat.find("get_world_group")()
    if ranks.world_size > 1:
        torch.distributed.all_reduce(seconds, group=ranks.cpu_group)
    *per_run, copy = (seconds / ranks.world_size).tolist()
    speeds = CpuSpeeds(
        tuple(s / pairs for s, pairs in zip(per_run[0::2], seen, strict=True)),
        max(min(per_run[1::2]) - copy, 0.0) / (count * context),
        copy / context,
    )
    log.info("attention of a row to %d keys takes %s", context, speeds.described(context))
    return speeds


def _fastest(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Make all calls in turn, `ROUNDS` times; return the seconds of the fastest one of each."""
    rounds = []
    for _ in range(ROUNDS):
        times = [time.perf_counter()]
        for call in calls:
            call()
            times.append(time.perf_counter())
        rounds.append(np.diff(times))
    return [float(seconds) for seconds in np.min(rounds, axis=0)]


def spread_rows(count: int, length: int, context: int, tables: Tables) -> RequestRows:
    """Return rows in runs of `length`, evenly spread over a request of `context` tokens up to its end."""
    length = min(length, count)
    ends = np.linspace(context, length, count // length).astype(np.int64)[::-1]
    positions = (ends[:, None] - length + np.arange(length)).reshape(-1)
    return RequestRows(np.zeros(len(positions), np.int32), positions, tables)
