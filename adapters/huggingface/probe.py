"""Find out what a Hugging Face model keeps as its KV, and whether it may be kept for another prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.adapters.huggingface.growing import GrowingCache, GrowingLayer
from kvkit.adapters.huggingface.states import tensors_of, with_states
from kvkit.adapters.huggingface.steps import batch_of, forward
from kvkit.format.layout import KVLayout, LayoutError

_TOKENS, _CHANGED = 16, 4
"""Computed for a look, and how many of these, the last ones, are then replaced by others."""
_PIECES = (0, 7, 8, _TOKENS)
"""Where the pieces begin in which they are computed, and where the last one ends."""
_MAX_CHANGED = 0.05
"""Of the elements of K or V of a layer, rounded to 8 bits, those that may depend on later tokens by rounding
alone: with experts, other tokens change the shapes that are computed in."""
_MAX_DIFFERENCE, _MAX_FIRST = {True: 0.01, False: 0.5}, 0.01
"""Relative differences that rounding may make, with more than 16 bits or not; and of K and V of the first
layer, which is computed before any rounding has grown (measured: below 1e-6, and 0.1 in all layers)."""
_KNOWN = (
    *(DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer),
    *(LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer),
)
_CAUSES = (
    "by attention that looks both ways, states that begin anew in every step, or scales of all activations; "
    "want a causal model that goes on from its cache, scaled by token"
)


@torch.inference_mode()
def probe_layout(model: Any, chunk_tokens: int = 256) -> KVLayout:
    """The layout of a model's KV as transformers caches it, found by computing one token.

    Chunks are token-granular (`block_tokens` 1). Layers with a sliding window form groups of their own, and
    so do states of layers (linear attention, Mamba, short convolutions), of which there is one a chunk.

    Args:
        chunk_tokens: of a chunk, at whose end states are kept.

    Raises:
        LayoutError: a layer caches something other than K and V tensors or states, none has K and V, or its
            KV depends on how long the prompt is, on chance, or on an encoder.
    """
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        for kind in rope.values() if isinstance(rope, dict) else [rope]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise LayoutError(
                    f"rope_type = {kind!r}: transformers rotates K by the length of the prompt, so that "
                    "KV of a prefix fits no longer prompt; want a rotation that does not change"
                )
    _check_mode(model)
    name = type(model).__name__
    try:
        kv = transformers.DynamicCache(config=model.config)
        _check_kinds(name, kv)
        forward(model, np.zeros(1, np.int32), kv)
    except LayoutError:
        raise
    except Exception as error:  # whatever a model's own code makes of it
        raise LayoutError(
            f"{name}: it does not compute a token with transformers' DynamicCache, in which its KV would be "
            f"kept: {type(error).__name__}: {error}"
        ) from error
    _check_kinds(name, kv)
    attention = [i for i, layer in enumerate(kv.layers) if isinstance(layer, DynamicLayer)]
    kept = [i for i in attention if kv.layers[i].get_seq_length()]
    if not kept or len(kept) < len(attention):
        which = f"layers {sorted({*attention} - {*kept})}" if kept else "all its layers"
        raise LayoutError(f"{name}: nothing is kept of {which}; want K and V of each token in the cache")
    layers = [kv.layers[i] for i in kept]
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    found = KVLayout.from_tensors([(layer.keys, layer.values) for layer in layers], windows=windows)
    groups = tuple(replace(group, layers=tuple(kept[i] for i in group.layers)) for group in found.groups)
    states = {i: tensors_of(layer) for i, layer in enumerate(kv.layers)}
    return with_states(replace(found, groups=groups), states, chunk_tokens)


@torch.inference_mode()
def check_fit(model: Any, layout: KVLayout) -> None:
    """Compute a few tokens at once, in pieces, and with others behind them: the same KV must come of it.

    Raises:
        LayoutError: the KV of a token depends on something else than the tokens up to it, so that it must not
            be used in another prompt. Names the model's class and what it depends on.
    """
    name = type(model).__name__
    ids, bounds = _ids(model), (0, _TOKENS)
    whole, logits = _computed(model, layout, ids, bounds)
    plain = model(input_ids=batch_of(model, ids), use_cache=False).logits[0]
    _check_equal(name, "logits computed with a cache, and without", [logits], [plain])
    other = ids.copy()
    other[-_CHANGED:] = ids[:_CHANGED]
    behind, _ = _computed(model, layout, other, bounds)
    pairs = zip(_held(whole, _TOKENS - _CHANGED), _held(behind, _TOKENS - _CHANGED), strict=True)
    changed = max(float((a.bfloat16() != b.bfloat16()).float().mean()) for a, b in pairs)
    if changed > _MAX_CHANGED:
        raise LayoutError(
            f"{name}: K and V of tokens depend on those behind them, with which {changed:.0%} of a layer's "
            f"values change: {_CAUSES}"
        )
    pieces, parts = _computed(model, layout, ids, _PIECES)
    found, want = (_held(kv, _TOKENS) for kv in (pieces, whole))
    if isinstance(whole.layers[0], GrowingLayer):
        which = "K and V of the first layer computed in pieces, and at once"
        _check_equal(name, which, found[:2], want[:2], _MAX_FIRST)
    _check_equal(name, "K and V computed in pieces, and at once", found, want)
    _check_equal(name, "states computed in pieces, and at once", _states(pieces), _states(whole))
    _check_equal(name, "logits computed in pieces, and at once", [parts], [logits])


def _check_kinds(name: str, kv: Any) -> None:
    """
    Raises:
        LayoutError: a layer keeps something else than K and V of each token, or a state of fixed size.
    """
    others: dict[str, int] = {}
    for i, layer in enumerate(kv.layers):
        if type(layer) not in _KNOWN:
            others.setdefault(type(layer).__name__, i)
    if others:
        kinds = ", ".join(f"{kind} (layer {i})" for kind, i in others.items())
        raise LayoutError(f"{name}: it keeps other than K and V of each token, or states: {kinds}")


def _check_mode(model: Any) -> None:
    name = type(model).__name__
    training = next((path for path, module in model.named_modules() if _is_training(module)), None)
    if training is not None:
        raise LayoutError(
            f"{name}: {training or 'it'} is in training mode, in which KV depends on chance (dropout); want "
            "model.eval()"
        )
    if model.config.is_encoder_decoder:
        raise LayoutError(
            f"{name}: the KV of its decoder depends on what its encoder read, of which kvkit knows nothing; "
            "want a decoder alone"
        )


def _is_training(module: torch.nn.Module) -> bool:
    """Whether it is in training mode. Those of torch.ao, which have another, are in it for ever."""
    return module.training and not type(module).__module__.startswith("torch.ao.")


def _ids(model: Any) -> TokenIds:
    """Distinct token ids, of those that are least likely to mean something else than text."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    span = max(1, vocabulary // 4)
    return (span + np.arange(_TOKENS) * 7919 % span).astype(np.int32)


