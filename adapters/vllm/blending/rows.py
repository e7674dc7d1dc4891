"""Some rows of prompts through vLLM's own model and attention, at their positions, against KV in its pages.

vLLM's attention takes a batch of sequences, each with queries at its end. Rows that are not consecutive are
such a batch: every run of consecutive rows is a sequence that ends with it, and all runs of a request have
the request's block tables. In every layer all rows' K and V are written to the pages before any of them
attends, so that a row sees the new KV of the rows and the old of all other tokens at or before its position.
No kernel, layer or weight of vLLM's has to be known for that: quantised weights, adapters, experts, windows
and compiled graphs are the model's own business.
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
from kvkit.adapters.vllm.blending.order import NULL_BLOCK
from kvkit.adapters.vllm.pages import layer_order
from kvkit.adapters.vllm.step import Tables
from kvkit.blend.plan import BlendError

QueryTap = Callable[[int, torch.Tensor], None]
"""Shown an index into `RowRunner.layers`, and the rows' rotated queries [M, Hq, D] in the rows' order."""
_STAGES_TAG = 0x6B76
"""Keeps what stages send each other for rows apart from what vLLM sends over the same group."""


class _Enough(Exception):
    """No more of the model is wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsOf:
    """Rows of one request.

    Args:
        ids: int32 [M].
        positions: int64 [M], ascending.
        blocks: of the request, per KV cache group, from token 0 on. Those of the rows, and those that the
            rows attend to, must be there.
        lora: the request's adapter, None for none.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    blocks: Tables
    lora: LoRARequest | None = None

    def part(self, start: int, stop: int) -> RowsOf:
        """Rows [start, stop) of these."""
        return replace(self, ids=self.ids[start:stop], positions=self.positions[start:stop])

    @property
    def runs(self) -> NDArray[np.int64]:
        """Where runs of consecutive rows begin, ascending, and M."""
        begins: NDArray[np.int64] = np.flatnonzero(np.diff(self.positions, prepend=-2) != 1)
        return np.append(begins, len(self.positions))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """One of vLLM's attention layers that have pages of their own.

    Args:
        number: among those of the whole model, over all stages of a pipeline.
        module: vLLM's.
        table: which of the block tables is its.
        block_tokens: of a block of that table; the kernel's blocks in `module.kv_cache` may be smaller.
    """

    number: int
    name: str
    module: Any
    table: int
    block_tokens: int

    def kernel_blocks(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Which blocks of `module.kv_cache` a table's `blocks` are."""
        ratio = self.block_tokens // self.module.kv_cache.shape[2]
        split: NDArray[np.int64] = np.asarray(blocks, np.int64)[:, None] * ratio + np.arange(ratio)
        return split.reshape(-1)


def lora_request(lora: Lora | None) -> LoRARequest | None:
    """A request's adapter as vLLM's model runner wants it."""
    if lora is None:
        return None
    return LoRARequest(lora.name, lora.number, lora.path, is_3d_lora_weight=lora.fused_experts)


class PlannedRows(Protocol):
    """Some rows, ready for another attention than vLLM's; stands where the metadata of vLLM's would."""

    def forward(self, layer: int) -> Callable[..., Any]:
        """What is called in the place of `forward` of that layer's attention; K and V are written."""


class OtherAttention(Protocol):
    """Another attention than vLLM's, for all layers; for any number of runs of consecutive rows."""

    def wins(self, rows: Sequence[RowsOf], most_runs: int) -> bool:
        """Whether these rows are to get it; vLLM's takes `most_runs` runs at a time."""

    def plan(self, rows: Sequence[RowsOf], device: torch.device) -> PlannedRows:
        """For one run of the model."""


