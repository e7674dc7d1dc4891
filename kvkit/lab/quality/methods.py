"""Methods that fill in a prompt's KV, as the judges measure them: blending, and what is compared with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from kvkit.blend.plan import Selection
from kvkit.lab.files import BenchError
from kvkit.lab.quality.contexts import Context


@dataclass(frozen=True, slots=True)
class Method:
    """Method that fills in a prompt's KV.

    Args:
        selection: selection of the tokens to recompute.
        imitates: "" for blending, or another system: `bottom-right mask` (CacheBlend's code: with M rows and
            N keys, row i sees keys up to N - M + i), `block mask` (LMCache 0.5's sparse kernel: 32 selected
            rows see the keys before the block of 32 with the last row; rows of an incomplete block get
            zeros), or of `kvkit.lab.quality.peers`, `fewer documents` (`selection.ratio` of them, computed in
            full) or `ape` (no rows, other attention).
        context: what the documents were computed behind.
    """

    selection: Selection
    imitates: str = ""
    context: Context = "prefix"


_BASES: Mapping[str, Method] = {
    "default": Method(Selection()),
    "naive": Method(Selection("first_n", 0.0, 0, drift=0.0)),
    "ape": Method(Selection("first_n", 0.0, 0, drift=0.0), "ape"),
    "fewer documents": Method(Selection("first_n", first_n=0, drift=0.0), "fewer documents"),
}
_VALUES: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "covering": ("coverage", float),
    "first": ("first_n", int),
    "layers": ("layers", int),
    "fade": ("fade", int),
    "drift": ("drift", float),
}
_CONTEXTS: Mapping[str, Context] = {context: context for context in get_args(Context)}
_MASKS = ("bottom-right mask", "block mask")


def method_named(name: str) -> Method:
    """Return the method of "NAME .15": a method and its ratio, without which the default's applies.

    NAME is "default", "naive" (no rows), "ape", "fewer documents", one of
    `kvkit.blend.methods.registry.METHODS` or package.module:name. Options follow after commas: "covering .8"
    sets `Selection.coverage`, "first 8" and "drift .5" `first_n` and `drift`, which are 0 otherwise unless
    NAME is "default", "layers 4" and "fade 0" the fields of these names; "alone" and other contexts set the
    context, and "bottom-right mask" and "block mask" what is imitated.

    Raises:
        BenchError: the method, its ratio or an option is invalid.
    """
    base, *options = name.split(", ")
    try:
        method = _with_ratio(base)
        settings: dict[str, Any] = {}
        for option in options:
            field, _, value = option.partition(" ")
            if option in _CONTEXTS:
                method = replace(method, context=_CONTEXTS[option])
            elif option in _MASKS:
                method = replace(method, imitates=option)
            elif field in _VALUES:
                field, convert = _VALUES[field]
                settings[field] = convert(value)
            else:
                raise ValueError(f"{option!r} is not an option")
        return replace(method, selection=replace(method.selection, **settings))
    except ValueError as error:
        if ":" in base:
            raise BenchError(f"methods: {name!r}: {error}") from error
        known = "; ".join(_BASES)
        choices = ", ".join([*(f"{option} N" for option in _VALUES), *_CONTEXTS, *_MASKS])
        raise BenchError(
            f"methods: {name!r}: {error}. Want {known} or a blending method, with a ratio as in 'NAME .15', "
            f"also with options after commas: {choices}"
        ) from error


def _with_ratio(name: str) -> Method:
    """Return the method of a name and perhaps a ratio.

    Raises:
        ValueError: there is no such method, or the ratio is invalid.
    """
    base, _, ratio = name.rpartition(" ")
    settings: dict[str, Any] = {"ratio": float(ratio)} if re.fullmatch(r"[\d.]+", ratio) else {}
    base = base if settings else name
    if (method := _BASES.get(base)) is None:
        return Method(Selection(base, first_n=0, drift=0.0, **settings))
    return replace(method, selection=replace(method.selection, **settings))


METHODS: Mapping[str, Method] = {
    name: method_named(name)
    for name in (
        *("default .15", "default .05", "default .30", "default .15, drift 0", "naive"),
        *("first_n .15", "random .15", "question_attention .15, first 8"),
        *("k_deviation .15", "k_deviation .15, bottom-right mask", "k_deviation .15, block mask"),
        *("v_deviation .15", "cacheblend .15", "infoflow .15", "prophetkv .15", "qcfuse .15", "sparsex .15"),
        *("oracle .15", "oracle_change .15", "ape", "fewer documents .25"),
    )
}
"""Methods that are measured unless others are named; they are compared with the first."""
