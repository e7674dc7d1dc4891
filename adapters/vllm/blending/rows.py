"""Runs of rows of prompts through vLLM's own model, at their positions, against the KV in its pages.

vLLM's attention takes a batch of sequences, each with queries at its end. Rows that are not consecutive make
such a batch: every run of consecutive rows is a sequence that ends with the run, and all runs of a request
have the request's block tables. In every layer, K and V of all rows are written to the pages before any row
attends. So a row attends to new KV of rows, and to old KV of all other tokens, at or before its position. No
knowledge of vLLM's kernels, layers or weights is needed: the model itself handles quantised weights,
adapters, experts, windows and compiled graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.lora.request import LoRARequest

from kvkit.adapters.engine.lookup_request import Lora
from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.page_order import NULL_BLOCK
from kvkit.adapters.vllm.pages import layer_order
from kvkit.adapters.vllm.step import Tables
from kvkit.blend.plan import BlendError

OnQueries = Callable[[int, torch.Tensor], None]
"""Called with an index into `RowRunner.layers`, and rotated queries [M, Hq, D] in the order of the rows."""
OnKv = Callable[[int], None]
"""Called with an index into `RowRunner.layers` once K and V of the rows are in the layer's pages."""
_STAGES_TAG = 0x6B76
"""Tag of messages between stages about rows, as vLLM sends over the same group."""


