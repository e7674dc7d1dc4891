"""Pallas attention for TPUs equals the reference in Pallas' interpreter, and lowers for a TPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jax_reference import EMULATED, Problem, attention, problem
from run_sizes import nightly

from kvkit.kernels.attention import jax as functions
from kvkit.kernels.attention import pallas_tpu
from kvkit.kernels.attention.layer import Requests, Scoring

TPU_CALL = "tpu_custom_call"


@pytest.mark.parametrize(
    ("shape", "scoring"),
    [
        ({"heads": 2, "blocks": (16, 11), "m": 29}, Scoring(0.35, 40, 2.0)),  # several pages a step
        *nightly(
            ({}, Scoring(0.35)),
            ({"heads": 2, "blocks": (16, 11), "m": 90}, Scoring(0.0)),  # several tiles of rows
            ({"heads": 1, "group": 71, "blocks": (32, 5)}, Scoring(0.35, 6)),
            ({"heads": 1, "group": 16, "sizes": (72, 64), "blocks": (64, 3), "m": 5}, Scoring(0.2)),
            ({"dtype": "bfloat16", "blocks": (48, 3)}, Scoring(0.35)),
        ),
    ],
)
def test_it_is_what_attention_means(shape: dict[str, Any], scoring: Scoring) -> None:
    """Keys that are nobody's, and values beyond a length, are NaN."""
    tolerance = 3e-2 if "dtype" in shape else 3e-5
    attend = jax.jit(
        partial(pallas_tpu.blend_attention, scoring=scoring, interpret=True), compiler_options=EMULATED
    )
    given = problem(3, requests=3, **shape)
    o, lse = attend(*given)
    assert o.dtype == given.q.dtype
    wanted = attention(given, scoring)
    np.testing.assert_allclose(np.asarray(o, np.float64), wanted[0], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, wanted[1], atol=tolerance, rtol=tolerance)


def test_hostile_tables_and_lengths_read_nothing_outside() -> None:
    given = problem(0, requests=1, heads=1)
    tables, positions, starts, _ = given.requests
    k, v = (jnp.nan_to_num(x) for x in (given.k, given.v))
    attend = jax.jit(
        partial(pallas_tpu.blend_attention, given.q, k, v, scoring=Scoring(0.3), interpret=True),
        compiler_options=EMULATED,
    )
    hostile = tables.at[0, :2].set(jnp.array([-2, 2**31 - 1]))
    nearest = tables.at[0, :2].set(jnp.array([0, len(k) - 1]))
    found = attend(requests=Requests(hostile, positions, starts, jnp.array([2**31 - 1])))
    wanted = attend(requests=Requests(nearest, positions, starts, jnp.array([tables.size * k.shape[2]])))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def specs(dtype: str, size: int, v_size: int, group: int, n: int, width: int = 100) -> Problem:
    spec = jax.ShapeDtypeStruct
    arrays = (spec(s, dtype) for s in ((200, 2 * group, size), (512, 2, n, size), (512, 2, n, v_size)))
    ids = (spec(s, jnp.int32) for s in ((3, width), (200,), (4,), (3,)))
    return Problem(*arrays, Requests(*ids))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        (specs("bfloat16", 128, 128, 4, 16), True),
        (specs("float32", 80, 96, 7, 13), True),
        (specs("bfloat16", 576, 512, 64, 64), True),
        (specs("float16", 128, 128, 4, 16), False),  # for which a TPU has no products
        (specs("bfloat16", 128, 128, 4, 16, 50_000), False),  # its tables are too large
    ],
)
def test_is_lowered_without_a_tpu(given: Problem, kernel: bool) -> None:
    attend = jax.jit(partial(functions.blend_attention, scoring=Scoring(0.1, 77, 30.0)))
    exported = jax.export.export(attend, platforms=["tpu"])(*given)
    assert (TPU_CALL in exported.mlir_module()) == kernel


def test_is_lowered_in_shard_map() -> None:
    mesh = AbstractMesh((2,), ("heads",), (AxisType.Auto,))
    heads = P(None, "heads")
    attend = partial(functions.blend_attention, scoring=Scoring(0.1))
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, heads, P()), out_specs=(heads, heads))
    given = specs("bfloat16", 128, 128, 4, 16)
    text = jax.jit(mapped).trace(*given).lower(lowering_platforms=("tpu",)).as_text()
    [call] = [line for line in text.splitlines() if TPU_CALL in line]
    assert "tensor<512x1x16x128xbf16>" in call  # one of two heads


def test_a_mapped_call_is_lowered() -> None:
    """Of several q, and of several requests, too, which the kernel has in scalar memory."""
    given = specs("bfloat16", 128, 128, 4, 16)
    attend = partial(functions.blend_attention, scoring=Scoring(0.1))
    several = [jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), x) for x in given]
    for axes, arguments in (((0, None, None, None), (several[0], *given[1:])), ((0, 0, 0, 0), several)):
        mapped = jax.jit(jax.vmap(attend, axes))
        text = mapped.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
        assert TPU_CALL in text
