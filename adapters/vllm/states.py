"""vLLM's pages of states: layers that keep what stands for all tokens so far (Mamba, linear attention).

    "align"   entry i of the block table: the state after the block's last token, where a step ended there
    "none"    the only entry: the state after the last step

The first is vLLM's mode with its own prefix caching, the second without.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from kvkit.format.layout import LayerGroup
from kvkit.settings import ConfigError


def check_state(name: str, spec: MambaSpec, hash_tokens: int | None) -> None:
    """
    Args:
        hash_tokens: what vLLM's own prefix cache counts in; None: blocks.

    Raises:
        ConfigError: which state a block holds cannot be told from its place in the block table.
    """
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"layer {name}: a request has {spec.num_speculative_blocks} more states, of drafts: which one is "
            "a chunk's end's is not known; want no speculative decoding, or an engine without kvkit"
        )
    counts_blocks = hash_tokens in (None, spec.block_size)
    if spec.num_prefill_checkpoint_blocks and not (runs(spec) or counts_blocks):
        raise ConfigError(
            f"layer {name}: its prefix cache counts in {hash_tokens} tokens and has states in blocks of "
            f"{spec.block_size}; want both alike (prefix_match_unit), or an engine without kvkit"
        )


def table_tokens(spec: MambaSpec, chunk_tokens: int) -> int:
    """Tokens that an entry of a table stands for, as kvkit sees it: those of a chunk.

    Raises:
        ConfigError: vLLM keeps states at other places than the ends of chunks.
    """
    if not runs(spec) and spec.block_size != chunk_tokens:
        raise ConfigError(
            f"chunk_tokens = {chunk_tokens}: vLLM keeps this model's states at the ends of blocks of "
            f"{spec.block_size} tokens; want {spec.block_size}"
        )
    return chunk_tokens


def runs(spec: KVCacheSpec) -> bool:
    """Whether a request has one state, which goes on from step to step."""
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align"


def form_of(spec: MambaSpec, tensor: torch.Tensor, chunk_tokens: int) -> LayerGroup:
    """The form of one layer alone, as layer 0. `tensor` [B, 1, 1, bytes]: a page is a layer's whole state."""
    parts = zip(spec.dtypes, spec.shapes, strict=True)
    kinds = ",".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in parts)
    size = tensor[0].numel() * tensor.element_size()
    return LayerGroup.of_states((0,), size, chunk_tokens, f"{spec.mamba_type.name}:{kinds}")


def spread(
    blocks: tuple[list[int], ...], running: Mapping[int, bool], at: int, chunk_tokens: int
) -> tuple[list[int], ...]:
    """Block tables that have a block per chunk also of states that run: these are after token `at`.

    Args:
        running: the numbers of the tables of states, and whether these run.
    """
    place = 0 if at % chunk_tokens else at // chunk_tokens
    return tuple(
        [0] * (place - 1) + table[: min(place, 1)] if running.get(i) else table
        for i, table in enumerate(blocks)
    )