class _StopModel(Exception):
    """Raised to stop a run of the model early."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """Rows of one request.

    Args:
        ids: int32 [M].
        positions: int64 [M], ascending.
        blocks: block tables of the request, per KV cache group, from token 0 on. Blocks of the rows, and of
            the tokens that rows attend to, must be present.
        lora: the request's adapter; None: none.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    blocks: Tables
    lora: LoRARequest | None = None

    def slice(self, start: int, stop: int) -> RequestRows:
        """Return rows [start, stop) of these."""
        return replace(self, ids=self.ids[start:stop], positions=self.positions[start:stop])

    @property
    def runs(self) -> NDArray[np.int64]:
        """Index of the first row of each run of consecutive rows, ascending, then M."""
        run_starts: NDArray[np.int64] = np.flatnonzero(np.diff(self.positions, prepend=-2) != 1)
        return np.append(run_starts, len(self.positions))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """An attention layer of vLLM with pages of its own.

    Args:
        number: index among such layers of the whole model, over all stages of a pipeline.
        name: vLLM's name of the layer.
        module: vLLM's layer.
        table: index of its block table.
        block_tokens: tokens per block of that table; the kernel's blocks in `module.kv_cache` may be smaller.
    """

    number: int
    name: str
    module: Any
    table: int
    block_tokens: int

    def kernel_blocks(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Convert `blocks` of its table to blocks of `module.kv_cache`; -1 becomes the null block."""
        ratio = self.block_tokens // self.module.kv_cache.shape[2]
        present = np.maximum(np.asarray(blocks, np.int64), NULL_BLOCK)
        split: NDArray[np.int64] = present[:, None] * ratio + np.arange(ratio)
        return split.reshape(-1)


def lora_request(lora: Lora | None) -> LoRARequest | None:
    """Return a request's adapter as vLLM's model runner takes it."""
    if lora is None:
        return None
    return LoRARequest(lora.name, lora.number, lora.path, is_3d_lora_weight=lora.fused_experts)


class PreparedRows(Protocol):
    """Rows prepared for kvkit's attention; they replace vLLM's attention metadata."""

    def forward_of(self, layer: int) -> Callable[..., Any]:
        """Return a replacement for `forward` of a layer's attention; K and V are written before its call."""


class RowAttention(Protocol):
    """kvkit's attention for all layers and any number of runs of consecutive rows: `KvkitAttention`."""

    def is_faster(self, rows: Sequence[RequestRows], max_runs: int) -> bool:
        """Return whether to use it for these rows; vLLM's takes `max_runs` runs at a time."""

    def plan_rows(self, rows: Sequence[RequestRows], device: torch.device) -> PreparedRows:
        """Prepare rows for one run of the model."""


class RowRunner:
    """Runner of rows through one rank's part of vLLM's model. All ranks must run the same rows in order.

    Args:
        runner: vLLM's model runner, with bound pages.

    Attributes:
        layers: attention layers of this stage with pages of their own, in order.
        count: number of such layers in the whole model.
        writes_kv_first: whether every layer writes K and V of rows before its `forward`.
        stages: number of pipeline stages.
        max_rows, max_runs: numbers of rows and runs that vLLM's buffers take at a time.
        kvkit_attention: attention that is used for rows where it `is_faster`; None: vLLM's for all rows.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.config = runner.vllm_config
        self.device: torch.device = runner.device
        self._groups = runner.attn_groups
        self._block_tokens = [g.kv_cache_spec.block_size for g in runner.kv_cache_config.kv_cache_groups]
        modules = compat.attention_layers(self.config)
        tables = {
            n: i for i, groups in enumerate(self._groups) for group in groups for n in group.layer_names
        }
        owners = [n for n in tables if getattr(modules[n], "kv_sharing_target_layer_name", None) is None]
        counts = _layer_counts(len(owners))
        first, self.count = sum(counts[: compat.find("get_pp_group")().rank_in_group]), sum(counts)
        self.layers = [
            AttentionLayer(first + i, name, modules[name], tables[name], self._block_tokens[tables[name]])
            for i, name in enumerate(sorted(owners, key=layer_order))
        ]
        self.writes_kv_first = not any(
            layer.module.attn_backend.forward_includes_kv_cache_update for layer in self.layers
        )
        self.stages: int = compat.find("get_pp_group")().world_size
        scheduler = self.config.scheduler_config
        self.max_rows = int(scheduler.max_num_batched_tokens)
        self.max_runs = int(scheduler.max_num_seqs)
        self.kvkit_attention: RowAttention | None = None
        all_groups = [group for groups in self._groups for group in groups]
        if self.device.type == "cpu" and all(group.kernel_block_size is None for group in all_groups):
            self.max_runs = self.max_rows  # metadata on a CPU has no buffers for a number of runs
        self._embeds = runner.supports_mm_inputs or self.config.model_config.enable_prompt_embeds
        self._sends: list[tuple[Any, torch.Tensor]] = []

    @property
    def model(self) -> Any:
        """vLLM's model."""
        return self.runner.get_model()

    def batches(
        self, rows: Sequence[RequestRows], limit: int | None = None
    ) -> Iterator[list[tuple[int, RequestRows]]]:
        """Cut `rows` into batches that fit vLLM's buffers; each is a list of (index in `rows`, slice of it).

        Run the batches in this order, as later slices of a request attend to earlier ones. All slices of a
        batch have the same adapter: several adapters would alternate more often than vLLM has room for.

        Args:
            limit: maximum rows of a batch; None: as many as fit.
        """
        limit = min(limit or self.max_rows, self.max_rows)
        batch: list[tuple[int, RequestRows]] = []
        max_runs = limit if self._kvkit_attention_for(rows) else self.max_runs
        free, runs = limit, max_runs
        for index, request in enumerate(rows):
            run_starts, start = request.runs, 0
            while start < len(request.positions):
                if not (free and runs) or (batch and batch[0][1].lora != request.lora):
                    yield batch
                    batch, free, runs = [], limit, max_runs
                    continue
                later_starts = run_starts[np.searchsorted(run_starts, start, side="right") :]
                stop = min(start + free, int(later_starts[min(runs, len(later_starts)) - 1]))
                batch.append((index, request.slice(start, stop)))
                free, start = free - (stop - start), stop
                runs -= len(batch[-1][1].runs) - 1
        if batch:
            yield batch

    @torch.inference_mode()
    def run(
        self,
        rows: Sequence[RequestRows],
        on_queries: OnQueries | None = None,
        layers: int | None = None,
        *,
        on_kv: OnKv | None = None,
        hidden: bool = True,
        position: int | None = None,
    ) -> list[torch.Tensor]:
        """Compute the rows of one batch. Mutates their pages.

        Args:
            rows: rows of different requests, all with the same adapter.
            on_queries: called with every layer's queries, once the layer's K, V and attention are computed.
            layers: number of the whole model's first layers to compute; None: all.
            on_kv: called in every layer before its attention.
            hidden: whether to return hidden states.
            position: position that a single row's K and Q get, with nothing before it; None: rows have their
                own positions.

        Returns:
            Hidden states [M, E] of each of `rows`, before the logits. Empty without `hidden`, with fewer than
            all layers, or if another stage of the pipeline has them.

        Raises:
            BlendError: a row has no block to be written to.
        """
        layers = self.count if layers is None else layers
        local = [layer.number for layer in self.layers if layer.number < layers]
        pipeline, complete = compat.find("get_pp_group")(), layers == self.count
        if not (local or complete):
            return []
        returns_hidden = hidden and complete
        last = layers - 1 if layers - 1 in local[-1:] and not returns_hidden else None
        attention = self._kvkit_attention_for(rows)
        kvkit_rows = None if attention is None else attention.plan_rows(rows, self.device)
        sequences = _Sequences.of(rows, by_length=kvkit_rows is None)
        ids = np.concatenate([request.ids for request in rows])[sequences.order].astype(np.int32)
        positions = sequences.positions if position is None else np.array([position])
        back = self._tensor(np.argsort(sequences.order))
        metadata, slots = self._metadata(rows, sequences, kvkit_rows)
        received = None if pipeline.is_first_rank else self._receive(len(ids))
        with (
            suppress(_StopModel),
            compat.active_adapter(self.runner, rows[0].lora, len(ids)),
            self._patched(on_queries and _in_row_order(on_queries, back), on_kv, last, kvkit_rows),
            compat.find("set_forward_context")(
                metadata, self.config, num_tokens=len(ids), slot_mapping=slots
            ),
        ):
            output = self.model(**self._inputs(ids, positions, received))
            if not pipeline.is_last_rank:
                self._send(output)
            elif returns_hidden:
                return list(output[back].split([len(request.ids) for request in rows]))
        return []

    def engine_attention(
        self, index: int, rows: Sequence[RequestRows]
    ) -> Callable[[torch.Tensor, torch.Tensor], object]:
        """Return vLLM's attention of rows in layer `index`, for K and V that are in the pages.

        It takes queries and an output, [M, Hq, D], the shortest runs first.
        """
        metadata, _ = self._metadata(rows, _Sequences.of(rows, by_length=True), None)
        layer = self.layers[index]
        return lambda q, out: layer.module.impl.forward(
            layer.module, q, None, None, layer.module.kv_cache, metadata[layer.name], out
        )

    def _kvkit_attention_for(self, rows: Sequence[RequestRows]) -> RowAttention | None:
        """Return kvkit's attention if it is faster for these rows; None: the engine's is used."""
        attention = self.kvkit_attention
        return attention if attention and attention.is_faster(rows, self.max_runs) else None

    def _inputs(self, ids: NDArray[np.int32], positions: NDArray[np.int64], received: Any) -> dict[str, Any]:
        """Return the arguments for a call of the model."""
        model, model_positions, tokens, embeds = self.model, self._tensor(positions), None, None
        if received is None:
            tokens = self._tensor(ids)
            if self._embeds:
                embeds = model.embed_input_ids(tokens)
                tokens = tokens if getattr(model, "requires_raw_input_tokens", False) else None
        if self.config.model_config.uses_mrope:  # text has the same position on all three axes
            model_positions = model_positions.expand(3, -1)
        return {
            "input_ids": tokens,
            "positions": model_positions,
            "intermediate_tensors": received,
            "inputs_embeds": embeds,
        }

    def _metadata(
        self, rows: Sequence[RequestRows], sequences: _Sequences, kvkit_rows: PreparedRows | None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return attention metadata (or `kvkit_rows`) and slots by layer, from the layer's block table."""
        starts = torch.from_numpy(sequences.starts.astype(np.int32))
        ends = torch.from_numpy(sequences.ends.astype(np.int32))
        prefix_lm = self.config.model_config.is_mm_prefix_lm
        common = {
            "query_start_loc": starts.to(self.device),
            "query_start_loc_cpu": starts,
            "seq_lens": ends.to(self.device),
            "seq_lens_cpu_upper_bound": ends,
            "num_reqs": len(ends),
            "num_actual_tokens": len(sequences.order),
            "max_query_len": int(np.diff(sequences.starts).max()),
            "max_seq_len": int(sequences.ends.max()),
            "positions": self._tensor(sequences.positions),
            "is_prefilling": torch.ones(len(ends), dtype=torch.bool),
            "mm_req_doc_ranges": {i: [] for i in range(len(ends))} if prefix_lm else None,
        }
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for index, (groups, size) in enumerate(zip(self._groups, self._block_tokens, strict=True)):
            table = _tables(
                [request.blocks[index] for request in rows], -(-int(sequences.ends.max()) // size)
            )
            blocks = table[sequences.owners, sequences.positions // size]
            if (blocks < 0).any():
                raise BlendError(f"KV cache group {index}: rows have no block to be written to")
            row_slots = self._tensor(blocks.astype(np.int64) * size + sequences.positions % size)
            slots |= dict.fromkeys((name for group in groups for name in group.layer_names), row_slots)
            if kvkit_rows is not None:
                continue
            present = np.maximum(table, NULL_BLOCK)  # no row attends to missing blocks
            block_tables = self._tensor(present[sequences.owners[sequences.starts[:-1]]])
            group_metadata = compat.find("CommonAttentionMetadata")(
                **common, block_table_tensor=block_tables, slot_mapping=row_slots
            )
            for group in groups:
                metadata |= dict.fromkeys(group.layer_names, group.build_metadata(group_metadata))
        return metadata if kvkit_rows is None else dict.fromkeys(slots, kvkit_rows), slots

    def _patched(
        self,
        on_queries: OnQueries | None,
        on_kv: OnKv | None,
        last: int | None,
        kvkit_rows: PreparedRows | None,
    ) -> AbstractContextManager[None]:
        """Replace the layers' `forward` by kvkit's attention, make the calls, and stop after layer `last`."""
        return compat.attention_instead(
            (
                layer.module,
                _patched_forward(
                    layer,
                    kvkit_rows.forward_of(index) if kvkit_rows else layer.module.impl.forward,
                    index,
                    on_queries,
                    on_kv,
                    layer.number == last,
                ),
            )
            for index, layer in enumerate(self.layers)
            if on_queries or on_kv or kvkit_rows or layer.number == last
        )

    def _receive(self, count: int) -> Any:
        """Receive the previous stage's output for `count` rows."""
        tensors = self.model.make_empty_intermediate_tensors(
            batch_size=count, dtype=self.config.model_config.dtype, device=self.device
        )
        stages = compat.find("get_pp_group")()
        for key in sorted(tensors.tensors):
            on_cpu = torch.empty_like(tensors[key], device="cpu")
            torch.distributed.recv(on_cpu, stages.prev_rank, stages.cpu_group, _STAGES_TAG)
            tensors[key].copy_(on_cpu)
        return tensors

    def wait_for_sends(self) -> None:
        """Wait until the next stage has received all sends; otherwise they are lost with this object.

        Do not call it in the step of vLLM in which they were sent (see `Blender.step`).
        """
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _send(self, tensors: Any) -> None:
        """Start sending the next stage its input. vLLM's own sends may be in flight."""
        stages = compat.find("get_pp_group")()
        on_cpu = [tensors[key].cpu().contiguous() for key in sorted(tensors.tensors)]
        self._sends += [
            (torch.distributed.isend(x, stages.next_rank, stages.cpu_group, _STAGES_TAG), x) for x in on_cpu
        ]

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """A batch of sequences, one for each run of consecutive rows.

    Args:
        order: int64 [M], index of each row of the batch among the given rows.
        positions: int64 [M], in the batch's order.
        owners: int64 [M], index of each row's request.
        starts: int64 [S + 1], the first row of each sequence, then M.
        ends: int64 [S], the position after each sequence's last row.
    """

    order: NDArray[np.int64]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[RequestRows], by_length: bool) -> _Sequences:
        """Make the batch in the given order, or with short sequences first, as vLLM's attention expects."""
        sizes = [len(request.positions) for request in rows]
        offsets = np.cumsum([0, *sizes])
        firsts = np.concatenate([b + g.runs[:-1] for b, g in zip(offsets, rows, strict=False)])
        lengths = np.diff(np.append(firsts, offsets[-1]))
        if by_length:
            shortest_first = np.argsort(lengths, kind="stable")
            firsts, lengths = firsts[shortest_first], lengths[shortest_first]
        starts = np.append(0, np.cumsum(lengths))
        order = np.repeat(firsts - starts[:-1], lengths) + np.arange(offsets[-1])
        positions = np.concatenate([request.positions for request in rows])[order]
        owners = np.repeat(np.arange(len(rows)), sizes)[order]
        return _Sequences(order, positions, owners, starts, positions[starts[1:] - 1] + 1)


def _tables(blocks: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """Return block ids [requests, width], padded with -1."""
    table = np.full((len(blocks), width), -1, np.int32)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = ids[:width]
    return table


def _in_row_order(on_queries: OnQueries, back: torch.Tensor) -> OnQueries:
    return lambda index, q: on_queries(index, q[back])


def _patched_forward(
    layer: AttentionLayer,
    forward: Callable[..., Any],
    index: int,
    on_queries: OnQueries | None,
    on_kv: OnKv | None,
    is_last: bool,
) -> Callable[..., Any]:
    """Return `forward` with `on_kv` before it and `on_queries` after it; the last layer stops the model."""
    separate = not layer.module.attn_backend.forward_includes_kv_cache_update

    def patched(module: Any, query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if on_kv is not None:
            on_kv(index)
        if is_last and on_queries is None and separate:  # K and V are written; the rest is not needed
            raise _StopModel
        result = forward(module, query, *rest, **more)
        if on_queries is not None:
            on_queries(index, query)
        if is_last:
            raise _StopModel
        return result

    return patched


def _layer_counts(local_count: int) -> list[int]:
    """Return the number of layers of each pipeline stage."""
    stages = compat.find("get_pp_group")()
    if stages.world_size == 1:
        return [local_count]
    counts: list[Any] = [None] * stages.world_size
    torch.distributed.all_gather_object(counts, local_count, group=stages.cpu_group)
    return counts
