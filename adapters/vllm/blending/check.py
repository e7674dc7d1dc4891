"""Check, when the engine starts, that vLLM's model can be blended; refuse models that cannot.

A few tokens are computed as a prefill and as rows with gaps, and one token alone at several positions. Rows
must equal the prefill, and one of the model's rotary embeddings, or none, must rotate each layer's keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.blending.attention import KvkitAttention
from kvkit.adapters.vllm.blending.cpu_speeds import measure_speeds
from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.adapters.vllm.blending.page_order import read_tokens, write_tokens
from kvkit.adapters.vllm.blending.rows import AttentionLayer, RequestRows, RowRunner
from kvkit.blend.plan import BlendError
from kvkit.format.rope import Rope
from kvkit.kernels.pages.reference import rotate

log = logging.getLogger(__name__)
_TOKENS = 12
_FAR_POSITION = 1000
"""Position past the first full rotation of most pairs, where a wrong frequency shows."""
_MAX_ROWS_DIFFERENCE = {torch.float32: 1e-3}
_MAX_KEYS_DIFFERENCE = {torch.float32: 1e-3}
_MAX_ROUNDED_ROWS, _MAX_ROUNDED_KEYS = 0.1, 0.03
"""Relative limits for models that compute in 16 bits."""

_Prefill = tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]
"""Hidden states, and K and V by layer."""


def open_row_runner(runner: Any) -> tuple[RowRunner, LayerPages, tuple[Rope | None, ...]]:
    """Return the row runner of vLLM's model, its pages, and each layer's rope; None: keys are not rotated.

    Call it when the engine starts, before any request has blocks. Mutates some blocks.

    Raises:
        BlendError: the model or its configuration cannot be blended; names the cause. All ranks raise it.
        MissingName: this vLLM's model runner lacks something that blending needs.
    """
    compat.check_runner(runner)
    with _errors_on_all_ranks():
        refuse_unsupported(runner)
    rows = RowRunner(runner)
    with _errors_on_all_ranks():
        pages = LayerPages(rows.layers)
    with _errors_on_all_ranks():
        ropes = check_rows(rows, pages)
    rows.kvkit_attention = open_kvkit_attention(rows, pages)
    return rows, pages, ropes


@contextmanager
def _errors_on_all_ranks() -> Iterator[None]:
    """Raise a BlendError of any rank in all ranks, as the others would wait for that rank."""
    ranks = compat.find("get_world_group")()
    messages = [""] * ranks.world_size
    try:
        yield
    except BlendError as error:
        messages[0] = str(error)
    if ranks.world_size > 1:
        torch.distributed.all_gather_object(messages, messages[0], group=ranks.cpu_group)
    if found := [message for message in messages if message]:
        raise BlendError(found[0])


def refuse_unsupported(runner: Any) -> None:
    """Refuse a model runner of vLLM with settings or layers that are known not to work.

    Raises:
        BlendError: there are such settings or layers; names each.
    """
    config = runner.vllm_config
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    layers = {n for groups in runner.attn_groups for group in groups for n in group.layer_names}
    modules = {n: compat.attention_layers(config)[n] for n in layers}
    model_modules = {id(module) for module in runner.get_model().modules()}
    by_head, is_quantised = compat.find("Attention"), compat.find("is_quantized_kv_cache")
    latent = sorted(n for n, module in modules.items() if not isinstance(module, by_head))
    quantised = [n for n, m in modules.items() if is_quantised(getattr(m, "kv_cache_dtype", "auto"))]
    drafts = sorted(n for n, module in modules.items() if id(module) not in model_modules)
    obstacles = {
        f"runner = {model.runner_type!r}: want 'generate'": model.runner_type != "generate",
        "an encoder beside the decoder": model.is_encoder_decoder,
        f"layer {latent[:1]}: its pages hold no K and V by head": latent,
        f"layer {drafts[:1]} is a draft model's: it would have no KV of blended tokens": drafts,
        f"kv_cache_dtype = {cache.cache_dtype!r}: want unquantised KV": quantised,
        "kv_sharing_fast_prefill: not all layers compute a prompt's rows": cache.kv_sharing_fast_prefill,
        "data_parallel_size > 1: experts wait for the other engines' steps": parallel.data_parallel_size > 1
        and parallel.is_moe_model is not False,
        "enable_eplb: rows would count as load of experts": parallel.enable_eplb,
        "rswa_window: a window that never drops the prompt": getattr(model, "rswa_window", None) is not None,
        "its embeddings depend on earlier tokens": getattr(runner.get_model(), "token_lookback_depth", 0),
    }
    reasons = [text for text, holds in obstacles.items() if holds]
    if reasons:
        raise BlendError(f"{type(runner.get_model()).__name__} cannot be blended: {'; '.join(reasons)}")


def check_rows(rows: RowRunner, pages: LayerPages) -> tuple[Rope | None, ...]:
    """Compare rows with a prefill of the same tokens, and return the rope of each of `rows.layers`.

    Mutates a block of every KV cache group.

    Raises:
        BlendError: rows differ from a prefill, or no known rope rotates a layer's keys. Names the layer and
            the difference.
    """
    probe = _Probe(rows, pages)
    largest = probe.difference_with_gaps(probe.prefill())
    far = min(_FAR_POSITION, rows.config.model_config.max_model_len - 1)
    keys_at = {position: probe.keys_at(position) for position in (0, 1, far)}
    rows.wait_for_sends()
    # all ranks have run everything by now, so an error on one rank stops no other halfway
    name, dtype = type(rows.model).__name__, rows.config.model_config.dtype
    log.info("%s: rows differ from a prefill by %.2g", name, largest)
    if not largest <= _MAX_ROWS_DIFFERENCE.get(dtype, _MAX_ROUNDED_ROWS):
        raise BlendError(f"{name}: rows with gaps differ from what a prefill computes (by {largest:.2g})")
    candidates = list(dict.fromkeys(_candidate_ropes(rows.model)))
    limit = _MAX_KEYS_DIFFERENCE.get(dtype, _MAX_ROUNDED_KEYS)
    return tuple(
        _find_rope(layer, candidates, {position: keys[i] for position, keys in keys_at.items()}, limit)
        for i, layer in enumerate(rows.layers)
    )


def open_kvkit_attention(rows: RowRunner, pages: LayerPages) -> KvkitAttention | None:
    """Return kvkit's attention if it equals vLLM's on all ranks, otherwise None. A difference is logged.

    On a CPU it is chosen by speeds that are measured here.

    Mutates a block of every KV cache group.
    """
    names = {n for groups in rows.runner.attn_groups for group in groups for n in group.layer_names}
    ranks = compat.find("get_world_group")()
    attention = KvkitAttention.of(pages, ranks.world_size) if len(names) == len(rows.layers) else None
    probe = _Probe(rows, pages)
    expected = probe.prefill()
    rows.kvkit_attention = attention and replace(attention, prefers=lambda sizes: True)
    largest = probe.difference_with_gaps(expected)  # also without kvkit's attention: other ranks run it
    rows.kvkit_attention = None
    is_equal = largest <= _MAX_ROWS_DIFFERENCE.get(rows.config.model_config.dtype, _MAX_ROUNDED_ROWS)
    if not is_equal:
        log.warning("kvkit's attention differs from vLLM's (by %.2g): it is not used", largest)
    accepted = torch.tensor(attention is not None and is_equal).int()
    if ranks.world_size > 1:
        torch.distributed.all_reduce(accepted, torch.distributed.ReduceOp.MIN, group=ranks.cpu_group)
    if attention is None or not accepted:
        return None
    if not pages.opaque:
        return attention
    return replace(attention, prefers_rows=measure_speeds(rows, attention).is_kvkit_faster)


class _Probe:
    """Arbitrary tokens for the checks, in blocks that no request has yet.

    Args:
        rows: runner of the model.
        pages: K and V of its layers.
    """

    def __init__(self, rows: RowRunner, pages: LayerPages) -> None:
        self._rows = rows
        groups = 1 + max(layer.table for layer in rows.layers)
        self._blocks = tuple([1 + group] for group in range(groups))
        self._orders = pages.orders
        vocabulary = rows.config.model_config.get_vocab_size()
        self._ids = np.arange(1, 1 + _TOKENS, dtype=np.int32) * 7919 % vocabulary
        self._positions = np.arange(_TOKENS, dtype=np.int64)

    def prefill(self) -> _Prefill:
        """Run all tokens; return hidden states of two in three, and K and V of all tokens by layer."""
        hidden = self._rows.run([RequestRows(self._ids, self._positions, self._blocks)])
        return [h[self._recomputed.to(h.device)] for h in hidden], self._kv()

    def difference_with_gaps(self, prefilled: _Prefill) -> float:
        """Zero the KV of two tokens in three, recompute them as rows, and return the largest difference."""
        expected, prefilled_kv = prefilled
        rows = self._recomputed.numpy()
        for layer, (k, v) in zip(self._rows.layers, prefilled_kv, strict=True):
            slots = self._recomputed + self._blocks[layer.table][0] * layer.block_tokens
            zero_k, zero_v = (torch.zeros_like(x[:, : len(rows)]) for x in (k, v))
            write_tokens(layer.module, zero_k, zero_v, slots.to(k.device))
        hidden = self._rows.run([RequestRows(self._ids[rows], self._positions[rows], self._blocks)])
        kv = self._kv()
        pairs = [*zip(hidden, expected, strict=True), *zip(sum(kv, ()), sum(prefilled_kv, ()), strict=True)]
        return max(_difference(a, b) for a, b in pairs)

    def keys_at(self, position: int) -> list[torch.Tensor]:
        """Return the keys [H, 1, D] by layer of the first token, computed at `position`."""
        row = RequestRows(self._ids[:1], self._positions[:1], self._blocks)
        self._rows.run([row], hidden=False, position=position)
        return [k[:, :1] for k, _ in self._kv()]

    @property
    def _recomputed(self) -> torch.Tensor:
        """Positions of two tokens in three, which are recomputed as rows."""
        return torch.from_numpy(self._positions[self._positions % 3 != 1])

    def _kv(self) -> list[tuple[torch.Tensor, ...]]:
        return [
            read_tokens(layer.module, order, layer.kernel_blocks(self._blocks[layer.table]), _TOKENS)
            for layer, order in zip(self._rows.layers, self._orders, strict=True)
        ]


def _find_rope(
    layer: AttentionLayer, candidates: Sequence[Rope], keys: dict[int, torch.Tensor], limit: float
) -> Rope | None:
    """Return the rope that a layer's keys were rotated by; None: keys are the same at all positions.

    Raises:
        BlendError: no candidate fits the keys, and they differ between positions.
    """
    differences: dict[Rope | None, float] = {}
    size = layer.module.head_size
    variants = [r for rope in candidates if rope.channels <= size for r in _variants(rope, size)]
    for rope in (*variants, None):
        differences[rope] = max(
            _difference(_rotated(keys[0], rope, position), k) for position, k in keys.items()
        )
    best = min(differences, key=lambda rope: differences[rope])
    if not differences[best] <= limit:
        raise BlendError(
            f"layer {layer.name}: none of the model's {len(candidates)} rotary embeddings rotates its keys "
            f"from one position to another (difference {differences[best]:.2g}); want the same one everywhere"
        )
    return best


def _variants(rope: Rope, size: int) -> list[Rope]:
    """Return the rope over the first and over the last channels of a head."""
    firsts = sorted({0, size - rope.channels})
    return [Rope(rope.inv_freq, rope.interleaved, first, rope.scale) for first in firsts]


def _rotated(keys: torch.Tensor, rope: Rope | None, distance: int) -> torch.Tensor:
    """Return keys as if they stood `distance` positions later; without a rope, the keys themselves."""
    if rope is None:
        return keys
    cos_sin = torch.from_numpy(rope.delta_table(np.array([distance], np.int64)))
    return rotate(keys, cos_sin.to(keys.device), rope)


def _candidate_ropes(model: Any) -> Iterator[Rope]:
    """Yield the ropes by which a model's rotary embeddings (vLLM's or Transformers') may rotate keys."""
    for module in model.modules():
        if hasattr(module, "use_long_rope"):  # factors depend on the length, but an engine uses one set
            long = module.use_long_rope
            factors, scale = (
                (module.long_factor, module.long_mscale)
                if long
                else (module.short_factor, module.short_mscale)
            )
            yield Rope(
                tuple(compat.inverse_frequencies(module, factors).double().tolist()), scale=float(scale)
            )
        elif hasattr(module, "cos_sin_cache") and hasattr(module, "is_neox_style"):
            rope = _rope_of(compat.cos_sin(module).double().cpu().numpy(), not module.is_neox_style)
            if rope is not None:
                yield rope
        for name, frequencies in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.startswith("original"):
                scale_name = f"{name.removesuffix('inv_freq')}attention_scaling"
                scale = getattr(module, scale_name, getattr(module, "attention_scaling", 1.0))
                for interleaved in (False, True):
                    yield Rope(tuple(frequencies.double().tolist()), interleaved, scale=float(scale))


