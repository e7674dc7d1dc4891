"""Operations for JAX arrays work under vmap, pinned memory and several devices, and refuse gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from jax_reference import attention as plain_attention
from jax_reference import problem
from repository import SUPPORT
from run_sizes import nightly

from kvkit.format.layout import LayerGroup, Precision
from kvkit.format.rope import Rope
from kvkit.kernels.attention import jax as attention
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.pages import jax as pages

GROUP = LayerGroup((0, 1), 2, 8, 6, "float32", 4)
ROPE = Rope((1.0, 0.1))
SLOTS = np.array([[3, 0, -1, 11, 6], [9, 1, 8, 2, 10]])
LAYERS = [jnp.asarray(np.random.default_rng(i).standard_normal((3, 2, 4, 14)), "float32") for i in range(2)]


def operations() -> Iterator[tuple[str, Callable[[jax.Array], Any], jax.Array]]:
    """Every operation as a function of one array of floats."""
    q, k, v, requests = problem(0, requests=1, heads=2)
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    scoring, rows = Scoring(0.3), jnp.ones((13, 2, 8))
    turns = RowRotations(ROPE, jnp.asarray(ROPE.table(np.arange(13))))
    yield "pack", lambda x: pages.pack(GROUP, [x, x], slots=SLOTS), LAYERS[0]
    records = pages.pack(GROUP, LAYERS, slots=SLOTS)
    yield "unpack", lambda x: pages.unpack(GROUP, LAYERS, x, slots=SLOTS), records
    yield "blend_attention", lambda x: attention.blend_attention(x, k, v, requests, scoring), q
    yield "query_scores", lambda x: attention.query_scores(x, k, v, requests, scoring), q
    yield "token_deviation", lambda x: attention.token_deviation(x, rows), rows * 3

    def scatter(x: jax.Array) -> Any:
        return attention.rope_scatter(x, rows, rows[..., :5], turns, np.arange(13), k, v)[:3]

    yield "rope_scatter", scatter, q


OPERATIONS = {name: (function, x) for name, function, x in operations()}


def total(found: Any) -> jax.Array:
    return sum(jnp.nan_to_num(x).sum() for x in jax.tree.leaves(found))  # type: ignore[return-value]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_gradient_is_refused_by_name(name: str) -> None:
    function, x = OPERATIONS[name]
    forms = (function, x), (jax.jit(function), x), (jax.vmap(function), x[None])
    for form, given in forms:
        with pytest.raises(NotImplementedError, match=f"^{name} has no gradient: .*stop_gradient"):
            jax.grad(lambda y, form=form: total(form(y)))(given)
    with pytest.raises(NotImplementedError, match=f"^{name} has no gradient"):
        jax.jvp(function, (x,), (x,))


@pytest.mark.parametrize("name", OPERATIONS)
def test_beside_a_gradient_that_stops(name: str) -> None:
    """As inputs that are not differentiated."""
    function, x = OPERATIONS[name]
    slope = jax.grad(lambda y: total(function(jax.lax.stop_gradient(y))) + y.sum())(x)
    np.testing.assert_array_equal(slope, jnp.ones_like(x))


@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap(name: str) -> None:
    function, x = OPERATIONS[name]
    several = jnp.stack([x, x * 0.5 + 1, -x])
    found = jax.vmap(function)(several)
    for i, one in enumerate(several):
        for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(function(one)), strict=True):
            np.testing.assert_allclose(mine[i], wanted, atol=2e-6)


def test_vmap_over_ids_and_requests() -> None:
    several = jnp.asarray([SLOTS, SLOTS[::-1], SLOTS.T.reshape(2, 5)])
    found = jax.vmap(lambda s: pages.pack(GROUP, LAYERS, slots=s))(several)
    for mine, slots in zip(found, several, strict=True):
        np.testing.assert_array_equal(mine, pages.pack(GROUP, LAYERS, slots=slots))
    problems = [problem(seed) for seed in range(3)]
    attend = partial(attention.blend_attention, scoring=Scoring(0.3, 7))
    o, lse = jax.vmap(attend)(*jax.tree.map(lambda *x: jnp.stack(x), *problems))
    for i, given in enumerate(problems):
        wanted = plain_attention(given, Scoring(0.3, 7))
        np.testing.assert_allclose(o[i], wanted[0], atol=2e-5)
        np.testing.assert_allclose(lse[i], wanted[1], atol=2e-5)


@pytest.mark.parametrize(
    ("scoring", "dtype"),
    [(Scoring(0.0, 6), "bfloat16"), *nightly((Scoring(0.35), "float32"))],
)
def test_attention_is_what_it_means(scoring: Scoring, dtype: str) -> None:
    given = problem(7, requests=3, heads=2, m=29, dtype=dtype)
    wanted = plain_attention(given, scoring)
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    o, lse = attention.blend_attention(*given, scoring=scoring)
    np.testing.assert_allclose(np.asarray(o, np.float64), wanted[0], atol=tolerance)
    np.testing.assert_allclose(lse, wanted[1], atol=tolerance)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", [None, "int8"])
def test_records_in_pinned_memory(precision: Precision | None, compiled: bool) -> None:
    """The same records, kept rows included, and the same pages from them."""
    group = replace(GROUP, dtype="float16", precision=precision)
    layers = [x.astype(jnp.float16) for x in LAYERS]
    jit: Callable[[Any], Any] = jax.jit if compiled else lambda function: function
    pack = partial(pages.pack, group, slots=SLOTS)
    kept = pack(layers) * 0 + 3
    wanted = pack(layers, records=kept)
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    found = jit(partial(pack, pinned=True))(layers, records=jax.device_put(kept, host))
    assert found.sharding.memory_kind == "pinned_host"
    assert wanted.sharding.memory_kind == "device"
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8))
    unpack = jit(partial(pages.unpack, group, slots=SLOTS))
    for mine, other in zip(unpack(layers, found), unpack(layers, wanted), strict=True):
        assert mine.sharding.memory_kind == "device"
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_pinned_memory_is_named_where_functions_are_lowered(platform: str) -> None:
    records = pages.pack(GROUP, LAYERS, slots=SLOTS, pinned=True)

    def turn(layers: pages.JaxPages, records: jax.Array) -> jax.Array:
        filled = pages.unpack(GROUP, layers, records, slots=SLOTS)
        return pages.pack(GROUP, filled, slots=SLOTS, pinned=True)

    text = jax.jit(turn).trace(LAYERS, records).lower(lowering_platforms=(platform,)).as_text()
    [main] = [line for line in text.splitlines() if "@main(" in line]
    arguments, results = main.split(" -> ")
    assert arguments.count('mhlo.memory_kind = "pinned_host"') == 1
    assert 'mhlo.memory_kind = "pinned_host"' in results
    placed = [line for line in text.splitlines() if "@annotate_device_placement" in line]
    assert ['"device"' in line for line in placed] == [True, False]
    assert '"pinned_host"' in placed[1]


@pytest.mark.nightly
def test_over_four_devices() -> None:
    """In a process of its own: devices are counted when JAX starts."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(SUPPORT / "jax_mesh_program.py")],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_jax_half_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None;"
        "import kvkit.kernels.pages.jax, kvkit.kernels.attention.jax"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
