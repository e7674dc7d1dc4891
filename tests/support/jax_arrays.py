"""JAX arrays with the bytes of tensors, pools of pages and slots, for tests of the kernels for JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.format.layout import ITEM_BYTES, LayerGroup
from kvkit.format.rope import Rope
from kvkit.kernels.pages import jax as kernels

POISON = 0xA5
FLOATS = ["float32", "float16", "bfloat16"]
NUMPY = {name: getattr(ml_dtypes, name, None) or getattr(np, name) for name in ITEM_BYTES}
SMALL = LayerGroup(layers=(0, 1), kv_heads=2, k_size=8, v_size=6, dtype="float32", block_tokens=4)
ROPES = {
    "half": Rope((1.0, 0.1, 0.01, 0.001)),
    "interleaved": Rope((1.0, 0.1, 0.01, 0.001), interleaved=True),
    "partial": Rope((0.5, 0.25), first=3),
    "partial interleaved": Rope((0.5,), interleaved=True, first=1),
}
Tensors = list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def to_jax(x: torch.Tensor) -> jax.Array:
    """The same bytes as a JAX array."""
    name = str(x.dtype).removeprefix("torch.")
    raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return jnp.asarray(raw.view(NUMPY.get(name, name)).reshape(x.shape))


def to_torch(x: jax.Array) -> torch.Tensor:
    """And back."""
    raw = np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)
    return torch.from_numpy(raw.copy()).view(getattr(torch, str(x.dtype))).reshape(x.shape)


def bits(x: torch.Tensor | jax.Array | NDArray[Any]) -> NDArray[np.uint8]:
    """Its bytes, in which a NaN equals itself."""
    if isinstance(x, torch.Tensor):
        return x.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def pools(
    group: LayerGroup, blocks: int, apart: bool, seed: int | None, tokens: int | None = None
) -> Tensors:
    """A layer's pages each, of random bytes, or poisoned; for floats of random bytes, many a NaN."""
    random = np.random.default_rng(seed)

    def part(channels: int) -> torch.Tensor:
        shape = (blocks, group.kv_heads, tokens or group.block_tokens, channels * group.item_bytes)
        raw = np.full(shape, POISON, np.uint8) if seed is None else random.integers(0, 256, shape, np.uint8)
        return torch.from_numpy(raw).view(getattr(torch, group.dtype))

    if apart:
        return [(part(group.k_size), part(group.v_size)) for _ in group.layers]
    return [part(group.channels) for _ in group.layers]


def normal(group: LayerGroup, blocks: int, seed: int) -> list[torch.Tensor]:
    """Pages of numbers of many sizes."""
    random = np.random.default_rng(seed)
    shape = (len(group.layers), blocks, group.kv_heads, group.block_tokens, group.channels)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, (*shape[:-1], 1))
    return [*torch.from_numpy(values).to(getattr(torch, group.dtype)).unbind(0)]


def as_jax(tensors: Tensors) -> kernels.JaxPages:
    return [tuple(map(to_jax, t)) if isinstance(t, tuple) else to_jax(t) for t in tensors]


def flat(pages: Tensors | kernels.JaxPages) -> list[Any]:
    """Every part of every layer."""
    return [part for layer in pages for part in (layer if isinstance(layer, tuple) else (layer,))]


def maybe_jit(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return jax.jit(function) if compiled else function


def random_slots(total: int, chunks: int, tokens: int, seed: int, skip: bool) -> NDArray[np.int64]:
    random = np.random.default_rng(seed)
    slots = random.permutation(total)[: chunks * tokens].reshape(chunks, tokens).astype(np.int64)
    if skip:
        slots[random.random(slots.shape) < 0.3] = random.choice([-1, -(2**62)])
    return slots


def close(mine: jax.Array, wanted: torch.Tensor, original: torch.Tensor, rope: Rope) -> None:
    """Rotated alike but for the last bit of a float32 and the rounding; the other channels bit by bit."""
    got, last = to_torch(mine), rope.first + rope.channels
    for outside in (slice(0, rope.first), slice(last, None)):
        np.testing.assert_array_equal(bits(got[..., outside]), bits(original[..., outside]))
    size = original[..., rope.first : last].float().abs().amax(-1, keepdim=True)
    error = (got.float() - wanted.float())[..., rope.first : last].abs()
    step = torch.finfo(wanted.dtype).eps * (1 if wanted.dtype != torch.float32 else 2)
    assert (error <= step * size).all()
    assert not torch.equal(got, original)


def int32(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.numpy().astype(np.int32))


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
