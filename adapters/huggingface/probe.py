"""Probes of a Hugging Face model: the layout of its KV, and whether the KV fits other prompts."""

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
"""Number of tokens that a check computes, and of the last ones that it then replaces."""
_PIECES = (0, 7, 8, _TOKENS)
"""Boundaries of the pieces in which the tokens are computed."""
_MAX_CHANGED = 0.05
"""Largest share of a layer's K or V elements, rounded to bfloat16, that may change with later tokens.

With experts, other tokens change the shapes of the computation, and so its rounding."""
_MAX_DIFFERENCE, _MAX_FIRST = {True: 0.01, False: 0.5}, 0.01
"""Largest relative differences due to rounding.

The first are for dtypes of more than 16 bits (True) and others; the last is for K and V of the first layer,
before rounding errors grow (measured: below 1e-6 there, and 0.1 over all layers)."""
_KNOWN = (
    *(DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer),
    *(LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer),
)
_CAUSES = (
    "possible causes: bidirectional attention, states that begin anew in every step, or scales of all "
    "activations; want a causal model that continues from its cache, with a scale per token"
)


def _depends_on_length(rotary: Any, layer_type: str | None, kind: str) -> bool:
    """Return whether a module rotates K of a layer type (None: of all) otherwise in long prompts."""
    if kind != "longrope":
        return "dynamic" in kind
    parameters = rotary.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return bool(parameters["short_factor"] != parameters["long_factor"])


@torch.inference_mode()
def probe_layout(model: Any, chunk_tokens: int = 256) -> KVLayout:
    """Return the layout of a model's KV in transformers' cache, found by computing one token.

    Chunks are token-granular (`block_tokens` 1). Layers with a sliding window form separate groups. So do
    states of layers (linear attention, Mamba, short convolutions), with one snapshot per chunk.

    Args:
        chunk_tokens: tokens per chunk; states are kept at the ends of chunks.

    Raises:
        LayoutError: the model does not run with transformers' DynamicCache, a layer caches something other
            than K and V tensors or states, no layer has K and V, or the KV depends on the prompt's length, on
            dropout (training mode), or on an encoder.
    """
    for module in model.modules():
        rope = getattr(module, "rope_type", None)
        for layer_type, kind in rope.items() if isinstance(rope, dict) else [(None, rope)]:
            if isinstance(kind, str) and _depends_on_length(module, layer_type, kind):
                raise LayoutError(
                    f"rope_type = {kind!r}: transformers rotates K depending on the prompt's length, so "
                    "KV of a prefix does not fit longer prompts; want a fixed rotation"
                )
    _check_mode(model)
    name = type(model).__name__
    try:
        kv = transformers.DynamicCache(config=model.config)
        _check_kinds(name, kv)
        forward(model, np.zeros(1, np.int32), kv)
    except LayoutError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise LayoutError(
            f"{name}: it does not compute a token with transformers' DynamicCache, in which its KV would be "
            f"kept: {type(error).__name__}: {error}"
        ) from error
    _check_kinds(name, kv)
    attention = [i for i, layer in enumerate(kv.layers) if isinstance(layer, DynamicLayer)]
    kept = [i for i in attention if kv.layers[i].get_seq_length()]
    if not kept or len(kept) < len(attention):
        without_kv = f"layers {sorted({*attention} - {*kept})}" if kept else "all its layers"
        raise LayoutError(f"{name}: nothing is kept of {without_kv}; want K and V of each token in the cache")
    layers = [kv.layers[i] for i in kept]
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    layout = KVLayout.from_tensors([(layer.keys, layer.values) for layer in layers], windows=windows)
    groups = tuple(replace(group, layers=tuple(kept[i] for i in group.layers)) for group in layout.groups)
    states = {i: tensors_of(layer) for i, layer in enumerate(kv.layers)}
    return with_states(replace(layout, groups=groups), states, chunk_tokens)