def _rope_of(cache: NDArray[np.float64], interleaved: bool) -> Rope | None:
    """Return the rope with the cos and sin of `cache`; None: its frequencies depend on the position.

    Args:
        cache: [positions, R], rows at positions 0, 1, 2, ...
        interleaved: whether the two channels of a pair are adjacent.
    """
    cos, sin = np.split(cache, 2, axis=1)
    frequencies, row = np.arctan2(sin[1], cos[1]), 2
    while row < len(cache):  # each row refines the estimate of the one before
        angle = np.arctan2(sin[row], cos[row])
        frequencies = (angle + 2 * np.pi * np.round((frequencies * row - angle) / (2 * np.pi))) / row
        row *= 2
    scale = float(np.hypot(cos[0], sin[0]).mean())
    rope = Rope(tuple(frequencies.tolist()), interleaved, scale=scale)
    sample = np.linspace(0, len(cache) - 1, 64).astype(np.int64)
    return rope if np.abs(rope.table(sample) - cache[sample]).max() <= 0.02 * scale else None


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative difference, upper quartile over tokens.

    The largest are ignored, as rounding may make a router choose other experts.
    """
    difference, norm = ((x.float().flatten(0, -2)).norm(dim=-1) for x in (a - b, b))
    relative = float(difference.quantile(0.75) / norm.median())
    return relative if math.isfinite(relative) else math.inf
