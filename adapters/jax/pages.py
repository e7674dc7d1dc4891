"""Pages of a JAX engine in front of a kvkit cache: JAX gathers and scatters them, the host has the chunks.

    cache = open_cache_for(load_config("kvkit.toml"), pages, model="my-model", params=params)
    pages, loaded = load(cache, prompt, pages, blocks)         # loaded.tokens; the engine computes the rest
    store(cache, prompt, pages, blocks, first=loaded.tokens)   # whole chunks

Pages are a list with an entry per layer of the model, in order, as for `kvkit.kernels.pages.jax`. Heads may
be sharded over the devices of one process. An engine that keeps chunks in pinned host memory moves them by
`Cache` itself, with `host_tensor` and `host_array`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvkit.cache import Cache, Loaded, SequencePages, Stored
from kvkit.config import Config, open_cache
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages.api import Pages
from kvkit.kernels.pages.checks import check_pages, check_range
from kvkit.kernels.pages.jax import JaxPages, pack, unpack
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy
from kvkit.transfer.precision import check

Blocks = npt.NDArray[np.integer[Any]] | Sequence[int]


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _unpack_layer(group: LayerGroup, layer: Any, records: jax.Array, blocks: jax.Array) -> Any:
    (filled,) = unpack(group, [layer], records, blocks=blocks)
    return filled


def open_cache_for(
    config: Config, pages: JaxPages, *, model: str, params: Any, k_size: int | None = None
) -> Cache:
    """Open the tiers of `config` for a model's pages.

    Args:
        model: name of whatever decides the KV beside weights and dtype: the architecture and its settings.
        params: pytree of the model's weights; other weights under the same name share no KV.
        k_size: see `layout_of`.

    Raises:
        ConfigError: a setting is impossible for this model, or its KV was not found fit for `precision`.
        LayoutError: KV of such pages cannot be cached.
    """
    weights, layout = fingerprint(params), config.layout(layout_of(pages, k_size))
    config.check_model(partial(check, weights))
    dtype = layout.groups[0].dtype
    return open_cache(config, layout, config.namespace(layout, model=model, dtype=dtype, revision=weights))


def layout_of(pages: JaxPages, k_size: int | None = None) -> KVLayout:
    """Return the layout of pages: a group of layers per shape and dtype.

    Args:
        k_size: channels of K where one array has K and V side by side; None: half of them.

    Raises:
        LayoutError: a dtype or shape cannot be cached.
    """
    groups: dict[LayerGroup, list[int]] = {}
    for index, layer in enumerate(pages):
        _, heads, block_tokens, channels = _first(layer).shape
        joined_k = channels // 2 if k_size is None else k_size
        k, v = (channels, layer[1].shape[3]) if isinstance(layer, tuple) else (joined_k, channels - joined_k)
        kind = LayerGroup((0,), heads, k, v, _first(layer).dtype.name, block_tokens)
        groups.setdefault(kind, []).append(index)
    return KVLayout(tuple(replace(kind, layers=tuple(members)) for kind, members in groups.items()))


def fingerprint(params: Any) -> str:
    """Return 32 hex digits that depend on every byte of a pytree of arrays, and on their names and shapes.

    Arrays are copied to the host one at a time. XXH3 detects changes, but not collisions that an attacker
    constructed.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        hashed = xxhash.xxh3_128_hexdigest(array.reshape(-1).view(np.uint8).data)
        name = jax.tree_util.keystr(path)
        digest.update(json.dumps([name, array.shape, str(array.dtype), hashed]).encode())
    return digest.hexdigest()


