"""Operations for JAX arrays over four devices are as on one; run by test_jax_transforms.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_reference import problem

from kvkit.format.layout import LayerGroup, Precision
from kvkit.format.rope import Rope
from kvkit.kernels.attention import jax as attention
from kvkit.kernels.attention.layer import Requests, RowRotations, Scoring
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import jax as pages
from kvkit.kernels.traced import vary, varying

MESH = jax.make_mesh((2, 2), ("requests", "heads"), axis_types=(AxisType.Auto,) * 2)
HEADS, RECORD_HEADS = P(None, "heads"), P(None, None, "heads")
SCORING = Scoring(0.3, 9, 2.0)
ROPE = Rope((1.0, 0.1))
COLLECTIVES = "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"


def equal(found: Any, wanted: Any) -> None:
    """Bit by bit, but for the last bits of a float32: fewer heads may be added up in another order."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        if x.dtype == jnp.float32:
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)
        else:
            np.testing.assert_array_equal(x, y)


def put(tree: Any, spec: P, memory: str = "device") -> Any:
    return jax.device_put(tree, NamedSharding(MESH, spec, memory_kind=memory))


def shard_map(function: Any, into: Any, out: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=into, out_specs=out))


def moved(group: LayerGroup, pinned: bool, *arrays: Any) -> Any:
    """Chunks to other slots of other pages, rotated, by way of records."""
    from_pages, to_pages, slots, others, turns = arrays
    records = pages.pack(group, from_pages, slots=slots, pinned=pinned)
    rotated = {"rope": ROPE, "cos_sin": turns}
    return records, pages.unpack(group, to_pages, records, slots=others, **rotated)


def moving(dtype: str) -> tuple[LayerGroup, tuple[Any, ...]]:
    random = np.random.default_rng(0)
    group = LayerGroup((0, 1), 6, 5, 3, dtype, 4)
    pools = jnp.asarray(random.standard_normal((4, 7, 6, 4, 8)), dtype)
    slots, others = (jnp.asarray(random.permutation(28)[:14].reshape(2, 7)) for _ in range(2))
    arrays = [*pools[:2]], [*pools[2:]], slots.at[0, 3].set(-1), others, ROPE.delta_table(np.array([3, -8]))
    return group, arrays


@pytest.mark.parametrize(
    ("precision", "dtype", "pinned"), [(None, "float16", False), ("fp8", "float32", True)]
)
def test_pages(precision: Precision | None, dtype: str, pinned: bool) -> None:
    """Heads sharded; under jit as in shard_map, where the group has the heads of one device."""
    group, arrays = moving(dtype)
    group = replace(group, precision=precision)
    one = partial(moved, group, pinned)
    wanted = one(*arrays)
    sharded = [put(x, spec) for x, spec in zip(arrays, (HEADS, HEADS, P(), P(), P()), strict=True)]
    compiled = jax.jit(one).lower(*sharded).compile()
    assert not any(word + "(" in compiled.as_text() for word in COLLECTIVES)
    local = partial(moved, replace(group, kv_heads=3), pinned)
    mapped = shard_map(local, (HEADS, HEADS, P(), P(), P()), (RECORD_HEADS, HEADS))
    for found in (compiled(*sharded), mapped(*sharded)):
        equal(found, wanted)
        records, [layer, _] = found
        assert records.sharding.spec == RECORD_HEADS
        assert records.sharding.memory_kind == ("pinned_host" if pinned else "device")
        assert layer.sharding.spec == HEADS
        assert layer.sharding.memory_kind == "device"


