"""Blending methods by name: kvkit's own, a file each, and other packages' as "package.module:name"."""

from __future__ import annotations

from collections.abc import Mapping

from kvkit.blend.methods import (
    cacheblend,
    cacheclip,
    deviation,
    first_n,
    infoflow,
    oracle,
    prophetkv,
    qcfuse,
    question_attention,
    random_rows,
    sparsex,
)
from kvkit.blend.methods.method import BlendMethod, NeedsQuestion
from kvkit.settings import imported

METHODS: Mapping[str, BlendMethod] = {
    "prophetkv": prophetkv.METHOD,
    "question_attention": question_attention.METHOD,
    "k_deviation": deviation.BY_K,
    "v_deviation": deviation.BY_V,
    "first_n": first_n.METHOD,
    "cacheblend": cacheblend.METHOD,
    "infoflow": infoflow.METHOD,
    "qcfuse": qcfuse.METHOD,
    "sparsex": sparsex.METHOD,
    "cacheclip": cacheclip.METHOD,
    "random": random_rows.METHOD,
    "oracle": oracle.METHOD,
    "oracle_change": oracle.CHANGE,
}


def method_named(name: str) -> BlendMethod:
    """Return the method of this name; import it if it is in another package.

    Raises:
        ValueError: there is no such method, or the object of this name is no `BlendMethod`.
    """
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise ValueError(f"method={name!r}: want one of {', '.join(METHODS)}, or package.module:name")
    try:
        method = imported(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"method={name!r}: {error}") from error
    if not isinstance(method, BlendMethod):
        raise ValueError(f"method={name!r}: is a {type(method).__name__}, want a BlendMethod")
    return method


def served(name: str) -> str:
    """Return `name` if an engine can serve its method, which needs the question's attention or nothing.

    Raises:
        ValueError: there is no such method, or it needs something else.
    """
    if _is_served(method := method_named(name)):
        return name
    choices = ", ".join(known for known, other in METHODS.items() if _is_served(other))
    raise ValueError(f"method={name!r}: needs {method.needs}, want one of {choices}")


def _is_served(method: BlendMethod) -> bool:
    needs = method.needs
    return needs is None or (
        isinstance(needs, NeedsQuestion)
        and needs.heads in ("max", "mean")
        and needs.anchors == 1
        and not needs.dense
    )
