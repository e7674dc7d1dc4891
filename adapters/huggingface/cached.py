"""A Hugging Face decoder with a kvkit cache in front of it.

model = CachedModel.open(AutoModelForCausalLM.from_pretrained(...), load_config("kvkit.toml"))
answer = model.generate(token_ids, max_new_tokens=32)    # reuses what is cached, stores what is new
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicLayer

from kvkit.adapters.engine.question import TokenIds
from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.cache import Cache, Loaded, SequencePages, Stored
from kvkit.config import Config, open_cache
from kvkit.format.keys import as_tokens
from kvkit.format.layout import KVLayout, LayoutError, Namespace, layer_windows
from kvkit.kernels.pages.api import Pages
from kvkit.moving.policy import NO_WISHES, RequestPolicy
from kvkit.moving.precision import check

ROUND_TOKENS = 256
"""Room for KV is made in steps of this many tokens."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt whose KV is complete.

    Attributes:
        logits: of the last token, [V].
        kv: the model's cache (`past_key_values`), with room for more tokens.
        hit_tokens: tokens that were loaded, by tier.
        computed_tokens: tokens that the model computed.
    """

    logits: torch.Tensor
    kv: GrowingCache
    hit_tokens: Mapping[str, int]
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` made of a prompt.

    Attributes:
        tokens: the new token ids, an end token included.
        prompt_tokens: length of the prompt.
        hit_tokens, computed_tokens: of the prompt, as in `Prefill`.
        ttft_s: seconds from the call to the first new token.
        stored: what was stored after it; None without a cache.
    """

    tokens: list[int]
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    computed_tokens: int
    ttft_s: float
    stored: Stored | None


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """K and V of one layer, [1, H, room, D], written in place: what the engine's pages are elsewhere.

    A sliding window is left to the attention mask: every token's KV is kept, so that it can be stored.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.dtype, self.device = k.dtype, k.device
        self.room_k, self.room_v = k, v
        self.length = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, H, n, D]; returns views of all of K and V. Mutates the layer."""
        stop = self.length + key_states.shape[-2]
        if stop > self.room_k.shape[2]:
            self.room_k, self.room_v = _grown(self.room_k, stop), _grown(self.room_v, stop)
        self.room_k[:, :, self.length : stop] = key_states
        self.room_v[:, :, self.length : stop] = value_states
        self.length = stop
        return self.room_k[:, :, :stop], self.room_v[:, :, :stop]

    def get_seq_length(self) -> int:
        return self.length


