"""vLLM's KV cache as kvkit sees it: which layers lie in which pages, under which block table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.kernels.pages.api import Pages
from kvkit.moving.sequence import SequencePages
from kvkit.settings import ConfigError

_KNOWN = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one kvkit layer group.

    Args:
        table: which of vLLM's block tables is theirs.
        block_tokens: tokens of a block of that table.
        ratio: the kernel's blocks in one of them.
        pages: of the kernel's blocks; opaque: of vLLM's.
        names: vLLM's names of the layers, in their order.
        spec: of each of the layers.
    """

    table: int
    block_tokens: int
    ratio: int
    pages: Pages
    names: tuple[str, ...]
    spec: KVCacheSpec

    def place(self, blocks: Sequence[int], tokens: int) -> SequencePages:
        """Where `tokens` tokens lie that begin with the first of `blocks`; what goes beyond is not there."""
        ids = np.full(-(-tokens // self.block_tokens), -1, np.int64)
        ids[: len(blocks)] = blocks[: len(ids)]
        split = ids[:, None] * self.ratio + np.arange(self.ratio)  # what is < 0 stays so
        return SequencePages(self.pages, blocks=split.reshape(-1))

    def has(self, blocks: Sequence[int], start: int, first: int, stop: int) -> bool:
        """Whether all of tokens [first, stop) that tokens from `stop` on attend to lie in `blocks`.

        Args:
            start: token that the first of `blocks` begins with.
        """
        if isinstance(self.spec, SlidingWindowSpec):
            first = max(first, stop - self.spec.sliding_window + 1)
        elif isinstance(self.spec, ChunkedLocalAttentionSpec):
            first = max(first, stop // self.spec.attention_chunk_size * self.spec.attention_chunk_size)
        if first >= stop:
            return True
        size = self.block_tokens
        wanted = range((first - start) // size, -(-(stop - start) // size))
        return wanted.stop <= len(blocks) and all(blocks[i] >= 0 for i in wanted)


def layer_specs(kv_cache_config: Any, cpu: bool) -> list[dict[str, KVCacheSpec]]:
    """The spec of every layer by its name, per KV cache group of vLLM.

    Args:
        cpu: whether vLLM runs on a CPU, where its latent attention (MLA) computes every prompt from its first
            token on and would pass over what was loaded.

    Raises:
        ConfigError: a layer keeps something other than the K and V of every token, or cannot go on from it.
    """
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        specs = {name: each.get(name, spec) for name in group.layer_names}
        for name, found in specs.items():
            if (cpu and isinstance(found, MLAAttentionSpec)) or getattr(found, "non_causal", False):
                raise ConfigError(
                    f"layer {name}: its attention ({type(found).__name__}) computes prompts from their first "
                    "token on, whatever was loaded; want an engine without kvkit"
                )
            if type(found) not in _KNOWN or getattr(found, "tokens_per_state", 1) != 1:
                raise ConfigError(
                    f"layer {name}: its cache is a {type(found).__name__}, which kvkit "
                    f"cannot restore at a chunk's end; want {', '.join(known.__name__ for known in _KNOWN)}"
                )
        groups.append(specs)
    return groups


def check_chunks(chunk_tokens: int, groups: Sequence[Mapping[str, KVCacheSpec]]) -> tuple[int, ...]:
    """The block size of every group, in tokens.

    Raises:
        ConfigError: a chunk is no multiple of one.
    """
    sizes = tuple(next(iter(specs.values())).block_size for specs in groups)
    if any(chunk_tokens % size for size in sizes):
        step = int(np.lcm.reduce(sizes))
        near = max(step, round(chunk_tokens / step) * step)
        raise ConfigError(
            f"chunk_tokens = {chunk_tokens}: vLLM's blocks have {', '.join(map(str, sorted(set(sizes))))} "
            f"tokens; want a multiple of {step}, such as {near}"
        )
    return sizes


def has_windows(specs: Iterable[KVCacheSpec]) -> bool:
    """Whether one of them evicts blocks that later tokens do not attend to."""
    return any(isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs)


def complete_tokens(
    groups: Sequence[GroupPages], tables: Sequence[Sequence[int]], chunk_tokens: int, first: int, stop: int
) -> int:
    """How many of tokens [first, stop) may be stored: those before the first chunk that lacks a block.

    Whoever goes on after a chunk takes its record for whole. What a window has left behind by then, nobody
    reads.

    Args:
        tables: block ids per KV cache group of vLLM, from token `first` on; < 0: not there.
        first: where a chunk begins.
    """
    for begin in range(first, stop, chunk_tokens):
        end = min(begin + chunk_tokens, stop)
        if not all(group.has(tables[group.table], first, begin, end) for group in groups):
            return begin - first
    return stop - first


def group_pages(
    groups: Sequence[Mapping[str, KVCacheSpec]],
    tensors: Mapping[str, torch.Tensor],
    blocks: int,
    opaque: bool,
) -> tuple[KVLayout, list[GroupPages]]:
    """The layout of vLLM's KV cache, and where it lies: an entry per layer group, in the layout's order.

    Layers of one form are a group, but never those of two of vLLM's, which have block tables of their own.

    Args:
        tensors: [B, H, N, C] by layer name. B counts the kernel's blocks, K and V lie side by side in C.
        blocks: vLLM's blocks.
        opaque: every block is, as on a CPU, where the order of K within depends on the instruction set.
    """
    order = {name: i for i, name in enumerate(sorted((n for specs in groups for n in specs), key=_natural))}
    found: list[GroupPages] = []
    for table, specs in enumerate(groups):
        forms: dict[tuple[LayerGroup, int], list[str]] = {}
        for name in sorted(specs, key=_natural):
            form = _form(specs[name], tensors[name], blocks, opaque)
            ratio = 1 if form.opaque else tensors[name].shape[0] // blocks
            forms.setdefault((form, ratio), []).append(name)
        for (form, ratio), names in forms.items():
            spec = specs[names[0]]
            group = replace(form, layers=tuple(order[name] for name in names))
            held = [
                tensors[n].view(blocks, -1, *tensors[n].shape[1:]) if form.opaque else tensors[n]
                for n in names
            ]
            pages = Pages.of(group, held)
            found.append(GroupPages(table, spec.block_size, ratio, pages, tuple(names), spec))
    found.sort(key=lambda entry: entry.pages.group.layers)
    return KVLayout(tuple(entry.pages.group for entry in found)), found


def _form(spec: Any, tensor: torch.Tensor, blocks: int, opaque: bool) -> LayerGroup:
    """The form of one layer alone, as layer 0. Where a backend packs K and V its own way, it is opaque."""
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
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


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts layer 10 after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