def _computed(
    model: Any, layout: KVLayout, ids: TokenIds, bounds: Sequence[int]
) -> tuple[GrowingCache, torch.Tensor]:
    """The KV and the logits [T, V] of token ids, computed from each of `bounds` to the next."""
    kv = GrowingCache(layout, len(ids), next(model.parameters()).device)
    try:
        logits = [
            model(input_ids=batch_of(model, ids[start:stop]), past_key_values=kv, use_cache=True).logits[0]
            for start, stop in itertools.pairwise(bounds)
        ]
    except Exception as error:  # whatever a model's own code makes of it
        raise LayoutError(
            f"{type(model).__name__}: it does not go on from what is in its cache: "
            f"{type(error).__name__}: {error}"
        ) from error
    return kv, torch.cat(logits)


def _held(kv: GrowingCache, tokens: int) -> list[torch.Tensor]:
    """K and V of the first tokens, of each layer that has them."""
    layers = [layer for layer in kv.layers if isinstance(layer, GrowingLayer)]
    return [held[:, :, :tokens] for layer in layers for held in (layer.keys, layer.values) if held.numel()]


def _states(kv: GrowingCache) -> list[torch.Tensor]:
    """The states of each layer that has any."""
    layers = [layer for layer in kv.layers if isinstance(layer, LinearAttentionLayer)]
    kept = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
    return [held for states in kept for held in states.values() if held is not None]


def _check_equal(
    name: str, which: str, found: list[torch.Tensor], want: list[torch.Tensor], most: float | None = None
) -> None:
    """
    Raises:
        LayoutError: tensors differ by more than `most` of their size; None: than rounding makes.
    """
    for a, b in zip(found, want, strict=True):
        limit = most or _MAX_DIFFERENCE[b.dtype.itemsize > 2]
        differs = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
        if not differs <= limit:
            raise LayoutError(
                f"{name}: {which}, differ by {differs:.2g} of their size, want at most {limit:g}: {_CAUSES}"
            )