class GrowingCache(transformers.Cache):  # type: ignore[misc]  # transformers is untyped
    """`past_key_values` whose layers kvkit reads and writes in place.

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


class OverCache:
    """A model over a cache, which it closes at the end of a `with`."""

    cache: Cache | None

    def flush(self) -> None:
        """Wait until what was stored is in the tiers (`Cache.flush`)."""
        if self.cache is not None:
            self.cache.flush()

    def close(self) -> None:
        """Close the cache."""
        if self.cache is not None:
            self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CachedModel(OverCache):
    """A decoder-only model that prefills from, and stores to, a kvkit cache. One sequence at a time.

    A `policy` is what a request wants of the cache. Where it names a tier that does not exist, PolicyError is
    raised.

    Args:
        model: a Hugging Face causal language model, in eval mode.
        layout: of its KV, see `probe_layout`.
        cache: of that layout; None computes everything, for comparison.
    """

    def __init__(self, model: Any, layout: KVLayout, cache: Cache | None) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self.device: torch.device = next(model.parameters()).device

    @staticmethod
    def open(model: Any, config: Config) -> CachedModel:
        """`model` with the tiers of `config`.

        The namespace holds the model's name, its dtype and a fingerprint of its weights and config: other
        weights under the same name share nothing. Change none of them while the cache is open.

        Raises:
            ConfigError: a setting is impossible for this model, or its KV was not found fit for `precision`.
            LayoutError: its KV cannot be cached, see `probe_layout`.
        """
        layout, weights = config.layout(probe_layout(model)), model_fingerprint(model)
        config.check_model(partial(check, weights))
        namespace = config.namespace(
            layout, model=_name(model), dtype=str(model.dtype).removeprefix("torch."), revision=weights
        )
        return CachedModel(model, layout, open_cache(config, layout, namespace))

    @torch.inference_mode()
    def prefill(self, tokens: Any, room: int = 0, policy: RequestPolicy = NO_WISHES) -> Prefill:
        """Compute or load the KV of a prompt, int32 [T]; the last token is always computed, for its logits.

        `room` tokens more than the prompt fit before the KV has to be moved to larger memory.

        Raises:
            ValueError: the prompt is empty.
        """
        ids = as_tokens(tokens)
        if not len(ids):
            raise ValueError("tokens: the prompt is empty")
        kv = GrowingCache(self.layout, _rounded(len(ids) + room), self.device)
        hit_tokens = {} if self.cache is None else kv.load(self.cache, ids[:-1], policy=policy).by_tier
        computed = len(ids) - kv.length
        logits = forward(self.model, ids[kv.length :], kv)
        return Prefill(logits, kv, hit_tokens, computed)

    @torch.inference_mode()
    def generate(
        self,
        tokens: Any,
        max_new_tokens: int,
        stop: Collection[int] | None = None,
        policy: RequestPolicy = NO_WISHES,
    ) -> Generation:
        """Prefill, decode greedily until a token of `stop` (default: the model's end tokens), store.

        Returns when the KV is on its way to the tiers; `flush` waits until it is there.

        Raises:
            ValueError: the prompt is empty, or `max_new_tokens` is below 1.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: want at least 1")
        start = time.perf_counter()
        ids = as_tokens(tokens)
        if stop is None:
            end = self.model.generation_config.eos_token_id
            stop = end if isinstance(end, list) else (end,)
        prefill = self.prefill(ids, max_new_tokens, policy)
        decoded = decode(self.model, prefill.logits, prefill.kv, max_new_tokens, stop)
        new = [next(decoded)]
        ttft_s = time.perf_counter() - start
        new += decoded
        return Generation(
            tokens=new,
            prompt_tokens=len(ids),
            hit_tokens=prefill.hit_tokens,
            computed_tokens=prefill.computed_tokens,
            ttft_s=ttft_s,
            stored=self.store(np.concatenate([ids, np.array(new, np.int32)]), prefill.kv, policy),
        )

    def store(self, tokens: Any, kv: GrowingCache, policy: RequestPolicy = NO_WISHES) -> Stored | None:
        """Store the whole chunks of the first `kv.exact` of `tokens`; None without a cache."""
        if self.cache is None:
            return None
        return self.cache.store(as_tokens(tokens)[: kv.exact], kv.places(kv.exact), policy=policy)


def forward(model: Any, ids: TokenIds, kv: GrowingCache) -> torch.Tensor:
    """Logits [V] of the last of token ids after those in `kv`, int32 [T]; their KV is appended."""
    device = next(model.parameters()).device
    inputs = torch.from_numpy(ids.astype(np.int64))[None].to(device)  # [1, T]
    out = model(input_ids=inputs, past_key_values=kv, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def decode(
    model: Any, logits: torch.Tensor, kv: GrowingCache, max_new_tokens: int, stop: Collection[int]
) -> Iterator[int]:
    """Greedy new token ids from the `logits` [V] of a prompt on, to one of `stop`, included. Mutates `kv`."""
    for count in range(1, max_new_tokens + 1):
        token = int(logits.argmax())
        yield token
        if token in stop or count == max_new_tokens:
            return
        logits = forward(model, np.array([token], np.int32), kv)


@torch.inference_mode()
def probe_layout(model: Any) -> KVLayout:
    """The layout of a model's KV as transformers caches it, found by computing one token.

    Chunks are token-granular (`block_tokens` 1). Layers with a sliding window form groups of their own.

    Raises:
        LayoutError: a layer caches something other than K and V tensors, or its KV depends on how long the
            prompt is.
    """
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        for kind in rope.values() if isinstance(rope, dict) else [rope]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise LayoutError(
                    f"rope_type = {kind!r}: transformers rotates K by the length of the prompt, so that "
                    "KV of a prefix fits no longer prompt; want a rotation that does not change"
                )
    kv = transformers.DynamicCache()
    forward(model, np.zeros(1, np.int32), kv)
    pairs = [(layer.keys, layer.values) for layer in kv.layers]
    windows = layer_windows(model.config.get_text_config(decoder=True), len(pairs))
    return KVLayout.from_tensors(pairs, windows=windows)


def _name(model: Any) -> str:
    """That of the hub, or the last part of a folder's, so that machines which have it elsewhere share."""
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Path(name).resolve().name if Path(name).is_dir() else name


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUND_TOKENS) * ROUND_TOKENS


def _grown(old: torch.Tensor, tokens: int) -> torch.Tensor:
    new = old.new_empty(old.shape[0], old.shape[1], _rounded(max(tokens, 2 * old.shape[2])), old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new
