"""Map vLLM's KV cache to kvkit's layer groups: each group's layers, pages and block table."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvkit.adapters.engine.dividing import divide
from kvkit.adapters.vllm import compat, states
from kvkit.adapters.vllm.blending.page_order import PageOrder
from kvkit.format.layout import KVLayout, LayerGroup, LayoutError, Precision, heads_of
from kvkit.kernels.pages.api import Pages
from kvkit.settings import ConfigError
from kvkit.transfer.sequence import SequencePages

_KNOWN = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)


@dataclass(frozen=True, slots=True)
class RankHeads:
    """A rank's share of the model's KV heads, and its division into records.

    Args:
        model: distinct KV heads of a layer over all ranks; latents (MLA) count as one head.
        rank, ranks: rank and size of tensor parallelism. With more ranks than heads, neighbouring ranks hold
            copies of the same head.
        record_ranks: number of ranks to divide the heads by; a record holds the share of one.
        per_host: neighbouring ranks that are known to be on one host.
    """

    model: int
    rank: int
    ranks: int
    record_ranks: int
    per_host: int = 1

    def held_heads(self, spec: KVCacheSpec) -> int:
        """Return the number of a layer's heads that the rank has."""
        return len(self._rank_heads(spec))

    def reads_slices(self, spec: KVCacheSpec) -> bool:
        """Return whether records hold more heads of a layer than the rank has.

        Such a rank reads slices of records and stores none.
        """
        heads = self._model_heads(spec)
        return self.held_heads(spec) < heads // min(self.record_ranks, heads)

    def record_copies(self, specs: Iterable[KVCacheSpec]) -> tuple[int, int]:
        """Return this rank's index among the ranks of its host with the same records, and their number.

        "Same records" means those of all `specs`.
        """
        size = min(max(1, self.ranks // min(self.record_ranks, self._model_heads(spec))) for spec in specs)
        size = math.gcd(size, self.per_host)
        return self.rank % size, size

    def record_groups(self, layer: LayerGroup, spec: KVCacheSpec) -> list[LayerGroup]:
        """Divide a layer's heads into layer groups, each with its own records.

        Args:
            layer: the layer, with all heads of the rank.

        Raises:
            ConfigError: the rank's heads neither divide into such records nor are an equal part of one.
        """
        heads, held = self._model_heads(spec), self.held_heads(spec)
        records = min(self.record_ranks, heads)
        record_heads = heads // records
        if heads % records or (held % record_heads and record_heads % held):
            sizes = [n for n in divisors(heads) if held % (heads // n) == 0 or (heads // n) % held == 0]
            raise ConfigError(
                f"record_ranks = {self.record_ranks}: this engine's {self.ranks} ranks have {held} KV heads "
                f"each of the model's {heads}; want one of {', '.join(map(str, sizes))}"
            )
        page_bytes = layer.page_bytes and layer.page_bytes * record_heads // held
        firsts = dict.fromkeys(head // record_heads * record_heads for head in self._rank_heads(spec))
        return [
            replace(layer, kv_heads=record_heads, page_bytes=page_bytes, first_head=first, model_heads=heads)
            for first in firsts
        ]

    def common_heads(self, record_group: LayerGroup, spec: KVCacheSpec) -> tuple[range, range]:
        """Return the rank's heads in one of its `record_groups`: indices into the rank's and the record's."""
        held, start = self._rank_heads(spec), record_group.first_head
        common = range(max(held.start, start), min(held.stop, start + record_group.kv_heads))
        in_rank, in_record = (range(common.start - n, common.stop - n) for n in (held.start, start))
        return in_rank, in_record

    def _rank_heads(self, spec: KVCacheSpec) -> range:
        return heads_of(self._model_heads(spec), self.rank, self.ranks)

    def _model_heads(self, spec: KVCacheSpec) -> int:
        return 1 if isinstance(spec, MLAAttentionSpec) else self.model


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers of a pipeline's stages, and their division into records.

    Args:
        stages: the layers of each stage, as `layer_specs` returns them.
        record_stages: number of stages to divide the layers by; a record holds the share of one.
    """

    stages: Sequence[Sequence[Mapping[str, KVCacheSpec]]]
    record_stages: int

    def record_ranges(self, table: int, names: Sequence[str]) -> tuple[list[str], list[range]]:
        """Return the model's layers with one spec, in order, and the index ranges of this stage's records.

        Args:
            table: index of vLLM's KV cache group.
            names: names of this stage's layers with that spec.

        Raises:
            ConfigError: the layers of some stage do not divide into such records.
        """
        stage_specs = [stage[table] for stage in self.stages]
        spec = next(specs[names[0]] for specs in stage_specs if names[0] in specs)
        stage_names = [[name for name in specs if specs[name] == spec] for specs in stage_specs]
        all_names = sorted(itertools.chain(*stage_names), key=layer_order)
        total, first = len(all_names), all_names.index(names[0])
        setting = f"record_stages = {self.record_stages}"
        owned = range(first, first + len(names))
        if all_names[owned.start : owned.stop] != list(names) or not all(stage_names):
            raise ConfigError(
                f"{setting}: layers like {names[0]} do not have the same spec in all stages; want none"
            )
        ends = list(itertools.accumulate(map(len, stage_names)))
        choices = [n for n in divisors(total) if not any(end % (total // n) for end in ends)]
        records = min(self.record_stages, total)
        if records not in choices:
            counts = ", ".join(str(len(layers)) for layers in stage_names)
            raise ConfigError(
                f"{setting}: the stages have {counts} of the {total} layers like {names[0]}; "
                f"want one of {', '.join(map(str, choices))}"
            )
        record_layers = total // records
        return all_names, [range(start, start + record_layers) for start in owned[::record_layers]]


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one kvkit layer group.

    Args:
        table: index of the group's block table in vLLM.
        block_tokens: tokens of a block of that table; for states, tokens of a chunk.
        ratio: kernel blocks per block of that table.
        pages: pages of the kernel's blocks; of vLLM's blocks if opaque.
        names: vLLM's names of the layers, in order.
        spec: spec shared by the layers.
    """

    table: int
    block_tokens: int
    ratio: int
    pages: Pages
    names: tuple[str, ...]
    spec: KVCacheSpec

    def sequence_pages(self, blocks: Sequence[int], tokens: int) -> SequencePages:
        """Return the pages of `tokens` tokens from the first of `blocks` on.

        Tokens beyond the last of `blocks` have block id -1 (missing).
        """
        ids = np.full(-(-tokens // self.block_tokens), -1, np.int64)
        ids[: len(blocks)] = blocks[: len(ids)]
        split = ids[:, None] * self.ratio + np.arange(self.ratio)  # -1 stays negative
        return SequencePages(self.pages, blocks=split.reshape(-1))

    def has_attended(self, blocks: Sequence[int], start: int, first: int, stop: int) -> bool:
        """Return whether `blocks` hold every token of [first, stop) that later tokens attend to.

        Args:
            start: first token of the first block.
        """
        if isinstance(self.spec, MambaSpec):
            return True  # a missing snapshot is a missed lookup, never a gap
        if isinstance(self.spec, SlidingWindowSpec):
            first = max(first, stop - self.spec.sliding_window + 1)
        elif isinstance(self.spec, ChunkedLocalAttentionSpec):
            first = max(first, stop // self.spec.attention_chunk_size * self.spec.attention_chunk_size)
        if first >= stop:
            return True
        size = self.block_tokens
        needed = range((first - start) // size, -(-(stop - start) // size))
        return needed.stop <= len(blocks) and all(blocks[i] >= 0 for i in needed)


def layer_specs(kv_cache_config: Any, cpu: bool) -> list[dict[str, KVCacheSpec]]:
    """Return the layers' specs by name, per KV cache group of vLLM.

    Args:
        cpu: True if vLLM runs on a CPU. There, latent attention (MLA) computes every prompt from its first
            token on and ignores loaded KV.

    Raises:
        ConfigError: kvkit cannot restore a layer's cache, or the layer cannot continue from loaded KV.
    """
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs_by_name = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        specs = {name: specs_by_name.get(name, spec) for name in group.layer_names}
        for name, layer_spec in specs.items():
            if (cpu and isinstance(layer_spec, MLAAttentionSpec)) or getattr(layer_spec, "non_causal", False):
                raise ConfigError(
                    f"layer {name}: its attention ({type(layer_spec).__name__}) computes prompts from their "
                    "first token on, whatever was loaded; want an engine without kvkit"
                )
            if isinstance(layer_spec, MambaSpec):
                states.check_state(name, layer_spec, getattr(kv_cache_config, "hash_block_size", None))
            elif type(layer_spec) not in _KNOWN or getattr(layer_spec, "tokens_per_state", 1) != 1:
                raise ConfigError(
                    f"layer {name}: its cache is a {type(layer_spec).__name__}, which kvkit "
                    f"cannot restore at a chunk's end; want {', '.join(known.__name__ for known in _KNOWN)}"
                )
        groups.append(specs)
    if {isinstance(spec, MambaSpec) for specs in groups for spec in specs.values()} == {True}:
        raise ConfigError("no layer keeps K and V: a chunk has no records; want an engine without kvkit")
    return groups


def table_specs(kv_cache_config: Any) -> list[KVCacheSpec]:
    """Return one spec per KV cache group (block table) of vLLM: all layers of a group are alike.

    This includes groups whose layers are all on other pipeline stages: `layer_specs` has no spec of these.
    """
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return [
        next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        for spec in specs
    ]


def rank_heads(
    vllm_config: Any,
    groups: Sequence[Mapping[str, KVCacheSpec]],
    record_ranks: int | None,
    record_stages: int | None = None,
) -> RankHeads | None:
    """Return this rank's share of the model's heads, or None if no other rank can use its records.

    Args:
        record_ranks, record_stages: the settings of these names.

    Raises:
        ConfigError: the settings request shared records, but this model's layers do not allow them.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    rank = parallel.rank % ranks
    per_host = ranks_per_host(parallel)
    heads = RankHeads(model.get_total_num_kv_heads(), rank, ranks, record_ranks or ranks, per_host)
    specs: list[tuple[str, Any]] = [item for group in groups for item in group.items()]
    other = [n for n, s in specs if isinstance(s, MambaSpec) or s.num_heads != heads.held_heads(s)]
    if (parallel.world_size == ranks or record_stages is not None) and not other:
        return heads
    has_states = any(isinstance(spec, MambaSpec) for _, spec in specs)
    reason = "a state" if has_states else "another number of KV heads than the model"
    for name, value in (("record_ranks", record_ranks), ("record_stages", record_stages)):
        if value is not None and other:
            raise ConfigError(f"{name} = {value}: layer {other[0]} has {reason}; want none")
        if value is not None:
            raise ConfigError(f"{name} = {value}: it is a pipeline; want none, or record_stages, too")
    return None


def stage_layers(
    groups: Sequence[Mapping[str, KVCacheSpec]], record_stages: int | None, stages: int
) -> StageLayers | None:
    """Gather the layers of all pipeline stages; return None if stages do not share records.

    Every stage has to call this at the same time if `record_stages` is set.

    Args:
        record_stages: the setting of this name.
        stages: number of pipeline stages.
    """
    if record_stages is None:
        return None
    gathered: list[Sequence[Mapping[str, KVCacheSpec]]] = [groups] * stages
    if stages > 1:
        torch.distributed.all_gather_object(gathered, groups, group=compat.find("get_pp_group")().cpu_group)
    return StageLayers(gathered, record_stages)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def ranks_per_host(parallel: Any) -> int:
    """Return how many neighbouring ranks share a host; 1 if vLLM's parallel config does not show it."""
    known = getattr(parallel, "distributed_executor_backend", None) == "mp"
    return parallel.local_world_size if known else 1


def check_chunks(chunk_tokens: int, tables: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """Return the block size of every group, in tokens; for states, the chunk size.

    Args:
        tables: the groups' specs, as `table_specs` returns them.

    Raises:
        ConfigError: the chunk size is no multiple of a block size, or vLLM does not keep states at the ends
            of chunks.
    """
    sizes = tuple(
        states.state_block_tokens(spec, chunk_tokens) if isinstance(spec, MambaSpec) else spec.block_size
        for spec in tables
    )
    if any(chunk_tokens % size for size in sizes):
        step = int(np.lcm.reduce(sizes))
        nearest = max(step, round(chunk_tokens / step) * step)
        raise ConfigError(
            f"chunk_tokens = {chunk_tokens}: vLLM's blocks have {', '.join(map(str, sorted(set(sizes))))} "
            f"tokens; want a multiple of {step}, such as {nearest}"
        )
    return sizes


def has_windows(specs: Iterable[KVCacheSpec]) -> bool:
    """Return whether vLLM frees blocks of a running request for one of the specs.

    Later tokens do not attend to those blocks.
    """
    kinds = SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec
    return any(isinstance(spec, kinds) for spec in specs)


def window_of(spec: KVCacheSpec, chunk_tokens: int) -> int | None:
    """Return how many tokens a token attends to, itself included; None without a sliding window.

    Raises:
        ConfigError: layers of this kind, or with so short a window, cannot be blended.
    """
    if isinstance(spec, ChunkedLocalAttentionSpec):
        raise ConfigError("blend: chunks of local attention are not blended; want a model without")
    if not isinstance(spec, SlidingWindowSpec):
        return None
    window: int = spec.sliding_window
    if window <= chunk_tokens:
        raise ConfigError(
            f"chunk_tokens = {chunk_tokens}: want less than {window} with blend: a longer "
            "chunk's record may lack what the sliding window has left behind"
        )
    return window


def complete_tokens(
    groups: Sequence[GroupPages], tables: Sequence[Sequence[int]], chunk_tokens: int, first: int, stop: int
) -> int:
    """Return how many of tokens [first, stop) may be stored: those before the first incomplete chunk.

    A reader that continues after a chunk expects its record to be complete. Blocks that a sliding window
    has left by the chunk's end may be missing: nothing reads them.

    Args:
        tables: block ids per KV cache group of vLLM, from token `first` on; negative: missing.
        first: first token of a chunk.
    """
    for begin in range(first, stop, chunk_tokens):
        end = min(begin + chunk_tokens, stop)
        if not all(group.has_attended(tables[group.table], first, begin, end) for group in groups):
            return begin - first
    return stop - first


@dataclass(frozen=True, slots=True)
class _Grouping:
    """Arguments of `group_pages`, and its steps. `numbers`: the layers' numbers in the model, by name."""

    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, int]
    blocks: int
    opaque: bool
    heads: RankHeads | None
    stages: StageLayers | None
    precision: Precision | None
    orders: Mapping[str, PageOrder] | None

    def layers_by_group(self, specs: Mapping[str, KVCacheSpec]) -> dict[tuple[LayerGroup, int], list[str]]:
        """Return the names of a table's layers, by `_layer_group` and number of kernel blocks per block."""
        names_by_group: dict[tuple[LayerGroup, int], list[str]] = {}
        for name in sorted(specs, key=layer_order):
            if isinstance(specs[name], MambaSpec):
                continue
            tensor, order = self.tensors[name], None if self.orders is None else self.orders[name]
            layer_group = _layer_group(specs[name], tensor, self.blocks, self.opaque, order)
            try:
                layer_group = replace(layer_group, precision=self.precision)
            except LayoutError as error:
                raise ConfigError(f"layer {name}: {error}") from error
            names_by_group.setdefault((layer_group, tensor.shape[0] // self.blocks), []).append(name)
        return names_by_group

    def record_pages(
        self, table: int, spec: Any, layer_group: LayerGroup, ratio: int, names: list[str]
    ) -> Iterator[GroupPages]:
        """Yield the pages of each record that layers of one layer group are divided into."""
        all_names, ranges = names, [range(len(names))]
        if self.stages is not None:
            all_names, ranges = self.stages.record_ranges(table, names)
        layers = tuple(self.numbers[name] for name in all_names)
        layer_group = replace(layer_group, layers=layers)
        record_groups, ratio, all_tensors = self._divide_heads(spec, layer_group, ratio, names)
        for record_group, layer_range in itertools.product(record_groups, ranges):
            in_rank = in_record = range(record_group.kv_heads)
            if self.heads is not None:
                in_rank, in_record = self.heads.common_heads(record_group, spec)
            begin = layer_range.start - ranges[0].start
            tensors = all_tensors[begin : begin + len(layer_range)]
            if len(record_groups) > 1:
                tensors = [tensor[:, in_rank.start : in_rank.stop] for tensor in tensors]
            if len(layer_range) < len(all_names):
                record_layers = layers[layer_range.start : layer_range.stop]
                record_group = replace(record_group, layers=record_layers, model_layers=layers)
            layer_names = tuple(all_names[layer_range.start : layer_range.stop])
            order = None
            if self.orders is not None:
                order = self.orders[layer_names[0]].of_heads(in_rank.start, len(in_rank)).joined
            pages = Pages.of(record_group, tensors, order, in_record)
            yield GroupPages(table, spec.block_size, ratio, pages, layer_names, spec)

    def _divide_heads(
        self, spec: Any, layer_group: LayerGroup, ratio: int, names: list[str]
    ) -> tuple[list[LayerGroup], int, list[torch.Tensor]]:
        """Divide the heads of layers of one layer group into records.

        Returns:
            The layer group of each record, ignoring stages; the number of its pages per block of the table;
            and the layers' tensors, whose first dimension counts such pages.
        """
        tensors = [self.tensors[name] for name in names]
        record_groups = [layer_group] if self.heads is None else self.heads.record_groups(layer_group, spec)
        reads_slices = self.heads is not None and self.heads.reads_slices(spec)
        if not layer_group.opaque:
            return record_groups, ratio, tensors
        if record_groups[0].head_shards == 1 and not reads_slices:
            return record_groups, 1, [tensor.view(self.blocks, -1, *tensor.shape[1:]) for tensor in tensors]
        # heads are contiguous within a kernel block, but not within one of vLLM's
        if (len(record_groups) > 1 or reads_slices) and not self.opaque:
            raise ConfigError(
                f"record_ranks: the pages of layer {names[0]} cannot be divided into heads, as its "
                "attention backend packs K and V in its own order; want none"
            )
        if record_groups[0].head_shards == 1 and ratio > 1:
            raise ConfigError(
                f"record_ranks: {ratio} blocks of the kernel are one of the {spec.block_size} tokens "
                f"of layer {names[0]}, and one page of such records; want none"
            )
        kernel_groups = [
            replace(
                group, block_tokens=group.block_tokens // ratio, page_bytes=(group.page_bytes or 0) // ratio
            )
            for group in record_groups
        ]
        return kernel_groups, ratio, tensors


def group_pages(
    groups: Sequence[Mapping[str, KVCacheSpec]],
    tensors: Mapping[str, torch.Tensor],
    blocks: int,
    opaque: bool,
    heads: RankHeads | None = None,
    stages: StageLayers | None = None,
    precision: Precision | None = None,
    orders: Mapping[str, PageOrder] | None = None,
) -> tuple[KVLayout, list[GroupPages]]:
    """Return the layout of vLLM's KV cache, and the pages of its layer groups in the layout's order.

    Layers of the same shape, dtype and KV cache group of vLLM make up a layer group. With `heads` or
    `stages`, each record that the heads and layers are divided into has a layer group.

    Args:
        tensors: [B, H, N, C] by layer name. B counts the kernel's blocks; C has K and V side by side.
        blocks: number of vLLM's blocks.
        opaque: True if every block is opaque, as on a CPU: the order of K in it depends on the instruction
            set. A head's K and V are neighbours then.
        heads: the rank's share of the model's heads; None: unknown.
        stages: layers of all pipeline stages; None: `groups` are all layers, and a record holds all layers
            of a layer group.
        precision: precision of the records.
        orders: positions of K and V in the kernel's blocks, by layer name. With them, blocks are not opaque.

    Raises:
        ConfigError: heads or layers cannot be divided as requested, or KV cannot be kept in fewer bits.
    """
    all_stages = [groups] if stages is None else stages.stages
    names = sorted((name for stage in all_stages for specs in stage for name in specs), key=layer_order)
    numbers = {name: i for i, name in enumerate(names)}
    grouping = _Grouping(tensors, numbers, blocks, opaque, heads, stages, precision, orders)
    pages = [
        group
        for table, specs in enumerate(groups)
        for (layer_group, ratio), layers in grouping.layers_by_group(specs).items()
        for group in grouping.record_pages(table, specs[layers[0]], layer_group, ratio, layers)
    ]
    # sorted by the model's layers, so that all stages have the same order of arrays
    pages.sort(key=lambda e: (e.pages.group.all_layers, e.pages.group.layers, e.pages.group.first_head))
    copies = (0, 1) if heads is None else heads.record_copies(entry.spec for entry in pages)
    return KVLayout(tuple(entry.pages.group for entry in pages), *copies), pages


def add_states(
    layout: KVLayout,
    pages: list[GroupPages],
    groups: Sequence[Mapping[str, KVCacheSpec]],
    tensors: Mapping[str, torch.Tensor],
    chunk_tokens: int,
) -> tuple[KVLayout, list[GroupPages]]:
    """Return what `group_pages` found, with layer groups of states appended.

    Layers with states are divided so that their records are about as large as the largest of KV.

    Args:
        layout, pages: as `group_pages` returns them.
        groups, tensors: as in `group_pages`; tensors of layers with states are [B, 1, 1, bytes].
        chunk_tokens: chunk size; states are kept at the ends of chunks.
    """
    names = sorted((name for specs in groups for name in specs), key=layer_order)
    record_bytes = max(group.chunk_bytes(chunk_tokens) for group in layout.groups)
    added = []
    for table, specs in enumerate(groups):
        names_by_group: dict[LayerGroup, list[str]] = {}
        for name in sorted(specs, key=layer_order):
            if isinstance(spec := specs[name], MambaSpec):
                layer_group = states.layer_group(spec, tensors[name], chunk_tokens)
                names_by_group.setdefault(layer_group, []).append(name)
        for layer_group, group_names in names_by_group.items():
            for layer_names in divide(group_names, layer_group.block_bytes, record_bytes):
                group = replace(layer_group, layers=tuple(names.index(name) for name in layer_names))
                state_pages = Pages.of(group, [tensors[name] for name in layer_names])
                added.append(
                    GroupPages(table, chunk_tokens, 1, state_pages, tuple(layer_names), specs[layer_names[0]])
                )
    return replace(layout, groups=(*layout.groups, *(entry.pages.group for entry in added))), pages + added


def _layer_group(
    spec: Any, tensor: torch.Tensor, blocks: int, opaque: bool, order: PageOrder | None
) -> LayerGroup:
    """Return the layer group of a single layer, as layer 0; opaque if the backend packs K and V itself."""
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    if order is not None:
        heads, tokens, k_size = order.k.shape
        kind = str(tensor.dtype).removeprefix("torch.")
        return LayerGroup((0,), heads, k_size, order.v.shape[2], kind, tokens, window=window)
    if not opaque and spec.num_head_slots is None and spec.state_content_bytes is None:
        v_size = tensor.shape[3] * spec.head_size_v // (spec.head_size + spec.head_size_v)
        return KVLayout.from_tensors([tensor], v_size=v_size, windows=[window]).groups[0]
    return LayerGroup(
        layers=(0,),
        kv_heads=tensor.shape[1],
        k_size=tensor.shape[3],
        v_size=0,
        dtype=str(tensor.dtype).removeprefix("torch."),
        block_tokens=spec.block_size,
        window=window,
        page_bytes=tensor.numel() * tensor.element_size() // blocks,
    )


def layer_order(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
