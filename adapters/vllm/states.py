"""vLLM's pages of Mamba states: layers that keep one state for all tokens so far (Mamba, linear attention).

Entries of a request's block table, by vLLM's `mamba_cache_mode`:

    "align"   entry i: the state after the last token of block i, if a step ended there
    "none"    the only entry: the running state, after the last step

vLLM uses the mode "align" with its own prefix caching, and "none" without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from kvkit.format.layout import LayerGroup
from kvkit.settings import ConfigError


def check_state(name: str, spec: MambaSpec, hash_tokens: int | None) -> None:
    """Check that a block's index in the block table determines which state it holds.

    Args:
        name: name of the layer.
        spec: spec of the layer.
        hash_tokens: unit of vLLM's own prefix cache, in tokens; None: a block.

    Raises:
        ConfigError: the index does not determine the state.
    """
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"layer {name}: a request has {spec.num_speculative_blocks} more states, for drafts, and kvkit "
            "cannot tell which belongs to a chunk's end; want no speculative decoding, or an engine without "
            "kvkit"
        )
    counts_blocks = hash_tokens in (None, spec.block_size)
    if spec.num_prefill_checkpoint_blocks and not (has_running_state(spec) or counts_blocks):
        raise ConfigError(
            f"layer {name}: its prefix cache counts in {hash_tokens} tokens and has states in blocks of "
            f"{spec.block_size}; want both equal (prefix_match_unit), or an engine without kvkit"
        )


def state_block_tokens(spec: MambaSpec, chunk_tokens: int) -> int:
    """Return how many tokens kvkit counts per entry of a block table of states: those of a chunk.

    Raises:
        ConfigError: vLLM keeps states elsewhere than at the ends of chunks.
    """
    if not has_running_state(spec) and spec.block_size != chunk_tokens:
        raise ConfigError(
            f"chunk_tokens = {chunk_tokens}: vLLM keeps this model's states at the ends of blocks of "
            f"{spec.block_size} tokens; want {spec.block_size}"
        )
    return chunk_tokens


def has_running_state(spec: KVCacheSpec) -> bool:
    """Return whether a layer keeps one running state of a request, which every step updates."""
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align"


def state_tables(tables: Iterable[KVCacheSpec]) -> dict[int, bool]:
    """Return, by index of the block tables of Mamba layers, whether these keep a running state."""
    return {
        table: has_running_state(spec) for table, spec in enumerate(tables) if isinstance(spec, MambaSpec)
    }


def layer_group(spec: MambaSpec, tensor: torch.Tensor, chunk_tokens: int) -> LayerGroup:
    """Return the layer group of a single layer, as layer 0.

    Args:
        tensor: [B, 1, 1, bytes]; a page is a whole state.
    """
    arrays = zip(spec.dtypes, spec.shapes, strict=True)
    kinds = ",".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in arrays)
    size = tensor[0].numel() * tensor.element_size()
    return LayerGroup.of_states((0,), size, chunk_tokens, f"{spec.mamba_type.name}:{kinds}")


def align_states(
    blocks: tuple[list[int], ...], running: Mapping[int, bool], tokens: int, chunk_tokens: int
) -> tuple[list[int], ...]:
    """Return block tables with one block per chunk, as in the mode "align", for running states too.

    Args:
        blocks: a request's block tables.
        running: as returned by `state_tables`.
        tokens: number of tokens after which the running states are.
        chunk_tokens: tokens of a chunk.
    """
    chunks = 0 if tokens % chunk_tokens else tokens // chunk_tokens
    return tuple(
        [0] * (chunks - 1) + table[: min(chunks, 1)] if running.get(i) else table
        for i, table in enumerate(blocks)
    )