def test_an_engine_whose_heads_are_sharded_shares_records_with_one_of_one_device(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch packs its records, and environments of newer JAX have none")
    from kvkit.adapters.jax import pages as engine_pages
    from kvkit.config import load_config

    _, ([a, b], [c, d], *_) = moving("bfloat16")
    config = load_config(chunk_tokens=8, staging="16MiB", tiers={"disk": {"url": f"file://{tmp_path}"}})
    tokens, blocks = np.arange(25), np.array([5, 0, 3, 1, 6, 2])
    with engine_pages.open_cache_for(config, [a, b], model="decoder", params={}) as cache:
        engine_pages.store(cache, tokens, put([a, b], HEADS), blocks)
        cache.flush()
        wanted, loaded = engine_pages.load(cache, tokens, [jnp.copy(c), jnp.copy(d)], blocks)
        sharded, again = engine_pages.load(cache, tokens, put([c, d], HEADS), blocks)
    assert loaded == again
    assert loaded.tokens == 24
    equal(sharded, wanted)
    assert all(layer.sharding.spec == HEADS for layer in sharded)
    np.testing.assert_array_equal(np.asarray(wanted[1])[blocks], np.asarray(b)[blocks])


def test_attention_of_sharded_heads() -> None:
    given = problem(0)
    attend = partial(attention.blend_attention, scoring=SCORING)
    sharded = [*(put(x, HEADS) for x in given[:3]), put(given.requests, P())]
    compiled = jax.jit(attend).lower(*sharded).compile()
    assert not any(word + "(" in compiled.as_text() for word in COLLECTIVES)
    mapped = shard_map(attend, (HEADS, HEADS, HEADS, P()), (HEADS, HEADS))
    for found in (compiled(*sharded), mapped(*sharded)):
        equal(found, attend(*given))
        assert all(x.sharding.spec == HEADS for x in found)


def test_attention_to_pages_of_one_head() -> None:
    """As of MLA: query heads are sharded, the pages replicated."""
    given = problem(1, heads=1, group=6)
    attend = partial(attention.blend_attention, scoring=SCORING)
    mapped = shard_map(attend, (HEADS, P(), P(), P()), (HEADS, HEADS))
    equal(mapped(*given), attend(*given))


def test_each_device_with_requests_and_a_pool_of_its_own() -> None:
    """Two halves of a batch, each with its own ids, heads sharded besides."""
    halves = [problem(seed) for seed in (2, 3)]
    attend = partial(attention.blend_attention, scoring=SCORING)
    wanted = [attend(*half) for half in halves]
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *halves)
    both, of = P("requests", "heads"), P("requests")
    mapped = shard_map(attend, (both, both, both, of), (both, both))
    equal(mapped(*joined), jax.tree.map(lambda *x: jnp.concatenate(x), *wanted))


def test_query_scores() -> None:
    q, k, v, requests = problem(4, requests=1)
    score = partial(attention.query_scores, scoring=SCORING)
    mapped = shard_map(score, (HEADS, HEADS, HEADS, P()), P("heads"))
    equal(mapped(q, k, v, requests), score(q, k, v, requests))


def test_rope_scatter() -> None:
    q, k_pages, v_pages, _ = problem(5)
    random = np.random.default_rng(5)
    k, v = (jnp.asarray(random.standard_normal((13, 6, size)), "float32") for size in (8, 5))
    k_pages, v_pages = jnp.nan_to_num(k_pages), jnp.nan_to_num(v_pages)
    turns = RowRotations(ROPE, jnp.asarray(ROPE.table(np.arange(13))))
    slots = jnp.asarray(random.permutation(48)[:13]).at[2].set(-1)

    def scatter(deviation: bool, *arrays: Any) -> Any:
        return attention.rope_scatter(*arrays, deviation=deviation)

    arrays = q, k, v, turns, slots, k_pages, v_pages
    into = HEADS, HEADS, HEADS, P(), P(), HEADS, HEADS
    mapped = shard_map(partial(scatter, False), into, attention.Scattered(HEADS, HEADS, HEADS, None))
    equal(mapped(*arrays), scatter(False, *arrays))

    def summed(*arrays: Any) -> Any:  # a token's deviation is over all heads
        made = scatter(True, *arrays)
        return attention.Scattered(*made[:3], jax.lax.psum(made.deviation, "heads"))

    mapped = shard_map(summed, into, attention.Scattered(HEADS, HEADS, HEADS, P()))
    found, wanted = mapped(*arrays), scatter(True, *arrays)
    np.testing.assert_allclose(found.deviation, wanted.deviation, rtol=1e-6)
    equal(found[:3], wanted[:3])


def test_explicit_axes_are_refused_outside_of_shard_map() -> None:
    mesh = jax.make_mesh((2, 2), ("requests", "heads"), axis_types=(AxisType.Explicit,) * 2)
    group, (layers, _, slots, *_) = moving("float16")
    layers = jax.device_put(layers, NamedSharding(mesh, HEADS))
    with pytest.raises(LaunchError, match=r"^pack: .* P\(None, 'heads', None, None\) over explicit axes"):
        pages.pack(group, layers, slots=slots)
    local = partial(pages.pack, replace(group, kv_heads=3))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(lambda p, s: local(p, slots=s), in_specs=(HEADS, P()), out_specs=RECORD_HEADS)
        found = mapped(layers, jax.device_put(slots, NamedSharding(mesh, P())))
    equal(found, pages.pack(group, moving("float16")[1][0], slots=slots))


def test_vary_marks_what_does_not_vary_yet() -> None:
    def marked(x: jax.Array, y: jax.Array) -> jax.Array:
        assert varying(x, y) == {"heads"}
        assert varying(y) == frozenset()
        assert varying(vary(y, varying(x))) == {"heads"}
        return x

    shard_map(marked, (P("heads"), P()), P("heads"))(jnp.arange(4), jnp.arange(3))
    assert varying(Requests(*(np.arange(2),) * 4)) == frozenset()
