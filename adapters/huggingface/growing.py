"""The cache of a Hugging Face model that kvkit reads and writes in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicLayer

from kvkit.adapters.engine.question import TokenIds
from kvkit.cache import Cache, Loaded, SequencePages
from kvkit.format.layout import KVLayout, Namespace
from kvkit.kernels.pages.api import Pages
from kvkit.moving.policy import NO_WISHES, RequestPolicy

ROUND_TOKENS = 256
"""Room for KV is made in steps of this many tokens."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """K and V of one layer, [B, H, room, D], written in place: what the engine's pages are elsewhere.

    A sliding window is left to the attention mask: every token's KV is kept, so that it can be stored.

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
    def keys(self, held: None) -> None:
        """Take None, with which transformers' own layer begins; nothing else is meant to be set."""

    @property
    def values(self) -> torch.Tensor:
        """V of all tokens, a view of [B, H, length, D]."""
        return self.room_v[:, :, : self.length]

    @values.setter
    def values(self, held: None) -> None:
        """As of `keys`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H, n, D]; returns views of all of K and V. Mutates the layer.

        Where there was one sequence and now are several, as of beams, each goes on from it.
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
        """Hold no token. Mutates the layer."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -`tokens_to_remove` tokens; a positive number is how many stay. Mutates the layer."""
        left = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.length = max(0, min(self.length, left))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sequences of these indices, [B], in their order. Mutates the layer."""
        self.batch_select_indices(beam_idx.to(self.room_k.device))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As `reorder_cache`, of another number of sequences. Mutates the layer."""
        self.room_k, self.room_v = self.room_k[indices], self.room_v[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence so many times. Mutates the layer."""
        self.room_k = self.room_k.repeat_interleave(repeats, dim=0)
        self.room_v = self.room_v.repeat_interleave(repeats, dim=0)


class GrowingCache(transformers.Cache):  # type: ignore[misc]  # transformers is untyped
    """`past_key_values` whose layers kvkit reads and writes in place.

    transformers' `generate` goes on from it. With an assistant or `prompt_lookup_num_tokens` it computes the
    whole prompt in any case, and appends that to whatever cache it was given (5.19): give it an empty one
    then (`reset`). kvkit moves KV of one sequence.

    Attributes:
        approximate_from: the first token whose KV is approximate, and so is all behind it; None: none is.
    """

    def __init__(self, layout: KVLayout, room: int, device: torch.device) -> None:
        self.layout = layout
        self.approximate_from: int | None = None
        layers: dict[int, GrowingLayer] = {}
        for group in layout.groups:
            dtype = getattr(torch, group.dtype)
            for layer in group.layers:
                k = torch.empty(1, group.kv_heads, room, group.k_size, dtype=dtype, device=device)
                v = torch.empty(1, group.kv_heads, room, group.v_size, dtype=dtype, device=device)
                layers[layer] = GrowingLayer(k, v)
        super().__init__(layers=[layers[i] for i in sorted(layers)])

    @property
    def length(self) -> int:
        """Tokens whose KV is complete."""
        return int(self.layers[0].length)

    def mark_filled(self, tokens: int) -> None:
        """Say that the first `tokens` tokens were written from outside. Mutates every layer."""
        for layer in self.layers:
            layer.length = tokens

    @property
    def exact(self) -> int:
        """Tokens whose KV is complete and may be stored: none that is approximate."""
        return self.length if self.approximate_from is None else min(self.length, self.approximate_from)

    def load(
        self,
        cache: Cache,
        tokens: TokenIds,
        space: Namespace | None = None,
        policy: RequestPolicy = NO_WISHES,
    ) -> Loaded:
        """Fill in what is cached of `tokens`, int32 [T], from the first on. Mutates every layer."""
        hit = cache.lookup(tokens, space, policy=policy)
        loaded = cache.load(hit, self.places(hit.tokens))
        self.mark_filled(loaded.tokens)
        self.approximate_from = loaded.approximate_from
        return loaded

    def places(self, tokens: int) -> list[SequencePages]:
        """Where the first `tokens` tokens lie: the whole room is one block, a slot is a position."""
        slots = np.arange(tokens, dtype=np.int64)
        return [
            SequencePages(
                Pages.of(group, [(self.layers[i].room_k, self.layers[i].room_v) for i in group.layers]),
                slots=slots,
            )
            for group in self.layout.groups
        ]


def rounded(tokens: int) -> int:
    """Room for so many tokens."""
    return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS


def _grown(old: torch.Tensor, tokens: int) -> torch.Tensor:
    new = old.new_empty(old.shape[0], old.shape[1], rounded(max(tokens, 2 * old.shape[2])), old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new