class RowRunner:
    """One rank's part of vLLM's model, run for rows. Every rank must run the same rows in the same order.

    Args:
        runner: vLLM's model runner, its pages bound.

    Attributes:
        layers: this stage's attention layers with pages of their own, in order.
        count: such layers of the whole model.
        stages: of the pipeline.
        most_rows, most_runs: what vLLM's buffers take at a time.
        own: the attention that rows get where it `wins`; None: all get vLLM's.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.config = runner.vllm_config
        self.device: torch.device = runner.device
        self._groups = runner.attn_groups
        self._block_tokens = [g.kv_cache_spec.block_size for g in runner.kv_cache_config.kv_cache_groups]
        modules = compat.attention_layers(self.config)
        found = {n: i for i, groups in enumerate(self._groups) for group in groups for n in group.layer_names}
        owners = [n for n in found if getattr(modules[n], "kv_sharing_target_layer_name", None) is None]
        counts = _counts(len(owners))
        first, self.count = sum(counts[: compat.find("get_pp_group")().rank_in_group]), sum(counts)
        self.layers = [
            AttentionLayer(first + i, name, modules[name], found[name], self._block_tokens[found[name]])
            for i, name in enumerate(sorted(owners, key=layer_order))
        ]
        self.stages: int = compat.find("get_pp_group")().world_size
        scheduler = self.config.scheduler_config
        self.most_rows = int(scheduler.max_num_batched_tokens)
        self.most_runs = int(scheduler.max_num_seqs)
        self.own: OtherAttention | None = None
        every = [group for groups in self._groups for group in groups]
        if self.device.type == "cpu" and all(group.kernel_block_size is None for group in every):
            self.most_runs = self.most_rows  # the CPU's metadata has no buffers of that size
        self._embeds = runner.supports_mm_inputs or self.config.model_config.enable_prompt_embeds
        self._sends: list[tuple[Any, torch.Tensor]] = []

    @property
    def model(self) -> Any:
        """vLLM's model."""
        return self.runner.get_model()

    def parts(self, rows: Sequence[RowsOf], most: int | None = None) -> Iterator[list[tuple[int, RowsOf]]]:
        """`rows` cut so that vLLM's buffers take each part: pieces, and which of `rows` each is of.

        To be run in this order: later pieces of a request see earlier ones. All of a part have the same
        adapter: those of several would alternate, in more turns than vLLM has room for.

        Args:
            most: rows of a part, at most; None: as many as fit.
        """
        most = min(most or self.most_rows, self.most_rows)
        part: list[tuple[int, RowsOf]] = []
        most_runs = most if self.own and self.own.wins(rows, self.most_runs) else self.most_runs
        free, runs = most, most_runs
        for which, given in enumerate(rows):
            begins, start = given.runs, 0
            while start < len(given.positions):
                if not (free and runs) or (part and part[0][1].lora != given.lora):
                    yield part
                    part, free, runs = [], most, most_runs
                    continue
                ahead = begins[np.searchsorted(begins, start, side="right") :]
                stop = min(start + free, int(ahead[min(runs, len(ahead)) - 1]))
                part.append((which, given.part(start, stop)))
                free, start = free - (stop - start), stop
                runs -= len(part[-1][1].runs) - 1
        if part:
            yield part

    def run(
        self,
        rows: Sequence[RowsOf],
        look: QueryTap | None = None,
        layers: int | None = None,
        *,
        hidden: bool = True,
    ) -> list[torch.Tensor]:
        """Compute rows that fit one part. Mutates their pages.

        Args:
            rows: each of another request, all with the same adapter.
            look: shown every layer's queries, once the layer's K, V and attention are computed.
            layers: of the whole model, so many are enough; None: all.
            hidden: whether hidden states are wanted.

        Returns:
            Hidden states [M, E] of each of `rows`, before the logits. Empty where they are not wanted, not
            all layers are, or another stage of the pipeline has them.

        Raises:
            BlendError: a row has no block to be written to.
        """
        return self._run(rows, look, self.count if layers is None else layers, hidden, None)

    def run_alone(self, rows: RowsOf, position: int) -> None:
        """Compute one row as if it stood at `position` with nothing before it. Mutates its page."""
        self._run([rows], None, self.count, False, position)

    @torch.inference_mode()
    def _run(
        self, rows: Sequence[RowsOf], look: QueryTap | None, layers: int, hidden: bool, position: int | None
    ) -> list[torch.Tensor]:
        mine = [layer for layer in self.layers if layer.number < layers]
        pipeline, whole = compat.find("get_pp_group")(), layers == self.count
        if not (mine or whole):
            return []
        own = None
        if self.own and self.own.wins(rows, self.most_runs):
            own = self.own.plan(rows, self.device)
        batch = _Sequences.of(rows, by_length=own is None)
        ids = np.concatenate([given.ids for given in rows])[batch.order].astype(np.int32)
        positions = batch.positions if position is None else np.array([position])
        metadata, slots = self._metadata(rows, batch, own)
        found: list[torch.Tensor] = []
        before = None if pipeline.is_first_rank else self._receive(len(ids))
        last = mine[-1].number if mine and not (hidden and whole) and mine[-1].number == layers - 1 else None
        with (
            suppress(_Enough),
            compat.active_adapter(self.runner, rows[0].lora, len(ids)),
            self._tapped(look and _reordered(look, self._tensor(np.argsort(batch.order))), last, own),
            compat.find("set_forward_context")(
                metadata, self.config, num_tokens=len(ids), slot_mapping=slots
            ),
        ):
            made = self.model(**self._inputs(ids, positions, before))
            if not pipeline.is_last_rank:
                self._send(made)
            elif hidden and whole:
                back = made[self._tensor(np.argsort(batch.order))]
                found = list(back.split([len(given.ids) for given in rows]))
        return found

    def _inputs(self, ids: NDArray[np.int32], positions: NDArray[np.int64], before: Any) -> dict[str, Any]:
        """What the model is called with."""
        model, at, tokens, embeds = self.model, self._tensor(positions), None, None
        if before is None:
            tokens = self._tensor(ids)
            if self._embeds:
                embeds = model.embed_input_ids(tokens)
                tokens = tokens if getattr(model, "requires_raw_input_tokens", False) else None
        if self.config.model_config.uses_mrope:  # text stands at the same place on all three axes
            at = at.expand(3, -1)
        return {"input_ids": tokens, "positions": at, "intermediate_tensors": before, "inputs_embeds": embeds}

    def _metadata(
        self, rows: Sequence[RowsOf], batch: _Sequences, own: PlannedRows | None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata, or `own`, and slots by layer, of every layer's own block table."""
        starts = torch.from_numpy(batch.starts.astype(np.int32))
        ends = torch.from_numpy(batch.ends.astype(np.int32))
        prefix_lm = self.config.model_config.is_mm_prefix_lm
        common = {
            "query_start_loc": starts.to(self.device),
            "query_start_loc_cpu": starts,
            "seq_lens": ends.to(self.device),
            "seq_lens_cpu_upper_bound": ends,
            "num_reqs": len(ends),
            "num_actual_tokens": len(batch.order),
            "max_query_len": int(np.diff(batch.starts).max()),
            "max_seq_len": int(batch.ends.max()),
            "positions": self._tensor(batch.positions),
            "is_prefilling": torch.ones(len(ends), dtype=torch.bool),
            "mm_req_doc_ranges": {i: [] for i in range(len(ends))} if prefix_lm else None,
        }
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for number, (groups, size) in enumerate(zip(self._groups, self._block_tokens, strict=True)):
            table = _tables([given.blocks[number] for given in rows], -(-int(batch.ends.max()) // size))
            at = table[batch.owners, batch.positions // size]
            if (at < 0).any():
                raise BlendError(f"blocks of group {number}: rows have none to be written to")
            where = self._tensor(at.astype(np.int64) * size + batch.positions % size)
            slots |= dict.fromkeys((name for group in groups for name in group.layer_names), where)
            if own is not None:
                continue
            present = np.maximum(table, NULL_BLOCK)  # nobody looks at what is not there
            sequences = self._tensor(present[batch.owners[batch.starts[:-1]]])
            built = compat.find("CommonAttentionMetadata")(
                **common, block_table_tensor=sequences, slot_mapping=where
            )
            for group in groups:
                metadata |= dict.fromkeys(group.layer_names, group.build_metadata(built))
        return metadata if own is None else dict.fromkeys(slots, own), slots

    def _tapped(
        self, look: QueryTap | None, last: int | None, own: PlannedRows | None
    ) -> AbstractContextManager[None]:
        """Have `look` see every layer's queries behind its attention; behind layer `last` it is enough."""
        return compat.attention_instead(
            (
                layer.module,
                _tap(
                    layer,
                    own.forward(index) if own else layer.module.impl.forward,
                    index,
                    look,
                    layer.number == last,
                ),
            )
            for index, layer in enumerate(self.layers)
            if look or own or layer.number == last
        )

    def _receive(self, count: int) -> Any:
        """What the stage before made of `count` rows."""
        tensors = self.model.make_empty_intermediate_tensors(
            batch_size=count, dtype=self.config.model_config.dtype, device=self.device
        )
        stages = compat.find("get_pp_group")()
        for key in sorted(tensors.tensors):
            near = torch.empty_like(tensors[key], device="cpu")
            torch.distributed.recv(near, stages.prev_rank, stages.cpu_group, _STAGES_TAG)
            tensors[key].copy_(near)
        return tensors

    def settle(self) -> None:
        """Wait until the next stage has what was sent: without that, it is lost when this object goes.

        Not to be called in the step of vLLM in which it was sent (see `Blender.step`).
        """
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _send(self, tensors: Any) -> None:
        """Begin to send the next stage what it goes on with; vLLM's own sends may be under way."""
        stages = compat.find("get_pp_group")()
        near = [tensors[key].cpu().contiguous() for key in sorted(tensors.tensors)]
        self._sends += [
            (torch.distributed.isend(x, stages.next_rank, stages.cpu_group, _STAGES_TAG), x) for x in near
        ]

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """Rows as sequences.

    Args:
        order: int64 [M], where each of the batch's rows is in the rows as given.
        positions: int64 [M], in the batch's order.
        owners: int64 [M], which request each is of.
        starts: int64 [S + 1], where each sequence's rows begin.
        ends: int64 [S], the position after each sequence's last row.
    """

    order: NDArray[np.int64]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[RowsOf], by_length: bool) -> _Sequences:
        """As they are, or short ones first, as vLLM's attention wants them."""
        sizes = [len(given.positions) for given in rows]
        bases = np.cumsum([0, *sizes])
        begins = np.concatenate([b + g.runs[:-1] for b, g in zip(bases, rows, strict=False)])
        lengths = np.diff(np.append(begins, bases[-1]))
        if by_length:
            shortest = np.argsort(lengths, kind="stable")
            begins, lengths = begins[shortest], lengths[shortest]
        starts = np.append(0, np.cumsum(lengths))
        order = np.repeat(begins - starts[:-1], lengths) + np.arange(bases[-1])
        positions = np.concatenate([given.positions for given in rows])[order]
        owners = np.repeat(np.arange(len(rows)), sizes)[order]
        return _Sequences(order, positions, owners, starts, positions[starts[1:] - 1] + 1)


def _tables(blocks: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """Block ids [requests, width], -1 where there are none."""
    table = np.full((len(blocks), width), -1, np.int32)
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = ids[:width]
    return table


def _reordered(look: QueryTap, back: torch.Tensor) -> QueryTap:
    return lambda index, q: look(index, q[back])


def _tap(
    layer: AttentionLayer, forward: Callable[..., Any], index: int, look: QueryTap | None, last: bool
) -> Callable[..., Any]:
    separate = not layer.module.attn_backend.forward_includes_kv_cache_update

    def tapped(module: Any, query: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if last and look is None and separate:  # K and V are written, and nobody wants the rest
            raise _Enough
        done = forward(module, query, *rest, **more)
        if look is not None:
            look(index, query)
        if last:
            raise _Enough
        return done

    return tapped


def _counts(mine: int) -> list[int]:
    """How many layers each stage of the pipeline has."""
    stages = compat.find("get_pp_group")()
    if stages.world_size == 1:
        return [mine]
    counts: list[Any] = [None] * stages.world_size
    torch.distributed.all_gather_object(counts, mine, group=stages.cpu_group)
    return counts
