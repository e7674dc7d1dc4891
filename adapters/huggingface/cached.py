"""A Hugging Face decoder with a kvkit cache in front of it.

model = CachedModel.open(AutoModelForCausalLM.from_pretrained(...), load_config("kvkit.toml"))
answer = model.generate(token_ids, max_new_tokens=32)    # reuses what is cached, stores what is new
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.adapters.huggingface.growing import GrowingCache, rounded
from kvkit.adapters.huggingface.probe import check_fit, probe_layout
from kvkit.adapters.huggingface.steps import decode, extend
from kvkit.cache import Cache, Stored
from kvkit.config import Config, open_cache
from kvkit.format.keys import as_tokens
from kvkit.format.layout import KVLayout
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy
from kvkit.transfer.precision import check


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt with complete KV.

    Attributes:
        logits: logits of the last token, [V].
        kv: the model's cache (`past_key_values`), with room for more tokens.
        hit_tokens: loaded tokens by tier.
        computed_tokens: tokens that the model computed.
    """

    logits: torch.Tensor
    kv: GrowingCache
    hit_tokens: Mapping[str, int]
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of `generate`.

    Attributes:
        tokens: the new token ids, an end token included.
        prompt_tokens: length of the prompt.
        hit_tokens, computed_tokens: as in `Prefill`.
        ttft_s: seconds from the call to the first new token.
        stored: result of the store; None without a cache.
    """

    tokens: list[int]
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    computed_tokens: int
    ttft_s: float
    stored: Stored | None


class CacheOwner:
    """The owner of a cache, or of none: a context manager that closes the cache."""

    cache: Cache | None

    def flush(self) -> None:
        """Wait until pending stores are in the tiers (`Cache.flush`)."""
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


class CachedModel(CacheOwner):
    """A decoder-only model that prefills from a kvkit cache and stores to it. One sequence at a time.

    Methods with a `policy`, the request policy, raise PolicyError if it names a tier that does not exist.

    Args:
        model: a Hugging Face causal language model, in eval mode.
        layout: layout of the model's KV, see `probe_layout`.
        cache: cache of that layout; None computes everything, for comparison.
    """

    def __init__(self, model: Any, layout: KVLayout, cache: Cache | None) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self.device: torch.device = next(model.parameters()).device

    @staticmethod
    def open(model: Any, config: Config) -> CachedModel:
        """Open `model` with the tiers of `config`.

        The namespace contains the model's name, its dtype and a fingerprint of its weights and config, so
        other weights under the same name share no KV. Change none of these while the cache is open.

        Raises:
            ConfigError: a setting is impossible for this model, its KV was not found fit for `precision`, or
                its weights cannot be read (`model_fingerprint`).
            LayoutError: its KV cannot be cached (`probe_layout`) or does not fit other prompts (`check_fit`).
        """
        weights, layout = model_fingerprint(model), probe_layout(model, config.chunk_tokens)
        check_fit(model, layout)
        layout = config.layout(layout)
        config.check_model(partial(check, weights))
        namespace = config.namespace(
            layout, model=_name(model), dtype=str(model.dtype).removeprefix("torch."), revision=weights
        )
        return CachedModel(model, layout, open_cache(config, layout, namespace))

    @torch.no_grad()
    def prefill(self, tokens: Any, room: int = 0, policy: RequestPolicy = DEFAULT_REQUEST_POLICY) -> Prefill:
        """Load or compute the KV of a prompt; the last token is always computed, for its logits.

        transformers' `generate` continues from the result's `kv`, as from any `past_key_values`. It needs a
        token to begin with, so leave out the last one here.

        Args:
            tokens: int32 [T], the prompt.
            room: further tokens that fit before the KV must be copied to larger memory.
            policy: request policy of the lookup.

        Raises:
            ValueError: the prompt is empty.
        """
        ids = as_tokens(tokens)
        if not len(ids):
            raise ValueError("tokens: the prompt is empty")
        kv = GrowingCache(self.layout, rounded(len(ids) + room), self.device)
        hit_tokens = {} if self.cache is None else kv.load(self.cache, ids[:-1], policy=policy).by_tier
        computed = len(ids) - kv.length
        logits = extend(self.model, ids[kv.length :], kv)
        return Prefill(logits, kv, hit_tokens, computed)

    @torch.inference_mode()
    def generate(
        self,
        tokens: Any,
        max_new_tokens: int,
        stop: Collection[int] | None = None,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> Generation:
        """Prefill, decode greedily until a token of `stop` (default: the model's end tokens), and store.

        Returns while stores are pending; `flush` waits until the KV is in the tiers.

        Raises:
            ValueError: the prompt is empty, or `max_new_tokens` is below 1.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: want at least 1")
        start = time.perf_counter()
        ids = as_tokens(tokens)
        if stop is None:
            end_ids = self.model.generation_config.eos_token_id
            stop = end_ids if isinstance(end_ids, list) else (end_ids,)
        prefill = self.prefill(ids, max_new_tokens, policy)
        decoded = decode(self.model, prefill.logits, prefill.kv, max_new_tokens, stop)
        new_ids = [next(decoded)]
        ttft_s = time.perf_counter() - start
        new_ids += decoded
        return Generation(
            tokens=new_ids,
            prompt_tokens=len(ids),
            hit_tokens=prefill.hit_tokens,
            computed_tokens=prefill.computed_tokens,
            ttft_s=ttft_s,
            stored=self.store(np.concatenate([ids, np.array(new_ids, np.int32)]), prefill.kv, policy),
        )

    def store(
        self, tokens: Any, kv: GrowingCache, policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    ) -> Stored | None:
        """Store the whole chunks of the first `kv.exact` of `tokens`; None without a cache.

        Snapshots of states that `prefill` and `generate` saved at the ends of chunks are stored too.
        """
        if self.cache is None:
            return None
        return self.cache.store(as_tokens(tokens)[: kv.exact], kv.sequence_pages(kv.exact), policy=policy)


def _name(model: Any) -> str:
    """Return the model's name on the hub, or the name of its folder.

    Machines that keep the model in different places then share its KV.
    """
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Path(name).resolve().name if Path(name).is_dir() else name
