"""Attention of JAX arrays by the Triton kernels that torch uses, called through jax-triton."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax_triton import triton_call

from kvkit.kernels.attention.jax_plan import Calls, KernelCall, Work
from kvkit.kernels.attention.triton_kernels import attend_dense, merge
from kvkit.kernels.traced import shape

ARRAYS = {attend_dense: 10, merge: 5}
"""Arrays among the first arguments of a kernel."""

PTX_VERSION = 87
"""PTX of CUDA 12.8: JAX's ptxas may refuse the newest, which Triton emits."""

_array: Any = functools.partial(shape, dtype=jnp.float32, axes=frozenset())


def blend_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, work: Work, calls: Calls
) -> tuple[jax.Array, jax.Array]:
    """Compute `kvkit.kernels.attention.jax.blend_attention`, lowered for CUDA; checks nothing.

    XLA gets PTX for the GPU at hand, or for that of the abstract mesh in use: the kernels that
    `api.blend_attention` starts for the same arrays, with the same arguments and spare programs.
    """
    count, query_heads, _ = q.shape
    channels = v_pages.shape[3]
    tables, positions, items, merges = work
    made = (
        _array(count, query_heads, channels, dtype=q.dtype),
        _array(count, query_heads),
        _array(*calls.parts, 1 if calls.merge is None else channels),
        _array(*calls.parts),
    )
    inputs = {"q": q, "k": k_pages, "v": v_pages, "tables": tables, "positions": positions, "work": items}
    o, lse, part_out, part_lse = _call(attend_dense, calls.attend, made, inputs)
    if calls.merge is None:
        return o, lse
    inputs = {"part_out": part_out, "part_lse": part_lse, "work": merges, "out": o, "lse": lse}
    # written in place; Refs in their stead fail within jax.custom_jvp under JAX 0.11
    result: tuple[jax.Array, jax.Array] = _call(merge, calls.merge, made[:2], inputs, {3: 0, 4: 1})
    return result


def trace() -> None:
    """Trace a call of each kernel, as others do; raises what JAX raises if it does not fit jax-triton."""
    attending, merging = (KernelCall((1,), _ones(*of), 4, 1) for of in ARRAYS.items())
    q, pages, *ids = (_array(*sizes) for sizes in ((1, 1, 16), (1, 1, 16, 16), (1, 1), (1,), (1, 8), (1, 4)))
    calls = Calls(attending, merging, (1, 1, 1))

    def attend(q: jax.Array, pages: jax.Array, *ids: jax.Array) -> Any:
        return blend_attention(q, pages, pages, Work(*ids), calls)

    jax.jit(attend).trace(q, pages, *ids)


def _ones(kernel: Any, arrays: int) -> tuple[tuple[str, int], ...]:
    """Return a 1 for each argument of a kernel but for its first ones, the arrays."""
    return tuple((name, 1) for name in kernel.arg_names[arrays:])


def _call(
    kernel: Any, call: KernelCall, made: Any, arrays: dict[str, Any], in_place: dict[int, int] | None = None
) -> Any:
    """Call a kernel; `in_place` maps numbers of its arguments to those of results in the same memory."""
    return triton_call(
        **arrays,
        **dict(call.arguments),
        kernel=kernel,
        name=kernel.__name__,
        out_type=made,
        grid=call.grid,
        num_warps=call.warps,
        num_stages=call.stages,
        backend_options={"ptx_version": PTX_VERSION},
        input_output_aliases=in_place,
    )
