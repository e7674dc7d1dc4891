"""Shared parts of the operations for JAX arrays: compilation, and the mesh axes they vary over."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from kvkit.kernels.checks import LaunchError

T = TypeVar("T")


def operation(*static: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles by `jax.jit` and refuses gradients and explicit sharding.

    The compiled function raises NotImplementedError where its gradient is taken. It raises LaunchError if an
    array is sharded over explicit axes of a mesh: the sharding of a gather by block would be unknown.

    Args:
        static: names of the parameters that are Python values.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        name = function.__name__.removeprefix("_")

        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            for x in jax.tree.leaves(args):
                spec = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else ()
                if any(spec):
                    raise LaunchError(
                        f"{name}: an argument is sharded as {spec} over explicit axes of a mesh: "
                        "call it within jax.shard_map, or make the mesh with AxisType.Auto"
                    )
            return function(*args)

        positions = [i for i, param in enumerate(inspect.signature(function).parameters) if param in static]
        differentiated = jax.custom_jvp(checked, nondiff_argnums=positions)

        @differentiated.defjvp
        def refuse(*_: Any) -> Any:
            raise NotImplementedError(
                f"{name} has no gradient: it serves a cache. Put its arguments through jax.lax.stop_gradient"
            )

        return jax.jit(differentiated, static_argnames=static)

    return decorate


def varying(*arrays: Any) -> frozenset[str]:
    """Return the mesh axes that one of these arrays varies over in `jax.shard_map`; none elsewhere."""
    types = (jax.typeof(x) for x in jax.tree.leaves(arrays))
    return frozenset().union(*(kind.manual_axis_type.varying for kind in types))


def vary(values: T, axes: frozenset[str]) -> T:
    """Return `values`, marked as varying over `axes`: a loop, for example, carries values of one type."""
    marked: T = jax.tree.map(lambda x: lax.pcast(x, tuple(sorted(axes - varying(x))), to="varying"), values)
    return marked


def shape(*sizes: int, dtype: jax.typing.DTypeLike, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """Return the type of an array that a kernel returns, varying over `axes`."""
    varies = jax.sharding.ManualAxisType(varying=axes)  # type: ignore[no-untyped-call]  # JAX's
    return jax.ShapeDtypeStruct(sizes, dtype, manual_axis_type=varies)  # type: ignore[no-untyped-call]