@torch.inference_mode()
def check_fit(model: Any, layout: KVLayout) -> None:
    """Check that a few tokens have the same KV computed at once, in pieces, and before other tokens.

    Raises:
        LayoutError: the KV of a token depends on more than the tokens up to it, so it must not be used in
            another prompt. The message names the model's class and possible causes.
    """
    name = type(model).__name__
    ids, bounds = _ids(model), (0, _TOKENS)
    at_once, logits = _computed(model, layout, ids, bounds)
    uncached_logits = model(input_ids=batch_of(model, ids), use_cache=False).logits[0]
    _check_equal(name, "logits computed with a cache, and without", [logits], [uncached_logits])
    other_ids = ids.copy()
    other_ids[-_CHANGED:] = ids[:_CHANGED]
    with_other_end, _ = _computed(model, layout, other_ids, bounds)
    pairs = zip(
        _kv_tensors(at_once, _TOKENS - _CHANGED), _kv_tensors(with_other_end, _TOKENS - _CHANGED), strict=True
    )
    changed = max(float((a.bfloat16() != b.bfloat16()).float().mean()) for a, b in pairs)
    if changed > _MAX_CHANGED:
        raise LayoutError(
            f"{name}: K and V of tokens depend on those behind them, with which {changed:.0%} of a layer's "
            f"values change: {_CAUSES}"
        )
    in_pieces, piece_logits = _computed(model, layout, ids, _PIECES)
    actual, expected = (_kv_tensors(kv, _TOKENS) for kv in (in_pieces, at_once))
    if isinstance(at_once.layers[0], GrowingLayer):
        what = "K and V of the first layer computed in pieces, and at once"
        _check_equal(name, what, actual[:2], expected[:2], _MAX_FIRST)
    _check_equal(name, "K and V computed in pieces, and at once", actual, expected)
    _check_equal(name, "states computed in pieces, and at once", _states(in_pieces), _states(at_once))
    _check_equal(name, "logits computed in pieces, and at once", [piece_logits], [logits])


def _check_kinds(name: str, kv: Any) -> None:
    """Check the kinds of a cache's layers.

    Raises:
        LayoutError: a layer keeps something other than K and V of each token, or states of fixed size.
    """
    unknown: dict[str, int] = {}
    for i, layer in enumerate(kv.layers):
        if type(layer) not in _KNOWN:
            unknown.setdefault(type(layer).__name__, i)
    if unknown:
        kinds = ", ".join(f"{kind} (layer {i})" for kind, i in unknown.items())
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
            f"{name}: the KV of its decoder depends on what its encoder read, which kvkit does not know; "
            "want a decoder-only model"
        )


def _is_training(module: torch.nn.Module) -> bool:
    """Return whether a module is in training mode; torch.ao modules, which always claim to be, are not."""
    return module.training and not type(module).__module__.startswith("torch.ao.")


def _ids(model: Any) -> TokenIds:
    """Return distinct token ids that are unlikely to be special tokens."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    span = max(1, vocabulary // 4)
    return (span + np.arange(_TOKENS) * 7919 % span).astype(np.int32)


def _computed(
    model: Any, layout: KVLayout, ids: TokenIds, bounds: Sequence[int]
) -> tuple[GrowingCache, torch.Tensor]:
    """Compute token ids from each of `bounds` to the next; return their KV and logits [T, V]."""
    kv = GrowingCache(layout, len(ids), next(model.parameters()).device)
    try:
        logits = [
            model(input_ids=batch_of(model, ids[start:stop]), past_key_values=kv, use_cache=True).logits[0]
            for start, stop in itertools.pairwise(bounds)
        ]
    except Exception as error:  # a model's own code may raise anything
        raise LayoutError(
            f"{type(model).__name__}: it does not go on from what is in its cache: "
            f"{type(error).__name__}: {error}"
        ) from error
    return kv, torch.cat(logits)


def _kv_tensors(kv: GrowingCache, tokens: int) -> list[torch.Tensor]:
    """Return K and V of the first `tokens` tokens, for each layer that has them."""
    layers = [layer for layer in kv.layers if isinstance(layer, GrowingLayer)]
    return [x[:, :, :tokens] for layer in layers for x in (layer.keys, layer.values) if x.numel()]


def _states(kv: GrowingCache) -> list[torch.Tensor]:
    """Return the states of each layer that has any."""
    layers = [layer for layer in kv.layers if isinstance(layer, LinearAttentionLayer)]
    by_kind = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
    return [state for states in by_kind for state in states.values() if state is not None]


def _check_equal(
    name: str, what: str, actual: list[torch.Tensor], expected: list[torch.Tensor], bound: float | None = None
) -> None:
    """Check that tensors are equal up to rounding.

    Raises:
        LayoutError: tensors differ by more than `bound` of their norm; None: the limit of their dtype.
    """
    for a, b in zip(actual, expected, strict=True):
        limit = bound or _MAX_DIFFERENCE[b.dtype.itemsize > 2]
        difference = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
        if not difference <= limit:
            raise LayoutError(
                f"{name}: {what}, differ by {difference:.2g} of their size, want at most {limit:g}: {_CAUSES}"
            )
