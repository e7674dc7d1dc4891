"""The cache of a Hugging Face model that kvkit reads and writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.adapters.huggingface.states import Snapshots, StateTensor, states_of
from kvkit.cache import Cache, Loaded, SequencePages
from kvkit.format.layout import KVLayout, Namespace
from kvkit.kernels.pages.api import Pages
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

ROUND_TOKENS = 256
"""Room for KV is a multiple of this many tokens."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """K and V of one layer, [B, H, room, D], written in place like an engine's pages.

    The attention mask applies a sliding window; every token's KV is kept, so that it can be stored.

    Args:
        k, v: room for K and V, [1, H, room, D].
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.dtype, self.device = k.dtype, k.device
        self.room_k, self.room_v = k, v
        self.length = 0
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor:
        """K of all tokens, a view of [B, H, length, D]."""
        return self.room_k[:, :, : self.length]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        """Accept None, which transformers' constructor assigns. Raises `AttributeError` for anything else."""
        _refuse("keys", value)

    @property
    def values(self) -> torch.Tensor:
        """V of all tokens, a view of [B, H, length, D]."""
        return self.room_v[:, :, : self.length]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        """Accept None, like `keys`."""
        _refuse("values", value)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append KV, [B, H, n, D]; return views of all K and V. Mutates the layer.

        If the batch is a multiple of the layer's, as with beams, the layer's sequences are repeated first.
        """
        if len(key_states) != len(self.room_k):
            self.batch_repeat_interleave(len(key_states) // len(self.room_k))
        start, self.length = self.length, self.length + key_states.shape[-2]
        if self.length > self.room_k.shape[2]:
            self.room_k, self.room_v = _grown(self.room_k, self.length), _grown(self.room_v, self.length)
        self.room_k[:, :, start : self.length] = key_states
        self.room_v[:, :, start : self.length] = value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        """Drop all tokens. Mutates the layer."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens; if positive, keep that many. Mutates the layer."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.length = max(0, min(self.length, kept))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of these indices, [B], in their order. Mutates the layer."""
        self.batch_select_indices(beam_idx.to(self.room_k.device))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of these indices, in any number. Mutates the layer."""
        self.room_k, self.room_v = self.room_k[indices], self.room_v[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times. Mutates the layer."""
        self.room_k = self.room_k.repeat_interleave(repeats, dim=0)
        self.room_v = self.room_v.repeat_interleave(repeats, dim=0)


class GrowingStateLayer(LinearAttentionLayer, GrowingLayer):  # type: ignore[misc]  # transformers is untyped
    """A layer with K and V, written in place, and states.

    Args:
        k, v: room for K and V, [1, H, room, D].
        number_of_states: number of states of each kind.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, number_of_states: int) -> None:
        GrowingLayer.__init__(self, k, v)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.dtype, self.device = k.dtype, k.device

    def reset(self) -> None:
        """Drop all tokens and states. Mutates the layer."""
        LinearAttentionLayer.reset(self)
        GrowingLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of these indices, [B], in their order. Mutates the layer."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        GrowingLayer.reorder_cache(self, beam_idx)