def load(
    cache: Cache,
    tokens: Any,
    pages: JaxPages,
    blocks: Blocks,
    policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
) -> tuple[JaxPages, Loaded]:
    """Return the pages with the leading run of `tokens` (int32 [T]) that the tiers hold, and what was loaded.

    The last token is not looked up: an engine computes it for its logits. Arrays in `pages` are donated: use
    those that are returned. JAX compiles once for each power of two of chunks.

    Args:
        blocks: the sequence's blocks in order, [>= T / block tokens]. A block < 0 is absent, and skipped.
        policy: request policy of the lookup.

    Raises:
        LaunchError: pages or blocks do not fit the cache's layout. Nothing was donated.
        PolicyError: `policy` names an unknown tier.
    """
    hit = cache.lookup(tokens[:-1], policy=policy)
    chunks, size = hit.plan.chunks, hit.chunks.chunk_tokens
    tables = [_table(group, pages, blocks, chunks, size) for group in cache.layout.groups]
    if not chunks:
        return pages, Loaded(0)
    shapes = [(chunks, group.kv_heads, size, group.channels) for group in cache.layout.groups]
    buffers = [
        [torch.empty(shape, dtype=getattr(torch, group.dtype)) for _ in group.layers]
        for group, shape in zip(cache.layout.groups, shapes, strict=True)
    ]
    loaded = cache.load(hit, list(map(_chunk_pages, cache.layout.groups, buffers)))
    filled = list(pages)
    for group, table, tensors in zip(cache.layout.groups, tables, buffers, strict=True):
        for layer, tensor in zip(group.layers, tensors, strict=True):
            values = host_array(tensor)[:, None]
            for part in _powers_of_two(0, loaded.tokens // size):
                records = jax.device_put(values[part], _record_sharding(filled[layer]))
                filled[layer] = _unpack_layer(_one_layer(group), filled[layer], records, table[part])
    return filled, loaded


def store(
    cache: Cache,
    tokens: Any,
    pages: JaxPages,
    blocks: Blocks,
    *,
    first: int = 0,
    policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
) -> Stored:
    """Store the whole chunks of `tokens` (int32 [T]) that a target tier lacks. Only reads the pages.

    Returns when the chunks are in host memory; tiers go on writing (`Cache.flush` waits for them).

    Args:
        first: number of leading tokens that need not be stored, as they were loaded.
        blocks, policy: as for `load`.

    Raises:
        LaunchError: pages or blocks do not fit the cache's layout.
        PolicyError: `policy` names an unknown tier.
    """
    size = cache.namespace.chunk_tokens
    start, stop = first // size, len(tokens) // size
    tables = [_table(group, pages, blocks, stop, size) for group in cache.layout.groups]
    stored = Stored(0, 0)
    for part in _powers_of_two(start, stop):
        packed = [
            [pack(_one_layer(group), [pages[i]], blocks=table[part], pinned=True) for i in group.layers]
            for group, table in zip(cache.layout.groups, tables, strict=True)
        ]
        tensors = [[host_tensor(records)[:, 0] for records in layers] for layers in packed]
        chunk_pages = list(map(_chunk_pages, cache.layout.groups, tensors))
        done = cache.store(tokens[: part.stop * size], chunk_pages, first=part.start, policy=policy)
        stored = Stored(stored.tokens + done.tokens, stored.new_tokens + done.new_tokens)
    return stored


def host_tensor(array: jax.Array) -> torch.Tensor:
    """Return the values of an array as a tensor, which must only be read.

    The memory of a CPU's arrays, pinned or not, is not copied; that of other devices is.
    """
    host = np.asarray(array)
    memory = (ctypes.c_uint8 * host.nbytes).from_address(host.ctypes.data)  # torch warns of read-only memory
    memory.owner = host  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=getattr(torch, host.dtype.name)).view(host.shape)


def host_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a contiguous tensor in host memory as an array of JAX's dtype of that name, without a copy."""
    return tensor.view(torch.uint8).numpy().view(jnp.dtype(str(tensor.dtype).removeprefix("torch.")))


def _chunk_pages(group: LayerGroup, layers: Sequence[torch.Tensor]) -> SequencePages:
    """Describe chunks in host memory, [chunks, H, T, C] per layer, as pages with a block per chunk."""
    chunks, _, tokens, _ = layers[0].shape
    return SequencePages(Pages.of(group, layers), slots=np.arange(chunks * tokens))


def _one_layer(group: LayerGroup) -> LayerGroup:
    """Return the group of any one of these layers: JAX compiles once for all of them."""
    return replace(group, layers=(0,), model_layers=None, precision=None)


def _table(
    group: LayerGroup, pages: JaxPages, blocks: Blocks, chunks: int, chunk_tokens: int
) -> npt.NDArray[np.int32]:
    """Return the blocks of the first chunks, int32 [chunks, blocks of a chunk].

    Raises:
        LaunchError: there are too few, the pages lack one, or the pages are not of the group.
    """
    per_chunk = chunk_tokens // group.block_tokens
    if len(blocks) < chunks * per_chunk:
        raise LaunchError(f"blocks: {len(blocks)} given, {chunks} chunks take {chunks * per_chunk}")
    if len(pages) <= group.layers[-1]:
        raise LaunchError(f"pages: {len(pages)} layers given, the layout has layer {group.layers[-1]}")
    _, _, first = check_pages("pages", replace(group, precision=None), [pages[i] for i in group.layers])[0]
    ids = np.asarray(blocks[: chunks * per_chunk], np.int64)
    check_range("blocks", ids, first.shape[0])
    return np.maximum(ids, -1).astype(np.int32).reshape(chunks, per_chunk)


def _powers_of_two(start: int, stop: int) -> Iterator[slice]:
    """Yield [start, stop) in parts whose lengths are powers of two, for functions compiled per length."""
    while start < stop:
        end = start + (1 << (stop - start).bit_length() - 1)
        yield slice(start, end)
        start = end


def _record_sharding(layer: jax.Array | tuple[jax.Array, jax.Array]) -> jax.sharding.Sharding:
    """Return where records of a layer go: to the device of its pages, with heads sharded as theirs are."""
    sharding = _first(layer).sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        heads = sharding.spec[1] if len(sharding.spec) > 1 else None
        spec = jax.sharding.PartitionSpec(None, None, heads)  # type: ignore[no-untyped-call]  # JAX's
        return jax.sharding.NamedSharding(sharding.mesh, spec)
    return sharding


def _first(layer: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
    return layer[0] if isinstance(layer, tuple) else layer