class GrowingCache(transformers.Cache):  # type: ignore[misc]  # transformers is untyped
    """`past_key_values` with layers that kvkit reads and writes in place.

    transformers' `generate` continues from it. With an assistant or `prompt_lookup_num_tokens`, `generate`
    (5.19) always computes the whole prompt and appends it to the cache: pass an empty one then (`reset`).
    kvkit moves KV of one sequence.

    States of layers are kept at the ends of some chunks: a later prompt continues from the last of these that
    it shares. Tokens cannot be dropped from states (`crop` raises `ValueError`).

    Attributes:
        approximate_from: first token with approximate KV, as all later ones have; None: all KV is exact.
    """

    def __init__(self, layout: KVLayout, room: int, device: torch.device) -> None:
        self.layout = layout
        self.approximate_from: int | None = None
        kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in layout.groups[: layout.token_groups]:
            dtype = getattr(torch, group.dtype)
            for layer in group.layers:
                k = torch.empty(1, group.kv_heads, room, group.k_size, dtype=dtype, device=device)
                v = torch.empty(1, group.kv_heads, room, group.v_size, dtype=dtype, device=device)
                kv[layer] = k, v
        states = states_of(layout)
        layers = [_layer(kv.get(i), states.get(i, ())) for i in range(1 + max(*kv, *states))]
        super().__init__(layers=layers)
        self._attention = [layers[i] for i in sorted(kv)]
        self._snapshots = Snapshots(layout, layers, device)

    @property
    def length(self) -> int:
        """Number of tokens with complete KV."""
        return int(self._attention[0].length)

    def mark_filled(self, tokens: int) -> None:
        """Mark K and V of the first `tokens` tokens as written from outside. Mutates every layer."""
        for layer in self._attention:
            layer.length = tokens

    def step_ends(self, tokens: int) -> list[int]:
        """Return the ends of the steps that compute `tokens` more tokens: ascending counts up to `tokens`.

        With states, a step also ends at the last end of a chunk before the last token: the same prompt can
        then continue from the states at that token.
        """
        chunk = self._snapshots.chunk_tokens
        last = (self.length + tokens - 1) // chunk * chunk - self.length if chunk else 0
        return [last, tokens] if 0 < last < tokens else [tokens]

    def save_states(self) -> None:
        """Save the current states, if there are any and a chunk ends here. Mutates the snapshots."""
        chunk = self._snapshots.chunk_tokens
        if chunk and self.length and not self.length % chunk:
            self._snapshots.save(self.length // chunk)

    def reset(self) -> None:
        """Drop all tokens and snapshots. Mutates every layer."""
        super().reset()
        self._snapshots.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens; if positive, keep that many. Mutates every layer.

        Raises:
            ValueError: layers have states.
        """
        if self._snapshots.chunk_tokens:
            raise ValueError(
                f"crop({tokens_to_remove}): layers have states, from which tokens cannot be dropped; want a "
                "prefill of fewer tokens"
            )
        super().crop(tokens_to_remove)

    @property
    def exact(self) -> int:
        """Number of leading tokens with complete and exact KV, which may be stored."""
        return self.length if self.approximate_from is None else min(self.length, self.approximate_from)

    def load(
        self,
        cache: Cache,
        tokens: TokenIds,
        namespace: Namespace | None = None,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> Loaded:
        """Load the cached KV of the leading `tokens`, int32 [T]. Mutates every layer."""
        hit = cache.lookup(tokens, namespace, policy=policy)
        chunks = hit.tokens // hit.chunks.chunk_tokens
        self._snapshots.clear()
        self._snapshots.reserve(chunks)
        loaded = cache.load(hit, self.sequence_pages(hit.tokens))
        self.mark_filled(loaded.tokens)
        if not loaded.tokens:
            self._snapshots.clear()
        elif self._snapshots.chunk_tokens:
            self._snapshots.restore(loaded.tokens // hit.chunks.chunk_tokens)
        self.approximate_from = loaded.approximate_from
        return loaded

    def sequence_pages(self, tokens: int) -> list[SequencePages]:
        """Return the pages of the first `tokens` tokens: the room is one block, so a slot is a position.

        States have pages only for the ends of chunks at which they were kept.
        """
        slots = np.arange(tokens, dtype=np.int64)
        kv = [
            SequencePages(
                Pages.of(group, [(self.layers[i].room_k, self.layers[i].room_v) for i in group.layers]),
                slots=slots,
            )
            for group in self.layout.groups[: self.layout.token_groups]
        ]
        chunk = self._snapshots.chunk_tokens
        return kv + (self._snapshots.pages(tokens // chunk) if chunk else [])


def rounded(tokens: int) -> int:
    """Round a number of tokens up to a multiple of `ROUND_TOKENS`."""
    return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS


def _layer(kv: tuple[torch.Tensor, torch.Tensor] | None, states: Sequence[StateTensor]) -> Any:
    """Make a layer that keeps K and V, states, both, or nothing (layers of experts only)."""
    number = 1 + max((tensor.index for tensor in states), default=0)
    if kv is None:
        return LinearAttentionLayer(number_of_states=number)
    return GrowingStateLayer(*kv, number) if states else GrowingLayer(*kv)


def _refuse(name: str, value: torch.Tensor | None) -> None:
    if value is not None:
        raise AttributeError(f"{name}: a view of room that `update` fills; it cannot be set")


def _grown(old: torch.Tensor, tokens: int) -> torch.Tensor:
    new = old.new_empty(old.shape[0], old.shape[1], rounded(max(tokens, 2 * old.shape[2])), old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new
